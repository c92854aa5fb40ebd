"""alibi: a score falls linearly with the distance, in every head at its own slope (arXiv 2108.12409)."""

from __future__ import annotations

import math

import torch

from kernels.variants.base import Hook, Variant
from kernels.variants.language import jit, tl


def score_reference(
    score: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor, parameters: tuple[torch.Tensor]
) -> torch.Tensor:
    return score - parameters[0][head] * (query - key)


@jit
def score(score, head, query, key, parameters):
    return score - tl.load(parameters[0] + head) * (query - key)


def slopes(heads: int) -> torch.Tensor:
    """[heads] float32, as the paper has them: 2^(-8/n), 2^(-16/n), ... for n heads; if n is no power of two, those of
    the power below it, then every other of the power above."""
    power = 2 ** math.floor(math.log2(heads))
    own = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return torch.tensor(own + between)


def alibi(slopes: torch.Tensor) -> Variant:
    """slopes: [heads] float32, contiguous, on the device of the scores: of the heads that this attention has."""
    return Variant("alibi", score=Hook(score_reference, score, (slopes,)))


def example(heads: int) -> Variant:
    return alibi(slopes(heads))
