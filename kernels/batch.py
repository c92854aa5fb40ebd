"""The packed queries of several sequence parts: what every kernel is told about tokens, positions and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch

_ALIGNMENT = 16  # bytes; what is compiled for pointers depends on it


def element_offset(index: torch.Tensor | int, stride: int) -> torch.Tensor:
    """`index * stride` in int64: the one way a page id, slot or token becomes an offset.

    A pool of a few GiB passes 2**31 elements (page 7800 with a stride of 276480 is element 2156544000), and the
    block table is int32, so the widening has to come before the product.
    """
    return torch.as_tensor(index).to(torch.int64) * stride


def to_device(tensors: Sequence[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """Host tensors on a device: all in one copy on the current stream, which neither host nor device waits for."""
    kind = torch.device(device).type
    if kind == "cpu":
        return list(tensors)
    starts = list(accumulate((-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors), initial=0))
    # Pinned, or the host would wait; its block is not used again before the copy has ended.
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=kind == "cuda")
    for tensor, start in zip(tensors, starts, strict=False):
        _unpack(packed, start, tensor).copy_(tensor)
    moved = packed.to(device, non_blocking=True)
    return [_unpack(moved, start, tensor) for tensor, start in zip(tensors, starts, strict=False)]


def _unpack(packed: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return packed[start : start + like.nbytes].view(like.dtype).view(like.shape)


@dataclass(frozen=True, eq=False)
class Part:
    """A token range of one sequence, as given to `RaggedBatch.build`.

    start, stop: tokens [start, stop) of the sequence are this part's queries; it attends to tokens [0, stop).
    pages: the sequence's page ids on the host, ids or [pages] int32 tensor; they must cover `stop` tokens. What lies
        behind those, or before every window that reaches here, is never read.
    project: whether K and V of these tokens are computed and written; False where the cells are already filled.
    advance: how many trailing tokens are advanced through the band's last layer: None = all, 0 = KV-only, 1 = last.
    """

    start: int
    stop: int
    pages: Sequence[int] | torch.Tensor
    project: bool = True
    advance: int | None = None


@dataclass(frozen=True, eq=False)
class Selection:
    """Some trailing tokens of some parts of a batch.

    rows: where they lie in the full batch: a slice if they are adjacent, else [num_tokens] int64.
    counts: tokens taken from each part of the full batch.
    batch: the selected tokens as a batch of their own; parts that give no token are left out.
    """

    rows: slice | torch.Tensor
    counts: tuple[int, ...]
    batch: RaggedBatch


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """The packed queries of several sequence parts. Two parts may be of one sequence (a recomputed share and the
    suffix): at every layer all parts' K and V are written before any part attends, so the later sees the earlier.

    query_start: [sequences + 1] int32, where each part's tokens begin in the batch.
    context: [sequences] int32, tokens of the sequence before the part's first query.
    positions: [num_tokens] int64, every token's position in its sequence.
    block_table: [sequences, max_pages] int32, page ids; what lies behind a row's end is undefined.
    slots: [num_tokens] int64, page * page_size + offset where the token's K and V go; -1 = not written.
    page_size: tokens per page.
    starts, stops: token range of each part, on the host.
    project, advance: see `Part`; on the host.
    """

    query_start: torch.Tensor
    context: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    page_size: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    project: tuple[bool, ...]
    advance: tuple[int, ...]

    @classmethod
    def build(cls, parts: Sequence[Part], page_size: int, device: torch.device | str = "cpu") -> RaggedBatch:
        """Packs `parts` in the order given. Raises ValueError for an empty or impossible part or too few pages."""
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be at least 1 token")
        if not parts:
            raise ValueError("a batch needs at least one part, got none")
        rows = [_page_row(index, part, page_size) for index, part in enumerate(parts)]
        block_table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        positions = torch.cat([torch.arange(part.start, part.stop, dtype=torch.int64) for part in parts])
        lengths = torch.tensor([part.stop - part.start for part in parts])
        owner = torch.repeat_interleave(torch.arange(len(parts)), lengths)
        page = block_table[owner, positions // page_size]
        slots = element_offset(page, page_size) + positions % page_size
        written = torch.tensor([part.project for part in parts])
        slots = torch.where(written[owner], slots, -1)
        starts = tuple(part.start for part in parts)
        stops = tuple(part.stop for part in parts)
        batch = cls(
            query_start=_query_start(starts, stops),
            context=torch.tensor(starts, dtype=torch.int32),
            positions=positions,
            block_table=block_table,
            slots=slots,
            page_size=page_size,
            starts=starts,
            stops=stops,
            project=tuple(part.project for part in parts),
            advance=tuple(part.stop - part.start if part.advance is None else part.advance for part in parts),
        )
        return batch.to(device)

    def to(self, device: torch.device | str) -> RaggedBatch:
        """A batch laid out on the host, on a device; see `to_device`."""
        if torch.device(device).type == "cpu":
            return self
        query_start, context, positions, block_table, slots = to_device(
            [self.query_start, self.context, self.positions, self.block_table, self.slots], device
        )
        return replace(
            self,
            query_start=query_start,
            context=context,
            positions=positions,
            block_table=block_table,
            slots=slots,
        )

    @property
    def num_tokens(self) -> int:
        """Queries in the batch."""
        return self.offsets[-1]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """`query_start` on the host."""
        return _offsets(self.starts, self.stops)

    @cached_property
    def everything(self) -> Selection:
        """All tokens."""
        return self._select(self._lengths)

    @cached_property
    def projected(self) -> Selection:
        """The tokens whose K and V are written."""
        return self._select(tuple(n if project else 0 for n, project in zip(self._lengths, self.project, strict=True)))

    @cached_property
    def advanced(self) -> Selection:
        """The tokens that pass through the band's last layer."""
        return self._select(self.advance)

    def page_run(self, part: int, first: int, last: int) -> int | None:
        """The id of page number `first` of a part if its pages up to number `last` have ascending ids without a gap,
        so that they can be read as one block; else None. Reads the block table on the host, so it is for a CPU."""
        run_start, ids = self._page_runs[part]
        return ids[first] if run_start[last] <= first and ids[first] >= 0 else None

    @property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @cached_property
    def _page_runs(self) -> list[tuple[list[int], list[int]]]:
        runs = []
        for row, stop in zip(self.block_table.tolist(), self.stops, strict=True):
            ids = row[: -(-stop // self.page_size)]
            run_start = [0] * len(ids)
            for number in range(1, len(ids)):
                run_start[number] = run_start[number - 1] if ids[number] == ids[number - 1] + 1 else number
            runs.append((run_start, ids))
        return runs

    def _select(self, counts: tuple[int, ...]) -> Selection:
        if counts == self._lengths:
            return Selection(rows=slice(0, self.num_tokens), counts=counts, batch=self)
        kept = [part for part, count in enumerate(counts) if count]
        ends = self.offsets[1:]
        ranges = [(ends[part] - counts[part], ends[part]) for part in kept]
        adjacent, indices = None, torch.empty(0, dtype=torch.int64)
        if all(before[1] == after[0] for before, after in pairwise(ranges)):
            adjacent = slice(ranges[0][0], ranges[-1][1]) if ranges else slice(0, 0)
        else:
            indices = torch.cat([torch.arange(*bounds, dtype=torch.int64) for bounds in ranges])
        starts = tuple(self.stops[part] - counts[part] for part in kept)
        stops = tuple(self.stops[part] for part in kept)
        # An index tensor also for one part: a [0, max_pages] table is right for a selection without tokens.
        query_start, context, table_rows, indices = to_device(
            [
                _query_start(starts, stops),
                torch.tensor(starts, dtype=torch.int32),
                torch.tensor(kept, dtype=torch.int64),
                indices,
            ],
            self.positions.device,
        )
        rows = indices if adjacent is None else adjacent
        batch = RaggedBatch(
            query_start=query_start,
            context=context,
            positions=self.positions[rows],
            block_table=self.block_table.index_select(0, table_rows),
            slots=self.slots[rows],
            page_size=self.page_size,
            starts=starts,
            stops=stops,
            project=tuple(self.project[part] for part in kept),
            advance=tuple(counts[part] for part in kept),
        )
        return Selection(rows=rows, counts=counts, batch=batch)


def _offsets(starts: tuple[int, ...], stops: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate((stop - start for start, stop in zip(starts, stops, strict=True)), initial=0))


def _query_start(starts: tuple[int, ...], stops: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(_offsets(starts, stops), dtype=torch.int32)


def _page_row(index: int, part: Part, page_size: int) -> torch.Tensor:
    """The part's page ids as [pages] int32, after checking that the part is possible."""
    if not 0 <= part.start < part.stop:
        raise ValueError(
            f"part {index} has token range [{part.start}, {part.stop}); "
            "give it at least one token and a start of 0 or more"
        )
    if part.advance is not None and not 0 <= part.advance <= part.stop - part.start:
        raise ValueError(
            f"part {index} advances {part.advance} of its {part.stop - part.start} tokens; "
            "choose a number between 0 and its length"
        )
    if isinstance(part.pages, torch.Tensor) and part.pages.device.type != "cpu":
        raise ValueError(f"part {index} has its page ids on {part.pages.device}; keep them on the host")
    row = torch.as_tensor(part.pages, dtype=torch.int32)
    needed = -(-part.stop // page_size)
    if row.dim() != 1 or row.numel() < needed:
        raise ValueError(
            f"part {index} ends at token {part.stop} and needs {needed} pages of {page_size} tokens "
            f"but was given page ids of shape {list(row.shape)}; allocate the missing pages"
        )
    # Pages before the part may be gone where a window no longer reaches them; those of its own tokens may not.
    lowest = int(row[part.start // page_size : needed].min())
    if lowest < 0:
        raise ValueError(f"part {index} has page id {lowest} among the pages of its own tokens; page ids start at 0")
    return row
