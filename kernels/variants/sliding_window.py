"""sliding_window: a query sees itself and the window - 1 keys before it (Longformer, arXiv 2004.05150; Mistral)."""

from __future__ import annotations

from typing import Any

import torch

from kernels.variants.base import Hook, Variant
from kernels.variants.language import jit


def mask_reference(head: torch.Tensor, query: torch.Tensor, key: torch.Tensor, parameters: tuple[int]) -> torch.Tensor:
    return query - key < parameters[0]


def bounds_reference(first: int, last: int, parameters: tuple[int]) -> tuple[int, int, int, int]:
    # The first query looks back farthest; what it and the last one see, all see.
    return first - parameters[0] + 1, last - parameters[0] + 1, last + 1, last + 1


@jit
def mask(head, query, key, parameters):
    return query - key < parameters[0]


@jit
def bounds(first, last, parameters):
    return first - parameters[0] + 1, last - parameters[0] + 1, last + 1, last + 1


def sliding_window(window: int) -> Variant:
    """window: tokens a query sees, 1 = itself alone. Raises ValueError for less."""
    if window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 token, or None for all")
    parameters: tuple[Any, ...] = (window,)
    return Variant(
        "sliding_window",
        mask=Hook(mask_reference, mask, parameters),
        bounds=Hook(bounds_reference, bounds, parameters),
    )


def example(heads: int) -> Variant:
    return sliding_window(window=11)
