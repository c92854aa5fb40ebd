"""The plane: what is needed, what is possible next, and that nothing impossible is accepted."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow.op import COMPUTE, COPY, FETCH, Kind, Part
from cacheflow.plane import COMPUTED, EMPTY, LOADED, LOADING, ImpossibleOp, Plane
from cacheflow.request import Request
from tests.cacheflow import strategies
from tests.cacheflow.legality import attended, needed


def small(window: int | None = None, holes: Iterable[int] = (), suffix: int = 2) -> Plane:
    """3 chunks of 4 tokens and a suffix, 3 layers."""
    return Plane(Request.of("a", prefix=12, suffix=suffix, chunk=4, layers=3, window=window, holes=list(holes)))


def load(plane: Plane, layers: range, first: int, last: int) -> None:
    part = plane.part(first, last)
    plane.start(FETCH, layers, [part])
    plane.landed(layers, part)
    plane.finished(COPY, layers, part)


def compute(plane: Plane, layers: range, first: int, last: int, *, project: bool = True, advance: bool = True) -> None:
    part = plane.part(first, last, project=project, advance=advance)
    plane.start(COMPUTE, layers, [part])
    plane.finished(COMPUTE, layers, part)


class TestNeed:
    @given(strategies.windows().flatmap(strategies.requests))
    def test_is_the_closure_over_what_must_be_computed(self, request: Request) -> None:
        plane = Plane(request)
        holes = frozenset(c for c, stored in enumerate(request.stored) if not stored)
        cells = {(c, r) for c in range(plane.columns) for r in range(plane.layers) if plane.needed(c, r)}
        assert cells == needed(request, holes)

    @given(strategies.windows().flatmap(strategies.requests), st.data())
    def test_spreads_when_a_column_is_lost(self, request: Request, data: st.DataObject) -> None:
        plane = Plane(request)
        lost = {c for c, stored in enumerate(request.stored) if not stored}
        columns = st.sampled_from(range(len(request.stored))) if request.stored else st.nothing()
        for column in data.draw(st.lists(columns)):
            band = plane.loadable_band(column)
            if band:
                plane.start(FETCH, band, [plane.part(column, column + 1)])
                plane.failed(band, plane.part(column, column + 1))
                lost.add(column)
        cells = {(c, r) for c in range(plane.columns) for r in range(plane.layers) if plane.needed(c, r)}
        assert cells == needed(request, frozenset(lost))
        assert plane.in_flight == 0

    def test_a_short_window_needs_little(self) -> None:
        plane = small(window=3)
        assert [[plane.needed(c, layer) for c in range(4)] for layer in range(3)] == [
            [False, False, True, True],
            [False, False, True, True],
            [False, False, True, True],
        ]
        assert not plane.loadable_band(1)

    def test_the_last_layer_is_attended_to_by_the_last_token_alone(self) -> None:
        plane = small(window=3, suffix=4)  # the suffix's first token sees chunk 2, its last does not
        assert [plane.needed(2, layer) for layer in range(3)] == [True, True, False]


class TestClimb:
    def test_ends_kv_only_below_loaded_cells(self) -> None:
        plane = small()
        load(plane, range(2, 3), 0, 1)
        op = plane.climb(0, 1)
        assert op is not None
        assert (op.layers, op.parts) == (range(2), (plane.part(0, 1, advance=False),))

    def test_advances_over_loaded_cells_to_one_whose_load_failed(self) -> None:
        plane = small()
        load(plane, range(2), 0, 1)
        plane.start(FETCH, range(2, 3), [plane.part(0, 1)])
        plane.failed(range(2, 3), plane.part(0, 1))
        over = plane.climb(0, 1)
        assert over is not None
        assert (over.layers, over.parts) == (range(2), (plane.part(0, 1, project=False),))
        plane.start(COMPUTE, over.layers, list(over.parts))
        top = plane.climb(0, 1)
        assert top is not None
        assert (top.layers, top.parts) == (range(2, 3), (plane.part(0, 1, advance=False),))

    def test_waits_for_what_it_attends_to(self) -> None:
        plane = small(holes=[1])
        assert plane.climb(1, 100) is None
        load(plane, range(1), 0, 1)
        op = plane.climb(1, 1)
        assert op is not None
        assert (op.layers, op.parts[0].advance) == (range(1), True)

    def test_joins_columns_up_to_the_token_budget(self) -> None:
        ops = [small(holes=range(3)).climb(0, budget) for budget in (1, 7, 8, 12, 14)]
        assert [op.tokens for op in ops if op is not None] == [4, 4, 8, 12, 14]

    def test_does_not_join_what_can_be_loaded_to_what_cannot(self) -> None:
        for plane, tokens in ((small(holes=[0]), 4), (small(holes=[1, 2]), 4), (small(holes=[0, 1]), 8), (small(), 12)):
            op = plane.climb(0, 100)
            assert op is not None and op.tokens == tokens

    def test_ends_the_request_with_its_last_token(self) -> None:
        op = small(holes=range(3)).climb(0, 14)
        assert op is not None
        assert (op.layers, op.parts[0].advance) == (range(3), True)

    def test_last_token_waits_for_the_rest_of_the_suffix(self) -> None:
        plane = Plane(Request("a", (0, 4, 8, 12), (True,), (1, 1)))  # nobody sees anybody else
        op = plane.climb(2, 100)
        assert op is not None
        assert op.layers == range(1)
        with pytest.raises(ImpossibleOp, match="before its suffix is filled"):
            compute(plane, range(2), 2, 3)


class TestHiddenStates:
    def test_are_held_while_cells_above_are_missing(self) -> None:
        plane = small()
        compute(plane, range(2), 0, 2)
        assert [plane.holds(c) for c in range(4)] == [True, True, False, False]
        assert plane.held_tokens == 8
        load(plane, range(2, 3), 0, 1)
        assert plane.held_tokens == 4
        compute(plane, range(2, 3), 1, 2, advance=False)
        assert plane.held_tokens == 0

    def test_are_those_of_the_last_op(self) -> None:
        plane = small()
        compute(plane, range(2), 0, 1)
        compute(plane, range(1), 0, 1, project=False)  # from the embedding again
        assert plane.height[0] == 1

    def test_of_the_last_token_are_held_until_it_is_out(self) -> None:
        plane = small()
        compute(plane, range(3), 0, 4, advance=False)
        assert plane.missing == [0, 0, 0, 0] and plane.holds(3)
        compute(plane, range(2, 3), 3, 4, project=False)
        assert plane.done and not plane.holds(3)

    def test_are_made_again_for_a_column_that_is_needed_again(self) -> None:
        # The window shows the suffix only chunk 1, at both layers; chunk 0 is not needed until chunk 1 is lost.
        plane = Plane(Request("a", (0, 4, 8, 10), (True, True), (3, 3, 3)))
        assert plane.missing[0] == 0
        compute(plane, range(1), 0, 1)
        assert plane.height[0] == 1 and not plane.holds(0)
        plane.start(FETCH, range(3), [plane.part(1, 2)])
        plane.failed(range(3), plane.part(1, 2))
        assert plane.missing[0] == 1 and plane.height[0] == 0


@pytest.mark.parametrize(
    ("kind", "layers", "part", "says"),
    [
        pytest.param(FETCH, range(3), Part("a", 4, 8), "cannot be loaded", id="fetch-of-a-hole"),
        pytest.param(FETCH, range(3), Part("a", 12, 14), "cannot be loaded", id="fetch-of-the-suffix"),
        pytest.param(FETCH, range(1), Part("a", 0, 4), "cannot be loaded", id="fetch-twice"),
        pytest.param(FETCH, range(1, 2), Part("a", 0, 3), "column boundaries", id="fetch-of-half-a-chunk"),
        pytest.param(COMPUTE, range(1), Part("a", 0, 4), "filled twice", id="project-what-loads"),
        pytest.param(COMPUTE, range(1, 2), Part("a", 8, 12), "is at layer 0", id="no-hidden-state"),
        pytest.param(COMPUTE, range(1), Part("a", 8, 12), "not filled", id="attends-to-a-hole"),
        pytest.param(COMPUTE, range(1), Part("a", 8, 12, project=False), "not filled", id="advance-over-nothing"),
        pytest.param(COMPUTE, range(0), Part("a", 8, 12), "band", id="no-layers"),
        pytest.param(COMPUTE, range(2, 4), Part("a", 8, 12), "band", id="too-many-layers"),
    ],
)
def test_impossible_op(kind: Kind, layers: range, part: Part, says: str) -> None:
    plane = small(holes=[1])
    plane.start(FETCH, range(1), [plane.part(0, 1)])
    with pytest.raises(ImpossibleOp, match=says):
        plane.start(kind, layers, [part])


def test_nothing_starts_once_a_request_is_over() -> None:
    plane = small()
    compute(plane, range(3), 0, 4)
    assert plane.done
    with pytest.raises(ImpossibleOp, match="over"):
        plane.start(COMPUTE, range(1), [plane.part(0, 1)])
    plane = small()
    plane.cancelled = True
    with pytest.raises(ImpossibleOp, match="over"):
        plane.start(FETCH, range(1), [plane.part(0, 1)])


class Model:
    """The rules of the plane written down naively; decides what is possible, and keeps what was done."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.state = {(c, r): EMPTY for c in range(request.columns) for r in range(request.layers)}
        self.lost = {c for c, stored in enumerate(request.stored) if not stored}
        self.height = dict.fromkeys(range(request.columns), 0)

    def permits(self, kind: Kind, layers: range, parts: list[Part], plane: Plane) -> bool:
        b, last_layer = self.request.boundaries, self.request.layers - 1
        if not all(part.start in b and part.stop in b for part in parts):
            return False
        state = dict(self.state)
        columns = {part: range(b.index(part.start), b.index(part.stop)) for part in parts}
        if kind == FETCH:
            cells = [(c, r) for part in parts for c in columns[part] for r in layers]
            allowed = (self.state[c] == EMPTY and plane.needed(*c) and c[0] not in self.lost for c in cells)
            in_prefix = all(c < len(self.request.stored) for c, _ in cells)
            return in_prefix and len(set(cells)) == len(cells) and all(allowed)
        for layer in layers:
            for part in parts:
                for c in columns[part]:
                    if layer == layers.start and layer not in (0, self.height[c]):
                        return False
                    if part.project and state[c, layer] != EMPTY:
                        return False
                    if part.project:
                        state[c, layer] = COMPUTED
                    elif state[c, layer] in (EMPTY, LOADING):
                        return False
            for part in parts:
                if layer == layers[-1] and not part.advance:
                    continue
                seen = attended(self.request, part.stop - 1 if layer == last_layer else part.start, part.stop, layer)
                if any(state[c, layer] in (EMPTY, LOADING) for c in seen):
                    return False
                suffix = range(len(self.request.stored), self.request.columns)
                if layer == last_layer and part.stop == self.request.tokens:
                    filled = (state[c, r] not in (EMPTY, LOADING) for c in suffix for r in range(self.request.layers))
                    if not all(filled):
                        return False
        return True

    def do(self, kind: Kind, layers: range, parts: list[Part]) -> None:
        for part in parts:
            columns = range(self.request.boundaries.index(part.start), self.request.boundaries.index(part.stop))
            for c in columns:
                for layer in layers:
                    if kind == FETCH:
                        self.state[c, layer] = LOADING
                    elif part.project:
                        self.state[c, layer] = COMPUTED
                if kind == COMPUTE:
                    self.height[c] = layers.stop if part.advance else layers[-1]


