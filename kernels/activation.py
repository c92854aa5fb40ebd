"""SiLU(gate) * up, between the MLP's two GEMMs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.addressing import element_offset
from kernels.launch import DTYPES, Case, Launch, Shape

# Elements of a program, and columns of it at most: 8 or more adjacent ones for each thread of four warps. A guess.
_BLOCK, _BLOCK_WIDTH = 4096, 1024


@triton.jit(do_not_specialize=["rows"])
def activation_kernel(gate_up, out, rows, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """gate_up: [rows, 2 * WIDTH], gate first; out: [rows, WIDTH]; both contiguous."""
    columns: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    program = tl.program_id(0)
    row = program // columns * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = program % columns * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    gates = gate_up + element_offset(row, 2 * WIDTH)[:, None] + column[None, :]
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + element_offset(row, WIDTH)[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)


def activation(gate_up: torch.Tensor) -> torch.Tensor:
    """`kernels.reference.activation` in one launch, rounded once.

    gate_up: [..., 2 * intermediate] bf16, fp16 or fp32, gate first. Returns [..., intermediate], same dtype. Raises
    ValueError for another dtype.
    """
    if gate_up.dtype not in DTYPES:
        raise ValueError(f"gate_up is {gate_up.dtype}; the kernel takes bfloat16, float16 and float32")
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    _launch(gate_up, out).run()
    return out


def launches(shape: Shape, target: str) -> Iterator[Launch]:
    """The one specialisation that a model of this shape meets."""
    yield _launch(shape.meta(1, 2 * shape.intermediate_size), shape.meta(1, shape.intermediate_size))


def aot_cases(target: str) -> Iterator[Case]:
    """The dtypes."""
    for dtype in DTYPES:
        shape = Shape.example(dtype, 4096, heads=32, kv_heads=8, head_dim=128)
        for launch in launches(shape, target):
            yield Case(f"{shape.intermediate_size} {dtype}".replace("torch.", ""), launch, matrix=False)


def _launch(gate_up: torch.Tensor, out: torch.Tensor) -> Launch:
    width = out.shape[-1]
    rows = out.numel() // width
    block_width = min(_BLOCK_WIDTH, triton.next_power_of_2(width))
    block_rows = _BLOCK // block_width
    return Launch(
        kernel=activation_kernel,
        grid=(triton.cdiv(rows, block_rows) * triton.cdiv(width, block_width),),
        arguments=dict(
            gate_up=gate_up, out=out, rows=rows, WIDTH=width, BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width
        ),
        options=dict(num_warps=4),
    )
