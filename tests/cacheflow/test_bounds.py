"""Bounds: bound <= optimum <= every policy, the optimum checked by trying everything."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, permutations
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cacheflow import bounds, policies
from cacheflow.costs.base import Costs, ModelShape
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.exact import Objective
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from tests.cacheflow import optimum, strategies
from tests.cacheflow.legality import attended, needed
from tests.cacheflow.strategies import Affine

SLACK = 1 - 1e-9  # sums in another order

Cell = tuple[str, int, int]  # request, column, layer


class Everything:
    """Every set of loads in every order, and for each every order of projections and advances."""

    def __init__(self, requests: list[Request], costs: Costs, objective: Objective) -> None:
        self.requests, self.costs, self.objective = requests, costs, objective
        self.layers = requests[0].layers
        self.need: set[Cell] = set()
        for r in requests:
            holes = frozenset(c for c, stored in enumerate(r.stored) if not stored)
            self.need |= {(r.id, *cell) for cell in needed(r, holes)}
        self.by_id = {r.id: r for r in requests}
        self.loadable = [(r, c, layer) for r, c, layer in self.need if self.prefix(r, c) and self.by_id[r].stored[c]]

    def prefix(self, request: str, column: int) -> bool:
        return column < len(self.by_id[request].stored)

    def best(self) -> float:
        return min(self.after(order) for k in range(len(self.loadable) + 1) for order in permutations(self.loadable, k))

    def after(self, loads: tuple[Cell, ...]) -> float:
        """The best for loads in a given order."""
        landed, link = {}, 0.0
        for r, c, layer in loads:
            link += self.costs.load_seconds(self.by_id[r].width(c))
            landed[r, c, layer] = link
        columns = [(r.id, c) for r in self.requests for c in range(r.columns)]
        if self.objective == "restoration":
            columns = [column for column in columns if self.prefix(*column)]
        # (heights, projected cells) -> undominated (clock, sum of first-token times)
        states = {((0,) * len(columns), frozenset[Cell]()): {(0.0, 0.0)}}
        best = float("inf")
        while states:
            reached: dict[Any, set[tuple[float, float]]] = {}
            for (heights, done), labels in states.items():
                for clock, total in labels:
                    if self.ended(columns, heights, done, landed):
                        value = {"worst": clock, "mean": total / len(self.requests), "restoration": max(clock, link)}
                        best = min(best, value[self.objective])
                    for height, filled, seconds, ready, last in self.moves(columns, heights, done, landed):
                        end = max(clock, ready) + seconds
                        reached.setdefault((height, filled), set()).add((end, total + end * last))
            states = {
                state: {a for a in labels if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in labels)}
                for state, labels in reached.items()
            }
        return best

    def moves(
        self, columns: list[tuple[str, int]], heights: tuple[int, ...], done: frozenset[Cell], landed: dict[Cell, float]
    ) -> Iterator[tuple[tuple[int, ...], frozenset[Cell], float, float, bool]]:
        for i, (r, c) in enumerate(columns):
            request, layer = self.by_id[r], heights[i]
            if layer == self.layers:
                continue
            start, stop = request.boundaries[c], request.boundaries[c + 1]
            if (r, c, layer) not in done and (r, c, layer) not in landed:
                yield heights, done | {(r, c, layer)}, self.costs.cell_marginals(start, stop, layer)[0], 0.0, False
            final = layer == self.layers - 1
            if final and c < request.columns - 1:
                continue
            start = stop - 1 if final else start
            cells = [(r, other, layer) for other in attended(request, start, stop, layer)]
            if final:
                cells += [(r, s, row) for s in range(len(request.stored), c + 1) for row in range(self.layers)]
            if all(cell in done or cell in landed for cell in cells):
                seconds = self.costs.cell_marginals(start, stop, layer)[1]
                seconds += self.costs.head_seconds(1) if final else 0.0
                ready = max((landed[cell] for cell in cells if cell in landed), default=0.0)
                yield (*heights[:i], layer + 1, *heights[i + 1 :]), done, seconds, ready, final

    def ended(
        self, columns: list[tuple[str, int]], heights: tuple[int, ...], done: frozenset[Cell], landed: dict[Cell, float]
    ) -> bool:
        if self.objective == "restoration":
            return all(cell in done or cell in landed for cell in self.need if self.prefix(*cell[:2]))
        height = dict(zip(columns, heights, strict=True))
        return all(height[r.id, r.columns - 1] == self.layers for r in self.requests)


@pytest.mark.parametrize("objective", ["worst", "mean", "restoration"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_exact_search_against_trying_everything(objective: Objective, data: st.DataObject) -> None:
    options: dict[str, Any] = {"max_layers": 3, "max_prefix": 2, "max_suffix": 2}
    batch = data.draw(strategies.batches(max_requests=2, **options))
    everything = Everything(batch, data.draw(strategies.marginal_costs(batch[0].windows)), objective)
    assume(len(everything.loadable) <= 4 and sum(r.columns for r in batch) * batch[0].layers <= 10)
    assert bounds.exact(batch, everything.costs, objective) == pytest.approx(everything.best())


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_exact_mean_of_three_against_trying_everything(data: st.DataObject) -> None:
    model = data.draw(strategies.windows(max_layers=2))
    batch = [data.draw(strategies.requests(model, id, max_prefix=1, max_suffix=1)) for id in "abc"]
    everything = Everything(batch, data.draw(strategies.marginal_costs(model)), "mean")
    assume(len(everything.loadable) <= 3)
    assert bounds.exact(batch, everything.costs, "mean") == pytest.approx(everything.best())


@settings(max_examples=350, deadline=None)
@given(st.data())
def test_bound_optimum_policies(data: st.DataObject) -> None:
    batch = data.draw(strategies.batches(max_requests=2, max_layers=3, max_prefix=3, max_suffix=2))
    costs = data.draw(strategies.marginal_costs(batch[0].windows))
    optimum = bounds.exact(batch, costs)
    assert bounds.lower(batch, costs) * SLACK <= optimum
    mean, restoration = bounds.exact(batch, costs, "mean"), bounds.exact(batch, costs, "restoration")
    assert mean * SLACK <= optimum and restoration <= optimum
    assert bounds.lower_mean(batch, costs) * SLACK <= mean
    for name, policy in policies.available().items():
        simulation = Simulation(policy(costs), batch)
        ttft = simulation.ttft.values()
        assert optimum * SLACK <= max(ttft), name
        assert mean * SLACK <= sum(ttft) / len(ttft), name
        assert restoration * SLACK <= simulation.timeline.summary(batch).end, name


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_policy_has_a_mean_below_its_bound(data: st.DataObject) -> None:
    """Whatever ops cost beyond their cells, and however small a policy must cut them."""
    batch = data.draw(strategies.batches(max_requests=5))[: data.draw(st.integers(2, 5))]
    costs = data.draw(strategies.costs(batch[0].windows))
    ttft = Simulation(data.draw(strategies.makers())(costs), batch).ttft.values()
    assert fmean(ttft) >= bounds.lower_mean(batch, costs) * SLACK


def plane(choose: random.Random, chunks: int = 6, layers: int = 4) -> tuple[Request, Affine]:
    """No windows, a hole now and then, and a link somewhere around balance."""
    prefix, suffix = chunks * 4 - choose.randrange(4), choose.randrange(1, 4)
    holes = [c for c in range(chunks) if choose.random() < 0.1]
    request = Request.of("a", prefix=prefix, suffix=suffix, chunk=4, layers=layers, holes=holes)
    project, pair = choose.choice([0.04, 0.1, 0.3]), choose.choice([0.0, 0.02, 0.2])
    compute = layers * (prefix * (1 + project) + pair * prefix**2 / 2)
    bandwidth = 8 * layers * prefix / compute * 10 ** choose.uniform(-0.5, 0.8)
    return request, Affine((None,) * layers, project=project, pair=pair, bandwidth=bandwidth)


def test_bound_is_tight() -> None:
    choose = random.Random(0)
    ratios = []
    for _ in range(40):
        request, costs = plane(choose)
        ratios.append(bounds.exact([request], costs) / bounds.lower([request], costs))
    assert median(ratios) <= 1.04
    assert max(ratios) <= 1.15


def test_bound_is_tight_where_fixed_costs_matter_little() -> None:
    shape = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, windows=(None,) * 32)
    costs = Roofline(shape, device("H100"), bandwidth=10 * GBPS, latency=1e-3)
    request = Request.of("a", prefix=65536, suffix=64, chunk=512, layers=32)
    best = min(Simulation(policy(costs), [request]).ttft["a"] for policy in policies.available().values())
    assert 0.95 * best <= bounds.lower([request], costs) <= best


def test_mean_bound_is_tight() -> None:
    ratios = []
    choose = random.Random(0)
    for _ in range(40):
        batch, free = optimum.tiny(choose, 2, 3, 3)
        costs = optimum.with_suffix(free)
        ratios.append(bounds.exact(batch, costs, "mean") / bounds.lower_mean(batch, costs))
    assert median(ratios) <= 1.05
    assert max(ratios) <= 1.18


@pytest.mark.parametrize("gbps", [2, 10, 40, 200])
def test_mean_bound_against_every_set_of_requests(gbps: float) -> None:
    """The k-th first token is no sooner than the bound of the best k requests: what is relaxed costs little."""
    costs = optimum.llama_costs(gbps)
    for seed in range(3):
        batch = optimum.lognormal(6, seed, suffix=64 + 200 * seed)
        sets = (min(bounds.lower(some, costs) for some in combinations(batch, k)) for k in range(1, 7))
        ideal = fmean(sets)
        assert 0.99 * ideal <= bounds.lower_mean(batch, costs) <= ideal / SLACK


class TestLowerMean:
    """Three lengths."""

    batch = tuple(Request.of(str(prefix), prefix=prefix, suffix=3, chunk=8, layers=4) for prefix in (64, 8, 24))

    def mean(self, requests: Sequence[Request], **options: Any) -> float:
        return bounds.lower_mean(requests, Affine((None,) * 4, **{"bandwidth": 20.0, **options}))

    def test_of_one_request_is_its_bound(self) -> None:
        for request in self.batch:
            costs = Affine((None,) * 4, bandwidth=20.0, latency=3.0, compute_fixed=2.0)
            assert bounds.lower_mean([request], costs) == pytest.approx(bounds.lower([request], costs))

    def test_of_equal_requests_is_the_mean_over_how_many_have_ended(self) -> None:
        equal = [Request.of(id, prefix=64, suffix=3, chunk=8, layers=4) for id in "abcd"]
        costs = Affine((None,) * 4, bandwidth=20.0, latency=3.0, compute_fixed=2.0)
        assert bounds.lower_mean(equal, costs) == pytest.approx(
            fmean(bounds.lower(equal[:k], costs) for k in (1, 2, 3, 4))
        )

    @pytest.mark.parametrize("link", [{"bandwidth": 1e-9}, {"latency": 1e9}], ids=str)
    def test_a_dead_link_leaves_recompute_the_shortest_first(self, link: dict[str, float]) -> None:
        costs = Affine((None,) * 4, bandwidth=20.0, head=0.0)
        holes = [Request(r.id, r.boundaries, (False,) * len(r.stored), r.windows) for r in self.batch]
        ends = accumulate(sorted(bounds.lower([request], costs) for request in holes))
        assert self.mean(self.batch, head=0.0, **link) == pytest.approx(fmean(ends))
        assert self.mean(holes, head=0.0) == pytest.approx(bounds.exact(holes, costs, "mean"))

    def test_an_infinite_link_leaves_suffixes_the_shortest_first(self) -> None:
        costs = {"bandwidth": 1e12, "head": 0.0}
        ends = accumulate(sorted(self.mean([request], **costs) for request in self.batch))
        assert self.mean(self.batch, **costs) == pytest.approx(fmean(ends))

    def test_what_each_takes_alone_holds_where_they_need_different_resources(self) -> None:
        """A short request, one that computes and one that loads: the second to end may leave either resource idle."""
        lengths = {"short": (0, 1), "computes": (0, 20), "loads": (96, 1)}
        batch = [Request.of(id, prefix=p, suffix=s, chunk=8, layers=4) for id, (p, s) in lengths.items()]
        ends = sorted(self.mean([request], bandwidth=27.2) for request in batch)
        together = bounds.lower(batch, Affine((None,) * 4, bandwidth=27.2))
        assert ends[1] == pytest.approx(ends[2], rel=0.05) and ends[0] < 0.1 * ends[1]
        assert self.mean(batch, bandwidth=27.2) >= fmean([*ends[:2], together])

    def test_order_does_not_matter(self) -> None:
        assert self.mean(self.batch) == pytest.approx(self.mean(self.batch[::-1]))


class TestLower:
    request = Request.of("a", prefix=64, suffix=3, chunk=8, layers=4)

    def lower(self, *requests: Request, **options: Any) -> float:
        return bounds.lower(requests or [self.request], Affine((None,) * 4, **{"bandwidth": 20.0, **options}))

    def test_nothing_stored_is_a_whole_prefill(self) -> None:
        hole = Request("a", self.request.boundaries, (False,) * 8, self.request.windows)
        costs = Affine((None,) * 4, bandwidth=20.0)
        assert bounds.lower([hole], costs) == pytest.approx(bounds.exact([hole], costs))
        assert bounds.lower([hole], costs) == pytest.approx(Simulation(policies.find("load")(costs), [hole]).ttft["a"])

    def test_an_infinite_link_leaves_the_suffix(self) -> None:
        alone = 4 * 3 * 0.05 + 3 * (3 + 0.01 * (65 + 66 + 67)) + 1 + 0.01 * 67 + 0.3
        assert self.lower(bandwidth=1e12) == pytest.approx(alone)

    def test_a_dead_link_leaves_recompute(self) -> None:
        nothing = Request("a", self.request.boundaries, (False,) * 8, self.request.windows)
        assert self.lower(bandwidth=1e-9) == pytest.approx(self.lower(nothing))
        assert self.lower(latency=1e9) == pytest.approx(self.lower(nothing))

    @pytest.mark.parametrize(
        "more",
        [{"latency": 30}, {"fetch_seconds": 30}, {"copy_seconds": 30}, {"copy_bandwidth": 3}, {"bandwidth": 10}],
        ids=str,
    )
    def test_grows_with_what_loading_costs(self, more: dict[str, float]) -> None:
        assert self.lower(**more) > self.lower()

    def test_fixed_costs_of_compute_count_once(self) -> None:
        fast = {"bandwidth": 1e12}
        assert self.lower(compute_fixed=5.0, **fast) == pytest.approx(self.lower(**fast) + 5.0)
        assert self.lower(layer_fixed=5.0, **fast) == pytest.approx(self.lower(**fast) + 20.0)

    def test_kv_only(self) -> None:
        """8 tokens advance over layer 0 alone, the suffix over both; projections are free."""
        costs = Affine((None, None), project=0.0, advance=1.0, pair=0.0, head=0.0, bandwidth=1e-6)
        request = Request("a", (0, 8, 9), (True,), (None, None))
        assert bounds.lower([request], costs) == pytest.approx(8 + 2)

    def test_unseen_cells_cost_nothing(self) -> None:
        """Layer 0 is projected for nothing; of layer 1 (8 s to load or to compute) both sides take a share."""
        costs = Affine((4, 4), project=0.0, advance=1.0, pair=0.0, head=0.0, bandwidth=8.0)
        seen = Request("a", (0, 8, 9), (True,), (4, 4))
        assert bounds.lower([seen], costs) == pytest.approx((8 + 1 + 2) / 2)
        unseen = Request("a", (0, 8, 12, 13), (True, True), (4, 4))
        assert bounds.lower([unseen], costs) == pytest.approx((4 + 1 + 2) / 2)

    def test_requests_share_both_resources(self) -> None:
        other = Request("b", self.request.boundaries, self.request.stored, self.request.windows)
        assert self.lower(self.request, other) == pytest.approx(2 * self.lower(), rel=0.1)


@pytest.mark.parametrize(
    "fixed", [{"latency": 1.0}, {"fetch_seconds": 1.0}, {"compute_fixed": 1.0}, {"copy_bandwidth": 9.0}], ids=str
)
def test_exact_search_refuses_fixed_costs(fixed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="without fixed terms"):
        bounds.exact([TestLower.request], Affine((None,) * 4, **{"bandwidth": 1.0, **fixed}))


def test_exact_search_of_nothing_to_restore() -> None:
    request = Request.of("a", prefix=0, suffix=3, chunk=8, layers=2)
    costs = Affine((None,) * 2, bandwidth=1.0)
    assert bounds.exact([request], costs, "restoration") == 0.0
    assert bounds.exact([request], costs) == pytest.approx(bounds.lower([request], costs))
