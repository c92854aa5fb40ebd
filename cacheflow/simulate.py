"""Virtual time: the loop's back end that computes when ops would end instead of running them."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from cacheflow.costs.base import Costs
from cacheflow.loop import Completion, Failures, Loop
from cacheflow.op import COMPUTE, COPY, FETCH, Op
from cacheflow.plane import Plane
from cacheflow.policies.base import Policy
from cacheflow.request import Request
from cacheflow.timeline import Span, Timeline

T = TypeVar("T")
Pending = list[tuple[float, int, T]]  # a heap: seconds, order among equals, what comes


class Recorder(Protocol):
    """What is told of everything that ran."""

    def add(self, span: Span) -> None: ...


class VirtualBackend:
    """Three streams, each one op at a time in order: compute, fetch (the link), copy.

    An op takes costs.seconds(op). A fetch begins no sooner than the latency after it was submitted; compute no sooner
    than the copies submitted before it for its requests, at its layers, have ended.
    fail: given a fetch op, the columns of it that do not arrive, as parts, and why.
    record: what is told of every op when it ends; None: a timeline.
    """

    def __init__(
        self, costs: Costs, fail: Callable[[Op], Failures] = lambda op: (), record: Recorder | None = None
    ) -> None:
        self.costs = costs
        self.fail = fail
        self.timeline = Timeline()
        self._record = record or self.timeline
        self._now = 0.0
        self._free = {COMPUTE: 0.0, FETCH: 0.0, COPY: 0.0}
        self._copied: dict[tuple[str, int], float] = {}  # by request and layer: when the latest copy ends
        self._events: list[tuple[float, int, Completion]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    @property
    def next_end(self) -> float:
        """When the next op ends; infinite if none is queued."""
        return self._events[0][0] if self._events else math.inf

    def advance(self, now: float) -> None:
        """Let time pass in which nothing ends."""
        self._now = now

    def can_take(self, kind: str) -> bool:
        return True

    def submit(self, op: Op, landed: Completion | None = None) -> None:
        start = max(self._free[op.kind], self._now + (self.costs.latency if op.kind == FETCH else 0.0))
        if op.kind == COMPUTE:
            copies = (self._copied.get((request, layer), 0.0) for request in op.requests for layer in op.layers)
            start = max(start, *copies)
        end = self._free[op.kind] = start + self.costs.seconds(op)
        if op.kind == COPY:
            self._copied.update(dict.fromkeys(itertools.product(op.requests, op.layers), end))
        completion = Completion(op, start, end, self.fail(op) if op.kind == FETCH else ())
        heapq.heappush(self._events, (end, next(self._order), completion))

    def wait(self) -> Iterable[Completion]:
        if not self._events:
            return []
        self._now, _, done = heapq.heappop(self._events)
        moved = 0 if done.op.kind == COMPUTE else done.op.tokens * len(done.op.layers) * self.costs.shape.cell_bytes
        self._record.add(Span(done.op, done.op.kind, done.start, done.end, moved))
        return [done]


class Server:
    """A policy and a loop in virtual time, to be driven by what arrives and by what ends next.

    fail, record: see VirtualBackend. on_done, on_drained: see Loop.
    """

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        *,
        fail: Callable[[Op], Failures] = lambda op: (),
        record: Recorder | None = None,
        on_done: Callable[[Plane, float], None] = lambda plane, now: None,
        on_drained: Callable[[Plane], None] = lambda plane: None,
    ) -> None:
        self.policy = policy
        self.backend = VirtualBackend(costs, fail, record)
        self.loop = Loop(policy, self.backend, on_done=on_done, on_drained=on_drained)
        self.arrived = False  # something has since the last issue

    def add(self, plane: Plane) -> None:
        """Take on a request, now."""
        self.policy.add(plane)
        self.arrived = True

    def issue(self, now: float) -> None:
        """Give the resources what has arrived."""
        if self.arrived:
            self.backend.advance(now)
            self.loop.issue()
            self.arrived = False

    def step(self) -> None:
        """Let the next op end, and give the resources what they can take then."""
        self.loop.settle()
        self.loop.issue()
        self.arrived = False


def drive(servers: Sequence[Server], pending: Pending[T], arrive: Callable[[T, float], None]) -> None:
    """Until nothing is pending any more and every server is idle.

    arrive: called with what arrives and when; it adds planes to servers. What ends at a time comes before what arrives
    then, and all that arrives at a time before any of it is started. pending may grow meanwhile.
    """
    while True:
        server = min(servers, key=lambda server: server.backend.next_end)
        ends, arrives = server.backend.next_end, pending[0][0] if pending else math.inf
        if ends <= arrives:
            if ends == math.inf:
                return
            server.step()
            continue
        while pending and pending[0][0] == arrives:
            arrive(heapq.heappop(pending)[2], arrives)
        for each in servers:
            each.issue(arrives)


class Simulation:
    """A policy's run over requests.

    arrivals: seconds at which requests arrive, by id; those without are there at time 0. In the order of `requests`
        where they arrive at once.
    ttft: seconds from arrival to the first token, by request id. timeline: what ran when.
    """

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[Request],
        *,
        costs: Costs | None = None,
        fail: Callable[[Op], Failures] = lambda op: (),
        arrivals: Mapping[str, float] | None = None,
    ) -> None:
        self.ttft: dict[str, float] = {}
        at = {request.id: (arrivals or {}).get(request.id, 0.0) for request in requests}

        def done(plane: Plane, now: float) -> None:
            self.ttft[plane.request.id] = now - at[plane.request.id]

        server = Server(policy, costs or policy.costs, fail=fail, on_done=done)
        pending = [(at[request.id], i, request) for i, request in enumerate(requests)]
        heapq.heapify(pending)
        drive([server], pending, lambda request, now: server.add(Plane(request)))
        self.timeline = server.backend.timeline
        self.failures = server.loop.failures
