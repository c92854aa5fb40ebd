"""Chunks in host memory, gone with the process."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cacheflow.stores.base import (
    EXISTS,
    FULL,
    MISMATCH,
    MISSING,
    TOO_LARGE,
    Buffer,
    ChunkInfo,
    Entry,
    Read,
    ReadResult,
    StoreError,
    StoreStatistics,
    WriteResult,
    aligned_buffer,
    as_bytes,
    check_key,
    check_keys,
    check_payload,
)
from cacheflow.stores.bookkeeping import Leases, Tally
from cacheflow.stores.layout import Layout


@dataclass(slots=True)
class _Object:
    layout: Layout
    payload: NDArray[np.uint8]
    last_use: float


class MemoryStore:
    """A store in this process's memory, least recently used objects going first.

    No checksums: the bytes never leave the process. `register` does nothing, because a copy within host memory is as
    fast from any page.

    Args:
        capacity_bytes: payload bytes it may hold.
    """

    tier = "memory"

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise StoreError(f"a memory store needs a capacity of at least one byte, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._objects: OrderedDict[str, _Object] = OrderedDict()  # least recently used first
        self._used = 0  # payload bytes of the objects, and of those being written
        self._leases = Leases()
        self._tally = Tally()

    @property
    def used_bytes(self) -> int:
        """Payload bytes held now."""
        with self._lock:
            return self._used

    def lookup(self, keys: Sequence[str]) -> list[ChunkInfo | None]:
        check_keys(keys)
        return [self._lookup(key) for key in keys]

    def _lookup(self, key: str) -> ChunkInfo | None:
        with self._lock:
            found = self._touch(key)
            if found is not None:
                self._leases.take(key)
        self._tally.looked_up(found is not None)
        return None if found is None else ChunkInfo(self.tier, found.layout.nbytes, found.layout)

    def release(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._leases.give_back(key):
                with self._lock:
                    self._touch(key)

    def write(self, key: str, layout: Layout, payload: Buffer | bytes) -> WriteResult:
        check_key(key)
        source = check_payload(layout, payload)
        with self._lock:
            refusal = self._reserve(key, layout.nbytes)
        if refusal is not None:
            return self._tally.written(WriteResult(refusal == EXISTS, refusal, 0))
        try:
            # Outside the lock: a copy of many MiB must not stop look-ups. The space is reserved already.
            copy = aligned_buffer(layout.nbytes)
            copy[:] = np.frombuffer(source, dtype=np.uint8)
        except BaseException:
            with self._lock:
                self._used -= layout.nbytes
            raise
        with self._lock:
            if key in self._objects:  # another thread was faster; its object stays
                self._used -= layout.nbytes
                return self._tally.written(WriteResult(True, EXISTS, 0))
            self._objects[key] = _Object(layout, copy, time.time())
        return self._tally.written(WriteResult(True, None, layout.nbytes))

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        return [self._tally.read(self._read(read)) for read in reads]

    def _read(self, read: Read) -> ReadResult:
        with self._lock:
            found = self._touch(read.key)
            if found is not None and found.layout != read.layout:
                self._drop(read.key)
                return ReadResult(False, MISMATCH, 0)
        if found is None:
            return ReadResult(False, MISSING, 0)
        # The array stays alive through `found` if the object is evicted or deleted meanwhile.
        destination = np.frombuffer(as_bytes(read.destination), dtype=np.uint8)
        filled = 0
        for offset, nbytes in read.layout.ranges(read.layers, read.parts, read.kv_heads):
            destination[filled : filled + nbytes] = found.payload[offset : offset + nbytes]
            filled += nbytes
        return ReadResult(True, None, filled)

    def register(self, buffer: Buffer) -> None:
        as_bytes(buffer, writable=True)

    def delete(self, keys: Sequence[str]) -> int:
        check_keys(keys)
        with self._lock:
            return sum(self._drop(key) for key in keys)

    def entries(self) -> Iterator[Entry]:
        with self._lock:
            objects = [(key, item.layout, item.last_use) for key, item in self._objects.items()]
        for key, layout, last_use in objects:
            yield Entry(key, layout.nbytes, last_use, layout)

    def verify(self, key: str) -> ReadResult:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        return ReadResult(False, MISSING, 0) if found is None else ReadResult(True, None, found.layout.nbytes)

    def statistics(self) -> StoreStatistics:
        return self._tally.snapshot()

    def close(self) -> None:
        with self._lock:
            self._used -= sum(item.layout.nbytes for item in self._objects.values())
            self._objects.clear()

    # The rest is called with the lock held.

    def _touch(self, key: str) -> _Object | None:
        found = self._objects.get(key)
        if found is not None:
            self._objects.move_to_end(key)
            found.last_use = time.time()
        return found

    def _drop(self, key: str) -> bool:
        found = self._objects.pop(key, None)
        if found is not None:
            self._used -= found.layout.nbytes
        return found is not None

    def _reserve(self, key: str, nbytes: int) -> str | None:
        """Make room and count it as used; or the reason why not, with nothing evicted."""
        if key in self._objects:
            return EXISTS
        if nbytes > self.capacity_bytes:
            return TOO_LARGE
        held = self._leases.held()
        missing = self._used + nbytes - self.capacity_bytes
        victims = []
        for other, item in self._objects.items():
            if missing <= 0:
                break
            if other not in held:
                victims.append(other)
                missing -= item.layout.nbytes
        if missing > 0:
            return FULL
        for victim in victims:
            self._drop(victim)
        self._tally.evicted(len(victims))
        self._used += nbytes
        return None
