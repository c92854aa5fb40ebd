"""A real model through the whole engine, against Transformers' own forward pass and greedy decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheflow import demo_model, policies
from cacheflow.costs.base import ModelShape
from cacheflow.costs.roofline import Roofline, device
from cacheflow.demo import license_text
from cacheflow.engine import Engine
from cacheflow.stores import DiskStore, Link
from cacheflow.text import Tokenizer
from models.decoder import Decoder
from tests.tolerances import FLOAT32_LOGITS, relative_norm

NEW_TOKENS = 64
PREFIX = 300  # two chunks of 128 and a tail
QUESTION = "\n\nIn short, the License"
GBPS = 0.5


@pytest.fixture(scope="module")
def model() -> demo_model.DemoModel:
    made = demo_model.ensure()
    if not made.tokenizer:
        pytest.skip(made.label)  # without a network, for one
    return made


@pytest.fixture(scope="module")
def prompt(model: demo_model.DemoModel) -> list[int]:
    tokenizer = Tokenizer.of(model.folder)
    return tokenizer.encode(license_text())[:PREFIX] + tokenizer.encode(QUESTION)


@pytest.fixture(scope="module")
def theirs(model: demo_model.DemoModel) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def decoder(model: demo_model.DemoModel) -> Decoder:
    return Decoder.from_folder(model.folder, torch.float32)


@pytest.fixture(scope="module")
def their_logits(theirs: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return theirs(torch.tensor([prompt])).logits[0, -1]


@pytest.fixture(scope="module")
def their_tokens(theirs: Any, prompt: list[int]) -> list[int]:
    """Greedy, up to the first step at which two tokens are so close that the order of a sum could decide."""
    with torch.inference_mode():
        out = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    for step, logits in enumerate(out.logits):
        best, second = logits[0].topk(2).values.tolist()
        assert best - second > 10 * FLOAT32_LOGITS * float(logits.norm()) / logits.numel() ** 0.5, f"a tie at {step}"
    return out.sequences[0, len(prompt) :].tolist()


def test_capital_of_france(model: demo_model.DemoModel, decoder: Decoder, tmp_path: Path) -> None:
    tokenizer = Tokenizer.of(model.folder)
    with Engine(decoder, DiskStore(tmp_path), chunk_tokens=128, costs=costs(decoder)) as engine:
        [generated] = engine.generate([tokenizer.encode("The capital of France is")], 2)
    assert tokenizer.decode(generated.tokens) == " Paris."


@pytest.mark.parametrize("policy", policies.available())
def test_restored_like_transformers(
    policy: str,
    decoder: Decoder,
    prompt: list[int],
    their_logits: torch.Tensor,
    their_tokens: list[int],
    tmp_path: Path,
) -> None:
    """Logits and 64 greedy tokens, with compute and link so matched that both sides of a policy have work."""
    store = Link(DiskStore(tmp_path), GBPS)
    with Engine(decoder, store, chunk_tokens=128, policy=policy, costs=costs(decoder)) as engine:
        engine.save(prompt[:PREFIX])
        [generated] = engine.generate([prompt], NEW_TOKENS)
    restored = generated.restored
    assert restored.request.stored == (True, True, True)
    assert not restored.failures
    assert restored.logits is not None
    assert relative_norm(restored.logits, their_logits) <= FLOAT32_LOGITS
    assert generated.tokens == their_tokens
    kinds = {span.op.kind for span in restored.timeline.spans}
    assert kinds == {"compute", "save"} | ({"fetch", "copy"} if policy != "recompute" else set())


def costs(decoder: Decoder) -> Roofline:
    cpu = device("cpu", gemm=1e11, attention=1e11, memory=1e10, host=1e10)
    return Roofline(ModelShape.of(decoder.config, 4), cpu, bandwidth=GBPS * 1e9 / 8)
