"""staircase: the paper's second version. Stairs for all requests at once, by a dynamic program over bytes saved.

Source: CacheFlow, second version (September 2026). Block i, a group of layers, recomputes its first j_i chunks and
loads the others, j_1 >= j_2 >= ...; the j of all (request, block) pairs together minimise max(compute, load). What the
store does not have costs infinitely much to load, so it is computed. Restoration comes first, a request's suffix after.

Where the paper is silent: stairs are computed column by column, all columns of equal height in passes of up to the
token budget; loads come from the last chunk backwards, but first what compute will wait for; requests are served as
they came; columns are cut cell by cell where blocks are too coarse for both sides to end together; the side that ends
first all the same takes over cells of the other.
"""

from __future__ import annotations

from operator import ge
from typing import Any

from cacheflow.costs.base import Costs
from cacheflow.op import COMPUTE, COPY, FETCH, Op
from cacheflow.plane import EMPTY, Plane
from cacheflow.policies.base import LINK, Policy, share_to_move
from cacheflow.policies.knapsack import plan, seconds

PIECES = 4  # of the layers that a pass climbs; the link may take over what has not started


class Staircase(Policy):
    """Plans when requests come or leave, anew for everything that has not been started."""

    name = "staircase"
    rank = 6

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stairs: dict[str, Stairs] = {}
        self._planned = True

    def add(self, plane: Plane) -> None:
        super().add(plane)
        self._stairs[plane.request.id] = Stairs(plane, self.costs, self.token_budget)
        self._planned = False

    def cancel(self, request: str) -> None:
        super().cancel(request)
        self._planned = False

    def failed(self, op: Op, reason: str) -> None:
        super().failed(op, reason)
        for request in op.requests:
            self._stairs[request].refresh()

    def remove(self, request: str) -> None:
        super().remove(request)
        del self._stairs[request]

    def next_compute(self, now: float) -> Op | None:
        served = self._served(now)
        suffixes = (self.repair(stairs.plane) for stairs in served if stairs.plane.restored)
        planned = (stairs.next_compute(self._waiting_left()) for stairs in served)
        return next(filter(None, suffixes), None) or next(filter(None, planned), None) or self._fill(served, now)

    def next_fetch(self, now: float) -> Op | None:
        served = self._served(now)
        awaited = (stairs.fetch_awaited(self) for stairs in served)
        others = (stairs.fetch_above(self.staging_cells) for stairs in served)
        return next(filter(None, awaited), None) or next(filter(None, others), None) or self._relieve(served, now)

    def _served(self, now: float) -> list[Stairs]:
        served = [self._stairs[plane.request.id] for plane in self.active()]
        if not self._planned:
            self._planned = True
            self._plan(served, now)
        return served

    def _plan(self, served: list[Stairs], now: float) -> None:
        """Stairs of any shape where the hidden states that then wait for loads fit the hidden budget, else flat ones:
        columns whole, or no more than projected in the first layer, which keeps nothing."""
        for stairs in served:
            stairs.clear()
        compute = self.free_at("compute", now) - now + sum(stairs.compute_left() for stairs in served)
        others = sum(stairs.load_left() - stairs.choosable_cells() for stairs in served)
        link = self._landing(now) - now + self.costs.load_seconds(others)
        for flat in (False, True):
            plan(served, self.costs, compute, link, flat=flat)
            if self._waiting_left() >= 0:
                break
        for _ in range(4):  # what is left to compute gives way to it, so that more may have to wait
            if not self._raise_floors(served, link):
                break
            plan(served, self.costs, compute, link, flat=flat)

    def _raise_floors(self, served: list[Stairs], link: float) -> bool:
        """Where holes would wait for loads in the first layer: leave as much of that to compute as both sides together
        bring soonest. A projection there attends to nothing, so it need not wait."""
        if all(all(stairs.plane.available[: stairs.count]) for stairs in served):
            return False
        before_all = sum(stairs.floor for stairs in served)
        found = [(stairs, *stairs.before_loads()) for stairs in served]
        seconds, cells = sum(free for _, free, _ in found), 0
        for stairs, _, blocked in found:
            columns, before = stairs.choosable(), 0
            for hole, more in blocked:
                cells += sum(stairs.widths[c] for c in columns if before <= c < hole and not stairs.tops[c])
                for column in columns[stairs.floor :]:
                    waits = link + self.costs.load_seconds(cells) - seconds
                    if column > hole or waits <= (0.0 if stairs.tops[column] else stairs.first[column]):
                        break
                    stairs.floor += 1
                    if not stairs.tops[column]:
                        seconds, cells = seconds + stairs.first[column], cells - stairs.widths[column]
                seconds, before = seconds + more, hole
        return sum(stairs.floor for stairs in served) > before_all

    def _fill(self, served: list[Stairs], now: float) -> Op | None:
        """Compute has nothing planned, or waits for loads: projections of what waits; else cells that are to be loaded,
        as many as let both sides end together, or as many as are computed while it waits."""
        blocked, free = sum(stairs.compute_left() for stairs in served), self.free_at("compute", now)
        behind = sum(seconds for _, seconds in self._queued[LINK][1:])
        waits = max(self.free_at(LINK, now) - behind, now + self.costs.latency) - free if blocked else 0.0
        if blocked and (waits > 0 or not self._queued["compute"]):
            op = next(filter(None, (stairs.project_hole() for stairs in served)), None)
            if op is not None:
                return op
        left = sum(stairs.load_left() for stairs in served)
        spare = self._landing(now) + self.costs.load_seconds(left) - free - blocked
        if not left or max(spare, waits) <= 0:
            return None
        room = self._waiting_left()
        ops = (stairs.take_over(spare, waits, self.costs, room) for stairs in served)
        return next(filter(None, ops), None)

    def _relieve(self, served: list[Stairs], now: float) -> Op | None:
        """The link has nothing planned: cells that are to be computed, as many as let both sides end together."""
        left = sum(stairs.compute_left() for stairs in served)
        spare = self.free_at("compute", now) + left - self._landing(now)
        if not left or spare <= 0:
            return None
        room = self._waiting_left()
        ops = (stairs.relieve(spare, self.costs, room, self.staging_cells) for stairs in reversed(served))
        return next(filter(None, ops), None)

    def _landing(self, now: float) -> float:
        """When a fetch of nothing would be in pages; what a column's copy takes counts, since all else overlaps."""
        costs, widest = self.costs, max((max(s.widths, default=0) for s in self._stairs.values()), default=0)
        copy = costs.fixed(COPY) + widest * costs.shape.layers * costs.shape.cell_bytes / costs.copy_bandwidth
        return max(self.free_at(LINK, now), now + costs.latency) + costs.fixed(FETCH) + copy

    def _waiting_left(self) -> float:
        """Tokens by which the columns that are, or will be, only partly computed when they wait fall short of the
        hidden budget."""
        if self.hidden_tokens is None:
            return float("inf")
        return self.hidden_tokens - sum(stairs.waiting_tokens() for stairs in self._stairs.values())


