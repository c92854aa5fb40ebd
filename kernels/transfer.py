"""Staging to pages and back: a band of layers in one launch, transposed and dequantised on the way.

A program moves the cells of some tokens of one head and layer. Both sides hold such a cell as adjacent elements, so
every access is 128 bits wide where the strides allow it, whatever the layout of the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.addressing import cell_offset, element_offset
from kernels.attention_kernel import decoded
from kernels.launch import DTYPES, Case, Launch, Shape, outer_strides
from kernels.reference import check_transfer
from kernels.staged import QUANTISED

# Elements of a program: two or more 128-bit accesses for each thread of four warps. A guess.
_BLOCK = 4096


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def pages_from_staging_kernel(
    staging,
    scales,
    pages,
    slots,
    tokens,
    staging_strides,
    scales_strides,
    pages_strides,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """staging: [layers, kv_heads, tokens, WIDTH]; pages: [layers, num_pages, PAGE_SIZE, kv_heads, WIDTH]; scales:
    [layers, kv_heads, tokens] or None. Grid: (tiles of tokens, kv_heads, layers)."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head, layer = tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, BLOCK_WIDTH)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    mask = (slot >= 0)[:, None] & (column < WIDTH)[None, :]

    staging += element_offset(layer, staging_strides[0]) + element_offset(head, staging_strides[1])
    values = tl.load(staging + element_offset(token, staging_strides[2])[:, None] + column[None, :], mask=mask)
    if scales is not None:
        scales += element_offset(layer, scales_strides[0]) + element_offset(head, scales_strides[1])
        scale = tl.load(scales + element_offset(token, scales_strides[2]), mask=slot >= 0)
        values = (decoded(values, tl.float32) * scale[:, None]).to(pages.dtype.element_ty)

    pages += element_offset(layer, pages_strides[0]) + element_offset(head, pages_strides[3])
    offset = cell_offset(slot, pages_strides[1], pages_strides[2], PAGE_SIZE)
    tl.store(pages + offset[:, None] + column[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def staging_from_pages_kernel(
    pages,
    slots,
    staging,
    tokens,
    pages_strides,
    staging_strides,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """The way back; tensors and grid as in `pages_from_staging_kernel`."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head, layer = tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, BLOCK_WIDTH)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    mask = (slot >= 0)[:, None] & (column < WIDTH)[None, :]
    pages += element_offset(layer, pages_strides[0]) + element_offset(head, pages_strides[3])
    offset = cell_offset(slot, pages_strides[1], pages_strides[2], PAGE_SIZE)
    values = tl.load(pages + offset[:, None] + column[None, :], mask=mask)
    staging += element_offset(layer, staging_strides[0]) + element_offset(head, staging_strides[1])
    tl.store(staging + element_offset(token, staging_strides[2])[:, None] + column[None, :], values, mask=mask)


def pages_from_staging(
    staging: torch.Tensor, pages: Sequence[torch.Tensor], slots: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """`kernels.reference.pages_from_staging`, of every chunk in one launch for layers whose pages have the same strides
    and lie at equal distances, as the layers of one tensor do, else in one for each.

    Arguments as there, on the device; staging may also be pinned host memory. The last dimension is contiguous. Raises
    ValueError as there.
    """
    check_transfer(staging, pages, slots, scales)
    if staging.dim() > 4:
        for chunk, places in enumerate(slots):
            pages_from_staging(staging[chunk], pages, places, None if scales is None else scales[chunk])
        return
    for band, base in _bands(pages):
        _to_pages(staging[band], None if scales is None else scales[band], base, slots).run()


def staging_from_pages(pages: Sequence[torch.Tensor], slots: torch.Tensor, staging: torch.Tensor) -> None:
    """`kernels.reference.staging_from_pages`, in as many launches as `pages_from_staging`.

    Raises ValueError as there, for a slot below 0 only if slots are on the host: to look would be to wait for the
    device, where such a token of staging is left as it is.
    """
    check_transfer(staging, pages, slots)
    if slots.device.type == "cpu" and bool((slots < 0).any()):
        raise ValueError(f"slot {int(slots.min())} is no place to read from; give the slots of filled cells")
    for band, base in _bands(pages):
        _from_pages(base, slots, staging[band]).run()


def launches(shape: Shape, target: str) -> Iterator[Launch]:
    """One launch of every specialisation that a pool with these pages can meet, but for quantised staging: K and V,
    either way."""
    for pages in (shape.k_pages, shape.v_pages):
        staging, slots, base = _example(pages, shape, shape.dtype)
        yield _to_pages(staging, None, base, slots)
        yield _from_pages(base, slots, staging)


def aot_cases(target: str) -> Iterator[Case]:
    """Either way in every dtype of pages, from every dtype of staging, and a head that is no power of two."""
    for dtype in DTYPES:
        shape = Shape.example(dtype, 4096, heads=32, kv_heads=8, head_dim=128)
        name = str(dtype).removeprefix("torch.")
        for launch, way in zip(launches(shape, target), ("to pages", "from pages"), strict=False):
            yield Case(f"{name}, {way}", launch, matrix=False)
        for staged in QUANTISED:
            staging, slots, base = _example(shape.k_pages, shape, staged)
            scales = shape.meta(*staging.shape[:3], dtype=torch.float32)
            launch = _to_pages(staging, scales, base, slots)
            yield Case(f"{name}, {staged} to pages".replace("torch.", ""), launch, matrix=False)
    shape = Shape.example(torch.bfloat16, 2560, heads=32, kv_heads=32, head_dim=80)
    yield Case("head 80, to pages", next(launches(shape, target)), matrix=False)


def _example(pages: torch.Tensor, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Staging of 512 tokens and two layers, the slots, and the pages of both layers, on the device "meta"."""
    staging = shape.meta(2, 2, pages.shape[2], 512, pages.shape[3], dtype=dtype)[:, 0]
    layers = torch.empty_strided((2, *pages.shape), (pages.numel(), *pages.stride()), dtype=pages.dtype, device="meta")
    return staging, shape.meta(512, dtype=torch.int64), layers


def _bands(pages: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Layers that one launch can reach, and the pages of these layers as one tensor."""
    if isinstance(pages, torch.Tensor):
        yield slice(None), pages
        return
    offsets = [layer.storage_offset() for layer in pages]
    steps = {after - before for before, after in pairwise(offsets)} or {0}
    memory = {(layer.untyped_storage().data_ptr(), layer.stride()) for layer in pages}
    if len(memory) == 1 and len(steps) == 1 and min(steps) >= 0:
        first = pages[0]
        yield slice(None), first.as_strided((len(pages), *first.shape), (*steps, *first.stride()), offsets[0])
        return
    for index, layer in enumerate(pages):
        yield slice(index, index + 1), layer.unsqueeze(0)


def _to_pages(staging: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, slots: torch.Tensor) -> Launch:
    if scales is None:
        staging, pages = _bits(staging), _bits(pages)
    elif staging.dtype == torch.float8_e4m3fn:
        staging = staging.view(torch.uint8)  # not every GPU has that type
    tensors = dict(staging=staging, pages=pages, slots=slots, scales=scales)
    return _launch(pages_from_staging_kernel, tensors, scales_strides=None if scales is None else scales.stride())


def _from_pages(pages: torch.Tensor, slots: torch.Tensor, staging: torch.Tensor) -> Launch:
    return _launch(staging_from_pages_kernel, dict(pages=_bits(pages), slots=slots, staging=_bits(staging)))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: what is only moved needs one compiled kernel for all dtypes of a size."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _launch(kernel: Any, tensors: dict[str, torch.Tensor | None], **arguments: Any) -> Launch:
    staging, pages = tensors["staging"], tensors["pages"]
    assert staging is not None and pages is not None
    layers, kv_heads, tokens, width = staging.shape
    block_width = triton.next_power_of_2(width)
    block_tokens = max(1, _BLOCK // block_width)
    return Launch(
        kernel=kernel,
        grid=(triton.cdiv(tokens, block_tokens), kv_heads, layers),
        arguments=dict(
            **tensors,
            **arguments,
            tokens=tokens,
            staging_strides=outer_strides("staging", staging),
            pages_strides=outer_strides("pages", pages),
            PAGE_SIZE=pages.shape[2],
            WIDTH=width,
            BLOCK_TOKENS=block_tokens,
            BLOCK_WIDTH=block_width,
        ),
        options=dict(num_warps=4),
    )
