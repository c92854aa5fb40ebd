"""Attention in plain PyTorch: the oracle of the Triton kernel (in float64 if asked), and the path on a CPU. Part of
`kernels.reference`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from einops import rearrange

from kernels.batch import RaggedBatch
from kernels.staged import QUANTISED, Staged
from kernels.variants import Variant, with_window

# Queries handled at once where scores need a mask: bounds the mask and what is computed only to be masked. A guess.
TILE = 512


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    variant: Variant | None = None,
    staged: Staged | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ragged, paged, causal attention: the query at position p sees keys at positions <= p of its own sequence, in
    whatever order and by whatever means the cells were filled; head h uses KV head h // (heads / kv_heads).

    q: [num_tokens, heads, head_dim], packed as in `batch`.
    k_pages: [num_pages, page_size, kv_heads, head_dim]; v_pages: [..., v_head_dim]; q's dtype. Only pages that cover
        [first visible key, last query] of a part are read.
    scale: factor of the scores before the softmax, as a rule head_dim ** -0.5; positive.
    window: the query at p sees keys > p - window only; 1 = itself alone; None = all. The variant sliding_window.
    variant: what else to do to scores and visibility (`kernels.variants`); None = nothing.
    staged: chunks to read where they landed, in place of their pages, by part of `batch`; None = none.
    Returns out: [num_tokens, heads, v_head_dim], q's dtype, and, if return_lse, the natural log of the sum of
    exp(score): [num_tokens, heads] float32 (float64 for float64), else None. A row without keys: 0 and -inf.
    Raises ValueError for a window below 1, or heads, widths, dtypes, pages or numbers of tokens that do not fit.
    """
    check_attention(q, k_pages, v_pages, batch=batch, scale=scale, staged=staged)
    variant = with_window(variant, window)
    kv_heads = k_pages.shape[2]
    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    lse = q.new_empty(q.shape[:2], dtype=_accumulate(q.dtype))
    for part, start, stop, rows in _tiles(batch, variant):
        begin, _, _, end = variant.key_bounds(start, stop - 1)
        tile_out, tile_lse = _attend(
            rearrange(q[rows], "n (kv group) d -> kv group n d", kv=kv_heads),
            _keys(k_pages, batch, part, begin, end, staged, "k"),
            _keys(v_pages, batch, part, begin, end, staged, "v"),
            query=start,
            first=begin,
            scale=scale,
            variant=variant,
        )
        out[rows].unflatten(1, (kv_heads, -1)).copy_(rearrange(tile_out, "kv group n d -> n kv group d"))
        lse[rows] = rearrange(tile_lse, "kv group n -> n (kv group)")
    return out, lse if return_lse else None


def check_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    batch: RaggedBatch,
    scale: float,
    staged: Staged | None,
) -> None:
    """Raises ValueError for what `attention` cannot do, whatever the backend."""
    if q.shape[0] != batch.num_tokens:
        raise ValueError(f"q has {q.shape[0]} tokens and the batch {batch.num_tokens}; pack q as the batch is packed")
    if q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"{q.shape[1]} heads cannot share {k_pages.shape[2]} KV heads; use a multiple of the KV heads")
    if not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(
            f"q is {q.dtype}, K {k_pages.dtype} and V {v_pages.dtype}; attention needs one dtype, so convert the pages"
        )
    if q.shape[2] != k_pages.shape[3]:
        raise ValueError(f"q has heads of {q.shape[2]} elements and K of {k_pages.shape[3]}; scores need the same")
    if k_pages.shape[:3] != v_pages.shape[:3] or k_pages.shape[1] != batch.page_size:
        raise ValueError(
            f"pages are {list(k_pages.shape[:3])} for K and {list(v_pages.shape[:3])} for V where pages of the batch "
            f"have {batch.page_size} tokens; page K and V alike, in the batch's pages"
        )
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    if staged is None:
        return
    if len(staged.runs) != len(batch.starts):
        raise ValueError(f"staged has {len(staged.runs)} runs and the batch {len(batch.starts)} parts; give each one")
    for name, tensor, pages in (("K", staged.k, k_pages), ("V", staged.v, v_pages)):
        if (tensor.shape[1], tensor.shape[3]) != (pages.shape[2], pages.shape[3]):
            raise ValueError(
                f"staged {name} has heads and width {[tensor.shape[1], tensor.shape[3]]} and pages "
                f"{list(pages.shape[2:])}; stage the same heads"
            )
        if tensor.dtype != q.dtype and tensor.dtype not in QUANTISED:
            raise ValueError(f"staged {name} is {tensor.dtype} and q {q.dtype}; stage q's dtype, int8 or float8_e4m3fn")


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _keys(
    pages: torch.Tensor, batch: RaggedBatch, part: int, begin: int, end: int, staged: Staged | None, name: str
) -> torch.Tensor:
    """Tokens [begin, end) of a part's sequence as [kv_heads, 1, tokens, width], in the dtype of pages."""
    if begin >= end:
        return pages.new_zeros(pages.shape[2], 1, 0, pages.shape[3])
    landed = range(0) if staged is None else staged.tokens(part)
    low, high = (min(max(token, begin), end) for token in (landed.start, landed.stop))
    if staged is None or low >= high:
        return _gather(pages, batch, part, begin, end)
    values, scales = (staged.k, staged.k_scale) if name == "k" else (staged.v, staged.v_scale)
    slots = torch.tensor(staged.runs[part][1], device=values.device)
    chunks = values[slots].to(_accumulate(pages.dtype))
    if scales is not None:
        chunks *= scales[slots].unsqueeze(-1)
    tokens = rearrange(chunks, "chunk kv t d -> kv 1 (chunk t) d")[:, :, low - landed.start : high - landed.start]
    around = [_gather(pages, batch, part, *bounds) for bounds in ((begin, low), (high, end)) if bounds[0] < bounds[1]]
    return torch.cat([*around[: begin < low], tokens.to(pages.dtype), *around[begin < low :]], dim=2)


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


