"""Errors, interrupts, aborts and full pools: the engine says what is wrong, gives everything back, and goes on."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cacheflow.engine import Engine
from cacheflow.op import COMPUTE, FETCH, Op
from cacheflow.plane import ImpossibleOp
from cacheflow.policies import Policy, available
from cacheflow.stores import ChunkInfo, Layout, MemoryStore, StoreWrapper, WriteResult
from cacheflow.stores.base import Buffer
from models.decoder import Decoder
from tests.cacheflow.toy import (
    VOCAB,
    ToyCosts,
    assert_nothing_held,
    check,
    cold,
    cold_text,
    config,
    decoder,
    objects,
    objects_of,
    poison,
    prompt,
    restoring,
    weights,
)
from tests.stores.faults import Hangs
from tests.tolerances import FLOAT32_LOGITS, relative_norm

every_policy = pytest.mark.parametrize("policy", available())
every_loading_policy = pytest.mark.parametrize("policy", [name for name in available() if name != "recompute"])


def own_decoder() -> Decoder:
    """One that a test may break."""
    return Decoder(config(), weights("llama", torch.float32))


def assert_works(engine: Engine, **options: Any) -> None:
    """Nothing is left of what went before, and prompts are restored and stored exactly."""
    assert_nothing_held(engine)
    poison(engine)
    for policy in available():
        with restoring(engine, [prompt(45), prompt(30, seed=1)], policy=policy, **options) as batch:
            for restored in batch:
                check(engine, restored, objects(engine.store))
                assert not restored.failures
    assert_nothing_held(engine)


def assert_whole(engine: Engine, *texts: list[int]) -> None:
    """Whatever the store has of the texts is what a cold run gives."""
    found = objects(engine.store)
    known = set()
    for text in texts:
        expected = cold(engine.model, text)
        for length in range(1, len(text) + 1):
            for start, count, key in objects_of(engine, text[:length]):
                if key in found:
                    known.add(key)
                    for kind, values in enumerate((expected.k, expected.v)):
                        cells = found[key][:, kind].transpose(1, 2)
                        assert relative_norm(cells, values[:, start : start + count]) <= FLOAT32_LOGITS
    assert known == set(found)


# What a user can get wrong


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "at least one token id"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([1.5, 2.0], "float64"),
        ("text", "at least one token id"),
        ([1, VOCAB], f"token id {VOCAB} is not in the model's vocabulary of {VOCAB}"),
        ([-1, 3], "token id -1 is not"),
        ([1] * 257, "257 tokens and 0 to come are more than the model's 256 positions"),
        ([1] * 133, "133 tokens and 0 to come do not fit cache_tokens=132; raise it"),
    ],
)
def test_a_prompt_that_cannot_work_is_refused_in_one_sentence(make_engine, prompt, sentence):
    engine = make_engine(cache_tokens=130)  # rounded up to whole pages
    with pytest.raises(ValueError, match=sentence):
        engine.restore([[1, 2, 3], prompt])
    assert_works(engine)


def test_tokens_to_come_count_too(make_engine):
    engine = make_engine(cache_tokens=64)
    assert len(engine.generate([prompt(60)], 5, save=False)[0].tokens) == 5
    with pytest.raises(ValueError, match="60 tokens and 5 to come do not fit cache_tokens=64"):
        engine.generate([prompt(60)], 6)
    engine = make_engine()
    assert len(engine.generate([prompt(252)], 5, save=False)[0].tokens) == 5
    with pytest.raises(ValueError, match="252 tokens and 5 to come are more than the model's 256 positions"):
        engine.generate([prompt(252)], 6)
    with pytest.raises(ValueError, match="max_new_tokens 0"):
        engine.generate([prompt(5)], 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(device="cuda"), "device 'cuda' is not the Decoder's, 'cpu'; leave it out"),
        (dict(dtype=torch.float16), "dtype torch.float16 is not the Decoder's, torch.float32; leave it out"),
        (dict(backend="triton"), "backend 'triton' is not the Decoder's, 'reference'; leave it out"),
        (dict(policy="fastest"), "policy 'fastest' is unknown; choose one of recompute, load"),
        (dict(chunk_tokens=10), "chunk_tokens 10 must be a whole number of pages of 4 tokens"),
        (dict(chunk_tokens=0), "chunk_tokens 0 must be"),
        (dict(chunk_tokens=-8), "chunk_tokens -8 must be"),
        (dict(page_size=0), "pages of 0 tokens"),
        (dict(cache_tokens=0), "cache_tokens 0 must be"),
        (dict(token_budget=0), "token_budget 0 must be"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_work_is_refused_in_one_sentence(make_engine, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_engine(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(policy="fastest"), "policy 'fastest' is unknown"),
        (dict(policy="nowhere:Class"), "policy 'nowhere:Class' cannot be imported"),
        (dict(ids=["a"]), "as many as the 2 prompts"),
        (dict(ids=["a", "a"]), "must be different"),
        (dict(deadlines=[1.0]), "deadlines .* one for each of 2 prompts"),
        (dict(deadlines=[1.0, 0.0]), "must be seconds above 0 or None"),
    ],
)
def test_a_call_that_cannot_work_leaves_nothing_behind(make_engine, options, sentence):
    engine = make_engine()
    engine.save(prompt(20))
    with pytest.raises(ValueError, match=sentence):
        engine.restore([prompt(20), prompt(20)], **options)
    assert_works(engine)


# Errors inside


@every_policy
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_an_error_in_a_compute_op_is_raised_and_the_engine_goes_on(make_engine, monkeypatch, nth, policy):
    engine = make_engine(model=own_decoder())
    prompts = [prompt(45), prompt(30, seed=1)]
    engine.save(prompts[0])
    engine.save(prompts[1][:16])
    forward, calls = engine.model.forward, []

    def broken(*args: Any) -> None:
        calls.append(args)
        if len(calls) == nth:
            raise ZeroDivisionError("a bug in a kernel")
        forward(*args)

    for _ in range(3):  # staging in flight at that moment must come back every time
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "forward", broken)
            calls.clear()
            try:
                batch = engine.restore(prompts, policy=policy)
            except ZeroDivisionError:
                pass
            else:
                assert len(calls) < nth
                for restored in batch:
                    engine.release(restored)
        assert_nothing_held(engine)
    assert_works(engine)


def test_an_error_while_decoding_is_raised_and_the_engine_goes_on(make_engine, monkeypatch):
    engine = make_engine(model=own_decoder())
    logits = engine.model.logits
    with monkeypatch.context() as patch:
        calls: list[object] = []

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            calls.append(hidden)
            if len(calls) == 4:
                raise ZeroDivisionError("a bug in a kernel")
            return logits(hidden)

        patch.setattr(engine.model, "logits", broken)
        with pytest.raises(ZeroDivisionError):
            engine.generate([prompt(20)], 9)
    assert not objects(engine.store)
    assert_works(engine)


class Slowly(StoreWrapper):
    """Writes take a while. pages: how many were free when each had ended."""

    def write(self, key: str, layout: Layout, payload: Buffer | bytes) -> WriteResult:
        threading.Event().wait(0.02)
        self.pages.append(self.engine.pages.free_pages)
        return self.store.write(key, layout, payload)


def test_an_error_while_saving_lets_what_was_queued_end_first(make_engine, monkeypatch):
    """Else the next prompt would get the pages that are still being saved."""
    store = Slowly(MemoryStore(1 << 30))
    store.engine, store.pages = engine, _ = make_engine(store), []
    engine.warmup()
    save, calls = engine._executor.save, []

    def broken(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        save(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine._executor, "save", broken)
        with pytest.raises(MemoryError):
            engine.save(prompt(45))
    assert len(store.pages) == 2 and max(store.pages) < engine.pages.num_pages
    assert_whole(engine, prompt(45))
    assert_works(engine)


class Jumps(Policy):
    """A policy with a bug: the suffix is to run over cells that are there at some layers only."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fetched = False

    def next_compute(self, now: float) -> Op | None:
        if not self.fetched:
            return None
        plane = next(iter(self.planes.values()))
        return Op(COMPUTE, range(plane.layers), (plane.part(plane.columns - 1, plane.columns),))

    def next_fetch(self, now: float) -> Op | None:
        if self.fetched:
            return None
        self.fetched = True
        plane = next(iter(self.planes.values()))
        return Op(FETCH, range(plane.layers // 2 + 1), (plane.part(0, 1),))


class Idles(Policy):
    """A policy with a bug: it never has anything to do."""

    def next_compute(self, now: float) -> Op | None:
        return None

    def next_fetch(self, now: float) -> Op | None:
        return None


def test_layers_with_different_cached_lengths_are_never_attended_to(make_engine):
    engine = make_engine()
    tokens = prompt(11)
    engine.save(tokens)
    with pytest.raises(ImpossibleOp, match="would attend to cells that are not filled"):
        engine.restore([tokens], policy=f"{__name__}:Jumps")
    assert_works(engine)


def test_a_policy_without_a_move_is_an_error_and_not_a_hang(make_engine):
    engine = make_engine()
    with pytest.raises(RuntimeError, match="nothing in flight and nothing to do"):
        engine.restore([prompt(11)], policy=f"{__name__}:Idles")
    assert_works(engine)


# Interrupts


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Python loses an interrupt that lands in a callback of the garbage collector, of which Hypothesis has one."""
    gc.disable()
    yield
    gc.enable()


class Interrupts(StoreWrapper):
    """Sends Ctrl-C to the main thread during the nth call of a method, which takes a while longer."""

    def __init__(self, method: str, nth: int = 1) -> None:
        super().__init__(MemoryStore(1 << 30))
        self.method, self.left = method, nth
        self.armed = False

    def _call(self, method: str) -> None:
        if self.armed and method == self.method:
            self.left -= 1
            if self.left == 0:
                interrupt()

    def lookup(self, keys: Any) -> list[ChunkInfo | None]:
        self._call("lookup")
        return self.store.lookup(keys)

    def read(self, reads: Any) -> Any:
        self._call("read")
        return self.store.read(reads)

    def write(self, key: str, layout: Layout, payload: Buffer | bytes) -> WriteResult:
        self._call("write")
        return self.store.write(key, layout, payload)


def interrupt() -> None:
    """Ctrl-C, and time to act on it."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
    threading.Event().wait(0.02)


@pytest.mark.parametrize("policy", ["load", "token", "layerwise-load"])
@pytest.mark.parametrize(("method", "nth"), [("lookup", 1), ("lookup", 3), ("read", 1), ("read", 3)])
def test_an_interrupt_while_restoring_gives_everything_back(make_engine, method, nth, policy):
    store = Interrupts(method, nth)
    engine = make_engine(store, costs=ToyCosts(decoder(), loads=0.01))
    prompts = [prompt(45), prompt(30, seed=1)]
    for tokens in prompts:
        engine.save(tokens[:-2])
    store.armed = True
    with pytest.raises(KeyboardInterrupt):
        engine.restore(prompts, policy=policy)
    assert store.left <= 0
    assert_works(engine)
    assert_whole(engine, *prompts)


@pytest.mark.parametrize("nth", [1, 3])
def test_an_interrupt_while_saving_stores_no_others_kv(make_engine, nth):
    """The pages that are being saved are not given back before: the next prompt would write into them."""
    store = Interrupts("write", nth)
    engine = make_engine(store)
    store.armed = True
    with pytest.raises(KeyboardInterrupt):
        engine.save(prompt(45))
    with restoring(engine, [prompt(45, seed=7)], policy="recompute") as [restored]:
        check(engine, restored)
    assert_whole(engine, prompt(45))
    assert_works(engine)


def test_an_interrupt_while_decoding_lets_the_step_end_first(make_engine, monkeypatch):
    engine = make_engine(model=own_decoder())
    embed, calls = engine.model.embed, []

    def interrupting(tokens: torch.Tensor) -> torch.Tensor:
        calls.append(engine.pages.free_pages)
        if len(calls) == 4:
            interrupt()
            calls.append(engine.pages.free_pages)
        return embed(tokens)

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "embed", interrupting)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([prompt(20)], 9)
    assert calls[3] == calls[4] < engine.pages.num_pages  # not given back under the step's hands
    assert_works(engine)


# Aborts


def during(event: threading.Event, action: Callable[[], object]) -> threading.Thread:
    """Do something on another thread when an event comes."""

    def act() -> None:
        assert event.wait(10)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_an_aborted_prompt_that_waits_for_its_turn_is_not_restored(make_engine):
    inner = MemoryStore(1 << 30)
    make_engine(inner).save(prompt(60))
    store = Hangs(inner)
    engine = make_engine(store, cache_tokens=64)

    def abort() -> None:
        for id in ("second", "nobody", "third"):
            engine.abort(id)
        store.let_go()

    thread = during(store.entered, abort)
    prompts = [prompt(60), prompt(60), prompt(50), prompt(60)]
    batch = engine.generate(prompts, 1, policy="load", ids=["first", "second", "third", "fourth"])
    thread.join()
    token = cold(engine.model, prompt(60)).token
    assert [generated.tokens for generated in batch] == [[token], [], [], [token]]
    assert not batch[1].restored.timeline.spans and not batch[2].restored.timeline.spans


def test_more_prompts_than_the_pool_holds_when_early_ones_are_aborted(make_engine):
    inner = MemoryStore(1 << 30)
    prompts = [prompt(60, seed=seed) for seed in range(4)]
    for tokens in prompts:
        make_engine(inner).save(tokens)
    store = Hangs(inner, times=2)
    engine = make_engine(store, cache_tokens=128)

    def abort() -> None:
        engine.abort("p0")
        engine.abort("p1")
        store.let_go()

    thread = during(store.entered, abort)
    batch = engine.generate(prompts, 2, policy="load", ids=[f"p{i}" for i in range(4)])
    thread.join()
    texts = [list(cold_text(engine.model, tuple(tokens), 2)) for tokens in prompts[2:]]
    assert [generated.tokens for generated in batch] == [[], [], *texts]


def test_aborting_a_prompt_that_is_finished_or_unknown_does_nothing(make_engine):
    engine = make_engine()
    engine.abort("r0")  # nothing has run yet
    with restoring(engine, [prompt(20)]) as [restored]:
        engine.abort(restored.id)
        engine.abort("nobody")
        check(engine, restored)
        with restoring(engine, [prompt(20)], ids=[restored.id]) as [again]:
            check(engine, again)


def test_a_prompt_aborted_during_its_last_op_has_no_result(make_engine, monkeypatch):
    engine = make_engine(model=own_decoder())
    forward = engine.model.forward

    def aborting(*args: Any) -> None:
        engine.abort("a")
        threading.Event().wait(0.02)
        forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", aborting)
        batch = engine.generate([prompt(5), prompt(9)], 3, ids=["a", "b"])
    assert [generated.tokens for generated in batch] == [[], list(cold_text(engine.model, tuple(prompt(9)), 3))]
    assert batch[0].restored.first_token is None
    assert_works(engine)


def test_aborts_from_many_threads_at_any_time(make_engine):
    engine = make_engine()
    prompts = [prompt(40, seed=seed) for seed in range(4)]
    for tokens in prompts:
        engine.save(tokens)
    stop = threading.Event()

    def pester(first: int) -> None:
        number = first
        while not stop.wait(0.0002):
            number += 1
            engine.abort(f"p{number % 8}")
            for other in range(50):  # so many that somebody else is looking at them
                engine.abort(f"nobody {number} {other}")

    threads = [threading.Thread(target=pester, args=(i,)) for i in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    try:
        for policy in [*available()] * 8:
            with restoring(engine, prompts, policy=policy, ids=[f"p{i}" for i in range(4)]) as batch:
                for restored in batch:
                    assert (restored.session is None) == (restored.logits is None)
                    if restored.session is not None:
                        check(engine, restored)
            assert_nothing_held(engine)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()


# Full pools


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_restored(make_engine, monkeypatch):
    engine = make_engine(cache_tokens=64)
    engine.save(prompt(30))
    with restoring(engine, [prompt(30)]) as [first]:
        monkeypatch.setattr(engine._locator, "locate", None)
        sentence = "a batch of {} needs {} pages of 4 tokens and 8 are free; restore fewer prompts at a time, release"
        with pytest.raises(RuntimeError, match=sentence.format(1, 10)):
            engine.restore([prompt(40)])
        with pytest.raises(RuntimeError, match=sentence.format(2, 14)):
            engine.restore([prompt(25), prompt(20)], room=4)
        sentence = "40 tokens and 2 to come need 11 pages of 4 tokens and 8 are free; release restored prompts or raise"
        with pytest.raises(RuntimeError, match=sentence):
            engine.generate([prompt(30), prompt(40)], 3)  # the first of these fits
        monkeypatch.undo()
        check(engine, first, objects(engine.store))
        with restoring(engine, [prompt(30)]) as [second]:
            check(engine, second, objects(engine.store))
        assert len(engine.generate([prompt(20, seed=1), prompt(28)], 3)) == 2  # one after the other
    assert_nothing_held(engine)
    assert engine.release(first) is None  # again: nothing happens
    with restoring(engine, [prompt(40)]) as [restored]:
        check(engine, restored)


@every_policy
def test_a_batch_larger_than_the_page_pool_is_generated_in_parts(make_engine, policy):
    engine = make_engine(cache_tokens=64)
    prompts = [prompt(length, seed=length) for length in (30, 30, 62, 1, 17, 9, 30, 58)]
    batch = engine.generate(prompts, 3, policy=policy)
    assert [generated.restored.tokens.tolist() for generated in batch] == prompts
    assert [tuple(g.tokens) for g in batch] == [cold_text(engine.model, tuple(tokens), 3) for tokens in prompts]
    parts = dict.fromkeys(id(generated.restored.timeline) for generated in batch)
    assert len(parts) == 5  # of 16 pages: 8 + 8, 16, 1 + 5 + 3, 8, 15
    assert batch[6].restored.request.prefix == 24  # whole chunks, which the first part saved
    assert_nothing_held(engine)
    saved = objects(engine.store)
    poison(engine)
    assert [g.tokens for g in engine.generate(prompts, 3, policy=policy)] == [g.tokens for g in batch]
    assert objects(engine.store).keys() == saved.keys()
