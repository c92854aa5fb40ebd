"""The folder of a disk store: names, the lock between processes, what is in it, and making room.

    cacheflow-store.json      says that this folder is a store, and of which form
    cacheflow-store.lock      locked (flock) while somebody claims room or moves a file in
    ab/abcd...ef.kv           the chunk whose key is abcd...ef
    ab/.abcd...ef.RANDOM.tmp  the same, being written; its writer holds a lock on it, so a dead writer's is recognised

The folder itself is the only truth: processes share nothing else, so whatever one of them adds or removes the others
see. A file counts with its size from the moment its space is claimed, which makes a temporary file the reservation too:
files and reservations together never exceed the capacity.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cacheflow.stores.base import FULL, StoreError
from cacheflow.stores.bookkeeping import Leases

_MARKER, _LOCK = "cacheflow-store.json", "cacheflow-store.lock"
_FORM = {"format": "cacheflow-store", "version": 1}
_CHUNK = re.compile(r"([0-9a-f]{64})\.kv")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_LOCK_SECONDS = 10.0  # making room takes milliseconds; longer means the holder was stopped
_RACY_NS = 50_000_000  # a folder changed this recently may change again within the same tick of its clock


@dataclass(slots=True)
class _Listing:
    changed_ns: int
    nbytes: dict[str, int]  # by file name


class StoreFolder:
    """See the module's text. Methods raise OSError when the storage fails.

    Args:
        path: the folder; made when it does not exist.
        capacity_bytes: bytes of files it may hold, or None.

    Raises:
        StoreError: the folder cannot be used as a store.
    """

    def __init__(self, path: str, capacity_bytes: int | None) -> None:
        self.path = os.path.abspath(path)
        self.capacity_bytes = capacity_bytes
        self._thread_lock = threading.Lock()  # flock keeps processes apart, not the threads of one
        self._listings: dict[str, _Listing] = {}
        self._oldest: list[tuple[int, str]] = []  # (last use, key) of a past scan, oldest last
        self._lock_fd = self._prepare()
        with suppress(TimeoutError), self._locked():
            self._remove_abandoned()

    def close(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def chunk_path(self, key: str) -> str:
        return os.path.join(self.path, key[:2], f"{key}.kv")

    def chunks(self) -> Iterator[tuple[str, int, int]]:
        """Every chunk file as (key, bytes, last use in ns)."""
        for subfolder in self._subfolders():
            for name in _names(subfolder):
                match = _CHUNK.fullmatch(name)
                status = _status(os.path.join(subfolder, name)) if match else None
                if match and status:
                    yield match[1], status.st_size, status.st_mtime_ns

    def used_bytes(self) -> int:
        """Bytes of all files, those being written included."""
        with self._locked():
            return sum(self._sizes().values())

    def claim(self, key: str, nbytes: int, leases: Leases) -> tuple[int, str, list[str]]:
        """Make room for a file and reserve it.

        Args:
            key: of the chunk to be written.
            nbytes: bytes of its file.
            leases: on chunks that may not be evicted.

        Returns:
            Descriptor and path of a temporary file of that size, to be renamed once written, and the keys evicted.

        Raises:
            NoRoom: leases or other writers' reservations leave too little.
            TimeoutError: another process does not give up the lock.
        """
        with self._locked():
            evicted = [] if self.capacity_bytes is None else self._make_room(nbytes, self.capacity_bytes, leases)
            os.makedirs(os.path.join(self.path, key[:2]), exist_ok=True)
            temporary = os.path.join(self.path, key[:2], f".{key}.{os.urandom(8).hex()}.tmp")
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.truncate(fd, nbytes)
            except OSError:
                os.close(fd)
                os.unlink(temporary)
                raise
            return fd, temporary, evicted

    def publish(self, temporary: str, key: str) -> None:
        """Give a written file its name. Locked, because a listing might miss a file that moves meanwhile.

        Raises:
            TimeoutError: another process does not give up the lock.
        """
        with self._locked():
            os.replace(temporary, self.chunk_path(key))

    def _make_room(self, nbytes: int, capacity: int, leases: Leases) -> list[str]:
        sizes = self._sizes()
        if sum(sizes.values()) + nbytes > capacity and any(_UNFINISHED.fullmatch(name) for name in sizes):
            self._remove_abandoned()
            sizes = self._sizes()
        excess = sum(sizes.values()) + nbytes - capacity
        removable = {match[1]: size for name, size in sizes.items() if (match := _CHUNK.fullmatch(name))}
        for key in leases.held():
            removable.pop(key, None)
        if sum(removable.values()) < excess:
            raise NoRoom([])
        evicted: list[str] = []
        # A past scan's order stays right for files not used since: used or new ones are younger than all of them.
        for rescan in (False, True):
            if excess > 0 and rescan:
                self._oldest = sorted(((used, key) for key, _, used in self.chunks()), reverse=True)
            passed_over = []
            while excess > 0 and self._oldest:
                used, key = self._oldest.pop()
                path = self.chunk_path(key)
                # A lease taken from here on finds no file, one taken before is seen: look-up leases, then looks.
                with leases.unless_held(key) as free:
                    status = _status(path)
                    if status is None or status.st_mtime_ns != used:
                        continue
                    if not free:
                        passed_over.append((used, key))
                        continue
                    _unlink(path)
                evicted.append(key)
                excess -= status.st_size
            self._oldest.extend(reversed(passed_over))
        if excess > 0:
            raise NoRoom(evicted)
        return evicted

    def _sizes(self) -> dict[str, int]:
        return {name: size for listing in self._refresh() for name, size in listing.nbytes.items()}

    def _refresh(self) -> list[_Listing]:
        """All files with their sizes; only subfolders that changed are read again."""
        listings = {}
        now = time.time_ns()
        for subfolder in self._subfolders():
            changed = os.stat(subfolder).st_mtime_ns
            known = self._listings.get(subfolder)
            if known is None or known.changed_ns != changed:
                status = {name: _status(os.path.join(subfolder, name)) for name in _names(subfolder)}
                known = _Listing(
                    changed if changed < now - _RACY_NS else -1,
                    {name: found.st_size for name, found in status.items() if found},
                )
            listings[subfolder] = known
        self._listings = listings
        return list(listings.values())

    def _remove_abandoned(self) -> None:
        """Remove what interrupted writers left: temporary files on which nobody holds a lock any more."""
        for subfolder in self._subfolders():
            for name in _names(subfolder):
                path = os.path.join(subfolder, name)
                if _UNFINISHED.fullmatch(name) and not _in_use(path):
                    _unlink(path)

    def _subfolders(self) -> list[str]:
        return [os.path.join(self.path, name) for name in _names(self.path) if _SUBFOLDER.fullmatch(name)]

    def _prepare(self) -> int:
        """Make the folder a store or see that it is one. Returns the descriptor of its lock."""
        path = self.path
        try:
            os.makedirs(path, exist_ok=True)
            marker = os.path.join(path, _MARKER)
            if not os.path.exists(marker):
                others = [name for name in os.listdir(path) if not name.startswith("cacheflow-store.")]
                if others:
                    raise StoreError(
                        f"{path} is not a CacheFlow store and holds other files ({sorted(others)[0]!r}); name an "
                        "empty or a new folder"
                    )
                fresh = f"{marker}.{os.urandom(8).hex()}"
                with open(fresh, "w", encoding="utf-8") as file:
                    json.dump(_FORM, file)
                os.replace(fresh, marker)
            with open(marker, "rb") as file:
                form = file.read(4096)
            may = os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
            if not may:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            # Read-only is enough for flock, and all that a file made by another user may allow.
            lock = os.open(os.path.join(path, _LOCK), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be used as a store: {error.strerror or error}; name a folder that can be written to"
            ) from error
        try:
            known = json.loads(form) == _FORM
        except (ValueError, RecursionError):
            known = False
        if not known:
            os.close(lock)
            raise StoreError(
                f"{path} is a store of another version ({_MARKER} is not {json.dumps(_FORM)}); name another folder or "
                "delete this one"
            )
        return lock

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"another process holds {_LOCK}") from None
                    time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)


class NoRoom(Exception):
    """What would have to go may not go; `evicted` went before that showed (a lease taken meanwhile)."""

    def __init__(self, evicted: list[str]) -> None:
        super().__init__(FULL)
        self.evicted = evicted


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _in_use(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
