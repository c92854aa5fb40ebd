"""What a request owns on the device while it is being restored and decoded, and how ops become batches over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from cacheflow.devices import Staging
from cacheflow.op import Op, Part
from cacheflow.pages import HiddenPool, PagePool
from cacheflow.plane import Plane
from cacheflow.stores.base import Read
from cacheflow.stores.layout import Layout
from kernels import batch as ragged

DIRECT = 4096  # bytes; a destination that begins at a multiple of it can be filled by a disk without a copy


@dataclass(frozen=True)
class StoredChunk:
    """The object in the store that holds a prefix column; it may hold one token more than that, the prompt's last."""

    key: str
    layout: Layout


@dataclass
class Session:
    """One request on the device.

    tokens: the prompt, [n] int64 on the host. pages: ids, in token order; with room for what will be decoded.
    chunks: the stored object of every prefix column, None for a hole.
    slots: [room in pages] int64 on the host; where each token's K and V lie in the page pool.
    hidden_rows: [width] int64 rows of the hidden pool, by column, of hidden states that wait between two ops.
    logits, sampled: set by the op that advances the last token, and there when it has ended: [vocab] float, and the
        first token's id as a tensor of one element, both on the host.
    """

    plane: Plane
    tokens: torch.Tensor
    pages: list[int]
    chunks: tuple[StoredChunk | None, ...]
    slots: torch.Tensor
    hidden_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None
    sampled: torch.Tensor | None = None


@dataclass(frozen=True)
class Prepared:
    """A compute op laid out for the device, on the host and before it runs.

    rows: where the hidden states at the band's first layer lie in the hidden pool; None: they are embedded.
    keep: (batch rows, hidden pool rows) to be kept when the op ends.
    sampled: (session, batch row) whose last token ends with this op.
    """

    op: Op
    batch: ragged.RaggedBatch
    tokens: torch.Tensor | None
    rows: slice | torch.Tensor | None
    keep: tuple[torch.Tensor, slice | torch.Tensor] | None
    sampled: tuple[tuple[Session, int], ...]


@dataclass(frozen=True)
class Landing:
    """One chunk of a fetch op: its share of the staging buffer and its way into pages.

    start: byte of the staging buffer at which it lands. slots: [tokens] int64 on the host, -1 for tokens of the object
    that the column does not use. part: the column as a part of the op.
    """

    part: Part
    read: Read
    start: int
    slots: torch.Tensor


def alike(landings: Sequence[Landing]) -> Iterator[list[Landing]]:
    """Neighbours of one shape, at equal distances: what `staged` can show as one tensor."""
    group: list[Landing] = []
    for landing in landings:
        if group and (
            landing.read.nbytes != group[0].read.nbytes
            or landing.read.layout != group[0].read.layout
            or landing.start - group[-1].start != _padded(landing.read.nbytes)
        ):
            yield group
            group = []
        group.append(landing)
    if group:
        yield group


