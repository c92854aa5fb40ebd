"""pipelined: near the bound for one request, first things first for a batch, and what it does when it was wrong."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import accumulate, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow import bounds, policies
from cacheflow.costs.base import Costs, ModelShape
from cacheflow.costs.learned import Learned
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.op import COMPUTE, FETCH, Op, Part
from cacheflow.plane import Plane
from cacheflow.policies.batch import plan_batch
from cacheflow.policies.climb import STEEP, Climb
from cacheflow.policies.launches import JOINED
from cacheflow.policies.pipelined import OVERTAKEN, Pipelined, _rank
from cacheflow.policies.stairs import Planner
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from models.config import ModelConfig
from tests.cacheflow import legality
from tests.cacheflow.optimum import lognormal
from tests.cacheflow.strategies import Affine

LLAMA = ModelShape.of(ModelConfig.preset("llama-3.1-8b"), 2)
CHUNK, STAGING, FETCH_SECONDS = 512, 512 * 32, 10e-6


def roofline(name: str, gbps: float, **options: float) -> Roofline:
    return Roofline(LLAMA, device(name), bandwidth=gbps * GBPS, fetch_seconds=FETCH_SECONDS, **options)


def request(id: str, prefix: int, suffix: int) -> Request:
    return Request.of(id, prefix=prefix, suffix=suffix, chunk=CHUNK, layers=LLAMA.layers)


def ttft(name: str, estimates: Costs, batch: list[Request], truth: Costs | None = None) -> dict[str, float]:
    return Simulation(policies.find(name)(estimates, staging_cells=STAGING), batch, costs=truth).ttft


@pytest.mark.parametrize("name", ["A100-40G", "H100"])
def test_one_request_is_near_the_bound_and_behind_no_other_policy(name):
    ratios, behind = [], []
    for gbps in (10, 40, 80):
        for prefix in (4096, 16384, 65536):
            for suffix in (64, 512, 2048):
                costs, one = roofline(name, gbps), [request("a", prefix, suffix)]
                ours = ttft("pipelined", costs, one)["a"]
                ratios.append(ours / bounds.lower(one, costs))
                others = [p for p in policies.available() if p not in ("pipelined", "recompute", "load")]
                if prefix < 65536:
                    behind.append(ours / min(ttft(p, costs, one)["a"] for p in others))
    assert statistics.median(ratios) <= 1.01
    assert max(ratios) <= 1.03
    assert max(behind) <= 1.01


@pytest.mark.parametrize("partly", [0, 1, 13, 30, 31])
@pytest.mark.parametrize("columns", [0, 3, 8])
@pytest.mark.parametrize("row", [True, False])
@pytest.mark.parametrize("gbps", [5, 40, 400])
@pytest.mark.parametrize(("taken", "holes"), [(0.0, ()), (200e-6, ()), (0.0, (2, 6)), (0.0, (0, 7))])
def test_the_planner_predicts_what_the_simulator_runs(monkeypatch, partly, columns, row, gbps, taken, holes):
    """Whatever stairs it is made to take, layer by layer; only launches that would wait are cut in two where nothing
    else runs."""
    monkeypatch.setattr(Planner, "_layers_together", lambda self: 1)  # test_bands.py has others
    costs = roofline("H100", gbps, interference_per_fetch=taken)
    one = Request.of("a", prefix=4096, suffix=100, chunk=CHUNK, layers=LLAMA.layers, holes=holes)
    planner = Planner(Plane(one), costs, 8192, STAGING)
    stairs = planner.evaluate(columns, partly if columns < 8 else 0, planner.count if row else 0)
    monkeypatch.setattr(Planner, "best", lambda self, *arguments: stairs)
    for name in ("climb.Climb.relieve", "climb.Climb.rebalance", "early.EarlyLoads.next_fetch"):
        monkeypatch.setattr(f"cacheflow.policies.{name}", lambda *arguments: None)
    monkeypatch.setattr("cacheflow.policies.climb.STEEP", 0)
    monkeypatch.setattr("cacheflow.policies.launches.JOINED", 0)
    simulation = Simulation(Pipelined(costs, staging_cells=STAGING), [one])
    assert simulation.ttft["a"] <= stairs.seconds * (1 + 1e-9)
    assert simulation.ttft["a"] >= 0.97 * stairs.seconds
    link = sum(span.seconds for span in simulation.timeline.spans if span.op.kind == FETCH)
    assert link == pytest.approx(stairs.link)


def test_bisection_finds_the_best_stairs():
    for gbps in (5, 10, 40, 80):
        for prefix, suffix in ((2048, 64), (4096, 700)):
            planner = Planner(Plane(request("a", prefix, suffix)), roofline("A100-40G", gbps), 8192, STAGING)
            steps = LLAMA.layers - 1
            every = [
                planner.evaluate(*divmod(u, steps), planner.count).seconds for u in range(planner.count * steps + 1)
            ]
            assert planner.best(planner.count).seconds <= min(every) * 1.002


@pytest.mark.parametrize(("gbps", "suffix"), [(10, 64), (80, 512)])
def test_a_batch_is_served_one_after_another(gbps, suffix):
    costs = roofline("H100", gbps)
    means = []
    for seed in range(3):
        batch = lognormal(8, seed, suffix)
        ours, theirs = ttft("pipelined", costs, batch), ttft("two-pointer", costs, batch)
        means.append(statistics.fmean(ours.values()) / statistics.fmean(theirs.values()))
        in_order = sorted(batch, key=lambda one: one.prefix)
        best = min(statistics.fmean(ttft(p, costs, in_order).values()) for p in ("token", "layer", "layerwise-load"))
        assert statistics.fmean(ours.values()) <= 0.97 * best
        assert list(sorted(ours, key=ours.__getitem__)) == [one.id for one in in_order]
    assert statistics.fmean(means) <= 0.55


@pytest.mark.parametrize("gbps", [10, 40, 80])
def test_a_batch_plan_is_better_than_each_request_for_itself(gbps):
    costs = roofline("H100", gbps)
    for seed in range(4):
        in_order = sorted(lognormal(8, seed, 64), key=lambda one: one.prefix)
        planners = [Planner(Plane(one), costs, 8192, STAGING) for one in in_order]
        chosen = plan_batch(planners, [planner.count for planner in planners], 0.0, 0.0, Pipelined.objective)
        alone = [planner.best(planner.count) for planner in planners]
        assert _mean(chosen) * _last(chosen) < 0.9995 * _mean(alone) * _last(alone)


def _ends(stairs) -> list[float]:
    computed, loaded, ends = 0.0, 0.0, []
    for one in stairs:
        computed, loaded = computed + one.compute, loaded + one.link
        ends.append(max(computed, loaded))
    return ends


def _mean(stairs) -> float:
    return statistics.fmean(_ends(stairs))


def _last(stairs) -> float:
    return _ends(stairs)[-1]


class Changing(Roofline):
    """A link that has another speed after some bytes."""

    def __init__(self, *arguments, after: int, factor: float, **options) -> None:
        super().__init__(*arguments, **options)
        self.after, self.factor, self.moved = after, factor, 0

    def seconds(self, op: Op) -> float:
        seconds = super().seconds(op)
        if op.kind != FETCH:
            return seconds
        self.moved += op.tokens * len(op.layers) * self.shape.cell_bytes
        return seconds * (self.factor if self.moved > self.after else 1.0)


@pytest.mark.parametrize("factor", [4.0, 0.25])
@pytest.mark.parametrize("prefix", [8192, 32768])
def test_a_link_that_changes_half_way_is_followed(monkeypatch, factor, prefix):
    """Better than to go on as planned."""
    known = roofline("H100", 40)
    one = request("a", prefix, 64)
    stairs = Planner(Plane(one), known, 8192, STAGING).best(one.prefix)
    half = int(stairs.link / 2 * known.bandwidth)

    def run() -> float:
        truth = Changing(
            LLAMA, device("H100"), bandwidth=40 * GBPS, fetch_seconds=FETCH_SECONDS, after=half, factor=factor
        )
        return ttft("pipelined", known, [one], truth)["a"]

    adapted = run()
    for name in ("relieve", "rebalance"):
        monkeypatch.setattr(f"cacheflow.policies.climb.Climb.{name}", lambda *arguments: None)
    assert adapted < 0.99 * run()


SINGLE = [(name, gbps, prefix) for name in ("A100-40G", "H100") for gbps in (10, 40) for prefix in (8192, 65536)]


@pytest.mark.parametrize("begin", [0.4, 0.75, 1.0])
@pytest.mark.parametrize(("name", "gbps", "prefix"), SINGLE)
def test_a_slope_and_early_loads_cost_a_link_that_stays_as_it_is_next_to_nothing(
    monkeypatch, name, gbps, prefix, begin
):
    """begin: of the prefix, what holes begin behind."""
    costs, chunks = roofline(name, gbps), prefix // CHUNK
    holes = range(round(begin * chunks), chunks)
    one = [Request.of("a", prefix=prefix, suffix=64, chunk=CHUNK, layers=LLAMA.layers, holes=holes)]
    sloped = ttft("pipelined", costs, one)["a"]
    monkeypatch.setattr("cacheflow.policies.climb.STEEP", 0)
    monkeypatch.setattr("cacheflow.policies.early.EarlyLoads.next_fetch", lambda self, now: None)
    assert sloped <= 1.0045 * ttft("pipelined", costs, one)["a"]


@pytest.mark.parametrize(("name", "gbps", "prefix"), SINGLE)
def test_a_slope_is_even_around_the_plan(monkeypatch, name, gbps, prefix):
    def follow(steep: float) -> list[int]:
        monkeypatch.setattr("cacheflow.policies.climb.STEEP", steep)
        policy = Pipelined(roofline(name, gbps), staging_cells=STAGING)
        policy.add(Plane(request("a", prefix, 64)))
        policy.next("link", 0.0)
        return policy._climbs["a"].tops

    level, sloped = follow(0), follow(STEEP)
    assert sloped == sorted(sloped, reverse=True) and max(sloped) == LLAMA.layers and min(sloped) == min(level)
    planned, moved = (sum(top - 1 for top in tops) for tops in (level, sloped))
    assert 0.97 * planned <= moved <= planned
    assert len([top for top in sloped if 1 < top < LLAMA.layers]) >= 2 > len([t for t in level if 1 < t < LLAMA.layers])


def test_early_loads_leave_the_columns_beside_those_computed_for_last():
    costs, one = roofline("H100", 40), request("a", 16384, 64)
    simulation = Simulation(Pipelined(costs, staging_cells=STAGING), [one])
    half = simulation.ttft["a"] / 2
    soon = [s.op for s in simulation.timeline.spans if s.op.kind == FETCH and s.end < half]
    last_columns = [op for op in soon if len(op.layers) > 1]
    assert last_columns and all(op.parts[0].start >= one.prefix * 0.7 for op in last_columns)
    top = {part.start for op in soon for part in op.parts if LLAMA.layers - 1 in op.layers}
    assert one.prefix - CHUNK in top  # whole to its last layer


def test_what_costs_have_learned_of_a_link_is_not_counted_twice():
    costs = Learned(roofline("H100", 40))
    before, policy = costs.load_seconds(1), Pipelined(costs, staging_cells=STAGING)
    policy.observe = costs.observe
    plane = Plane(request("a", 65536, 64))
    policy.add(plane)
    paces = []
    for _ in range(12):
        op = policy.next("link", 0.0)
        policy.finished(op, 4 * costs.undisturbed.seconds(op))
        plane.finished("copy", op.layers, op.parts[0])
        paces.append(policy.link_pace.seconds(1) / before)
    assert max(paces) <= 4.01 and min(paces[2:]) > 3.5 and costs.load_seconds(1) / before > 3.5


def test_a_second_fetch_that_takes_too_long_is_seen_before_it_ends(monkeypatch):
    monkeypatch.setattr("cacheflow.policies.early.EarlyLoads.next_fetch", lambda self, now: None)
    costs = roofline("H100", 40)
    policy = Pipelined(costs, staging_cells=STAGING)
    policy.add(Plane(request("a", 8192, 64)))
    op = policy.next("link", 1.0)
    assert policy.link_pace.at(1.0) == 1 and policy.link_pace.busy(1.0) == costs.seconds(op)
    assert policy.link_pace.at(1.0 + 3 * costs.seconds(op)) == 1, "one may be an outlier"
    policy.finished(op, 4 * costs.seconds(op))
    assert policy.link_pace.at(2.0) == 1
    op = policy.next("link", 2.0)
    assert policy.link_pace.at(2.0) == policy.link_pace.at(2.0 + costs.seconds(op) / 2) == 1
    share = costs.seconds(op) / costs.load_seconds(1) / policy._climbs["a"].row
    assert share < 1, "what it loses may be a cost of its own, and larger fetches lose no more"
    assert policy.link_pace.at(2.0 + 3 * costs.seconds(op)) == pytest.approx(1 + 2 * share)


def test_a_fetch_that_failed_is_no_measure_of_the_link():
    costs = roofline("H100", 40)
    policy = Pipelined(costs, staging_cells=STAGING)
    policy.add(Plane(request("a", 16384, 64)))
    for _ in range(3):
        op = policy.next("link", 0.0)
        policy.link_pace.row = op.tokens  # it is large
        policy.failed(op, "lost")
        assert policy.link_pace.known == 1 and not policy.link_pace.late


def test_a_request_that_is_done_is_passed_over_before_it_is_removed():
    costs = roofline("H100", 40)
    policy, planes = Pipelined(costs, staging_cells=STAGING), [Plane(request(id, 0, 64)) for id in "ab"]
    for plane in planes:
        policy.add(plane)
    while not planes[0].done:
        op = policy.next("compute", 0.0)
        policy.finished(op, costs.seconds(op))
    assert [climb.plane for climb in policy._order(0.0)] == [plane for plane in planes if not plane.done]


@pytest.mark.parametrize("column", range(2))
def test_what_a_failed_load_leaves_to_load_is_loaded(column):
    """With a window, others need cells then that nobody needed before."""
    one = Request.of("a", prefix=2, suffix=1, chunk=1, layers=3, window=2)
    costs = Affine((2,) * 3, bandwidth=8.0)

    def fail(op: Op) -> list[tuple[Part, str]]:
        return [(part, "lost") for part in legality.columns(op, [one]) if part.start == column]

    legality.check(legality.run(Pipelined(costs), [one], fail=fail))


class Late(Roofline):
    """One fetch takes some times as long, or every one so many seconds longer."""

    def __init__(self, *arguments, at: int = 0, times: float = 1.0, more: float = 0.0, **options) -> None:
        super().__init__(*arguments, **options)
        self.at, self.times, self.more, self.fetches = at, times, more, 0

    def seconds(self, op: Op) -> float:
        self.fetches += op.kind == FETCH
        late = self.times if self.fetches == self.at else 1.0
        return super().seconds(op) * late + self.more if op.kind == FETCH else super().seconds(op)


@pytest.mark.parametrize("gbps", [40, 80])
@pytest.mark.parametrize("late", [{"at": 2, "times": 5.0}, {"at": 12, "times": 5.0}, {"more": 1e-3}], ids=str)
def test_neither_an_outlier_nor_what_costs_leave_out_sets_off_another_split(monkeypatch, gbps, late):
    known, one = roofline("H100", gbps), [request("a", 16384, 64)]

    def run() -> float:
        truth = Late(LLAMA, device("H100"), bandwidth=gbps * GBPS, fetch_seconds=FETCH_SECONDS, **late)
        return ttft("pipelined", known, one, truth)["a"]

    ours = run()
    monkeypatch.setattr("cacheflow.policies.climb.Climb.rebalance", lambda *arguments: None)
    assert ours <= 1.01 * run()


@pytest.mark.parametrize(
    ("told", "gbps", "prefix", "chunk", "holes", "limit"),
    [
        (40, 10, 16384, 64, (), 1.05),  # a row takes several fetches
        (80, 20, 65536, 512, (), 1.05),
        (10, 2, 16384, 512, (), 1.05),
        (10, 2.5, 16384, 512, range(7, 32), 1.1),  # few of its columns are loaded
        (40, 10, 16384, 512, range(24), 1.05),
    ],
)
def test_a_link_that_is_slower_than_told_from_the_start(told, gbps, prefix, chunk, holes, limit):
    """Nearly as well as if it had been known, without costs that learn."""
    one = [Request.of("a", prefix=prefix, suffix=64, chunk=chunk, layers=LLAMA.layers, holes=holes)]
    truth = roofline("H100", gbps)

    def run(known: Costs) -> float:
        return Simulation(Pipelined(known, staging_cells=chunk * LLAMA.layers), one, costs=truth).ttft["a"]

    assert run(roofline("H100", told)) <= limit * run(truth)


def test_where_the_link_is_behind_and_compute_idle_others_than_the_first_are_split_anew_too(monkeypatch):
    batch = [request("a", 14807, 64), request("b", 8133, 16), request("c", 31945, 1500), request("d", 10423, 16)]
    arrivals = {"a": 0.149, "b": 0.0, "c": 0.339, "d": 0.167}

    def run() -> float:
        policy = Pipelined(roofline("H100", 15), staging_cells=STAGING)
        simulation = Simulation(policy, batch, costs=roofline("H100", 5), arrivals=arrivals)
        return statistics.fmean(simulation.ttft.values())

    ours, rebalance = run(), Climb.rebalance
    monkeypatch.setattr(Climb, "rebalance", lambda self, now, *ahead: False if ahead else rebalance(self, now))
    assert ours < 0.9 * run()


@pytest.mark.parametrize("gbps", [10, 40])
def test_behind_a_fetch_that_takes_too_long_the_right_of_a_row_comes_first(monkeypatch, gbps):
    """If it was no outlier, compute takes over what is left of that."""
    monkeypatch.setattr("cacheflow.policies.early.EarlyLoads.next_fetch", lambda self, now: None)
    one = request("a", 16384, 64)

    def torn(**late) -> list[int]:
        """Layers between the first and the last of which the right is loaded first, by the order of fetches."""
        truth = Late(LLAMA, device("H100"), bandwidth=gbps * GBPS, fetch_seconds=FETCH_SECONDS, **late)
        simulation = Simulation(Pipelined(roofline("H100", gbps), staging_cells=STAGING), [one], costs=truth)
        starts = dict[int, list[int]]()
        for span in simulation.timeline.spans:
            if span.op.kind == FETCH:
                starts.setdefault(span.op.layers.start, []).append(span.op.parts[0].start)
        return [layer for layer, of in starts.items() if 1 < layer < LLAMA.layers - 1 and of[0] > of[-1]]

    assert torn() == []
    assert torn(at=12, times=5.0)


def _early(policy: Pipelined, prefix: int, truth: Costs) -> list[float]:
    """When loads of several layers began."""
    simulation = Simulation(policy, [request("a", prefix, 64)], costs=truth)
    return [s.start for s in simulation.timeline.spans if s.op.kind == FETCH and len(s.op.layers) > 1]


@pytest.mark.parametrize("gbps", [40, 400])
def test_nothing_is_loaded_early_where_copies_are_slower_than_the_link(gbps):
    costs = roofline("A100-40G", gbps)
    assert bool(_early(Pipelined(costs, staging_cells=STAGING), 16384, costs)) == (gbps == 40)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_nothing_is_loaded_early_once_the_link_has_changed(factor):
    costs = roofline("H100", 40)
    half = Planner(Plane(request("a", 32768, 64)), costs, 8192, STAGING).best(32768).link / 2
    truth = Changing(
        LLAMA,
        device("H100"),
        bandwidth=40 * GBPS,
        fetch_seconds=FETCH_SECONDS,
        after=int(half * costs.bandwidth),
        factor=factor,
    )
    begun = _early(Pipelined(costs, staging_cells=STAGING), 32768, truth)
    assert min(begun) < half and (max(begun) > 1.3 * half) == (factor == 1)


@pytest.mark.parametrize("budget", [None, 2048, 4096])
def test_columns_that_are_taken_over_keep_to_the_hidden_budget(budget):
    costs, one = roofline("H100", 40), request("a", 16384, 64)
    truth = Changing(LLAMA, device("H100"), bandwidth=40 * GBPS, fetch_seconds=FETCH_SECONDS, after=2**29, factor=6.0)
    ran = legality.run(Pipelined(costs, staging_cells=STAGING, hidden_tokens=budget), [one], costs=truth)
    assert ran.held <= (budget or one.prefix)
    if budget is None:
        assert ran.held > Planner(Plane(one), costs, 8192, STAGING).best(one.prefix).columns * CHUNK + 2 * CHUNK


@pytest.mark.parametrize("later", [10, 25, 40, 60])
@pytest.mark.parametrize("budget", [8192, 12288])
def test_who_comes_later_has_what_columns_that_are_taken_over_leave_of_the_hidden_budget(budget, later):
    costs, batch = roofline("H100", 40), [request("a", 16384, 64), request("b", 16384, 64)]
    truth = Changing(LLAMA, device("H100"), bandwidth=40 * GBPS, fetch_seconds=FETCH_SECONDS, after=2**28, factor=6.0)
    policy = Pipelined(costs, staging_cells=STAGING, hidden_tokens=budget)
    ran = legality.run(policy, batch, costs=truth, arrivals={"a": (0, 0.0), "b": (later, 0.0)})
    assert ran.held <= budget


@pytest.mark.parametrize("gbps", [10, 80, 250, 400, 700])
@pytest.mark.parametrize("chunk", [16, 64, 128, 256])
def test_a_slope_leaves_the_suffix_a_launch_to_be_in(gbps, chunk):
    for name in ("A100-40G", "H100"):
        for prefix in (32768, 131072):
            costs = roofline(name, gbps)
            policy = Pipelined(costs, staging_cells=chunk * 32)
            one = Request.of("a", prefix=prefix, suffix=64, chunk=chunk, layers=LLAMA.layers)
            policy.add(Plane(one))
            policy.next("link", 0.0)
            tops = policy._climbs["a"].tops
            assert all(right <= left + 1 for left, right in pairwise(tops))  # they are rounded
            planned = Planner(Plane(one), costs, 8192, chunk * 32).best(one.prefix)
            assert (sum(tops) > 0) == (planned.columns + planned.partly + planned.first > 0)
            assert planned.columns == 0 or tops[0] >= LLAMA.layers / 2


def test_planning_grows_more_slowly_than_the_prefix():
    """In launches whose cost is asked for."""
    calls: list[int] = []
    for prefix in (8192, 131072):
        planner = Planner(Plane(request("a", prefix, 64)), roofline("H100", 10), 8192, STAGING)
        planner.best(planner.count)
        calls.append(planner._launch.cache_info().misses)
    assert 0 < calls[1] <= 2 * calls[0] <= 30


def test_the_hidden_budget_is_shared(monkeypatch):
    costs = roofline("H100", 10)
    policy = Pipelined(costs, hidden_tokens=4096, staging_cells=STAGING)
    batch = [request("a", 8192, 64), request("b", 16384, 64)]
    for one in batch:
        policy.add(Plane(one))
    op = policy.next("compute", 0.0)
    assert op is not None and op.kind == COMPUTE
    kept = [sum(part.tokens for part in climb.plane.parts(c for c, top in enumerate(climb.tops) if top > 1))
            for climb in policy._climbs.values()]  # fmt: skip
    assert 0 < sum(kept) <= 4096


def test_nobody_is_overtaken_for_ever():
    """A long request among short ones that keep coming."""
    policy = Pipelined(roofline("H100", 10), staging_cells=STAGING)
    policy.add(Plane(request("long", 65536, 64)))
    served = []
    for number in range(OVERTAKEN + 4):  # the first comes together with the long one
        short = Plane(request(f"short {number}", 2048, 64))
        policy.add(short)
        op = policy.next("compute", 0.0)
        assert op is not None
        served.append(op.requests[0])
        policy.finished(op, 1.0)
        if served[-1] != "long":
            short.done = True
            policy.remove(short.request.id)
    assert served == [f"short {number}" for number in range(OVERTAKEN + 1)] + ["long"] * 3


def test_a_deadline_goes_before_length():
    costs = roofline("H100", 40)
    long, short = request("long", 32768, 64), request("short", 4096, 64)
    alone = ttft("pipelined", costs, [long])["long"]
    free = ttft("pipelined", costs, [long, short])
    wanted = ttft("pipelined", costs, [replace(long, deadline=1.05 * alone), short])
    assert free["short"] < free["long"] > 1.05 * alone
    assert wanted["long"] <= 1.05 * alone < wanted["short"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 3)), min_size=1, max_size=6))
def test_the_fewest_are_late(work):
    """Against every order, where one is served after another."""
    costs = roofline("H100", 40)
    climbs = []
    for i, (chunks, deadline) in enumerate(work):
        policy = Pipelined(costs)
        policy.add(Plane(replace(request(f"r{i}", CHUNK * chunks, 64), deadline=deadline)))
        climbs.append(policy._climbs[f"r{i}"])

    def late(order) -> int:
        ends = accumulate(climb.alone for climb in order)
        return sum(end > climb.due(0.0) for climb, end in zip(order, ends, strict=True))

    assert late(_rank(climbs, 0.0)) == min(map(late, permutations(climbs)))


def test_a_deadline_must_be_some_time():
    with pytest.raises(ValueError, match="deadline 0 must be above 0 seconds"):
        replace(request("a", CHUNK, 1), deadline=0)


def test_worst_is_for_the_last_first_token():
    """At its most, a plan for the mean ends later than two-pointer; one for the last does not."""
    costs, batch = roofline("H100", 10), lognormal(8, 3, 64)
    mean, last, theirs = (
        ttft(name, costs, batch) for name in ("pipelined", "cacheflow.policies.pipelined:Worst", "two-pointer")
    )
    assert max(last.values()) <= max(theirs.values()) < max(mean.values())
    assert statistics.fmean(mean.values()) < statistics.fmean(last.values())


def ops(policy: Pipelined, batch: list[Request]) -> tuple[list[Op], float]:
    """Compute ops, and the mean TTFT."""
    simulation = Simulation(policy, batch)
    computed = [span.op for span in simulation.timeline.spans if span.op.kind == COMPUTE]
    return computed, statistics.fmean(simulation.ttft.values())


def test_layers_are_joined_where_a_launch_would_cost_more_than_it_does(monkeypatch):
    costs, cold = roofline("H100", 10), [request("a", 0, 64)]
    joined, seconds = ops(Pipelined(costs), cold)
    assert max(map(costs.seconds, joined)) <= JOINED * costs.fixed(COMPUTE)
    monkeypatch.setattr("cacheflow.policies.launches.JOINED", 0)
    single, apart = ops(Pipelined(costs), cold)
    assert len(joined) < len(single) == LLAMA.layers
    assert apart - seconds == pytest.approx((len(single) - len(joined)) * costs.fixed(COMPUTE))


def test_short_requests_share_a_launch_where_it_pays(monkeypatch):
    """Their weights are read once. Long ones have work enough of their own."""
    costs = roofline("H100", 10)
    short, long = ([request(f"r{i}", 0, tokens) for i in range(8)] for tokens in (16, 4096))
    shared, mean = ops(Pipelined(costs), short)
    assert max(len(op.requests) for op in shared) > 1
    assert all(len(op.requests) == 1 for op in ops(Pipelined(costs), long)[0])
    monkeypatch.setattr(Pipelined, "_with_others", lambda self, op, behind, now: op)
    assert mean < 0.9 * ops(Pipelined(costs), short)[1]


def test_what_others_do_meanwhile_does_not_make_the_first_late():
    """They fill what it leaves of compute, in launches that end before it can go on."""
    costs = roofline("H100", 40)
    first, behind = request("first", 8192, 64), request("behind", 0, 16384)
    alone = ttft("pipelined", costs, [first])["first"]
    policy = Pipelined(costs, staging_cells=STAGING)
    both = Simulation(policy, [first, behind], arrivals={"behind": 0.001}).ttft
    assert both["first"] <= 1.05 * alone
    assert both["behind"] <= alone + ttft("pipelined", costs, [behind])["behind"]


def test_only_requests_that_are_compared_are_estimated(monkeypatch):
    asked: list[Planner] = []
    estimate = Planner.estimate
    monkeypatch.setattr(Planner, "estimate", lambda self: asked.append(self) or estimate(self))
    policy = Pipelined(roofline("H100", 10), staging_cells=STAGING)
    for id, estimates in (("a", 0), ("b", 2), ("c", 3)):
        policy.add(Plane(request(id, 16384, 64)))
        policy.next("compute", 0.0)
        assert len(asked) == len(set(asked)) == estimates


@pytest.mark.parametrize("gbps", [5, 10, 40, 80, 400])
@pytest.mark.parametrize(("prefix", "suffix"), [(0, 500), (2048, 64), (16384, 2048), (131072, 64)])
def test_an_estimate_is_near_the_best(gbps, prefix, suffix):
    planner = Planner(Plane(request("a", prefix, suffix)), roofline("H100", gbps), 8192, STAGING)
    assert planner.estimate() == pytest.approx(planner.best(planner.count).seconds, rel=0.04)


def test_what_was_learned_while_a_request_waits_is_planned_with():
    """Compute that turns out four times as slow."""
    costs = Learned(roofline("H100", 10))
    planner = Planner(Plane(request("a", 16384, 64)), costs, 8192, STAGING)
    before = planner.best(planner.count)
    for tokens in (512, 1024, 2048) * 5:
        op = Op(COMPUTE, range(1), (Part("b", 0, tokens),))
        costs.observe(op, 4 * costs.undisturbed.seconds(op))
    after = planner.best(planner.count)
    assert after == Planner(Plane(request("a", 16384, 64)), costs, 8192, STAGING).best(planner.count)
    assert after.columns < before.columns


def test_a_link_that_changed_while_a_request_waits_is_planned_with():
    costs = roofline("H100", 40)
    planner = Planner(Plane(request("a", 16384, 64)), costs, 8192, STAGING)
    before, pieces = planner.best(planner.count), planner.pieces(0)
    costs.bandwidth /= 4
    costs.copy_bandwidth /= 4
    costs.copy_seconds *= 100
    fresh = Planner(Plane(request("a", 16384, 64)), costs, 8192, STAGING)
    assert planner.pieces(0) == fresh.pieces(0) < pieces
    after = planner.best(planner.count)
    assert after == fresh.best(planner.count)
    assert after.columns > before.columns
