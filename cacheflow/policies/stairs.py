"""Staircases: which leading columns of a request are computed at each layer, and how long that takes with the suffix
climbing behind the loads."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from itertools import compress, groupby, pairwise
from operator import itemgetter, not_, sub
from typing import NamedTuple

from cacheflow.costs.base import Costs, LayerWork, Span
from cacheflow.loop import AHEAD
from cacheflow.op import COMPUTE, COPY, FETCH
from cacheflow.plane import Plane

Run = tuple[int, int, int, int]  # bands, layers of each, columns computed there, columns that go on above the last

PIECES = 4  # most fetches of the first layer, and of the last
MEETING = 6  # most steps that are made towards where compute and link end together
OPTIONS = 24  # splits of a request that a batch's plan tells apart
SAMPLED = 6  # every so many of those is worked out, the others are interpolated
MOVED = 0.05  # share by which what fetches cost must move until layers are grouped anew
WORTH = 0.02  # share of the time to first token that fetches of several layers must save; a guess


class Stairs(NamedTuple):
    """columns are computed through all layers, one more up to `partly` layers of those above the first, and in the
    first layer `first` columns. seconds: until the first token. compute, link: seconds of each that this takes."""

    columns: int
    partly: int
    first: int
    seconds: float
    compute: float
    link: float

    def tops(self, count: int, layers: int) -> list[int]:
        """[count]: for each column at how many layers it is computed, from the first up."""
        stairs = [layers] * self.columns + [1 + self.partly] * (self.partly > 0)
        return (stairs + [1] * (self.first - len(stairs)) + [0] * count)[:count]


class _Loads(NamedTuple):
    """What a band's loads take, in seconds. fetch: of the link. step: from when one band has landed to the next, the
    slower of link and copies. whole, cut: that a launch still waits when the last fetch has ended, and when that of the
    last piece has. more: of the link, if in pieces. held_up: by which compute is held up. pieces: see
    Planner.pieces. cells: (token, layer) pairs."""

    fetch: float
    step: float
    whole: float
    cut: float
    more: float
    held_up: float
    pieces: int
    cells: int


class Planner:
    """Chooses stairs for one request. Times are in seconds from when it is asked.

    Layers run in order, a launch each: at a layer the computed columns are projected, those that go on and the suffix
    are advanced. A launch begins when the layer's other cells have landed, and these are loaded in the order of layers.
    Row 0 can be projected for all columns, since a projection attends to nothing: the first launch waits for no load
    then. Where the link is much faster it is better loaded like the others. Where every fetch costs much, it brings
    several layers; then columns go ahead of a suffix that waits.
    """

    def __init__(self, plane: Plane, costs: Costs, token_budget: int, staging_cells: int | None) -> None:
        request = plane.request
        self.costs = costs
        self.layers = request.layers
        self.count = plane.prefix_columns
        self.bounds = request.boundaries
        self.steps = max(1, request.layers - 1)
        self.suffix = request.tokens - request.prefix
        self._suffix, self._last = (Span(start, request.tokens, None) for start in (request.prefix, request.tokens - 1))
        self.budget = token_budget
        self.staging = staging_cells or request.tokens * request.layers
        holes = compress(range(self.count), map(not_, request.stored))
        self.holes = [Span(self.bounds[c], self.bounds[c + 1], None) for c in holes]
        self._stored = [*compress(range(self.count), request.stored), self.count]
        self._launch = cache(self._launch_seconds)
        self._load = cache(self._loads)
        self._revision, self._link = costs.revision, tuple[float, ...]()  # the costs that these are of
        self._together, self._together_of = 1, tuple[float, ...]()

    def best(self, most: int, compute_at: float = 0.0, link_at: float = 0.0) -> Stairs:
        """The stairs with the soonest first token, with at most so many columns that go beyond the first layer, when
        compute is free in `compute_at` seconds and the link in `link_at`."""
        at = compute_at, link_at
        found: list[Stairs] = []
        for first in self.rows:

            def stairs(units: int, first: int = first) -> Stairs:
                return self.evaluate(*self.split(units), first, *at)

            found += _lowest(stairs, self.units(most), link_at - compute_at)
            if self.together > 1:  # whole fetches are more or fewer: there are several lowest
                found += [stairs(units) for units in self.spread(most)]
        # The first layer's projections are the smallest pieces: so many of them as let both sides end together.
        one, costs = min(found, key=lambda stairs: stairs.seconds), self.costs
        late = one.compute + compute_at - one.link - link_at
        cell = costs.load_seconds(1) + costs.project_marginal - costs.interference(1, fetches=0)
        column = self.bounds[self.count] / max(1, self.count)
        share = late / (column * cell) if column > 0 and cell > 0 else 0.0
        for fewer in {math.floor(share), math.ceil(share)} if 0 < share < one.first else ():
            found.append(self.evaluate(one.columns, one.partly, one.first - fewer, *at))
        return min(found, key=lambda stairs: stairs.seconds)

    def estimate(self) -> float:
        """About how long the best stairs take: where compute and link meet on lines between a few splits."""
        every = self.spread(self.count)
        spread = sorted({*every[::SAMPLED], every[-1]})  # what a batch's plan works out as well
        found = [self.evaluate(*self.split(0), self.rows[-1])]
        for before, i in pairwise(spread):
            one, more = found[-1], self.evaluate(*self.split(i), self.rows[-1])
            late, later = one.compute - one.link, more.compute - more.link
            if late <= 0 < later:
                share = late / (late - later)
                if self._together == 1:
                    return one.compute + (more.compute - one.compute) * share
                at = round(before + (i - before) * share)  # launches wait for the first band, and for the last
                return min(one.seconds, more.seconds, self.evaluate(*self.split(at), self.rows[-1]).seconds)
            found.append(more)
        return min(stairs.seconds for stairs in found)

    def spread(self, most: int) -> list[int]:
        """Splits between nothing and `most` columns, in OPTIONS steps; of many columns there are whole ones only."""
        units = self.units(most)
        unit = self.steps if units >= OPTIONS * self.steps else 1
        return sorted({unit * (i * (units // unit) // OPTIONS) for i in range(OPTIONS + 1)})

    def units(self, most: int) -> int:
        """How many cells above the first layer may be computed of `most` leading columns, holes not counted."""
        return self.steps * bisect_left(self._stored, min(most, self.count))

    def split(self, units: int) -> tuple[int, int]:
        """The columns, and layers above the first of one more, that make so many."""
        columns, partly = divmod(units, self.steps)
        return self._stored[columns], partly

    @property
    def rows(self) -> tuple[int, ...]:
        """How many columns may be projected in the first layer: all, and where the link is faster than that, none
        besides those that go on."""
        return (self.count, 0) if self.costs.load_seconds(1) < self.costs.project_marginal else (self.count,)

    def evaluate(self, columns: int, partly: int, first: int, compute_at: float = 0.0, link_at: float = 0.0) -> Stairs:
        """How long stairs take. first: columns projected in the first layer, at least those that go on."""
        self._forget_other_costs()
        costs, wider = self.costs, min(columns + 1, self.count)
        above, on = self.layers - 1, wider if partly else columns
        first = max(first, on)
        upper = above - partly  # layers with `columns` columns, the last layer among them
        runs: list[Run] = [(1, 1, first, on if above else 0)]
        if partly:
            runs += [(partly - 1, 1, wider, wider), (1, 1, wider, columns if upper else 0)]
        if upper:
            runs += [(upper - 1, 1, columns, columns), (1, 1, columns, 0)]
        if self._together > 1:
            runs = self._in_bands(runs)
        time, landed, compute, link, done = compute_at, link_at + costs.latency, 0.0, 0.0, 0
        for bands, layers, computed, on in runs:
            if bands < 1:
                continue
            done += bands * layers
            busy = self._launch(computed, on, done == self.layers)
            if layers > 1:
                busy += self._launch(computed, computed, False) * (layers - 1)
            fetch, step, whole, cut, more, held_up, _, _ = self._load(computed, layers)
            compute += busy * bands
            if fetch:
                # Waiting for the first of these loads, or for the last, is all that can hold them up. Those of the next
                # band land while this one is computed.
                begins, ends = not link, done == self.layers
                ready, alone = landed + fetch + (more + cut if begins else whole), busy
                start = max(time + held_up, ready)
                if self._together > 1 and computed:
                    alone, ahead = self._ahead(layers, busy, ends)
                    busy -= min((start - time - held_up) * ahead / bands, busy - alone)
                time = start + busy * bands + held_up * (bands - 1)
                landed += step * bands + more * begins
                time = max(time, landed - step + fetch + (more + cut if ends else whole) + alone)
                link += fetch * bands + more * (begins + (ends and done > 1))
                compute += held_up * bands
            else:
                time += busy * bands
        return Stairs(columns, partly, first, time, compute, link)

    def _ahead(self, layers: int, busy: float, last: bool) -> tuple[float, float]:
        """Of a band, whose launches take `busy` seconds, those that the suffix takes alone, if columns went ahead while
        it waited for loads; and how many seconds launches take less for each that they did."""
        costs, bounds, suffix = self.costs, self.bounds, self._launch(0, 0, False)
        alone = min(busy, suffix * layers + (self._launch(0, 0, True) - suffix if last else 0.0))
        columns = busy - layers * sum(costs.cell_marginals(bounds[self.count], bounds[self.count] + self.suffix, 0))
        return alone, (busy - alone) / columns if columns > 0 else 0.0

    def _in_bands(self, runs: Iterable[Run]) -> list[Run]:
        """The same layers, as many together as fetches bring; where the same columns are computed, all bands but the
        last, and the last."""
        found = list[Run]()
        for computed, same in groupby(runs, key=itemgetter(2)):
            *before, (count, _, _, on) = same
            layers = count + sum(bands for bands, *_ in before)
            band = min(self._together, layers)
            full = (layers - 1) // band
            found += [(full, band, computed, computed), (1, layers - full * band, computed, on)]
        return found

    @cached_property
    def widest(self) -> int:
        """Tokens of the widest column."""
        return max(map(sub, self.bounds[1 : self.count + 1], self.bounds), default=1)

    @property
    def together(self) -> int:
        """How many layers a fetch brings at most, as costs are."""
        self._forget_other_costs()
        return self._together

    def pieces(self, columns: int) -> int:
        """In how many fetches the first and the last layer are loaded, of which so many columns are computed: as many
        as let compute begin, and end, soonest. What has landed is copied while the next piece is on its way."""
        self._forget_other_costs()
        return self._load(columns, 1).pieces

    def _loads(self, columns: int, layers: int) -> _Loads:
        """Of a band of layers at which so many columns are computed."""
        costs, start = self.costs, self.bounds[columns]
        loaded, right = self.bounds[self.count] - start, self.count - columns
        if self.holes:
            holes = [hole.stop - hole.start for hole in self.holes if hole.start >= start]
            loaded, right = loaded - sum(holes), right - len(holes)
        loaded *= layers
        if not loaded:
            return _Loads(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1, 0)
        fetches, each = -(-loaded // self.staging), costs.interference_per_fetch
        if layers > 1:  # of which whole columns do not fill a staging buffer
            fetches = -(-right // max(1, self.staging // (layers * self.widest)))
        overhead = self.overhead(loaded / fetches)
        fetch = costs.load_seconds(loaded) + fetches * overhead
        move = costs.shape.cell_bytes / costs.copy_bandwidth  # seconds to copy a cell
        copy = costs.fixed(COPY) + min(loaded, self.staging) * move
        # Of a row in several fetches one copy is counted, so that where copies are slower than the link, links of 400
        # Gbps say, its plan is too short; counted one after another they made such plans nearer and runs no sooner.
        copies = fetches * costs.fixed(COPY) + loaded * move if layers > 1 else copy
        held_up = costs.interference(loaded, fetches)
        fixed = overhead + costs.fixed(COPY) + each
        wanted = PIECES if copy >= fixed * PIECES**2 else max(1, round(math.sqrt(copy / fixed)))
        wanted = wanted if layers == 1 else 1
        pieces = -(-right // -(-right // wanted))  # of equally many columns
        cut = max(copy / pieces, each + (held_up - each) / pieces)
        more = max(0.0, pieces * (self.overhead(loaded / pieces) if costs.latency else overhead) - overhead)
        return _Loads(fetch, max(fetch, copies), max(copy, held_up), cut, more, held_up, pieces, loaded)

    def overhead(self, cells: float) -> float:
        """Seconds of the link that a fetch of so many (token, layer) pairs takes besides what moves them: with AHEAD in
        flight, not all of a long latency is over before."""
        costs, fixed = self.costs, self.costs.fixed(FETCH)
        fetch = fixed + cells * costs.load_seconds(1) if costs.latency else 0.0
        return fixed + max(0.0, (costs.latency + fetch) / AHEAD - fetch) if fetch < costs.latency else fixed

    def _launch_seconds(self, computed: int, on: int, last: bool) -> float:
        """Seconds of a layer at which so many columns are computed and so many of them go on."""
        costs, start, goes = self.costs, self.bounds[computed], self.bounds[on]
        project = start + self.suffix
        spans = [Span(0, goes, None)] if on else []
        if self.holes:
            project += sum([hole.stop - hole.start for hole in self.holes if hole.start >= start])
            spans += [hole for hole in self.holes if hole.start >= goes and not last]
        spans.append(self._last if last else self._suffix)
        launches = max(1, -(-project // self.budget))
        seconds = costs.layer_seconds(LayerWork(project, tuple(spans))) + (launches - 1) * costs.layer_fixed
        return seconds + launches * costs.fixed(COMPUTE) + (costs.head_seconds(1) if last else 0.0)

    def _forget_other_costs(self) -> None:
        """What launches and loads take is kept as long as costs are the same."""
        costs = self.costs
        if self._revision != costs.revision:
            self._revision = costs.revision
            self._launch.cache_clear()
        interference = costs.interference_per_fetch, costs.interference_per_byte
        link = (
            costs.bandwidth,
            costs.latency,
            costs.fetch_seconds,
            costs.copy_bandwidth,
            costs.copy_seconds,
            *interference,
        )
        if self._link != link:
            self._link = link
            self._load.cache_clear()
            known = self._together_of
            if not known or not all(math.isclose(a, b, rel_tol=MOVED) for a, b in zip(link, known, strict=True)):
                self._together_of, self._together = link, 1
                self._together = self._layers_together()

    def _layers_together(self) -> int:
        """How many layers a fetch brings at most for the soonest first token, if several are worth it: fetches of two
        lose half as much in all. But launches wait longer for the first of them and for the last, and should the link
        become slower, more is in flight that cannot be computed instead.
        """
        costs, layers = self.costs, self.layers
        if not (costs.fixed(FETCH) or costs.latency or costs.interference_per_fetch):
            return 1
        whole, suffix = (layers * self._launch(columns, columns, False) for columns in (self.count, 0))
        load = costs.load_seconds(self._load(0, layers).cells)
        saved = max(0.0, whole - suffix)  # of compute, if all is loaded
        both = saved + load
        if not both:
            return 1
        # Were all linear in the share that is computed: both sides end together after `load * loads`, and so much of a
        # delay of the link would delay that.
        loads, delays = min(1.0, whole / both), saved / both
        columns = round(self.count * (1 - loads))
        row = self._load(columns, 1)
        lost = delays * (row.fetch - costs.load_seconds(row.cells)) + (1 - delays) * costs.interference_per_fetch
        if layers * lost / 2 <= WORTH * load * loads:
            return 1
        most, seconds = min(layers, max(1, self.staging // self.widest)), dict[int, float]()
        for together in sorted({1, most, *(i << j for i in (2, 3) for j in range(most) if i << j < most)}):
            self._together = together
            seconds[together] = self.estimate()
        best = min(seconds, key=lambda together: seconds[together])
        return best if seconds[best] < (1 - WORTH) * seconds[1] else 1


def _lowest(function: Callable[[int], Stairs], last: int, behind: float) -> list[Stairs]:
    """The lowest values of something over 0..last that falls and then rises around where compute and link end together,
    and that of the last, which waits for no load.

    behind: seconds by which the link is behind compute before. Where it is, launches may wait for it and both begin
    together, or not.
    """
    function = cache(function)
    found = {last}
    for late in {behind, min(behind, 0.0)}:
        found.update(_around(function, _meeting(function, last, late), last))
    return [function(units) for units in found]


def _meeting(function: Callable[[int], Stairs], last: int, behind: float) -> int:
    """About where compute and link end together, on lines through what is known: compute rises, the link falls."""

    def late(units: int) -> float:
        return function(units).compute - function(units).link - behind

    low, high = 0, last
    known = [(late(low), low), (late(high), high)]
    for _ in range(MEETING):
        if high - low < 2 or late(low) >= 0 or late(high) <= 0:
            break
        # On the parabola through the last three, on its side: compute bends, as attention grows with the square.
        at = sum(u * math.prod(v / (v - f) for v, _ in known if v != f) for f, u in known)
        middle = min(max(low + 1, round(at)), high - 1)
        low, high = (low, middle) if late(middle) > 0 else (middle, high)
        known = [*known, (late(middle), middle)][-3:]
    return low if abs(late(low)) < abs(late(high)) else high


def _around(function: Callable[[int], Stairs], at: int, last: int) -> range:
    """Where the lowest values are that steps lead to which double, and bisection between the last of these."""
    step = 1 if at < last and function(at + 1).seconds < function(at).seconds else -1
    before = at
    while 0 <= at + step <= last and function(at + step).seconds < function(at).seconds:
        before, at, step = at, at + step, 2 * step
    low, high = sorted((before, min(max(at + step, 0), last)))
    while high - low > 2:
        middle = (low + high) // 2
        if function(middle).seconds <= function(middle + 1).seconds:
            high = middle + 1
        else:
            low = middle + 1
    return range(low, high + 1)
