"""Attention over mixed recomputed and loaded KV, in pages or still in staging.

Two forms of one kernel. *tile*: up to BLOCK_Q rows of a part at a time, for prefill. *split*: few rows, and the keys of
a part cut over several programs, whose results a second launch merges; the tile form is cut as well where its tiles are
too few for the GPU, as for a short suffix behind a long prefix.

What is compiled depends on: dtype, head sizes, page size, heads per KV head, the hooks of the variant, whether there is
staging (its dtype and chunk size), the form, whether it is cut, and whether log-sum-exp is asked for; not on lengths,
tables or parameters of the variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention_kernel import attention_kernel, merge_kernel
from kernels.attention_reference import check_attention
from kernels.attention_tiles import Tile, choose_form, choose_tiles
from kernels.batch import Part, RaggedBatch
from kernels.launch import DTYPES, Launch, Shape, outer_strides, target_of
from kernels.staged import QUANTISED, Staged
from kernels.variants import Variant, with_window

MAX_HEAD_DIM = 256

_MERGE_ROWS = 8
_HAVE_E4M3 = ("cuda:89", "cuda:90", "cuda:100", "interpreter")


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
    """`kernels.reference.attention` in one launch, or two where the keys are cut over programs.

    q: [num_tokens, heads, head_dim] bf16, fp16 or fp32; everything else as in the reference. Operands of the
    multiplications have q's dtype, everything between is float32. What lies behind a part's end in its last page,
    before a window, behind the table's row, or in pages of no part has no effect, NaN included.
    Returns out: [num_tokens, heads, v_head_dim], q's dtype, and lse: [num_tokens, heads] float32 or None. Raises
    ValueError as the reference does, and for another dtype, a head of more than 256 elements, a last dimension that is
    not contiguous, or staged chunks that are not whole tiles of keys.
    """
    check_attention(q, k_pages, v_pages, batch=batch, scale=scale, staged=staged)
    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    if batch.num_tokens:
        made = _launches(
            q=q,
            k_pages=k_pages,
            v_pages=v_pages,
            out=out,
            lse=lse,
            batch=batch,
            scale=scale,
            variant=with_window(variant, window),
            staged=staged,
            target=target_of(q.device),
        )
        for launch in made:
            launch.run()
    return out, lse


def _launches(
    *,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    batch: RaggedBatch,
    scale: float,
    variant: Variant,
    staged: Staged | None,
    target: str,
    form: tuple[Tile, int] | None = None,
) -> list[Launch]:
    """form: the tile and the number of splits; None = what suits the batch."""
    _check(q, v_pages)
    stored = None if staged is None else staged.k.dtype
    tiles = choose_tiles(target, k_pages, v_pages, stored)
    tile, splits = form or choose_form(batch, variant, q.shape[1] // k_pages.shape[2], k_pages.shape[2], tiles, target)
    if staged is not None and staged.chunk_tokens % tile.keys:
        raise ValueError(
            f"staged chunks of {staged.chunk_tokens} tokens are not whole tiles of {tile.keys}; copy them to pages"
        )
    attend = partial(
        _attend,
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        batch=batch,
        scale=scale,
        variant=variant,
        staged=staged,
        target=target,
        tile=tile,
        splits=splits,
    )
    if splits == 1:
        return [attend(out=out, lse=lse)]
    cut_out = out.new_empty(splits, *out.shape, dtype=torch.float32)
    cut_lse = out.new_empty(splits, *out.shape[:2], dtype=torch.float32)
    return [attend(out=cut_out, lse=cut_lse), _merge(cut_out, cut_lse, out, lse)]


def _attend(
    *,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    batch: RaggedBatch,
    scale: float,
    variant: Variant,
    staged: Staged | None,
    target: str,
    tile: Tile,
    splits: int,
) -> Launch:
    """out and lse have splits as their first dimension, and lse is in base 2, if there are more than one."""
    num_tokens, heads, width = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    group, parts, v_width = heads // kv_heads, len(batch.starts), v_pages.shape[3]
    block_width, v_block_width = (max(16, triton.next_power_of_2(n)) for n in (width, v_width))
    k_descriptor, v_descriptor = _descriptor(k_pages, tile, block_width), _descriptor(v_pages, tile, v_block_width)
    both = k_descriptor is not None and v_descriptor is not None
    return Launch(
        kernel=attention_kernel,
        grid=(kv_heads, num_tokens * group // tile.rows + parts, splits),
        arguments=dict(
            q=q,
            k_pages=k_pages,
            v_pages=v_pages,
            k_descriptor=k_descriptor if both else None,
            v_descriptor=v_descriptor if both else None,
            out=out,
            lse=lse,
            query_start=batch.query_start,
            context=batch.context,
            block_table=batch.block_table,
            scale=scale,
            num_tokens=num_tokens,
            parts=parts,
            splits=splits,
            q_strides=outer_strides("q", q),
            k_strides=outer_strides("k_pages", k_pages),
            v_strides=outer_strides("v_pages", v_pages),
            block_table_stride=batch.block_table.stride(0),
            **_staging(staged, target, tile),
            **_hooks(variant),
            GROUP=group,
            WIDTH=width,
            V_WIDTH=v_width,
            BLOCK_WIDTH=block_width,
            V_BLOCK_WIDTH=v_block_width,
            PAGE_SIZE=page_size,
            BLOCK_Q=tile.rows,
            BLOCK_K=tile.keys,
            EDGE_STAGES=tile.edge_stages,
            SPLIT=splits > 1,
        ),
        options=dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
    )


def _merge(cut_out: torch.Tensor, cut_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> Launch:
    """From [splits, num_tokens, heads, ...] to [num_tokens, heads, ...]."""
    rows, width = out.shape[0] * out.shape[1], out.shape[2]
    return Launch(
        kernel=merge_kernel,
        grid=(triton.cdiv(rows, _MERGE_ROWS),),
        arguments=dict(
            partial=cut_out,
            partial_lse=cut_lse,
            out=out,
            lse=lse,
            rows=rows,
            splits=len(cut_out),
            WIDTH=width,
            BLOCK_WIDTH=max(16, triton.next_power_of_2(width)),
            BLOCK_ROWS=_MERGE_ROWS,
        ),
        options=dict(num_warps=4),
    )


def launches(shape: Shape, target: str, variants: Sequence[Variant] = (Variant("causal"),)) -> Iterator[Launch]:
    """One launch of every specialisation that a model of this shape can meet with these variants, without log-sum-exp
    and staging: both forms, whole and cut, and the merge."""
    for variant in variants:
        for tile in dict.fromkeys(choose_tiles(target, shape.k_pages, shape.v_pages, staged=None)):
            for splits in (1, 2):
                yield from example_launches(shape, target, variant, (tile, splits))


def example_launches(
    shape: Shape, target: str, variant: Variant, form: tuple[Tile, int], staged: torch.dtype | None = None
) -> list[Launch]:
    """What a batch of one part launches in this form, on the device "meta", with chunks of this dtype in staging."""
    page_size, kv_heads, head_dim = shape.k_pages.shape[1:]
    tokens = 2 * page_size
    q, v = shape.meta(tokens, shape.heads, head_dim), shape.v_pages
    chunks = None
    if staged is not None:
        slots = torch.empty(4, kv_heads, 512, device="meta")
        chunks = Staged(
            k=shape.meta(*slots.shape, head_dim, dtype=staged),
            v=shape.meta(*slots.shape, v.shape[3], dtype=staged),
            k_scale=slots if staged in QUANTISED else None,
            v_scale=slots if staged in QUANTISED else None,
            table=shape.meta(1, 4, dtype=torch.int32),
            start=shape.meta(1, dtype=torch.int32),
            stop=shape.meta(1, dtype=torch.int32),
            runs=((0, ()),),
        )
    return _launches(
        q=q,
        k_pages=shape.k_pages,
        v_pages=v,
        out=shape.meta(tokens, shape.heads, v.shape[3]),
        lse=None,
        batch=RaggedBatch.build([Part(0, tokens, pages=range(2))], page_size, device="meta"),
        scale=head_dim**-0.5,
        variant=variant,
        staged=chunks,
        target=target,
        form=form,
    )


def _check(q: torch.Tensor, v_pages: torch.Tensor) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; the kernels take bfloat16, float16 and float32")
    if max(q.shape[2], v_pages.shape[3]) > MAX_HEAD_DIM:
        raise ValueError(
            f"heads have {q.shape[2]} and {v_pages.shape[3]} elements; the kernels take up to {MAX_HEAD_DIM}"
        )


def _descriptor(pages: torch.Tensor, tile: Tile, block_width: int) -> TensorDescriptor | None:
    """One for the whole cache, if its pages are whole tiles and bulk copies can reach all of it."""
    bytes_apart = [pages.data_ptr(), *(stride * pages.dtype.itemsize for stride in pages.stride()[:-1])]
    if not tile.descriptor or pages.shape[1] % tile.keys or any(n % 16 for n in bytes_apart):
        return None
    return TensorDescriptor(pages, list(pages.shape), list(pages.stride()), [1, tile.keys, 1, block_width])


def _staging(staged: Staged | None, target: str, tile: Tile) -> dict[str, Any]:
    """The kernel's arguments for what is in staging."""
    tensors: dict[str, torch.Tensor | None]
    if staged is None:
        tensors = dict.fromkeys(("k_staged", "v_staged", "k_scales", "v_scales"))
        strides = {f"{name}_strides": None for name in tensors}
        places = dict.fromkeys(("staged_table", "staged_start", "staged_stop"))
        return tensors | strides | places | dict(staged_table_stride=0, CHUNK=0, STAGED_STAGES=1)
    tensors = dict(k_staged=staged.k, v_staged=staged.v, k_scales=staged.k_scale, v_scales=staged.v_scale)
    if staged.k.dtype == torch.float8_e4m3fn and target not in _HAVE_E4M3:
        tensors |= dict(k_staged=staged.k.view(torch.uint8), v_staged=staged.v.view(torch.uint8))
    quantised = staged.k_scale is not None
    return dict(
        **tensors,
        k_staged_strides=outer_strides("staged K", staged.k),
        v_staged_strides=outer_strides("staged V", staged.v),
        k_scales_strides=None if staged.k_scale is None else staged.k_scale.stride(),
        v_scales_strides=None if staged.v_scale is None else staged.v_scale.stride(),
        staged_table=staged.table,
        staged_start=staged.start,
        staged_stop=staged.stop,
        staged_table_stride=staged.table.stride(0),
        CHUNK=staged.chunk_tokens,
        # Decoding happens between the load and the multiplication, where the pipeliner would only be in the way.
        STAGED_STAGES=1 if quantised else tile.num_stages,
    )


def _hooks(variant: Variant) -> dict[str, Any]:
    """The kernel's arguments for a variant: by hook, the function and its parameters."""
    arguments: dict[str, Any] = {}
    for name in ("score", "mask", "bounds", "sink"):
        hook = getattr(variant, name)
        arguments[name.upper()] = None if hook is None else hook.triton
        arguments[f"{name}_parameters"] = () if hook is None else hook.parameters
    return arguments
