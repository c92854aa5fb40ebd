"""What every policy shares: its planes, the ops in flight, and estimates of when a resource is free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import ClassVar

from cacheflow.costs.base import Costs
from cacheflow.op import COMPUTE, COPY, FETCH, Op
from cacheflow.plane import EMPTY, Plane

LINK = "link"
KINDS = {"compute": COMPUTE, LINK: FETCH}
REMEMBERED = 64  # fetches, of those that ended while a compute op ran
RESOURCES = {kind: resource for resource, kind in KINDS.items()}


class Policy(ABC):
    """Decides, op by op, how requests come back. Pure Python: never blocks, never touches a tensor.

    The same object runs in virtual time, on real streams, and inside a host that owns model, pages and loop. The
    protocol: `add` a plane; ask `next(resource, now)` for an op for "compute" or "link" whenever that resource can take
    one (None: nothing now, ask again after the next completion); report every op with `finished` or `failed`; of a
    fetch that fails in part, the failures first. A finished fetch means that its copy is queued at once; the copy is
    reported too.

    costs: seconds of ops, as estimates; they may change, in place, between two calls.
    token_budget: most tokens in one compute op.
    hidden_tokens: most tokens whose hidden states may be kept between ops, over all requests; None: no limit.
    staging_cells: most (token, layer) pairs in one fetch op, which is what one staging buffer holds; None: no limit.
    """

    name: ClassVar[str] = ""
    rank: ClassVar[int] = 100  # order in tables; published methods before ours, baselines first

    def __init__(
        self,
        costs: Costs,
        *,
        token_budget: int = 8192,
        hidden_tokens: int | None = None,
        staging_cells: int | None = None,
    ) -> None:
        if token_budget < 1:
            raise ValueError(f"token budget {token_budget} must be at least 1 token")
        self.costs = costs
        self.token_budget = token_budget
        self.hidden_tokens = hidden_tokens
        self.staging_cells = staging_cells
        self.observe: Callable[[Op, float], object] = lambda op, seconds: None  # told of ops that ran whole
        self.planes: dict[str, Plane] = {}
        self._free = dict.fromkeys(KINDS, 0.0)
        self._queued: dict[str, list[tuple[Op, float]]] = {resource: [] for resource in KINDS}
        # When the last fetches ended, and by how many seconds they held up what computed then.
        self._fetched: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    # The protocol

    def add(self, plane: Plane) -> None:
        """Take on a request. Raises ValueError when its id is taken."""
        if plane.request.id in self.planes:
            raise ValueError(f"request {plane.request.id!r} is being restored already; give every request its own id")
        self.planes[plane.request.id] = plane

    def cancel(self, request: str) -> None:
        """Hand out nothing more for the request. What is in flight is still reported."""
        self.planes[request].cancelled = True

    def remove(self, request: str) -> None:
        """Forget a request that is done or cancelled and has nothing in flight."""
        del self.planes[request]

    def next(self, resource: str, now: float) -> Op | None:
        """The next op for "compute" or "link" at time `now` (seconds), accounted for as started; None: nothing now."""
        queued = self._queued[resource]
        self._free[resource] = max(now, self._free[resource]) if queued else now
        op = self.next_compute(now) if resource == "compute" else self.next_fetch(now)
        if op is None:
            return None
        for request in op.requests:
            self.planes[request].start(op.kind, op.layers, [p for p in op.parts if p.request == request])
        seconds = self.costs.seconds(op)
        self._free[resource] += seconds
        queued.append((op, seconds))
        return op

    def finished(self, op: Op, seconds: float, ended: float | None = None) -> None:
        """An op, or the part of a fetch that did not fail, ended after `seconds` on its resource.

        ended: when, on the clock of `next`; None: it is not known what ran beside it.
        """
        for part in op.parts:
            plane = self.planes[part.request]
            if op.kind == FETCH:
                plane.landed(op.layers, part)
            else:
                plane.finished(op.kind, op.layers, part)
        whole = op.kind == COPY or self._ended(op, seconds) is not None
        if whole:  # of a fetch that failed in part, the seconds are no measure
            held_up = 0.0 if ended is None else self._interference(op, ended - seconds, ended)
            if held_up <= seconds / 2:  # else it tells nothing of itself
                self.observe(op, seconds - held_up)

    def _interference(self, op: Op, start: float, ended: float) -> float:
        """Seconds by which the fetches that ended meanwhile held up a compute op."""
        if op.kind == FETCH and (seconds := self.costs.interference(op.tokens * len(op.layers))):
            self._fetched.append((ended, seconds))
        return sum([seconds for when, seconds in self._fetched if start < when < ended]) if op.kind == COMPUTE else 0.0

    def failed(self, op: Op, reason: str) -> None:
        """A fetch, or the part of it that is given, ended without data: recompute what it was for."""
        for part in op.parts:
            self.planes[part.request].failed(op.layers, part)
        self._ended(op, None)

    def _ended(self, op: Op, seconds: float | None) -> float | None:
        """Take an op, or the one that it is a part of, off its resource's queue, and give its estimate; None if a part
        that failed has taken it off before. seconds: what it took; None: it failed."""
        resource = RESOURCES[op.kind]
        for i, (queued, estimate) in enumerate(self._queued[resource]):
            if queued is op or _covers(queued, op):
                del self._queued[resource][i]
                self._free[resource] += 0.0 if seconds is None else seconds - estimate
                return estimate
        return None

    # What a policy decides

    @abstractmethod
    def next_compute(self, now: float) -> Op | None:
        """The compute op to queue now, not yet started."""

    @abstractmethod
    def next_fetch(self, now: float) -> Op | None:
        """The fetch op to queue now, not yet started."""

    # Shared means

    def active(self) -> list[Plane]:
        """Requests that still have something to do, in the order of their arrival."""
        return [p for p in self.planes.values() if not (p.done or p.cancelled)]

    def free_at(self, resource: str, now: float) -> float:
        """Estimated time at which everything queued on a resource has ended."""
        return max(now, self._free[resource]) if self._queued[resource] else now

    @property
    def idle(self) -> bool:
        """Whether no op that a policy hands out is in flight."""
        return not any(self._queued.values())

    def hidden_left(self) -> float:
        """Tokens whose hidden states may still be kept, over and above those that are."""
        if self.hidden_tokens is None:
            return float("inf")
        return self.hidden_tokens - sum(p.held_tokens for p in self.planes.values())

    def fetch_column(self, plane: Plane, column: int) -> Op | None:
        """All loadable layers of a column, or the highest of them that fit a staging buffer."""
        if not (plane.available[column] and plane.unclaimed[column]):
            return None
        band = plane.loadable_band(column)
        if self.staging_cells is not None:
            band = band[-max(1, self.staging_cells // plane.request.width(column)) :]
        return Op(FETCH, band, (plane.part(column, column + 1),)) if band else None

    def fetch_row(self, plane: Plane, layer: int, columns: Iterable[int]) -> Op | None:
        """The loadable ones of `columns` at a layer, or the first of them that fit a staging buffer."""
        return self.fetch_band(plane, range(layer, layer + 1), columns)

    def fetch_band(self, plane: Plane, band: range, columns: Iterable[int]) -> Op | None:
        """Those of `columns` that are loadable at every layer of a band, or the first of them that fit a staging
        buffer, as one must."""
        if plane.state[band.start].find(EMPTY, 0, plane.prefix_columns) < 0:
            return None
        chosen = plane.loadable_columns(columns, band.start)
        for layer in band[1:]:
            chosen = plane.loadable_columns(chosen, layer)
        if self.staging_cells is not None:
            tokens = accumulate(map(plane.request.width, chosen))
            chosen = chosen[: max(1, sum(so_far * len(band) <= self.staging_cells for so_far in tokens))]
        return Op(FETCH, band, plane.parts(chosen)) if chosen else None

    def repair(self, plane: Plane) -> Op | None:
        """Compute what only compute can bring: holes and failed loads left to right, and, all else done, the suffix."""
        for column in plane.compute_only:
            if column >= plane.prefix_columns:
                return plane.climb(column, self.token_budget) if plane.restored else None
            op = plane.climb(column, self.token_budget, last=plane.prefix_columns)
            if op is not None:
                return op
        return None


def share_to_move(spare: float, both: float) -> float:
    """The share of a piece of work that one side takes over from the other, so that both end together, if that takes
    `both` seconds on the two of them, and the other would end `spare` seconds later: all of what takes no time."""
    return spare / both if both else 1.0


def _covers(op: Op, piece: Op) -> bool:
    return op.layers == piece.layers and all(
        any(p.request == q.request and p.start <= q.start and q.stop <= p.stop for p in op.parts) for q in piece.parts
    )
