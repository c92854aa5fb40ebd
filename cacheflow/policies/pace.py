"""How fast compute and the link turn out to be: how many times their estimates ops take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cacheflow.costs.base import Costs
from cacheflow.op import Op

SLOWER = 1.05  # times as slow as planned with is the link from which on what is left is split anew; a guess
RECENT, ASKED = 8, 3  # ops that are looked back at, and of which, the last large ones, the median counts; guesses

Queued = Sequence[tuple[Op, float]]  # ops in flight and their estimates, the one that runs first


class Pace:
    """Of compute: the median of the last ASKED large ops, so that neither an outlier counts, nor what every small op
    loses."""

    def __init__(self) -> None:
        self._ran: deque[tuple[float, float]] = deque(maxlen=RECENT)  # seconds, and estimates in units
        self._seconds: float | None = None  # of a unit, as of when this was last asked; None: as estimated
        self._unread = False  # whether an op has ended since

    def ended(self, seconds: float, estimate: float) -> None:
        """An op took so many seconds."""
        if estimate and (unit := self._unit()):
            self._ran.append((seconds, estimate / unit))
            self._unread = True

    @property
    def known(self) -> float:
        """As ops that ended did."""
        if not (unit := self._unit()):
            return 1.0
        if self._unread:
            self._unread = False
            self._seconds = self._median(unit) * unit
        return 1.0 if self._seconds is None else self._seconds / unit

    def _median(self, unit: float, *running: tuple[float, float]) -> float:
        """By what ran last, and what runs."""
        ran = [*self._ran, *running]
        least = self._least(ran)
        large = [one for one in ran if one[1] >= least][-ASKED:]
        lost = [self._lost(seconds / unit, units) for seconds, units in large]
        if len(lost) < ASKED:
            lost += [self.known - 1] * (ASKED - len(lost))
        return 1 + sorted(lost)[ASKED // 2]

    def _unit(self) -> float:
        """Seconds that estimates are counted in."""
        return 1.0

    def _least(self, ran: Sequence[tuple[float, float]]) -> float:
        """Units of an op that counts as large."""
        return max([units for _, units in ran]) / 2

    def _lost(self, took: float, units: float) -> float:
        """The share by which an op took longer than estimated."""
        return (took - units) / units


class LinkPace(Pace):
    """The same of the link, counted in what a cell takes, which costs that learn change meanwhile.

    row: tokens of a large fetch of the request that goes first.
    """

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.row = 0.0
        self._costs = costs
        self._head: Op | None = None  # the fetch that runs
        self._since = 0.0  # when it was first seen to

    def at(self, now: float, queued: Queued) -> float:
        """As fetches that ended did, and as the one that runs has already."""
        known, (head, estimate) = self.known, queued[0] if queued else (None, 0.0)
        if head is not self._head:
            self._head, self._since = head, now
        taken = now - self._since - self._costs.latency
        if not estimate or taken <= estimate or not (unit := self._unit()):
            return known
        return max(known, self._median(unit, (taken, estimate / unit)))

    def busy(self, now: float, queued: Queued) -> float:
        """Estimated seconds until what is in flight has landed."""
        if not queued:
            return 0.0
        whole = self.at(now, queued) * sum([self._costs.seconds(op) for op, _ in queued])
        return max(0.0, whole - (now - self._since))

    @property
    def late(self) -> bool:
        """Whether the last fetch, a large one, lost more than those before."""
        if not self._ran or not (unit := self._unit()):
            return False
        seconds, units = self._ran[-1]
        return units >= self._least(()) and 1 + self._lost(seconds / unit, units) > SLOWER * self.known

    def _unit(self) -> float:
        return self._costs.load_seconds(1)

    def _least(self, ran: Sequence[tuple[float, float]]) -> float:
        return self.row / 4

    def _lost(self, took: float, units: float) -> float:
        """What a fetch smaller than a row loses may be a cost of each, and is not taken to grow with size."""
        more = took - units
        return more / (max(units, self.row) if more > 0 else units)
