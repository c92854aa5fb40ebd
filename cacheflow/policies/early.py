"""Loads of `pipelined` that come before those that are needed first: the last layers of the last columns."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cacheflow.op import COMPUTE, COPY, FETCH, Op
from cacheflow.plane import EMPTY
from cacheflow.policies.pace import SLOWER

if TYPE_CHECKING:
    from cacheflow.policies.climb import Climb

# Shares of the time to first token by which loads that come early may make launches wait, and what they may lose: the
# fixed cost of each, and by how much it holds up compute.
EARLY, LOST = 0.0003, 0.003


class _Timetable(NamedTuple):
    """computed: [layers], how many leading columns are computed there. holes: [layers], and how many of the others.
    begins: [layers], when the layer's launch does, seconds after the first."""

    computed: list[int]
    holes: list[int]
    begins: list[float]


class _Transfer(NamedTuple):
    """Seconds of a fetch and of its copy: fixed, and for each cell of a column. most: cells that a fetch may bring."""

    fetch: float
    cell: float
    copy: float
    copied: float
    most: int


class EarlyLoads:
    """Of one request, loads that come before others that are needed sooner, where no launch waits for that.

    Should the link become slower, more of what is left to load stands beside columns that compute has hidden states of.
    """

    def __init__(self, climb: Climb) -> None:
        self._climb = climb
        self._may_wait = self._may_lose = 0.0  # seconds that they may still make launches wait, and lose
        self._timetable: _Timetable | None = None  # None: to be looked at anew

    def allow(self, seconds: float) -> None:
        """From now on they may cost their shares of a time to first token of so many seconds."""
        self._may_wait, self._may_lose = EARLY * seconds, LOST * seconds

    def changed(self) -> None:
        """What compute and link have still to do is to be looked at anew."""
        self._timetable = None

    def next_fetch(self, now: float) -> Op | None:
        """A load of the last layers of the last column that is not loaded, if that makes the last launch no later. What
        the first launch waits for comes first in any case."""
        climb, plane, policy, costs = self._climb, self._climb.plane, self._climb.policy, self._climb.policy.costs
        if climb.next_row == plane.layers or climb.stairs is None or plane.layers < 3 or not climb.begun:
            return None
        if climb.planner.together > 1:
            return None  # a fetch costs too much
        as_estimated = abs(policy.link_pace.at(now) - 1) < SLOWER - 1
        if not as_estimated or costs.fixed(FETCH) + costs.interference_per_fetch > self._may_lose:
            return None
        column = self._last_column()
        if column is None:
            return None
        width = plane.request.boundaries[plane.prefix_columns] / plane.prefix_columns
        cell, copied = policy.link_pace.seconds(1) * width, width * costs.shape.cell_bytes / costs.copy_bandwidth
        if copied > cell:
            return None  # copies are behind, and those of what is needed first would be too
        most, overhead = max(1, int(climb.planner.staging / width)), climb.planner.overhead(climb.row)
        transfer = _Transfer(overhead, cell, costs.fixed(COPY), copied, most)
        if self._timetable is None:
            self._timetable = self._planned_launches()
        free = policy.free_at("compute", now) - now - self._launched(self._timetable)
        busy = policy.link_pace.busy(now)
        band = self._band(column, self._timetable, transfer, busy, free)
        if not band:
            return None
        own = climb.planner.overhead(width * len(band))
        if (lost := own + costs.interference_per_fetch) > self._may_lose:
            return None
        landed = busy + own + transfer.cell * len(band)
        copies = landed + transfer.copy + transfer.copied * len(band)
        longer = self._waits(self._timetable, transfer, landed, copies, free, band)
        if longer > 0:
            longer = max(0.0, longer - self._waits(self._timetable, transfer, busy, busy, free, range(0)))
        if longer > self._may_wait:
            return None
        self._may_wait -= longer
        self._may_lose -= lost
        return Op(FETCH, band, (plane.part(column, column + 1),))

    def _last_column(self) -> int | None:
        """The last that anything is to be loaded of."""
        plane, tops = self._climb.plane, self._climb.tops
        assert tops is not None
        for column in reversed(range(plane.prefix_columns)):
            if plane.unclaimed[column] and plane.available[column] and tops[column] < plane.layers:
                return column
        return None

    def _band(self, column: int, timetable: _Timetable, transfer: _Transfer, busy: float, free: float) -> range:
        """Layers of the column: no more than a layer's loads, and none whose launch would wait for the copy. busy: of
        the link, free: when compute is, counted from the first launch; as all below in seconds."""
        climb, plane, tops = self._climb, self._climb.plane, self._climb.tops
        assert tops is not None
        here = max(1, climb.layer)
        row = plane.prefix_columns - timetable.computed[here] - timetable.holes[here]
        most = max(1, min(row, climb.planner.staging // plane.request.width(column)))
        band = plane.loadable_band(column)
        band = range(max(band.start, band.stop - most, tops[column]), band.stop)
        landed = busy + transfer.fetch + transfer.cell * len(band)
        in_time = bisect_left(timetable.begins, landed + transfer.copy + transfer.copied * len(band) - free)
        return range(max(band.start, in_time), band.stop)

    def _waits(
        self, timetable: _Timetable, transfer: _Transfer, landed: float, copies: float, free: float, early: range
    ) -> float:
        """Seconds that launches wait from now on, the last among them, when the link is free in `landed` and copies are
        in so many. early: layers of one column that are loaded by then."""
        (computed, holes, begins), (fetch, cell, copy, copied, most) = timetable, transfer
        plane, late = self._climb.plane, 0.0
        for layer in range(self._climb.next_row, plane.layers):
            empty = plane.state[layer].count(EMPTY, computed[layer], plane.prefix_columns)
            cells = empty - holes[layer] - (layer in early)
            if cells > 0:
                landed += fetch * -(-cells // most) + cell * cells
                copies = max(copies, landed) + copy + copied * cells * (layer < plane.layers - 1)
                late = max(late, copies - free - begins[layer])
        return late

    def _launched(self, timetable: _Timetable) -> float:
        """Seconds of planned launches, from the first on, that are done or in flight: columns may be ahead of the
        suffix, and a launch may be several ops."""
        plane, layer, (computed, _, begins) = self._climb.plane, self._climb.layer, timetable
        width, height, count = plane.request.width, plane.height, plane.prefix_columns
        others = [c for c in range(count) if not plane.available[c]] + [*range(count, plane.columns)]
        seconds = begins[layer]
        while layer < plane.layers - 1:
            on = computed[layer + 1]
            going = [*range(on), *(c for c in others if c >= on)]
            started = sum([width(c) for c in going if height[c] > layer])
            if not started:
                break
            seconds += (begins[layer + 1] - begins[layer]) * started / sum([width(c) for c in going])
            layer += 1
        return seconds

    def _planned_launches(self) -> _Timetable:
        plane, costs, tops = self._climb.plane, self._climb.policy.costs, self._climb.tops
        assert tops is not None
        layers, count = plane.layers, plane.prefix_columns
        ending = Counter(tops)
        computed = [count - below for below in accumulate(ending[layer] for layer in range(layers))]
        suffix, holes = plane.part(count, plane.columns), [c for c in range(count) if not plane.available[c]]

        def launch(projected: int, on: int) -> float:
            whole = [plane.part(0, on)] * (on > 0) + [plane.part(c, c + 1) for c in holes if c >= on]
            only = plane.parts([c for c in range(on, projected) if plane.available[c]], advance=False)
            return costs.seconds(Op(COMPUTE, range(1), (*whole, *only, suffix)))

        on = computed[2:]
        some = sorted({min(on), on[len(on) // 2], max(on)})
        between = np.interp(on, some, [launch(columns, columns) for columns in some]).tolist()
        right = [len(holes) - bisect_left(holes, columns) for columns in computed]
        return _Timetable(computed, right, [*accumulate([launch(computed[0], computed[1]), *between], initial=0.0)])