def _tiles(batch: RaggedBatch, variant: Variant) -> Iterator[tuple[int, int, int, slice]]:
    """Part, token range and batch rows of what is attended at once: a whole part unless a mask is needed."""
    for part, (start, stop) in enumerate(zip(batch.starts, batch.stops, strict=True)):
        step = stop - start if _is_plain(variant, start, stop - 1) else TILE
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            offset = batch.offsets[part] - start
            yield part, begin, end, slice(offset + begin, offset + end)


def _is_plain(variant: Variant, first: int, last: int) -> bool:
    """Whether queries [first, last] see every key that causality allows, with nothing done to its score."""
    _, full_begin, full_end, _ = variant.key_bounds(first, last)
    return variant.score is None and full_begin == 0 and full_end > last


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, query: int, first: int, scale: float, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [kv_heads, group, n, d] from position `query` on; k, v: [kv_heads, 1, t, d] from position `first` on.
    Returns [kv_heads, group, n, v_head_dim] and [kv_heads, group, n]."""
    queries, keys = q.shape[2], k.shape[2]
    if q.device.type != "cpu" or variant.score is not None or not keys:
        out, lse = _attend_dense(q, k, v, query=query, first=first, scale=scale, variant=variant)
    elif _is_plain(variant, query, query + queries - 1):
        out, lse = _attend_plain(q, k, v, scale=scale)
    else:
        visible = _visible(q, keys, query, first, variant)
        if visible.dim() > 2 or not (visible.any(dim=0).all() and visible.any(dim=1).all()):
            # The flash op gives NaN for a row without keys, and for a key that nobody sees if it was never filled.
            out, lse = _attend_dense(q, k, v, query=query, first=first, scale=scale, variant=variant)
        elif visible.all():
            out, lse = _flash(q, k, v, scale=scale)
        else:
            mask = q.new_zeros(visible.shape).masked_fill_(~visible, float("-inf"))
            out, lse = _flash(q, k, v, scale=scale, mask=mask)
    if variant.sink is None:
        return out, lse
    head = torch.arange(q.shape[0] * q.shape[1], device=q.device)
    sink = variant.sink.reference(head, variant.sink.parameters).to(lse.dtype).view(*q.shape[:2], 1)
    with_sink = torch.logaddexp(lse, sink)
    share = torch.where(with_sink == float("-inf"), 0.0, torch.exp(lse - with_sink))
    return out * share.unsqueeze(-1), with_sink


def _attend_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last key is the last query's own, and all before a query's own are seen."""
    if q.shape[2] == 1:
        return _flash(q, k, v, scale=scale)
    query = k.shape[2] - q.shape[2]
    own = _flash(q, k[:, :, query:], v[:, :, query:], scale=scale, causal=True)
    if query == 0:
        return own
    # Everything before the first query is seen by all: two calls, merged, never compute the masked triangle.
    before = _flash(q, k[:, :, :query], v[:, :, :query], scale=scale)
    weight = torch.sigmoid(own[1] - before[1]).unsqueeze(-1)
    merged = torch.lerp(before[0].to(weight.dtype), own[0].to(weight.dtype), weight)
    return merged, torch.logaddexp(own[1], before[1])


def _visible(q: torch.Tensor, keys: int, query: int, first: int, variant: Variant) -> torch.Tensor:
    """[queries, keys] bool, with heads [kv_heads, group] before them if the mask asks for them."""
    head, query_position, key = _positions(q, keys, query, first)
    visible = key <= query_position
    if variant.mask is not None:
        visible = visible & variant.mask.reference(head, query_position, key, variant.mask.parameters)
    return visible


def _positions(q: torch.Tensor, keys: int, query: int, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads [kv_heads, group, 1, 1], query positions [queries, 1] and key positions [keys]."""
    head = torch.arange(q.shape[0] * q.shape[1], device=q.device).view(*q.shape[:2], 1, 1)
    query_position = query + torch.arange(q.shape[2], device=q.device)[:, None]
    return head, query_position, first + torch.arange(keys, device=q.device)


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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, query: int, first: int, scale: float, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend` with every score in memory: for variants, and for devices without the flash op."""
    keys = k.shape[2]
    q, k, v = (x.to(_accumulate(q.dtype)) for x in (q, k, v))
    scores = q @ k.mT * scale
    if variant.score is not None:
        scores = variant.score.reference(scores, *_positions(q, keys, query, first), variant.score.parameters)
    visible = _visible(q, keys, query, first, variant).expand_as(scores)
    lse = scores.masked_fill(~visible, float("-inf")).logsumexp(dim=-1)
    weights = torch.where(visible, torch.exp(scores - lse.unsqueeze(-1)), 0.0)
    # A cell that nobody sees may never have been filled, and 0 * NaN is NaN.
    seen = visible.any(dim=2).any(dim=1)
    return weights @ torch.where(seen[:, None, :, None], v, 0.0), lse
