"""The two single axes of the paper, each for one request: a compute pointer and a load pointer that meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from itertools import accumulate, compress
from operator import mul
from typing import Any, ClassVar

from cacheflow.op import COMPUTE, FETCH, Op
from cacheflow.plane import EMPTY, Plane
from cacheflow.policies.base import LINK, Policy, share_to_move

PASS_SHARE = 5 / 6  # of the columns that compute is to get, the share of its next pass; the rest allows for estimates


class Axis(ABC):
    """One request's two pointers.

    A side claims its next unit of cells when it is asked, unless the other side is estimated to reach and finish that
    unit sooner. The paper leaves the meeting open; here the last unit is cut across, so that both are estimated to end
    together: of a column compute takes lower layers and the link upper ones, of a row left and right columns.
    Compute takes by choice only columns that attend to nothing but needed cells: with a sliding window much shorter
    than the prefix everything needed is loaded.
    """

    def __init__(self, policy: Policy, plane: Plane) -> None:
        self.policy = policy
        self.plane = plane
        self.prefix = plane.request.prefix
        self.widths = [plane.request.width(column) for column in range(plane.prefix_columns)]

    @abstractmethod
    def compute_unit(self, now: float) -> tuple[Op | None, float]:
        """The compute pointer's next op, and the estimated seconds until it has filled a cell that is needed."""

    @abstractmethod
    def fetch_unit(self) -> Op | None:
        """The load pointer's next op."""

    @abstractmethod
    def cut_compute(self, op: Op, share: float) -> Op | None:
        """Of a unit's cells those that compute comes to first: a share in (0, 1), rounded, but not to nothing.

        None: the unit begins with holes, which are compute's anyway.
        """

    @abstractmethod
    def cut_fetch(self, op: Op, share: float) -> Op | None:
        """Of a unit's cells those that compute comes to last: a share in (0, 1), rounded; None if to nothing."""

    @abstractmethod
    def compute_seconds(self, op: Op) -> float:
        """Estimated time to compute the cells of a fetch."""

    @abstractmethod
    def recompute_seconds(self, limit: float = float("inf")) -> float:
        """Estimated time to compute what neither side has claimed; the count may stop once it is past `limit`."""

    @abstractmethod
    def restore_seconds(self) -> float:
        """Estimated time until the pointers meet, were this the only request."""

    def next_compute(self, now: float) -> Op | None:
        op, seconds = self.compute_unit(now)
        if op is not None:
            spare = self._loaded_at(now) - self.policy.free_at("compute", now)
            both = seconds + self.policy.costs.load_seconds(op.tokens * len(op.layers))
            share = share_to_move(spare, both)
            if share < 1 and self._may_cut:
                op = self.cut_compute(op, share) if share > 0 else None
            elif seconds > spare:
                op = None
        return op or self.policy.repair(self.plane)

    def next_fetch(self, now: float) -> Op | None:
        op = self.fetch_unit()
        if op is None:
            return None
        costs = self.policy.costs
        fixed, load = costs.fixed(FETCH), costs.load_seconds(op.tokens * len(op.layers))
        lead = self.policy.free_at(LINK, now) + fixed - self.policy.free_at("compute", now)
        unit = load + self.compute_seconds(op)
        spare = self.recompute_seconds(limit=lead + unit) - lead
        # Where nothing is in flight nobody would ask again: estimates of the two sides may leave a unit to each other.
        if spare >= unit or self.policy.idle:
            return op
        if self._may_cut:
            return self.cut_fetch(op, spare / unit) if spare > 0 else None
        return op if load < spare else None

    @property
    def _may_cut(self) -> bool:
        """Whether the hidden states of units that wait half-computed fit the hidden budget, whatever else is kept."""
        budget = self.policy.hidden_tokens
        return budget is None or sum(plane.request.prefix for plane in self.policy.active()) <= budget

    def _loaded_at(self, now: float) -> float:
        """When the link could have loaded all that is unclaimed."""
        plane, costs = self.plane, self.policy.costs
        cells = sum(compress(map(mul, self.widths, plane.unclaimed), plane.available))
        return self.policy.free_at(LINK, now) + costs.fixed(FETCH) + costs.load_seconds(cells)


