"""RMSNorm by itself: before the MLP, and the last one. The norm before attention is part of `kernels.recompute`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.addressing import element_offset
from kernels.launch import DTYPES, Case, Launch, Shape

# Elements of a program: 8 or more for each thread of four warps, so that accesses are 128 bits wide. A guess.
_BLOCK = 4096


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, weight, out, rows, eps, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """x, out: [rows, WIDTH], contiguous."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    offset = element_offset(row, WIDTH)[:, None] + column[None, :]
    values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    result = values * scale[:, None] * weights[None, :]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`kernels.reference.rms_norm` in one launch.

    x: [..., width] bf16, fp16 or fp32; weight: [width], same dtype. Returns [..., width], x's dtype. Raises ValueError
    for another dtype or width.
    """
    if x.dtype not in DTYPES or weight.dtype != x.dtype or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype}; "
            "the kernel takes bfloat16, float16 or float32, and one width and dtype for both"
        )
    x = x.contiguous()
    out = x.new_empty(x.shape)
    _launch(x, weight.contiguous(), out, eps).run()
    return out


def launches(shape: Shape, target: str) -> Iterator[Launch]:
    """The one specialisation that a model of this shape meets."""
    x = shape.meta(1, shape.hidden_size)
    yield _launch(x, x[0], x, 1e-6)


def aot_cases(target: str) -> Iterator[Case]:
    """A wide row, a narrow one that is no power of two, and the other dtypes."""
    for dtype, hidden_size in (
        (torch.bfloat16, 8192),
        (torch.bfloat16, 576),
        (torch.float16, 4096),
        (torch.float32, 4096),
    ):
        shape = Shape.example(dtype, hidden_size, heads=1, kv_heads=1, head_dim=64)
        for launch in launches(shape, target):
            yield Case(f"{hidden_size} {dtype}".replace("torch.", ""), launch, matrix=False)


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> Launch:
    width = x.shape[-1]
    rows = x.numel() // width
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, _BLOCK // block_width)
    return Launch(
        kernel=rms_norm_kernel,
        grid=(triton.cdiv(rows, block_rows),),
        arguments=dict(
            x=x, weight=weight, out=out, rows=rows, eps=eps, WIDTH=width, BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width
        ),
        options=dict(num_warps=min(16, max(4, block_width // 1024))),
    )
