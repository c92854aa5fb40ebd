"""soft_cap: scores stay between -cap and cap, as cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118)."""

from __future__ import annotations

import torch

from kernels.variants.base import Hook, Variant
from kernels.variants.language import jit, tl


def score_reference(
    score: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor, parameters: tuple[float]
) -> torch.Tensor:
    return parameters[0] * torch.tanh(score / parameters[0])


@jit
def score(score, head, query, key, parameters):
    # tanh(x) = 1 - 2 / (exp(2 x) + 1) needs no library, so every back end has it; if exp overflows, the limit is right.
    # 2.885 is 2 log2(e).
    return parameters[0] * (1 - 2 / (tl.exp2(score * (2.885390081777927 / parameters[0])) + 1))


def soft_cap(cap: float) -> Variant:
    """cap: bound of a score's size, in its natural units. Raises ValueError unless it is positive."""
    if not cap > 0:
        raise ValueError(f"cap is {cap}; it must be positive")
    return Variant("soft_cap", score=Hook(score_reference, score, (float(cap),)))


def example(heads: int) -> Variant:
    return soft_cap(cap=2.0)
