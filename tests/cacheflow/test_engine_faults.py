"""Whatever a store does, prompts get the results of a cold run; failures are counted, and nothing is held back."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheflow.engine import Engine
from cacheflow.loop import AHEAD
from cacheflow.policies import available
from cacheflow.stores import (
    ChunkInfo,
    DiskStore,
    Layout,
    MemoryStore,
    PartSpec,
    Read,
    ReadResult,
    Store,
    StoreWrapper,
    WriteResult,
)
from cacheflow.stores.base import CORRUPT, ERROR, MISMATCH, MISSING, SHORT, TIMEOUT, UNREADABLE, Buffer
from models.decoder import Decoder
from tests.cacheflow.toy import (
    CHUNK,
    LAYERS,
    PAGE,
    ToyCosts,
    assert_nothing_held,
    check,
    config,
    decoder,
    eventually,
    objects,
    objects_of,
    poison,
    prompt,
    restoring,
    weights,
)
from tests.stores.faults import DeletesAfterLookup, Fails, FlipsBit, Hangs, Raises, Short, Slow, scribble
from tests.tolerances import FLOAT32_LOGITS, relative_norm

every_policy = pytest.mark.parametrize("policy", available())
every_loading_policy = pytest.mark.parametrize("policy", [name for name in available() if name != "recompute"])
TOKENS = prompt(8 * CHUNK + PAGE + 2)  # eight chunks, a tail and two tokens more
PATIENCE = 0.1  # seconds; the timeout of engines whose store hangs


def filled(*texts: Sequence[int], store: Store | None = None) -> Store:
    """A store that has the KV of texts."""
    store = store or MemoryStore(1 << 30)
    with Engine(decoder(), store, chunk_tokens=CHUNK, page_size=PAGE, costs=ToyCosts(decoder())) as engine:
        for tokens in texts or (TOKENS,):
            engine.save(tokens)
    return store


def keys_of(engine: Engine, tokens: Sequence[int] = TOKENS) -> list[str]:
    return [key for _, _, key in objects_of(engine, tokens)]


def assert_recovered(engine: Engine, policy: str, store: Store) -> None:
    """The engine, its store in order again, restores without a failure."""
    assert_nothing_held(engine)
    engine.store.store = store
    engine._executor.timeout = engine._locator.timeout = 60
    poison(engine)
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        sources = check(engine, restored, objects(store))
        assert not restored.failures
        assert sources["loaded"] or policy == "recompute"


# Reads


class Answers(StoreWrapper):
    """Reads give something that is no list of results, one for each."""

    def __init__(self, store: Store, answer: Callable[[list[ReadResult]], Any]) -> None:
        super().__init__(store)
        self.answer = answer

    def read(self, reads: Sequence[Read]) -> Any:
        results = self.store.read(reads)
        for read in reads:
            scribble(read)
        return self.answer(results)


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (Raises, ERROR),
    "unreadable": (lambda store, match=None: Fails(store, UNREADABLE, match), UNREADABLE),
    "half": (Short, SHORT),
    "flips-a-bit": (FlipsBit, CORRUPT),
    "no-reason": (lambda store, match=None: Fails(store, None, match), ERROR),
}


PLACES: dict[str, Callable[[Read, str], bool]] = {
    "everywhere": lambda read, middle: True,
    "in the middle": lambda read, middle: read.key == middle,
    "high up": lambda read, middle: read.layers.stop == LAYERS,
    "high up in the middle": lambda read, middle: read.key == middle and read.layers.stop == LAYERS,
}


@every_loading_policy
@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_fails_is_recomputed_and_counted(make_engine, fault, policy):
    inner = filled()
    make, reason = FAULTS[fault]
    engine = make_engine(inner, costs=ToyCosts(decoder(), loads=0.1))
    middle = keys_of(engine)[5]  # far enough to the right that no policy is tempted to compute it
    for place, matches in PLACES.items():
        asked: Counter[str] = Counter()

        def hit(read: Read, matches=matches, asked=asked) -> bool:
            if matches(read, middle):
                asked[read.key] += 1
            return matches(read, middle)

        engine.store.store = faulty = make(inner, hit)
        poison(engine)
        with restoring(engine, [TOKENS], policy=policy) as [restored]:
            check(engine, restored, objects(inner))
            # Where the link is behind, pipelined may have computed the very cells.
            assert faulty.injected or (policy == "pipelined" and place != "everywhere"), place
            assert set(restored.failures) == ({reason} if faulty.injected else set()), place
            if fault == "raises":  # the whole call fails, other chunks of the same op with it
                assert restored.failures[reason] >= faulty.injected
            else:
                assert restored.failures[reason] == faulty.injected
            # Never asked again: more than one failure of a chunk can only have been in flight together.
            assert max(asked.values(), default=0) <= (1 if policy in ("load", "token") else AHEAD)
    assert_recovered(engine, policy, inner)


@pytest.mark.parametrize("policy", ["load", "layer"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda results: False,
        lambda results: None,
        lambda results: [],
        lambda results: results[:-1],
        lambda results: [*results, *results],
        lambda results: [OSError("instead of a result")] * len(results),
        lambda results: [False] * len(results),
    ],
    ids=["False", "None", "nothing", "one-less", "twice-as-many", "errors", "Falses"],
)
def test_a_read_that_answers_with_anything_else_is_an_error(make_engine, answer, policy):
    inner = filled()
    engine = make_engine(Answers(inner, answer), costs=ToyCosts(decoder(), loads=0.1))
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        check(engine, restored)
        assert set(restored.failures) == {ERROR}
    assert_recovered(engine, policy, inner)


@every_policy
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window"])
def test_storms_of_faults(make_engine, family, policy):
    """Any fault on any read, batches of prompts that share chunks, holes, windows."""
    model = decoder(family)
    engine = make_engine(model=model, cache_tokens=1024, costs=ToyCosts(model, loads=0.3))
    prompts = [TOKENS, TOKENS[:37], prompt(50, seed=1), TOKENS[:16] + prompt(30, seed=2)]
    for tokens in prompts:
        engine.save(tokens)
    memory = engine.store.store
    saved = objects(memory)
    for seed in range(2):
        generator = random.Random(seed)
        storm = memory
        for fault in (Raises, Short, FlipsBit, lambda store, match: Slow(store, 0.002, match)):
            storm = fault(storm, lambda read, generator=generator: generator.random() < 0.1)
        gone = generator.sample(sorted(saved), 2)
        engine.store.store = DeletesAfterLookup(storm, lambda key, gone=gone: key in gone)
        poison(engine)
        with restoring(engine, prompts, policy=policy) as batch:
            for restored in batch:
                check(engine, restored, saved)
        assert_nothing_held(engine)
        engine.store.store = memory
        for tokens in prompts:
            engine.save(tokens)  # what was deleted
        saved = objects(memory)


@every_loading_policy
def test_a_chunk_that_goes_after_its_look_up_is_asked_for_once(make_engine, policy):
    inner = filled()
    store = DeletesAfterLookup(inner)
    engine = make_engine(store, costs=ToyCosts(decoder(), loads=0.1))
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        check(engine, restored)
        assert set(restored.failures) == {MISSING}
        assert restored.failures[MISSING] <= 9 * (1 if policy in ("load", "token") else AHEAD)
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        assert restored.request.prefix == 0 and not restored.failures
    engine.store.store = inner
    assert engine.save(TOKENS).chunks == 9
    assert_recovered(engine, policy, inner)


def test_what_could_not_be_loaded_is_saved_again_at_once(make_engine):
    inner = filled()
    saved = objects(inner)
    gone = sorted(saved)[:4]
    engine = make_engine(DeletesAfterLookup(inner, lambda key: key in gone), policy="load")
    assert engine.save(TOKENS).chunks == 4
    for key, cells in objects(inner).items():
        assert relative_norm(cells, saved[key]) <= FLOAT32_LOGITS
    assert len(objects(inner)) == len(saved)


@every_loading_policy
def test_one_prompts_failures_are_not_anothers(make_engine, policy):
    other = prompt(50, seed=1)
    inner = filled(TOKENS, other)
    engine = make_engine(inner, costs=ToyCosts(decoder(), loads=0.1))
    bad = set(keys_of(engine, other))
    engine.store.store = Fails(inner, CORRUPT, lambda read: read.key in bad)
    with restoring(engine, [TOKENS, other, TOKENS[:30]], policy=policy) as batch:
        for restored in batch:
            check(engine, restored, objects(inner))
        assert [set(restored.failures) for restored in batch] == [set(), {CORRUPT}, set()]


# Loads that hang


class HangsOnce(Hangs):
    """Ends its hanging reads by writing rubbish, as a transfer that was given up long ago may."""

    def fault(self, read: Read) -> ReadResult:
        result = super().fault(read)
        scribble(read)
        return result


@every_loading_policy
@pytest.mark.parametrize("place", ["everywhere", "in the middle"])
def test_a_load_that_hangs_is_given_up_after_the_timeout(make_engine, place, policy):
    inner = filled()
    engine = make_engine(inner, timeout=PATIENCE, costs=ToyCosts(decoder(), loads=0.1))
    middle = keys_of(engine)[3]
    engine.store.store = store = HangsOnce(inner, lambda read: PLACES[place](read, middle))
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        check(engine, restored, objects(inner))
        assert set(restored.failures) == {TIMEOUT}
        assert 1 <= store.injected <= AHEAD
    if place == "everywhere":  # as long as it hangs nobody waits for it again
        with restoring(engine, [TOKENS], policy=policy) as [restored]:
            check(engine, restored)
            assert set(restored.failures) == {TIMEOUT}
            assert store.injected == AHEAD
    store.let_go()
    assert_recovered(engine, policy, inner)


class WritesLate(StoreWrapper):
    """Reads of one key hang, and write into their destination when a read of another key has filled its own."""

    def __init__(self, store: Store, slow: str) -> None:
        super().__init__(store)
        self.slow = slow
        self.filled = threading.Event()
        self.written = threading.Event()

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        results = self.store.read(reads)
        if any(read.key == self.slow for read in reads):
            self.filled.wait(10)
            for read in reads:
                scribble(read)
            self.written.set()
        else:
            self.filled.set()
            self.written.wait(10)
        return results


def late_write_hits_nobody(engine: Engine, give_back_at_once: bool) -> None:
    a, b = prompt(CHUNK + 3, seed=3), prompt(CHUNK + 3, seed=4)
    inner = filled(a, b)
    engine.store.store = store = WritesLate(inner, keys_of(engine, a)[0])
    with restoring(engine, [a], policy="load") as [restored]:
        assert restored.failures == {TIMEOUT: 1}
        check(engine, restored)
    executor = engine._executor
    if give_back_at_once:
        executor._buffers.append(executor._hanging.pop().buffer)
    executor.timeout = 60
    with restoring(engine, [b], policy="load") as [restored]:
        assert not restored.failures
        check(engine, restored, objects(inner))
    assert store.written.is_set()


def test_a_late_write_hits_nobody(make_engine):
    late_write_hits_nobody(make_engine(timeout=PATIENCE), give_back_at_once=False)


def test_a_late_write_would_hit_the_next_request_if_staging_were_given_back_at_once(make_engine):
    with pytest.raises(AssertionError):
        late_write_hits_nobody(make_engine(timeout=PATIENCE), give_back_at_once=True)


def test_an_error_while_loads_hang_leaves_them_their_staging(make_engine, monkeypatch):
    inner = filled()
    engine = make_engine(timeout=PATIENCE, model=Decoder(config(), weights("llama", torch.float32)))
    engine.store.store = store = Hangs(inner)

    def broken(*args: Any) -> None:
        store.entered.wait(10)
        raise ZeroDivisionError("a bug in a kernel")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", broken)
        with pytest.raises(ZeroDivisionError):
            engine.restore([TOKENS], policy="token")
    executor = engine._executor
    held = [fetch.buffer for fetch in executor._hanging]
    assert len(held) == store.injected > 0
    assert len(executor._buffers) == AHEAD - len(held)
    assert not any(buffer is other for buffer in executor._buffers for other in held)
    store.let_go()
    assert_recovered(engine, "load", inner)


def test_a_load_that_always_hangs_costs_no_thread_each(make_engine):
    inner = filled()
    engine = make_engine(inner, timeout=PATIENCE, costs=ToyCosts(decoder(), loads=0.1))
    for _ in range(3):
        engine.store.store = store = Hangs(inner)
        with restoring(engine, [TOKENS], policy="load") as [restored]:
            check(engine, restored)
        store.let_go()
        assert_nothing_held(engine)
    assert eventually(lambda: len(_threads("cacheflow-fetch")) == AHEAD)
    assert_recovered(engine, "load", inner)


def _threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


# Look-ups


class Lookups(StoreWrapper):
    """Look-ups, all or from the nth on, do something else."""

    def __init__(self, store: Store, instead: Callable[[Callable[[], Any]], Any], first: int = 1) -> None:
        super().__init__(store)
        self.instead = instead
        self.calls = 0
        self.first = first

    def lookup(self, keys: Sequence[str]) -> Any:
        self.calls += 1
        if self.calls < self.first:
            return self.store.lookup(keys)
        return self.instead(lambda: self.store.lookup(keys))


def _raise(lookup: Callable[[], Any]) -> Any:
    raise OSError("injected: the storage went away")


@pytest.mark.parametrize("policy", ["load", "layer"])
@pytest.mark.parametrize("first", [1, 2], ids=["from-the-first", "tails-only"])
@pytest.mark.parametrize(
    "instead", [_raise, lambda lookup: None, lambda lookup: []], ids=["raises", "None", "no-answers"]
)
def test_a_look_up_that_fails_finds_nothing(make_engine, instead, first, policy):
    inner = filled()
    engine = make_engine(Lookups(inner, instead, first))
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        check(engine, restored)
        assert restored.failures == {ERROR: 3 - first}
        assert restored.request.prefix == (8 * CHUNK if first == 2 else 0)
    assert_recovered(engine, policy, inner)


@pytest.mark.parametrize("policy", ["load", "layer"])
@pytest.mark.parametrize("first", [1, 2], ids=["from-the-first", "tails-only"])
def test_a_look_up_that_hangs_finds_nothing_after_the_timeout(make_engine, monkeypatch, first, policy):
    monkeypatch.setattr("cacheflow.lookup.ASK_AGAIN", 1e6)
    inner = filled()
    go = threading.Event()

    def hang(lookup: Callable[[], Any]) -> Any:
        go.wait()
        return lookup()

    store = Lookups(inner, hang, first)
    engine = make_engine(store, timeout=PATIENCE)
    with restoring(engine, [TOKENS] * 4, policy=policy) as batch:
        for restored in batch:
            check(engine, restored)
            assert set(restored.failures) == {TIMEOUT}
    assert store.calls == first  # one timeout, not one for each prompt
    go.set()
    assert eventually(engine._locator._hanging.ended.is_set)
    assert_recovered(engine, policy, inner)  # the leases of the answer that came too late, too


def test_a_look_up_that_never_returns_is_not_waited_for_for_ever(make_engine, monkeypatch):
    monkeypatch.setattr("cacheflow.lookup.ASK_AGAIN", 0)
    inner = filled()
    go = threading.Event()
    calls: list[object] = []

    def hang_twice(lookup: Callable[[], Any]) -> Any:
        calls.append(lookup)
        if len(calls) <= 2:
            go.wait()
        return lookup()

    engine = make_engine(Lookups(inner, hang_twice), timeout=PATIENCE)
    with restoring(engine, [TOKENS]) as [restored]:
        check(engine, restored)
        assert restored.failures == {TIMEOUT: 2}
    for _ in range(3):  # two hang still
        with restoring(engine, [TOKENS], policy="load") as [restored]:
            check(engine, restored, objects(inner))
            assert not restored.failures and restored.request.prefix == 8 * CHUNK + PAGE
    go.set()


@every_policy
def test_an_object_of_another_layout_is_a_miss_and_makes_way_for_a_good_one(make_engine, policy):
    inner = filled()
    engine = make_engine(inner)
    chunks = keys_of(engine)
    parts = (PartSpec("k", "float16", 32), PartSpec("v", "float16", 32))
    alien = Layout(layers=LAYERS, kv_heads=2, tokens=CHUNK, parts=parts)  # equal in size
    for key, tokens in ((chunks[2], CHUNK), (chunks[8], PAGE)):
        layout = dataclasses.replace(alien, tokens=tokens)
        inner.delete([key])
        assert inner.write(key, layout, bytes(layout.nbytes)).ok
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        check(engine, restored)
        assert restored.failures == {MISMATCH: 2}
        assert restored.request.stored == (True, True, False, True, True, True, True, True)
    engine.save(TOKENS)
    assert_recovered(engine, policy, inner)
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        assert restored.request.stored == (True,) * 9


# Leases and writes


class Breaks(StoreWrapper):
    """Methods raise."""

    def __init__(self, store: Store, *methods: str) -> None:
        super().__init__(store)
        self.methods = methods

    def release(self, keys: Sequence[str]) -> None:
        if "release" in self.methods:
            raise OSError("injected: the storage went away")
        self.store.release(keys)

    def write(self, key: str, layout: Layout, payload: Buffer | bytes) -> WriteResult:
        if "write" in self.methods:
            raise OSError("injected: the storage went away")
        return self.store.write(key, layout, payload)

    def delete(self, keys: Sequence[str]) -> int:
        raise OSError("injected: the storage went away")

    def lookup(self, keys: Sequence[str]) -> list[ChunkInfo | None]:
        if "lookup" in self.methods:
            raise OSError("injected: the storage went away")
        return self.store.lookup(keys)


@every_policy
def test_a_store_that_cannot_take_leases_back_changes_nothing(make_engine, policy):
    inner = filled()
    engine = make_engine(Breaks(inner, "release"))
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        check(engine, restored, objects(inner))
        assert not restored.failures
    assert_recovered(engine, policy, inner)


def test_a_store_that_cannot_write_refuses(make_engine):
    inner = MemoryStore(1 << 30)
    engine = make_engine(Breaks(inner, "write"))
    saved = engine.save(TOKENS)
    assert (saved.chunks, saved.bytes, saved.refused) == (0, 0, {ERROR: 9})
    [generated] = engine.generate([TOKENS], 4)
    assert len(generated.tokens) == 4
    engine.store.store = inner
    assert engine.save(TOKENS).chunks == 9
    assert_recovered(engine, "load", inner)


def test_a_store_that_is_down_when_costs_are_measured(make_engine):
    inner = filled()
    down = Fails(Breaks(inner, "write", "lookup", "release"), ERROR)
    engine = make_engine(down, costs=None)
    with (
        pytest.warns(UserWarning, match=r"the store could not be timed \(error\)"),
        pytest.warns(UserWarning, match="what loads take from compute could not be timed"),
        restoring(engine, [TOKENS]) as [restored],
    ):
        check(engine, restored)
        assert set(restored.failures) == {ERROR}
    assert_recovered(engine, "load", inner)


# Files


def _flip(path: Path, share: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 16
    path.write_bytes(data)


class Trap:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a bit of the payload": lambda path, other: _flip(path, 0.75),
    "the last bit": lambda path, other: _flip(path, 0.9999),
    "a bit of the header": lambda path, other: _flip(path, 0.002),
    "one byte short": lambda path, other: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path, other: os.truncate(path, 0),
    "of a newer version": lambda path, other: path.write_bytes(path.read_bytes()[:8] + b"\x63" + path.read_bytes()[9:]),
    "gone": lambda path, other: path.unlink(),
    "another chunk's": lambda path, other: path.write_bytes(other.read_bytes()),
    "a folder": lambda path, other: (path.unlink(), path.mkdir()),
    "a pickle": lambda path, other: path.write_bytes(pickle.dumps(Trap())),
}


@pytest.mark.parametrize("policy", ["load", "layerwise-load", "two-pointer"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_recomputed_and_not_met_again(make_engine, tmp_path, monkeypatch, damage, policy):
    monkeypatch.chdir(tmp_path)
    writer = filled(store=DiskStore(tmp_path / "kv"))
    good = objects(writer)
    writer.close()
    store = DiskStore(tmp_path / "kv")  # one that remembers nothing of these files
    engine = make_engine(store, costs=ToyCosts(decoder(), loads=0.1))
    paths = [tmp_path / "kv" / key[:2] / f"{key}.kv" for key in keys_of(engine)]
    for number in (1, 4, 8):
        DAMAGE[damage](paths[number], paths[3])
    with restoring(engine, [TOKENS], policy=policy) as [restored]:
        check(engine, restored, good)
    if policy == "load" and damage != "gone":
        counted = Counter(store.statistics().read_failures)
        assert counted.total() == 3, counted
    assert not (tmp_path / "executed").exists()
    if damage != "a folder":
        engine.save(TOKENS)
        if policy in ("load", "layerwise-load"):  # others need not have met all of them
            poison(engine)
            with restoring(engine, [TOKENS], policy=policy) as [restored]:
                check(engine, restored, objects(store))
                assert not restored.failures
                assert restored.request.stored == (True,) * 9
    store.close()
