"""What a process knows of the chunk files: headers it has checked, and files that are no good.

A remembered header saves a read per look-up and per band of layers. It is only ever a shortcut: the checksums in it
decide what is accepted, so a header that no longer fits its file can cause a second look, not wrong KV.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cacheflow.stores.base import CORRUPT, ERROR, MISMATCH, MISSING, SHORT, STALE_FORMAT, UNREADABLE
from cacheflow.stores.disk_format import BadObject, Header
from cacheflow.stores.disk_io import ChunkFile

_REMOVED = (SHORT, CORRUPT, STALE_FORMAT, MISMATCH)  # read again, such a file would only fail again
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # this process's trouble, not the file's
_MOST_KNOWN = 4096  # a guess: a few tens of MiB, and more chunks than are restored at a time


@dataclass(frozen=True, slots=True)
class _Known:
    inode: int
    nbytes: int
    header: Header


class ChunkFiles:
    """Opens chunk files and deals with bad ones. Thread-safe.

    Args:
        path: gives the path of a key's file.
    """

    def __init__(self, path: Callable[[str], str]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._refused: dict[str, tuple[int, int]] = {}  # inode and change time of files that cannot be read
        self._last_use_ns = 0

    def find(self, key: str) -> Header:
        """The header of a chunk that is there.

        Raises:
            BadObject: MISSING also for a file that is refused since an earlier attempt to read it.
        """
        try:
            status = os.lstat(self._path(key))
        except OSError:
            raise BadObject(MISSING) from None
        known = self._remembered(key, status)
        if known is not None:
            return known
        with self._lock:
            if self._refused.get(key) == (status.st_ino, status.st_ctime_ns):
                raise BadObject(MISSING)
        file, header, _ = self.open(key)
        file.close()
        return header

    def open(self, key: str) -> tuple[ChunkFile, Header, bool]:
        """The open file, its header, and whether the header was remembered rather than read.

        Raises:
            BadObject: after `reject`.
        """
        file = None
        try:
            file = ChunkFile(self._path(key))
            known = self._remembered(key, file.status)
            if known is not None:
                return file, known, True
            header = file.read_header(key)
            with self._lock:
                self._known[key] = _Known(file.status.st_ino, file.status.st_size, header)
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
            return file, header, False
        except FileNotFoundError:
            reason = MISSING
        except OSError as error:
            if error.errno in _TRANSIENT:
                raise BadObject(ERROR) from error
            reason = UNREADABLE if file is None else ERROR
        except BadObject as bad:
            reason = bad.reason
        if file is not None:
            file.close()
        self.reject(key, None if file is None else file.status.st_ino, reason)
        raise BadObject(reason)

    def reject(self, key: str, inode: int | None, reason: str) -> None:
        """See to it that a bad file is not tried for ever: remove it, or remember that it cannot be read."""
        self.forget(key)
        path = self._path(key)
        try:
            status = os.lstat(path)
            if reason in _REMOVED and status.st_ino == inode:  # else another process has replaced it already
                os.unlink(path)
            elif reason in (UNREADABLE, ERROR):
                with self._lock:
                    self._refused[key] = (status.st_ino, status.st_ctime_ns)
        except OSError:
            pass

    def forget(self, *keys: str) -> None:
        """Know nothing of these files any more."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
                self._refused.pop(key, None)

    @contextmanager
    def inspect(self, key: str) -> Iterator[tuple[ChunkFile, Header]]:
        """The open file and its header, nothing remembered and nothing done about a bad file but raising BadObject."""
        try:
            file = ChunkFile(self._path(key))
        except FileNotFoundError:
            raise BadObject(MISSING) from None
        except OSError:
            raise BadObject(UNREADABLE) from None
        try:
            yield file, file.read_header(key)
        except OSError:
            raise BadObject(ERROR) from None
        finally:
            file.close()

    def touch(self, key: str) -> bool:
        """Mark a file as used. Returns whether it is there."""
        try:
            os.utime(self._path(key), ns=self._now())
        except FileNotFoundError:
            return False
        except OSError:
            pass  # another user's file, or a disk turned read-only: it can be read all the same
        return True

    def mark_used(self, fd: int) -> None:
        """The same for a file that has no name yet."""
        with suppress(OSError):  # as in touch
            os.utime(fd, ns=self._now())

    def _now(self) -> tuple[int, int]:
        """Now, as access and modification time, and later than every answer before, so that uses have an order."""
        with self._lock:
            self._last_use_ns = max(self._last_use_ns + 1, time.time_ns())
            return self._last_use_ns, self._last_use_ns

    def _remembered(self, key: str, status: os.stat_result) -> Header | None:
        with self._lock:
            known = self._known.get(key)
            if known is None or (known.inode, known.nbytes) != (status.st_ino, status.st_size):
                return None
            self._known.move_to_end(key)
            return known.header
