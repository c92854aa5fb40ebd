"""Staging <-> pages of every backend: exact, and only where the slots say."""

from __future__ import annotations

import pytest
import torch

import kernels.reference
from tests.kernels.conftest import count_launches
from tests.kernels.dense import lazy, pool

LAYERS, KV_HEADS, TOKENS, PAGE, WIDTH = 3, 2, 10, 4, 24
SLOTS = torch.tensor([29, 30, 31, 8, 9, 10, 11, 0, 1, 2])  # ends page 7, all of page 2, three of page 0


def band(layout: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [pool(9, PAGE, KV_HEADS, WIDTH, layout=layout, dtype=dtype, guard=3) for _ in range(LAYERS)]


def random_staging(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """K of a chunk as the store lays it out: [layer][part][kv_head][token][width], one part of it."""
    return torch.randn(LAYERS, 2, KV_HEADS, TOKENS, WIDTH).to(dtype)[:, 0]


@pytest.mark.parametrize("layout", ["NHD", "HND", "joined"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
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


LAYOUTS = {
    "(2, P, B, H, D)": ((2, 9, PAGE, KV_HEADS, WIDTH), lambda x: (x[0], x[1])),
    "(P, 2, B, H, D)": ((9, 2, PAGE, KV_HEADS, WIDTH), lambda x: (x[:, 0], x[:, 1])),
    "(P, B, H, 2D)": ((9, PAGE, KV_HEADS, 2 * WIDTH), lambda x: x.split(WIDTH, dim=-1)),
    "(P, H, B, 2D)": ((9, KV_HEADS, PAGE, 2 * WIDTH), lambda x: x.transpose(1, 2).split(WIDTH, dim=-1)),
    "every second page": ((2, 18, PAGE, KV_HEADS, WIDTH), lambda x: (x[0, ::2], x[1, ::2])),
}


@pytest.mark.parametrize("reader", LAYOUTS)
@pytest.mark.parametrize("writer", LAYOUTS)
def test_k_and_v_in_one_tensor(ops, writer, reader):
    pools = []
    for layout in (writer, reader):
        shape, parts = LAYOUTS[layout]
        whole = torch.full((LAYERS, *shape), float("nan"))
        pools.append((whole, [[parts(layer)[part] for layer in whole] for part in (0, 1)]))
    staging = torch.randn(2, LAYERS, KV_HEADS, TOKENS, WIDTH)
    between, back = torch.full_like(staging, float("nan")), torch.full_like(staging, float("nan"))
    for part in (0, 1):
        ops.pages_from_staging(staging[part], pools[0][1][part], SLOTS)
        ops.staging_from_pages(pools[0][1][part], SLOTS, between[part])
        ops.pages_from_staging(between[part], pools[1][1][part], SLOTS)
        ops.staging_from_pages(pools[1][1][part], SLOTS, back[part])
    assert torch.equal(back, staging)
    assert all(int(whole.isfinite().sum()) == staging.numel() for whole, _ in pools)


def test_a_layout_that_cannot_be_read_wide_is_refused(interpreted):
    pages = [torch.zeros(9, PAGE, WIDTH, KV_HEADS).transpose(2, 3)] * LAYERS
    with pytest.raises(ValueError, match="pages has stride 2 in its last dimension"):
        interpreted.pages_from_staging(random_staging(), pages, SLOTS)


def test_a_band_is_one_launch_where_its_layers_lie_alike(interpreted, monkeypatch):
    ran = count_launches(monkeypatch)
    staging = random_staging()
    base = torch.full((LAYERS, 9, PAGE, KV_HEADS, WIDTH), float("nan"))
    every_second = torch.full((2 * LAYERS, 9, PAGE, KV_HEADS, WIDTH), float("nan"))
    for pages, expected in (
        (base, 1),
        (list(base), 1),
        (list(every_second[1::2]), 1),
        ([base[0], base[2], base[1]], LAYERS),
        ([every_second[0], every_second[1], every_second[3]], LAYERS),
        (band("NHD"), LAYERS),
        ([*band("NHD")[:2], *band("HND")[:1]], LAYERS),
    ):
        ran.clear()
        interpreted.pages_from_staging(staging, pages, SLOTS)
        back = torch.full_like(staging, float("nan"))
        interpreted.staging_from_pages(pages, SLOTS, back)
        assert len(ran) == 2 * expected and torch.equal(back, staging)


def quantised(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, what is staged of them, and its scales."""
    values = torch.randn(LAYERS, KV_HEADS, TOKENS, WIDTH) * torch.rand(LAYERS, KV_HEADS, TOKENS, 1)
    top = 127 if dtype == torch.int8 else 448
    scales = values.abs().amax(-1) / top
    staged = values / scales.unsqueeze(-1)
    return values, (staged.round() if dtype == torch.int8 else staged).to(dtype), scales


@pytest.mark.parametrize("pages_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_staging_times_its_scales(ops, dtype, pages_dtype):
    values, staged, scales = quantised(dtype)
    pages, same = band("HND", pages_dtype), band("HND", pages_dtype)
    slots = torch.where(torch.arange(TOKENS) == 4, -1, SLOTS)
    ops.pages_from_staging(staged, pages, slots, scales=scales)
    kernels.reference.pages_from_staging(staged, same, slots, scales=scales)
    kept = slots >= 0
    error = scales * 0.5 if dtype == torch.int8 else values.abs().amax(-1) / 16
    for layer in range(LAYERS):
        assert torch.equal(pages[layer].nan_to_num(99), same[layer].nan_to_num(99))
        found = pages[layer].flatten(0, 1)[slots[kept]].float().transpose(0, 1)
        bound = error[layer][:, kept, None] + 0.01 * values[layer][:, kept].abs() + 1e-7
        assert ((found - values[layer][:, kept]).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_quantised_value(ops, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F] if dtype != torch.int8 else codes  # e4m3's NaN is not stored
    staged = codes.view(dtype).view(1, 1, -1, 1).repeat(1, 1, 1, WIDTH)
    pages = torch.zeros(1, len(codes), 1, 1, WIDTH)
    ops.pages_from_staging(staged, pages, torch.arange(len(codes)), scales=torch.ones(1, 1, len(codes)))
    assert torch.equal(pages[0, :, 0, 0, 0], codes.view(dtype).float())


def test_scales_travel_with_what_they_scale(ops):
    _, staged, scales = quantised(torch.int8)
    pages = band("NHD")
    ops.pages_from_staging(staged, pages, SLOTS, scales=torch.zeros_like(scales))
    assert (pages[0].flatten(0, 1)[SLOTS] == 0).all()
    wrong = [
        (staged, None, "staging is torch.int8 and has no scales"),
        (staged.float(), scales, "staging is torch.float32 and has scales"),
        (staged, scales[..., 1:], r"scales are \[3, 2, 9\] torch.float32; give one float32 for each .* \[3, 2, 10\]"),
        (staged, scales.half(), r"scales are \[3, 2, 10\] torch.float16"),
    ]
    for given, given_scales, message in wrong:
        with pytest.raises(ValueError, match=message):
            ops.pages_from_staging(given, pages, SLOTS, scales=given_scales)


@pytest.mark.parametrize("pages,layer_stride", [(7802, 0), (2, 2**30 + 16)], ids=["pages", "layers"])
def test_beyond_32_bits(ops, pages, layer_stride):
    stride = 276480
    memory = lazy(2 * layer_stride + pages * stride)
    layers = 3 if layer_stride else 1
    band = memory.as_strided((layers, pages, 16, 2, 64), (layer_stride or memory.numel(), stride, 64 * 270, 64, 1))
    staging, back = torch.randn(layers, 2, 16, 64).half(), torch.zeros(layers, 2, 16, 64).half()
    slots = torch.arange((pages - 1) * 16, pages * 16)
    ops.pages_from_staging(staging, band, slots)
    assert torch.equal(band[:, -1].transpose(1, 2), staging)
    ops.staging_from_pages(band, slots, back)
    assert torch.equal(back, staging)


def test_reading_without_a_slot_is_refused(ops):
    with pytest.raises(ValueError, match="slot -1 is no place to read from"):
        ops.staging_from_pages(band("NHD"), SLOTS.clone().fill_(-1), random_staging())


@pytest.mark.parametrize("layout", ["NHD", "HND", "joined"])
@pytest.mark.parametrize("places", ["a run", "apart", "some without"])
def test_several_chunks_at_once(ops, layout, places):
    """As each for itself. Of the last, one token has no slot where `places` says so."""
    chunks, apart = 3, torch.randperm(9 * PAGE)
    slots = (torch.arange(7, 7 + 9) if places == "a run" else apart[:9]).view(chunks, 3)
    if places == "some without":
        slots[2, 1] = -1
    staging = torch.randn(chunks, LAYERS, 2, KV_HEADS, 3, WIDTH)[:, :, 1]
    pages, same = band(layout), band(layout)
    ops.pages_from_staging(staging, pages, slots)
    for chunk in range(chunks):
        kernels.reference.pages_from_staging(staging[chunk], same, slots[chunk])
    for one, other in zip(pages, same, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert torch.equal(one[one.isfinite()], other[other.isfinite()])
    assert int(pages[0].isfinite().sum()) == int((slots >= 0).sum()) * KV_HEADS * WIDTH
    with pytest.raises(ValueError, match=r"chunks \[3\] and slots \[2\]; give the slots of each"):
        ops.pages_from_staging(staging, pages, slots[:2])
