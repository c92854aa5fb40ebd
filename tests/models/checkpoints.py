"""Small Transformers models of every supported family, with no weight left at a value that hides a mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kernels.batch import Part, RaggedBatch
from models.decoder import Decoder

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=88,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", dict(attention_bias=True, mlp_bias=True, head_dim=24)),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "mistral-window": ("Mistral", dict(sliding_window=9)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=9, max_window_layers=2)),
    "qwen3": ("Qwen3", dict(head_dim=24)),
    "qwen3-window": (
        "Qwen3",
        dict(
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
}
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
ROPES: dict[str, dict[str, Any]] = {
    "default": dict(rope_type="default", rope_theta=5000.0),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=2.5),
    "llama3": dict(LLAMA3, rope_theta=10000.0),
    "yarn": dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32),
    "yarn-mscale": dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=48,
        mscale=1.2,
        mscale_all_dim=0.7,
        beta_fast=16.0,
        beta_slow=2.0,
        truncate=False,
    ),
    "yarn-attention-factor": dict(
        rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=64, attention_factor=0.8
    ),
}


@dataclass
class Checkpoint:
    """A Transformers model and the folder it was saved to."""

    folder: Path
    model: transformers.PreTrainedModel

    def decoder(self, dtype: torch.dtype = torch.float32, **how: Any) -> Decoder:
        return Decoder.from_folder(self.folder, dtype, **how)

    def logits(self, token_ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[n, vocab] by Transformers."""
        model = self.model
        if dtype != torch.float32:  # loaded anew: `model.to(dtype)` would round the rotary frequencies as well
            model = type(model).from_pretrained(self.folder, dtype=dtype, attn_implementation="eager")
        with torch.no_grad():
            return model(token_ids[None]).logits[0]


def perturb(model: torch.nn.Module, seed: int = 0) -> None:
    """Norms around 1, biases around 0.3, matrices that keep activations near 1; all exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                values = 1 + 0.2 * values
            elif name.endswith(".bias"):
                values = 0.3 * values
            else:
                values = values * parameter.shape[-1] ** -0.5
            parameter.copy_(values.to(torch.bfloat16))


def make_checkpoint(family: str, rope: str, folder: Path) -> Checkpoint:
    """Builds the model of a family with a rope and saves it to `folder`."""
    name, overrides = FAMILIES[family]
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(**{**SHAPE, **overrides, "rope_parameters": dict(ROPES[rope])})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    perturb(model)
    model.save_pretrained(folder)
    return Checkpoint(folder=folder, model=model)


def random_tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (n,), generator=torch.Generator().manual_seed(seed))


def new_pages(decoder: Decoder, num_pages: int, page_size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pages full of NaN for every layer."""
    config = decoder.config
    shape = (num_pages, page_size, config.kv_heads)
    return [
        (
            torch.full((*shape, config.head_dim), float("nan"), dtype=decoder.dtype),
            torch.full((*shape, config.v_head_dim), float("nan"), dtype=decoder.dtype),
        )
        for _ in range(config.num_layers)
    ]


def one_pass(
    decoder: Decoder, token_ids: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
    """A whole prompt through all layers on permuted pages: logits [n, vocab], pages and page ids."""
    count = -(-len(token_ids) // 4)
    ids = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))[:count].tolist()
    pages = new_pages(decoder, count + 2)
    hidden = decoder.embed(token_ids)
    batch = RaggedBatch.build([Part(0, len(token_ids), ids)], page_size=4)
    decoder.forward(range(decoder.config.num_layers), batch, hidden, pages)
    return decoder.logits(hidden), pages, ids
