"""The two single axes of the paper, each for one request: a compute pointer and a load pointer that meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

from cacheflow.op import COMPUTE, FETCH, Op
from cacheflow.plane import EMPTY, Plane
from cacheflow.policies.base import LINK, Policy


class Axis(ABC):
    """One request's two pointers.

    A side claims its next unit of cells when it is asked, unless the other side is estimated to reach and finish that
    unit sooner: the paper leaves the meeting open, and this is how the last unit goes to whoever ends it first.
    Compute takes by choice only columns that attend to nothing but needed cells: with a sliding window much shorter
    than the prefix everything needed is loaded.
    """

    def __init__(self, policy: Policy, plane: Plane) -> None:
        self.policy = policy
        self.plane = plane
        self.widths = [plane.request.width(column) for column in range(plane.prefix_columns)]

    @abstractmethod
    def compute_unit(self, now: float) -> tuple[Op | None, float]:
        """The compute pointer's next op, and the estimated seconds until it has filled a cell that is needed."""

    @abstractmethod
    def fetch_unit(self) -> Op | None:
        """The load pointer's next op."""

    @abstractmethod
    def recompute_seconds(self, limit: float = float("inf")) -> float:
        """Estimated time to compute what neither side has claimed; the count may stop once it is past `limit`."""

    @abstractmethod
    def restore_seconds(self) -> float:
        """Estimated time until the pointers meet, were this the only request."""

    def next_compute(self, now: float) -> Op | None:
        op, seconds = self.compute_unit(now)
        if op is not None and self.policy.free_at("compute", now) + seconds <= self._loaded_at(now):
            return op
        return self.policy.repair(self.plane)

    def next_fetch(self, now: float) -> Op | None:
        op = self.fetch_unit()
        if op is None:
            return None
        gain = self.policy.free_at(LINK, now) + self.policy.costs.seconds(op) - self.policy.free_at("compute", now)
        # Where nothing is in flight nobody would ask again: estimates of the two sides may leave a unit to each other.
        return op if gain < self.recompute_seconds(limit=gain) or self.policy.idle else None

    def _loaded_at(self, now: float) -> float:
        """When the link could have loaded all that is unclaimed."""
        plane, costs = self.plane, self.policy.costs
        cells = sum(w * n for w, n, a in zip(self.widths, plane.unclaimed, plane.available, strict=False) if a)
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
                return op, self._seconds[column]
        return None, 0.0

    def _pass_end(self, first: int, now: float) -> int:
        """One past the last column of the next pass: half of those that compute will get before the pointers meet.

        A larger pass runs nearer to the machine's peak, and halving leaves the meeting as fine as single columns do.
        """
        plane, last = self.plane, first
        ours, theirs = self.policy.free_at("compute", now), self._loaded_at(now)
        while last < plane.prefix_columns and plane.available[last] and plane.unclaimed[last]:
            ours += self._seconds[last]
            if ours > theirs:
                break
            theirs -= self.policy.costs.load_seconds(self.widths[last] * plane.unclaimed[last])
            last += 1
        return first + max(1, (last - first) // 2)

    def fetch_unit(self) -> Op | None:
        plane = self.plane
        for column in reversed(range(plane.prefix_columns)):
            op = self.policy.fetch_column(plane, column)
            if op is not None:
                return op
        return None

    def recompute_seconds(self, limit: float = float("inf")) -> float:
        total = 0.0
        for seconds, unclaimed in zip(self._seconds, self.plane.unclaimed, strict=False):
            if unclaimed:
                total += seconds
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
            for layer, row in enumerate(plane.state):
                if row.find(EMPTY, group.start, group.stop) >= 0 and any(plane.loadable(c, layer) for c in group):
                    return self._row(layer, group)
        return None, 0.0

    def _row(self, layer: int, group: range) -> tuple[Op | None, float]:
        """The leftmost pass over the row, up to the token budget."""
        plane, state = self.plane, self.plane.state[layer]
        ready = (c for c in group if state[c] == EMPTY and plane.height[c] == layer and plane.needed(c, layer))
        first = next(ready, None)
        if first is None:
            return None, 0.0
        last, tokens = first + 1, plane.request.width(first)
        for column in ready:
            tokens += plane.request.width(column)
            if column != last or tokens > self.policy.token_budget:
                break
            last += 1
        advance = any(row.find(EMPTY, first, last) >= 0 for row in plane.state[layer + 1 :])
        part = plane.part(first, last, advance=advance)
        if advance and not plane.attended_filled(first, last, layer):
            return None, 0.0
        if advance and layer == 0 and part.tokens > self.policy.hidden_left():
            return None, 0.0
        op = Op(COMPUTE, range(layer, layer + 1), (part,))
        return op, self.policy.costs.seconds(op)

    def fetch_unit(self) -> Op | None:
        for group in self.groups:
            for layer in reversed(range(self.plane.layers)):
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
        cells = sum(width * count for width, count in zip(self.widths, self.plane.unclaimed, strict=False))
        return self._row_seconds * cells / max(1, self.plane.request.prefix)

    @cached_property
    def _row_seconds(self) -> float:
        """Of computing all columns at one layer."""
        row = self.plane.parts(range(self.plane.prefix_columns))
        return self.policy.costs.seconds(Op(COMPUTE, range(1), row)) if row else 0.0


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
