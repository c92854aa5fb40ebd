"""Where chunks of KV live between requests: the Store contract, and stores in memory and on disk.

A store is named in one string, on the command line as in code:

    memory:4GiB       in this process's memory, at most 4 GiB
    disk:/var/kv      in this folder, shared with other processes
    /var/kv           the same

A new kind of store (a remote one) is a class with the methods of `base.Store` and a word of its own in `open_store`.
Tensors do not occur here: payloads and destinations are C-contiguous memory, for a CPU tensor
`tensor.view(torch.uint8).numpy()`.
"""

from __future__ import annotations

import os
import re

from cacheflow.stores.base import (
    READ_REASONS,
    WRITE_REASONS,
    Buffer,
    ChunkInfo,
    Entry,
    Read,
    ReadResult,
    Store,
    StoreError,
    StoreStatistics,
    StoreWrapper,
    WriteResult,
    aligned_buffer,
)
from cacheflow.stores.disk import DiskStore
from cacheflow.stores.layout import FORMAT_VERSION, ITEM_BYTES, Layout, PartSpec
from cacheflow.stores.link import Link
from cacheflow.stores.memory import MemoryStore

__all__ = [
    "FORMAT_VERSION",
    "ITEM_BYTES",
    "READ_REASONS",
    "WRITE_REASONS",
    "Buffer",
    "ChunkInfo",
    "DiskStore",
    "Entry",
    "Layout",
    "Link",
    "MemoryStore",
    "PartSpec",
    "Read",
    "ReadResult",
    "Store",
    "StoreError",
    "StoreStatistics",
    "StoreWrapper",
    "WriteResult",
    "aligned_buffer",
    "open_store",
    "parse_size",
]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def open_store(name: str | os.PathLike[str], capacity_bytes: int | None = None) -> MemoryStore | DiskStore:
    """Open the store that `name` names; see the module's text.

    Args:
        name: `memory:SIZE`, `disk:FOLDER` or a folder.
        capacity_bytes: for a disk store, bytes of files it may hold; None leaves it to the disk.

    Raises:
        StoreError: the name says no store, or the store cannot be opened.
    """
    name = os.fspath(name)
    kind, colon, rest = name.partition(":")
    if not colon or os.sep in kind:
        kind, rest = "disk", name
    if not rest:
        raise StoreError(f"{name!r} names no store; use memory:SIZE (memory:4GiB), disk:FOLDER or a folder")
    if kind == "memory":
        if capacity_bytes is not None:
            raise StoreError(f"{name!r} says the capacity already; leave capacity_bytes={capacity_bytes} out")
        return MemoryStore(parse_size(rest))
    if kind == "disk":
        return DiskStore(rest, capacity_bytes)
    raise StoreError(f"{name!r} names an unknown kind of store {kind!r}; known are memory:SIZE and disk:FOLDER")


def parse_size(text: str) -> int:
    """Bytes of a size as people write it: `4GiB`, `1.5 GB`, `512M` (decimal, like MB), `4096`.

    Raises:
        StoreError: it is no positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise StoreError(f"{text!r} is no size; write for example 4GiB, 500MB or a number of bytes")
    number, prefix, binary = match.groups()
    nbytes = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    if nbytes < 1:
        raise StoreError(f"{text!r} is less than one byte")
    return nbytes
