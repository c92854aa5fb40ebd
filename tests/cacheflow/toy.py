"""A toy model, what it gives without a store, and what must be true of everything an engine restores of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from cacheflow import saving
from cacheflow.costs.base import Costs, LayerWork, ModelShape
from cacheflow.engine import Engine
from cacheflow.op import FETCH
from cacheflow.plane import COMPUTED, LOADED
from cacheflow.results import Restored
from cacheflow.stores import ChunkInfo, Read, Store, StoreWrapper
from kernels.batch import Part, RaggedBatch
from models.config import ModelConfig
from models.decoder import Decoder
from models.weights import Weights, random_weights
from tests.tolerances import FLOAT32_LOGITS, relative_norm

PAGE, CHUNK, LAYERS, VOCAB = 4, 8, 3, 97
STALE = 1e4  # what lies in pages that nobody has written yet

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-1-layer": ("Llama", dict(num_hidden_layers=1)),
    "mistral-window": ("Mistral", dict(sliding_window=11)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=11, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
}


def config(family: str = "llama", **changes: Any) -> ModelConfig:
    name, options = FAMILIES[family]
    return ModelConfig.from_dict(
        {
            "architectures": [f"{name}ForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 88,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            **options,
            **changes,
        }
    )


@cache
def weights(family: str, dtype: torch.dtype, seed: int = 0) -> Weights:
    return random_weights(config(family), seed, dtype)


@cache
def decoder(family: str = "llama", dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(config(family), weights(family, dtype))


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Cold:
    """Without a store. logits: [vocab]. k, v: [layers, tokens, kv_heads, head_dim]."""

    logits: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def token(self) -> int:
        return int(self.logits.argmax())


def cold(model: Decoder, tokens: Sequence[int]) -> Cold:
    return _cold(model, tuple(tokens))


@cache
def _cold(model: Decoder, tokens: tuple[int, ...]) -> Cold:
    shape = model.config
    count = -(-len(tokens) // PAGE)
    pages = torch.full((2, shape.num_layers, count, PAGE, shape.kv_heads, shape.head_dim), float("nan")).to(model.dtype)
    hidden = model.embed(torch.tensor(tokens))
    batch = RaggedBatch.build([Part(0, len(tokens), list(range(count)), True, 1)], PAGE)
    model.forward(range(shape.num_layers), batch, hidden, list(zip(*pages, strict=True)))
    k, v = pages.flatten(2, 3)[:, :, : len(tokens)]
    return Cold(model.logits(hidden[-1:])[0], k, v)


@cache
def cold_text(model: Decoder, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Greedy continuation, every token by a prefill of its own. Raises where two tokens are too close to tell apart."""
    text: tuple[int, ...] = ()
    for _ in range(count):
        logits = cold(model, tokens + text).logits
        best, second = logits.double().topk(2).values.tolist()
        rounding = FLOAT32_LOGITS * float(logits.double().norm())
        assert best - second > 2 * rounding, "choose another seed: this margin is within rounding"
        text += (int(logits.argmax()),)
    return text


class ToyCosts(Costs):
    """A chunk takes as long to load as to compute, so that a policy has reason to do both.

    loads: how many times slower the link is than that.
    """

    project_marginal, advance_marginal, pair_marginal, compute_fixed = 4e-6, 16e-6, 0.0, 1e-4

    def __init__(self, model: Decoder, loads: float = 1.0) -> None:
        shape = ModelShape.of(model.config, model.dtype.itemsize)
        per_cell = self.project_marginal + self.advance_marginal
        super().__init__(shape, bandwidth=shape.cell_bytes / (per_cell * loads))

    def layer_seconds(self, work: LayerWork) -> float:
        return work.project * self.project_marginal + work.advance * self.advance_marginal

    def head_seconds(self, tokens: int) -> float:
        return 0.0


class LeaseBook(StoreWrapper):
    """Counts leases from outside. A lease given back that nobody took is a mistake that a store would hide."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def lookup(self, keys: Sequence[str]) -> list[ChunkInfo | None]:
        found = self.store.lookup(keys)
        with self._lock:
            self.held.update(key for key, info in zip(keys, found, strict=False) if info is not None)
        return found

    def release(self, keys: Sequence[str]) -> None:
        with self._lock:
            self.held.subtract(keys)
            assert all(count >= 0 for count in self.held.values()), "a lease was given back twice"
            self.held = +self.held
        self.store.release(keys)


def poison(engine: Engine, value: float = STALE) -> None:
    """As if other requests had left something behind in every page."""
    assert engine.pages.free_pages == engine.pages.num_pages
    engine.pages.k.fill_(value)
    engine.pages.v.fill_(value)


def cells(engine: Engine, restored: Restored, start: int, stop: int) -> torch.Tensor:
    """What is in a prompt's pages: [2, layers, tokens, kv_heads, head_dim]."""
    assert restored.session is not None
    slots = engine.pages.slots(restored.session.pages, start, stop)
    return torch.stack([pool.flatten(1, 2)[:, slots] for pool in (engine.pages.k, engine.pages.v)])


