"""Every op in plain PyTorch: the oracle of the Triton kernels (in float64 if asked), and the path on a CPU.

Pages are views `[num_pages, page_size, kv_heads, width]` with any strides whose last dimension is contiguous: NHD and
HND pools, split or joined K and V, K and V of different width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange

from kernels.batch import RaggedBatch

# Queries handled at once where scores need a mask: bounds the mask and what is computed only to be masked. A guess.
TILE = 512


@dataclass(frozen=True)
class Variant:
    """An attention variant; causality and the window are applied besides. Positions and heads are int64 tensors that
    broadcast against the scores, `[kv_heads, group, queries, keys]`.

    score_mod(score, head, query_position, key_position) -> score, natural units, after the softmax scale.
    mask_mod(head, query_position, key_position) -> bool, True = visible.
    """

    name: str
    score_mod: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    mask_mod: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None


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


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    variant: Variant | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ragged, paged, causal attention: the query at position p sees keys at positions <= p of its own sequence, in
    whatever order and by whatever means the cells were filled; head h uses KV head h // (heads / kv_heads).

    q: [num_tokens, heads, head_dim], packed as in `batch`.
    k_pages: [num_pages, page_size, kv_heads, head_dim]; v_pages: [..., v_head_dim]; q's dtype. Only pages that cover
        [first visible key, last query] of a part are read.
    scale: factor of the scores before the softmax, as a rule head_dim ** -0.5.
    window: the query at p sees keys > p - window only; 1 = itself alone; None = all.
    Returns out: [num_tokens, heads, v_head_dim], q's dtype, and, if return_lse, the natural log of the sum of
    exp(score): [num_tokens, heads] float32 (float64 for float64), else None. A row without keys: 0 and -inf.
    Raises ValueError for a window below 1, or heads, dtypes or numbers of tokens that do not fit together.
    """
    _check_attention(q, k_pages, v_pages, batch, window)
    kv_heads = k_pages.shape[2]
    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    lse = q.new_empty(q.shape[:2], dtype=_accumulate(q.dtype)) if return_lse else None
    for part, start, stop, rows in _tiles(batch, window, variant):
        first = 0 if window is None else max(0, start - window + 1)
        tile_out, tile_lse = _attend(
            rearrange(q[rows], "n (kv group) d -> kv group n d", kv=kv_heads),
            _gather(k_pages, batch, part, first, stop),
            _gather(v_pages, batch, part, first, stop),
            query=start - first,
            first=first,
            scale=scale,
            window=window if window is not None and window < stop else None,
            variant=variant,
        )
        out[rows].unflatten(1, (kv_heads, -1)).copy_(rearrange(tile_out, "kv group n d -> n kv group d"))
        if lse is not None:
            lse[rows] = rearrange(tile_lse, "kv group n -> n (kv group)")
    return out, lse


