"""The Store contract: where chunks of KV live between requests.

One object per key. Storage faults are results with a reason, never exceptions: a chunk that cannot be read is a miss,
and the engine recomputes it. An exception from a store means a bug in the caller (a destination of the wrong size).
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cacheflow.stores.layout import FORMAT_VERSION, Layout

Buffer: TypeAlias = NDArray[Any] | memoryview | bytearray
"""Writable, C-contiguous memory; a CPU torch tensor gives one by `.view(torch.uint8).numpy()`."""

# Why a read failed. The set is closed: counters, tests and the engine's reports list these and no others.
MISSING = "missing"  # no such object, or gone since look-up
SHORT = "short"  # fewer bytes than its header declares
CORRUPT = "corrupt"  # a checksum, or the header itself, is wrong, or it is another key's object
STALE_FORMAT = "stale-format"  # written by another version of the format
UNREADABLE = "unreadable"  # there, but this process may not read it, or it is not a regular file
MISMATCH = "mismatch"  # intact, but of another layout than the reader expects
ERROR = "error"  # the storage reported anything else
TIMEOUT = "timeout"  # not there in time
READ_REASONS = (MISSING, SHORT, CORRUPT, STALE_FORMAT, UNREADABLE, MISMATCH, ERROR, TIMEOUT)

# Why a write stored nothing; `exists` is no failure. ERROR and TIMEOUT occur here too.
EXISTS = "exists"  # the key is there already and was left as it is
TOO_LARGE = "too-large"  # larger than the whole store
FULL = "full"  # what would have to go is leased
WRITE_REASONS = (EXISTS, TOO_LARGE, FULL, ERROR, TIMEOUT)

_KEY = re.compile(r"[0-9a-f]{64}")


class StoreError(Exception):
    """A store cannot be opened as asked: one sentence for the user, with the value and the remedy."""


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What look-up found: `tier` (memory, disk, ...), payload `nbytes`, and the `layout` of the stored object."""

    tier: str
    nbytes: int
    layout: Layout


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Read:
    """One object's cells wanted in one destination.

    Args:
        key: the object.
        layout: the whole object's layout as the reader expects it; an object of another one is a miss.
        layers: global layer indices.
        parts: names of parts, in stored order.
        kv_heads: global head indices.
        destination: receives exactly those cells, in layout order. Its content is undefined when the read fails.

    Raises:
        ValueError: the selection is not in the layout or the destination has another size.
    """

    key: str
    layout: Layout
    layers: range
    parts: tuple[str, ...]
    kv_heads: range
    destination: Buffer

    def __post_init__(self) -> None:
        check_key(self.key)
        wanted = self.layout.selection_nbytes(self.layers, self.parts, self.kv_heads)
        given = as_bytes(self.destination, writable=True).nbytes
        if given != wanted:
            raise ValueError(f"the destination has {given} bytes, the cells to read have {wanted}")

    @classmethod
    def whole(cls, key: str, layout: Layout, destination: Buffer) -> Read:
        """A read of everything in the object; `destination` has `layout.nbytes` bytes."""
        return cls(
            key=key,
            layout=layout,
            layers=layout.all_layers,
            parts=layout.all_parts,
            kv_heads=layout.all_kv_heads,
            destination=destination,
        )

    @property
    def nbytes(self) -> int:
        return as_bytes(self.destination).nbytes


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Outcome of a read or a verification.

    Args:
        ok: the destination holds the cells, and every byte from outside the process had its checksum checked.
        reason: None when ok, else one of `READ_REASONS`.
        nbytes: payload bytes that moved, also when not ok: what a link was busy with.
    """

    ok: bool
    reason: str | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Outcome of a write.

    Args:
        ok: an object with this key is in the store now.
        reason: None when written, else one of `WRITE_REASONS`.
        nbytes: payload bytes written.
    """

    ok: bool
    reason: str | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One object for listings. `nbytes` is what it takes up of the capacity, `last_use` seconds since 1970; `layout`
    is None when the object is damaged, and `reason` then says how."""

    key: str
    nbytes: int
    last_use: float
    layout: Layout | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts since the store was opened by this process.

    Args:
        found, not_found: keys looked up.
        reads, bytes_read: reads that were ok, and their bytes.
        read_failures: failed reads and damaged objects met by look-ups, by reason.
        writes, bytes_written: objects written, and their payload bytes.
        write_refusals: writes that stored nothing, by reason.
        evicted: objects removed to make room.
    """

    found: int = 0
    not_found: int = 0
    reads: int = 0
    bytes_read: int = 0
    read_failures: dict[str, int] = field(default_factory=dict)
    writes: int = 0
    bytes_written: int = 0
    write_refusals: dict[str, int] = field(default_factory=dict)
    evicted: int = 0


