"""Staging <-> pages of every backend: exact, and only where the slots say."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.dense import pool

LAYERS, KV_HEADS, TOKENS, PAGE, WIDTH = 3, 2, 10, 4, 24
SLOTS = torch.tensor([29, 30, 31, 8, 9, 10, 11, 0, 1, 2])  # ends page 7, all of page 2, three of page 0


def band(layout: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [pool(9, PAGE, KV_HEADS, WIDTH, layout=layout, dtype=dtype, guard=3) for _ in range(LAYERS)]


def random_staging(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """K of a chunk as the store lays it out: [layer][part][kv_head][token][width], one part of it."""
    return torch.randn(LAYERS, 2, KV_HEADS, TOKENS, WIDTH).to(dtype)[:, 0]


@pytest.mark.parametrize("layout", ["NHD", "HND", "joined"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_token_lands_at_its_slot_and_nothing_else_changes(ops, layout, dtype):
    staging, pages = random_staging(dtype), band(layout, dtype)
    ops.pages_from_staging(staging, pages, SLOTS)
    for layer in range(LAYERS):
        for token, slot in enumerate(SLOTS.tolist()):
            assert torch.equal(pages[layer][slot // PAGE, slot % PAGE], staging[layer, :, token])
        assert int(pages[layer].isfinite().sum()) == staging[layer].numel()


@pytest.mark.parametrize("source", ["NHD", "HND", "joined"])
@pytest.mark.parametrize("target", ["NHD", "HND", "joined"])
def test_round_trip_across_layouts_is_bit_identical(ops, source, target):
    first, second, staging = band(source), band(target), random_staging()
    ops.pages_from_staging(staging, first, SLOTS)
    between = torch.full((LAYERS, 2, KV_HEADS, TOKENS, WIDTH), float("nan"))
    ops.staging_from_pages(first, SLOTS, between[:, 1])
    assert torch.equal(between[:, 1], staging) and between[:, 0].isnan().all()
    moved = SLOTS.flip(0)
    ops.pages_from_staging(between[:, 1], second, moved)
    back = torch.full_like(staging, float("nan"))
    ops.staging_from_pages(second, moved, back)
    assert torch.equal(back, staging)


def test_tokens_without_a_slot_are_skipped(ops):
    staging, pages = random_staging(), band("NHD")
    slots = torch.where(torch.arange(TOKENS) % 3 == 0, -1, SLOTS)
    ops.pages_from_staging(staging, pages, slots)
    kept = slots >= 0
    assert torch.equal(pages[1].flatten(0, 1)[slots[kept]], staging[1].transpose(0, 1)[kept])
    assert int(pages[1].isfinite().sum()) == int(kept.sum()) * KV_HEADS * WIDTH


def test_a_share_of_the_heads_and_of_the_tokens(ops):
    staging, pages = random_staging(), band("HND")
    ops.pages_from_staging(staging[:, 1:, 2:7], [layer[:, :, 1:] for layer in pages], SLOTS[2:7])
    assert torch.equal(pages[2].flatten(0, 1)[SLOTS[2:7], 1], staging[2, 1, 2:7])
    assert int(pages[2].isfinite().sum()) == 5 * WIDTH


@pytest.mark.parametrize(
    "staging,pages,slots,message",
    [
        (random_staging(), band("NHD")[:2], SLOTS, "staging has 3 layers and pages 2"),
        (random_staging()[:, :1], band("NHD"), SLOTS, r"staging holds \[1, 10, 24\] .* need \[2, 10, 24\]"),
        (random_staging(), band("NHD"), SLOTS[:1], r"staging holds \[2, 10, 24\] .* need \[2, 1, 24\]"),
        (random_staging(torch.float16), band("NHD"), SLOTS, r"torch.float16 .* torch.float32; stage the same"),
    ],
    ids=["layers", "heads", "tokens", "dtype"],
)
def test_nothing_is_broadcast_or_converted(ops, staging, pages, slots, message):
    with pytest.raises(ValueError, match=message):
        ops.pages_from_staging(staging, pages, slots)
    with pytest.raises(ValueError, match=message):
        ops.staging_from_pages(pages, slots, staging)
    assert all(layer.isnan().all() for layer in pages)


def test_reading_without_a_slot_is_refused(ops):
    with pytest.raises(ValueError, match="slot -1 is no place to read from"):
        ops.staging_from_pages(band("NHD"), SLOTS.clone().fill_(-1), random_staging())
