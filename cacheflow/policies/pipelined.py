"""pipelined: layer by layer up a staircase, the suffix in the same launches. Ours."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np

from cacheflow.op import COMPUTE, COPY, FETCH, Op
from cacheflow.plane import EMPTY, LOADING, Plane
from cacheflow.policies.base import LINK, Policy
from cacheflow.policies.stairs import Planner, Stairs, plan_batch

OVERTAKEN = 16  # requests that came later and end before one; after that it goes first
JOINED = 100  # times its fixed cost: up to which an op goes through more layers than one
TRIED = 8  # columns that compute may take over when the first of them cannot go
SLOWER = 1.1  # times as slow as planned with is the link from which on what is left is split anew; a guess
GAIN = 0.03  # share of the time that is left which this must save
STEEP = 0.0016  # share of the time to first token that a slope may cost, see _slope
NARROWEST = 0.5  # columns that a slope leaves for the last layer at least, so that the suffix has a launch to be in
EARLY = 0.001  # share of the time to first token that loads that come early may cost
MEMORY = 0.7  # share of what is known of the link's speed that one more fetch leaves in place; a guess


class Pipelined(Policy):
    """Compute takes the layers in order: at each, the layer's share of columns and the suffix in one launch, as soon as
    the layer's other cells have landed. The link runs ahead in the order in which that needs them. Splits are chosen so
    that both sides end together, and moved when they turn out not to.

    A plan has fewer columns the higher the layer, and where no launch waits for it the link takes the last columns
    first: should it become slower, compute stands beside what is left to load, and takes over as much of that as lets
    both sides end together.

    Requests are finished one after another; what one leaves of a resource goes to the next. Splits of a batch are
    chosen together, by `objective`. First come those with a deadline, the earliest first, as many as can keep theirs;
    then the one with the least left to do. When OVERTAKEN that came later have ended before a request, it goes first on
    both resources, and others get only what it cannot use.
    """

    name = "pipelined"
    rank = 7

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slowdown = 1.0  # of the link against its estimates
        self._head: Op | None = None  # the fetch that runs
        self._since = 0.0  # when it was first seen to
        self._climbs: dict[str, _Climb] = {}
        self._ranked: list[_Climb] | None = None  # who is served before whom; None: to be found out
        self._wave = 0  # requests that are added with nothing asked between them come at the same time

    def add(self, plane: Plane) -> None:
        super().add(plane)
        self._climbs[plane.request.id] = _Climb(self, plane, self._wave)
        self._ranked = None

    def cancel(self, request: str) -> None:
        super().cancel(request)
        self._ranked = None

    def remove(self, request: str) -> None:
        super().remove(request)
        self._ranked = None
        gone = self._climbs.pop(request)
        for climb in self._climbs.values():
            climb.overtaken += gone.plane.done and climb.wave < gone.wave

    def finished(self, op: Op, seconds: float) -> None:
        estimate, cell = (self.costs.seconds(op), self.costs.load_seconds(1)) if op.kind == FETCH else (0.0, 0.0)
        super().finished(op, seconds)
        if estimate > 0:
            memory = MEMORY ** max(1.0, seconds / estimate)
            self.slowdown = memory * self.slowdown + (1 - memory) * seconds / estimate
            if cell > 0:
                self.slowdown *= cell / self.costs.load_seconds(1)  # costs that learn know of it from here on
        for request in op.requests if op.kind != COMPUTE else ():
            copying = self._climbs[request].copying
            (copying.update if op.kind == FETCH else copying.subtract)(op.layers)

    def failed(self, op: Op, reason: str) -> None:
        super().failed(op, reason)
        for request in op.requests:
            self._climbs[request].changed()

    def next_compute(self, now: float) -> Op | None:
        order = self._order(now)
        self._rebalance(order, now)
        free, room = self.free_at("compute", now), float("inf")
        for i, climb in enumerate(order):
            op = climb.next_compute(now, room)
            if op is not None:
                return self._with_others(op, order[i + 1 :], now)
            if i + 1 == len(order):
                break
            # What others do meanwhile may make it late by no more than all of those would be, were nothing done.
            behind = 0 if climb.overtaken >= OVERTAKEN else len(order) - 1 - i
            room = min(room, (climb.waits_until(now) - free) * (1 + behind))
            if room <= 0:
                break
        # The first was asked for whatever it has; others may have what only takes too long.
        if self._queued["compute"] or any(climb.next_compute(now, float("inf")) for climb in order[1:]):
            return None
        return next(filter(None, (climb.take_over(now) for climb in order)), None)

    def _with_others(self, op: Op, behind: list[_Climb], now: float) -> Op:
        """The op, and what others can do at its layers, where that makes the sum of first tokens come sooner: with k
        requests in an op, one more is worth it if its own op takes longer than it would delay all k + 1."""
        layer, marginal = op.layers.start, self.costs.project_marginal + self.costs.advance_marginal
        for climb in behind:
            if climb.layer != layer or op.tokens + climb.tokens(layer) > self.token_budget:
                continue
            other = climb.next_compute(now, float("inf"))
            if other is None or other.layers != op.layers or op.tokens + other.tokens > self.token_budget:
                continue
            alone = self.costs.seconds(other)
            if alone < 2 * marginal * other.tokens * len(other.layers):
                continue  # it has work enough of its own
            both = Op(COMPUTE, op.layers, op.parts + other.parts)
            if (len(op.requests) + 1) * (self.costs.seconds(both) - self.costs.seconds(op)) < alone:
                op = both
        return op

    def next_fetch(self, now: float) -> Op | None:
        order = self._order(now)
        self._rebalance(order, now)
        # What lands just in time leaves gaps, in which others' launches would make the first late.
        early = order[0].fetch_early(now) if len(order) == 1 else None
        planned = early or next(filter(None, (climb.next_fetch(now) for climb in order)), None)
        return planned or next(filter(None, (climb.relieve(now) for climb in order)), None)

    def _order(self, now: float) -> list[_Climb]:
        """Who is served before whom; those that are new have a plan from here on."""
        self._wave += 1
        if self._ranked is None:
            self._ranked = _rank([self._climbs[plane.request.id] for plane in self.active()], now)
            if not all(climb.tops is not None for climb in self._ranked):
                self._plan(self._ranked, now)
        return [climb for climb in self._ranked if not climb.plane.done]

    def _plan(self, order: list[_Climb], now: float) -> None:
        """Splits for requests that nothing was begun for, which may have been planned before others came."""
        climbs = [climb for climb in order if not climb.begun]
        for climb in climbs:
            climb.promised = 0
        open_to_stairs = [climb for climb in climbs if not climb.windowed]
        compute, link = zip(*(climb.left() for climb in order), strict=True)
        ahead = self.free_at("compute", now) - now + sum(compute), self.free_at(LINK, now) - now + sum(link)
        most = [self._hidden_columns(climb) for climb in open_to_stairs]
        if len(open_to_stairs) == 1:
            chosen = [open_to_stairs[0].planner.best(most[0], *ahead)]
        else:
            planners = [climb.planner for climb in open_to_stairs]
            chosen = plan_batch(planners, most, *ahead, self.objective) if planners else []
        for climb in climbs:
            if climb.windowed:
                climb.follow(None)
            else:
                climb.follow(chosen.pop(0), most.pop(0))

    @staticmethod
    def objective(mean: float, last: float) -> float:
        """What a batch's plan keeps low, of the mean and the last of its times to first token: one per cent of the one
        is worth one per cent of the other."""
        return mean * last

    def link_seconds(self, cells: int) -> float:
        """What moving so many (token, layer) pairs takes, by what the link was seen to do."""
        return self.slowdown * self.costs.load_seconds(cells)

    def pace(self, now: float) -> float:
        """How many times its estimate a fetch takes: as others did, or as the one that runs has already."""
        head, estimate = self._queued[LINK][0] if self._queued[LINK] else (None, 0.0)
        if head is not self._head:
            self._head, self._since = head, now
        taken = now - self._since - self.costs.latency
        if head is None or taken <= estimate or not (estimate := self.costs.seconds(head)):
            return self.slowdown
        return max(self.slowdown, taken / estimate)

    def link_busy(self, now: float) -> float:
        """Estimated seconds until what is in flight on the link has landed."""
        if not self._queued[LINK]:
            return 0.0
        whole = self.pace(now) * sum([self.costs.seconds(op) for op, _ in self._queued[LINK]])
        return max(0.0, whole - (now - self._since))

    def _rebalance(self, order: list[_Climb], now: float) -> None:
        """Where the link is slower than planned with, split anew what is left of the first."""
        if order and self.pace(now) * self.costs.load_seconds(1) > SLOWER * order[0].cell_seconds:
            order[0].rebalance(now)

    def hidden_room(self) -> float:
        """Tokens whose hidden states may be kept besides those that are, or will be as planned."""
        if self.hidden_tokens is None:
            return float("inf")
        return self.hidden_left() - sum(climb.waiting_tokens for climb in self._climbs.values())

    @property
    def compute_queued(self) -> bool:
        """Whether anything is queued on compute."""
        return bool(self._queued["compute"])

    def lands(self, request: str, layer: int, now: float) -> float:
        """Estimated time at which what is in flight of a request's layer has landed; infinite if nothing is."""
        time = self.free_at(LINK, now)
        for op, seconds in reversed(self._queued[LINK]):
            if request in op.requests and layer in op.layers:
                return time
            time -= seconds
        return float("inf")

    def _hidden_columns(self, climb: _Climb) -> int:
        """How many leading columns of a request may wait between layers, beside what others were promised."""
        bounds, count = climb.plane.request.boundaries, climb.plane.prefix_columns
        if self.hidden_tokens is None:
            return count
        left = self.hidden_tokens - sum(other.promised for other in self._climbs.values())
        columns = next((c for c in range(count) if bounds[c + 1] > left), count)
        climb.promised = bounds[columns]
        return columns


