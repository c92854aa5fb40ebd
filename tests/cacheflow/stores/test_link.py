from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.stores import Layout, Link, MemoryStore, PartSpec, Read, ReadResult
from cacheflow.stores.base import MISSING, SHORT
from tests.cacheflow.stores.support import key, payload
from tests.stores.faults import Faulty, Hangs, Raises, Short

# 1000 bytes a chunk, at 8e-6 gigabits, that is 1000 bytes, per second: one second a chunk.
CHUNK = Layout(layers=1, kv_heads=1, tokens=1000, parts=(PartSpec("k", "int8", 1),))
GBPS = 8e-6


class FakeClock:
    """Time passes only when somebody sleeps. `at` calls back once at a moment."""

    def __init__(self) -> None:
        self.now = 100.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, moment: float, call: Callable[[], None]) -> None:
        self._calls.append((100.0 + moment, call))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [call for moment, call in self._calls if moment <= self.now + 1e-9]
        self._calls = [(moment, call) for moment, call in self._calls if moment > self.now + 1e-9]
        for call in due:
            call()

    @property
    def passed(self) -> float:
        return self.now - 100.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def filled(chunks: int = 8) -> MemoryStore:
    store = MemoryStore(10**6)
    for number in range(chunks):
        store.write(key(number), CHUNK, payload(CHUNK, number))
    return store


def reads(*numbers: int) -> list[Read]:
    return [Read.whole(key(number), CHUNK, np.zeros(1000, dtype=np.uint8)) for number in numbers]


def linked(clock: FakeClock, store: MemoryStore | Faulty | None = None, latency: float = 0.0) -> Link:
    return Link(store or filled(), GBPS, latency, clock=clock, sleep=clock.sleep)


@given(chunks=st.integers(1, 8), latency=st.floats(0, 5), calls=st.integers(1, 4))
def test_bytes_over_bandwidth_and_one_latency_a_call(chunks: int, latency: float, calls: int) -> None:
    clock = FakeClock()
    link = linked(clock, latency=latency)
    for _ in range(calls):
        assert all(result.ok for result in link.read(reads(*range(chunks))))
    assert clock.passed == pytest.approx(calls * (latency + chunks))


def test_a_part_of_a_chunk_costs_its_bytes(clock: FakeClock) -> None:
    layout = Layout(layers=4, kv_heads=1, tokens=250, parts=(PartSpec("k", "int8", 1),))
    store = MemoryStore(10**6)
    store.write(key(1), layout, payload(layout, 1))
    read = Read(
        key=key(1), layout=layout, layers=range(1, 2), parts=("k",), kv_heads=range(1), destination=bytearray(250)
    )
    assert linked(clock, store).read([read])[0] == ReadResult(True, None, 250)
    assert clock.passed == pytest.approx(0.25)


def test_the_read_happens_inside_its_window(clock: FakeClock) -> None:
    moments = []

    class Watched(Faulty):
        def fault(self, read: Read) -> ReadResult:
            moments.append(clock.passed)
            return self.store.read([read])[0]

    link = linked(clock, Watched(filled()), latency=0.5)
    link.read(reads(0, 1))
    link.read(reads(2))
    assert moments == pytest.approx([0.5, 0.5, 3.0])


def test_errors_of_sleeping_do_not_add_up(clock: FakeClock) -> None:
    def sleep_long(seconds: float) -> None:
        clock.sleep(seconds + 0.01)

    link = Link(filled(), GBPS, clock=clock, sleep=sleep_long)
    for _ in range(10):
        link.read(reads(*range(8)))
    # Each call starts when the last one's sleeper woke up; within a call every wake-up is late and the sum is not.
    assert 80 <= clock.passed <= 80 + 10 * 0.02 + 1e-6


def test_a_store_slower_than_the_link_keeps_its_speed(clock: FakeClock) -> None:
    class Slow(Faulty):
        def fault(self, read: Read) -> ReadResult:
            clock.sleep(3)
            return self.store.read([read])[0]

    linked(clock, Slow(filled())).read(reads(0, 1, 2))
    assert clock.passed == pytest.approx(9), "no burst catches up on what the store did not deliver"


def test_failed_reads_pay_for_what_moved(clock: FakeClock) -> None:
    link = linked(clock, Short(filled(), times=2))
    results = link.read([*reads(0, 99), *reads(1, 2)])
    assert [(result.reason, result.nbytes) for result in results] == [
        (SHORT, 500),
        (SHORT, 500),
        (None, 1000),
        (None, 1000),
    ]
    assert clock.passed == pytest.approx(3)
    assert linked(clock).read(reads(99))[0].reason == MISSING
    assert clock.passed == pytest.approx(3)


def test_a_read_that_raises_frees_the_link(clock: FakeClock) -> None:
    link = linked(clock, Raises(filled(), times=1))
    with pytest.raises(OSError, match="injected"):
        link.read(reads(0))
    assert link.read(reads(0))[0].ok
    assert clock.passed == pytest.approx(1)


