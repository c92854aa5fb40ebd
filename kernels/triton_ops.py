"""The Triton backend: the ops of `kernels.reference` under their names, and what compiles them ahead of use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import activation as _activation
from kernels import attention as _attention
from kernels import norm as _norm
from kernels import recompute as _recompute
from kernels import transfer as _transfer
from kernels.activation import activation
from kernels.attention import attention
from kernels.launch import Launch, Shape, target_of
from kernels.norm import rms_norm
from kernels.recompute import recompute
from kernels.transfer import pages_from_staging, staging_from_pages
from kernels.variants import Variant

__all__ = [
    "NAME",
    "activation",
    "attention",
    "launches",
    "pages_from_staging",
    "recompute",
    "rms_norm",
    "staging_from_pages",
    "target_of",
    "warmup",
]

NAME = "triton"


def launches(shape: Shape, target: str, variants: Sequence[Variant] = (Variant("causal"),)) -> list[Launch]:
    """One launch of every specialisation that a model of this shape can meet, whatever its batches look like.

    target: as from `target_of`. variants: those of attention that the model's layers use.
    """
    found = list(_attention.launches(shape, target, variants))
    for module in (_recompute, _norm, _activation, _transfer):
        found += module.launches(shape, target)
    return found


def warmup(
    shape: Shape, device: torch.device | str, variants: Sequence[Variant] = (Variant("causal"),)
) -> tuple[Launch, ...]:
    """Compiles and loads all `launches` for a device, so that nothing that is timed or captured later does. Returns
    them. Nothing is compiled for the interpreter."""
    found = launches(shape, target_of(torch.device(device)), variants)
    for launch in found:
        launch.compile()
    return tuple(found)
