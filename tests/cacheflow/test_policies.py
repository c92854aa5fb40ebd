"""Policies: every one, on every plane, brings requests back whatever fails, within limits; and how they are found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow import bounds, policies
from cacheflow.costs.base import Costs
from cacheflow.loop import Failures
from cacheflow.op import COMPUTE, FETCH, Op, Part
from cacheflow.plane import Plane
from cacheflow.policies.base import Policy
from cacheflow.request import Request
from tests.cacheflow import strategies
from tests.cacheflow.legality import Run, check, columns, run
from tests.cacheflow.strategies import Affine

SLACK = 1 - 1e-9  # sums in another order


class RandomPolicy(Policy):
    """Any legal op, or none: reaches states that no sensible policy does."""

    def __init__(self, costs: Costs, seed: int, **options: Any) -> None:
        super().__init__(costs, **options)
        self.random = random.Random(seed)

    def next_compute(self, now: float) -> Op | None:
        return self._any(plane.climb(c, self.token_budget) for plane, c in self._columns())

    def next_fetch(self, now: float) -> Op | None:
        whole = (self.fetch_column(plane, c) for plane, c in self._columns())
        rows = (self.fetch_row(plane, r, range(plane.columns)) for plane in self.active() for r in range(plane.layers))
        return self._any([*whole, *rows])

    def _columns(self) -> Iterator[tuple[Plane, int]]:
        return ((plane, c) for plane in self.active() for c in range(plane.columns))

    def _any(self, ops: Iterator[Op | None] | list[Op | None]) -> Op | None:
        possible = [op for op in ops if op is not None]
        return self.random.choice(possible) if possible and (self.idle or self.random.random() < 0.7) else None


@st.composite
def cases(draw: st.DrawFn, **options: Any) -> tuple[list[Request], Costs, Callable[[Costs], Policy]]:
    """A batch, what ops really take, and a policy whose estimates may be wrong by any factor."""
    batch = draw(strategies.batches(**options))
    costs = draw(strategies.costs(batch[0].windows))
    estimates = draw(st.just(costs) | strategies.costs(batch[0].windows))
    seed = draw(st.integers(0, 2**32))
    maker = draw(strategies.makers() | st.just(lambda costs: RandomPolicy(costs, seed)))
    return batch, costs, lambda _: maker(estimates)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_brings_every_request_back(case: tuple[list[Request], Costs, Callable[[Costs], Policy]]) -> None:
    batch, costs, make = case
    result = run(make(costs), batch, costs=costs)
    check(result)
    assert max(result.ttft.values()) >= bounds.lower(batch, costs) * SLACK
    for request in batch:
        assert result.ttft[request.id] >= bounds.lower([request], costs) * SLACK
    _check_limits(result)


def _check_limits(result: Run) -> None:
    policy = result.policy
    for op in (span.op for span in result.spans):
        one_column = all(_columns_of(result, part) == 1 for part in op.parts) and len(op.parts) == 1
        if op.kind == COMPUTE:
            assert op.tokens <= policy.token_budget or one_column
        if op.kind == FETCH and policy.staging_cells is not None:
            assert op.tokens * len(op.layers) <= policy.staging_cells or (one_column and len(op.layers) == 1)


def _columns_of(result: Run, part: Part) -> int:
    boundaries = result.planes[part.request].request.boundaries
    return boundaries.index(part.stop) - boundaries.index(part.start)


@pytest.mark.parametrize("name", sorted(policies.available()))
@pytest.mark.parametrize(("tokens", "cells"), [(1, 1), (8, 8), (17, 20), (1000, 1000)])
def test_ops_fit_token_budget_and_staging_buffer(name: str, tokens: int, cells: int) -> None:
    request = Request.of("a", prefix=60, suffix=20, chunk=8, layers=4, holes=[0, 1, 2])
    costs = Affine(request.windows, bandwidth=16.0)
    result = run(policies.find(name)(costs, token_budget=tokens, staging_cells=cells), [request])
    check(result)
    _check_limits(result)


def failing(batch: list[Request], mode: str, seed: int) -> Callable[[Op], Failures]:
    """Fails whole ops, single columns of them, or everything."""
    chance = random.Random(seed)

    def fail(op: Op) -> Failures:
        whole = mode == "everything" or (mode == "ops" and chance.random() < 0.4)
        return tuple((c, "lost") for c in columns(op, batch) if whole or (mode == "columns" and chance.random() < 0.4))

    return fail


@pytest.mark.parametrize("mode", ["ops", "columns", "everything"])
@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_failed_loads_are_recomputed(
    case: tuple[list[Request], Costs, Callable[[Costs], Policy]], seed: int, mode: str
) -> None:
    batch, costs, make = case
    result = run(make(costs), batch, costs=costs, fail=failing(batch, mode, seed))
    check(result)
    if mode == "everything":
        assert not any(span.op.kind == "copy" for span in result.spans)
    # Every cell is filled once; advancing over loaded cells to failed ones can at most double the work.
    cells = sum(request.columns * request.layers for request in batch)
    assert len(result.spans) <= 5 * cells


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32), data=st.data())
def test_cancelled_requests_drain(
    case: tuple[list[Request], Costs, Callable[[Costs], Policy]], seed: int, data: st.DataObject
) -> None:
    batch, costs, make = case
    at = {request.id: (data.draw(st.integers(0, 12)), 0.0) for request in batch if data.draw(st.booleans())}
    result = run(make(costs), batch, costs=costs, fail=failing(batch, "columns", seed), cancels=at)
    check(result, cancelled=frozenset(at))


@pytest.mark.parametrize(("name", "columns", "layers"), [("token", 5, 20), ("layer", 20, 5)])
@pytest.mark.parametrize("slower", [0.6, 1.0, 1.7])
def test_the_last_unit_is_cut_across(name: str, columns: int, layers: int, slower: float) -> None:
    """Where every cell costs the same, both sides end together: no unit is left to one while the other waits."""
    request = Request.of("a", prefix=columns * 8, suffix=1, chunk=8, layers=layers)
    costs = Affine(request.windows, project=1.0, advance=0.0, pair=0.0, head=0.0, bandwidth=8.0 / slower)
    spans = run(policies.find(name)(costs), [request]).spans
    restored = max(span.end for span in spans if any(part.start < request.prefix for part in span.op.parts))
    ideal = request.prefix * layers * slower / (1 + slower)
    assert restored <= ideal + 2 * 8 * max(1.0, slower)


@pytest.mark.parametrize("name", sorted(policies.available()))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_hidden_budget(name: str, data: st.DataObject) -> None:
    """Without holes, failures and windows no more is kept than the budget, or than one column."""
    windows = (None,) * data.draw(st.integers(2, 4))
    batch = [data.draw(strategies.requests(windows, id, plain=True)) for id in "ab"]
    costs = Affine(windows, bandwidth=8 * 10 ** data.draw(st.floats(-1, 1)), loss=0.1)
    budget = data.draw(st.integers(1, 30))
    result = run(policies.find(name)(costs, hidden_tokens=budget, token_budget=data.draw(st.integers(1, 30))), batch)
    assert result.held <= max([budget, *(request.width(c) for request in batch for c in range(len(request.stored)))])


def test_a_small_hidden_budget_does_not_stop_the_layer_axis() -> None:
    request = Request.of("a", prefix=64, suffix=1, chunk=8, layers=4)
    costs = Affine(request.windows, bandwidth=8.0)
    for budget in (8, 20, 64):
        result = run(policies.find("layer")(costs, hidden_tokens=budget), [request])
        computed = [s.seconds for s in result.spans if s.op.kind == COMPUTE]
        assert sum(computed) >= 0.7 * result.ttft["a"]


@pytest.mark.parametrize("name", sorted(policies.available()))
def test_head_and_middle_of_the_prefix_are_gone(name: str) -> None:
    """Field case 24: what is still there is used, holes are recomputed in place."""
    request = Request.of("a", prefix=64, suffix=3, chunk=8, layers=4, holes=[0, 1, 3])
    costs = Affine(request.windows, advance=5.0, bandwidth=100.0)
    result = run(policies.find(name)(costs), [request])
    check(result)
    parts = [part for span in result.spans if span.op.kind == FETCH for part in span.op.parts]
    loaded = {request.column_at(token) for part in parts for token in range(part.start, part.stop)}
    assert loaded == (set() if name == "recompute" else {2, 4, 5, 6, 7})


def test_load_computes_only_holes_and_suffix() -> None:
    request = Request.of("a", prefix=64, suffix=3, chunk=8, layers=4, holes=[0, 5])
    result = run(policies.find("load")(Affine(request.windows, bandwidth=1.0)), [request])
    computed = {(part.start, part.stop) for s in result.spans if s.op.kind == COMPUTE for part in s.op.parts}
    assert computed == {(0, 8), (40, 48), (64, 67)}


class Mine(Policy):
    """As a user would bring it."""

    def next_compute(self, now: float) -> Op | None:
        return None

    def next_fetch(self, now: float) -> Op | None:
        return None


class TestDiscovery:
    def test_every_policy_by_name(self) -> None:
        found = policies.available()
        assert list(found)[:6] == ["recompute", "load", "layerwise-load", "token", "layer", "two-pointer"]
        for name, cls in found.items():
            assert policies.find(name) is cls
            assert cls.name == name

    def test_module_and_class(self) -> None:
        assert policies.find(f"{__name__}:Mine") is Mine

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("best", "choose one of recompute, load"),
            ("nowhere:Mine", "cannot be imported"),
            (f"{__name__}:Other", "cannot be imported"),
            (f"{__name__}:SLACK", "not a subclass"),
            ("pathlib:Path", "not a subclass"),
        ],
    )
    def test_unknown(self, name: str, says: str) -> None:
        with pytest.raises(ValueError, match=says) as raised:
            policies.find(name)
        assert name in str(raised.value)


@pytest.mark.parametrize("fails", [False, True])
def test_estimate_of_when_the_link_is_free(fails: bool) -> None:
    """An op that failed has taken its time too."""
    policy = policies.find("load")(Affine((None,), bandwidth=8.0))
    policy.add(Plane(Request.of("a", prefix=16, suffix=1, chunk=8, layers=1)))
    first, second = policy.next("link", 0.0), policy.next("link", 0.0)
    assert first is not None and second is not None
    assert policy.free_at("link", 0.0) == 16.0
    if fails:
        policy.failed(first, "lost")
    else:
        policy.finished(first, 8.0)
    assert policy.free_at("link", 8.0) == 16.0


def test_ids_are_unique_and_budgets_sane() -> None:
    costs = Affine((None,), bandwidth=1.0)
    policy = policies.find("load")(costs)
    policy.add(Plane(Request.of("a", prefix=8, suffix=1, chunk=8, layers=1)))
    with pytest.raises(ValueError, match="'a'"):
        policy.add(Plane(Request.of("a", prefix=8, suffix=1, chunk=8, layers=1)))
    with pytest.raises(ValueError, match="token budget 0"):
        policies.find("load")(costs, token_budget=0)
