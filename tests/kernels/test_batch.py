"""What a ragged batch tells the kernels."""

from __future__ import annotations

import pytest
import torch

from kernels.batch import Part, RaggedBatch, element_offset


def three_parts(*advance: int | None, project: tuple[bool, ...] = (True, True, True)) -> RaggedBatch:
    """Tokens [2, 7), [0, 3) and [5, 6) with pages of 4."""
    advance = advance or (None, None, None)
    ranges = [(2, 7, [5, 3]), (0, 3, torch.tensor([8, -1, 2**31 - 1], dtype=torch.int32)), (5, 6, [1, 2])]
    return RaggedBatch.build(
        [
            Part(start, stop, pages, project=writes, advance=count)
            for (start, stop, pages), writes, count in zip(ranges, project, advance, strict=True)
        ],
        page_size=4,
    )


def test_fields():
    batch = three_parts(0, None, 1, project=(True, True, False))
    assert batch.query_start.tolist() == [0, 5, 8, 9] and batch.query_start.dtype == torch.int32
    assert batch.context.tolist() == [2, 0, 5] and batch.context.dtype == torch.int32
    assert batch.positions.tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 5] and batch.positions.dtype == torch.int64
    assert batch.block_table[:, :2].tolist() == [[5, 3], [8, -1], [1, 2]] and batch.block_table.dtype == torch.int32
    assert batch.slots.tolist() == [22, 23, 12, 13, 14, 32, 33, 34, -1] and batch.slots.dtype == torch.int64
    assert (batch.starts, batch.stops, batch.offsets) == ((2, 0, 5), (7, 3, 6), (0, 5, 8, 9))
    assert (batch.project, batch.advance) == ((True, True, False), (0, 3, 1))
    assert batch.num_tokens == 9 and batch.page_size == 4


def test_selecting_everything_is_the_batch_itself():
    batch = three_parts()
    for selection in (batch.everything, batch.projected, batch.advanced):
        assert selection.batch is batch and selection.rows == slice(0, 9)


@pytest.mark.parametrize(
    "advance,rows",
    [
        ((2, 0, 1), [3, 4, 8]),
        ((0, 3, 1), slice(5, 9)),
        ((2, 3, 0), slice(3, 8)),
        ((0, 0, 1), slice(8, 9)),
        ((0, 0, 0), slice(0, 0)),
        ((1, 1, 1), [4, 7, 8]),
    ],
    ids=str,
)
def test_advanced_tokens_are_a_batch_of_their_own(advance, rows):
    batch = three_parts(*advance)
    selection = batch.advanced
    assert (selection.rows if isinstance(rows, slice) else selection.rows.tolist()) == rows
    sub = selection.batch
    assert selection.counts == advance and sub.num_tokens == sum(advance)
    kept = [part for part in range(3) if advance[part]]
    assert sub.stops == tuple(batch.stops[part] for part in kept)
    assert sub.starts == tuple(batch.stops[part] - advance[part] for part in kept)
    assert sub.context.tolist() == list(sub.starts) and sub.query_start.tolist() == list(sub.offsets)
    assert sub.context.dtype == sub.query_start.dtype == sub.block_table.dtype == torch.int32
    assert torch.equal(sub.positions, batch.positions[selection.rows])
    assert torch.equal(sub.slots, batch.slots[selection.rows])
    assert torch.equal(sub.block_table, batch.block_table[kept])


def test_projected_tokens_leave_filled_parts_out():
    selection = three_parts(project=(True, False, True)).projected
    assert selection.rows.tolist() == [0, 1, 2, 3, 4, 8] and selection.batch.stops == (7, 6)
    assert (selection.batch.slots >= 0).all()


def test_page_runs():
    batch = RaggedBatch.build([Part(0, 24, [4, 5, 6, 9, 10, 3, 7])], page_size=4)
    runs = {(0, 2): 4, (1, 2): 5, (2, 3): None, (3, 4): 9, (0, 4): None, (4, 5): None, (5, 5): 3}
    assert {pages: batch.page_run(0, *pages) for pages in runs} == runs


def test_offsets_are_64_bit():
    for index, stride, offset in ((7800, 276480, 2156544000), (262145, 8192, 2147491840)):
        for given in (torch.tensor([index], dtype=torch.int32), index):
            result = element_offset(given, stride)
            assert result.dtype == torch.int64 and result.item() == offset
    # The builder's own: page id 2**30 of a page of 4 is slot 2**32.
    batch = RaggedBatch.build([Part(0, 1, torch.tensor([2**30], dtype=torch.int32))], page_size=4)
    assert batch.slots.tolist() == [2**32]


@pytest.mark.parametrize(
    "parts,page_size,message",
    [
        ([], 4, "a batch needs at least one part, got none"),
        ([Part(0, 1, [0])], 0, "page_size is 0; it must be at least 1"),
        ([Part(3, 3, [0])], 4, r"part 0 has token range \[3, 3\)"),
        ([Part(-1, 3, [0])], 4, r"part 0 has token range \[-1, 3\)"),
        ([Part(0, 1, [0]), Part(0, 5, [0])], 4, "part 1 ends at token 5 and needs 2 pages of 4 tokens"),
        ([Part(0, 1, [[0]])], 4, r"page ids of shape \[1, 1\]"),
        ([Part(0, 5, [0, -1])], 4, "part 0 has page id -1 among the pages of its own tokens"),
        ([Part(2, 5, [0, 1], advance=4)], 4, "part 0 advances 4 of its 3 tokens"),
        ([Part(2, 5, [0, 1], advance=-1)], 4, "part 0 advances -1 of its 3 tokens"),
        ([Part(0, 1, torch.zeros(1, dtype=torch.int32, device="meta"))], 4, "on meta; keep them on the host"),
    ],
)
def test_impossible_parts_are_refused(parts, page_size, message):
    with pytest.raises(ValueError, match=message):
        RaggedBatch.build(parts, page_size)
