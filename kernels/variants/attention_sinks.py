"""attention_sinks: every head has a learned logit that takes part in the softmax and has no value, so that a head may
attend to nothing (gpt-oss, arXiv 2508.10925; the need for it: arXiv 2309.17453)."""

from __future__ import annotations

import torch

from kernels.variants.base import Hook, Variant
from kernels.variants.language import jit, tl


def sink_reference(head: torch.Tensor, parameters: tuple[torch.Tensor]) -> torch.Tensor:
    return parameters[0][head]


@jit
def sink(head, parameters):
    return tl.load(parameters[0] + head)


def attention_sinks(logits: torch.Tensor) -> Variant:
    """logits: [heads] floating, contiguous, on the device of the scores: of the heads that this attention has;
    -inf = none in that head."""
    return Variant("attention_sinks", sink=Hook(sink_reference, sink, (logits,)))


def example(heads: int) -> Variant:
    return attention_sinks(torch.linspace(-1.0, 2.0, heads))
