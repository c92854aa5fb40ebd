"""What restoration systems were seen to get wrong: each case for every policy, and of its whole kind."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow import policies
from cacheflow.engine import Engine
from cacheflow.op import COPY
from cacheflow.request import Request
from cacheflow.stores import MemoryStore, Read, ReadResult, Store, StoreWrapper
from tests.cacheflow.legality import check as check_run
from tests.cacheflow.legality import run
from tests.cacheflow.strategies import Affine
from tests.cacheflow.toy import (
    CHUNK,
    LAYERS,
    PAGE,
    ToyCosts,
    assert_nothing_held,
    check,
    decoder,
    eventually,
    objects,
    objects_of,
    poison,
    prompt,
    restoring,
)
from tests.stores.faults import scribble

LOADERS = [name for name in policies.available() if name != "recompute"]
PATIENCE = 0.1  # seconds; of engines whose store is late


def fast(**options: Any) -> dict[str, Any]:
    """Loads so fast that every policy loads most of what there is."""
    return {"costs": ToyCosts(decoder(), loads=0.01), **options}


# Aborted while a load is in flight, its pages wanted by the next prompt


class Aborts(StoreWrapper):
    """A's nth read aborts A, and lasts: until `others` reads of other prompts have come, or for a moment if 0.

    late: it then ends with rubbish, as a transfer may that was given up. free: pages that were free when it ended.
    """

    def __init__(self, store: Store, a: set[str], nth: int, others: int) -> None:
        super().__init__(store)
        self.a, self.nth, self.others = a, nth, others
        self.engine: Engine | None = None
        self.free: int | None = None
        self._reads = 0
        self._lock = threading.Lock()
        self._wanted, self._ended = threading.Semaphore(0), threading.Event()

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        assert self.engine is not None
        of_a = any(read.key in self.a for read in reads)
        with self._lock:
            self._reads += of_a
            hit = of_a and self._reads == self.nth
        if hit:
            self.engine.abort("a")
            for _ in range(self.others):
                assert self._wanted.acquire(timeout=10)
            if not self.others:
                threading.Event().wait(0.03)
            self.free = self.engine.pages.free_pages
            results = self.store.read(reads)
            for read in reads if self.others else ():
                scribble(read)
            self._ended.set()
            return results
        results = self.store.read(reads)
        if not of_a and self.others:
            self._wanted.release()
            self._ended.wait(10)  # its staging is filled, and nothing is copied yet
        return results

    @property
    def aborted(self) -> bool:
        return self._reads >= self.nth


@pytest.mark.parametrize("policy", LOADERS)
@pytest.mark.parametrize("others", [0, 1], ids=["ends in time", "ends late, beside the next one's loads"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_pages_of_an_aborted_prompt_are_not_written_into_by_its_loads(make_engine, nth, others, policy):
    """Field case 9. B needs the pages of A; A's transfer ends before B may have them, or never reaches them."""
    a, b = prompt(60), prompt(60, seed=1)
    inner = MemoryStore(1 << 30)
    writer = make_engine(inner)
    for tokens in (a, b):
        writer.save(tokens)
    store = Aborts(inner, {key for _, _, key in objects_of(writer, a)}, nth, others)
    engine = make_engine(store, cache_tokens=60, **fast(timeout=PATIENCE if others else 60))
    store.engine = engine
    with restoring(engine, [a], policy=policy, ids=["a"]) as [restored]:
        assert (restored.session is None) == (restored.logits is None) == store.aborted
    assert not engine._executor._fetches
    engine._executor.timeout = 60
    with restoring(engine, [b], policy=policy) as [restored]:
        check(engine, restored, objects(inner))
        assert not restored.failures
    if store.aborted:
        assert eventually(lambda: store.free is not None)
        assert store.free == 0, "A's pages were free, and B's are, while its load was in flight"
    assert_nothing_held(engine)


