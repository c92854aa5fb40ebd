"""What every store promises, whatever it is made of."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow.stores import Layout, PartSpec, Read, ReadResult, aligned_buffer
from cacheflow.stores.base import EXISTS, FULL, MISMATCH, MISSING, TOO_LARGE
from tests.cacheflow.stores.conftest import MakeStore, build
from tests.cacheflow.stores.support import (
    PAGED,
    TOY,
    holds,
    key,
    layouts,
    payload,
    read_whole,
    select,
    selections,
)


@pytest.mark.parametrize("layout", [TOY, PAGED], ids=["small", "whole pages"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_what_is_written_is_read(make_store: MakeStore, layout: Layout, aligned: bool) -> None:
    store = make_store()
    cells = [payload(layout, seed) for seed in range(3)]
    for number, cell in enumerate(cells):
        assert store.write(key(number), layout, cell).reason is None
    for number, cell in enumerate(cells):
        result, data = read_whole(store, key(number), layout, aligned)
        assert result == ReadResult(True, None, layout.nbytes)
        assert data == cell.tobytes()


@pytest.mark.parametrize("kind", ["memory", "disk"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), layout=layouts())
def test_any_share_of_any_layout_is_exact(kind: str, data: Any, layout: Layout) -> None:
    """Any band of layers, any parts, any heads: what a stage or a rank of whatever degree reads equals a slice."""
    with tempfile.TemporaryDirectory() as folder:
        store = build(kind, Path(folder))
        cells = payload(layout, 1)
        store.write(key(1), layout, cells)
        reads, expected = [], []
        for _ in range(data.draw(st.integers(1, 4))):
            layers, parts, heads = data.draw(selections(layout))
            expected.append(select(layout, cells, layers, parts, heads))
            reads.append(
                Read(
                    key=key(1),
                    layout=layout,
                    layers=layers,
                    parts=parts,
                    kv_heads=heads,
                    destination=np.full(len(expected[-1]), 0xA5, dtype=np.uint8),
                )
            )
        assert [result.ok for result in store.read(reads)] == [True] * len(reads)
        assert [bytes(read.destination) for read in reads] == expected
        store.close()


def test_lookup_answers_each_key(make_store: MakeStore) -> None:
    store = make_store()
    for number in (0, 2):
        store.write(key(number), TOY, payload(TOY, number))
    found = store.lookup([key(number) for number in range(4)])
    assert [info is not None for info in found] == [True, False, True, False]
    assert found[0] is not None and (found[0].layout, found[0].nbytes) == (TOY, TOY.nbytes)
    assert found[0].tier in ("memory", "disk")
    assert store.lookup([]) == []
    counts = store.statistics()
    assert (counts.found, counts.not_found) == (2, 2)


def test_a_key_that_is_there_is_left_alone(make_store: MakeStore) -> None:
    store = make_store()
    first = payload(TOY, 1)
    store.write(key(1), TOY, first)
    again = store.write(key(1), TOY, payload(TOY, 2))
    assert (again.ok, again.reason, again.nbytes) == (True, EXISTS, 0)
    assert read_whole(store, key(1), TOY)[1] == first.tobytes()
    counts = store.statistics()
    assert (counts.writes, counts.bytes_written, counts.write_refusals) == (1, TOY.nbytes, {EXISTS: 1})


def test_the_store_keeps_a_copy(make_store: MakeStore) -> None:
    store = make_store()
    cells = payload(TOY, 1)
    expected = cells.tobytes()
    store.write(key(1), TOY, cells)
    cells[:] = 0
    assert read_whole(store, key(1), TOY)[1] == expected


def test_missing_is_a_result(make_store: MakeStore) -> None:
    store = make_store()
    assert read_whole(store, key(9), TOY)[0] == ReadResult(False, MISSING, 0)
    assert store.verify(key(9)) == ReadResult(False, MISSING, 0)
    assert store.statistics().read_failures == {MISSING: 1}


def test_good_and_bad_reads_of_one_call_are_told_apart(make_store: MakeStore) -> None:
    store = make_store()
    for number in (0, 2):
        store.write(key(number), TOY, payload(TOY, number))
    memory = aligned_buffer(3 * TOY.nbytes).reshape(3, -1)
    results = store.read([Read.whole(key(number), TOY, memory[number]) for number in range(3)])
    assert [result.reason for result in results] == [None, MISSING, None]
    assert bytes(memory[2]) == payload(TOY, 2).tobytes()
    assert store.statistics().bytes_read == 2 * TOY.nbytes


def test_suffix_written_later_pushes_out_the_head_unless_it_was_used(make_store: MakeStore) -> None:
    """Eight chunks in two calls into room for six, the head touched once in between: holes, and the rest intact."""
    store = make_store(objects=6)
    for number in range(6):
        store.write(key(number), TOY, payload(TOY, number))
    assert holds(store, key(0))
    for number in (6, 7):
        store.write(key(number), TOY, payload(TOY, number))
    found = store.lookup([key(number) for number in range(8)])
    assert [info is not None for info in found] == [True, False, False, True, True, True, True, True]
    for number in (0, 3, 4, 5, 6, 7):
        assert read_whole(store, key(number), TOY)[1] == payload(TOY, number).tobytes()
    assert store.statistics().evicted == 2


def test_a_read_counts_as_use(make_store: MakeStore) -> None:
    store = make_store(objects=2)
    for number in range(2):
        store.write(key(number), TOY, payload(TOY, number))
    read_whole(store, key(0), TOY)
    store.write(key(2), TOY, payload(TOY, 2))
    assert [holds(store, key(number)) for number in range(3)] == [True, False, True]


def test_use_between_evictions_counts(make_store: MakeStore) -> None:
    """Whatever a store remembers of an earlier eviction: what has been used since is not the oldest any more."""
    store = make_store(objects=4)

    def there_after_writing(number: int) -> list[int]:
        store.write(key(number), TOY, payload(TOY, number))
        return sorted(int(entry.key, 16) for entry in store.entries())

    for number in range(4):
        there_after_writing(number)
    assert there_after_writing(4) == [1, 2, 3, 4]
    read_whole(store, key(1), TOY)
    assert there_after_writing(5) == [1, 3, 4, 5]
    store.lookup([key(3)])
    assert there_after_writing(6) == [1, 3, 5, 6]
    store.release([key(3)])
    assert there_after_writing(7) == [3, 5, 6, 7]
    assert there_after_writing(8) == [3, 6, 7, 8], "its release was a use"


def test_leased_objects_stay(make_store: MakeStore) -> None:
    store = make_store(objects=3)
    for number in range(3):
        store.write(key(number), TOY, payload(TOY, number))
    store.lookup([key(0), key(1)])
    store.lookup([key(0)])  # a second request wants it too
    store.write(key(3), TOY, payload(TOY, 3))
    store.write(key(4), TOY, payload(TOY, 4))
    assert [entry.key for entry in sorted(store.entries(), key=lambda entry: entry.key)] == [key(0), key(1), key(4)]
    store.lookup([key(4)])
    refused = store.write(key(5), TOY, payload(TOY, 5))
    assert (refused.ok, refused.reason) == (False, FULL)
    assert len(list(store.entries())) == 3, "a refused write evicts nothing"
    store.release([key(0), key(1)])
    store.write(key(5), TOY, payload(TOY, 5))
    assert [holds(store, key(number)) for number in (0, 1, 4, 5)] == [True, False, True, True]
    store.release([key(0)])
    store.write(key(6), TOY, payload(TOY, 6))
    store.write(key(7), TOY, payload(TOY, 7))
    assert not holds(store, key(0))


def test_releasing_what_is_not_leased_does_no_harm(make_store: MakeStore) -> None:
    store = make_store(objects=1)
    store.write(key(0), TOY, payload(TOY, 0))
    store.release([key(0), key(0), key(1)])
    store.lookup([key(0)])
    assert store.write(key(1), TOY, payload(TOY, 1)).reason == FULL


def test_what_cannot_fit_is_refused(make_store: MakeStore) -> None:
    store = make_store(objects=2)
    store.write(key(0), TOY, payload(TOY, 0))
    large = replace(TOY, layers=300)
    refused = store.write(key(1), large, payload(large, 1))
    assert (refused.ok, refused.reason, refused.nbytes) == (False, TOO_LARGE, 0)
    assert holds(store, key(0)), "nothing was evicted for it"
    assert store.statistics().write_refusals == {TOO_LARGE: 1}


def test_delete(make_store: MakeStore) -> None:
    store = make_store()
    for number in range(3):
        store.write(key(number), TOY, payload(TOY, number))
    store.lookup([key(0)])
    assert store.delete([key(0), key(1), key(9)]) == 2
    assert read_whole(store, key(0), TOY)[0].reason == MISSING
    assert [holds(store, key(number)) for number in range(3)] == [False, False, True]
    assert store.write(key(0), TOY, payload(TOY, 5)).reason is None
    assert read_whole(store, key(0), TOY)[1] == payload(TOY, 5).tobytes()


K16 = (PartSpec("k", "float16", 16), PartSpec("v", "float16", 16))
STORED = Layout(layers=4, kv_heads=4, tokens=8, parts=K16)
OTHERS_OF_EQUAL_SIZE = {
    "half the heads, twice the layers": replace(STORED, kv_heads=2, layers=8),
    "half the heads, twice the tokens": replace(STORED, kv_heads=2, tokens=16),
    "another rank's heads": replace(STORED, first_kv_head=4),
    "another stage's layers": replace(STORED, first_layer=4),
    "int8, twice as wide": replace(STORED, parts=(PartSpec("k", "int8", 32), PartSpec("v", "int8", 32))),
    "bfloat16": replace(STORED, parts=(PartSpec("k", "bfloat16", 16), PartSpec("v", "bfloat16", 16))),
    "K and V swapped": replace(STORED, parts=K16[::-1]),
    "K and V packed": replace(STORED, parts=(PartSpec("kv", "float16", 32),)),
    "int8 and scales": replace(
        STORED,
        parts=(
            PartSpec("k", "int8", 28),
            PartSpec("v", "int8", 28),
            PartSpec("k_scale", "float32", 1),
            PartSpec("v_scale", "float32", 1),
        ),
    ),
}


@pytest.mark.parametrize("other", OTHERS_OF_EQUAL_SIZE.values(), ids=OTHERS_OF_EQUAL_SIZE)
@pytest.mark.parametrize("way", ["expected", "stored"])
def test_equal_size_is_not_compatible(make_store: MakeStore, other: Layout, way: str) -> None:
    stored, expected = (STORED, other) if way == "expected" else (other, STORED)
    assert stored.nbytes == expected.nbytes
    store = make_store()
    store.write(key(1), stored, payload(stored, 1))
    info = store.lookup([key(1)])[0]
    assert info is not None and info.layout == stored != expected
    assert read_whole(store, key(1), expected)[0] == ReadResult(False, MISMATCH, 0)
    assert store.statistics().read_failures == {MISMATCH: 1}
    assert not holds(store, key(1)), "not met again"
    assert store.write(key(1), expected, payload(expected, 2)).reason is None, "not in the way of the right one"
    assert read_whole(store, key(1), expected)[1] == payload(expected, 2).tobytes()


def test_ranks_of_another_degree_read_their_heads(make_store: MakeStore) -> None:
    """Written whole, read by two ranks and put together again by global head index."""
    store = make_store()
    cells = payload(STORED, 1)
    store.write(key(1), STORED, cells)
    shape = (STORED.layers, 2, 2, 8 * 16 * 2)
    shares = []
    for rank in range(2):
        share = np.empty(STORED.nbytes // 2, dtype=np.uint8)
        read = Read(
            key=key(1),
            layout=STORED,
            layers=STORED.all_layers,
            parts=STORED.all_parts,
            kv_heads=range(2 * rank, 2 * rank + 2),
            destination=share,
        )
        assert store.read([read])[0].ok
        shares.append(share.reshape(shape))
    assert np.concatenate(shares, axis=2).tobytes() == cells.tobytes()


def test_scales_travel_with_the_page(make_store: MakeStore) -> None:
    """Quantised KV: every part comes back, so nothing has to be taken from a scale pool that knows other values."""
    parts = (
        PartSpec("k", "int8", 16),
        PartSpec("v", "int8", 16),
        PartSpec("k_scale", "float32", 1),
        PartSpec("v_scale", "float32", 1),
    )
    layout = Layout(layers=2, kv_heads=2, tokens=8, parts=parts)
    cells = payload(layout, 3)
    store = make_store()
    store.write(key(1), layout, cells)
    for names in (("k", "k_scale"), ("v", "v_scale"), layout.all_parts):
        wanted = select(layout, cells, layout.all_layers, names, layout.all_kv_heads)
        memory = np.zeros(len(wanted), dtype=np.uint8)
        read = Read(
            key=key(1),
            layout=layout,
            layers=layout.all_layers,
            parts=names,
            kv_heads=layout.all_kv_heads,
            destination=memory,
        )
        assert store.read([read])[0].ok
        assert memory.tobytes() == wanted


def test_views_that_are_not_contiguous_are_refused(make_store: MakeStore) -> None:
    store = make_store()
    with pytest.raises(ValueError, match="C-contiguous"):
        store.write(key(1), TOY, payload(TOY, 1).repeat(2)[::2])
    with pytest.raises(ValueError, match="C-contiguous"):
        Read.whole(key(1), TOY, np.empty(2 * TOY.nbytes, dtype=np.uint8)[::2])
    with pytest.raises(ValueError, match="C-contiguous"):
        store.register(np.empty((4, 4), dtype=np.uint8).T)


def test_typed_memory_is_taken_as_bytes(make_store: MakeStore) -> None:
    store = make_store()
    cells = np.random.default_rng(0).standard_normal((3, 2, 2, 8, 16)).astype(np.float32)
    store.register(cells)
    store.write(key(1), TOY, cells)
    back = np.zeros_like(cells)
    assert store.read([Read.whole(key(1), TOY, back)])[0].ok
    assert np.array_equal(back, cells)


@pytest.mark.parametrize("nbytes", [0, TOY.nbytes - 1, TOY.nbytes + 1])
def test_wrong_sizes_are_bugs_of_the_caller(make_store: MakeStore, nbytes: int) -> None:
    store = make_store()
    with pytest.raises(ValueError, match=f"payload has {nbytes} bytes"):
        store.write(key(1), TOY, bytes(nbytes))
    with pytest.raises(ValueError, match=f"destination has {nbytes} bytes"):
        Read.whole(key(1), TOY, bytearray(nbytes))
    assert list(store.entries()) == []


def test_read_only_destinations_are_bugs_of_the_caller() -> None:
    with pytest.raises(ValueError, match="writable"):
        Read.whole(key(1), TOY, memoryview(bytes(TOY.nbytes)))


@pytest.mark.parametrize("name", ["", "ab", "A" * 64, "g" * 64, "../" + "a" * 61, "a" * 63 + "\n", b"a" * 64])
def test_names_that_are_no_keys_are_bugs_of_the_caller(make_store: MakeStore, name: Any) -> None:
    store = make_store()
    calls: list[Callable[[], Any]] = [
        lambda: store.lookup([name]),
        lambda: store.write(name, TOY, payload(TOY, 0)),
        lambda: store.delete([name]),
        lambda: store.verify(name),
        lambda: Read.whole(name, TOY, bytearray(TOY.nbytes)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="a key is the 64"):
            call()


def test_a_format_this_code_cannot_write_is_refused(make_store: MakeStore) -> None:
    with pytest.raises(ValueError, match="format version 1, not 2"):
        make_store().write(key(1), replace(TOY, version=2), payload(TOY, 1))


def test_listing_and_verifying(make_store: MakeStore) -> None:
    store = make_store(objects=4)
    tail = replace(TOY, tokens=4)
    store.write(key(1), TOY, payload(TOY, 1))
    store.write(key(2), tail, payload(tail, 2))
    first, second = sorted(store.entries(), key=lambda entry: entry.key)
    assert (first.key, first.layout, first.reason) == (key(1), TOY, None)
    assert (second.key, second.layout) == (key(2), tail)
    assert first.nbytes >= TOY.nbytes and 0 < first.last_use <= second.last_use
    assert store.verify(key(2)) == ReadResult(True, None, tail.nbytes)
    for number in (3, 4, 5):
        store.write(key(number), TOY, payload(TOY, number))
    assert not holds(store, key(1)), "listing and verifying are no use"


def test_many_threads(make_store: MakeStore) -> None:
    """Everything at once: a read that is ok is exact, and what is leased is not evicted."""
    store = make_store(objects=5)
    cells = [payload(TOY, number) for number in range(10)]
    deletable = range(8, 10)

    def work(seed: int) -> int:
        chance, read = random.Random(seed), 0
        for _ in range(60):
            number = chance.randrange(10)
            if chance.random() < 0.5:
                assert store.write(key(number), TOY, cells[number]).reason in (None, EXISTS, FULL)
            elif chance.random() < 0.1:
                store.delete([key(chance.choice(deletable))])
            else:
                found = store.lookup([key(number)])[0] is not None
                result, data = read_whole(store, key(number), TOY, aligned=chance.random() < 0.5)
                assert result.ok or result.reason == MISSING
                assert result.ok or not found or number in deletable, "evicted under a lease"
                assert not result.ok or data == cells[number].tobytes()
                read += result.ok
                if found:
                    store.release([key(number)])
        return read

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) > 0
    assert len(list(store.entries())) <= 5
    counts = store.statistics()
    assert set(counts.read_failures) <= {MISSING}
