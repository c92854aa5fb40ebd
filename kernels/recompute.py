"""From the residual stream to pages in one kernel: RMSNorm, Q, K and V projection, bias, Q and K norm, RoPE, stores.

The weight of the first norm meets the tile of hidden states inside the loop rather than `qkv_weight` beforehand: the
tile passes through registers anyway for the row statistic, a second copy of the weights would be stale after these are
changed in place, and a load that feeds both Hopper's asynchronous multiplication and other arithmetic gets one buffer
too few from Triton 3.6 and 3.7 (github.com/triton-lang/triton/issues/6691): a race.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton

from kernels.batch import RaggedBatch
from kernels.launch import DTYPES, PROCESSORS, Case, Launch, Shape, outer_strides, target_of
from kernels.recompute_kernel import recompute_kernel

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Tile:
    """What one program computes: some columns (whole heads) of some tokens.

    tokens, columns: rows and columns of the result; a head has all its columns in one tile, more or fewer.
    step: of the loop over the hidden dimension.
    """

    tokens: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


# Tiles by target, the fewest tokens first. Guesses, made after static figures (no spills, then the fewest instructions
# of the loop for a matrix instruction, on the shapes of `aot_cases`) and not yet timed.
_TILES = {
    "cuda:80": (Tile(16, 128, 64, 4, 4), Tile(64, 128, 64, 8, 3), Tile(128, 256, 32, 8, 4)),
    "cuda:90": (Tile(16, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4), Tile(128, 256, 64, 8, 4)),
    "cuda:100": (Tile(16, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 8, 4)),
    "hip:gfx942": (Tile(16, 128, 128, 4, 2), Tile(64, 128, 64, 4, 2), Tile(128, 256, 64, 8, 2)),
}
# For other GPUs, whose shared memory may be smaller.
_OTHER_TILES = (Tile(16, 128, 64, 4, 2), Tile(64, 128, 64, 8, 2))
# Of heads with more than 128 elements, which leave fewer registers to a token. By backend, as the next.
_WIDE_TILES = {
    "cuda": (Tile(16, 256, 64, 4, 3), Tile(64, 256, 64, 8, 3)),
    "hip": (Tile(16, 256, 64, 4, 2), Tile(64, 256, 64, 8, 2)),
}
# float32 goes without tensor cores on NVIDIA: tf32 would be less exact than the reference.
_FLOAT32_TILES = {
    "cuda": (Tile(16, 128, 32, 8, 2), Tile(64, 128, 16, 8, 3)),
    "hip": (Tile(16, 128, 32, 4, 2), Tile(64, 128, 32, 8, 2)),
}


def recompute(
    hidden: torch.Tensor,
    *,
    form: Literal["qkv", "kv", "q"],
    batch: RaggedBatch,
    norm_weight: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
) -> torch.Tensor | None:
    """`kernels.reference.recompute` in one launch. Between the multiplication, whose operands have hidden's dtype, and
    the results everything is float32.

    hidden: [num_tokens, hidden] bf16, fp16 or fp32; cos, sin: [max_position, head_dim / 2] float32; everything else as
    in the reference. Returns q: [num_tokens, heads, head_dim], or None for "kv". Raises ValueError for another form or
    dtype, a head of more than 256 elements, and shapes that do not fit together.
    """
    tensors: dict[str, Any] = dict(
        hidden=hidden,
        norm_weight=norm_weight,
        qkv_weight=qkv_weight,
        qkv_bias=qkv_bias,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
        cos=cos,
        sin=sin,
        positions=batch.positions,
        slots=batch.slots,
        k_pages=k_pages,
        v_pages=v_pages,
    )
    _check(form, tensors)
    head_dim = k_pages.shape[3]
    heads = (len(qkv_weight) - k_pages.shape[2] * (head_dim + v_pages.shape[3])) // head_dim
    q = None if form == "kv" else hidden.new_empty(len(hidden), heads, head_dim)
    _launch(form=form, heads=heads, q=q, eps=eps, target=target_of(hidden.device), **tensors).run()
    return q


def launches(shape: Shape, target: str) -> Iterator[Launch]:
    """One launch of every specialisation that a model of this shape can meet: as many as there are tiles, as every form
    and every number of tokens shares them."""
    head_dim, kv_heads, v_head_dim = shape.k_pages.shape[3], shape.k_pages.shape[2], shape.v_pages.shape[3]
    rows = shape.heads * head_dim + kv_heads * (head_dim + v_head_dim)
    norm = shape.meta(head_dim) if shape.qk_norm else None
    table = shape.meta(1024, head_dim // 2, dtype=torch.float32)
    for tile in _tiles(target, shape.dtype, max(head_dim, v_head_dim)):
        yield _launch(
            form="qkv",
            heads=shape.heads,
            target=target,
            tile=tile,
            hidden=shape.meta(tile.tokens, shape.hidden_size),
            q=shape.meta(tile.tokens, shape.heads, head_dim),
            norm_weight=shape.meta(shape.hidden_size),
            qkv_weight=shape.meta(rows, shape.hidden_size),
            qkv_bias=shape.meta(rows) if shape.qkv_bias else None,
            q_norm_weight=norm,
            k_norm_weight=norm,
            eps=1e-6,
            cos=table,
            sin=table,
            positions=shape.meta(tile.tokens, dtype=torch.int64),
            slots=shape.meta(tile.tokens, dtype=torch.int64),
            k_pages=shape.k_pages,
            v_pages=shape.v_pages,
        )


def aot_cases(target: str) -> Iterator[Case]:
    """Every head size, GQA and MQA, bias and norms in bf16; the other dtypes; and every tile."""
    bf16 = torch.bfloat16
    shapes = {
        "llama-3.1-8b": Shape.example(bf16, 4096, heads=32, kv_heads=8, head_dim=128),
        "qwen3-8b": Shape.example(bf16, 4096, heads=32, kv_heads=8, head_dim=128, qk_norm=True),
        "qwen2.5-7b": Shape.example(bf16, 3584, heads=28, kv_heads=4, head_dim=128, qkv_bias=True),
        "qwen2-0.5b": Shape.example(bf16, 896, heads=14, kv_heads=2, head_dim=64, qkv_bias=True),
        "head 80": Shape.example(bf16, 2560, heads=32, kv_heads=32, head_dim=80),
        "head 96": Shape.example(bf16, 3072, heads=32, kv_heads=32, head_dim=96),
        "head 256": Shape.example(bf16, 2048, heads=8, kv_heads=1, head_dim=256, qkv_bias=True, qk_norm=True),
        "llama-3.1-8b fp16": Shape.example(torch.float16, 4096, heads=32, kv_heads=8, head_dim=128),
        "llama-3.1-8b fp32": Shape.example(torch.float32, 4096, heads=32, kv_heads=8, head_dim=128),
        "head 256 fp32": Shape.example(torch.float32, 2048, heads=8, kv_heads=1, head_dim=256),
    }
    for name, shape in shapes.items():
        for launch in launches(shape, target):
            matrix = shape.dtype != torch.float32 or target.startswith("hip")
            yield Case(name=f"{name}, {launch.arguments['TOKENS']} tokens", launch=launch, matrix=matrix)


def _tiles(target: str, dtype: torch.dtype, head_dim: int) -> tuple[Tile, ...]:
    target = "cuda:90" if target == "interpreter" else target
    backend = target.partition(":")[0]
    if dtype == torch.float32:
        return _FLOAT32_TILES[backend]
    return _WIDE_TILES[backend] if head_dim > 128 else _TILES.get(target, _OTHER_TILES)


def _check(form: str, tensors: dict[str, Any]) -> None:
    if form not in ("qkv", "kv", "q"):
        raise ValueError(f"form is {form!r}; use 'qkv', 'kv' or 'q'")
    hidden, k_pages, v_pages = tensors["hidden"], tensors["k_pages"], tensors["v_pages"]
    if hidden.dtype not in DTYPES:
        raise ValueError(f"hidden is {hidden.dtype}; the kernel takes bfloat16, float16 and float32")
    _, _, kv_heads, head_dim = k_pages.shape
    v_head_dim = v_pages.shape[3]
    if max(head_dim, v_head_dim) > MAX_HEAD_DIM or head_dim % 2:
        raise ValueError(
            f"heads have {head_dim} and {v_head_dim} elements; the kernel takes up to {MAX_HEAD_DIM}, and in K an even "
            "number"
        )
    tokens, width = hidden.shape
    rows, positions = len(tensors["qkv_weight"]), len(tensors["cos"])
    q_rows = rows - kv_heads * (head_dim + v_head_dim)
    if q_rows < head_dim or q_rows % head_dim:
        raise ValueError(f"qkv_weight has {rows} rows; without {kv_heads} heads of K and V these are no whole Q heads")
    expected = dict(
        norm_weight=(hidden.dtype, width),
        qkv_weight=(hidden.dtype, rows, width),
        qkv_bias=(hidden.dtype, rows),
        q_norm_weight=(hidden.dtype, head_dim),
        k_norm_weight=(hidden.dtype, head_dim),
        positions=(torch.int64, tokens),
        slots=(torch.int64, tokens),
        cos=(torch.float32, positions, head_dim // 2),
        sin=(torch.float32, positions, head_dim // 2),
        k_pages=(hidden.dtype, *k_pages.shape),
        v_pages=(hidden.dtype, *k_pages.shape[:3], v_head_dim),
    )
    for name, (dtype, *shape) in expected.items():
        tensor = tensors[name]
        if tensor is None:
            continue
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}; beside hidden {list(hidden.shape)} and "
                f"these pages it has to be {shape} {dtype}"
            )
        if not name.endswith("pages") and not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous; the kernel needs it to be")


def _blocks(form: str, heads: int, kv_heads: int, tile_heads: int) -> tuple[int, int]:
    """The first block of heads that a form computes, and how many it computes."""
    q_blocks, kv_blocks = triton.cdiv(heads, tile_heads), 2 * triton.cdiv(kv_heads, tile_heads)
    return {"qkv": (0, q_blocks + kv_blocks), "kv": (q_blocks, kv_blocks), "q": (0, q_blocks)}[form]


def _launch(
    *, form: str, heads: int, target: str, q: torch.Tensor | None, eps: float, tile: Tile | None = None, **tensors: Any
) -> Launch:
    """tile: None = the largest that is not mostly empty and leaves at most half of the multiprocessors without work."""
    hidden, k_pages, v_pages = tensors["hidden"], tensors["k_pages"], tensors["v_pages"]
    num_tokens, hidden_size = hidden.shape
    _, page_size, kv_heads, head_dim = k_pages.shape
    half = triton.next_power_of_2(triton.cdiv(max(head_dim, v_pages.shape[3]), 2))

    def plan(tile: Tile) -> tuple[int, int, int]:
        first_block, num_blocks = _blocks(form, heads, kv_heads, max(1, tile.columns // (2 * half)))
        return first_block, num_blocks, triton.cdiv(num_tokens, tile.tokens) * num_blocks

    if tile is None:
        tiles = _tiles(target, hidden.dtype, max(head_dim, v_pages.shape[3]))
        busy = [
            tile for tile in tiles if tile.tokens < 4 * num_tokens and 2 * plan(tile)[2] >= PROCESSORS.get(target, 100)
        ]
        tile = busy[-1] if busy else tiles[0]
    first_block, num_blocks, programs = plan(tile)
    return Launch(
        kernel=recompute_kernel,
        grid=(programs,),
        arguments=dict(
            **tensors,
            q=hidden if q is None else q,  # no program of the form "kv" touches it
            num_tokens=num_tokens,
            first_block=first_block,
            num_blocks=num_blocks,
            eps=eps,
            hidden_stride=outer_strides("hidden", hidden)[0],
            k_strides=outer_strides("k_pages", k_pages),
            v_strides=outer_strides("v_pages", v_pages),
            HIDDEN=hidden_size,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            V_HEAD_DIM=v_pages.shape[3],
            PAGE_SIZE=page_size,
            TOKENS=tile.tokens,
            TILE_HEADS=max(1, tile.columns // (2 * half)),
            HALF=half,
            STEP=tile.step,
        ),
        options=dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
        | (dict(kpack=2) if target.startswith("hip") else {}),  # 128-bit loads
    )
