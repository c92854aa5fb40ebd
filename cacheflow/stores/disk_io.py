"""Reading checked ranges of one chunk file as fast as the disk gives them.

Measured on two CPU cores and a virtual disk of 2.7-4 GB/s (512 MiB in files of 64 MiB, cold, blocks of 128 KiB):
reading past the page cache (O_DIRECT) straight into the destination, 8 MiB at a time, the blocks of one read hashed
while others are under way, gives 96-104 % of a plain O_DIRECT read with 16 reads in flight, whether the CPUs are idle
or busy with other things; with 4 it drops to 72-87 % on busy ones. Buffered reads give 50-75 %, and so does O_DIRECT
through an aligned bounce buffer. Huge pages under the destination made O_DIRECT slower there, plain reads too.

So ranges that O_DIRECT cannot take (it wants file offset and memory on page borders) are simply read through the page
cache. Ranges that are in the page cache already are read from it too: that is two to three times as fast as the disk.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from cacheflow.stores.base import CORRUPT, SHORT, UNREADABLE, Read, as_bytes
from cacheflow.stores.disk_format import ALIGNMENT, BadObject, Header, read_header

SLICE_BYTES = 8 << 20  # of one job: large enough for the disk, small enough to overlap with others. See above
STEP_BYTES = 1 << 20  # of one read through the page cache

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_CACHESTAT = 451  # the same number on every architecture; Linux 6.5 and later


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive blocks, read and checked together.

    Args:
        blocks: their numbers in the layout.
        offset: where they start in the file.
        cells: where they go.
        aligned: whether file offset and memory start on a page.
    """

    blocks: range
    offset: int
    cells: memoryview
    aligned: bool


class ChunkFile:
    """One open chunk file. It keeps reading the same object even when the name is removed or given to another.

    Raises:
        BadObject: it is not a regular file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        # O_NOFOLLOW and O_NONBLOCK: a link or a pipe laid in the folder must neither lead elsewhere nor block.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self.fd = os.open(path, flags)
        self._direct: int | None = None
        self._direct_lock = threading.Lock()
        self._direct_fails = not _O_DIRECT
        self.status = os.fstat(self.fd)
        if not stat.S_ISREG(self.status.st_mode):
            self.close()
            raise BadObject(UNREADABLE)

    def read_header(self, key: str) -> Header:
        """As `disk_format.read_header`, without setting off a read-ahead of the payload."""
        _advise(self.fd, 0, 0, "POSIX_FADV_RANDOM")
        header = read_header(self.fd, key)
        _advise(self.fd, 0, 0, "POSIX_FADV_SEQUENTIAL")
        return header

    def fetch(self, piece: Slice, header: Header) -> tuple[str | None, int]:
        """Read a slice and check every block of it. Returns the reason why it is no good, or None, and bytes moved."""
        cells, at, done = piece.cells, 0, 0
        if piece.aligned and not _resident(self.fd, piece.offset, cells.nbytes):
            done = self._read_direct(cells[: cells.nbytes - cells.nbytes % ALIGNMENT], piece.offset)
        for block in piece.blocks:
            end = at + header.layout.block_nbytes(block)
            while done < end:
                # Through the page cache in short steps: what has just been copied is hashed from the CPU's cache.
                moved = os.preadv(self.fd, [cells[done : max(end, done + STEP_BYTES)]], piece.offset + done)
                if not moved:
                    return SHORT, done
                done += moved
            if xxhash.xxh3_128_digest(cells[at:end]) != header.checksum(block):
                return CORRUPT, done
            at = end
        return None, done

    def advise(self, piece: Slice) -> None:
        """Have the kernel start on a slice that will go through the page cache."""
        if self._direct_fails or not piece.aligned:
            _advise(self.fd, piece.offset, piece.cells.nbytes, "POSIX_FADV_WILLNEED")

    def close(self) -> None:
        os.close(self.fd)
        if self._direct is not None:
            os.close(self._direct)

    def _read_direct(self, view: memoryview, offset: int) -> int:
        """Read past the page cache. Returns how much; less than asked for where that does not work."""
        fd = self._direct_fd()
        done = 0
        while fd is not None and done < view.nbytes and done % ALIGNMENT == 0:
            try:
                moved = os.preadv(fd, [view[done:]], offset + done)
            except OSError:
                break  # the device wants another alignment; a real fault shows again on the other way
            if not moved:
                break
            done += moved
        return done

    def _direct_fd(self) -> int | None:
        with self._direct_lock:
            if self._direct is None and not self._direct_fails:
                try:
                    # Through the first descriptor: by name it might be another object by now.
                    self._direct = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
                except OSError:
                    self._direct_fails = True
            return self._direct


def slices(read: Read, header: Header) -> Iterator[Slice]:
    """Cut a read along block borders into slices of about `SLICE_BYTES`, on page borders where the blocks allow it."""
    layout = header.layout
    destination = as_bytes(read.destination)
    address = np.frombuffer(destination, dtype=np.uint8).ctypes.data
    filled = 0
    for run in layout.runs(read.layers, read.parts, read.kv_heads):
        first, begin = run.start, layout.block_offset(run.start)
        end = begin
        for block in run:
            end += layout.block_nbytes(block)
            nbytes = end - begin
            on_page = end % ALIGNMENT == 0 or nbytes >= 2 * SLICE_BYTES
            if block + 1 == run.stop or (nbytes >= SLICE_BYTES and on_page):
                offset = header.payload_offset + begin
                yield Slice(
                    blocks=range(first, block + 1),
                    offset=offset,
                    cells=destination[filled : filled + nbytes],
                    aligned=offset % ALIGNMENT == 0 and (address + filled) % ALIGNMENT == 0,
                )
                filled += nbytes
                first, begin = block + 1, end


def _advise(fd: int, offset: int, nbytes: int, advice: str) -> None:
    # By name, because not every system has the call; where it is missing reads are slower, not wrong.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, getattr(os, advice))


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _PageCounts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def _resident(fd: int, offset: int, nbytes: int) -> bool:
    """Whether the page cache holds all of the range. False where the kernel cannot tell."""
    counts = _PageCounts()
    asked = _Range(offset, nbytes)
    if _SYSCALL is None or _SYSCALL(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(counts), 0):
        return False
    pages = (offset + nbytes - 1) // _PAGE - offset // _PAGE + 1
    return bool(counts.cached >= pages)


_PAGE = os.sysconf("SC_PAGE_SIZE")
_SYSCALL = ctypes.CDLL(None).syscall if os.uname().sysname == "Linux" else None
