"""The plane of one request: columns of tokens by rows of layers, what is filled, and what is possible next.

Pure Python, so that a policy which works on it can run anywhere: in virtual time, on real streams, inside a host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import add

from cacheflow.op import COMPUTE, FETCH, Kind, Op, Part
from cacheflow.request import Request

EMPTY, LOADING, LOADED, COMPUTED = range(4)
FILLED = bytes([0, 0, 1, 1]) + bytes(252)  # a table for bytes.translate: 1 for what is filled


class ImpossibleOp(RuntimeError):
    """A policy handed out an op that the plane's state does not permit: a bug of the policy, never of its user."""


class Plane:
    """Progress of one request.

    A cell goes EMPTY -> COMPUTED when a compute op that projects it is started, or EMPTY -> LOADING -> LOADED when its
    fetch is started and landed, or back to EMPTY when the fetch failed. LOADED and COMPUTED cells are *filled*: the
    copy or compute that writes them is at least queued on its stream, so later compute may be queued behind it.

    state: [layers] rows of one byte per column.
    height: [columns]; the layer at whose entry the column's hidden state exists. 0, the embedding, always does.
    available: [columns]; whether the store is still believed to have the column.
    need: [layers] rows of one byte per column; whether anything that is still to be computed, the suffix first of all,
        attends to the cell. Others need not be restored.
    missing: [columns]; how many needed cells are not filled.
    unclaimed: [columns]; how many needed cells are empty: neither filled nor in flight.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.layers = request.layers
        self.columns = request.columns
        self.prefix_columns = len(request.stored)
        self.state = [bytearray(self.columns) for _ in range(self.layers)]
        self.height = [0] * self.columns
        self.available = [*request.stored, *[False] * (self.columns - self.prefix_columns)]
        self.in_flight = 0
        self.done = False
        self.cancelled = False
        self._column_of = {token: i for i, token in enumerate(request.boundaries)}
        self._windowed = any(request.windows)
        self.need = self._needs()
        self.missing, self.unclaimed = [0] * self.columns, [0] * self.columns
        self._count(1, 0, self.columns, range(self.layers), self.missing, self.unclaimed)

    # What is needed, filled, possible

    def needed(self, column: int, layer: int) -> bool:
        """Whether the cell must be filled."""
        return bool(self.need[layer][column])

    def loadable(self, column: int, layer: int) -> bool:
        """Whether a fetch of the cell may start now: needed, empty and believed to be in the store."""
        return self.available[column] and self.state[layer][column] == EMPTY and self.needed(column, layer)

    def loadable_band(self, column: int, below: int | None = None) -> range:
        """The highest run of layers, all under `below`, in which the column is loadable; empty if there is none."""
        if not self.available[column]:
            return range(0)
        rows = zip(self.state[:below], self.need, strict=False)
        loadable = bytes([cells[column] == EMPTY and need[column] for cells, need in rows])
        top = loadable.rfind(1) + 1
        return range(loadable.rfind(0, 0, top) + 1, top)

    def loadable_columns(self, columns: Iterable[int], layer: int) -> list[int]:
        """Those of the columns, in their order, that are loadable at `layer`."""
        cells, need, available = self.state[layer], self.need[layer], self.available
        return [c for c in columns if cells[c] == EMPTY and need[c] and available[c]]

    def empty_layers(self, columns: range, *, down: bool = False) -> Iterator[int]:
        """Layers, from the first up or from the last down, at which one of the columns' cells is empty, if any of their
        needed cells is."""
        first, last = columns.start, columns.stop
        if any(self.unclaimed[first:last]):
            for layer in reversed(range(self.layers)) if down else range(self.layers):
                if self.state[layer].find(EMPTY, first, last) >= 0:
                    yield layer

    def filled(self, first: int, last: int, layer: int) -> bool:
        """Whether every cell of columns [first, last) at `layer` is filled."""
        cells = self.state[layer]
        return cells.find(EMPTY, first, last) < 0 and cells.find(LOADING, first, last) < 0

    def filled_row(self, layer: int) -> bytearray:
        """[columns]; 1 where the cell at `layer` is filled."""
        return self.state[layer].translate(FILLED)

    def attended_filled(self, first: int, last: int, layer: int) -> bool:
        """Whether all that columns [first, last), as one part, attend to at `layer`, themselves left out, is filled."""
        return self.filled(self._first_attended(first, last, layer), first, layer)

    def _first_attended(self, first: int, last: int, layer: int) -> int:
        # At the model's last layer only the last token of a part advances.
        return self.request.first_attended(last - 1 if layer == self.layers - 1 else first, layer)

    @property
    def restored(self) -> bool:
        """Whether every needed cell of the prefix is filled."""
        return not any(self.missing[: self.prefix_columns])

    def must_compute(self, column: int) -> bool:
        """Whether the column has needed cells that only recompute can fill."""
        return self.missing[column] > 0 and not self.available[column]

    @property
    def compute_only(self) -> list[int]:
        """Columns that have needed cells which only recompute can fill."""
        pairs = zip(self.missing, self.available, strict=True)
        return [c for c, (missing, available) in enumerate(pairs) if missing and not available]

    def holds(self, column: int) -> bool:
        """Whether the column's hidden state, other than the embedding, must be kept for ops still to come."""
        return 0 < self.height[column] < self.layers and (self.missing[column] > 0 or column == self.columns - 1)

    @property
    def held_tokens(self) -> int:
        """Tokens whose hidden states are kept between ops: what the hidden budget limits."""
        return sum(self.request.width(c) for c in range(self.columns) if self.holds(c))

    # Ops

    def part(self, first: int, last: int, *, project: bool = True, advance: bool = True) -> Part:
        """Columns [first, last) as a part of an op."""
        b = self.request.boundaries
        return Part(self.request.id, b[first], b[last], project, advance)

    def parts(self, columns: Iterable[int], *, advance: bool = True) -> tuple[Part, ...]:
        """Columns in any order as parts of an op, ascending and neighbours joined."""
        ordered = sorted(columns)
        gaps = [i for i, (left, right) in enumerate(pairwise(ordered), 1) if right != left + 1]
        runs = zip([0, *gaps], [*gaps, len(ordered)], strict=True) if ordered else ()
        return tuple([self.part(ordered[start], ordered[stop - 1] + 1, advance=advance) for start, stop in runs])

    def columns_of(self, part: Part) -> tuple[int, int]:
        """The columns [first, last) of a part."""
        try:
            return self._column_of[part.start], self._column_of[part.stop]
        except KeyError:
            raise ImpossibleOp(f"{part} does not begin and end at column boundaries") from None

    def top(self, column: int) -> int:
        """One past the highest layer whose cell is needed and empty; 0 if there is none."""
        if self.unclaimed[column]:
            for layer in reversed(range(self.layers)):
                if self.state[layer][column] == EMPTY and self.need[layer][column]:
                    return layer + 1
        return 0

    def climb(self, column: int, token_budget: int, last: int | None = None) -> Op | None:
        """The largest compute op that takes `column`, and its like to the right, further up now; None if blocked.

        Columns [column, last) are joined while they stand at the same height, have the same cells filled, are all in
        the store or all not, and fit the token budget. The band ends below the first cell in flight, where attended
        cells are missing, or at the highest empty cell of the columns: there cells are only projected, unless the
        request's last token is among them.
        """
        low, high = self.height[column], self.top(column)
        if high <= low:
            return None
        if low + 1 < min(high, self.layers) and not self.attended_filled(column, column + 1, low):
            return None  # whatever is joined to it
        end = self._alike(column, self.within(column, token_budget, last), low, high)
        last_token = end == self.columns and high == self.layers
        project = self.state[low][column] < LOADED
        stop = low
        while stop < high and self.state[stop][column] in ((EMPTY,) if project else (LOADED, COMPUTED)):
            projects_only = stop == high - 1 and not last_token  # needs nobody else's cells
            if not projects_only and not self.attended_filled(column, end, stop):
                break
            if stop == self.layers - 1 and last_token and any(self.missing[self.prefix_columns : column]):
                break
            stop += 1
        if stop == low:
            return None
        part = self.part(column, end, project=project, advance=stop < high or last_token)
        return Op(COMPUTE, range(low, stop), (part,))

    def within(self, first: int, tokens: int, last: int | None = None) -> int:
        """One past the last of columns [first, last) up to which they are no more than so many tokens; the first column
        counts in any case."""
        end = self.request.column_at(self.request.boundaries[first] + tokens)
        return max(first + 1, end if last is None else min(end, last))

    def _alike(self, first: int, last: int, low: int, high: int) -> int:
        """One past the last of columns [first, last) up to which they stand at one height, are all in the store or all
        not, and have the same cells filled in layers [low, high)."""
        height, available, end = self.height[first], self.available[first], first + 1
        while end < last and self.height[end] == height and self.available[end] == available:
            end += 1
        for row in self.state[low:high]:
            cells = row[first:end]
            end -= len(cells.lstrip(cells[:1]))
        return end

    def start(self, kind: Kind, layers: range, parts: list[Part]) -> None:
        """Account for an op's parts of this request as it is issued. Raises ImpossibleOp where the state forbids it."""
        if self.done or self.cancelled:
            raise ImpossibleOp(f"request {self.request.id} is over")
        if not layers or not 0 <= layers.start < layers.stop <= self.layers:
            raise ImpossibleOp(f"band {layers} is outside the model's {self.layers} layers")
        columns = [self.columns_of(part) for part in parts]
        for part, (first, last) in zip(parts, columns, strict=True):
            self.in_flight += last - first
            if kind == FETCH:
                self._start_fetch(first, last, layers, part)
            else:
                self._start_projection(first, last, layers, part)
        if kind == COMPUTE:
            for part, (first, last) in zip(parts, columns, strict=True):
                self._start_advance(first, last, layers, part)

    def _start_fetch(self, first: int, last: int, layers: range, part: Part) -> None:
        stored = all(self.available[first:last])
        for layer in layers:
            empty = self.state[layer].count(EMPTY, first, last) == last - first
            if not (stored and empty and self.need[layer].find(0, first, last) < 0):
                raise ImpossibleOp(f"{part} at layer {layer} cannot be loaded now")
        self._set(first, last, layers, LOADING)
        self._count(-1, first, last, layers, self.unclaimed)

    def _start_projection(self, first: int, last: int, layers: range, part: Part) -> None:
        if layers.start and (heights := set(self.height[first:last]) - {layers.start}):
            raise ImpossibleOp(f"{part} is at layer {min(heights)}, not {layers.start}")
        if not part.project:
            return
        for layer in layers:
            if self.state[layer].count(EMPTY, first, last) < last - first:
                raise ImpossibleOp(f"{part} at layer {layer} would be filled twice")
        self._set(first, last, layers, COMPUTED)
        self._count(-1, first, last, layers, self.missing, self.unclaimed)

    def _set(self, first: int, last: int, layers: range, state: int) -> None:
        """Set the cells of columns [first, last) in a band."""
        cells = bytes([state]) * (last - first)
        for layer in layers:
            self.state[layer][first:last] = cells

    def _count(self, change: int, first: int, last: int, layers: range, *counts: list[int]) -> None:
        """Change what is counted by column by so much for every needed cell of columns [first, last) in a band."""
        if self._windowed:
            rows = [row[first:last] for row in self.need[layers.start : layers.stop]]
            changes = [change * sum(cells) for cells in zip(*rows, strict=True)]
            for of_columns in counts:
                of_columns[first:last] = map(add, of_columns[first:last], changes)
        else:
            change *= len(layers)
            for of_columns in counts:
                of_columns[first:last] = [count + change for count in of_columns[first:last]]

    def _start_advance(self, first: int, last: int, layers: range, part: Part) -> None:
        top = layers.stop if part.advance else layers.stop - 1
        for layer in range(layers.start, top):
            if not self.filled(self._first_attended(first, last, layer), last, layer):
                raise ImpossibleOp(f"{part} at layer {layer} would attend to cells that are not filled")
        if not part.project and not self.filled(first, last, layers.stop - 1):
            raise ImpossibleOp(f"{part} does not project cells that are not filled")
        if top == self.layers and last == self.columns and any(self.missing[self.prefix_columns :]):
            raise ImpossibleOp(f"{part} ends request {self.request.id} before its suffix is filled")
        self.height[first:last] = [top] * (last - first)

    def landed(self, layers: range, part: Part) -> None:
        """A fetch arrived, whole and verified, and its copy, which cannot fail, is queued at once: still in flight."""
        first, last = self.columns_of(part)
        self._set(first, last, layers, LOADED)
        self._count(-1, first, last, layers, self.missing)

    def failed(self, layers: range, part: Part) -> None:
        """A fetch did not arrive: its cells are empty again, and the store is not asked for these columns any more."""
        first, last = self.columns_of(part)
        self.in_flight -= last - first
        self._set(first, last, layers, EMPTY)
        self._count(1, first, last, layers, self.unclaimed)
        self.forget(first, last)

    def forget(self, first: int = 0, last: int | None = None) -> None:
        """Stop believing that the store has columns [first, last): their empty cells must be computed."""
        last = self.prefix_columns if last is None else last
        self.available[first:last] = [False] * (last - first)
        if not self._windowed:
            return  # everything is needed, whatever the store has
        self.need = self._needs()
        for column, before in enumerate(self.missing):
            cells = [self.state[layer][column] for layer in range(self.layers) if self.need[layer][column]]
            self.unclaimed[column] = cells.count(EMPTY)
            self.missing[column] = cells.count(EMPTY) + cells.count(LOADING)
            if self.missing[column] and not before:
                self.height[column] = 0  # nothing was missing, so its hidden state was not held

    def finished(self, kind: Kind, layers: range, part: Part) -> None:
        """A compute or copy op ended on its stream."""
        first, last = self.columns_of(part)
        self.in_flight -= last - first
        if kind == COMPUTE and layers.stop == self.layers and last == self.columns and part.advance:
            self.done = True

    def _needs(self) -> list[bytearray]:
        """Which cells are needed, [layers][columns]: the closure over what must be computed, that is the suffix, holes
        and columns whose load failed.

        A column that must be computed at layer l is advanced through the layers from its height to l and needs, at
        each of them, all that it attends to. Layers are taken from the top down, since need spreads downwards and left.
        """
        request, last = self.request, self.columns - 1
        if not self._windowed:
            return [bytearray(b"\1" * self.columns) for _ in range(self.layers)]
        need = [bytearray(self.columns) for _ in range(self.layers)]
        lost = [c for c in range(self.prefix_columns) if not self.available[c]]
        climbing = {last}
        for layer, row in reversed(list(enumerate(need))):
            row[self.prefix_columns :] = b"\1" * (self.columns - self.prefix_columns)  # to be stored
            for column in climbing:
                if self.height[column] <= layer:
                    first = request.first_attended(column, layer)
                    row[first : column + 1] = b"\1" * (column + 1 - first)
            climbing.update(range(self.prefix_columns, last))
            climbing.update(c for c in lost if row[c] and self.state[layer][c] == EMPTY)
        return need
