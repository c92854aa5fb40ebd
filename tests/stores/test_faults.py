"""The faults themselves: each does what it says, and they stack."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from cacheflow.stores import Layout, MemoryStore, PartSpec, Read, ReadResult, Store
from cacheflow.stores.base import CORRUPT, MISSING, SHORT, TIMEOUT
from tests.stores.faults import DeletesAfterLookup, Fails, FlipsBit, Hangs, Raises, Short, Slow

LAYOUT = Layout(layers=1, kv_heads=1, tokens=4, parts=(PartSpec("k", "float32", 4),))
KEYS = [f"{number:064x}" for number in range(3)]


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore(1000)
    for number, key in enumerate(KEYS):
        store.write(key, LAYOUT, bytes([number]) * LAYOUT.nbytes)
    return store


def read(store: Store, number: int) -> tuple[ReadResult, bytes]:
    memory = bytearray(LAYOUT.nbytes)
    return store.read([Read.whole(KEYS[number], LAYOUT, memory)])[0], bytes(memory)


def test_matched_reads_fail_and_others_do_not(store: MemoryStore) -> None:
    faulty = Fails(store, TIMEOUT, match=lambda read: read.key == KEYS[1], times=2)
    for expected in ([None, TIMEOUT, None], [None, TIMEOUT, None], [None, None, None]):
        assert [read(faulty, number)[0].reason for number in range(3)] == expected
    assert faulty.injected == 2


def test_failed_reads_leave_no_usable_bytes(store: MemoryStore) -> None:
    right = bytes([2]) * LAYOUT.nbytes
    assert read(Short(store), 2)[0] == ReadResult(False, SHORT, LAYOUT.nbytes // 2)
    assert read(FlipsBit(store), 2)[0] == ReadResult(False, CORRUPT, LAYOUT.nbytes)
    for faulty in (Short(store), FlipsBit(store), Fails(store, TIMEOUT)):
        assert read(faulty, 2)[1] != right
    memory = np.zeros(16, dtype=np.float32)
    with pytest.raises(OSError, match="injected"):
        Raises(store).read([Read.whole(KEYS[2], LAYOUT, memory)])
    assert np.isnan(memory).all()


def test_faults_stack(store: MemoryStore) -> None:
    both = Slow(Fails(Fails(store, SHORT, times=1), TIMEOUT, times=1), 0.0)
    assert [read(both, 0)[0].reason for _ in range(3)] == [TIMEOUT, SHORT, None]


def test_a_hanging_read_goes_on_when_let_go(store: MemoryStore) -> None:
    hangs, results = Hangs(store), []
    thread = threading.Thread(target=lambda: results.append(read(hangs, 1)))
    thread.start()
    hangs.entered.wait()
    assert results == []
    hangs.let_go()
    thread.join()
    assert results == [(ReadResult(True, None, LAYOUT.nbytes), bytes([1]) * LAYOUT.nbytes)]


def test_found_and_then_gone(store: MemoryStore) -> None:
    stale = DeletesAfterLookup(store, match=lambda key: key != KEYS[0])
    assert None not in stale.lookup(KEYS)
    assert [read(stale, number)[0].reason for number in range(3)] == [None, MISSING, MISSING]
    assert stale.injected == 2
