"""What every store counts: leases, and the numbers behind its statistics. Safe to use from several threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cacheflow.stores.base import ERROR, ReadResult, StoreStatistics, WriteResult


class Leases:
    """Counts of leases by key. A count outlives its object: an object written anew under a leased key is leased."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def take(self, key: str) -> None:
        with self._lock:
            self._counts[key] += 1

    def give_back(self, key: str) -> bool:
        """Returns whether there was a lease to give back."""
        with self._lock:
            leases = self._counts[key]
            if leases > 1:
                self._counts[key] -= 1
            else:
                del self._counts[key]
            return leases > 0

    def holds(self, key: str) -> bool:
        """Whether `key` is leased."""
        with self._lock:
            return key in self._counts

    def held(self) -> set[str]:
        """Keys leased now."""
        with self._lock:
            return set(self._counts)

    @contextmanager
    def unless_held(self, key: str) -> Iterator[bool]:
        """Whether `key` is free; while inside nobody can lease anything."""
        with self._lock:
            yield key not in self._counts


class Tally:
    """The counters behind `StoreStatistics`, bumped as things happen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()

    def looked_up(self, found: bool) -> None:
        with self._lock:
            self._counts["found" if found else "not_found"] += 1

    def failed(self, reason: str) -> None:
        with self._lock:
            self._failures[reason] += 1

    def read(self, result: ReadResult) -> ReadResult:
        with self._lock:
            if result.ok:
                self._counts["reads"] += 1
                self._counts["bytes_read"] += result.nbytes
            else:
                self._failures[result.reason or ERROR] += 1
        return result

    def written(self, result: WriteResult) -> WriteResult:
        with self._lock:
            if result.reason is None:
                self._counts["writes"] += 1
                self._counts["bytes_written"] += result.nbytes
            else:
                self._refusals[result.reason] += 1
        return result

    def evicted(self, objects: int) -> None:
        with self._lock:
            self._counts["evicted"] += objects

    def snapshot(self) -> StoreStatistics:
        with self._lock:
            return StoreStatistics(
                read_failures=dict(self._failures), write_refusals=dict(self._refusals), **self._counts
            )
