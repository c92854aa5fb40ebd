"""Every op in plain PyTorch: the oracle of the Triton kernels (in float64 if asked), and the path on a CPU.

Pages are views `[num_pages, page_size, kv_heads, width]` with any strides whose last dimension is contiguous: NHD and
HND pools, split or joined K and V, K and V of different width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from kernels.attention_reference import attention
from kernels.batch import RaggedBatch
from kernels.staged import QUANTISED

__all__ = ["NAME", "activation", "attention", "pages_from_staging", "recompute", "rms_norm", "staging_from_pages"]

NAME = "reference"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32 (float64 for float64).

    x: [..., width] floating; weight: [width], same dtype. Returns [..., width], x's dtype.
    """
    wide = x.to(_accumulate(x.dtype))
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return (wide * mean_square.add_(eps).rsqrt_()).mul_(weight).to(x.dtype)


def activation(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up. gate_up: [..., 2 * intermediate], gate first. Returns [..., intermediate], same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


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
    """RMSNorm, then Q, K and V in one GEMM with bias, Q and K norm per head, RoPE, and K and V into their pages.

    hidden: [num_tokens, hidden] floating, at the entry of the layer.
    form: "qkv"; "kv" = project only; "q" = advance over filled cells, K and V neither computed nor written.
    norm_weight: [hidden]; qkv_weight: [heads * head_dim + kv_heads * (head_dim + v_head_dim), hidden], rows Q, K, V;
        qkv_bias: [rows of qkv_weight]; q_norm_weight, k_norm_weight: [head_dim]. All in hidden's dtype.
    eps: of every norm.
    cos, sin: [max_position, head_dim / 2] float32 (float64 for float64); halves are rotated (NeoX).
    k_pages: [num_pages, page_size, kv_heads, head_dim]; v_pages: [..., v_head_dim]; hidden's dtype. Token i is
        written at batch.slots[i]; -1 is skipped.
    Returns q: [num_tokens, heads, head_dim], or None for "kv". Raises ValueError for another form.
    """
    if form not in ("qkv", "kv", "q"):
        raise ValueError(f"form is {form!r}; use 'qkv', 'kv' or 'q'")
    kv_heads, head_dim = k_pages.shape[2:]
    k_rows, v_rows = kv_heads * head_dim, kv_heads * v_pages.shape[3]
    q_rows = qkv_weight.shape[0] - k_rows - v_rows
    rows = {"qkv": slice(None), "kv": slice(q_rows, None), "q": slice(0, q_rows)}[form]
    bias = None if qkv_bias is None else qkv_bias[rows]
    out = F.linear(rms_norm(hidden, norm_weight, eps), qkv_weight[rows], bias)
    cos = cos.index_select(0, batch.positions).unsqueeze(1)
    sin = sin.index_select(0, batch.positions).unsqueeze(1)
    q = None
    if form != "kv":
        q = _rotate(_head_norm(out[:, :q_rows], head_dim, q_norm_weight, eps), cos, sin)
    if form != "q":
        k, v = out[:, -(k_rows + v_rows) :].split([k_rows, v_rows], dim=1)
        _write(k_pages, batch.slots, _rotate(_head_norm(k, head_dim, k_norm_weight, eps), cos, sin))
        _write(v_pages, batch.slots, v.unflatten(1, (kv_heads, -1)))
    return q


def pages_from_staging(
    staging: torch.Tensor, pages: Sequence[torch.Tensor], slots: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Copies one part (K or V) of a band of layers from the store's layout into pages.

    staging: [layers, kv_heads, tokens, width], any strides. Of several chunks [chunks, layers, ...]: then slots and
        scales have chunks first, too.
    pages: one [num_pages, page_size, kv_heads, width] per layer, or all of them as one tensor; staging's dtype, or any
        float one where staging is quantised.
    slots: [tokens] int64, page * page_size + offset; -1 = the token is not copied.
    scales: [layers, kv_heads, tokens] float32 for staging in int8 or float8_e4m3fn: a cell is its row times its scale.
    Raises ValueError where shapes or dtypes differ, and for quantised staging without scales: nothing is broadcast or
    converted on the way but by its scale.
    """
    check_transfer(staging, pages, slots, scales)
    for index, layer_pages in enumerate(pages):
        values = staging[..., index, :, :, :]
        if scales is not None:
            values = (values.float() * scales[..., index, :, :].unsqueeze(-1)).to(layer_pages.dtype)
        _write(layer_pages, slots, values.transpose(-3, -2))


def staging_from_pages(pages: Sequence[torch.Tensor], slots: torch.Tensor, staging: torch.Tensor) -> None:
    """Copies one part (K or V) of a band of layers from pages into the store's layout; shapes and dtypes as in
    `pages_from_staging`, every slot 0 or more. Raises ValueError as that does, and for a slot below 0."""
    check_transfer(staging, pages, slots)
    if bool((slots < 0).any()):
        raise ValueError(f"slot {int(slots.min())} is no place to read from; give the slots of filled cells")
    for layer_pages, layer_staging in zip(pages, staging, strict=True):
        page_size = layer_pages.shape[1]
        layer_staging.copy_(layer_pages[slots // page_size, slots % page_size].transpose(0, 1))


def check_transfer(
    staging: torch.Tensor, pages: Sequence[torch.Tensor], slots: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Raises ValueError unless these fit together as `pages_from_staging` says."""
    if staging.shape[:-4] != slots.shape[:-1]:
        raise ValueError(
            f"staging has chunks {list(staging.shape[:-4])} and slots {list(slots.shape[:-1])}; give the slots of each"
        )
    if len(pages) != staging.shape[-4]:
        raise ValueError(
            f"staging has {staging.shape[-4]} layers and pages {len(pages)}; give the pages of the same band"
        )
    if (scales is not None) != (staging.dtype in QUANTISED):
        raise ValueError(
            f"staging is {staging.dtype} and has {'no ' if scales is None else ''}scales; quantised KV has"
        )
    if scales is not None and (scales.shape != staging.shape[:-1] or scales.dtype != torch.float32):
        raise ValueError(
            f"scales are {list(scales.shape)} {scales.dtype}; give one float32 for each layer, head and token, "
            f"{list(staging.shape[:-1])}"
        )
    for layer_pages in pages:
        expected = (layer_pages.shape[2], slots.shape[-1], layer_pages.shape[3])
        converts = scales is not None and layer_pages.dtype.is_floating_point
        if staging.shape[-3:] != expected or (staging.dtype != layer_pages.dtype and not converts):
            raise ValueError(
                f"staging holds {list(staging.shape[-3:])} {staging.dtype} a layer where pages and slots need "
                f"{list(expected)} {layer_pages.dtype}; stage the same heads, tokens and dtype"
            )


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _head_norm(x: torch.Tensor, head_dim: int, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    heads = x.unflatten(1, (-1, head_dim))
    return heads if weight is None else rms_norm(heads, weight, eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]; cos, sin: [tokens, 1, head_dim / 2]. The result is contiguous."""
    wide = x.to(cos.dtype)
    rotated = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    (left, right), (out_left, out_right) = wide.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin)
    return rotated.to(x.dtype)


def _write(pages: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """pages: [num_pages, page_size, kv_heads, width]; slots: [..., tokens] int64; values: [..., tokens, kv_heads,
    width]."""
    page_size, flat = pages.shape[1], slots.flatten()
    tokens = pages.flatten(0, 1) if pages.stride(0) == page_size * pages.stride(1) else None  # one row of them: a view
    first = int(flat[0]) if len(flat) else -1
    if tokens is not None and first >= 0 and torch.equal(flat, torch.arange(first, first + len(flat))):
        tokens[first : first + len(flat)].unflatten(0, slots.shape).copy_(values)
        return
    written, values = flat >= 0, values.flatten(0, -3)
    if not bool(written.all()):
        flat, values = flat[written], values[written]
    if tokens is not None:
        tokens.index_copy_(0, flat, values)
    else:
        pages[flat // page_size, flat % page_size] = values
