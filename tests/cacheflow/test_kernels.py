"""The whole engine through the Triton kernels, under the interpreter, on small shapes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from cacheflow.engine import Engine
from cacheflow.policies import available
from cacheflow.stores import MemoryStore
from kernels import backend
from models.decoder import Decoder
from models.weights import random_weights
from tests.cacheflow.toy import ToyCosts, check, cold, config, objects, objects_of, poison, prompt, restoring
from tests.interpreter import VARIABLE, load_kernels
from tests.models.checkpoints import make_checkpoint
from tests.tolerances import FLOAT32_LOGITS, relative_norm

load_kernels()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


@cache
def kernels_decoder(family: str, layers: int) -> Decoder:
    shape = config(family, num_hidden_layers=layers)
    return Decoder(shape, random_weights(shape, 0, torch.float32), backend("triton", "cpu"))


@cache
def reference(model: Decoder) -> Decoder:
    return Decoder(model.config, model.weights)


@pytest.mark.parametrize("policy", available())
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "qwen3"])
def test_a_restored_prompt_equals_its_cold_run(make_engine, family, policy):
    """By the same kernels, cell by cell, and by the reference."""
    model = kernels_decoder(family, layers=2)
    engine = make_engine(model=model, costs=ToyCosts(model, loads=0.7))
    assert engine.model.ops.NAME == "triton"
    tokens = prompt(36)
    engine.save(tokens[:33])
    engine.store.delete([objects_of(engine, tokens)[1][2]])  # a hole
    saved = objects(engine.store)
    poison(engine, float("nan"))
    with restoring(engine, [tokens], policy=policy) as [restored]:
        sources = check(engine, restored, saved)
        assert not restored.failures
        assert relative_norm(restored.logits, cold(reference(model), tokens).logits) <= FLOAT32_LOGITS
    if policy in ("load", "layerwise-load", "token"):
        assert sources["loaded"]


def test_generating_through_the_kernels_gives_the_text_of_the_reference(make_engine):
    model = kernels_decoder("llama", layers=2)
    texts = []
    for decoder in (model, reference(model)):
        engine = make_engine(model=decoder, costs=ToyCosts(decoder))
        texts.append([g.tokens for g in engine.generate([prompt(19), prompt(9, seed=1)], 4)])
    assert texts[0] == texts[1]


def test_an_engine_takes_its_backend_by_name(tmp_path, monkeypatch):
    folder = make_checkpoint("llama", "default", tmp_path).folder
    store = MemoryStore(1 << 20)
    for name, expected in ((None, "reference"), ("reference", "reference"), ("triton", "triton")):
        with Engine(folder, store, backend=name) as engine:
            assert expected == engine.model.ops.NAME
    with pytest.raises(ValueError, match="there is no backend 'cutlass'; choose from reference, triton"):
        Engine(folder, store, backend="cutlass")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before Python starts"):
        Engine(folder, store, backend="triton")
