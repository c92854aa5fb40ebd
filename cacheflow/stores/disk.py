"""Chunks in a folder, one file each: they survive the process, and several processes can share them.

The format of a file is in `disk_format`, the folder and its capacity in `disk_folder`, what is known of each file in
`disk_files`, and reading one in `disk_io`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cacheflow.stores.base import (
    CORRUPT,
    ERROR,
    EXISTS,
    FULL,
    MISMATCH,
    MISSING,
    TIMEOUT,
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
from cacheflow.stores.disk_files import ChunkFiles
from cacheflow.stores.disk_folder import NoRoom, StoreFolder
from cacheflow.stores.disk_format import BadObject, Header, encode_header, file_nbytes
from cacheflow.stores.disk_io import ChunkFile, slices
from cacheflow.stores.layout import Layout


@dataclass(slots=True)
class _Job:
    """A read under way. `remembered`: the header is from an earlier look at the file, not read just now."""

    read: Read
    file: ChunkFile
    header: Header
    remembered: bool
    fetches: list[Future[tuple[str | None, int]]]


class DiskStore:
    """A folder of chunk files, least recently used going first (a file's modification time is its last use).

    Leases keep this process from evicting; other processes see only that a leased chunk was used lately. A chunk they
    remove is a miss. A file that may not be read is not tried again by this process until somebody changes it.
    `register` does nothing, but destinations that start on a page (`aligned_buffer`, pinned memory) are filled by the
    disk directly, others through the page cache. Use processes started by spawn, not fork: threads do not survive it.

    Args:
        folder: made when it does not exist; refused when it holds anything but a store.
        capacity_bytes: bytes of files it may hold; None leaves it to the disk.
        fsync: make each write survive a power cut before it appears. Without, a power cut can leave damaged chunks,
            which the checksums find.
        readers: reads in flight at a time; see `disk_io` for what was measured.

    Raises:
        StoreError: the folder cannot be used.
    """

    tier = "disk"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int | None = None,
        *,
        fsync: bool = False,
        readers: int = 16,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise StoreError(f"a disk store needs a capacity of at least one byte, got {capacity_bytes}")
        self._folder = StoreFolder(os.fspath(folder), capacity_bytes)
        self._fsync = fsync
        self._readers = readers
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="cacheflow-disk")
        self._leases = Leases()
        self._tally = Tally()
        self._files = ChunkFiles(self._folder.chunk_path)

    @property
    def capacity_bytes(self) -> int | None:
        return self._folder.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all files in the folder, those being written included."""
        return self._folder.used_bytes()

    def lookup(self, keys: Sequence[str]) -> list[ChunkInfo | None]:
        check_keys(keys)
        return [self._lookup(key) for key in keys]

    def _lookup(self, key: str) -> ChunkInfo | None:
        self._leases.take(key)  # before looking: what is found then cannot be evicted any more
        try:
            layout = self._files.find(key).layout
            if not self._files.touch(key):
                raise BadObject(MISSING)
        except BadObject as bad:
            self._leases.give_back(key)
            if bad.reason != MISSING:
                self._tally.failed(bad.reason)
            self._tally.looked_up(found=False)
            return None
        self._tally.looked_up(found=True)
        return ChunkInfo(self.tier, layout.nbytes, layout)

    def release(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._leases.give_back(key):
                self._files.touch(key)

    def write(self, key: str, layout: Layout, payload: Buffer | bytes) -> WriteResult:
        check_key(key)
        return self._tally.written(self._write(key, layout, check_payload(layout, payload)))

    def _write(self, key: str, layout: Layout, payload: memoryview) -> WriteResult:
        try:
            self._files.find(key)
            return WriteResult(True, EXISTS, 0)
        except BadObject:
            pass
        nbytes = file_nbytes(key, layout)
        if self.capacity_bytes is not None and nbytes > self.capacity_bytes:
            return WriteResult(False, TOO_LARGE, 0)
        evicted: list[str] = []
        try:
            fd, temporary, evicted = self._folder.claim(key, nbytes, self._leases)
            try:
                _write_all(fd, [memoryview(encode_header(key, layout, payload)), payload])
                self._files.mark_used(fd)
                if self._fsync:
                    os.fsync(fd)
                self._folder.publish(temporary, key)
            except BaseException:
                os.unlink(temporary)
                raise
            finally:
                os.close(fd)  # ends the lock that says somebody is writing; not before the file has its name
            if self._fsync:
                _fsync_folder(os.path.dirname(temporary))
        except NoRoom as none:
            evicted = none.evicted
            return WriteResult(False, FULL, 0)
        except TimeoutError:
            return WriteResult(False, TIMEOUT, 0)
        except OSError:
            return WriteResult(False, ERROR, 0)
        finally:
            self._files.forget(key, *evicted)
            self._tally.evicted(len(evicted))
        return WriteResult(True, None, layout.nbytes)

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        results: dict[int, ReadResult] = {}
        jobs: deque[tuple[int, _Job]] = deque()
        in_flight = 0
        try:
            for index, read in enumerate(reads):
                started = self._start(read)
                if isinstance(started, ReadResult):
                    results[index] = started
                    continue
                jobs.append((index, started))
                in_flight += len(started.fetches)
                # Enough to keep every reader busy while the next file is opened, and few files open at a time.
                while len(jobs) > 1 and in_flight > 2 * self._readers:
                    done, job = jobs.popleft()
                    in_flight -= len(job.fetches)
                    results[done] = self._finish(job)
            while jobs:
                done, job = jobs.popleft()
                results[done] = self._finish(job)
        finally:
            # Only after an exception: nobody may still be writing to the caller's memory when this returns.
            for _, job in jobs:
                _settle(job)
                job.file.close()
        return [self._tally.read(results[index]) for index in range(len(reads))]

    def _start(self, read: Read) -> _Job | ReadResult:
        try:
            file, header, remembered = self._files.open(read.key)
        except BadObject as bad:
            return ReadResult(False, bad.reason, 0)
        if header.layout != read.layout:
            file.close()
            self._files.reject(read.key, file.status.st_ino, MISMATCH)
            return ReadResult(False, MISMATCH, 0)
        job = _Job(read, file, header, remembered, [])
        for piece in slices(read, header):
            file.advise(piece)
            job.fetches.append(self._pool.submit(file.fetch, piece, header))
        return job

    def _finish(self, job: _Job) -> ReadResult:
        try:
            return self._conclude(job, *_settle(job))
        finally:
            job.file.close()

    def _conclude(self, job: _Job, reason: str | None, moved: int) -> ReadResult:
        key = job.read.key
        if reason is None:
            if not self._leases.holds(key):  # else its release is the use that counts, and saves a call per band
                self._files.touch(key)
            return ReadResult(True, None, moved)
        if reason == CORRUPT and job.remembered:
            # Another process may have written the key anew into an inode of the same number: look at it afresh.
            self._files.forget(key)
            again = self._start(job.read)
            result = self._finish(again) if isinstance(again, _Job) else again
            return ReadResult(result.ok, result.reason, moved + result.nbytes)
        self._files.reject(key, job.file.status.st_ino, reason)
        return ReadResult(False, reason, moved)

    def register(self, buffer: Buffer) -> None:
        as_bytes(buffer, writable=True)

    def delete(self, keys: Sequence[str]) -> int:
        check_keys(keys)
        removed = 0
        for key in keys:
            try:
                os.unlink(self._folder.chunk_path(key))
                removed += 1
            except OSError:
                pass
        self._files.forget(*keys)
        return removed

    def entries(self) -> Iterator[Entry]:
        for key, nbytes, used_ns in self._folder.chunks():
            layout, reason = None, None
            try:
                with self._files.inspect(key) as (_, header):
                    layout = header.layout
            except BadObject as bad:
                if bad.reason == MISSING:
                    continue
                reason = bad.reason
            yield Entry(key, nbytes, used_ns / 1e9, layout, reason)

    def verify(self, key: str) -> ReadResult:
        check_key(key)
        moved = 0
        try:
            with self._files.inspect(key) as (file, header):
                memory = aligned_buffer(header.layout.nbytes)
                for piece in slices(Read.whole(key, header.layout, memory), header):
                    reason, nbytes = file.fetch(piece, header)
                    moved += nbytes
                    if reason is not None:
                        return ReadResult(False, reason, moved)
        except BadObject as bad:
            return ReadResult(False, bad.reason, moved)
        return ReadResult(True, None, moved)

    def statistics(self) -> StoreStatistics:
        return self._tally.snapshot()

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._folder.close()


def _settle(job: _Job) -> tuple[str | None, int]:
    """Wait for all of a job's fetches. The first reason why it is no good, or None, and the bytes moved."""
    reasons, moved = [], 0
    for fetch in job.fetches:
        try:
            reason, nbytes = fetch.result()
        except OSError:
            reason, nbytes = ERROR, 0
        reasons.append(reason)
        moved += nbytes
    return next((reason for reason in reasons if reason is not None), None), moved


def _write_all(fd: int, buffers: list[memoryview]) -> None:
    offset = 0
    for buffer in buffers:
        done = 0
        while done < buffer.nbytes:
            done += os.pwrite(fd, buffer[done:], offset + done)
        offset += buffer.nbytes


def _fsync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