@pytest.mark.parametrize("policy", LOADERS)
def test_a_prompt_behind_an_aborted_one_in_the_same_call_gets_its_pages(make_engine, policy):
    a, b = prompt(60), prompt(60, seed=1)
    inner = MemoryStore(1 << 30)
    writer = make_engine(inner)
    for tokens in (a, b):
        writer.save(tokens)
    store = Aborts(inner, {key for _, _, key in objects_of(writer, a)}, nth=1, others=0)
    engine = make_engine(store, cache_tokens=60, **fast())
    store.engine = engine
    first, second = engine.generate([a, b], 1, policy=policy, ids=["a", "b"])
    assert first.tokens == [] and store.free == 0
    assert second.tokens == engine.generate([b], 1, policy="recompute")[0].tokens


# Some chunks are gone, others behind them are there


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_stored_is_used_wherever_it_lies(name: str, data: st.DataObject) -> None:
    """Field case 24 in virtual time: no hole ends the hit, and compute fills holes only where loads are quick."""
    columns, layers = data.draw(st.integers(4, 10)), data.draw(st.integers(3, 6))
    holes = data.draw(st.sets(st.integers(0, columns - 1), max_size=columns - 4))
    request = Request.of("a", prefix=8 * columns, suffix=5, chunk=8, layers=layers, holes=sorted(holes))
    result = run(policies.find(name)(Affine(request.windows, bandwidth=8e3)), [request])
    check_run(result)
    loaded = sum(span.op.tokens * len(span.op.layers) for span in result.spans if span.op.kind == COPY)
    assert loaded >= 0.5 * 8 * (columns - len(holes)) * layers


@pytest.mark.parametrize("policy", policies.available())
def test_whatever_chunks_are_left_are_used_and_the_others_computed_in_place(make_engine, policy):
    """Field case 24: the head is gone and the tail there, and any other pattern."""
    engine = make_engine(**fast())
    text = prompt(8 * CHUNK + PAGE + 2)
    engine.save(text)
    keys = [key for _, _, key in objects_of(engine, text)]  # eight chunks and a tail
    for seed in range(8):
        choice = random.Random(seed)
        gone = {0, 1} if seed == 0 else set(choice.sample(range(9), choice.randint(1, 8)))
        saved = objects(engine.store)
        engine.store.delete([keys[i] for i in gone])
        there = [i not in gone for i in range(9)]
        if not there[7]:
            there[8] = False  # a tail is looked up right behind the last chunk that is there
        while there and not there[-1]:
            there.pop()
        poison(engine)
        with restoring(engine, [text], policy=policy) as [restored]:
            sources = check(engine, restored, saved)
            assert restored.request.stored == tuple(there) and not restored.failures
            stored = sum(restored.request.stored) * LAYERS
            if policy != "recompute" and stored >= 4 * LAYERS:
                assert sources["loaded"] >= stored / 2
        assert engine.save(text).chunks == len(gone)  # fills the holes


@pytest.mark.parametrize("policy", policies.available())
def test_a_store_that_dropped_any_part_of_a_text_gives_the_rest(make_engine, policy):
    """Field case 24: saved in two calls into a store that is too small, with parts used once more between them."""
    size = decoder().config.kv_bytes_per_token(torch.float32) * CHUNK
    text = prompt(8 * CHUNK + 2)
    seen = set()
    for seed in range(5):
        choice = random.Random(seed)
        engine = make_engine(MemoryStore(choice.randint(3, 7) * size), **fast())
        engine.save(text[: choice.randint(2, 6) * CHUNK])
        with restoring(engine, [text[: choice.randint(1, 3) * CHUNK + 1]], policy=policy):
            pass
        engine.save(text)
        keys = [key for _, _, key in objects_of(engine, text)]
        saved = objects(engine.store)
        there = [key in saved for key in keys]
        with restoring(engine, [text], policy=policy) as [restored]:
            check(engine, restored, saved)
            last = max(i for i, is_there in enumerate(there) if is_there)
            assert restored.request.stored == tuple(there[: last + 1])
            assert not restored.failures
        seen.add(tuple(there))
    assert any(not there[0] and there[7] for there in seen)  # the head gone, the tail there
