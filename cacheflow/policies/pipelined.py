"""pipelined: layer by layer up a staircase, the suffix in the same launches. Ours."""

from __future__ import annotations

from collections import deque
from typing import Any

from cacheflow.op import COMPUTE, FETCH, Kind, Op
from cacheflow.plane import Plane
from cacheflow.policies.base import LINK, Policy
from cacheflow.policies.climb import Climb
from cacheflow.policies.stairs import plan_batch

OVERTAKEN = 16  # requests that came later and end before one; after that it goes first
SLOWER = 1.05  # times as slow as planned with is the link from which on what is left is split anew; a guess
RECENT, ASKED = 8, 3  # ops that are looked back at, and of which, the last large ones, the median counts; guesses


class Pipelined(Policy):
    """Compute takes the layers in order: at each, the layer's share of columns and the suffix in one launch, as soon as
    the layer's other cells have landed. The link runs ahead in the order in which that needs them. Splits are chosen so
    that both sides end together, and moved when they turn out not to.

    A plan has fewer columns the higher the layer, and where the last launch comes no later for it the link takes the
    last columns first: should it become slower, compute stands beside what is left to load, and takes over as much of
    that as lets both sides end together.

    Requests are finished one after another; what one leaves of a resource goes to the next. Splits of a batch are
    chosen together, by `objective`. First come those with a deadline, the earliest first, as many as can keep theirs;
    then the one with the least left to do. When OVERTAKEN that came later have ended before a request, it goes first on
    both resources, and others get only what it cannot use.
    """

    name = "pipelined"
    rank = 7

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Seconds and estimates of the last ops of a kind, see _unit; and how many times its estimate one takes.
        self._ran: dict[Kind, deque[tuple[float, float]]] = {kind: deque(maxlen=RECENT) for kind in (COMPUTE, FETCH)}
        self._paces: dict[Kind, float] = {}  # in the same units, as of when this was last asked
        self._unread = set[Kind]()  # of which an op has ended since
        self._row = 0.0  # tokens of a large fetch of the request that goes first
        self._head: Op | None = None  # the fetch that runs
        self._since = 0.0  # when it was first seen to
        self._climbs: dict[str, Climb] = {}
        self._ranked: list[Climb] | None = None  # of whom is not done, who is served before whom; None: to be found out
        self._wave = 0  # requests that are added with nothing asked between them come at the same time

    def add(self, plane: Plane) -> None:
        super().add(plane)
        self._climbs[plane.request.id] = Climb(self, plane, self._wave)
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

    def finished(self, op: Op, seconds: float, ended: float | None = None) -> None:
        super().finished(op, seconds, ended)
        if op.kind != COMPUTE:
            for request in op.requests:
                copying = self._climbs[request].copying
                (copying.update if op.kind == FETCH else copying.subtract)(op.layers)
        elif self._ranked is not None:
            self._ranked = [climb for climb in self._ranked if not climb.plane.done]

    def _ended(self, op: Op, seconds: float | None) -> float | None:
        estimate, unit = super()._ended(op, seconds), self._unit(op.kind)
        if seconds is not None and estimate and unit > 0:
            self._ran[op.kind].append((seconds, estimate / unit))
            self._unread.add(op.kind)
        return estimate

    def failed(self, op: Op, reason: str) -> None:
        super().failed(op, reason)
        for request in op.requests:
            self._climbs[request].changed()

    def next_compute(self, now: float) -> Op | None:
        order = self._order(now)
        self._rebalance(order, now)
        free, rooms = self.free_at("compute", now), [float("inf")]
        for i, climb in enumerate(order):
            op = climb.next_compute(now, rooms[-1])
            if op is not None:
                return self._with_others(op, order[i + 1 :], now)
            # What others do meanwhile may make it late by no more than all of those would be, were nothing done.
            behind = 0 if climb.overtaken >= OVERTAKEN else len(order) - 1 - i
            room = min(rooms[-1], (climb.waits_until(now) - free) * (1 + behind))
            if room <= 0:
                break
            rooms.append(room)
        # The first was asked for whatever it has; others may have what only takes too long.
        if self._queued["compute"] or any(climb.next_compute(now, float("inf")) for climb in order[1:]):
            return None
        compute = link = 0.0  # that those before take
        for i, (climb, room) in enumerate(zip(order, rooms, strict=False), 1):
            if climb.rebalance(now, (compute, link)) and (op := climb.next_compute(now, room)):
                return op
            if i < min(len(order), len(rooms)):
                left = climb.left(now)
                compute, link = compute + left[0], link + left[1]
        return None

    def _with_others(self, op: Op, behind: list[Climb], now: float) -> Op:
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
        if len(order) == 1 and (early := order[0].fetch_early(now)):
            return early
        order = [climb for climb in order if not climb.nothing_to_load]
        planned = next(filter(None, (climb.next_fetch(now) for climb in order)), None)
        return planned or next(filter(None, (climb.relieve(now) for climb in order)), None)

    def _order(self, now: float) -> list[Climb]:
        """Who is served before whom; those that are new have a plan from here on."""
        self._wave += 1
        if self._ranked is None:
            self._ranked = _rank([self._climbs[plane.request.id] for plane in self.active()], now)
            if not all(climb.tops is not None for climb in self._ranked):
                self._plan(self._ranked, now)
        return self._ranked

    def _plan(self, order: list[Climb], now: float) -> None:
        """Splits for requests that nothing was begun for, which may have been planned before others came."""
        climbs = [climb for climb in order if not climb.begun]
        for climb in climbs:
            climb.promised = 0
        open_to_stairs = [climb for climb in climbs if not climb.windowed]
        left = [climb.left(now) for climb in order if climb.begun]
        compute, link = (sum(seconds) for seconds in zip(*left, strict=True)) if left else (0.0, 0.0)
        ahead = self.free_at("compute", now) - now + compute, self.free_at(LINK, now) - now + link
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
        return self._known_pace(FETCH) * self.costs.load_seconds(cells)

    @property
    def compute_pace(self) -> float:
        """How many times its estimate a compute op takes, as others did."""
        return self._known_pace(COMPUTE)

    def pace(self, now: float) -> float:
        """How many times its estimate a fetch takes: as others did, and as the one that runs has already."""
        known, (head, estimate) = self._known_pace(FETCH), self._queued[LINK][0] if self._queued[LINK] else (None, 0.0)
        if head is not self._head:
            self._head, self._since = head, now
        taken = now - self._since - self.costs.latency
        if not estimate or taken <= estimate or not (unit := self._unit(FETCH)):
            return known
        return max(known, self._pace(FETCH, (taken, estimate / unit)))

    def link_steady(self, now: float) -> bool:
        """Whether the link does what it is estimated to."""
        return abs(self.pace(now) - 1) < SLOWER - 1

    @property
    def link_late(self) -> bool:
        """Whether the last fetch, a large one, lost more than those before."""
        if not self._ran[FETCH] or not (unit := self._unit(FETCH)):
            return False
        seconds, units = self._ran[FETCH][-1]
        lost = self._lost(FETCH, seconds / unit, units)
        return units >= self._row / 4 and 1 + lost > SLOWER * self._known_pace(FETCH)

    def _pace(self, kind: Kind, *running: tuple[float, float]) -> float:
        """How many times its estimate an op of a kind takes, by what ran last and what runs: the median of the last
        ASKED large ones, so that neither an outlier counts, nor what every small op loses."""
        ran, unit = [*self._ran[kind], *running], self._unit(kind)
        least = self._row / 4 if kind == FETCH else max([units for _, units in ran]) / 2
        large = [one for one in ran if one[1] >= least][-ASKED:]
        lost = [self._lost(kind, seconds / unit, units) for seconds, units in large]
        if len(lost) < ASKED:
            lost += [self._known_pace(kind) - 1] * (ASKED - len(lost))
        return 1 + sorted(lost)[ASKED // 2]

    def _lost(self, kind: Kind, took: float, units: float) -> float:
        """The share by which an op took longer than estimated. What a fetch smaller than a row loses may be a cost of
        each, and is not taken to grow with size."""
        more = took - units
        return more / (max(units, self._row) if more > 0 and kind == FETCH else units)

    def _known_pace(self, kind: Kind) -> float:
        unit = self._unit(kind)
        if kind in self._unread and unit:
            self._unread.remove(kind)
            self._paces[kind] = self._pace(kind) * unit
        return self._paces.get(kind, unit) / unit if unit else 1.0

    def _unit(self, kind: Kind) -> float:
        """What estimates are counted in: of fetches what a cell takes, which costs that learn change meanwhile."""
        return self.costs.load_seconds(1) if kind == FETCH else 1.0

    def link_busy(self, now: float) -> float:
        """Estimated seconds until what is in flight on the link has landed."""
        if not self._queued[LINK]:
            return 0.0
        whole = self.pace(now) * sum([self.costs.seconds(op) for op, _ in self._queued[LINK]])
        return max(0.0, whole - (now - self._since))

    def _rebalance(self, order: list[Climb], now: float) -> None:
        """Where the link is slower than planned with, split anew what is left of the first."""
        if order:
            self._row = min(order[0].row, self.staging_cells or order[0].row)
            cell, planned = self.pace(now) * self.costs.load_seconds(1), SLOWER * order[0].cell_seconds
            if cell > planned and cell > planned * self.compute_pace and not order[0].nothing_to_load:
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

    def _hidden_columns(self, climb: Climb) -> int:
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


def _rank(climbs: list[Climb], now: float) -> list[Climb]:
    """Who is served before whom, see Pipelined.

    Of requests with deadlines, each for itself and one after another, the fewest are late if they come by deadline and,
    whenever one would be late, the longest of those so far is put off (Moore and Hodgson, 1968).
    """
    first = sorted((c for c in climbs if c.overtaken >= OVERTAKEN), key=lambda climb: climb.wave)
    in_time, end = list[Climb](), now + sum(climb.seconds_left for climb in first)
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
