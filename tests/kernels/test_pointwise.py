"""RMSNorm and the activation of every backend."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kernels.reference
from tests.kernels import dense
from tests.tolerances import KERNEL_MULTIPLE, OP, relative_norm

LOW = (torch.float32, torch.float16, torch.bfloat16)
# Fewer rows and columns than a block, more of both, and none a power of two.
SHAPES = [(5, 30), (2, 3, 96), (70, 200), (3, 5000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rms_norm(ops, dtype, shape):
    x, weight = (torch.randn(shape) * 4).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    y = ops.rms_norm(x, weight, 0.5)
    expected = dense.rms_norm(x, weight, 0.5)
    assert y.shape == x.shape and y.dtype == dtype and torch.equal(x, before)
    bound = KERNEL_MULTIPLE * relative_norm(kernels.reference.rms_norm(x, weight, 0.5), expected)
    assert relative_norm(y, expected) <= min(bound, OP[dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_activation(ops, dtype, shape):
    gate, up = (torch.randn(shape) * 4).to(dtype), torch.randn(shape).to(dtype)
    fused = torch.cat([gate, up], dim=-1)
    before = fused.clone()
    y = ops.activation(fused)
    expected = F.silu(gate.double()) * up.double()
    assert y.shape == gate.shape and y.dtype == dtype and torch.equal(fused, before)
    bound = KERNEL_MULTIPLE * relative_norm(kernels.reference.activation(fused), expected)
    assert relative_norm(y, expected) <= min(bound, OP[dtype])


def test_activation_of_large_gates(ops):
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]])
    y = ops.activation(torch.cat([gate, torch.ones(1, 5)], dim=1))
    torch.testing.assert_close(y, torch.tensor([[0.0, 0.0, 0.0, 90.0, 1e4]]), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.usefixtures("guarded")
def test_nothing_around_the_results_is_written(interpreted, dtype):
    x = torch.randn(7, 30).to(dtype)
    assert interpreted.rms_norm(x, torch.ones(30, dtype=dtype), 1e-5).isfinite().all()
    assert interpreted.activation(x).isfinite().all()


def test_no_rows(ops):
    assert ops.rms_norm(torch.ones(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert ops.activation(torch.ones(0, 8)).shape == (0, 4)


def test_float64_is_the_references(interpreted):
    x, weight = torch.randn(5, 30, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    assert relative_norm(kernels.reference.rms_norm(x, weight, 0.5), dense.rms_norm(x, weight, 0.5)) <= 1e-12
    with pytest.raises(ValueError, match="the kernel takes bfloat16, float16 or float32"):
        interpreted.rms_norm(x, weight, 0.5)
    with pytest.raises(ValueError, match=r"gate_up is torch\.float64"):
        interpreted.activation(x)