def test_lookups_wait_for_the_latency_and_writes_for_nothing(clock: FakeClock) -> None:
    link = linked(clock, latency=0.25)
    assert link.lookup([key(0), key(1)])[0] is not None
    assert clock.passed == pytest.approx(0.25)
    link.write(key(50), CHUNK, payload(CHUNK, 50))
    link.release([key(0), key(1)])
    assert link.delete([key(0)]) == 1
    assert link.verify(key(1)).ok and len(list(link.entries())) == 8
    assert clock.passed == pytest.approx(0.25)
    assert link.statistics().writes == 9


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([(0.0, 2 * GBPS)], 2.0),
        ([(1.0, 2 * GBPS)], 2.5),
        ([(1.5, GBPS / 2)], 6.5),
        ([(0.5, 2 * GBPS), (1.0, GBPS / 2)], 0.5 + 0.5 + 2 * 2.5),
        ([(2.5, math.inf)], 2.5),
    ],
)
def test_a_change_of_bandwidth_affects_what_is_still_to_come(
    clock: FakeClock, changes: list[tuple[float, float]], expected: float
) -> None:
    link = linked(clock)
    for moment, gbps in changes:
        clock.at(moment, lambda gbps=gbps: link.set_bandwidth(gbps))
    if changes[0][0] == 0:
        clock.sleep(0)
    link.read(reads(0, 1, 2, 3))
    assert clock.passed == pytest.approx(expected, abs=0.05)
    assert link.bandwidth == changes[-1][1] * 1e9 / 8


def test_units_are_decimal_bits() -> None:
    assert Link(filled(), gbps=10).bandwidth == 1.25e9
    assert Link(filled(), gbps=10, latency=2e-3).latency == 2e-3


@pytest.mark.parametrize("gbps", [0, -1, math.nan])
def test_impossible_bandwidths_are_refused(gbps: float) -> None:
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        Link(filled(), gbps)
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        Link(filled(), 1).set_bandwidth(gbps)


@pytest.mark.parametrize("latency", [-1, math.inf, math.nan])
def test_impossible_latencies_are_refused(latency: float) -> None:
    with pytest.raises(ValueError, match="latency must be"):
        Link(filled(), 1, latency)


def in_threads(link: Link, batches: Sequence[Sequence[int]]) -> tuple[float, list[list[ReadResult]]]:
    barrier = threading.Barrier(len(batches) + 1)

    def work(batch: Sequence[int]) -> list[ReadResult]:
        wanted = reads(*batch)
        barrier.wait()
        return link.read(wanted)

    with ThreadPoolExecutor(len(batches)) as pool:
        futures = [pool.submit(work, batch) for batch in batches]
        barrier.wait()
        start = time.monotonic()
        results = [future.result() for future in futures]
        return time.monotonic() - start, results


def test_threads_share_the_link_in_real_time() -> None:
    """Six reads of three threads take six windows, and their latencies pass together."""
    link = Link(filled(), gbps=1000 * 8 / 0.05 / 1e9, latency=0.1)
    seconds, results = in_threads(link, [(0, 1), (2, 3), (4, 5)])
    assert all(result.ok for batch in results for result in batch)
    assert 0.1 + 6 * 0.05 - 0.005 <= seconds < 5


def test_a_hanging_read_holds_up_nobody_else() -> None:
    hangs = Hangs(filled(), match=lambda read: read.key == key(0))
    link = Link(hangs, gbps=1000 * 8 / 0.01 / 1e9)
    stuck = threading.Thread(target=link.read, args=(reads(0),))
    stuck.start()
    hangs.entered.wait()
    seconds, results = in_threads(link, [(1,), (2,)])
    assert all(result.ok for batch in results for result in batch)
    assert seconds < 5 and stuck.is_alive()
    hangs.let_go()
    stuck.join()


def test_a_change_reaches_a_sleeper() -> None:
    link = Link(filled(), gbps=1000 * 8 / 1000 / 1e9)  # a thousand seconds a chunk
    timer = threading.Timer(0.05, link.set_bandwidth, (1.0,))
    timer.start()
    start = time.monotonic()
    assert all(result.ok for result in link.read(reads(0, 1)))
    assert time.monotonic() - start < 5
    timer.join()


def test_lists_of_two_callers_do_not_interleave(clock: FakeClock) -> None:
    """The first caller's last chunk moves before the second caller's first one."""
    link = linked(clock)
    ended: dict[str, float] = {}

    def second() -> None:
        link.read(reads(4, 5))
        ended["second"] = clock.passed

    clock.at(0.5, second)  # while the first list's first chunk is on its way
    link.read(reads(0, 1, 2, 3))
    assert ended["second"] == pytest.approx(6.0, abs=0.05)  # behind all four, not behind the one that was moving