def objects(store: Store) -> dict[str, torch.Tensor]:
    """Everything in a store, by key: [layers, 2, kv_heads, tokens, head_dim]."""
    found = {}
    for entry in store.entries():
        layout = entry.layout
        assert layout is not None
        payload = np.zeros(layout.nbytes, dtype=np.uint8)
        [result] = store.read([Read.whole(entry.key, layout, payload)])
        assert result.ok
        shape = (layout.layers, 2, layout.kv_heads, layout.tokens, layout.parts[0].width)
        found[entry.key] = torch.from_numpy(payload).view(getattr(torch, layout.parts[0].dtype)).view(shape)
    return found


def check(engine: Engine, restored: Restored, saved: dict[str, torch.Tensor] | None = None) -> Counter[str]:
    """Assert that a prompt is as if it had been computed cold: logits, token and every filled cell; what was loaded has
    the very bits of `saved`. Returns how many (column, layer) cells of the prefix came from where."""
    assert restored.session is not None and restored.logits is not None
    plane, request = restored.session.plane, restored.request
    expected = cold(engine.model, restored.tokens.tolist())
    exact = engine.model.dtype == torch.float32
    assert restored.first_token == int(restored.logits.argmax())
    if exact:
        assert relative_norm(restored.logits, expected.logits) <= FLOAT32_LOGITS
        assert restored.first_token == expected.token
    assert 0 < restored.ttft < 60
    assert request.prefix < request.tokens == len(restored.tokens)
    sources: Counter[str] = Counter()
    for column in range(request.columns):
        start, stop = request.boundaries[column : column + 2]
        found = cells(engine, restored, start, stop)
        chunk = restored.located.chunks[column] if column < plane.prefix_columns else None
        for layer in range(request.layers):
            state = plane.state[layer][column]
            if state == LOADED:
                assert chunk is not None
                if saved is not None:
                    bits = saved[chunk.key][layer, :, :, : stop - start].transpose(1, 2)
                    assert torch.equal(found[:, layer], bits), f"loaded cell ({column}, {layer}) has other bits"
            elif state != COMPUTED:
                assert not plane.needed(column, layer), f"needed cell ({column}, {layer}) was never filled"
                continue
            if exact:
                for kind, values in enumerate((expected.k, expected.v)):
                    assert relative_norm(found[kind, layer], values[layer, start:stop]) <= FLOAT32_LOGITS
            if column < plane.prefix_columns:
                sources["loaded" if state == LOADED else "computed"] += 1
    return sources


@contextmanager
def restoring(engine: Engine, prompts: Sequence[Sequence[int]], **options: Any) -> Iterator[list[Restored]]:
    """restore, and release whatever happens."""
    batch = engine.restore(prompts, **options)
    try:
        yield batch
    finally:
        for restored in batch:
            engine.release(restored)


def assert_nothing_held(engine: Engine) -> None:
    """Between two calls an engine holds no page, hidden row, lease, staging buffer or session."""
    assert engine.pages.free_pages == engine.pages.num_pages
    sessions, executor = engine._sessions, engine._executor
    assert sessions.hidden._rows.free == len(sessions.hidden.states)
    assert not sessions._by_id
    if isinstance(engine.store, LeaseBook):  # a look-up that was given up gives its leases back when it returns
        assert eventually(lambda: not engine.store.held)
    if executor is not None:
        assert not executor._fetches and not executor._copied
        assert eventually(lambda: executor.can_take(FETCH) and not executor._hanging)
        assert sorted(map(id, executor._buffers)) == sorted(map(id, executor._staging))


def eventually(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.001)
    return true()


def objects_of(engine: Engine, tokens: list[int]) -> list[tuple[int, int, str]]:
    """(first token, tokens, key) of every object that the engine would store of a text."""
    return saving.objects(tokens, engine._key_options)
