"""The loop: what it issues, how it takes completions and failures, and that requests leave once they have drained."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import pytest

from cacheflow import policies
from cacheflow.loop import AHEAD, Completion, Failures, Loop
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.plane import Plane
from cacheflow.policies.base import Policy
from cacheflow.request import Request
from tests.cacheflow.strategies import Affine

COSTS = Affine((None,) * 2, bandwidth=8.0)  # a chunk of 8 tokens: 9 s to compute, 16 s to load


class ByHand:
    """A back end whose ops end when the test says so, in the order of their kinds' queues."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[tuple[Op, Completion | None]]] = {k: deque() for k in (COMPUTE, FETCH, COPY)}
        self.submitted: list[Op] = []
        self.ending: list[Completion] = []
        self.buffers = 10
        self.waits = 0
        self.clock = 0.0

    def now(self) -> float:
        return self.clock

    def submit(self, op: Op, landed: Completion | None = None) -> None:
        assert (landed is not None) == (op.kind == COPY)
        self.submitted.append(op)
        self.queues[op.kind].append((op, landed))

    def can_take(self, kind: str) -> bool:
        return kind != FETCH or len(self.queues[FETCH]) < self.buffers

    def end(self, kind: str, failures: Failures = (), handle: object = None) -> Op:
        op, _ = self.queues[kind].popleft()
        self.ending.append(Completion(op, self.clock, self.clock + 1, failures, handle))
        return op

    def wait(self) -> Iterable[Completion]:
        self.waits += 1
        self.clock += 1
        ended, self.ending = self.ending, []
        return ended


def setup(name: str = "load", *requests: Request, **options: Any) -> tuple[Loop, ByHand, list[tuple[str, str]]]:
    backend, events = ByHand(), []
    loop = Loop(
        policies.find(name)(COSTS, **options),
        backend,
        on_done=lambda plane, now: events.append(("done", plane.request.id)),
        on_drained=lambda plane: events.append(("drained", plane.request.id)),
    )
    for request in requests or (Request.of("a", prefix=24, suffix=2, chunk=8, layers=2),):
        loop.policy.add(Plane(request))
    return loop, backend, events


def finish(loop: Loop, backend: ByHand, fail: bool = False) -> None:
    while not loop.idle:
        for kind in (COPY, FETCH, COMPUTE):
            if backend.queues[kind]:
                op = backend.queues[kind][0][0]
                backend.end(kind, tuple((part, "lost") for part in op.parts) if fail and kind == FETCH else ())
        loop.step()


def test_one_op_ahead() -> None:
    loop, backend, _ = setup("token")
    loop.step()
    assert Counter(op.kind for op in backend.submitted) == {COMPUTE: AHEAD, FETCH: AHEAD - 1}  # three chunks in all
    loop, backend, _ = setup("load")
    loop.step()
    assert Counter(op.kind for op in backend.submitted) == {FETCH: AHEAD}
    backend.end(FETCH)
    loop.step()
    loop.step()
    assert Counter(op.kind for op in backend.submitted) == {FETCH: AHEAD + 1, COPY: 1}


def test_takes_no_more_than_the_back_end_can() -> None:
    loop, backend, _ = setup()
    backend.buffers = 1
    loop.step()
    assert [op.kind for op in backend.submitted] == [FETCH]
    backend.buffers = 0
    backend.end(FETCH)
    loop.step()
    loop.step()
    assert [op.kind for op in backend.submitted] == [FETCH, COPY]


def test_copy_follows_what_arrived_with_the_fetch_that_brought_it() -> None:
    loop, backend, _ = setup("layerwise-load")
    loop.step()
    lost = Part("a", 8, 16)
    handle = object()
    fetched = backend.end(FETCH, failures=((lost, "checksum"),), handle=handle)
    loop.step()
    copied, landed = backend.queues[COPY][0]
    assert fetched.parts == (Part("a", 0, 24),)
    assert copied.parts == (Part("a", 0, 8), Part("a", 16, 24))
    assert landed is not None and landed.handle is handle and landed.op == fetched
    assert loop.failures == {("a", "checksum"): 1}
    assert loop.policy.planes["a"].available == [True, False, True, False]
    finish(loop, backend)


@pytest.mark.parametrize("name", sorted(policies.available()))
def test_stale_lookup_ends_in_recompute(name: str) -> None:
    """Field cases 7 and 8: nothing that failed counts as loaded or is asked for again, and the request ends."""
    loop, backend, events = setup(name)
    finish(loop, backend, fail=True)
    kinds = Counter(op.kind for op in backend.submitted)
    assert kinds[COPY] == 0
    failed = Counter(part.start for op in backend.submitted if op.kind == FETCH for part in op.parts)
    assert all(count <= AHEAD for count in failed.values())
    computed = Counter(
        (token, layer)
        for op in backend.submitted
        if op.kind == COMPUTE
        for part in op.parts
        for token in range(part.start, part.stop)
        for layer in op.layers
        if part.project
    )
    assert computed == Counter((token, layer) for token in range(26) for layer in range(2))
    assert events == [("done", "a"), ("drained", "a")]
    assert backend.waits <= 30


class TestCancel:
    """Field case 9."""

    def test_waits_for_what_is_in_flight(self) -> None:
        loop, backend, events = setup("token")
        loop.step()
        loop.policy.cancel("a")
        loop.step()
        assert events == [] and not loop.idle
        for kind in (COMPUTE, COMPUTE, FETCH, COPY):
            submitted = len(backend.submitted)
            backend.end(kind)
            loop.step()
            assert [op.kind for op in backend.submitted[submitted:]] == ([COPY] if kind == FETCH else [])
            assert events == ([("drained", "a")] if kind == COPY else [])
        assert loop.idle

    def test_a_load_that_fails_afterwards_drains_too(self) -> None:
        loop, backend, events = setup("load")
        loop.step()
        loop.policy.cancel("a")
        while backend.queues[FETCH]:
            op = backend.queues[FETCH][0][0]
            backend.end(FETCH, tuple((part, "lost") for part in op.parts))
            loop.step()
        assert loop.idle and events == [("drained", "a")]

    def test_with_nothing_in_flight_does_not_wait(self) -> None:
        loop, backend, events = setup("load")
        loop.policy.cancel("a")
        loop.step()
        assert loop.idle and backend.waits == 0 and events == [("drained", "a")]

    def test_others_go_on(self) -> None:
        requests = [Request.of(id, prefix=24, suffix=2, chunk=8, layers=2) for id in "ab"]
        loop, backend, events = setup("load", *requests)
        loop.step()
        loop.policy.cancel("a")
        finish(loop, backend)
        assert events == [("drained", "a"), ("done", "b"), ("drained", "b")]

    def test_id_is_free_again_once_drained(self) -> None:
        loop, backend, _ = setup("load")
        loop.policy.cancel("a")
        loop.step()
        loop.policy.add(Plane(Request.of("a", prefix=8, suffix=2, chunk=8, layers=2)))
        finish(loop, backend)
        assert loop.idle


class Lazy(Policy):
    name = "lazy"

    def next_compute(self, now: float) -> Op | None:
        return None

    def next_fetch(self, now: float) -> Op | None:
        return None


def test_a_policy_that_has_nothing_to_do_is_named() -> None:
    loop = Loop(Lazy(COSTS), ByHand())
    loop.policy.add(Plane(Request.of("a", prefix=8, suffix=2, chunk=8, layers=2)))
    with pytest.raises(RuntimeError, match="'lazy' has nothing in flight and nothing to do for a"):
        loop.run()
