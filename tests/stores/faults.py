"""Stores that fail on purpose. Each wraps any store, another faulty one included, and answers as a real store would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from cacheflow.stores import ChunkInfo, Read, ReadResult, Store, StoreWrapper
from cacheflow.stores.base import CORRUPT, SHORT, as_bytes


class Faulty(StoreWrapper):
    """Wraps a store; `injected` counts the faults so far.

    Args:
        store: any store.
        match: which reads are hit; default all.
        times: how many faults before it behaves; None for no end.
    """

    def __init__(self, store: Store, match: Callable[[Read], bool] | None = None, times: int | None = None) -> None:
        super().__init__(store)
        self.injected = 0
        self._match = match or (lambda read: True)
        self._times = times
        self._lock = threading.Lock()

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        return [self.fault(read) if self._hit(read) else self.store.read([read])[0] for read in reads]

    def fault(self, read: Read) -> ReadResult:
        """What a hit read does instead."""
        raise NotImplementedError

    def _hit(self, read: Read) -> bool:
        with self._lock:
            if not self._match(read) or (self._times is not None and self.injected >= self._times):
                return False
            self.injected += 1
            return True


class Raises(Faulty):
    """A store with a bug: reads raise, after having written rubbish to the destination."""

    def fault(self, read: Read) -> ReadResult:
        scribble(read)
        raise OSError("injected: the storage went away")


class Fails(Faulty):
    """Reads fail with a reason, and leave rubbish in the destination."""

    def __init__(
        self, store: Store, reason: str, match: Callable[[Read], bool] | None = None, times: int | None = None
    ) -> None:
        super().__init__(store, match, times)
        self.reason = reason

    def fault(self, read: Read) -> ReadResult:
        scribble(read)
        return ReadResult(False, self.reason, 0)


class Short(Faulty):
    """Only the first half of the bytes arrives."""

    def fault(self, read: Read) -> ReadResult:
        self.store.read([read])
        half = read.nbytes // 2
        scribble(read, half)
        return ReadResult(False, SHORT, half)


class FlipsBit(Faulty):
    """One bit of what arrives is wrong, and the checksum says so."""

    def fault(self, read: Read) -> ReadResult:
        self.store.read([read])
        view = as_bytes(read.destination, writable=True)
        view[len(view) // 2] ^= 1
        return ReadResult(False, CORRUPT, read.nbytes)


class Hangs(Faulty):
    """Reads wait until `let_go()`, then go on as if nothing had been."""

    def __init__(self, store: Store, match: Callable[[Read], bool] | None = None, times: int | None = None) -> None:
        super().__init__(store, match, times)
        self.entered = threading.Event()
        self._released = threading.Event()

    def let_go(self) -> None:
        self._released.set()

    def fault(self, read: Read) -> ReadResult:
        self.entered.set()
        self._released.wait()
        return self.store.read([read])[0]


class Slow(Faulty):
    """Reads take that many seconds longer."""

    def __init__(self, store: Store, seconds: float, match: Callable[[Read], bool] | None = None) -> None:
        super().__init__(store, match)
        self.seconds = seconds

    def fault(self, read: Read) -> ReadResult:
        time.sleep(self.seconds)
        return self.store.read([read])[0]


class DeletesAfterLookup(StoreWrapper):
    """What look-up finds is gone right afterwards: all of it, or the keys for which `match` says so."""

    def __init__(self, store: Store, match: Callable[[str], bool] | None = None) -> None:
        super().__init__(store)
        self.injected = 0
        self._match = match or (lambda key: True)

    def lookup(self, keys: Sequence[str]) -> list[ChunkInfo | None]:
        found = self.store.lookup(keys)
        self.injected += self.store.delete([key for key in keys if self._match(key)])
        return found


def scribble(read: Read, start: int = 0) -> None:
    """Rubbish from byte `start` of the destination on; as floats most of it is NaN."""
    np.frombuffer(as_bytes(read.destination, writable=True), dtype=np.uint8)[start:] = 0xFF