class TokenAxis(Axis):
    """Compute walks forward from the first chunk, loads walk backward from the last (Cake)."""

    def compute_unit(self, now: float) -> tuple[Op | None, float]:
        plane = self.plane
        for column in range(plane.prefix_columns):
            if plane.available[column] and plane.unclaimed[column]:
                start = column
                while start and plane.unclaimed[start - 1]:
                    start -= 1  # holes
                if start < column:
                    return plane.climb(start, 1), sum(self._seconds[start : column + 1])
                op = plane.climb(column, self.policy.token_budget, last=self._pass_end(column, now))
                return op, self._seconds[column] * (len(op.layers) / plane.layers if op else 0)
        return None, 0.0

    def cut_compute(self, op: Op, share: float) -> Op | None:
        [part] = op.parts
        if not self.plane.available[self.plane.columns_of(part)[0]]:
            return None
        layers = op.layers[: max(1, round(share * len(op.layers)))]
        return Op(COMPUTE, layers, (part._replace(advance=part.advance or layers != op.layers),))

    def _pass_end(self, first: int, now: float) -> int:
        """One past the last column of the next pass: most of those that compute will get before the pointers meet.

        A larger pass runs nearer to the machine's peak. What it leaves makes the meeting as fine as single columns do,
        and takes up what the estimates are wrong by.
        """
        plane, last = self.plane, first
        ours, theirs = self.policy.free_at("compute", now), self._loaded_at(now)
        while last < plane.prefix_columns and plane.available[last] and plane.unclaimed[last]:
            ours += self._seconds[last]
            if ours > theirs:
                break
            theirs -= self.policy.costs.load_seconds(self.widths[last] * plane.unclaimed[last])
            last += 1
        return first + max(1, int((last - first) * PASS_SHARE))

    def fetch_unit(self) -> Op | None:
        plane = self.plane
        for column in reversed(range(plane.prefix_columns)):
            op = self.policy.fetch_column(plane, column)
            if op is not None:
                return op
        return None

    def cut_fetch(self, op: Op, share: float) -> Op | None:
        layers = op.layers[len(op.layers) - round(share * len(op.layers)) :]
        return Op(FETCH, layers, op.parts) if layers else None

    def compute_seconds(self, op: Op) -> float:
        columns = range(*self.plane.columns_of(op.parts[0]))
        return sum(self._seconds[c] for c in columns) * len(op.layers) / self.plane.layers

    def recompute_seconds(self, limit: float = float("inf")) -> float:
        total = 0.0
        for seconds, unclaimed in zip(self._seconds, self.plane.unclaimed, strict=False):
            if unclaimed:
                total += seconds * unclaimed / self.plane.layers
                if total > limit:
                    break
        return total

    def restore_seconds(self) -> float:
        columns = range(self.plane.prefix_columns)
        band = range(self.plane.layers)
        return meeting_seconds(
            self._seconds,
            [self.policy.costs.seconds(Op(FETCH, band, (self.plane.part(c, c + 1),))) for c in columns],
        )

    @cached_property
    def _seconds(self) -> list[float]:
        """Of computing every column whole, on its own."""
        band = range(self.plane.layers)
        columns = [self.plane.part(c, c + 1, advance=False) for c in range(self.plane.prefix_columns)]
        return [self.policy.costs.seconds(Op(COMPUTE, band, (part,))) for part in columns]


