"""The plane of one request: columns of tokens by rows of layers, what is filled, and what is possible next.

Pure Python, so that a policy which works on it can run anywhere: in virtual time, on real streams, inside a host.
"""

from __future__ import annotations

from collections.abc import Iterable

from cacheflow.op import COMPUTE, FETCH, Kind, Op, Part
from cacheflow.request import Request

EMPTY, LOADING, LOADED, COMPUTED = range(4)


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
        self._filled = [bytearray(self.columns) for _ in range(self.layers)]
        self._column_of = {token: i for i, token in enumerate(request.boundaries)}
        self.need = self._needs()
        self.missing = [sum(cells) for cells in zip(*self.need, strict=True)]
        self.unclaimed = list(self.missing)

    # What is needed, filled, possible

    def needed(self, column: int, layer: int) -> bool:
        """Whether the cell must be filled."""
        return bool(self.need[layer][column])

    def loadable(self, column: int, layer: int) -> bool:
        """Whether a fetch of the cell may start now: needed, empty and believed to be in the store."""
        return self.available[column] and self.state[layer][column] == EMPTY and self.needed(column, layer)

    def loadable_band(self, column: int, below: int | None = None) -> range:
        """The highest run of layers, all under `below`, in which the column is loadable; empty if there is none."""
        top = self.layers if below is None else below
        while top > 0 and not self.loadable(column, top - 1):
            top -= 1
        bottom = top
        while bottom > 0 and self.loadable(column, bottom - 1):
            bottom -= 1
        return range(bottom, top)

    def filled(self, first: int, last: int, layer: int) -> bool:
        """Whether every cell of columns [first, last) at `layer` is filled."""
        return self._filled[layer].find(0, first, last) == -1

    def filled_row(self, layer: int) -> bytearray:
        """[columns]; 1 where the cell at `layer` is filled."""
        return bytearray(self._filled[layer])

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

    def parts(self, columns: Iterable[int]) -> tuple[Part, ...]:
        """Columns in any order as parts of an op, ascending and neighbours joined."""
        runs: list[list[int]] = []
        for column in sorted(columns):
            if runs and runs[-1][1] == column:
                runs[-1][1] += 1
            else:
                runs.append([column, column + 1])
        return tuple(self.part(first, last) for first, last in runs)

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
        tokens, end = self.request.width(column), column + 1
        last = self.columns if last is None else last
        while end < last and self._alike(column, end, low, high):
            tokens += self.request.width(end)
            if tokens > token_budget:
                break
            end += 1
        last_token = end == self.columns and high == self.layers
        project = not self._filled[low][column]
        stop = low
        while stop < high and self.state[stop][column] != LOADING and self._filled[stop][column] != project:
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

    def _alike(self, column: int, other: int, low: int, high: int) -> bool:
        alike = self.height[other] == self.height[column] and self.available[other] == self.available[column]
        return alike and all(row[column] == row[other] for row in self.state[low:high])

    def start(self, kind: Kind, layers: range, parts: list[Part]) -> None:
        """Account for an op's parts of this request as it is issued. Raises ImpossibleOp where the state forbids it."""
        if self.done or self.cancelled:
            raise ImpossibleOp(f"request {self.request.id} is over")
        if not layers or not 0 <= layers.start < layers.stop <= self.layers:
            raise ImpossibleOp(f"band {layers} is outside the model's {self.layers} layers")
        for part in parts:
            first, last = self.columns_of(part)
            self.in_flight += last - first
            if kind == FETCH:
                self._start_fetch(first, last, layers)
            else:
                self._start_projection(first, last, layers, part)
        if kind == COMPUTE:
            for part in parts:
                self._start_advance(*self.columns_of(part), layers, part)

    def _start_fetch(self, first: int, last: int, layers: range) -> None:
        for layer in layers:
            for column in range(first, last):
                if not self.loadable(column, layer):
                    raise ImpossibleOp(f"cell ({column}, {layer}) of {self.request.id} cannot be loaded now")
                self.state[layer][column] = LOADING
                self.unclaimed[column] -= 1

    def _start_projection(self, first: int, last: int, layers: range, part: Part) -> None:
        for column in range(first, last):
            if layers.start not in (0, self.height[column]):
                at = self.height[column]
                raise ImpossibleOp(f"column {column} of {self.request.id} is at layer {at}, not {layers.start}")
        for layer in layers if part.project else ():
            row, filled = self.state[layer], self._filled[layer]
            for column in range(first, last):
                if row[column] != EMPTY:
                    raise ImpossibleOp(f"cell ({column}, {layer}) of {self.request.id} would be filled twice")
                row[column], filled[column] = COMPUTED, 1
                self.missing[column] -= self.need[layer][column]
                self.unclaimed[column] -= self.need[layer][column]

    def _start_advance(self, first: int, last: int, layers: range, part: Part) -> None:
        top = layers.stop if part.advance else layers.stop - 1
        for layer in range(layers.start, top):
            if not self.filled(self._first_attended(first, last, layer), last, layer):
                raise ImpossibleOp(f"{part} at layer {layer} would attend to cells that are not filled")
        if not part.project and not self.filled(first, last, layers.stop - 1):
            raise ImpossibleOp(f"{part} does not project cells that are not filled")
        if top == self.layers and last == self.columns and any(self.missing[self.prefix_columns :]):
            raise ImpossibleOp(f"{part} ends request {self.request.id} before its suffix is filled")
        for column in range(first, last):
            self.height[column] = top

    def landed(self, layers: range, part: Part) -> None:
        """A fetch arrived, whole and verified, and its copy, which cannot fail, is queued at once: still in flight."""
        first, last = self.columns_of(part)
        for layer in layers:
            for column in range(first, last):
                self.state[layer][column], self._filled[layer][column] = LOADED, 1
                self.missing[column] -= self.need[layer][column]

    def failed(self, layers: range, part: Part) -> None:
        """A fetch did not arrive: its cells are empty again, and the store is not asked for these columns any more."""
        first, last = self.columns_of(part)
        self.in_flight -= last - first
        for layer in layers:
            for column in range(first, last):
                self.state[layer][column] = EMPTY
                self.unclaimed[column] += self.need[layer][column]
        self.forget(first, last)

    def forget(self, first: int = 0, last: int | None = None) -> None:
        """Stop believing that the store has columns [first, last): their empty cells must be computed."""
        for column in range(first, self.prefix_columns if last is None else last):
            self.available[column] = False
        if not any(self.request.windows):
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
        if not any(request.windows):
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