class Worst(Pipelined):
    """The same for the last first token of a batch, whatever that does to the mean."""

    @staticmethod
    def objective(mean: float, last: float) -> float:
        return last


def _rank(climbs: list[_Climb], now: float) -> list[_Climb]:
    """Who is served before whom, see Pipelined.

    Of requests with deadlines, each for itself and one after another, the fewest are late if they come by deadline and,
    whenever one would be late, the longest of those so far is put off (Moore and Hodgson, 1968).
    """
    first = sorted((c for c in climbs if c.overtaken >= OVERTAKEN), key=lambda climb: climb.wave)
    in_time, end = list[_Climb](), now + sum(climb.seconds_left for climb in first)
    for climb in sorted((c for c in climbs if c not in first), key=lambda climb: climb.due(now)):
        if climb.due(now) == float("inf"):
            break
        in_time.append(climb)
        end += climb.seconds_left
        if end > climb.due(now):
            longest = max(in_time, key=lambda climb: climb.seconds_left)
            in_time.remove(longest)
            end -= longest.seconds_left
    others = [climb for climb in climbs if climb not in first and climb not in in_time]
    if len(others) > 1:  # one alone needs no estimate
        others.sort(key=lambda climb: climb.seconds_left)
    return first + in_time + others


class _Run(NamedTuple):
    """Columns [first, last) that stand at the same height and have the same cells filled below `top`, the layer up to
    which compute has something to do for them."""

    first: int
    last: int
    top: int