def pages_from_staging(staging: torch.Tensor, pages: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Copies one part (K or V) of a band of layers from the store's layout into pages.

    staging: [layers, kv_heads, tokens, width], any strides.
    pages: one [num_pages, page_size, kv_heads, width] per layer, staging's dtype.
    slots: [tokens] int64, page * page_size + offset; -1 = the token is not copied.
    Raises ValueError where shapes or dtypes differ: nothing is broadcast or converted on the way.
    """
    _check_transfer(staging, pages, slots)
    for layer_staging, layer_pages in zip(staging, pages, strict=True):
        _write(layer_pages, slots, layer_staging.transpose(0, 1))


def staging_from_pages(pages: Sequence[torch.Tensor], slots: torch.Tensor, staging: torch.Tensor) -> None:
    """Copies one part (K or V) of a band of layers from pages into the store's layout; shapes and dtypes as in
    `pages_from_staging`, every slot 0 or more. Raises ValueError as that does, and for a slot below 0."""
    _check_transfer(staging, pages, slots)
    if bool((slots < 0).any()):
        raise ValueError(f"slot {int(slots.min())} is no place to read from; give the slots of filled cells")
    for layer_pages, layer_staging in zip(pages, staging, strict=True):
        page_size = layer_pages.shape[1]
        layer_staging.copy_(layer_pages[slots // page_size, slots % page_size].transpose(0, 1))


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
    """pages: [num_pages, page_size, kv_heads, width]; slots: [tokens] int64; values: [tokens, kv_heads, width]."""
    written = slots >= 0
    if not bool(written.all()):
        slots, values = slots[written], values[written]
    pages[slots // pages.shape[1], slots % pages.shape[1]] = values


def _gather(pages: torch.Tensor, batch: RaggedBatch, part: int, first: int, stop: int) -> torch.Tensor:
    """Tokens [first, stop) of a part's sequence as [kv_heads, 1, tokens, width]: a view where the pages allow it."""
    page_size = pages.shape[1]
    first_page, last_page = first // page_size, (stop - 1) // page_size
    run = batch.page_run(part, first_page, last_page)
    if run is None:
        block = pages.index_select(0, batch.block_table[part, first_page : last_page + 1])
    else:  # stays a view where a page follows the other in memory (NHD)
        block = pages[run : run + last_page - first_page + 1]
    tokens = block.flatten(0, 1)[first - first_page * page_size : stop - first_page * page_size]
    return tokens.transpose(0, 1).unsqueeze(1)


def _tiles(batch: RaggedBatch, window: int | None, variant: Variant | None) -> Iterator[tuple[int, int, int, slice]]:
    """Part, token range and batch rows of what is attended at once: a whole part unless a mask is needed."""
    for part, (start, stop) in enumerate(zip(batch.starts, batch.stops, strict=True)):
        masked = variant is not None or (window is not None and window < stop)
        step = TILE if masked else stop - start
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            offset = batch.offsets[part] - start
            yield part, begin, end, slice(offset + begin, offset + end)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    query: int,
    first: int,
    scale: float,
    window: int | None,
    variant: Variant | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [kv_heads, group, n, d]; k, v: [kv_heads, 1, t, d], positions from `first` on; query i is key `query + i`.
    Returns [kv_heads, group, n, v_head_dim] and [kv_heads, group, n]."""
    queries, keys = q.shape[2], k.shape[2]
    if variant is not None or q.device.type != "cpu":
        return _attend_dense(q, k, v, query=query, first=first, scale=scale, window=window, variant=variant)
    if queries == 1:  # the last position sees every key it was given
        return _flash(q, k, v, scale=scale)
    if window is not None:
        mask = q.new_zeros(queries, keys).masked_fill_(~_visible(q, queries, keys, query, window), float("-inf"))
        return _flash(q, k, v, scale=scale, mask=mask)
    own = _flash(q, k[:, :, query:], v[:, :, query:], scale=scale, causal=True)
    if query == 0:
        return own
    # Everything before the first query is seen by all: two calls, merged, never compute the masked triangle.
    before = _flash(q, k[:, :, :query], v[:, :, :query], scale=scale)
    weight = torch.sigmoid(own[1] - before[1]).unsqueeze(-1)
    merged = torch.lerp(before[0].to(weight.dtype), own[0].to(weight.dtype), weight)
    return merged, torch.logaddexp(own[1], before[1])


def _visible(q: torch.Tensor, queries: int, keys: int, query: int, window: int | None) -> torch.Tensor:
    """[queries, keys] bool: key j is visible to query i, which is key `query + i`."""
    distance = torch.arange(query, query + queries, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's CPU flash attention, for its log-sum-exp; K and V are expanded over the group without a copy."""
    group, v_head_dim = q.shape[1], v.shape[3]
    if q.shape[3] != v_head_dim:  # the op wants one width, and zeros change neither a score nor an output
        width = max(q.shape[3], v_head_dim)
        q, k, v = (F.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
    k, v = k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out[..., :v_head_dim], lse


def _attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    query: int,
    first: int,
    scale: float,
    window: int | None,
    variant: Variant | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend` with every score in memory: for variants, and for devices without the flash op."""
    kv_heads, group, queries, _ = q.shape
    keys = k.shape[2]
    q, k, v = (x.to(_accumulate(q.dtype)) for x in (q, k, v))
    scores = q @ k.mT * scale
    visible = _visible(q, queries, keys, query, window)
    if variant is not None:
        head = torch.arange(kv_heads * group, device=q.device).view(kv_heads, group, 1, 1)
        key_position = first + torch.arange(keys, device=q.device)
        query_position = first + query + torch.arange(queries, device=q.device)[:, None]
        if variant.score_mod is not None:
            scores = variant.score_mod(scores, head, query_position, key_position)
        if variant.mask_mod is not None:
            visible = visible & variant.mask_mod(head, query_position, key_position)
    visible = visible.expand_as(scores)
    lse = scores.masked_fill(~visible, float("-inf")).logsumexp(dim=-1)
    weights = torch.where(visible, torch.exp(scores - lse.unsqueeze(-1)), 0.0)
    # A cell that nobody sees may never have been filled, and 0 * NaN is NaN.
    seen = visible.any(dim=2).any(dim=1)
    return weights @ torch.where(seen[:, None, :, None], v, 0.0), lse


def _check_transfer(staging: torch.Tensor, pages: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    if len(pages) != len(staging):
        raise ValueError(f"staging has {len(staging)} layers and pages {len(pages)}; give the pages of the same band")
    for layer_pages in pages:
        expected = (layer_pages.shape[2], slots.shape[0], layer_pages.shape[3])
        if staging.shape[1:] != expected or staging.dtype != layer_pages.dtype:
            raise ValueError(
                f"staging holds {list(staging.shape[1:])} {staging.dtype} a layer where pages and slots need "
                f"{list(expected)} {layer_pages.dtype}; stage the same heads, tokens and dtype"
            )


def _check_attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: RaggedBatch, window: int | None
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 token, or None for all")
    if q.shape[0] != batch.num_tokens:
        raise ValueError(f"q has {q.shape[0]} tokens and the batch {batch.num_tokens}; pack q as the batch is packed")
    if q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"{q.shape[1]} heads cannot share {k_pages.shape[2]} KV heads; use a multiple of the KV heads")
    if not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(
            f"q is {q.dtype}, K {k_pages.dtype} and V {v_pages.dtype}; attention needs one dtype, so convert the pages"
        )
