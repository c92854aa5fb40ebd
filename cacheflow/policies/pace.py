"""How fast compute and the link turn out to be: how many times their estimates ops take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cacheflow.costs.base import Costs
from cacheflow.op import Op

SLOWER = 1.05  # times as slow as planned with is the link from which on what is left is split anew; a guess
LATE = 1.25  # times as long as those before took a fetch behind which loads come in another order; a guess
RECENT, ASKED = 8, 3  # ops by which one is large, and large ones of which the median counts; guesses


class Pace:
    """How many times its estimate a compute op takes.

    That is the median of the last ASKED large ones, so that neither an outlier counts, nor what every small op loses;
    those that have still to come count as estimated.
    """

    def __init__(self) -> None:
        self._large: deque[tuple[float, float]] = deque(maxlen=ASKED)  # seconds, and estimates in units, of the last
        self._sizes: deque[float] = deque(maxlen=RECENT)  # estimates in units of the last, large or not

    def ended(self, seconds: float, estimate: float) -> None:
        """An op took so many seconds. estimate: by the costs of now."""
        unit = self._unit()
        if not estimate or not unit:
            return
        size = estimate / unit
        self._sizes.append(size)
        if self._is_large(size):
            self._large.append((seconds, size))

    @property
    def known(self) -> float:
        """As ops that ended did."""
        return self._median(self._large)

    def _median(self, large: Sequence[tuple[float, float]]) -> float:
        if not (unit := self._unit()):
            return 1.0
        lost = [self._lost(seconds / unit, size) for seconds, size in large]
        return 1 + sorted([0.0] * (ASKED - len(lost)) + lost)[ASKED // 2]

    def _unit(self) -> float:
        """Seconds that estimates are counted in."""
        return 1.0

    def _is_large(self, size: float) -> bool:
        return 2 * size >= max(self._sizes)

    def _lost(self, took: float, size: float) -> float:
        """The share by which an op took longer than estimated, both in units."""
        return (took - size) / size


class LinkPace(Pace):
    """How many times its estimate a fetch takes; counted in what a cell takes, which costs that learn change.

    queued: the fetches in flight, the one that runs first, and their estimates when they were queued.
    row: tokens of a large fetch of the request that goes first now.
    """

    def __init__(self, costs: Costs, queued: Sequence[tuple[Op, float]]) -> None:
        super().__init__()
        self.row = 0.0
        self._known = 1.0
        self._known_of: tuple[float, float] | None = None  # the unit and the row of that; None: to be worked out
        self._costs = costs
        self._queued = queued
        self._head: Op | None = None  # the fetch that runs
        self._since = 0.0  # when it was first seen to

    def ended(self, seconds: float, estimate: float) -> None:
        super().ended(seconds, estimate)
        self._known_of = None

    @property
    def known(self) -> float:
        of = self._unit(), self.row
        if self._known_of != of:  # asked for at every decision
            self._known, self._known_of = self._median(self._large), of
        return self._known

    def at(self, now: float) -> float:
        """As fetches that ended did, and as the one that runs has already."""
        known, taken = self.known, self._taken(now) - self._costs.latency
        if taken <= 0 or taken <= (estimate := self._costs.seconds(self._queued[0][0])):
            return known
        size = estimate / unit if (unit := self._unit()) else 0.0
        if not size or not self._is_large(size):
            return known
        return max(known, self._median([*self._large, (taken, size)][-ASKED:]))

    def busy(self, now: float) -> float:
        """Estimated seconds until what is in flight has landed."""
        whole = self.at(now) * sum([self._costs.seconds(op) for op, _ in self._queued])
        return max(0.0, whole - self._taken(now))

    def seconds(self, cells: int) -> float:
        """What moving so many (token, layer) pairs takes, as fetches that ended did."""
        return self.known * self._costs.load_seconds(cells)

    @property
    def late(self) -> bool:
        """Whether the last large fetch took longer than those before."""
        if not self._large or not (unit := self._unit()):
            return False
        seconds, size = self._large[-1]
        return 1 + self._lost(seconds / unit, size) > LATE * self.known

    def _taken(self, now: float) -> float:
        """Seconds since the fetch that runs was first seen to; 0 where none does."""
        head = self._queued[0][0] if self._queued else None
        if head is not self._head:
            self._head, self._since = head, now
        return now - self._since if head else 0.0

    def _unit(self) -> float:
        return self._costs.load_seconds(1)

    def _is_large(self, size: float) -> bool:
        return size >= self.row / 4

    def _lost(self, took: float, size: float) -> float:
        """What a fetch smaller than a row loses may be a cost of each, and is not taken to grow with size."""
        more = took - size
        return more / (max(size, self.row) if more > 0 else size)
