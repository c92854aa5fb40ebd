"""causal: a query sees itself and every key before it. What attention is without a variant, by name."""

from __future__ import annotations

from kernels.variants.base import Variant


def causal() -> Variant:
    """No hooks: causality holds for every variant."""
    return Variant("causal")


def example(heads: int) -> Variant:
    return causal()
