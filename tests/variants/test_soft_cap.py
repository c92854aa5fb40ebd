"""soft_cap against its formula."""

from __future__ import annotations

import pytest
import torch

from kernels.variants.soft_cap import soft_cap
from tests.variants.check import check_variant


@pytest.mark.parametrize("cap", [0.01, 1.0, 30.0])
def test_soft_cap(ops, cap):
    check_variant(ops, soft_cap(cap), score=lambda scores, head, query, keys: cap * torch.tanh(scores / cap))


def test_a_cap_is_positive():
    with pytest.raises(ValueError, match=r"cap is 0.0; it must be positive"):
        soft_cap(0.0)