def staged(group: Sequence[Landing], buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[chunks, layers, 2, kv_heads, tokens, width], K before V: a group's share of a staging buffer, [bytes] uint8."""
    read, start, step = group[0].read, group[0].start, _padded(group[0].read.nbytes)
    layout, last = read.layout, start + (len(group) - 1) * step + read.nbytes
    shape = (len(read.layers), len(layout.parts), layout.kv_heads, layout.tokens, layout.parts[0].width)
    cells = buffer[start : start + read.nbytes].view(dtype).view(shape)
    whole = buffer[start:last].view(dtype)
    return whole.as_strided((len(group), *shape), (step // dtype.itemsize, *cells.stride()))


def _padded(nbytes: int) -> int:
    """Bytes from a landing to the next."""
    return -(-nbytes // DIRECT) * DIRECT


def adjacent(runs: Sequence[torch.Tensor]) -> slice | torch.Tensor:
    """Row numbers as a slice if they are neighbours, which reads without a copy, else as an index."""
    rows = torch.cat(list(runs))
    first, count = int(rows[0]), len(rows)
    return slice(first, first + count) if torch.equal(rows, torch.arange(first, first + count)) else rows


class Sessions:
    """All sessions, and the preparation of ops over them. Runs on the loop's thread only."""

    def __init__(self, pages: PagePool, hidden: HiddenPool) -> None:
        self.pages = pages
        self.hidden = hidden
        self.dtype = pages.k.dtype
        self._by_id: dict[str, Session] = {}
        self._latest: tuple[tuple[Part, ...], bool, ragged.RaggedBatch] | None = None  # see _batch

    def add(self, session: Session) -> None:
        self._by_id[session.plane.request.id] = session

    def remove(self, request: str) -> None:
        session = self._by_id.pop(request)
        self._latest = None  # the next request of that name has other pages
        for rows in session.hidden_rows.values():
            self.hidden.release(rows)
        session.hidden_rows.clear()

    def __contains__(self, request: str) -> bool:
        return request in self._by_id

    def __getitem__(self, request: str) -> Session:
        return self._by_id[request]

    def prepare(self, op: Op) -> Prepared:
        """Lay out a compute op that its planes have just accounted for."""
        last = op.layers.stop == self._by_id[op.parts[0].request].plane.layers
        sampled, row = [], 0
        for part in op.parts:
            row += part.tokens
            if last and part.advance:
                sampled.append((self._by_id[part.request], row - 1))
        batch = self._batch(op.parts, last)
        tokens, rows = None, None
        if op.layers.start == 0:
            tokens = torch.cat([self._by_id[p.request].tokens[p.start : p.stop] for p in op.parts])
        else:
            rows = adjacent([session.hidden_rows[column] for session, column, _ in self._columns(op)])
        # Columns that are complete now need their rows no more. The op may still read them: whoever gets them next
        # writes them in a later op of the same stream.
        for session in self._by_id.values():
            self._drop_finished(session)
        # Where they are neighbours, the states are a view of the pool and are updated in place.
        keep = None if isinstance(rows, slice) else self._keep(op)
        return Prepared(op, batch, tokens, rows, keep, tuple(sampled))

    def _batch(self, parts: tuple[Part, ...], last: bool) -> ragged.RaggedBatch:
        """The parts as the kernels see them; last: at the model's last layer only their last tokens advance. The same
        from layer to layer, so the latest is kept."""
        if self._latest is None or self._latest[:2] != (parts, last):
            advance = 1 if last else None
            pieces = [
                ragged.Part(p.start, p.stop, self._by_id[p.request].pages, p.project, advance if p.advance else 0)
                for p in parts
            ]
            self._latest = parts, last, ragged.RaggedBatch.build(pieces, self.pages.page_size)
        return self._latest[2]

    def _columns(self, op: Op) -> list[tuple[Session, int, int]]:
        """(session, column, first batch row) of every column of a compute op."""
        found, row = [], 0
        for part in op.parts:
            session = self._by_id[part.request]
            for column in range(*session.plane.columns_of(part)):
                found.append((session, column, row))
                row += session.plane.request.width(column)
        return found

    def _keep(self, op: Op) -> tuple[torch.Tensor, slice | torch.Tensor] | None:
        """Which hidden states outlive the op, and where."""
        batch_rows, pool_rows = list[torch.Tensor](), list[torch.Tensor]()
        for session, column, first in self._columns(op):
            width = session.plane.request.width(column)
            if session.plane.holds(column):
                if column not in session.hidden_rows:
                    session.hidden_rows[column] = self.hidden.allocate(width)
                batch_rows.append(torch.arange(first, first + width))
                pool_rows.append(session.hidden_rows[column])
        return (torch.cat(batch_rows), adjacent(pool_rows)) if batch_rows else None

    def _drop_finished(self, session: Session) -> None:
        """Give back the hidden states of columns that need no more of them."""
        for column in [c for c in session.hidden_rows if not session.plane.holds(c)]:
            self.hidden.release(session.hidden_rows.pop(column))

    def landings(self, op: Op, buffer: Staging) -> list[Landing]:
        """Lay out a fetch op over a staging buffer."""
        found, offset = [], 0
        for part in op.parts:
            session = self._by_id[part.request]
            for column in range(*session.plane.columns_of(part)):
                chunk = session.chunks[column]
                assert chunk is not None, "a policy fetches only what is stored"
                layout = chunk.layout
                size = layout.selection_nbytes(op.layers, layout.all_parts, layout.all_kv_heads)
                region = buffer.host[offset : offset + size]
                piece = session.plane.part(column, column + 1)
                slots = session.slots[piece.start : piece.stop]
                if layout.tokens > piece.tokens:
                    slots = torch.nn.functional.pad(slots, (0, layout.tokens - piece.tokens), value=-1)
                read = Read(
                    key=chunk.key,
                    layout=layout,
                    layers=op.layers,
                    parts=layout.all_parts,
                    kv_heads=layout.all_kv_heads,
                    destination=region.numpy(),
                )
                found.append(Landing(piece, read, offset, slots))
                offset += _padded(size)
        return found