class _Timetable(NamedTuple):
    """computed: [layers], how many columns are computed there. begins: [layers], when the layer's launch does, seconds
    after the first."""

    computed: list[int]
    begins: list[float]


class _Climb:
    """One request on its way up.

    tops: for every prefix column at how many layers, from the first up, compute is to fill it; None: not planned yet.
    windowed: columns behind a window attend to cells that nobody else needs; then all but the first row is loaded.
    alone: seconds to its first token, were it the only request. promised: tokens whose hidden states it may keep.
    cell_seconds: of the link per (token, layer) pair, as planned with.
    wave: when it came. overtaken: by how many that came later.
    """

    def __init__(self, policy: Pipelined, plane: Plane, wave: int) -> None:
        self.policy = policy
        self.plane = plane
        self.planner = Planner(plane, policy.costs, policy.token_budget, policy.staging_cells)
        self.stairs: Stairs | None = None
        self.tops: list[int] | None = None
        self.windowed = any(plane.request.windows)
        self._due: float | None = None
        self.promised = 0
        self.cell_seconds = float("inf")
        self.wave = wave
        self.overtaken = 0
        self.copying: Counter[int] = Counter()  # by layer, copies in flight
        self._cut: set[int] = set()  # the first and the last layer of which something is loaded
        self._spare = 0.0  # seconds that loads that come early may still cost
        self._timetable: _Timetable | None = None  # None: to be looked at anew
        self._next_row = 0  # no layer below has anything to load
        self._runs: list[_Run] | None = None  # see _pending; None: to be looked at anew

    def due(self, now: float) -> float:
        """When its first token is wanted, counted from when this is first asked; infinite: any time."""
        if self._due is None:
            self._due = now + self.plane.request.deadline
        return self._due

    @cached_property
    def alone(self) -> float:
        return self.planner.estimate()

    @property
    def seconds_left(self) -> float:
        """About how many seconds it still takes, alone."""
        return self.alone * (1 - self.layer / self.plane.layers)

    @property
    def layer(self) -> int:
        """Where the suffix stands: its last column is the last to rise."""
        return self.plane.height[-1]

    def tokens(self, layer: int) -> int:
        """Of its launch at a layer, as planned."""
        request, stairs = self.plane.request, self.stairs
        columns = 0 if stairs is None else stairs.columns if layer else stairs.first
        return request.boundaries[columns] + request.tokens - request.prefix

    @property
    def begun(self) -> bool:
        """Whether anything was filled, or is in flight."""
        plane = self.plane
        return plane.state.count(bytearray([EMPTY]) * plane.columns) < plane.layers

    def left(self) -> tuple[float, float]:
        """About how many seconds of compute and of the link its plan still takes; 0 before anything was begun."""
        if self.stairs is None or not self.begun:
            return 0.0, 0.0
        plane = self.plane
        climbed, loaded = self.layer / plane.layers, self._next_row / plane.layers
        return self.stairs.compute * (1 - climbed), self.stairs.link * (1 - loaded)

    @property
    def waiting_tokens(self) -> int:
        """Of columns that compute is to take beyond the first layer, and has not begun to."""
        plane = self.plane
        columns = (c for c, top in enumerate(self.tops or ()) if top > 1 and not plane.height[c] and plane.unclaimed[c])
        return sum(map(plane.request.width, columns))

    def follow(self, stairs: Stairs | None, most: int = 0) -> None:
        """Take up a plan, with at most so many columns beyond the first layer; None: load everything but the first
        row."""
        self.stairs = stairs
        count = self.plane.prefix_columns
        self.tops = [1] * count
        if stairs is not None:
            self.tops = stairs.tops(count, self.plane.layers)
            self._slope(stairs, most)
            self._spare = EARLY * stairs.seconds
        self.cell_seconds = self.policy.link_seconds(1)
        if self.policy.hidden_tokens is not None:
            self.promised = sum([self.plane.request.width(c) for c, top in enumerate(self.tops) if top > 1])
        self._cut = {min(self.tops, default=0), self.plane.layers - 1}
        self.changed()

    def _slope(self, stairs: Stairs, most: int) -> None:
        """Let the number of columns fall from layer to layer, and be what it was in the mean.

        Then compute has hidden states of more columns, and a link that turns out slower leaves fewer that compute must
        take over from the first layer on, where their cells have landed already. Attention of columns further to the
        right takes longer; the slope is as steep as lets that cost STEEP at most. Of n columns more at the first layer,
        and n less at the last, it takes pair_marginal * width**2 * n**2 / 6 a layer longer. A part of that, as cells
        are whole, is moved to the link.
        """
        plane, costs, tops = self.plane, self.policy.costs, self.tops
        assert tops is not None
        steps, count = plane.layers - 1, plane.prefix_columns
        stored = [c for c in range(min(most, count)) if plane.request.stored[c]]
        if not stored or not steps:
            return
        mean, width = sum([tops[c] - 1 for c in stored if tops[c] > 1]) / steps, plane.request.boundaries[count] / count
        reach = min(mean - NARROWEST, len(stored) - mean)
        pairs = costs.pair_marginal * steps * width**2 / 6
        compute = width * (costs.project_marginal + costs.advance_marginal + costs.pair_marginal * mean * width)
        load, allowed = costs.load_seconds(1) * width, STEEP * stairs.seconds
        if pairs > 0 and load > 0:
            shared = allowed * (compute + load) / load
            reach = min(reach, math.sqrt((shared if shared > 2 * (compute + load) else allowed) / pairs))
        if reach < 0.5:
            return
        mean -= pairs * reach**2 / (compute + load) / steps
        low, high = mean - reach, mean + reach
        begin, end = math.floor(low), min(math.ceil(high), len(stored))
        sloped = np.arange(begin + 1, end + 1)
        x = np.clip(sloped, low, high) - low
        done = np.rint(steps * (np.minimum(sloped, low) + x - x * x / (4 * reach))).astype(int)  # cells, up to a column
        for column, cells in zip(stored[begin:end], np.diff(done, prepend=steps * begin).tolist(), strict=True):
            tops[column] = 1 + cells if cells > 0 else int(column < stairs.first)

    def changed(self) -> None:
        """What compute and link have still to do is to be looked at anew."""
        self._next_row = 0
        self._runs = None
        self._timetable = None

    # Planned

    def next_compute(self, now: float, room: float) -> Op | None:
        """The lowest launch that can go, no longer than `room` seconds. The suffix waits for its layer's loads as long
        as something else runs."""
        plane, height = self.plane, self.plane.height
        runs = [run for run in self._pending() if self._unfinished(run)]
        bottom = min((height[run.first] for run in runs if run.last > plane.prefix_columns), default=plane.layers)
        for layer in sorted({height[run.first] for run in runs}):
            here = [run for run in runs if height[run.first] == layer]
            # Below the suffix there are failed loads, and columns that compute took over.
            op = self._first_climb(here, room) if layer < bottom else self._launch(layer, here, now, room)
            if op is not None or (layer == bottom and self.policy.compute_queued):
                return op
        return None

    def waits_until(self, now: float) -> float:
        """Estimated time at which the loads have landed that the suffix waits for; infinite if it waits for none."""
        plane, layer = self.plane, self.layer
        columns = plane.loadable_columns(range(plane.prefix_columns), layer) if layer < plane.layers else ()
        tokens = sum(map(plane.request.width, columns))
        if tokens:
            return self.policy.free_at(LINK, now) + self.policy.link_seconds(tokens)
        return self.policy.lands(plane.request.id, layer, now)

    def next_fetch(self, now: float) -> Op | None:
        plane, tops = self.plane, self.tops
        assert tops is not None
        for layer in range(self._next_row, plane.layers):
            row = [c for c in range(plane.prefix_columns) if tops[c] <= layer]
            if layer in self._cut and row:
                pieces = self.planner.pieces(row[0])
                row = plane.loadable_columns(row, layer)[: -(-len(row) // pieces)]
            op = self.policy.fetch_row(plane, layer, row)
            if op is not None:
                return op
            self._next_row = layer + 1
        return None

    def fetch_early(self, now: float) -> Op | None:
        """A load of the last layers of the last column that is not loaded, if no launch will wait longer for it. What
        the first launch waits for comes first in any case."""
        plane, policy, tops = self.plane, self.policy, self.tops
        assert tops is not None
        layers, count = plane.layers, plane.prefix_columns
        if self.windowed or self.stairs is None or layers < 3 or not self.begun:
            return None
        columns = (c for c in reversed(range(count)) if plane.unclaimed[c] and plane.available[c] and tops[c] < layers)
        column = next(columns, None)
        if column is None:
            return None
        if self._timetable is None:
            self._timetable = self._planned_launches()
        computed, begins = self._timetable
        # No more than half of a layer's loads, and not where a launch would wait for its copy.
        width, costs = plane.request.boundaries[count] / count, policy.costs
        half = (count - computed[max(1, self.layer)]) // 2
        most = max(1, min(half, policy.staging_cells // plane.request.width(column)) if policy.staging_cells else half)
        band = plane.loadable_band(column)
        band = range(max(band.start, band.stop - most, tops[column]), band.stop)
        cell, fixed = policy.slowdown * costs.load_seconds(1) * width, costs.fixed(FETCH)
        copied, copy = width * costs.shape.cell_bytes / costs.copy_bandwidth, costs.fixed(COPY)
        free = policy.free_at("compute", now) - now - begins[max(self.layer, plane.height[0])]
        landed = policy.link_busy(now) + fixed + cell * len(band)
        band = range(max(band.start, bisect_left(begins, landed + copy + copied * len(band) - free)), band.stop)
        late = False
        for layer in range(self._next_row, layers) if band else ():
            cells = plane.state[layer].count(EMPTY, computed[layer], count) - (layer in band)
            if cells > 0:
                landed += fixed + cell * cells
                if landed + copy + copied * cells * (layer < layers - 1) > free + begins[layer]:
                    if layer < band.stop - 1 or self._spare < fixed:
                        return None
                    late = True  # by the fixed cost
        if not band:
            return None
        self._spare -= fixed * late
        return Op(FETCH, band, (plane.part(column, column + 1),))

    def _planned_launches(self) -> _Timetable:
        plane, costs, tops = self.plane, self.policy.costs, self.tops
        assert tops is not None
        layers, count = plane.layers, plane.prefix_columns
        ending = Counter(tops)
        computed = [count - below for below in accumulate(ending[layer] for layer in range(layers))]
        suffix = plane.part(count, plane.columns)

        def launch(projected: int, on: int) -> float:
            parts = [plane.part(0, on)] * (on > 0) + [plane.part(on, projected, advance=False)] * (projected > on)
            return costs.seconds(Op(COMPUTE, range(1), (*parts, suffix)))

        on = computed[2:]
        some = sorted({min(on), on[len(on) // 2], max(on)})
        between = np.interp(on, some, [launch(columns, columns) for columns in some]).tolist()
        return _Timetable(computed, [*accumulate([launch(computed[0], computed[1]), *between], initial=0.0)])

    # Where estimates were wrong

    def rebalance(self, now: float) -> None:
        """Have the first of the columns that were to be loaded computed: as many, and of one more as many layers, as
        let both sides end soonest."""
        plane, policy, tops = self.plane, self.policy, self.tops
        if self.windowed or tops is None:
            return
        layers, cell = plane.layers, policy.pace(now) * policy.costs.load_seconds(1)
        empty = dict[int, list[int]]()  # layers to load, by column
        for c in range(plane.prefix_columns):
            if plane.available[c] and plane.unclaimed[c] and tops[c] < layers:
                empty[c] = [layer for layer in range(tops[c], layers) if plane.state[layer][c] == EMPTY]
        compute = policy.free_at("compute", now) - now + self._compute_seconds()
        link = policy.link_busy(now) + cell * sum([plane.request.width(c) * len(empty[c]) for c in empty])
        soonest = before = max(compute, link)
        taken, room = dict[int, int](), policy.hidden_room()
        for c in [c for c, cells in empty.items() if cells]:
            part, height = plane.part(c, c + 1, advance=False), plane.height[c]
            room -= 0 if plane.holds(c) else part.tokens
            if room < 0:
                break
            climb = policy.costs.seconds(Op(COMPUTE, range(height, layers), (part,))) / (layers - height)
            ends = [
                max(compute + climb * (layer + 1 - height), link - cell * part.tokens * count)
                for count, layer in enumerate(empty[c], 1)
            ]
            least = min(ends)
            if least >= soonest:
                break
            soonest, taken[c] = least, empty[c][ends.index(least)] + 1
            compute += climb * (layers - height)
            link -= cell * part.tokens * len(empty[c])
            if taken[c] <= empty[c][-1]:
                break
        if soonest < (1 - GAIN) * before:
            for c, top in taken.items():
                tops[c] = top
            self.changed()

    def _compute_seconds(self) -> float:
        """About what compute takes for all that is planned."""
        plane, costs, tops = self.plane, self.policy.costs, self.tops
        assert tops is not None
        front, count = self.layer, plane.prefix_columns
        suffix = plane.part(count, plane.columns)
        seconds, below = 0.0, front
        for top in sorted({plane.layers, *(t for t in tops if t > front)}):
            columns = [c for c in range(count) if tops[c] >= top]
            seconds += costs.seconds(Op(COMPUTE, range(below, top), (*plane.parts(columns), suffix)))
            seconds += (top - below - 1) * costs.fixed(COMPUTE)
            below = top
        for c in range(count):
            if tops[c] > front > plane.height[c]:
                seconds += costs.seconds(Op(COMPUTE, range(plane.height[c], front), (plane.part(c, c + 1),)))
        return seconds

    def relieve(self, now: float) -> Op | None:
        """A load of a cell that compute was to fill, where the link has time for it before compute gets there."""
        plane, policy, tops = self.plane, self.policy, self.tops
        assert tops is not None
        top = max(tops, default=0)
        if top <= 1:
            return None
        column = max((c for c, t in enumerate(tops) if t == top and plane.available[c]), default=-1)
        layer = top - 1
        if column < 0 or not plane.loadable(column, layer):
            return None
        reached = policy.free_at("compute", now) + (layer - self.layer - 1) * self.alone / plane.layers
        landed = policy.free_at(LINK, now) + policy.link_seconds(plane.request.width(column))
        if landed + policy.costs.fixed(FETCH) >= reached:
            return None
        tops[column] = layer
        self.changed()
        return policy.fetch_row(plane, layer, [column])

    def take_over(self, now: float) -> Op | None:
        """A climb of columns that were to be loaded, where compute has nothing else to do and the link is behind: the
        leftmost that can, as many as compute brings sooner than the link."""
        plane, policy, tops = self.plane, self.policy, self.tops
        open_to_it = [c for c in range(plane.prefix_columns) if plane.available[c] and plane.unclaimed[c]]
        if self.windowed or not open_to_it:
            return None
        assert tops is not None
        left = self._load_seconds(open_to_it)
        for column in open_to_it[:TRIED]:
            taken: Op | None = None
            for last in (column + count for count in (1, 2, 4, 8) if column + count <= plane.prefix_columns):
                op = plane.climb(column, policy.token_budget, last)
                if op is None or policy.hidden_left() < op.tokens:
                    break
                columns = range(*plane.columns_of(op.parts[0]))
                band = range(op.layers.start, plane.layers)
                part = plane.part(columns.start, columns.stop, advance=False)
                ends = policy.free_at(LINK, now) - now + left - self._load_seconds(columns)
                if len(columns) < last - column or policy.costs.seconds(Op(COMPUTE, band, (part,))) >= ends:
                    break
                taken = op
            if taken is not None:
                first, last = plane.columns_of(taken.parts[0])
                tops[first:last] = [plane.layers] * (last - first)
                self.changed()
                return taken
        return None

    def _load_seconds(self, columns: Iterable[int]) -> float:
        """What the link takes for the cells of columns that nobody has begun to fill."""
        plane = self.plane
        return self.policy.link_seconds(sum(plane.request.width(c) * plane.unclaimed[c] for c in columns))

    # Launches

    def _pending(self) -> list[_Run]:
        """What compute has to do, left to right, as of the last change of plan; some of it may be done since."""
        if self._runs is not None:
            return self._runs
        plane, runs, before = self.plane, list[_Run](), None
        state = b"".join(plane.state)
        up = [state[column :: plane.columns] for column in range(plane.columns)]  # each from the first layer up
        assert self.tops is not None
        # The last column goes all the way; _top says for others without a plan.
        tops = chain(self.tops, repeat(0, plane.columns - plane.prefix_columns - 1), [plane.layers])
        needs = zip(*plane.need, strict=True) if self.windowed else repeat(None)
        first = 0
        for _, group in groupby(zip(plane.height, tops, plane.available, up, needs, strict=False)):
            last = first + len(list(group))
            top, height = self._top(first), plane.height[first]
            cells = up[first][height:top]
            alike = (height, top, cells, plane.available[first])
            if alike == before and LOADING not in cells:
                runs[-1] = runs[-1]._replace(last=last)
            elif top > height:
                cuts = range(first, last + 1) if LOADING in cells else (first, last)
                runs += [_Run(left, right, top) for left, right in pairwise(cuts)]
            first, before = last, alike if top > height else None
        self._runs = runs
        return runs

    def _unfinished(self, run: _Run) -> bool:
        plane = self.plane
        if run.last == plane.columns:
            return plane.height[run.first] < plane.layers
        return plane.state[run.top - 1][run.first] == EMPTY

    def _top(self, column: int) -> int:
        """One past the highest layer at which compute has something to do for the column; 0: nowhere."""
        plane = self.plane
        if column == plane.columns - 1:
            return plane.layers
        if column >= plane.prefix_columns or not plane.available[column]:
            return plane.top(column)
        assert self.tops is not None
        for layer in range(self.tops[column] - 1, plane.height[column] - 1, -1):
            if plane.state[layer][column] == EMPTY and plane.needed(column, layer):
                return layer + 1
        return 0

    def _launch(self, layer: int, runs: list[_Run], now: float, room: float) -> Op | None:
        """What of these runs can go up this layer now; where that is more than the token budget, or takes longer than
        `room` seconds, the leftmost of as many equal launches as it takes."""
        plane, policy = self.plane, self.policy
        ready = self._ready(layer, runs)
        if not ready:
            return None
        if runs[-1].last > plane.prefix_columns >= ready[-1].last and self._suffix_waits(layer, ready, runs[-1], now):
            return None
        band, launches = range(layer, layer + 1), math.ceil(self._tokens(ready) / policy.token_budget)
        chosen = self._leftmost(ready, launches) if launches > 1 else ready
        op = self._op(band, chosen)
        if chosen == runs:
            op = self._joined(op, chosen, room)
        while room < float("inf") and policy.costs.seconds(op) > room:
            launches *= 2
            fewer = self._leftmost(ready, launches)
            if fewer == chosen:
                return None
            chosen, op = fewer, self._op(band, fewer)
        self._cut_behind(chosen[-1])
        return op

    def _ready(self, layer: int, runs: list[_Run]) -> list[_Run]:
        """Those that can go up this layer in one launch: what they attend to is filled, or one of them projects it."""
        plane, ready = self.plane, list[_Run]()
        filled = plane.filled_row(layer)
        for run in runs:
            project = self._projects(run, layer)
            first = plane.request.first_attended(run.last - 1 if layer == plane.layers - 1 else run.first, layer)
            sees = filled.find(0, first, run.first if project else run.last) < 0
            if sees if self._goes_on(run, layer) else project:
                ready.append(run)
                filled[run.first : run.last] = b"\1" * (run.last - run.first)
        return ready

    def _projects(self, run: _Run, layer: int) -> bool:
        return self.plane.state[layer][run.first] == EMPTY

    def _goes_on(self, run: _Run, layer: int) -> bool:
        """Whether its hidden states are of use above the layer."""
        return layer + 1 < run.top or run.last == self.plane.columns

    def _tokens(self, runs: Iterable[_Run]) -> int:
        bounds = self.plane.request.boundaries
        return sum(bounds[run.last] - bounds[run.first] for run in runs)

    def _op(self, band: range, runs: Iterable[_Run]) -> Op:
        parts: list[tuple[int, int, bool, bool]] = []
        for run in runs:
            flags = self._projects(run, band[0]), self._goes_on(run, band[-1])
            if parts and parts[-1][1:] == (run.first, *flags):
                parts[-1] = (parts[-1][0], run.last, *flags)
            else:
                parts.append((run.first, run.last, *flags))
        return Op(COMPUTE, band, tuple(self.plane.part(a, b, project=p, advance=on) for a, b, p, on in parts))

    def _leftmost(self, ready: list[_Run], launches: int) -> list[_Run]:
        """The leftmost columns of so many equal launches."""
        plane, bounds, budget = self.plane, self.plane.request.boundaries, self.policy.token_budget
        share, tokens, chosen = self._tokens(ready) / launches, 0, list[_Run]()
        for run in ready:
            if tokens >= min(share, budget):
                break
            enough = bisect_left(bounds, bounds[run.first] + share - tokens)
            fits = plane.within(run.first, budget - tokens)
            if chosen and bounds[fits] - bounds[run.first] > budget - tokens:
                break  # not even one column
            chosen.append(run._replace(last=min(max(enough, run.first + 1), fits, run.last)))
            tokens += bounds[chosen[-1].last] - bounds[run.first]
            if chosen[-1].last < run.last:
                break
        return chosen

    def _cut_behind(self, run: _Run) -> None:
        """What is pending there is two runs from now on, where one goes on behind this one."""
        pending = self._pending()
        at = next(i for i, other in enumerate(pending) if other.first <= run.first < other.last)
        if pending[at].last > run.last:
            pending[at : at + 1] = [pending[at]._replace(last=run.last), pending[at]._replace(first=run.last)]

    def _joined(self, op: Op, runs: list[_Run], room: float) -> Op:
        """The same through more layers, as far as nothing waits there and an op's fixed cost is worth it."""
        plane, layer, stop = self.plane, op.layers.start, op.layers.stop
        most = min(JOINED * self.policy.costs.fixed(COMPUTE), room)
        if stop == plane.layers or 2 * (seconds := self.policy.costs.seconds(op)) > most:
            return op
        started = {plane.height[run.first] for run in self._pending() if self._unfinished(run)}
        while stop < plane.layers and seconds * (stop + 1 - layer) <= most and stop not in started:
            goes = all(self._goes_on(run, stop - 1) and self._alike(run, layer, stop) for run in runs)
            if not goes or self.copying[stop] or len(self._ready(stop, runs)) < len(runs):
                break
            stop += 1
        return self._op(range(layer, stop), runs)

    def _alike(self, run: _Run, layer: int, other: int) -> bool:
        return self._projects(run, layer) == self._projects(run, other)

    def _suffix_waits(self, layer: int, ready: list[_Run], suffix: _Run, now: float) -> bool:
        """Whether the suffix had better wait with the others for its loads, than come later in a launch of its own."""
        plane, policy, band = self.plane, self.policy, range(layer, layer + 1)
        if policy.compute_queued:
            return True
        row = plane.state[layer]
        if row.find(LOADING, 0, plane.prefix_columns) < 0 or any(
            plane.loadable(column, layer) for column in range(plane.prefix_columns)
        ):
            return False
        ops = [self._op(band, runs) for runs in (ready, [suffix], [*ready, suffix])]
        apart, alone, together = map(policy.costs.seconds, ops)
        return policy.lands(plane.request.id, layer, now) - now < apart + alone - together

    def _first_climb(self, runs: Iterable[_Run], room: float) -> Op | None:
        """A climb of the first column that can; it may end within a run."""
        columns = ((column, run.last) for run in runs for column in range(run.first, run.last))
        op = next(filter(None, (self.plane.climb(c, self.policy.token_budget, last) for c, last in columns)), None)
        if op is None or (room < float("inf") and self.policy.costs.seconds(op) > room):
            return None
        self._runs = None
        return op
