"""A store behind a link of limited bandwidth that all its readers share.

Each call of `read` gets a window on the link: it starts when the link is free and the latency since the call has
passed, and lasts as long as its bytes take. The latency of one call thus overlaps the transfer of another. The bytes
are really read inside the window, and the reader sleeps until it ends. Windows follow from each other, not from when a
sleeper woke up, so errors of sleeping do not add up and the bandwidth is met over any number of calls.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheflow.stores.base import ChunkInfo, Read, ReadResult, Store, StoreWrapper

_LONGEST_SLEEP = 0.02  # a change of bandwidth or a failed read ahead is noticed within this many seconds


@dataclass(eq=False, slots=True)
class _Window:
    ready: float  # not before this: the call's time plus latency
    nbytes: int
    start: float = 0.0
    end: float = 0.0


class Link(StoreWrapper):
    """Any store, reached over `gbps` decimal gigabits per second and `latency` seconds.

    Reads are charged for the bytes that move, also when they fail; a look-up waits for the latency once. Saving is
    not charged, nor are deleting, listing and verifying. One call of `read` is the largest burst. A store slower than
    the link stays as slow as it is, and one that hangs holds up its own reader only.

    Args:
        store: any store.
        gbps: decimal gigabits per second; `math.inf` for no limit.
        latency: seconds until the first byte.
        clock: seconds, monotonic.
        sleep: waits for that many seconds of `clock`.

    Raises:
        ValueError: a bandwidth that is not positive or a negative latency.
    """

    def __init__(
        self,
        store: Store,
        gbps: float,
        latency: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 <= latency < math.inf:
            raise ValueError(f"latency must be a number of seconds from 0 on, got {latency}")
        super().__init__(store)
        self.latency = latency
        self._rate = _bytes_per_second(gbps)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._windows: list[_Window] = []  # in order; those that have ended are dropped when the next is opened
        self._free = -math.inf  # when the link is free after all windows

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self._rate

    def set_bandwidth(self, gbps: float) -> None:
        """Change the bandwidth of whatever has not moved yet, the rest of a transfer under way included."""
        rate = _bytes_per_second(gbps)
        with self._lock:
            now = self._clock()
            previous, self._rate = self._rate, rate
            for window in self._windows:
                if window.start >= now:
                    window.end = window.start + window.nbytes / rate
                elif window.end > now:
                    window.end = now + (window.end - now) * previous / rate
            self._follow_on(now)

    def lookup(self, keys: Sequence[str]) -> list[ChunkInfo | None]:
        if self.latency:
            self._sleep(self.latency)
        return self.store.lookup(keys)

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        window = self._open(self._clock() + self.latency, sum(read.nbytes for read in reads))
        moved = 0
        try:
            self._wait(window, until_end=False)
            results = self.store.read(reads)
            moved = sum(result.nbytes for result in results)
        finally:
            self._moved(window, moved)
        self._wait(window, until_end=True)
        return results

    def _open(self, ready: float, nbytes: int) -> _Window:
        with self._lock:
            now = self._clock()
            self._windows = [window for window in self._windows if window.end > now]
            window = _Window(ready, nbytes, start=max(self._free, ready))
            self._free = window.end = window.start + nbytes / self._rate
            self._windows.append(window)
            return window

    def _moved(self, window: _Window, nbytes: int) -> None:
        """The read of a window is done and moved this much; what it did not use falls to those behind it."""
        with self._lock:
            if nbytes < window.nbytes and window in self._windows:
                now = self._clock()
                share = nbytes / window.nbytes
                window.nbytes = nbytes
                window.end = max(min(now, window.end), window.start + (window.end - window.start) * share)
                self._follow_on(now)

    def _follow_on(self, now: float) -> None:
        """Close the gaps between windows that have not started, after the end of an earlier one has moved."""
        free = -math.inf
        for window in self._windows:
            if window.start > now:
                length = window.end - window.start
                window.start = max(free, window.ready, now)
                window.end = window.start + length
            free = window.end
        self._free = free if self._windows else self._free

    def _wait(self, window: _Window, until_end: bool) -> None:
        while True:
            left = (window.end if until_end else window.start) - self._clock()
            if left <= 0:
                return
            self._sleep(min(left, _LONGEST_SLEEP))


def _bytes_per_second(gbps: float) -> float:
    if not gbps > 0:
        raise ValueError(f"bandwidth must be positive, in decimal gigabits per second, got {gbps}")
    return gbps * 1e9 / 8
