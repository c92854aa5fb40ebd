"""The one event loop: asks the policy, issues ops, handles completions and failures.

It is the same for simulation, CPU and CUDA; what differs is the back end that it issues to. The legality that streams
must keep is small: compute may be queued behind a copy, never behind a fetch, so no launched work can meet wrong KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeAlias

from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.plane import Plane
from cacheflow.policies.base import LINK, Policy

AHEAD = 2  # ops in flight per resource: the one that runs and one behind it, so that no stream idles


Failures: TypeAlias = tuple[tuple[Part, str], ...]


class Completion(NamedTuple):
    """An op that ended. start, end: seconds on the back end's clock.

    failures: for a fetch, the parts without data and why; all other parts arrived.
    handle: the back end's own; it comes back with the copy of what arrived.
    """

    op: Op
    start: float
    end: float
    failures: Failures = ()
    handle: object = None


class Backend(Protocol):
    """Where ops run: virtual time, threads, CUDA streams."""

    def now(self) -> float:
        """Seconds on the back end's clock."""

    def submit(self, op: Op, landed: Completion | None = None) -> None:
        """Queue an op on its stream, without blocking. Compute runs behind every copy submitted so far for its
        requests at its layers. landed: for a copy, the completion of its fetch."""

    def can_take(self, kind: str) -> bool:
        """Whether another op of the kind has what it needs (a staging buffer, say)."""

    def wait(self) -> Iterable[Completion]:
        """Block until something ended, or the loop was woken, and say what."""


class Loop:
    """Drives requests to their first token.

    on_done: called with the plane when a request's last op ended. on_drained: called when a request, done or cancelled,
    has nothing in flight any more, so that its pages may be used again.
    failures: failed loads, counted by (request, reason).
    """

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        *,
        on_done: Callable[[Plane, float], None] = lambda plane, now: None,
        on_drained: Callable[[Plane], None] = lambda plane: None,
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.on_done = on_done
        self.on_drained = on_drained
        self.failures: Counter[tuple[str, str]] = Counter()
        self._in_flight = {COMPUTE: 0, FETCH: 0, COPY: 0}

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do or to wait for."""
        return not self.policy.planes

    def step(self) -> None:
        """Give every resource what it can take, wait for something to end, handle it."""
        self._retire()
        if not self.idle:
            self.issue()
            self.settle()

    def run(self) -> None:
        """Until every request is done."""
        while not self.idle:
            self.step()

    def issue(self) -> None:
        """Give every resource what it can take."""
        for resource, kind in (("compute", COMPUTE), (LINK, FETCH)):
            while self._in_flight[kind] < AHEAD and self.backend.can_take(kind):
                op = self.policy.next(resource, self.backend.now())
                if op is None:
                    break
                self._submit(op)
        if not any(self._in_flight.values()) and any(not p.cancelled for p in self.policy.planes.values()):
            stuck = ", ".join(self.policy.planes)
            raise RuntimeError(f"policy {self.policy.name!r} has nothing in flight and nothing to do for {stuck}")

    def settle(self) -> None:
        """Wait for something to end and handle it."""
        for completion in self.backend.wait():
            self._handle(completion)
        self._retire()

    def _submit(self, op: Op, landed: Completion | None = None) -> None:
        self._in_flight[op.kind] += 1
        self.backend.submit(op, landed)

    def _handle(self, done: Completion) -> None:
        op, seconds = done.op, done.end - done.start
        self._in_flight[op.kind] -= 1
        for part, reason in done.failures:
            self.failures[part.request, reason] += 1
            self.policy.failed(Op(op.kind, op.layers, (part,)), reason)
        arrived = op
        if done.failures:
            arrived = Op(op.kind, op.layers, _without(op.parts, [part for part, _ in done.failures]))
        if arrived.parts:
            self.policy.finished(arrived, seconds, done.end)
            if op.kind == FETCH:
                self._submit(arrived.of(COPY), done)
        if op.kind == COMPUTE:
            for plane in [self.policy.planes[request] for request in op.requests]:
                if plane.done:
                    self.on_done(plane, done.end)

    def _retire(self) -> None:
        for plane in [p for p in self.policy.planes.values() if p.in_flight == 0 and (p.done or p.cancelled)]:
            self.policy.remove(plane.request.id)
            self.on_drained(plane)


def _without(parts: Iterable[Part], holes: list[Part]) -> tuple[Part, ...]:
    """What is left of parts when the token ranges in holes are cut out."""
    left: list[Part] = []
    for part in parts:
        start = part.start
        for hole in sorted((h for h in holes if h.request == part.request), key=lambda h: h.start):
            if part.start <= hole.start and hole.stop <= part.stop:
                if start < hole.start:
                    left.append(Part(part.request, start, hole.start))
                start = hole.stop
        if start < part.stop:
            left.append(Part(part.request, start, part.stop, part.project, part.advance))
    return tuple(left)
