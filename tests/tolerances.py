"""Every tolerance of the test suite, and how errors are measured. Equal here and in CI."""

from __future__ import annotations

import torch

# Relative norm of float32 logits against a cold prefill or Transformers, summed in another order.
FLOAT32_LOGITS = 1e-4

# Relative norm of one op against the same formula in float64.
OP = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

# A kernel may be wrong, against float64, by this multiple of the error of the reference in the same dtype.
KERNEL_MULTIPLE = 2

# A low-precision model may be wrong by this multiple of the error that Transformers makes in the same dtype.
LOW_PRECISION_MULTIPLE = 1.25


def relative_norm(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| over all elements, in float64; NaN anywhere gives NaN, which passes no bound."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()).clamp_min(1e-300))
