"""Weights of a decoder: read from safetensors into fused matrices, or drawn at random."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from models.config import ModelConfig

_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer's weights, all of one dtype; a bias or norm that the model lacks is None.

    input_norm, post_norm: [hidden]; before attention and before the MLP.
    qkv_weight: [heads * head_dim + kv_heads * (head_dim + v_head_dim), hidden], rows Q, K, V; qkv_bias: [its rows].
    q_norm, k_norm: [head_dim].
    o_weight: [hidden, heads * v_head_dim]; o_bias: [hidden].
    gate_up_weight: [2 * intermediate, hidden], gate first; gate_up_bias: [2 * intermediate].
    down_weight: [hidden, intermediate]; down_bias: [hidden].
    """

    input_norm: torch.Tensor
    qkv_weight: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_weight: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up_weight: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_weight: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Weights:
    """embedding: [vocab, hidden]; norm: [hidden], the last one; lm_head: [vocab, hidden], the embedding itself if
    tied; layers: one `LayerWeights` per layer."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor


def load_weights(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Weights:
    """Reads `model.safetensors`, or the files named in its index, converting each tensor on the way into its place:
    beside the result, never more than one tensor is held (two if a tied lm_head was saved as well).

    Raises ValueError for a missing or damaged file, and for a tensor that is missing, unexpected, misshapen or not
    stored as a plain float.
    """
    weights = _allocate(config, dtype, device)
    places = dict(_places(config, weights))
    tied_copy = None
    for path in checkpoint_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in sorted(file.keys()):
                    if name.endswith("rotary_emb.inv_freq"):  # in old Llama 2 checkpoints; computed here
                        continue
                    if config.tie_embeddings and name == "lm_head.weight":
                        tied_copy = file.get_tensor(name)
                        continue
                    _fill(path, name, file.get_tensor(name), places)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read {path} ({error}); download the checkpoint again") from error
    if places:
        raise ValueError(f"{folder} lacks {len(places)} tensors, first {next(iter(places))}; download it again")
    if tied_copy is not None and not torch.equal(tied_copy.to(weights.embedding), weights.embedding):
        raise ValueError(
            f"{folder} has an lm_head.weight unlike its embedding although tie_word_embeddings is true; set it to false"
        )
    return weights


def random_weights(config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Weights:
    """Weights that keep activations near 1 through any depth; equal for equal seeds up to rounding to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    weights = _allocate(config, dtype, device)
    for name, place in _places(config, weights):
        values = torch.randn(place.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith(".bias"):
            values = 0.1 * values
        else:
            values = values * place.shape[-1] ** -0.5
        place.copy_(values)
    return weights


def checkpoint_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint in name order. Raises ValueError if one is missing."""
    folder = Path(folder)
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"cannot read a weight_map from {index}; download the checkpoint again") from error
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {missing[0]}; give the folder of a checkpoint in safetensors format")
    return [folder / name for name in names]


def fingerprint_files(folder: str | Path) -> str:
    """SHA-256 (hex) over names and contents of `config.json` and the safetensors files, in name order; equal on every
    machine. Within a process a file is read again only if its size or modification time has changed. Raises
    ValueError if a file is missing."""
    config = Path(folder) / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} has no config.json; give the folder of a checkpoint")
    digest = hashlib.sha256()
    for path in [config, *checkpoint_files(folder)]:
        status = path.stat()
        name = path.name.encode()
        digest.update(struct.pack("<Q", len(name)) + name)
        digest.update(_file_digest(path.resolve(), status.st_size, status.st_mtime_ns))
    return digest.hexdigest()


def weights_digest(weights: Weights) -> str:
    """SHA-256 (hex) over the values of all weights, for those that no file stands for: drawn at random, or changed in
    place. Reads every weight, on a GPU through the host."""
    digest = hashlib.sha256()
    for name, tensor in _named_tensors(weights):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _named_tensors(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield from (("embedding", weights.embedding), ("norm", weights.norm), ("lm_head", weights.lm_head))
    for index, layer in enumerate(weights.layers):
        for name, tensor in vars(layer).items():
            if tensor is not None:
                yield f"{index}.{name}", tensor


@lru_cache(maxsize=1024)
def _file_digest(path: Path, size: int, modified: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Weights:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def optional(present: bool, *shape: int) -> torch.Tensor | None:
        return tensor(*shape) if present else None

    hidden, intermediate = config.hidden_size, config.intermediate_size
    qkv = config.heads * config.head_dim + config.kv_heads * (config.head_dim + config.v_head_dim)
    embedding = tensor(config.vocab_size, hidden)
    layers = tuple(
        LayerWeights(
            input_norm=tensor(hidden),
            qkv_weight=tensor(qkv, hidden),
            qkv_bias=optional(config.qkv_bias, qkv),
            q_norm=optional(config.qk_norm, config.head_dim),
            k_norm=optional(config.qk_norm, config.head_dim),
            o_weight=tensor(hidden, config.heads * config.v_head_dim),
            o_bias=optional(config.o_bias, hidden),
            post_norm=tensor(hidden),
            gate_up_weight=tensor(2 * intermediate, hidden),
            gate_up_bias=optional(config.mlp_bias, 2 * intermediate),
            down_weight=tensor(hidden, intermediate),
            down_bias=optional(config.mlp_bias, hidden),
        )
        for _ in range(config.num_layers)
    )
    lm_head = embedding if config.tie_embeddings else tensor(config.vocab_size, hidden)
    return Weights(embedding=embedding, layers=layers, norm=tensor(hidden), lm_head=lm_head)


def _places(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint by its Hugging Face name, as the view of the fused matrix where it belongs."""
    yield "model.embed_tokens.weight", weights.embedding
    qkv_rows = [config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.v_head_dim]
    for index, layer in enumerate(weights.layers):
        for name, fused, rows in (
            ("input_layernorm.weight", layer.input_norm, None),
            ("self_attn.{q,k,v}_proj.weight", layer.qkv_weight, qkv_rows),
            ("self_attn.{q,k,v}_proj.bias", layer.qkv_bias, qkv_rows),
            ("self_attn.q_norm.weight", layer.q_norm, None),
            ("self_attn.k_norm.weight", layer.k_norm, None),
            ("self_attn.o_proj.weight", layer.o_weight, None),
            ("self_attn.o_proj.bias", layer.o_bias, None),
            ("post_attention_layernorm.weight", layer.post_norm, None),
            ("mlp.{gate,up}_proj.weight", layer.gate_up_weight, [config.intermediate_size] * 2),
            ("mlp.{gate,up}_proj.bias", layer.gate_up_bias, [config.intermediate_size] * 2),
            ("mlp.down_proj.weight", layer.down_weight, None),
            ("mlp.down_proj.bias", layer.down_bias, None),
        ):
            if fused is None:
                continue
            views = [fused] if rows is None else fused.split(rows)
            for part, view in zip(_expand(name), views, strict=True):
                yield f"model.layers.{index}.{part}", view
    yield "model.norm.weight", weights.norm
    if not config.tie_embeddings:
        yield "lm_head.weight", weights.lm_head


def _expand(name: str) -> list[str]:
    """ "a.{q,k}_b" -> ["a.q_b", "a.k_b"]."""
    if "{" not in name:
        return [name]
    before, rest = name.split("{")
    inside, after = rest.split("}")
    return [before + choice + after for choice in inside.split(",")]


def _fill(path: Path, name: str, values: torch.Tensor, places: dict[str, torch.Tensor]) -> None:
    """Copies one tensor of a file into its place and strikes that off the list."""
    place = places.pop(name, None)
    if place is None:
        raise ValueError(f"{path} has tensor {name}, which this architecture has no use for; check config.json")
    if values.shape != place.shape:
        raise ValueError(
            f"{name} in {path} has shape {list(values.shape)} and should have {list(place.shape)}; check config.json"
        )
    if values.dtype not in _FLOATS:
        raise ValueError(f"{name} in {path} is {values.dtype}; quantised weights are not supported, use a float one")
    place.copy_(values)