class LayerAxis(Axis):
    """Compute rises from the first layer, loads fall from the last, all tokens at once.

    Hidden states of all columns wait between two layers, so where the hidden budget is smaller than the prefix, groups
    of columns that fit it are taken one after another.
    """

    def __init__(self, policy: Policy, plane: Plane) -> None:
        super().__init__(policy, plane)
        self.groups: list[range] = []
        first, tokens = 0, 0
        for column in range(plane.prefix_columns):
            tokens += plane.request.width(column)
            if policy.hidden_tokens is not None and tokens > policy.hidden_tokens and column > first:
                self.groups.append(range(first, column))
                first, tokens = column, plane.request.width(column)
        self.groups.append(range(first, plane.prefix_columns))

    def compute_unit(self, now: float) -> tuple[Op | None, float]:
        plane = self.plane
        for group in self.groups:
            for layer in plane.empty_layers(group):
                if any(plane.loadable(c, layer) for c in group):
                    return self._row(layer, group)
        return None, 0.0

    def _row(self, layer: int, group: range) -> tuple[Op | None, float]:
        """The leftmost pass over the row, up to the token budget, of columns that all go on or all end here."""
        plane, height, unclaimed = self.plane, self.plane.height, self.plane.unclaimed
        state, need = plane.state[layer], plane.need[layer]
        ready = (c for c in group if state[c] == EMPTY and height[c] == layer and need[c])
        first = next(ready, None)
        if first is None:
            return None, 0.0
        last, end = first + 1, plane.within(first, self.policy.token_budget)
        advance = unclaimed[first] > 1
        for column in ready:
            if column != last or column == end or (unclaimed[column] > 1) != advance:
                break
            last += 1
        part = plane.part(first, last, advance=advance)
        if advance and not plane.attended_filled(first, last, layer):
            return None, 0.0
        if advance and layer == 0 and part.tokens > self.policy.hidden_left():
            return None, 0.0
        op = Op(COMPUTE, range(layer, layer + 1), (part,))
        return op, self.policy.costs.seconds(op)

    def cut_compute(self, op: Op, share: float) -> Op:
        first, last = self.plane.columns_of(op.parts[0])
        last = first + max(1, round(share * (last - first)))
        return Op(COMPUTE, op.layers, (self.plane.part(first, last, advance=op.parts[0].advance),))

    def cut_fetch(self, op: Op, share: float) -> Op | None:
        columns = [c for part in op.parts for c in range(*self.plane.columns_of(part))]
        columns = columns[len(columns) - round(share * len(columns)) :]
        return Op(FETCH, op.layers, self.plane.parts(columns)) if columns else None

    def compute_seconds(self, op: Op) -> float:
        return self._row_seconds * op.tokens / max(1, self.prefix)

    def fetch_unit(self) -> Op | None:
        for group in self.groups:
            for layer in self.plane.empty_layers(group, down=True):
                op = self.policy.fetch_row(self.plane, layer, reversed(group))
                if op is not None:
                    return op
        return None

    def restore_seconds(self) -> float:
        plane, costs = self.plane, self.policy.costs
        row = plane.parts(range(plane.prefix_columns))
        fetch = costs.seconds(Op(FETCH, range(1), row)) if row else 0.0
        return meeting_seconds([self._row_seconds] * plane.layers, [fetch] * plane.layers)

    def recompute_seconds(self, limit: float = float("inf")) -> float:
        cells = sum(map(mul, self.widths, self.plane.unclaimed))
        rows = cells / max(1, self.prefix)
        # The highest row is only projected.
        return self._row_seconds * max(rows - 1, 0.0) + self._top_row_seconds * min(rows, 1.0)

    @cached_property
    def _row_seconds(self) -> float:
        """Of computing all columns at one layer, and on through it."""
        return self._seconds(advance=True)

    @cached_property
    def _top_row_seconds(self) -> float:
        return self._seconds(advance=False)

    def _seconds(self, advance: bool) -> float:
        row = [part._replace(advance=advance) for part in self.plane.parts(range(self.plane.prefix_columns))]
        return self.policy.costs.seconds(Op(COMPUTE, range(1), tuple(row))) if row else 0.0


def meeting_seconds(compute: list[float], load: list[float]) -> float:
    """When two pointers over the same units meet: the smallest max(computing the first j, loading the others)."""
    computed, left = [0.0, *accumulate(compute)], [*accumulate(reversed(load)), 0.0]
    left[:-1] = left[-2::-1]
    return min(map(max, computed, left))


class SingleAxis(Policy):
    """One axis for every request. First come, first served: each side serves the first that has something for it."""

    axis: ClassVar[type[Axis]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._axes: dict[str, Axis] = {}

    def add(self, plane: Plane) -> None:
        super().add(plane)
        self._axes[plane.request.id] = self.axis(self, plane)

    def remove(self, request: str) -> None:
        super().remove(request)
        del self._axes[request]

    def next_compute(self, now: float) -> Op | None:
        return next(filter(None, (self._axes[p.request.id].next_compute(now) for p in self.active())), None)

    def next_fetch(self, now: float) -> Op | None:
        return next(filter(None, (self._axes[p.request.id].next_fetch(now) for p in self.active())), None)