class Store(Protocol):
    """Thread-safe. Every method takes keys as `cacheflow.keys` makes them: 64 hex digits, else ValueError."""

    def lookup(self, keys: Sequence[str]) -> list[ChunkInfo | None]:
        """What is there, one answer per key, and a lease on each object found.

        A leased object is not evicted by this process until `release`. Holes are normal: every key is answered on its
        own.
        """

    def release(self, keys: Sequence[str]) -> None:
        """Give back one lease per key. Keys without a lease are ignored, so clean-up needs no bookkeeping.

        Look-up, reads and release count as use, in the order of the keys given: of a chain that is looked up and
        released from its head on, the head is evicted first, which is the cheapest to recompute.
        """

    def write(self, key: str, layout: Layout, payload: Buffer | bytes) -> WriteResult:
        """Store the whole object: `payload` is `layout.nbytes` bytes in layout order.

        The object appears whole or not at all. A key already there is left as it is. Least recently used objects make
        room; when leases forbid that, nothing is evicted and the write is refused.

        Raises:
            ValueError: the payload has another size than the layout.
        """

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        """Fill the destinations; one result per read, all done on return.

        An object that turns out short, corrupt, of a stale format or of another layout is removed, even when leased,
        so that it is neither met again nor in the way of a good one.
        """

    def register(self, buffer: Buffer) -> None:
        """Hint that `buffer` will be the destination of many reads, for stores that pin or register memory."""

    def delete(self, keys: Sequence[str]) -> int:
        """Remove objects, leased ones too (their readers see a miss). Returns how many were there."""

    def entries(self) -> Iterator[Entry]:
        """All objects, in no order; neither counts as use nor leases."""

    def verify(self, key: str) -> ReadResult:
        """Check every byte of one object. Reports only: a bad object stays for the user to remove."""

    def statistics(self) -> StoreStatistics:
        """A snapshot of the counters."""

    def close(self) -> None:
        """Release threads and files. What was written stays where it survives the process."""


class StoreWrapper:
    """A store in front of another one, which answers everything that a subclass does not change."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def lookup(self, keys: Sequence[str]) -> list[ChunkInfo | None]:
        return self.store.lookup(keys)

    def release(self, keys: Sequence[str]) -> None:
        self.store.release(keys)

    def write(self, key: str, layout: Layout, payload: Buffer | bytes) -> WriteResult:
        return self.store.write(key, layout, payload)

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        return self.store.read(reads)

    def register(self, buffer: Buffer) -> None:
        self.store.register(buffer)

    def delete(self, keys: Sequence[str]) -> int:
        return self.store.delete(keys)

    def entries(self) -> Iterator[Entry]:
        return self.store.entries()

    def verify(self, key: str) -> ReadResult:
        return self.store.verify(key)

    def statistics(self) -> StoreStatistics:
        return self.store.statistics()

    def close(self) -> None:
        self.store.close()


def check_key(key: str) -> None:
    """Raises ValueError unless `key` is 64 lower-case hex digits; so a key is always a safe file name too."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"a key is the 64 lower-case hex digits that chunk_keys() gives, got {key!r}")


def check_keys(keys: Sequence[str]) -> None:
    """`check_key` for each, before anything is done for the first."""
    for key in keys:
        check_key(key)


def as_bytes(buffer: Buffer | bytes, writable: bool = False) -> memoryview:
    """`buffer` as a flat view of bytes, nothing copied.

    Raises:
        ValueError: it is not C-contiguous, or has to be writable and is not.
    """
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a buffer must be C-contiguous; make it so before handing it to a store")
    if writable and view.readonly:
        raise ValueError("a destination must be writable")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def check_payload(layout: Layout, payload: Buffer | bytes) -> memoryview:
    """`payload` as bytes; raises ValueError when it is not `layout.nbytes` long or of another format."""
    if layout.version != FORMAT_VERSION:
        raise ValueError(f"this code writes format version {FORMAT_VERSION}, not {layout.version}")
    view = as_bytes(payload)
    if view.nbytes != layout.nbytes:
        raise ValueError(f"the payload has {view.nbytes} bytes, its layout declares {layout.nbytes}")
    return view


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """A zeroed `[nbytes] uint8` array that starts on a page, which lets a disk write into it directly (O_DIRECT)."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)[:nbytes]
