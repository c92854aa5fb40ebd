"""Both forms of the attention kernel, whole and cut, and what only it has: tiles, descriptors, a merge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

import kernels.attention
import kernels.reference
from kernels.addressing import element_offset
from kernels.attention_kernel import attention_kernel, decoded, part_of_tile
from kernels.attention_tiles import Tile, choose_form, choose_tiles
from kernels.batch import Part, RaggedBatch
from kernels.launch import Launch
from kernels.staged import Staged
from kernels.variants import combine, make, with_window
from tests.interpreter import interpret
from tests.kernels.conftest import count_launches, holes
from tests.kernels.dense import Sequences, lazy
from tests.tolerances import KERNEL_MULTIPLE, OP, relative_norm

TILE, SPLIT = Tile(64, 32, 1, 1), Tile(16, 16, 1, 1)
FORMS = {"tile": (TILE, 1), "cut tile": (TILE, 3), "split": (SPLIT, 4), "more splits than tiles": (SPLIT, 9)}
LOW = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def force(monkeypatch):
    """Makes every launch take this tile and this number of splits."""

    def forced(tile: Tile, splits: int) -> None:
        monkeypatch.setattr(kernels.attention, "choose_form", lambda *arguments: (tile, splits))

    return forced


def attend(ops, sequences: Sequences, q: torch.Tensor, batch: RaggedBatch, **how) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.attention(
        q, sequences.k_pages, sequences.v_pages, batch=batch, scale=q.shape[2] ** -0.5, return_lse=True, **how
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [None, 30])
def test_forms(interpreted, force, guarded, form, window):
    force(*FORMS[form])
    parts = ((0, 90, 93), (1, 0, 20), (0, 17, 25), (2, 6, 7))
    sequences = Sequences.random([93, 20, 7], kv_heads=1, width=24, v_width=40)
    batch = sequences.batch(*parts)
    q = sequences.queries(batch, heads=3)
    out, lse = attend(interpreted, sequences, q, batch, window=window)
    expected, expected_lse = sequences.expected(q, *parts, window=window)
    assert relative_norm(out, expected) <= OP[torch.float32] and relative_norm(lse, expected_lse) <= OP[torch.float32]


@pytest.mark.parametrize("form", ["tile", "split"])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_error_is_that_of_the_dtype(interpreted, force, form, width, dtype):
    force(*FORMS[form])
    sequences = Sequences.random([150], kv_heads=1, width=width, page_size=16, dtype=dtype)
    parts = ((0, 138, 150),)
    batch = sequences.batch(*parts)
    q = sequences.queries(batch, heads=4)
    expected, expected_lse = sequences.expected(q, *parts)
    out, lse = attend(interpreted, sequences, q, batch)
    reference, reference_lse = attend(kernels.reference, sequences, q, batch)
    assert relative_norm(out, expected) <= KERNEL_MULTIPLE * relative_norm(reference, expected)
    assert relative_norm(lse, expected_lse) <= KERNEL_MULTIPLE * relative_norm(reference_lse, expected_lse)


@pytest.mark.parametrize("form", ["tile", "more splits than tiles"])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_and_splits_without_keys(interpreted, force, guarded, form, sinks):
    force(*FORMS[form])
    logits = torch.tensor([0.5, float("-inf"), 2.0])  # a sink of no weight is none
    variant = combine(holes(), make("attention_sinks", logits=logits) if sinks else None)
    parts = ((0, 3, 45), (1, 0, 9))  # the second ends before the first key that anybody sees
    sequences = Sequences.random([45, 9], kv_heads=1)
    unfilled = sequences.pages[0][:3]  # of tokens 0..11
    sequences.k_pages[unfilled], sequences.v_pages[unfilled] = float("nan"), float("nan")
    batch = sequences.batch(*parts)
    batch.block_table[1] = 2**31 - 1
    q = sequences.queries(batch, heads=3)
    how = dict(visible=lambda head, query, key: key >= 12 and query % 2 == 0)
    if sinks:
        how |= dict(sink=lambda head: logits[head].item())
    expected, expected_lse = sequences.expected(q, *parts, **how)
    out, lse = attend(interpreted, sequences, q, batch, variant=variant)
    assert relative_norm(out, expected) <= OP[torch.float32]
    empty = expected_lse == float("-inf")
    assert empty.any() and torch.equal(lse == float("-inf"), empty) and (out[empty] == 0).all()
    assert relative_norm(lse[~empty], expected_lse[~empty]) <= OP[torch.float32]


@pytest.mark.parametrize("layout", ["NHD", "HND", "joined"])
@pytest.mark.parametrize("width,page_size", [(16, 16), (24, 48)])
def test_full_tiles_through_descriptors(interpreted, force, monkeypatch, layout, width, page_size):
    force(Tile(32, 16, 1, 1, descriptor=True), 1)
    ran = count_launches(monkeypatch)
    sequences = Sequences.random([100], width=width, page_size=page_size, layout=layout, guard=8)
    parts = ((0, 60, 100),)
    batch = sequences.batch(*parts)
    q = sequences.queries(batch, heads=4)
    out, _ = attend(interpreted, sequences, q, batch)
    assert relative_norm(out, sequences.expected(q, *parts)[0]) <= OP[torch.float32]
    assert ran[0].arguments["k_descriptor"] is not None and ran[0].arguments["v_descriptor"] is not None


@pytest.mark.parametrize("change", [dict(guard=3), dict(v_width=18), dict(page_size=8), dict(page_size=24)], ids=str)
def test_no_descriptor_where_a_bulk_copy_cannot_go(interpreted, force, monkeypatch, change):
    force(Tile(32, 16, 1, 1, descriptor=True), 1)
    ran = count_launches(monkeypatch)
    sequences = Sequences.random([40], **(dict(width=16, page_size=16, guard=0) | change))
    batch = sequences.batch((0, 30, 40))
    q = sequences.queries(batch, heads=4)
    out, _ = attend(interpreted, sequences, q, batch)
    assert relative_norm(out, sequences.expected(q, (0, 30, 40))[0]) <= OP[torch.float32]
    assert ran[0].arguments["k_descriptor"] is None and ran[0].arguments["v_descriptor"] is None


def test_few_rows_split_the_keys_and_many_do_not():
    def form(*parts: tuple[int, int], window: int | None = None) -> tuple[Tile, int]:
        batch = RaggedBatch.build([Part(start, stop, range(2000)) for start, stop in parts], 64)
        pages = torch.empty(1, 64, 8, 128, dtype=torch.bfloat16, device="meta")
        tiles = choose_tiles("cuda:90", pages, pages, staged=None)
        tile, splits = choose_form(batch, with_window(None, window), 4, 8, tiles, "cuda:90")
        assert tile in tiles
        return tile, splits

    (large, whole), (small, cut) = form((0, 8192)), form((8191, 8192))
    assert whole == 1 and large.rows > small.rows
    # One token leaves 8 programs to 132 multiprocessors; a split has at least 256 keys.
    assert cut == 32 and form((255, 256))[1] == 1 and form((511, 512))[1] == 2
    # A suffix of 64 tokens is two tiles of 128 rows for each of 8 KV heads.
    assert form((32768 - 64, 32768)) == (large, 9)
    # Many requests keep a GPU busy without, and so does a window that leaves few keys.
    assert form(*[(8191, 8192)] * 64) == (small, 1)
    assert form((8191, 8192), window=100) == (small, 1)


@pytest.mark.parametrize(
    "variant,part,pages",
    [
        (None, (280, 288), range(18)),
        (with_window(None, 20), (280, 288), range(16, 18)),
        (with_window(None, 8), (280, 281), range(17, 18)),
        (holes(), (280, 288), range(18)),
        (holes(), (4, 9), range(0)),  # it sees keys from 12 on, which are behind it
    ],
    ids=["causal", "window", "window within a page", "all", "none"],
)
def test_tiles_that_nobody_sees_are_not_visited(interpreted, monkeypatch, variant, part, pages):
    """A tile is a page here, and looks it up in the block table once for K and once for V."""
    sequences = Sequences.random([288], kv_heads=1, width=16, page_size=16)
    batch = sequences.batch((0, *part))
    looked_up, load = [], InterpreterBuilder.create_masked_load

    def recording(self, pointers, *rest, **options):
        number = (pointers.data.astype(np.int64) - batch.block_table.data_ptr()) // batch.block_table.itemsize
        looked_up.extend(number[(number >= 0) & (number < batch.block_table.numel())].tolist())
        return load(self, pointers, *rest, **options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", recording)
    attend(interpreted, sequences, sequences.queries(batch, heads=1), batch, variant=variant)
    assert sorted(looked_up) == sorted([*pages, *pages])


def test_tiles_of_rows_find_their_part(interpreted):
    lengths, group, rows = [1, 70, 5, 5, 64], 3, 16
    starts = torch.tensor([0, 1, 71, 76, 81, 145], dtype=torch.int32)
    tiles = 145 * group // rows + len(lengths)
    found = torch.full((tiles, 2), -1, dtype=torch.int32)
    Launch(kernel=_parts, grid=(tiles,), arguments=dict(starts=starts, parts=5, out=found, GROUP=3, ROWS=16)).run()
    for part, length in enumerate(lengths):
        numbers = found[found[:, 0] == part, 1].tolist()
        assert numbers == list(range(len(numbers))) and len(numbers) * rows >= length * group


@interpret
def _parts(starts, parts, out, GROUP: tl.constexpr, ROWS: tl.constexpr):
    part, number = part_of_tile(starts, parts, tl.program_id(0), GROUP, ROWS)
    tl.store(out + 2 * tl.program_id(0), part)
    tl.store(out + 2 * tl.program_id(0) + 1, number)


def test_offsets_have_64_bits(interpreted):
    index = torch.tensor([7800, 262145], dtype=torch.int32)
    stride, out = torch.tensor([276480, 8192], dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    Launch(kernel=_offsets, grid=(2,), arguments=dict(index=index, stride=stride, out=out)).run()
    assert out.tolist() == [2156544000, 2147491840]


def test_pages_and_queries_beyond_32_bits(interpreted, force):
    """Pages, staging slots and tokens of q lie so far apart that the last is behind element 2**31."""
    exact = Sequences.random([48], dtype=torch.float16, page_size=16)
    far, stride = [7801, 7799, 7800], 276480
    pages = lazy((max(far) + 1) * stride).view(-1, 16, 270, 64)
    k_pages, v_pages = pages[:, :, :2, :16], pages[:, :, 2:4, :16]
    k_pages[far], v_pages[far] = exact.k_pages[exact.pages[0]], exact.v_pages[exact.pages[0]]
    slots = lazy(3 * (2**30 + 512)).view(3, 2, 2, -1)[..., :256].view(3, 2, 2, 16, 16)  # [slots, K and V, heads, ...]
    slots[2, 0], slots[2, 1] = (x[far[0]].transpose(0, 1) for x in (k_pages, v_pages))
    staged = Staged.build(slots[:, 0], slots[:, 1], [(0, [2])])
    q = lazy(8 * (2**31 // 7 + 1)).view(8, -1)[:, :64].view(8, 4, 16)
    for start in (40, 4):  # full tiles, and those that need a mask
        batch = RaggedBatch.build([Part(start, start + 8, far)], 16)
        expected, _ = exact.expected(q.copy_(exact.queries(batch, heads=4)), (0, start, start + 8))
        for tile, source in ((16, None), (32, None), (16, staged)):  # keys of a tile: one page or two
            force(Tile(16, tile, 1, 1), 1)
            out, _ = interpreted.attention(q, k_pages, v_pages, batch=batch, scale=0.25, staged=source)
            assert relative_norm(out, expected) <= OP[torch.float16]


def test_splits_beyond_32_bits(interpreted, force, monkeypatch):
    """As if the batch had 2**25 tokens of 4 heads, of which the first 5 are computed."""
    tokens, many, width = 5, 2**25, 16
    force(SPLIT, 2)
    ran, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: ran.append(launch))
    sequences = Sequences.random([60])
    batch = sequences.batch((0, 55, 60))
    q = sequences.queries(batch, heads=4)
    attend(interpreted, sequences, q, batch)
    cut_out, cut_lse = lazy(many * 4 * width + 2**12), lazy(many * 4 + 2**12)
    out, lse = torch.full((tokens + 1, 4, width), 77.0), torch.full((tokens + 1, 4), 77.0)
    attention, merge = ran
    run(replace(attention, arguments=attention.arguments | dict(out=cut_out, lse=cut_lse, num_tokens=many)))
    whole = dict(partial=cut_out, partial_lse=cut_lse, out=out, lse=lse, rows=many * 4)
    run(replace(merge, arguments=merge.arguments | whole))
    expected, expected_lse = sequences.expected(q, (0, 55, 60))
    assert relative_norm(out[:tokens], expected) <= OP[torch.float16]
    assert relative_norm(lse[:tokens], expected_lse) <= OP[torch.float16]


@interpret
def _offsets(index, stride, out):
    i = tl.program_id(0)
    value = element_offset(tl.load(index + i), tl.load(stride + i))
    tl.static_assert(value.dtype == tl.int64)
    tl.store(out + i, value)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_e4m3_number_is_decoded(interpreted, native, dtype):
    bits = torch.arange(256, dtype=torch.uint8)
    bits[[0x7F, 0xFF]] = 0  # NaN, which no writer stores
    numbers = bits.view(torch.float8_e4m3fn)
    out = torch.empty(256, dtype=dtype)
    Launch(kernel=_decode, grid=(1,), arguments=dict(values=numbers if native else bits, out=out)).run()
    assert torch.equal(out, numbers.float().to(dtype))


@interpret
def _decode(values, out):
    index = tl.arange(0, 256)
    tl.store(out + index, decoded(tl.load(values + index), out.dtype.element_ty))


def test_what_the_kernel_cannot_do_is_refused(interpreted):
    sequences = Sequences.random([8], width=264)
    batch = sequences.batch((0, 4, 8))
    with pytest.raises(ValueError, match="heads have 264 and 264 elements; the kernels take up to 256"):
        attend(interpreted, sequences, sequences.queries(batch, 4), batch)
    sequences = Sequences.random([8])
    sequences.v_pages = sequences.v_pages.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="v_pages has stride 2 in its last dimension"):
        attend(interpreted, sequences, sequences.queries(batch, 4), batch)


def test_no_queries_launch_nothing(interpreted, monkeypatch):
    ran = count_launches(monkeypatch)
    sequences = Sequences.random([8])
    batch = RaggedBatch.build([Part(0, 8, sequences.pages[0], advance=0)], 4).advanced.batch
    out, lse = attend(interpreted, sequences, torch.zeros(0, 4, 16), batch)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4) and not ran


def test_one_launch_serves_all_parts(interpreted, monkeypatch):
    ran = count_launches(monkeypatch)
    sequences = Sequences.random([40, 5])
    batch = sequences.batch((0, 3, 40), (1, 4, 5))
    attend(interpreted, sequences, sequences.queries(batch, 4), batch)
    assert [launch.kernel for launch in ran] == [attention_kernel]
