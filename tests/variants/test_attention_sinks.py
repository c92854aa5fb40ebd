"""attention_sinks against their formula."""

from __future__ import annotations

import pytest
import torch

from kernels.variants.attention_sinks import attention_sinks
from tests.variants.check import HEADS, check_variant


@pytest.mark.parametrize("size", [3.0, 50.0])
def test_attention_sinks(ops, size):
    logits = size * torch.linspace(-1.0, 1.0, HEADS)
    check_variant(ops, attention_sinks(logits), sink=lambda head: logits[head].item())
    check_variant(ops, attention_sinks(logits), sink=lambda head: logits[head].item(), window=7)