@st.composite
def ops(draw: st.DrawFn, request: Request, kind: Kind) -> tuple[range, list[Part]]:
    start = draw(st.integers(0, request.layers - 1))
    layers = range(start, draw(st.integers(start + 1, request.layers)))
    parts, column = [], draw(st.integers(0, request.columns - 1))
    while column < request.columns:
        end = draw(st.integers(column + 1, request.columns))
        flags = (True, True) if kind == FETCH else (draw(st.booleans()), draw(st.booleans()))
        parts.append(Part("a", request.boundaries[column], request.boundaries[end], *flags))
        column = draw(st.integers(end, request.columns))
        if len(parts) == 2:
            break
    return layers, parts


@settings(max_examples=300, deadline=None)
@given(strategies.batches(max_requests=1, max_layers=3, max_prefix=3, max_suffix=2).map(lambda b: b[0]), st.data())
def test_accepts_what_is_possible_and_nothing_else(request: Request, data: st.DataObject) -> None:
    plane, model = Plane(request), Model(request)
    flying: list[tuple[range, Part]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) and flying:
            layers, part = flying.pop()
            column = plane.columns_of(part)[0]
            if data.draw(st.booleans()):
                plane.landed(layers, part)
                plane.finished(COPY, layers, part)
                model.state.update({(column, layer): LOADED for layer in layers})
            else:
                plane.failed(layers, part)
                model.state.update({(column, layer): EMPTY for layer in layers})
                model.lost.add(column)
                model.height = dict(enumerate(plane.height))  # what a revived column must start again from
        kind = data.draw(st.sampled_from([COMPUTE, FETCH]))
        layers, parts = data.draw(ops(request, kind))
        climb = plane.climb(data.draw(st.integers(0, request.columns - 1)), data.draw(st.integers(1, 20)))
        if climb is not None and data.draw(st.booleans()):
            kind, layers, parts = COMPUTE, climb.layers, list(climb.parts)
            assert model.permits(kind, layers, parts, plane), "climb offers what is impossible"
        if not model.permits(kind, layers, parts, plane):
            with pytest.raises(ImpossibleOp):
                copy.deepcopy(plane).start(kind, layers, parts)
            continue
        plane.start(kind, layers, parts)
        model.do(kind, layers, parts)
        for part in parts:
            if kind == COMPUTE:
                plane.finished(kind, layers, part)
            else:
                flying.extend((layers, plane.part(c, c + 1)) for c in range(*plane.columns_of(part)))
        if plane.done:
            break
        for c in range(plane.columns):
            cells = [model.state[c, layer] for layer in range(plane.layers) if plane.needed(c, layer)]
            assert plane.unclaimed[c] == cells.count(EMPTY)
            assert plane.missing[c] == cells.count(EMPTY) + cells.count(LOADING)
            assert plane.height[c] == model.height[c]
        assert plane.in_flight == sum(plane.columns_of(part)[1] - plane.columns_of(part)[0] for _, part in flying)
        check_views(plane, model)


