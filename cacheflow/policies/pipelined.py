"""pipelined: layer by layer up a staircase, the suffix in the same launches. Ours."""

from __future__ import annotations

from typing import Any

from cacheflow.op import COMPUTE, FETCH, Op
from cacheflow.plane import Plane
from cacheflow.policies.base import LINK, Policy
from cacheflow.policies.batch import plan_batch
from cacheflow.policies.climb import Climb
from cacheflow.policies.pace import SLOWER, LinkPace, Pace

OVERTAKEN = 16  # requests that came later and end before one; after that it goes first


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
        self.compute_pace, self.link_pace = Pace(), LinkPace(self.costs, self._queued[LINK])
        self._climbs: dict[str, Climb] = {}
        self._ranked: list[Climb] | None = None  # those that are not done, in the order of service; None: to be found
        self.copies = 0  # in flight
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
            more = 1 if op.kind == FETCH else -1
            self.copies += more
            for request in op.requests:
                for layer in op.layers:
                    self._climbs[request].copying[layer] += more
        elif self._ranked is not None:
            self._ranked = [climb for climb in self._ranked if not climb.plane.done]

    def _ended(self, op: Op, seconds: float | None) -> float | None:
        estimate = super()._ended(op, seconds)
        if seconds is not None and estimate is not None:
            if op.kind == COMPUTE:
                self.compute_pace.ended(seconds, estimate)
            else:
                self.link_pace.ended(seconds, self.costs.seconds(op))
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
        loading = [climb for climb in order if not climb.nothing_to_load]
        # What lands just in time leaves gaps, in which others' launches would make the first late.
        if len(order) == len(loading) == 1 and (early := order[0].early.next_fetch(now)):
            return early
        planned = next(filter(None, (climb.next_fetch(now) for climb in loading)), None)
        return planned or next(filter(None, (climb.relieve(now) for climb in loading)), None)

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

    def _rebalance(self, order: list[Climb], now: float) -> None:
        """Where the link is slower than planned with, split anew what is left of the first."""
        if order:
            first, pace = order[0], self.link_pace
            pace.row = first.row
            if first.nothing_to_load:
                return
            cell, planned = pace.at(now) * self.costs.load_seconds(1), SLOWER * first.cell_seconds
            if cell > planned and cell > planned * self.compute_pace.known:
                first.rebalance(now)

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
