"""Streams, and what their events are for: every order that they permit gives the same results, and without any one of
the events some order does not."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cacheflow.executor import Fetch
from cacheflow.op import COMPUTE, COPY, Op
from cacheflow.policies import available
from cacheflow.stores import WriteResult
from cacheflow.streams import CpuStream, Ended, Event, Job, Workers
from tests.cacheflow.toy import (
    CHUNK,
    ToyCosts,
    check,
    decoder,
    eventually,
    objects,
    objects_of,
    poison,
    prompt,
    restoring,
)

STORE = "store"
QUIET = 0.002  # seconds without news after which the adversary lets go of what it holds back


class Mark(threading.Event):
    """An event, and whose."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream = stream


@dataclass(frozen=True)
class Wait:
    mark: Mark


@dataclass(frozen=True)
class Work:
    run: Callable[[], None]
    ended: Ended


class Adversary:
    """Runs the work of all its streams on one thread, in an order of its own that their events permit.

    seed: at every step a stream is drawn of those that may go on, or nothing is done for a while. order: instead, the
    first of these names that may go on does; those behind the first only when nothing has happened for a while, so
    that whatever could be queued before them is. deaf: pairs (who waits, for whom) whose waits are forgotten.
    """

    def __init__(
        self, *, seed: int | None = None, order: tuple[str, ...] = (), deaf: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.random = random.Random(seed)
        self.order = order
        self.deaf = deaf
        self.queues: dict[str, deque[Mark | Wait | Work]] = {}
        self.waits: Counter[tuple[str, str]] = Counter()
        self.news = threading.Condition()
        self.closed = 0
        self.thread = threading.Thread(target=self._work, name="cacheflow-adversary", daemon=True)

    def stream(self, name: str) -> AdversarialStream:
        with self.news:
            self.queues[name] = deque()
        if not self.thread.is_alive():
            self.thread.start()
        return AdversarialStream(self, name)

    def put(self, name: str, item: Mark | Wait | Work) -> None:
        with self.news:
            self.queues[name].append(item)
            self.news.notify_all()

    def _ready(self) -> list[str]:
        """Streams whose next item is work that may start; marks are set, and waits passed, on the way."""
        moved = True
        while moved:
            moved = False
            for queue in self.queues.values():
                while queue and (isinstance(queue[0], Mark) or (isinstance(queue[0], Wait) and queue[0].mark.is_set())):
                    item = queue.popleft()
                    if isinstance(item, Mark):
                        item.set()
                    moved = True
        return [name for name, queue in self.queues.items() if queue and isinstance(queue[0], Work)]

    def _choose(self, ready: list[str]) -> str | None:
        """Who goes on, or None: wait for news."""
        if not ready:
            return None
        if self.order:
            return self.order[0] if self.order[0] in ready else None
        return self.random.choice([*ready, None])

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                with self.news:
                    ready = self._ready()
                    if not ready and self.closed == len(self.queues):
                        return
                    chosen = self._choose(ready)
                    if chosen is None:
                        if self.news.wait(QUIET if ready else None):
                            continue
                        ready = self._ready()
                        chosen = min(ready, key=self.order.index) if self.order else self.random.choice(ready)
                    work = self.queues[chosen].popleft()
                assert isinstance(work, Work)
                self._run(work)

    def _run(self, work: Work) -> None:
        error: BaseException | None = None
        start = time.perf_counter()
        try:
            work.run()
        except BaseException as caught:
            error = caught
        work.ended(start, time.perf_counter(), error)


class AdversarialStream:
    def __init__(self, adversary: Adversary, name: str) -> None:
        self.adversary = adversary
        self.name = name

    def run(self, work: Callable[[], None], ended: Ended) -> None:
        self.adversary.put(self.name, Work(work, ended))

    def record(self) -> Event:
        mark = Mark(self.name)
        self.adversary.put(self.name, mark)
        return mark

    def wait(self, event: Event) -> None:
        assert isinstance(event, Mark)
        pair = (self.name, event.stream)
        self.adversary.waits[pair] += 1
        if pair not in self.adversary.deaf:
            self.adversary.put(self.name, Wait(event))

    def close(self) -> None:
        with self.adversary.news:
            self.adversary.closed += 1
            self.adversary.news.notify_all()


ORDERS = {
    "copies last": (COMPUTE, STORE, COPY),
    "compute last": (COPY, STORE, COMPUTE),
    "saves first": (STORE, COMPUTE, COPY),
    "saves last": (COMPUTE, COPY, STORE),
}


def restore_under(make_engine: Any, adversary: Adversary, policy: str, family: str = "llama") -> None:
    """Save, restore a batch with a hole in it, and generate; everything must be exact."""
    model = decoder(family)
    engine = make_engine(model=model, streams=adversary.stream, costs=ToyCosts(model, loads=0.7))
    prompts = [prompt(60), prompt(41, seed=1), prompt(23, seed=2)]
    for tokens in prompts[:2]:
        engine.save(tokens[:-3])
    engine.store.delete([objects_of(engine, prompts[0])[2][2]])
    saved = objects(engine.store)
    poison(engine, float("nan"))  # what is read too early shows
    with restoring(engine, prompts, policy=policy) as batch:
        for restored in batch:
            check(engine, restored, saved)
            assert not restored.failures
    engine.generate([prompts[0]], 6, policy=policy)
    with restoring(engine, [prompts[0]], policy="load") as [restored]:
        check(engine, restored, objects(engine.store))


every_policy = pytest.mark.parametrize("policy", available())


@every_policy
@pytest.mark.parametrize("order", ORDERS)
def test_restoring_is_exact_in_extreme_orders(make_engine, order, policy):
    restore_under(make_engine, Adversary(order=ORDERS[order]), policy)


@every_policy
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_restoring_is_exact_in_random_orders(make_engine, family, policy):
    for seed in range(3):
        restore_under(make_engine, Adversary(seed=seed), policy, family)


@pytest.mark.parametrize("policy", [name for name in available() if name != "recompute"])
def test_without_the_event_between_copy_and_compute_results_are_wrong(make_engine, policy):
    adversary = Adversary(order=ORDERS["copies last"], deaf=((COMPUTE, COPY),))
    with pytest.raises(AssertionError):
        restore_under(make_engine, adversary, policy)
    assert adversary.waits[COMPUTE, COPY]


@pytest.mark.parametrize("too_soon", [False, True], ids=["as-it-is", "too-soon"])
def test_staging_is_used_again_only_behind_its_copy(make_engine, monkeypatch, too_soon):
    """Given back when the copy is queued instead of when it has ended, a fetch overwrites it before."""
    engine = make_engine(streams=Adversary(order=ORDERS["copies last"]).stream)
    tokens = prompt(60)
    engine.save(tokens)
    executor = engine._executor
    submit = executor._submit_copy

    def submit_and_give_back(op: Op, fetch: Fetch) -> None:
        submit(op, fetch)
        executor._buffers.append(fetch.buffer)

    with monkeypatch.context() as patch:
        if too_soon:
            patch.setattr(executor, "_submit_copy", submit_and_give_back)
        with restoring(engine, [tokens], policy="load") as [restored]:
            if too_soon:
                executor._buffers = list(executor._staging)
                with pytest.raises(AssertionError):
                    check(engine, restored, objects(engine.store))
            else:
                check(engine, restored, objects(engine.store))


@pytest.mark.parametrize("lagging", [COMPUTE, COPY])
@pytest.mark.parametrize("deaf", [False, True], ids=["waiting", "deaf"])
def test_what_is_saved_is_what_all_queued_before_has_written(make_engine, lagging, deaf):
    """Whenever the adversary can, it saves first. Without the event it stores what was in the pages before."""
    pair = (STORE, lagging)
    adversary = Adversary(order=ORDERS["saves first"], deaf=(pair,) if deaf else ())
    engine = make_engine(streams=adversary.stream)
    layout = engine._layout(CHUNK)
    final = torch.randn(layout.layers, 2, layout.kv_heads, CHUNK, 16, generator=torch.Generator().manual_seed(0))
    with restoring(engine, [prompt(CHUNK + 1)]) as [restored]:
        executor, pages = engine._executor, engine.pages
        slots = pages.slots(restored.session.pages, 0, CHUNK)

        def fill() -> None:
            engine.model.ops.pages_from_staging(final[:, 0], pages.k, slots)
            engine.model.ops.pages_from_staging(final[:, 1], pages.v, slots)

        {COMPUTE: executor.compute, COPY: executor.copy}[lagging].run(fill, lambda start, end, error: None)
        results: list[WriteResult] = []
        executor.save(restored.session, 0, layout, "ab" * 32, results.append)
        executor.flush()
        executor.drain()
    assert [result.reason for result in results] == [None]
    assert adversary.waits[pair]
    assert torch.equal(objects(engine.store)["ab" * 32], final) != deaf


# CPU streams


@pytest.fixture
def streams() -> Iterator[list[CpuStream]]:
    made = [CpuStream(f"cacheflow-test-{i}", threads=1) for i in range(3)]
    yield made
    for stream in made:
        stream.close()
        assert not stream._thread.is_alive()


def nothing(start: float, end: float, error: BaseException | None) -> None:
    pass


def test_work_of_one_stream_runs_in_order_on_its_own_thread(streams):
    seen: list[tuple[int, str]] = []
    ends: list[tuple[float, float, BaseException | None]] = []
    for number in range(100):
        streams[0].run(
            lambda number=number: seen.append((number, threading.current_thread().name)),
            lambda *end: ends.append(end),
        )
    streams[0].record().wait()
    assert seen == [(number, "cacheflow-test-0") for number in range(100)]
    assert all(start <= end and error is None for start, end, error in ends)
    assert [start for start, _, _ in ends] == sorted(start for start, _, _ in ends)


def test_a_stream_waits_for_an_event_and_another_does_not(streams):
    go, seen = threading.Event(), []
    streams[0].run(go.wait, nothing)
    streams[0].run(lambda: seen.append("behind"), nothing)
    event = streams[0].record()
    streams[1].run(lambda: seen.append("queued before the wait"), nothing)
    streams[1].wait(event)
    streams[1].run(lambda: seen.append("waited"), nothing)
    streams[2].run(lambda: seen.append("free"), nothing)
    streams[2].record().wait()
    assert "free" in seen and "behind" not in seen and "waited" not in seen
    go.set()
    streams[1].record().wait()
    assert seen.index("behind") < seen.index("waited")


def test_an_event_covers_what_was_queued_before_it_was_recorded_only(streams):
    go = threading.Event()
    event = streams[0].record()
    streams[0].run(go.wait, nothing)
    assert event.wait(10)
    go.set()


def test_an_error_goes_to_whoever_waits_for_the_work_and_the_stream_goes_on(streams):
    errors: list[BaseException | None] = []

    def fail() -> None:
        raise ZeroDivisionError

    for work in (fail, lambda: None, lambda: (_ for _ in ()).throw(KeyboardInterrupt)):
        streams[0].run(work, lambda start, end, error: errors.append(error))
    streams[0].record().wait()
    assert [type(error) for error in errors] == [ZeroDivisionError, type(None), KeyboardInterrupt]


def test_a_stream_has_the_number_of_threads_it_was_given():
    before = torch.get_num_threads()
    counts: list[int] = []
    made = [CpuStream("cacheflow-test", threads) for threads in (2, 1, 2)]
    for stream in made:
        stream.run(lambda: counts.append(torch.get_num_threads()), nothing)
        stream.close()
    torch.set_num_threads(before)
    assert counts == [2, 1, 2]


# Workers


def workers_named(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_a_worker_that_hangs_is_replaced_and_only_that_one_ends():
    workers = Workers(2, "cacheflow-test-workers")
    go, late = threading.Event(), []
    hanging = [Job(go.wait, lambda number=number: late.append(number)) for number in range(3)]
    for job in hanging:
        workers.run(job)
        time.sleep(0.01)
        assert workers.give_up(job)
        for _ in range(5):  # as many as wanted are there, again and again
            done = [Job(lambda: time.sleep(0.002)) for _ in range(2)]
            for other in done:
                workers.run(other)
            assert all(other.ended.wait(5) for other in done)
            assert not any(workers.give_up(other) for other in done)
    assert workers_named("cacheflow-test-workers") == 5
    assert not late
    go.set()
    assert eventually(lambda: workers_named("cacheflow-test-workers") == 2)
    assert sorted(late) == [0, 1, 2]
    workers.close()
    assert eventually(lambda: not workers_named("cacheflow-test-workers"))


def test_workers_that_hang_when_closed_end_when_they_return():
    workers = Workers(2, "cacheflow-test-workers")
    go = threading.Event()
    given_up, not_given_up = Job(go.wait), Job(go.wait)
    for job in (given_up, not_given_up):
        workers.run(job)
    workers.give_up(given_up)
    workers.close()
    assert eventually(lambda: workers_named("cacheflow-test-workers") == 2)
    go.set()
    assert eventually(lambda: not workers_named("cacheflow-test-workers"))
