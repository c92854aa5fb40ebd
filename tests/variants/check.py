"""A variant against its formula: what every test of one calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernels.attention
from kernels.attention_tiles import Tile
from kernels.variants import Variant
from tests.kernels.dense import Sequences
from tests.tolerances import OP, relative_norm

HEADS = 6
FORMS = ((Tile(32, 16, 1, 1), 1), (Tile(16, 16, 1, 1), 3))  # the tile form, and the split form
PARTS = ((0, 46, 53), (1, 0, 12), (0, 20, 22))  # sequence, first and last token: a suffix, a prompt, and a chunk


def check_variant(ops: Any, variant: Variant, window: int | None = None, **formula: Any) -> None:
    """Attention with the variant equals a dense float64 formula in every form, for 6 query heads on 2 KV heads: scores,
    visible and sink as in `tests.kernels.dense.attend`."""
    sequences = Sequences.random([53, 12], kv_heads=2, width=24, v_width=16, page_size=5)
    batch = sequences.batch(*PARTS)
    q = 2 * sequences.queries(batch, HEADS)
    expected, expected_lse = sequences.expected(q, *PARTS, window=window, **formula)
    for form in FORMS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels.attention, "choose_form", lambda *arguments, form=form: form)
            out, lse = ops.attention(
                q,
                sequences.k_pages,
                sequences.v_pages,
                batch=batch,
                scale=q.shape[2] ** -0.5,
                window=window,
                variant=variant,
                return_lse=True,
            )
        assert relative_norm(out, expected) <= OP[torch.float32]
        assert relative_norm(lse, expected_lse) <= OP[torch.float32]
