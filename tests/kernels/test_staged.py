"""Attention over chunks that are read where they landed, of every backend and in every stored dtype."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import kernels.attention
import kernels.reference
from kernels.attention_tiles import Tile
from kernels.batch import RaggedBatch
from kernels.launch import Shape
from kernels.staged import Staged
from kernels.variants import Variant
from tests.kernels.dense import Sequences
from tests.tolerances import KERNEL_MULTIPLE, OP, relative_norm

CHUNK = 16
E4M3 = torch.float8_e4m3fn
SUFFIX = (0, 68, 80)  # sequence, first and last token of a part
LOW = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Landed:
    """Sequence 0 of 80 tokens, of which some chunks are in staging and not in their pages, and sequence 1."""

    sequences: Sequences
    batch: RaggedBatch
    staged: Staged

    @classmethod
    def make(
        cls,
        *parts: tuple[int, int, int],
        chunks: range = range(1, 4),
        stored: torch.dtype | None = None,
        dtype: torch.dtype = torch.float32,
        chunk_tokens: int = CHUNK,
        size: float = 1.0,
        **how,
    ) -> Landed:
        """size: factor of the values."""
        sequences = Sequences.random([80, 9], dtype=dtype, **how)
        for v in (*sequences.v, sequences.v_pages):
            v *= size
        slots = torch.randperm(7, generator=torch.Generator().manual_seed(3))[: len(chunks)].tolist()
        sequences.k[0], k, k_scale = cls.stage(sequences.k[0], chunks, chunk_tokens, slots, stored)
        sequences.v[0], v, v_scale = cls.stage(sequences.v[0], chunks, chunk_tokens, slots, stored)
        for token in range(chunks.start * chunk_tokens, chunks.stop * chunk_tokens):
            page, offset = divmod(token, sequences.page_size)
            sequences.k_pages[sequences.pages[0][page], offset] = float("nan")
            sequences.v_pages[sequences.pages[0][page], offset] = float("nan")
        runs = [(chunks.start, slots) if index == 0 else (0, []) for index, _, _ in parts]
        batch = sequences.batch(*parts)
        first, stop = (
            -(-chunks.start * chunk_tokens // sequences.page_size),
            chunks.stop * chunk_tokens // sequences.page_size,
        )
        for row, (index, _, _) in zip(batch.block_table, parts, strict=True):
            if index == 0:
                row[first:stop] = 2**31 - 1  # what is in staging needs no page
        return cls(sequences, batch, Staged.build(k, v, runs, k_scale, v_scale))

    @staticmethod
    def stage(
        dense: torch.Tensor, chunks: range, chunk_tokens: int, slots: list[int], stored: torch.dtype | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens [t, heads, width] as they are once stored, in float64; and staging, with scales, as the store lays out
        K or V: a part of [slots, 2, heads, tokens, width]."""
        exact = dense.double()
        heads, width = dense.shape[1:]
        both = torch.full((7, 2, heads, chunk_tokens, width), float("nan")).to(stored or dense.dtype)
        both_scales = torch.full((7, heads, 2, chunk_tokens), float("nan"))  # strided otherwise than the values
        values, scales = both[:, 1], None if stored is None else both_scales[:, :, 1]
        for chunk, slot in zip(chunks, slots, strict=True):
            place = slice(chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
            tokens = dense[place]
            if scales is None:
                values[slot] = tokens.transpose(0, 1)
                continue
            scale = tokens.float().abs().amax(dim=2) / (127 if stored == torch.int8 else 448)
            coded = tokens.float() / scale.unsqueeze(2)
            coded = coded.round().to(torch.int8) if stored == torch.int8 else coded.to(stored)
            values[slot], scales[slot] = coded.transpose(0, 1), scale.T
            decoded = coded.double() * scale.unsqueeze(2)
            assert relative_norm(decoded, tokens) < (0.01 if stored == torch.int8 else 0.04)
            exact[place] = decoded
        return exact, values, scales

    def attend(self, ops, heads: int = 4, **how) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, out and log-sum-exp."""
        q = self.sequences.queries(self.batch, heads)
        pages = self.sequences.k_pages, self.sequences.v_pages
        scale = q.shape[2] ** -0.5
        out, lse = ops.attention(q, *pages, batch=self.batch, scale=scale, staged=self.staged, return_lse=True, **how)
        return q, out, lse


def check(ops, *parts: tuple[int, int, int], window: int | None = None, **how) -> None:
    landed = Landed.make(*parts, **how)
    q, out, lse = landed.attend(ops, window=window)
    expected, expected_lse = landed.sequences.expected(q, *parts, window=window)
    assert relative_norm(out, expected) <= OP[q.dtype] and relative_norm(lse, expected_lse) <= OP[q.dtype]


PARTS = {
    "suffix behind it": (SUFFIX,),
    "recomputed chunk before it": ((0, 0, 16),),
    "queries within it": ((0, 20, 31), (0, 40, 64)),
    "all of these, and a sequence without": ((0, 5, 16), (1, 2, 9), SUFFIX, (0, 30, 40)),
}


@pytest.mark.parametrize("stored", [None, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_parts(ops, parts, stored):
    check(ops, *parts, stored=stored)


@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
@pytest.mark.parametrize("window", [1, 20, 45])
def test_window(ops, window, stored):
    check(ops, SUFFIX, (0, 30, 40), window=window, stored=stored)


@pytest.mark.parametrize("chunks", [range(0, 4), range(2, 3), range(0), range(3, 5)], ids=str)
@pytest.mark.parametrize("page_size,layout", [(4, "HND"), (16, "NHD"), (3, "joined")])
def test_runs_and_pages(ops, chunks, page_size, layout):
    check(ops, SUFFIX, chunks=chunks, page_size=page_size, layout=layout)


@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_chunks_of_several_tiles(ops, window, stored):
    parts = (SUFFIX, (0, 35, 50), (1, 0, 9))
    check(ops, *parts, window=window, stored=stored, chunks=range(0, 2), chunk_tokens=32, page_size=16)


@pytest.mark.parametrize("stored", [None, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("width,v_width", [(24, 40), (80, 16)])
def test_head_size(ops, width, v_width, stored):
    check(ops, SUFFIX, width=width, v_width=v_width, stored=stored)


@pytest.mark.parametrize("form", [(Tile(64, 16, 1, 1), 1), (Tile(16, 16, 1, 1), 3)], ids=["tile", "split"])
@pytest.mark.parametrize("stored", [None, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_error_is_that_of_the_dtype(interpreted, monkeypatch, form, stored, dtype):
    monkeypatch.setattr(kernels.attention, "choose_form", lambda *arguments: form)
    landed = Landed.make(SUFFIX, dtype=dtype, stored=stored, width=64)
    q, out, lse = landed.attend(interpreted)
    _, reference, reference_lse = landed.attend(kernels.reference)
    expected, expected_lse = landed.sequences.expected(q, SUFFIX)
    assert relative_norm(out, expected) <= KERNEL_MULTIPLE * relative_norm(reference, expected)
    assert relative_norm(lse, expected_lse) <= KERNEL_MULTIPLE * relative_norm(reference_lse, expected_lse)


@pytest.mark.parametrize("stored", [torch.int8, E4M3], ids=str)
def test_small_values_keep_their_digits_in_float16(ops, stored):
    landed = Landed.make(SUFFIX, dtype=torch.float16, stored=stored, chunks=range(0, 4), size=2**-7)
    q, out, _ = landed.attend(ops)
    expected, _ = landed.sequences.expected(q, SUFFIX)
    assert relative_norm(out, expected) <= OP[torch.float16] / 2


def test_e4m3_is_the_same_on_a_gpu_without_it(interpreted, monkeypatch):
    landed = Landed.make(SUFFIX, stored=E4M3)
    _, native, _ = landed.attend(interpreted)
    monkeypatch.setattr(kernels.attention, "_HAVE_E4M3", ())
    _, bits, _ = landed.attend(interpreted)
    assert torch.equal(native, bits)


@pytest.mark.parametrize("target,dtype", [("cuda:80", torch.uint8), ("cuda:90", E4M3), ("hip:gfx942", torch.uint8)])
def test_gpus_without_e4m3_are_given_its_bits(interpreted, target, dtype):
    shape = Shape.example(torch.bfloat16, 128, heads=2, kv_heads=2, head_dim=16)
    launch, *_ = kernels.attention.example_launches(shape, target, Variant("causal"), (Tile(16, 16, 1, 1), 1), E4M3)
    assert launch.arguments["k_staged"].dtype == launch.arguments["v_staged"].dtype == dtype


def test_scales_travel_with_their_tokens(ops):
    """Eight bits cost no more than their rounding, at any size of the values; without its scales a chunk is refused."""
    landed = Landed.make(SUFFIX, stored=torch.int8)
    q, out, _ = landed.attend(ops)
    exact = Sequences.random([80, 9])
    assert relative_norm(out, exact.expected(q, SUFFIX)[0]) < 0.02
    staged = landed.staged
    with pytest.raises(ValueError, match=r"staged torch.int8 needs scales; give K's and V's"):
        Staged.build(staged.k, staged.v, [(0, [])])
    with pytest.raises(ValueError, match=r"staged torch.float32 needs no scales"):
        Staged.build(staged.k.float(), staged.v.float(), [(0, [])], staged.k_scale, staged.v_scale)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(heads=1), r"staged K has heads and width \[1, 16\] and pages \[2, 16\]"),
        (dict(dtype=torch.float16), "staged K is torch.float16 and q torch.float32; stage q's dtype, int8 or float8"),
        (dict(runs=[(0, [1]), (0, [])]), "staged has 2 runs and the batch 1 parts"),
        (dict(runs=[(0, [4])]), "a run from chunk 0 in slots .4. is not in staging of 4 slots"),
        (dict(runs=[(-1, [2])]), "a run from chunk -1"),
        (dict(v_tokens=8), "stage them alike"),
    ],
    ids=["heads", "dtype", "parts", "slot", "first chunk", "K and V"],
)
def test_misfits_are_refused(ops, change, message):
    sequences = Sequences.random([20])
    batch = sequences.batch((0, 18, 20))
    shape = (4, change.get("heads", 2))
    dtype = change.get("dtype", torch.float32)
    k = torch.zeros(*shape, CHUNK, 16, dtype=dtype)
    v = torch.zeros(*shape, change.get("v_tokens", CHUNK), 16, dtype=dtype)
    q = sequences.queries(batch, 4)
    with pytest.raises(ValueError, match=message):
        staged = Staged.build(k, v, change.get("runs", [(0, [1])]))
        ops.attention(q, sequences.k_pages, sequences.v_pages, batch=batch, scale=1.0, staged=staged)


def test_the_kernel_wants_chunks_of_whole_tiles(interpreted):
    sequences = Sequences.random([20])
    batch = sequences.batch((0, 18, 20))
    staged = Staged.build(torch.zeros(1, 2, 12, 16), torch.zeros(1, 2, 12, 16), [(0, [0])])
    with pytest.raises(ValueError, match="staged chunks of 12 tokens are not whole tiles of 16; copy them to pages"):
        interpreted.attention(
            sequences.queries(batch, 4), sequences.k_pages, sequences.v_pages, batch=batch, scale=1.0, staged=staged
        )
