"""The file of one chunk: a header region, then the payload.

    offset 0   magic, version, region bytes, description bytes, payload bytes, digest of the region   (struct `_FIXED`)
               description: JSON, the key and the layout
               checksums: xxh3-128 of every block, 16 bytes each, in layout order
               zeros up to a multiple of 4096, so that the payload can be read past the page cache
    region     payload, `[layer][part][kv_head][token][width]`

The version is read before anything that depends on it. The digest covers the whole region, so no flipped bit in it goes
unseen. xxh3 finds damage, not malice: whoever may write the folder may forge chunks. Even so a forged header can only
make a reader refuse the file, because nothing in it is executed and nothing is allocated on its word.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from cacheflow.stores.base import CORRUPT, SHORT, STALE_FORMAT
from cacheflow.stores.layout import FORMAT_VERSION, Layout, PartSpec

ALIGNMENT = 4096
CHECKSUM_BYTES = 16

_MAGIC = b"CACHEFLW"
_FIXED = struct.Struct("<8sIIIQ16s")
_DIGEST_AT = _FIXED.size - CHECKSUM_BYTES
_FIRST_READ = 16 << 10  # holds the region of 32 layers, 2 parts and 8 heads in one read
_MOST_REGION = 64 << 20
_MOST_DESCRIPTION = 64 << 10


class BadObject(Exception):
    """A file that is no good; `reason` is one of `READ_REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: the layout, where the payload starts, and the checksums of its blocks."""

    layout: Layout
    payload_offset: int
    checksums: bytes

    def checksum(self, block: int) -> bytes:
        return self.checksums[block * CHECKSUM_BYTES : (block + 1) * CHECKSUM_BYTES]


def file_nbytes(key: str, layout: Layout) -> int:
    """Bytes of the file that `layout` needs."""
    return _region_nbytes(layout, len(_description(key, layout))) + layout.nbytes


def encode_header(key: str, layout: Layout, payload: memoryview) -> bytes:
    """The header region for `payload`, which is hashed on the way."""
    description = _description(key, layout)
    region = bytearray(_region_nbytes(layout, len(description)))
    _FIXED.pack_into(region, 0, _MAGIC, layout.version, len(region), len(description), layout.nbytes, b"")
    at = _FIXED.size
    region[at : at + len(description)] = description
    at += len(description)
    for block in range(layout.num_blocks):
        cells = payload[layout.block_offset(block) : layout.block_offset(block + 1)]
        region[at : at + CHECKSUM_BYTES] = xxhash.xxh3_128_digest(cells)
        at += CHECKSUM_BYTES
    region[_DIGEST_AT : _FIXED.size] = _region_digest(region)
    return bytes(region)


def read_header(fd: int, key: str) -> Header:
    """Read and check the header of an open file.

    Raises:
        BadObject: the file is not a whole, intact object of this key and format.
        OSError: the storage failed.
    """
    size = os.fstat(fd).st_size
    region = os.pread(fd, _FIRST_READ, 0)
    if len(region) < _FIXED.size:
        raise BadObject(SHORT)
    magic, version, region_nbytes, description_nbytes, payload_nbytes, digest = _FIXED.unpack_from(region)
    if magic != _MAGIC:
        raise BadObject(CORRUPT)
    if version != FORMAT_VERSION:
        raise BadObject(STALE_FORMAT)
    if not ALIGNMENT <= region_nbytes <= _MOST_REGION or region_nbytes % ALIGNMENT:
        raise BadObject(CORRUPT)
    if region_nbytes > size:
        raise BadObject(SHORT)
    if region_nbytes > len(region):
        region += os.pread(fd, region_nbytes - len(region), len(region))
    region = region[:region_nbytes]
    if len(region) < region_nbytes:
        raise BadObject(SHORT)
    if _region_digest(region) != digest:
        raise BadObject(CORRUPT)
    # From here on the header is what somebody wrote; still, only a file that agrees with it in every respect is used.
    start, stop = _FIXED.size, _FIXED.size + description_nbytes
    if description_nbytes > _MOST_DESCRIPTION or stop > region_nbytes:
        raise BadObject(CORRUPT)
    layout = _parse(region[start:stop], key)
    if layout.nbytes != payload_nbytes or _region_nbytes(layout, description_nbytes) != region_nbytes:
        raise BadObject(CORRUPT)
    if size != region_nbytes + payload_nbytes:
        raise BadObject(SHORT if size < region_nbytes + payload_nbytes else CORRUPT)
    return Header(layout, region_nbytes, region[stop : stop + layout.num_blocks * CHECKSUM_BYTES])


def _region_nbytes(layout: Layout, description_nbytes: int) -> int:
    used = _FIXED.size + description_nbytes + layout.num_blocks * CHECKSUM_BYTES
    return -(-used // ALIGNMENT) * ALIGNMENT


def _region_digest(region: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_128(region[:_DIGEST_AT])
    digest.update(region[_FIXED.size :])
    return digest.digest()


def _description(key: str, layout: Layout) -> bytes:
    fields = {
        "key": key,
        "layers": layout.layers,
        "first_layer": layout.first_layer,
        "kv_heads": layout.kv_heads,
        "first_kv_head": layout.first_kv_head,
        "tokens": layout.tokens,
        "parts": [[part.name, part.dtype, part.width] for part in layout.parts],
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _parse(description: bytes, key: str) -> Layout:
    try:
        fields: dict[str, Any] = json.loads(description)
        if fields.pop("key") != key:
            raise BadObject(CORRUPT)  # another chunk's file under this name
        parts = tuple(PartSpec(name, dtype, width) for name, dtype, width in fields.pop("parts"))
        return Layout(parts=parts, version=FORMAT_VERSION, **fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadObject(CORRUPT) from error
