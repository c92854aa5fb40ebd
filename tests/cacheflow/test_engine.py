"""The engine as a user sees it: whatever the store has and whatever the policy does, results equal a cold run's."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from argparse import Namespace
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from cacheflow import cli
from cacheflow.commands import _common as common
from cacheflow.costs.learned import Learned, beside, this_machine
from cacheflow.costs.measured import Measured
from cacheflow.engine import Engine
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.plane import COMPUTED, LOADED
from cacheflow.policies import Policy, available
from cacheflow.stores import MemoryStore, open_store
from cacheflow.stores.base import UNREADABLE
from models.decoder import Decoder
from models.weights import random_weights
from tests.cacheflow.toy import (
    CHUNK,
    FAMILIES,
    LAYERS,
    PAGE,
    STALE,
    ToyCosts,
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
from tests.stores.faults import Fails
from tests.tolerances import FLOAT32_LOGITS, LOW_PRECISION_MULTIPLE, relative_norm

LENGTHS = (1, 4, 5, 8, 15, 16, 17, 33, 100)
FEWER = (5, 16, 33, 60)
POLICIES = list(available())
every_policy = pytest.mark.parametrize("policy", POLICIES)


# Exactness


@every_policy
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_any_length_are_restored_exactly(make_engine, family, policy):
    engine = make_engine(model=decoder(family))
    sources: Counter[str] = Counter()
    for length in LENGTHS if family == "llama" else FEWER:
        tokens = prompt(length, seed=length)
        engine.save(tokens)
        saved = objects(engine.store)
        for extra in (0, 1, 11):  # the same prompt again, and longer ones that begin with it
            longer = tokens + prompt(extra, seed=1000 + extra)
            poison(engine)
            with restoring(engine, [longer], policy=policy) as [restored]:
                sources += check(engine, restored, saved)
                assert not restored.failures
                whole = length // PAGE * PAGE
                assert restored.request.prefix == (whole if extra else min(whole, length - 1))
    assert (sources["computed"] > 0) == (policy not in ("load", "layerwise-load"))
    # Projecting the only row of a one-layer model is quicker than loading any of it.
    only_computes = policy == "recompute" or (
        family == "llama-1-layer" and policy in ("layer", "two-pointer", "pipelined")
    )
    assert (sources["loaded"] > 0) == (not only_computes)


@every_policy
def test_a_batch_is_restored_exactly(make_engine, policy):
    engine = make_engine(cache_tokens=1024)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    for tokens in prompts[::2]:
        engine.save(tokens)
    saved = objects(engine.store)
    poison(engine)
    with restoring(engine, prompts, policy=policy) as batch:
        assert [restored.tokens.tolist() for restored in batch] == prompts
        for restored in batch:
            check(engine, restored, saved)
            assert not restored.failures


@pytest.mark.parametrize("length", [39, 100])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window"])
def test_fetches_of_several_layers_and_columns_restore_exactly(make_engine, family, length):
    """What pipelined does where every fetch costs much; and again, one of the chunks being unreadable."""
    several = config(family, num_hidden_layers=8)
    model = Decoder(several, random_weights(several, 3, torch.float32))
    costs = ToyCosts(model, loads=0.5)
    costs.fetch_seconds = 5e-4
    engine = make_engine(model=model, costs=costs)
    tokens = prompt(length, seed=length)
    engine.save(tokens)
    saved, inner = objects(engine.store), engine.store.store
    *_, last = objects_of(engine, tokens)
    for store in (inner, Fails(inner, UNREADABLE, lambda read: read.key == last[-1])):
        engine.store.store = store
        poison(engine)
        with restoring(engine, [tokens + prompt(9)], policy="pipelined") as [restored]:
            assert check(engine, restored, saved)["loaded"]
            fetches = [span.op for span in restored.timeline.spans if span.op.kind == FETCH]
            assert any(len(op.layers) > 1 and op.tokens > CHUNK for op in fetches)
            assert set(restored.failures) == (set() if store is inner else {UNREADABLE})


@every_policy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_models_restore_the_bits_that_were_saved(make_engine, dtype, policy):
    engine = make_engine(model=decoder("qwen2", dtype))
    exact = Decoder(config("qwen2"), _widened("qwen2", dtype))
    found: dict[str, list[torch.Tensor]] = {"restored": [], "cold": [], "exact": []}
    for length in (5, 15, 16, 17, 24, 39, 60):
        tokens = prompt(length, seed=length)
        engine.save(tokens)
        saved = objects(engine.store)
        poison(engine)
        with restoring(engine, [tokens], policy=policy) as [restored]:
            check(engine, restored, saved)
            found["restored"].append(restored.logits)
        found["cold"].append(cold(engine.model, tokens).logits)
        found["exact"].append(cold(exact, tokens).logits)
    logits = {name: torch.stack(rows) for name, rows in found.items()}
    own_error = relative_norm(logits["cold"], logits["exact"])
    assert relative_norm(logits["restored"], logits["exact"]) <= LOW_PRECISION_MULTIPLE * own_error


def _widened(family: str, dtype: torch.dtype) -> Any:
    """The weights of a low-precision model, in float32."""

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.float()
        if isinstance(value, tuple):
            return tuple(map(wide, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return type(value)(**{f.name: wide(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    return wide(weights(family, dtype))


@every_policy
@pytest.mark.parametrize("length", [1, 4, 8, 15, 16, 17])
def test_when_the_whole_prompt_is_stored_only_the_last_token_is_computed(make_engine, monkeypatch, length, policy):
    engine = make_engine(costs=ToyCosts(decoder(), loads=0.01))
    tokens = prompt(length)
    engine.save(tokens)
    batches = []
    forward = engine.model.forward
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", lambda *args: (batches.append(args[1]), forward(*args)))
        with restoring(engine, [tokens], policy=policy) as [restored]:
            check(engine, restored, objects(engine.store))
            assert restored.request.prefix <= length - 1
            stored = -(-restored.request.prefix // CHUNK)
            assert restored.request.stored == (True,) * stored
    assert all(batch.num_tokens > 0 for batch in batches)
    if policy == "load":
        assert [(batch.starts, batch.stops) for batch in batches] == [((restored.request.prefix,), (length,))]


@every_policy
def test_the_last_token_is_computed_in_place_and_not_taken_from_the_store(make_engine, policy):
    store = MemoryStore(1 << 30)
    engine = make_engine(store)
    tokens = prompt(2 * CHUNK)
    engine.save(tokens)
    text = cold_text(engine.model, tuple(tokens), 3)
    keys = engine._locator.locate(tokens, **engine._key_options)
    engine.store.release(keys.leased)
    last = store._objects[keys.keys.chunks[1]].payload.view(np.float32).reshape(LAYERS, 2, 2, CHUNK, 16)
    last[:, :, :, -1] = STALE
    with restoring(engine, [tokens], policy=policy) as [restored]:
        check(engine, restored)
        assert len(restored.session.pages) == 2 * CHUNK // PAGE
        assert [row[-1] for row in restored.session.plane.state] == [COMPUTED] * LAYERS
    [generated] = engine.generate([tokens], 3, policy=policy)  # goes on at position 16, not 17
    assert tuple(generated.tokens) == text


# Pages


def shuffle_pages(engine: Engine, seed: int = 0) -> None:
    """Let the pool give pages in random order, without neighbours where it can."""
    generator = random.Random(seed)
    allocate = engine.pages.allocate

    def shuffled(tokens: int) -> list[int] | None:
        count = engine.pages.pages_for(tokens)
        everything = allocate(engine.pages.free_pages * PAGE)
        assert everything is not None
        generator.shuffle(everything)
        engine.pages.release(everything[count:])
        if count > len(everything):
            engine.pages.release(everything)
            return None
        return everything[:count]

    engine.pages.allocate = shuffled


@every_policy
@pytest.mark.parametrize("stale", [STALE, float("nan")])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_permuted_pages_and_stale_ones_change_nothing(make_engine, family, stale, policy):
    engine = make_engine(model=decoder(family))
    shuffle_pages(engine)
    tokens = prompt(45)
    engine.save(tokens)
    saved = objects(engine.store)
    poison(engine, stale)
    with restoring(engine, [tokens, tokens, prompt(30, seed=5)], policy=policy) as batch:
        used = [page for restored in batch for page in restored.session.pages]
        assert len(set(used)) == len(used)  # the two that are equal share nothing
        assert used[:12] != sorted(used[:12])
        for restored in batch:
            check(engine, restored, saved)
        others = sorted(set(range(engine.pages.num_pages)) - set(used))
        for pool in (engine.pages.k, engine.pages.v):
            expected = torch.full_like(pool[:, others], stale)
            assert torch.equal(pool[:, others].nan_to_num(), expected.nan_to_num())


# Holes


@every_policy
@pytest.mark.parametrize("gone", [[0], [0, 1], [3], [7], [0, 2, 3, 6]], ids=str)
def test_holes_are_recomputed_in_place(make_engine, gone, policy):
    engine = make_engine()
    tokens = prompt(8 * CHUNK + 3)
    engine.save(tokens)
    saved = objects(engine.store)
    keys = engine._locator.locate(tokens, **engine._key_options)
    engine.store.release(keys.leased)
    engine.store.delete([keys.keys.chunks[i] for i in gone])
    with restoring(engine, [tokens], policy=policy) as [restored]:
        check(engine, restored, saved)
        assert restored.request.stored == tuple(i not in gone for i in range(8 if 7 not in gone else 7))
        if policy in ("load", "layerwise-load"):
            columns = [i for i, stored in enumerate(restored.request.stored) if stored]
            assert restored.timeline.summary([restored.request]).prefix["load"].cells == len(columns) * LAYERS
    engine.save(tokens)  # fills the holes
    assert objects(engine.store).keys() == saved.keys()


@every_policy
def test_a_store_too_small_for_the_text_gives_what_it_has(make_engine, policy):
    size = decoder().config.kv_bytes_per_token(torch.float32) * CHUNK
    engine = make_engine(MemoryStore(6 * size))
    tokens = prompt(8 * CHUNK + 2)
    engine.save(tokens[: 4 * CHUNK])
    with restoring(engine, [tokens[: CHUNK + 1]]):
        pass  # uses the head once more
    engine.save(tokens)
    saved = objects(engine.store)
    assert len(saved) == 6
    with restoring(engine, [tokens], policy=policy) as [restored]:
        check(engine, restored, saved)
        assert sum(restored.request.stored) > 0


# Saving


def test_saving_adds_what_is_not_there(make_engine):
    engine = make_engine()
    tokens = prompt(3 * CHUNK + PAGE + 1)
    token_bytes = engine.model.config.kv_bytes_per_token(torch.float32)
    saved = engine.save(tokens)
    assert (saved.chunks, saved.bytes, saved.refused) == (4, (3 * CHUNK + PAGE) * token_bytes, {})
    assert engine.save(tokens).chunks == 0
    assert engine.save(tokens[:-2]).chunks == 0  # the tail is not complete without its last token, the chunks are there
    assert engine.save(tokens + prompt(4, seed=1)).chunks == 1  # the chunk that the tail was the start of
    for key, cells in objects(engine.store).items():
        start, stop = _range_of(engine, tokens + prompt(4, seed=1), key)
        expected = cold(engine.model, (tokens + prompt(4, seed=1))[:stop])
        for kind, values in enumerate((expected.k, expected.v)):
            assert relative_norm(cells[:, kind].transpose(1, 2), values[:, start:stop]) <= FLOAT32_LOGITS


def _range_of(engine: Engine, tokens: list[int], key: str) -> tuple[int, int]:
    for length in range(1, len(tokens) + 1):
        for start, count, made in objects_of(engine, tokens[:length]):
            if made == key:
                return start, start + count
    raise AssertionError("an object of no part of the text")


def test_what_the_store_refuses_is_reported(make_engine):
    engine = make_engine(MemoryStore(100), costs=ToyCosts(decoder()))
    assert engine.save(prompt(2 * CHUNK)).refused == {"too-large": 2}


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-window"])
def test_cells_behind_every_window_are_neither_restored_nor_saved_unfilled(make_engine, family):
    engine = make_engine(model=decoder(family))
    tokens = prompt(10 * CHUNK)
    engine.save(tokens)
    saved = objects(engine.store)
    keys = engine._locator.locate(tokens, **engine._key_options)
    engine.store.release(keys.leased)
    for policy in POLICIES:
        poison(engine)
        engine.store.delete([keys.keys.chunks[0]])
        engine.generate([tokens], 9, policy=policy)
        for key, cells in objects(engine.store).items():
            assert cells.abs().max() < STALE / 2, "a cell that was never filled has been stored"
            if key in saved:
                assert relative_norm(cells, saved[key]) <= FLOAT32_LOGITS


# Generating


@every_policy
def test_the_next_turn_restores_all_that_was_generated(make_engine, policy):
    engine = make_engine()
    tokens = prompt(13, seed=2)
    for turn in range(3):
        [generated] = engine.generate([tokens], 7, policy=policy)
        assert tuple(generated.tokens) == cold_text(engine.model, tuple(tokens), 7)
        assert all(later.restored.session is None for later in [generated])
        known = (len(tokens) + 6) // PAGE * PAGE  # the last token generated has no KV yet
        tokens = tokens + generated.tokens + prompt(5, seed=10 + turn)
        poison(engine)
        with restoring(engine, [tokens], policy=policy) as [restored]:
            check(engine, restored, objects(engine.store))
            assert restored.request.prefix == known


def test_a_batch_is_continued_like_each_of_its_prompts(make_engine):
    engine = make_engine()
    prompts = [prompt(length, seed=length) for length in (1, 6, 16, 40, 16)]  # two are the same
    texts = [cold_text(engine.model, tuple(tokens), 6) for tokens in prompts]
    for _ in range(2):  # without anything stored, and with everything
        batch = engine.generate(prompts, 6)
        assert [tuple(generated.tokens) for generated in batch] == texts
    assert [tuple(engine.generate([tokens], 6)[0].tokens) for tokens in prompts] == texts
    assert [tuple(generated.tokens) for generated in engine.generate(prompts, 1)] == [text[:1] for text in texts]


def test_a_stop_token_ends_its_own_prompt_only(make_engine):
    engine = make_engine()
    prompts = [prompt(length, seed=length) for length in (6, 16, 40)]
    texts = [cold_text(engine.model, tuple(tokens), 6) for tokens in prompts]
    stop = texts[1][2]
    expected = [text[: text.index(stop) + 1] if stop in text else text for text in texts]
    assert {len(text) for text in expected} > {6}
    assert [tuple(g.tokens) for g in engine.generate(prompts, 6, stop_tokens=[stop])] == expected
    assert engine.generate(prompts[:1], 6, stop_tokens=[texts[0][0]])[0].tokens == [texts[0][0]]


def test_generating_without_saving_leaves_the_store_alone(make_engine):
    engine = make_engine()
    engine.generate([prompt(20)], 9, save=False)
    assert not objects(engine.store)


@every_policy
def test_several_tails_of_one_chunk(make_engine, policy):
    """The longest that fits is used, the leases on the others are given back too."""
    engine = make_engine(chunk_tokens=4 * PAGE)
    tokens = prompt(60)
    for length in (16, 5, 20, 24, 28):
        engine.save(tokens[:length])
    for length, prefix in ((17, 16), (20, 19), (21, 20), (26, 24), (60, 28)):
        with restoring(engine, [tokens[:length]], policy=policy) as [restored]:
            assert restored.request.prefix == prefix
            check(engine, restored, objects(engine.store))
            assert not engine.store.held


# What a stored chunk is good for


def test_kv_of_anything_else_is_a_miss(make_engine):
    """Namespaces, adapters, dtypes, weights, configurations: every pair but the equal ones shares nothing."""
    model = decoder()
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "again": {},
        "tenant": dict(namespace="tenant"),
        "adapter a": dict(adapter=b"a" * 32),
        "adapter b": dict(adapter=b"b" * 32),
        "adapter a, tenant": dict(adapter=b"a" * 32, namespace="tenant"),
        "bf16": dict(model=decoder("llama", torch.bfloat16)),
        "weights": dict(model=Decoder(config(), random_weights(config(), 1, torch.float32))),
        "rope": dict(model=Decoder(config(rope_theta=5e4), model.weights)),
        "eps": dict(model=Decoder(config(rms_norm_eps=1e-6), model.weights)),
        "window": dict(model=Decoder(config("mistral-window"), model.weights)),
        "chunks": dict(chunk_tokens=2 * CHUNK),
    }
    store = MemoryStore(1 << 30)
    engines = {name: make_engine(store, **options) for name, options in variants.items()}
    tokens = prompt(2 * CHUNK + 3)
    for name, engine in engines.items():
        assert engine.save(tokens).chunks == (0 if name == "again" else 1 if name == "chunks" else 2)
        with restoring(engine, [tokens]) as [restored]:
            assert restored.request.prefix == 2 * CHUNK
            check(engine, restored, objects(store))
            assert not restored.failures


def test_after_weights_changed_in_place_nothing_stored_before_is_met(make_engine):
    model = Decoder(config(), random_weights(config(), 5, torch.float32))
    engine = make_engine(model=model)
    tokens = prompt(20)
    engine.save(tokens)
    original = model.weights.layers[1].qkv_weight.clone()
    with torch.no_grad():
        model.weights.layers[1].qkv_weight.mul_(1.5)
    changed = Decoder(config(), model.weights)  # a new object: what was cold has changed too
    engine.invalidate()
    with restoring(engine, [tokens]) as [restored]:
        assert restored.request.prefix == 0
        assert relative_norm(restored.logits, cold(changed, tokens).logits) <= FLOAT32_LOGITS
    assert engine.save(tokens).chunks == 3
    with restoring(engine, [tokens], policy="load") as [restored]:
        assert restored.request.prefix == 19
        assert relative_norm(restored.logits, cold(changed, tokens).logits) <= FLOAT32_LOGITS
    with torch.no_grad():
        model.weights.layers[1].qkv_weight.copy_(original)
    engine.invalidate()
    with restoring(engine, [tokens], policy="load") as [restored]:  # what the very same weights made is good again
        assert restored.request.prefix == 19
        check(engine, restored, objects(engine.store))


# Budgets


@every_policy
@pytest.mark.parametrize(
    ("family", "token_budget", "hidden_tokens"),
    [("llama", 1, 0), ("llama", 1000, 8), ("qwen2-window", 5, 20), ("llama", 20, 20), ("qwen2-window", 1000, 0)],
)
def test_budgets_change_nothing_but_the_order(make_engine, monkeypatch, family, token_budget, hidden_tokens, policy):
    model = decoder(family)
    engine = make_engine(
        model=model, hidden_tokens=hidden_tokens, token_budget=token_budget, costs=ToyCosts(model, loads=2)
    )
    prompts = [prompt(60), prompt(41, seed=1), prompt(9, seed=2)]
    for tokens in prompts[:2]:
        engine.save(tokens[:-4])
    most_held = 0
    sessions = engine._sessions
    prepare = sessions.prepare

    def watched(op: Op) -> Any:
        nonlocal most_held
        prepared = prepare(op)
        held = sum(session.plane.held_tokens for session in sessions._by_id.values())
        assert len(sessions.hidden.states) - sessions.hidden._rows.free == held
        most_held = max(most_held, held)
        for part in op.parts:
            boundaries = sessions[part.request].plane.request.boundaries
            widest = max(stop - start for start, stop in pairwise(boundaries))
            assert part.tokens <= max(token_budget, widest)
        return prepared

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "prepare", watched)
        with restoring(engine, prompts, policy=policy) as batch:
            for restored in batch:
                check(engine, restored, objects(engine.store))
    if policy != "recompute":  # which computes as a repair does: what must be, whatever the budget
        suffixes = sum(restored.request.tokens - restored.request.prefix for restored in batch)
        assert most_held <= hidden_tokens + suffixes


# Steady state


class Gathers(Policy):
    """Loads what it can of all requests in as few fetches as fit the limit, `band` layers at a time, from the last
    column on; whatever is short comes together."""

    band = 1

    def next_compute(self, now: float) -> Op | None:
        return next(filter(None, map(self.repair, self.active())), None)

    def next_fetch(self, now: float) -> Op | None:
        for bottom in range(0, LAYERS, self.band):
            layers = range(bottom, min(bottom + self.band, LAYERS))
            parts: list[Part] = []
            left = self.staging_cells // len(layers)
            for plane in self.active():
                for column in reversed(range(plane.prefix_columns)):
                    width = plane.request.width(column)
                    if width <= left and all(plane.loadable(column, layer) for layer in layers):
                        parts.append(plane.part(column, column + 1))
                        left -= width
            if parts:
                return Op(FETCH, layers, tuple(parts))
        return None


@pytest.mark.parametrize("band", [1, 2, 3])
@pytest.mark.parametrize(("page", "chunk"), [(1, 8), (3, 24), (4, 8), (4, 128)])
def test_a_fetch_of_many_short_columns_fits_its_staging(make_engine, monkeypatch, page, chunk, band):
    monkeypatch.setattr(Gathers, "band", band)
    engine = make_engine(page_size=page, chunk_tokens=chunk, cache_tokens=1024)
    shortest = max(2, page)
    prompts = [prompt(shortest, seed=seed) for seed in range(40)] + [prompt(n, seed=n) for n in (3, 17, 100, 129)]
    for tokens in prompts:
        engine.save(tokens)  # with it the last token of the shortest, which their column leaves out
    saved = objects(engine.store)
    poison(engine)
    with restoring(engine, prompts, policy=f"{__name__}:Gathers") as batch:
        sources = Counter()
        for restored in batch:
            sources += check(engine, restored, saved)
            assert not restored.failures
        fetches = [span.op for span in batch[0].timeline.spans if span.op.kind == FETCH]
        most = engine.staging_cells
        assert sources["computed"] == 0 and max(op.tokens * len(op.layers) for op in fetches) > 0.6 * most
        assert max(len(op.parts) for op in fetches) >= min(40, most // band // shortest)


def test_a_second_restore_allocates_no_pages_staging_or_threads(make_engine):
    engine = make_engine()
    tokens = prompt(60)
    engine.generate([tokens], 5)

    def owned() -> list[object]:
        executor, hidden = engine._executor, engine._sessions.hidden
        buffers = sorted(buffer.host.data_ptr() for buffer in executor._buffers)
        pools = [engine.pages.k.data_ptr(), engine.pages.v.data_ptr(), hidden.states.data_ptr()]
        threads = sorted(thread.ident for thread in threading.enumerate() if thread.name.startswith("cacheflow"))
        return [executor, buffers, pools, threads]

    before = owned()
    for policy in [*POLICIES, *POLICIES]:
        with restoring(engine, [tokens], policy=policy):
            pass
        engine.generate([tokens + prompt(3)], 3, policy=policy)
    assert owned() == before


def test_closing_ends_all_threads_and_may_be_repeated(make_engine):
    before = set(threading.enumerate())
    with make_engine() as engine:
        engine.save(prompt(20))
        started = set(threading.enumerate()) - before
        assert {thread.name for thread in started} >= {"cacheflow-compute", "cacheflow-copy", "cacheflow-store"}
    for thread in started:
        thread.join(5)
        assert not thread.is_alive()
    engine.close()


def test_restores_overlap_recompute_with_loads_and_say_so(make_engine):
    engine = make_engine(costs=ToyCosts(decoder()))
    tokens = prompt(100)
    engine.save(tokens)
    with restoring(engine, [tokens], policy="token") as [restored]:
        kinds = Counter(span.op.kind for span in restored.timeline.spans)
        assert kinds[COMPUTE] > 1 and kinds[FETCH] > 1 and kinds[COPY] == kinds[FETCH]
        assert restored.lookup_seconds > 0
        summary = restored.timeline.summary([restored.request])
        loaded = sum(row.count(LOADED) for row in restored.session.plane.state)
        assert summary.prefix["load"].cells == loaded
        assert summary.prefix["compute"].cells == restored.request.layers * len(restored.request.stored) - loaded
        assert restored.timeline.critical_path() <= restored.ttft


def test_a_store_may_be_given_by_its_name(tmp_path):
    options: dict[str, Any] = dict(chunk_tokens=CHUNK, page_size=PAGE, costs=ToyCosts(decoder()))
    with Engine(decoder(), open_store(tmp_path / "kv"), **options) as engine:
        engine.save(prompt(20))
        engine.store.close()
    with Engine(decoder(), f"disk:{tmp_path}/kv", **options) as engine:
        with restoring(engine, [prompt(20)]) as [restored]:
            check(engine, restored, objects(engine.store))
            assert restored.request.prefix == 19
        engine.store.close()


def test_a_command_goes_on_from_what_was_learned_over_the_costs_it_is_given(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("cacheflow.costs.measure.REPEATS", (1, 1))
    monkeypatch.setattr(Decoder, "from_folder", classmethod(lambda cls, *args: decoder()))
    path = tmp_path / "costs.json"
    assert cli.main(["measure", "--model", "toy", "--tokens", "64", "--learn", "1", "--out", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["learned"]
    kept = beside(path).read_text()
    args = Namespace(store="memory:1MiB", device="cpu", dtype="float32", backend=None, costs=str(path))
    with common.engine(args, tmp_path) as engine:
        assert isinstance(engine.costs, Learned) and engine.learned is engine.costs
        known = {row.kind: vars(row) for row in engine.learned.accuracy()}
        assert [known[row["kind"]]["ops"] for row in rows] == [row["ops"] for row in rows]
        assert known["advance"] == rows[0]  # the store is another, and its speed is learned anew
        before = sum(row["ops"] for row in rows)
        with restoring(engine, [prompt(100)]):
            assert sum(row.ops for row in engine.learned.accuracy()) > before
    assert beside(path).read_text() == kept
    with common.engine(args, tmp_path, learn=False) as engine:
        assert isinstance(engine.costs, Measured)
    beside(path).write_text(kept.replace(json.dumps(this_machine()), '"another"'))
    with (
        pytest.raises(ValueError, match=r"costs\.learned\.json was learned on 'another', .*; delete it"),
        common.engine(args, tmp_path),
    ):
        pass
    beside(path).unlink()
    with common.engine(args, tmp_path) as engine:
        assert isinstance(engine.costs, Measured) and engine.learn


def test_a_prompt_with_a_deadline_is_served_first(make_engine):
    engine = make_engine(policy="pipelined")
    prompts = [prompt(20), prompt(60, seed=1)]
    for deadlines, first in ((None, 0), ([None, 100.0], 1)):
        with restoring(engine, prompts, deadlines=deadlines) as batch:
            assert min(batch, key=lambda restored: restored.ttft) is batch[first]
            for restored in batch:
                check(engine, restored)
