"""Virtual time: the loop's back end that computes when ops would end instead of running them."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from cacheflow.costs.base import Costs
from cacheflow.loop import Completion, Failures, Loop
from cacheflow.op import COMPUTE, COPY, FETCH, Op
from cacheflow.plane import Plane
from cacheflow.policies.base import Policy
from cacheflow.request import Request
from cacheflow.timeline import Span, Timeline

T = TypeVar("T")
Pending = list[tuple[float, int, T]]  # a heap: seconds, order among equals, what comes


class VirtualBackend:
    """Three streams, each one op at a time in order: compute, fetch (the link), copy.

    An op takes costs.seconds(op). A fetch begins no sooner than the latency after it was submitted; compute no sooner
    than the copies submitted before it for its requests, at its layers, have ended. When a fetch ends, compute is held
    up as costs.interference says.
    fail: given a fetch op, the columns of it that do not arrive, as parts, and why.
    record: told of every op when it has ended; None: the timeline is.
    """

    def __init__(
        self,
        costs: Costs,
        fail: Callable[[Op], Failures] = lambda op: (),
        record: Callable[[Completion], object] | None = None,
    ) -> None:
        self.costs = costs
        self.fail = fail
        self.timeline = Timeline()
        self._record = record or self._add_span
        self._now = 0.0
        self._free = {COMPUTE: 0.0, FETCH: 0.0, COPY: 0.0}
        self._held_up = 0.0  # until when idle compute is
        self._events: list[tuple[float, int, Completion]] = []
        self.next_end = math.inf  # of those queued; infinite if there is none
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def advance(self, now: float) -> None:
        """Let time pass in which nothing ends."""
        self._now = now

    def can_take(self, kind: str) -> bool:
        return True

    def submit(self, op: Op, landed: Completion | None = None) -> None:
        start = max(self._free[op.kind], self._now + (self.costs.latency if op.kind == FETCH else 0.0))
        if op.kind == COMPUTE:
            # Copies that have ended have ended by now.
            copies = [end for end, _, other in self._events if other.op.kind == COPY and _meet(op, other.op)]
            start = max(start, *copies) if copies else start
        end = self._free[op.kind] = start + self.costs.seconds(op)
        completion = Completion(op, start, end, self.fail(op) if op.kind == FETCH else ())
        heapq.heappush(self._events, (end, next(self._order), completion))
        self.next_end = self._events[0][0]

    def wait(self) -> Iterable[Completion]:
        if not self._events:
            return []
        self._now, _, done = heapq.heappop(self._events)
        if done.op.kind == FETCH:
            self._hold_up(self.costs.interference(done.op.tokens * len(done.op.layers)))
        self.next_end = self._events[0][0] if self._events else math.inf
        self._record(done)
        return [done]

    def _hold_up(self, seconds: float) -> None:
        """From now on, compute works at something else for so many seconds, before whatever it does or is to do."""
        if not seconds:
            return
        queued = [event for event in sorted(self._events) if event[2].op.kind == COMPUTE]
        if queued and queued[0][2].start < self._now:
            free = queued[0][0] + seconds
        else:
            free = self._held_up = max(self._held_up, self._now) + seconds
        for event in queued:
            end, order, done = event
            running = done.start < self._now
            late = seconds if running else max(0.0, free - done.start)
            free = end + late
            moved = done._replace(start=done.start if running else done.start + late, end=free)
            self._events[self._events.index(event)] = (free, order, moved)
        heapq.heapify(self._events)
        self._free[COMPUTE] = max(self._free[COMPUTE], free)

    def _add_span(self, done: Completion) -> None:
        moved = 0 if done.op.kind == COMPUTE else done.op.tokens * len(done.op.layers) * self.costs.shape.cell_bytes
        self.timeline.add(Span(done.op, done.op.kind, done.start, done.end, moved))


def _meet(op: Op, other: Op) -> bool:
    """Whether two ops have a request and a layer in common."""
    bands = op.layers.start < other.layers.stop and other.layers.start < op.layers.stop
    return bands and not set(op.requests).isdisjoint(other.requests)


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
        record: Callable[[Completion], object] | None = None,
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
    backends = [server.backend for server in servers]
    while True:
        ends = [backend.next_end for backend in backends]
        first, arrives = min(ends), pending[0][0] if pending else math.inf
        if first <= arrives:
            if first == math.inf:
                return
            servers[ends.index(first)].step()
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
