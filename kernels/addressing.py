"""Offsets of elements in tensors too large for 32 bits, for use inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def element_offset(index, stride):
    """`index * stride` in int64; `kernels.batch.element_offset` says why the widening comes first.

    index: integers of any width and shape; stride: scalar.
    """
    return tl.cast(index, tl.int64) * stride


@triton.jit
def cell_offset(slots, page_stride, token_stride, PAGE_SIZE: tl.constexpr):
    """Where the cells at `slots` start in a layer's pages, before the head's offset. slots: int64, 0 or more."""
    return element_offset(slots // PAGE_SIZE, page_stride) + element_offset(slots % PAGE_SIZE, token_stride)
