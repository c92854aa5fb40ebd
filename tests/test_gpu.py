"""What only a GPU can show: restoring there, without a synchronisation or an allocation. `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cacheflow.engine import Engine
from cacheflow.policies import available
from cacheflow.stores import Link, MemoryStore
from kernels import backend
from models.config import ModelConfig
from models.decoder import Decoder
from models.weights import Weights, random_weights
from tests.tolerances import relative_norm

pytestmark = pytest.mark.gpu

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
PREFIX, SUFFIX, CHUNK = 2048 - 64, 40, 256
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of logits, relative norm; guesses


def weights(dtype: torch.dtype, device: str) -> Weights:
    return random_weights(ModelConfig.from_dict(SHAPE), 0, dtype, device)


@contextmanager
def engine(dtype: torch.dtype) -> Iterator[Engine]:
    model = Decoder(ModelConfig.from_dict(SHAPE), weights(dtype, "cuda"), backend("triton", "cuda"))
    with Engine(model, Link(MemoryStore(1 << 30), gbps=1.0), chunk_tokens=CHUNK) as made:
        made.warmup()
        made.pages.k.fill_(float("nan"))
        made.pages.v.fill_(float("nan"))
        yield made


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(1000, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_policy_gives_the_logits_of_the_reference(dtype):
    tokens = prompt(PREFIX + SUFFIX)
    shape = ModelConfig.from_dict(SHAPE)
    reference = Decoder(shape, weights(torch.float32, "cpu"))
    with Engine(reference, MemoryStore(1 << 30), chunk_tokens=CHUNK, policy="recompute") as cold:
        [expected] = cold.restore([tokens])
        cold.release(expected)
    with engine(dtype) as warm:
        warm.save(tokens[:PREFIX])
        for policy in available():
            [restored] = warm.restore([tokens], policy=policy)
            warm.release(restored)
            assert not restored.failures
            assert relative_norm(restored.logits, expected.logits) <= TOLERANCE[dtype], policy
            loaded = any(span.op.kind == "copy" for span in restored.timeline.spans)
            assert loaded == (policy != "recompute")


@pytest.mark.parametrize("policy", available())
def test_the_steady_state_neither_synchronises_nor_allocates(policy):
    tokens = prompt(PREFIX + SUFFIX)
    with engine(torch.bfloat16) as warm:
        warm.save(tokens[:PREFIX])
        for _ in range(2):  # the allocators have seen every size after this
            for restored in warm.restore([tokens], policy=policy):
                warm.release(restored)
        before = torch.cuda.memory_stats()["num_device_alloc"]
        torch.cuda.set_sync_debug_mode("error")  # any operation that waits for the device raises
        try:
            [restored] = warm.restore([tokens], policy=policy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        warm.release(restored)
        assert restored.first_token is not None and not restored.failures
        assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_generating_and_saving_go_through_the_gpu():
    with engine(torch.float32) as warm:
        tokens = prompt(300)
        [first] = warm.generate([tokens], 24)
        turn = tokens + first.tokens + prompt(9, seed=1)
        [restored] = warm.restore([turn], policy="load")
        warm.release(restored)
        assert restored.request.prefix == (300 + 23) // 16 * 16 and not restored.failures
        [cold] = warm.restore([turn], policy="recompute")
        warm.release(cold)
        assert relative_norm(restored.logits, cold.logits) <= TOLERANCE[torch.float32]