def check_views(plane: Plane, model: Model) -> None:
    """What looks at many cells at once sees what single cells are."""
    columns, state = range(plane.columns), model.state
    for layer in range(plane.layers):
        filled = [state[c, layer] in (LOADED, COMPUTED) for c in columns]
        assert list(plane.filled_row(layer)) == filled
        assert all(plane.filled(c, end, layer) == all(filled[c:end]) for c in columns for end in range(c, len(columns)))
        loadable = [c for c in reversed(columns) if plane.loadable(c, layer)]
        assert plane.loadable_columns(reversed(columns), layer) == loadable
    for c in columns:
        band = plane.loadable_band(c)
        assert list(band) == [layer for layer in band if plane.loadable(c, layer)]
        assert not any(plane.loadable(c, layer) for layer in range(band.stop, plane.layers))
        assert not (band and band.start and plane.loadable(c, band.start - 1))
        assert plane.loadable_band(c, plane.layers - 1).stop < plane.layers
        part = columns[c:]
        empty = [layer for layer in range(plane.layers) if any(state[other, layer] == EMPTY for other in part)]
        if any(plane.unclaimed[other] for other in part):
            assert list(plane.empty_layers(part)) == empty == list(plane.empty_layers(part, down=True))[::-1]
        else:
            assert not [*plane.empty_layers(part), *plane.empty_layers(part, down=True)]
    assert plane.compute_only == [c for c in columns if plane.must_compute(c)]


@pytest.mark.parametrize(
    ("first", "tokens", "last", "end"),
    [(0, 12, None, 3), (0, 11, None, 2), (1, 8, 2, 2), (1, 1, None, 2), (2, 100, None, 4), (2, 100, 3, 3)],
)
def test_within(first: int, tokens: int, last: int | None, end: int) -> None:
    assert small().within(first, tokens, last) == end


def test_parts_join_neighbours() -> None:
    plane = small()
    assert plane.parts([3, 0, 1]) == (plane.part(0, 2), plane.part(3, 4))
    assert plane.parts(range(4)) == (plane.part(0, 4),)
    assert plane.parts([]) == ()