class Stairs:
    """One request: which cells compute is to fill, and which the link.

    tops: [prefix columns]; up to which layer compute fills a column, 0: not at all. The link fills what is above.
    floor: of the columns to choose for, how many, the first, are projected in the first layer at least.
    first, upper: [prefix columns]; seconds to project a column in the first layer, and to take it through one more.
    """

    def __init__(self, plane: Plane, costs: Costs, token_budget: int) -> None:
        self.plane = plane
        self.token_budget = token_budget
        self.count = plane.prefix_columns
        self.widths = [plane.request.width(column) for column in range(self.count)]
        self.tops = [0] * self.count
        self.windows = any(plane.request.windows)
        self.first, self.upper = [0.0] * self.count, [0.0] * self.count
        if self.count:
            first, whole = (seconds(plane, costs, token_budget, range(top)) for top in (1, plane.layers))
            self.first = first.tolist()
            self.upper = ((whole - first) / max(1, plane.layers - 1)).tolist()
        self.floor = 0
        self._next_row = 0  # no layer below has anything that compute waits for

    def cost(self, column: int, top: int) -> float:
        """Seconds to compute a column in layers [0, top)."""
        return self.first[column] + (top - 1) * self.upper[column] if top else 0.0

    # The plan

    def choosable(self) -> list[int]:
        """Columns that the store has, nothing of which was started. With sliding windows there are none: columns behind
        a window attend to cells that nobody else needs, so everything needed is loaded."""
        plane = self.plane
        return [] if self.windows else [c for c in range(self.count) if plane.available[c] and self._untouched(c)]

    def refresh(self) -> None:
        """What compute waits for may have changed."""
        self._next_row = 0

    def clear(self) -> None:
        self.refresh()
        self.floor = 0
        for column in self.choosable():
            self.tops[column] = 0

    def before_loads(self) -> tuple[float, list[tuple[int, float]]]:
        """Seconds of compute that needs no loads; and columns that only compute can fill, but not without loads, each
        with its seconds that need them."""
        plane, seconds, least = self.plane, 0.0, self.plane.layers
        blocked: list[tuple[int, float]] = []
        for column in range(self.count):
            top = plane.layers if plane.must_compute(column) else self.tops[column] if self._untouched(column) else 0
            free = self.cost(column, min(top, least + 1))
            seconds += free
            if not plane.must_compute(column):
                least = min(least, top)
            elif top > least + 1:
                blocked.append((column, self.cost(column, top) - free))
        return seconds, blocked

    def choosable_cells(self) -> int:
        return self.plane.layers * sum(self.widths[c] for c in self.choosable())

    def compute_left(self) -> float:
        """Seconds of what compute has still to fill and has not started."""
        total = 0.0
        for column, missing in enumerate(self.plane.unclaimed[: self.count]):
            if not missing:
                continue
            if not self.plane.available[column]:
                advances = max(0, self.plane.top(column) - 1 - self.plane.height[column])
                total += missing * self.first[column] + advances * (self.upper[column] - self.first[column])
            elif self._pending(column):
                height = self.plane.height[column]
                total += self.cost(column, self.tops[column]) - self.cost(column, height and height + 1)
        return total

    def load_left(self) -> int:
        """(token, layer) pairs that the link has still to fill and has not started."""
        plane, total = self.plane, 0
        for column, missing in enumerate(plane.unclaimed[: self.count]):
            if missing and plane.available[column]:
                total += self.widths[column] * (missing - self._empty_below_top(column))
        return total

    def waiting_tokens(self) -> int:
        """Tokens whose hidden states wait for loads, now or by plan."""
        plane = self.plane
        columns = (c for c in range(self.count) if plane.missing[c])
        return sum(self.widths[c] for c in columns if plane.holds(c) or 1 < self.tops[c] < plane.layers)

    def _untouched(self, column: int) -> bool:
        return self.plane.unclaimed[column] == self.plane.layers and not self.plane.height[column]

    def _pending(self, column: int) -> bool:
        """Whether cells that compute is to fill by choice are empty."""
        top = self.tops[column]
        return top > 0 and self.plane.available[column] and self.plane.state[top - 1][column] == EMPTY

    def _empty_below_top(self, column: int) -> int:
        return (
            sum(row[column] == EMPTY for row in self.plane.state[: self.tops[column]]) if self._pending(column) else 0
        )

    # Ops

    def next_compute(self, room: float) -> Op | None:
        """What can be computed now of holes, failed loads and stairs, from the left. room: tokens of hidden states that
        may wait besides those planned."""
        plane = self.plane
        for column in range(self.count):
            if plane.must_compute(column):
                op = plane.climb(column, self.token_budget, last=self.count)
            else:
                op = self._rise(column, room) if self._pending(column) else None
            if op is not None:
                return op
        return None

    def project_hole(self) -> Op | None:
        """The first step of a column that only compute can fill and that waits for loads: a projection does not."""
        plane = self.plane
        for column in range(self.count):
            layer = plane.height[column]
            if plane.must_compute(column) and plane.needed(column, layer) and plane.state[layer][column] == EMPTY:
                return Op(COMPUTE, range(layer, layer + 1), (plane.part(column, column + 1, advance=False),))
        return None

    def fetch_awaited(self, policy: Policy) -> Op | None:
        """What compute will wait for, layer by layer, and in a layer first what it waits for first."""
        plane, tops = self.plane, self.tops
        awaited = self._awaited() if self._next_row < plane.layers else []
        for layer, (first, last) in enumerate(awaited[self._next_row :], self._next_row):
            for columns in (range(first), range(first, last)):
                op = policy.fetch_row(plane, layer, (c for c in columns if tops[c] <= layer))
                if op is not None:
                    self._next_row = layer
                    return op
        self._next_row = plane.layers
        return None

    def fetch_above(self, staging_cells: int | None) -> Op | None:
        """What is above the stairs, from the last column backwards."""
        plane = self.plane
        for column in reversed(range(self.count)):
            below = self.tops[column] - plane.height[column] if self._pending(column) else 0
            if plane.available[column] and plane.unclaimed[column] > below:
                band = plane.loadable_band(column)
                op = self._fetch(column, range(max(band.start, self.tops[column]), band.stop), staging_cells)
                if op is not None:
                    return op
        return None

    def take_over(self, spare: float, waits: float, costs: Costs, room: float) -> Op | None:
        """Of the first column with cells to load the lower ones, as many as are computed, and not loaded, in `spare`
        seconds, or computed in `waits` seconds. room: tokens of hidden states that may still wait."""
        plane = self.plane
        open = (c for c in range(self.count) if plane.available[c] and plane.unclaimed[c] and not self._pending(c))
        if self.windows:  # what a column attends to need not be needed: no more than projections in the first layer
            open = (c for c in open if plane.loadable(c, 0) and not plane.height[c])
        column = next(open, None)
        if column is None:
            return None
        below = 1 if self.windows else plane.layers
        band, before, at = plane.loadable_band(column, below), self.tops[column], plane.height[column]
        if not band:
            return None
        seconds = self.cost(column, band.stop) - self.cost(column, at and at + 1)
        both = seconds + costs.load_seconds(self.widths[column] * len(band))
        top = band.start + int(min(1.0, share_to_move(spare, both)) * len(band))
        while top < band.stop and self.cost(column, top + 1) - self.cost(column, at and at + 1) <= waits:
            top += 1
        partly = band.start > 0 or 1 < top < plane.layers
        if top <= band.start or (partly and not plane.holds(column) and self.widths[column] > room):
            return None
        self.tops[column] = top
        op = self._rise(column, room)
        if op is None:
            self.tops[column] = before
        return op

    def relieve(self, spare: float, costs: Costs, room: float, staging_cells: int | None) -> Op | None:
        """Of the last column to be computed the upper cells, as many as are loaded, and not computed, in `spare`
        seconds. room: tokens of hidden states that may still wait."""
        column = next((c for c in reversed(range(self.count)) if self._pending(c)), None)
        if column is None:
            return None
        top, width, empty = self.tops[column], self.widths[column], self._empty_below_top(column)
        seconds = self.cost(column, top) - self.cost(column, top - empty)
        both = seconds + costs.load_seconds(width * empty)
        left = top - int(min(1.0, share_to_move(spare, both)) * empty)
        waits = left > 1 and top == self.plane.layers and not self.plane.holds(column)
        if left == top or (waits and width > room):
            return None
        op = self._fetch(column, range(left, top), staging_cells)
        self.tops[column] = left
        return op

    def _rise(self, column: int, room: float) -> Op | None:
        """The largest op that takes a column, and its like to the right, towards its top; None while it is blocked."""
        plane, top, low = self.plane, self.tops[column], self.plane.height[column]
        if plane.filled(column, column + 1, low):
            return plane.climb(column, self.token_budget, last=column + 1)  # up to the first empty cell
        if plane.state[low][column] != EMPTY:
            return None
        last, tokens = column + 1, self.widths[column]
        while last < self.count and self._alike(column, last) and tokens + self.widths[last] <= self.token_budget:
            tokens += self.widths[last]
            last += 1
        keeps = plane.holds(column) or top < plane.layers or tokens <= room
        stop, most = low, low - (-plane.layers // PIECES) if keeps else top
        while stop < min(top - 1, most) and plane.attended_filled(column, last, stop):
            stop += 1
            if plane.state[stop][column] != EMPTY:
                break
        if stop == top - 1:  # in the highest cell the columns are only projected
            return Op(COMPUTE, range(low, top), (plane.part(column, last, advance=False),))
        return Op(COMPUTE, range(low, stop), (plane.part(column, last),)) if stop > low and keeps else None

    def _alike(self, column: int, other: int) -> bool:
        plane, top, height = self.plane, self.tops[column], self.plane.height[column]
        same = self.tops[other] == top and plane.height[other] == height and plane.available[other]
        return same and all(row[other] == row[column] for row in plane.state[height:top])

    def _awaited(self) -> list[tuple[int, int]]:
        """[layers], or empty where there are none; the first and the last column that have still to be computed there
        behind cells to load."""
        plane, lowest = self.plane, self.plane.layers
        if all(plane.available[: self.count]) and all(map(ge, self.tops, self.tops[1:])):
            return []  # whatever is computed is behind nothing but what is computed
        found = [(0, 0)] * plane.layers
        for column in range(self.count):
            stored = plane.available[column]
            top = plane.layers if plane.must_compute(column) else self.tops[column] if self._pending(column) else 0
            for layer in range(plane.height[column], top - 1) if top > lowest or not stored else ():
                found[layer] = (found[layer][0] or column, column)
            lowest = min(lowest, self.tops[column]) if stored else lowest
        return found

    def _fetch(self, column: int, band: range, staging_cells: int | None) -> Op | None:
        if staging_cells is not None:
            band = band[-max(1, staging_cells // self.widths[column]) :]
        return Op(FETCH, band, (self.plane.part(column, column + 1),)) if band else None
