"""pipelined where every fetch costs much, whatever it brings: it brings several layers then."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from cacheflow import policies
from cacheflow.costs.base import Costs, ModelShape
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.op import FETCH
from cacheflow.plane import Plane
from cacheflow.policies.climb import Climb
from cacheflow.policies.early import LOST, EarlyLoads
from cacheflow.policies.pipelined import Pipelined
from cacheflow.policies.stairs import WORTH, Planner
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from models.config import ModelConfig
from tests.cacheflow.optimum import lognormal
from tests.cacheflow.strategies import Affine

LLAMA = ModelShape.of(ModelConfig.preset("llama-3.1-8b"), 2)
CHUNK, STAGING = 512, 512 * 32
OTHERS = ("layerwise-load", "load", "token", "layer", "two-pointer", "staircase")
FETCH_COSTS = [("fetch_seconds", 1e-4), ("fetch_seconds", 1e-3), ("interference_per_fetch", 1e-3)]


def roofline(gbps: float, **options: float) -> Roofline:
    return Roofline(LLAMA, device("H100"), bandwidth=gbps * GBPS, **options)


def request(prefix: int, suffix: int = 64, holes: Sequence[int] = (), chunk: int = CHUNK) -> Request:
    return Request.of("a", prefix=prefix, suffix=suffix, chunk=chunk, layers=LLAMA.layers, holes=holes)


def simulated(name: str, costs: Costs, batch: Sequence[Request], staging: int = STAGING) -> Simulation:
    return Simulation(policies.find(name)(costs, staging_cells=staging), batch)


@pytest.mark.parametrize(("cost", "seconds"), [*FETCH_COSTS, ("fetch_seconds", 3e-3), ("latency", 5e-3)])
@pytest.mark.parametrize("gbps", [10, 40, 80])
def test_no_other_policy_is_faster_where_fetches_cost_much(cost, seconds, gbps):
    costs = roofline(gbps, **{cost: seconds})
    for prefix in (1024, 2048, 4096, 16384):
        one = [request(prefix)]
        best = min(simulated(name, costs, one).ttft["a"] for name in OTHERS)
        assert simulated("pipelined", costs, one).ttft["a"] <= 1.025 * best


@pytest.mark.parametrize("gbps", [10, 80])
def test_nor_for_a_batch(gbps):
    costs = roofline(gbps, fetch_seconds=1e-3)
    for seed in range(2):
        batch = sorted(lognormal(8, seed, 64), key=lambda one: one.prefix)
        ours = statistics.fmean(simulated("pipelined", costs, batch).ttft.values())
        assert ours <= min(statistics.fmean(simulated(name, costs, batch).ttft.values()) for name in OTHERS)


@pytest.mark.parametrize(
    ("cost", "seconds", "prefix"), [*((*cost, 1024) for cost in FETCH_COSTS), ("fetch_seconds", 1e-3, 4096)]
)
def test_several_layers_are_sooner_than_one_each(monkeypatch, cost, seconds, prefix):
    costs, one = roofline(80, **{cost: seconds}), [request(prefix)]
    together = simulated("pipelined", costs, one)
    monkeypatch.setattr(Planner, "_layers_together", lambda self: 1)
    apart = simulated("pipelined", costs, one)
    assert together.ttft["a"] < 0.99 * apart.ttft["a"]
    fetches = [[span.op for span in run.timeline.spans if span.op.kind == FETCH] for run in (together, apart)]
    assert len(fetches[0]) < len(fetches[1])
    assert all(op.tokens * len(op.layers) <= STAGING for op in fetches[0])
    assert any(len(op.layers) > 1 and op.tokens > CHUNK for op in fetches[0])


@pytest.mark.parametrize("partly", [0, 1, 13, 31])
@pytest.mark.parametrize(("columns", "row"), [(0, True), (0, False), (1, True), (3, False)])
@pytest.mark.parametrize("gbps", [5, 40, 80])
@pytest.mark.parametrize(
    ("cost", "seconds", "holes"),
    [*((*cost, ()) for cost in FETCH_COSTS), ("fetch_seconds", 3e-3, (2, 6)), ("latency", 5e-3, ())],
)
def test_the_planner_predicts_what_the_simulator_runs(monkeypatch, partly, columns, row, gbps, cost, seconds, holes):
    """About: how far columns go ahead of a suffix that waits is an estimate; what the link does is none."""
    costs, one = roofline(gbps, **{cost: seconds}), request(4096, 100, holes)
    planner = Planner(Plane(one), costs, 8192, STAGING)
    stairs = planner.evaluate(columns, partly, planner.count if row else 0)
    monkeypatch.setattr(Planner, "best", lambda self, *arguments: stairs)
    for name in ("climb.Climb.relieve", "climb.Climb.rebalance", "early.EarlyLoads.next_fetch"):
        monkeypatch.setattr(f"cacheflow.policies.{name}", lambda *arguments: None)
    monkeypatch.setattr("cacheflow.policies.climb.STEEP", 0)
    monkeypatch.setattr("cacheflow.policies.launches.JOINED", 0)
    simulation = simulated("pipelined", costs, [one])
    assert 0.94 * stairs.seconds <= simulation.ttft["a"] <= 1.09 * stairs.seconds
    fetches = [span for span in simulation.timeline.spans if span.op.kind == FETCH]
    if cost == "latency":  # what it takes of the link is between fetches
        link = fetches[-1].end - fetches[0].start
        assert link == pytest.approx(stairs.link, rel=0.1)
    else:
        assert sum(span.seconds for span in fetches) == pytest.approx(stairs.link, rel=0.01)


@pytest.mark.parametrize("gbps", [10, 40, 80])
def test_fetches_bring_no_more_layers_than_is_worth_it(gbps):
    for prefix in (1024, 4096, 32768):
        for cost, seconds in (("fetch_seconds", 10e-6), ("interference_per_fetch", 3e-4), ("fetch_seconds", 1e-3)):
            planner = Planner(Plane(request(prefix)), roofline(gbps, **{cost: seconds}), 8192, STAGING)
            found = {}
            together = planner.together
            for planner._together in range(1, LLAMA.layers + 1):
                found[planner._together] = planner.best(planner.count).seconds
            assert found[together] <= 1.05 * min(found.values())
            assert together == 1 or found[together] < (1 - WORTH / 2) * found[1]
            assert together == 1 or seconds > 10e-6 or prefix == 1024


@pytest.mark.parametrize("layers", [1, 3, 8])
def test_one_column_fits_the_staging_buffer_with_all_layers_of_a_fetch(layers):
    costs = roofline(80, fetch_seconds=3e-3)
    simulation = simulated("pipelined", costs, [request(4096)], staging=layers * CHUNK)
    fetches = [span.op for span in simulation.timeline.spans if span.op.kind == FETCH]
    assert max(op.tokens * len(op.layers) for op in fetches) <= layers * CHUNK
    assert max(len(op.layers) for op in fetches) == layers


@pytest.mark.parametrize("seconds", [0.0, 3e-3])
@pytest.mark.parametrize("staging", [1024, 2048, 4096, 16384])
def test_columns_of_unequal_width_keep_to_the_staging_buffer(seconds, staging):
    widths = [64] * 32 + [512] * 16 + [64]
    boundaries = tuple(accumulate(widths, initial=0))
    one = Request("a", boundaries, (True,) * (len(widths) - 1), (None,) * LLAMA.layers)
    simulation = simulated("pipelined", roofline(40, fetch_seconds=seconds), [one], staging=staging)
    fetches = [span.op for span in simulation.timeline.spans if span.op.kind == FETCH]
    assert max(op.tokens * len(op.layers) for op in fetches) <= staging


def test_launches_that_take_no_longer_for_more_columns_are_planned_with():
    costs = Affine((None,) * 8, project=0, advance=0, pair=0, loss=0.1, bandwidth=float("inf"), fetch_seconds=1.0)
    one = Request.of("a", prefix=16, suffix=30, chunk=4, layers=8)
    planner = Planner(Plane(one), costs, 8192, 64)
    assert planner._launch(planner.count, planner.count, False) < planner._launch(0, 0, False)
    assert simulated("pipelined", costs, [one], staging=64).ttft["a"] <= planner.best(planner.count).seconds


def test_every_split_is_looked_at_where_whole_fetches_are_more_or_fewer():
    costs, one = roofline(800, fetch_seconds=10e-3), [request(2048, 1)]
    best = min(simulated(name, costs, one).ttft["a"] for name in OTHERS)
    assert simulated("pipelined", costs, one).ttft["a"] <= 1.02 * best


def test_layers_are_grouped_anew_where_fetches_cost_something_else_than_before(monkeypatch):
    asked = []
    monkeypatch.setattr(Planner, "_layers_together", lambda self: asked.append(self.costs.bandwidth) or 1)
    planner = Planner(Plane(request(4096)), roofline(40, fetch_seconds=1e-3), 8192, STAGING)
    before = planner.costs.bandwidth
    for factor in (1.0, 0.99, 1.02, 0.9, 0.9, 1.0):
        planner.costs.bandwidth = factor * before
        assert planner.together == 1
    assert asked == [before, 0.9 * before, before]


def test_nothing_is_loaded_early_once_a_fetch_brings_several_layers(monkeypatch):
    """Learned costs may say so after a plan was made."""
    early, ops = EarlyLoads.next_fetch, []

    def once(self, now):
        if (op := early(self, now)) is not None:
            self._climb.planner._together = 4
            ops.append(op)
        return op

    monkeypatch.setattr(EarlyLoads, "next_fetch", once)
    simulated("pipelined", roofline(40), [request(16384)])
    assert len(ops) == 1


def test_the_suffix_waits_for_what_is_to_be_loaded():
    """In the first layer everything is projected, so that it waits for nothing; above it for the columns that are not
    computed."""
    policy = Pipelined(roofline(40), staging_cells=STAGING)
    policy.add(Plane(request(16384)))
    assert policy.next("compute", 0.0)
    [climb] = policy._climbs.values()
    assert climb.tops is not None and min(climb.tops) == 1
    climb.plane.height[-1] = 0
    assert climb.waits_until(0.0) == float("inf")
    climb.plane.height[-1] = 2
    cells = sum(climb.plane.request.width(c) for c, top in enumerate(climb.tops) if top <= 2)
    assert climb.waits_until(0.0) == pytest.approx(policy.costs.load_seconds(cells))


def test_a_band_has_the_columns_that_are_loadable_at_all_of_its_layers():
    plane, policy = Plane(request(2048)), Pipelined(roofline(40), staging_cells=STAGING)
    policy.add(plane)
    plane.start(FETCH, range(5, 6), [plane.part(1, 2)])
    op = policy.fetch_band(plane, range(4, 7), range(plane.prefix_columns))
    assert op is not None and (op.layers, op.parts) == (range(4, 7), plane.parts([0, 2, 3]))
    assert policy.fetch_band(plane, range(5, 6), [1]) is None


@pytest.mark.parametrize(("cost", "seconds"), [("fetch_seconds", 1e-3), ("fetch_seconds", 1e-5), ("latency", 5e-3)])
def test_what_is_left_of_a_plan_has_the_fixed_costs_of_its_fetches(cost, seconds):
    policy = Pipelined(roofline(40, **{cost: seconds}), staging_cells=STAGING)
    policy.add(Plane(request(4096)))
    policy.next("compute", 0.0)
    [climb] = policy._climbs.values()
    stairs, sizes = climb.stairs, list[int]()
    _, link = climb.left(0.0)
    assert stairs is not None and link == pytest.approx(stairs.link, rel=0.04)
    while (op := policy.next("link", 0.0)) is not None:
        sizes.append(op.tokens * len(op.layers))
    assert min(climb.row, STAGING) == pytest.approx(max(sizes), rel=0.35)


@pytest.mark.parametrize(("gbps", "prefix"), [(40, 32768), (80, 32768), (80, 8192)])
@pytest.mark.parametrize("seconds", [1e-4, 1e-3, 3e-3])
def test_early_loads_lose_little_where_fetches_cost_much(monkeypatch, gbps, prefix, seconds):
    """Rows of 32K tokens take two fetches."""
    costs, one = roofline(gbps, fetch_seconds=seconds), [request(prefix)]
    early = simulated("pipelined", costs, one).ttft["a"]
    monkeypatch.setattr(EarlyLoads, "next_fetch", lambda self, now: None)
    assert early <= (1 + 2 * LOST) * simulated("pipelined", costs, one).ttft["a"]


@pytest.mark.parametrize(
    ("gbps", "prefix", "cost"),
    [(10, 1024, "interference_per_fetch"), (10, 2048, "fetch_seconds"), (10, 4096, "latency")],
)
@pytest.mark.parametrize("seconds", [1e-3, 3e-3])
def test_an_idle_link_takes_over_nothing_that_computing_is_sooner(monkeypatch, gbps, prefix, cost, seconds):
    """A load that holds compute up by more than it saves, or of a cell that compute is about to reach: columns may be
    far ahead of the suffix, which waits for a fetch of most layers."""
    costs, one = roofline(gbps, **{cost: seconds}), [request(prefix)]
    ours = simulated("pipelined", costs, one).ttft["a"]
    monkeypatch.setattr(Climb, "relieve", lambda self, now: None)
    assert ours <= 1.02 * simulated("pipelined", costs, one).ttft["a"]


def test_an_idle_link_takes_over_little_where_copies_are_behind(monkeypatch):
    costs, one = roofline(80, copy_bandwidth=5e9), [request(2048)]
    ours = simulated("pipelined", costs, one).ttft["a"]
    monkeypatch.setattr(Climb, "relieve", lambda self, now: None)
    assert ours <= 1.12 * simulated("pipelined", costs, one).ttft["a"]


def test_layers_that_need_different_columns_are_not_loaded_together():
    """A layer with a window needs the last columns only."""
    most = {}
    for windows in ((None,) * 8, (128,) * 8, (128, None) * 4):
        one = replace(request(2048, chunk=128), windows=windows)
        costs = Roofline(replace(LLAMA, layers=8, windows=windows), device("H100"), bandwidth=1e10, fetch_seconds=3e-3)
        spans = simulated("pipelined", costs, [one], staging=1 << 30).timeline.spans
        most[windows[:2]] = max(len(span.op.layers) for span in spans if span.op.kind == FETCH)
    assert most[None, None] > 1 and most[128, 128] > 1
    assert most[128, None] == 1
