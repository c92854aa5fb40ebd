"""Virtual time: the loop's back end that computes when ops would end instead of running them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

from cacheflow.costs.base import Costs
from cacheflow.loop import Completion, Failures, Loop
from cacheflow.op import COMPUTE, COPY, FETCH, Op
from cacheflow.plane import Plane
from cacheflow.policies.base import Policy
from cacheflow.request import Request
from cacheflow.timeline import Span, Timeline


class VirtualBackend:
    """Three streams, each one op at a time in order: compute, fetch (the link), copy.

    An op takes costs.seconds(op). A fetch begins no sooner than the latency after it was submitted; compute no sooner
    than the copies submitted before it for its requests have ended.
    fail: given a fetch op, the columns of it that do not arrive, as parts, and why.
    """

    def __init__(self, costs: Costs, fail: Callable[[Op], Failures] = lambda op: ()) -> None:
        self.costs = costs
        self.fail = fail
        self.timeline = Timeline()
        self._now = 0.0
        self._free = {COMPUTE: 0.0, FETCH: 0.0, COPY: 0.0}
        self._copied: dict[str, float] = {}
        self._events: list[tuple[float, int, Completion]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def can_take(self, kind: str) -> bool:
        return True

    def submit(self, op: Op, landed: Completion | None = None) -> None:
        start = max(self._free[op.kind], self._now + (self.costs.latency if op.kind == FETCH else 0.0))
        if op.kind == COMPUTE:
            start = max(start, *(self._copied.get(request, 0.0) for request in op.requests))
        end = self._free[op.kind] = start + self.costs.seconds(op)
        if op.kind == COPY:
            self._copied.update(dict.fromkeys(op.requests, end))
        completion = Completion(op, start, end, self.fail(op) if op.kind == FETCH else ())
        heapq.heappush(self._events, (end, next(self._order), completion))

    def wait(self) -> Iterable[Completion]:
        if not self._events:
            return []
        self._now, _, done = heapq.heappop(self._events)
        moved = 0 if done.op.kind == COMPUTE else done.op.tokens * len(done.op.layers) * self.costs.shape.cell_bytes
        self.timeline.add(Span(done.op, done.op.kind, done.start, done.end, moved))
        return [done]


class Simulation:
    """A policy's run over requests that are all there at time 0.

    ttft: seconds to the first token, by request id. timeline: what ran when.
    """

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[Request],
        *,
        costs: Costs | None = None,
        fail: Callable[[Op], Failures] = lambda op: (),
    ) -> None:
        self.ttft: dict[str, float] = {}
        backend = VirtualBackend(costs or policy.costs, fail)
        self.timeline = backend.timeline
        loop = Loop(policy, backend, on_done=lambda plane, now: self.ttft.update({plane.request.id: now}))
        for request in requests:
            policy.add(Plane(request))
        loop.run()
        self.failures = loop.failures
