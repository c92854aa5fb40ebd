"""causal changes nothing, by name."""

from __future__ import annotations

from kernels.variants.causal import causal
from tests.variants.check import check_variant


def test_causal(ops):
    check_variant(ops, causal())
    check_variant(ops, causal(), window=13)
