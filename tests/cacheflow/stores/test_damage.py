"""Damaged and hostile files: a miss with a reason, never wrong bytes, nothing executed, never met twice."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow.stores import DiskStore, Layout, Read
from cacheflow.stores.base import CORRUPT, MISSING, READ_REASONS, SHORT, STALE_FORMAT, UNREADABLE
from cacheflow.stores.disk_format import file_nbytes
from tests.cacheflow.stores.support import PAGED, TOY, holds, key, payload, read_whole, select, selections

FIXED = struct.Struct("<8sIIIQ16s")  # as documented in disk_format, written down a second time on purpose


def stored(folder: Path, number: int = 1, layout: Layout = TOY) -> Path:
    """A store with one chunk; the path of its file."""
    store = DiskStore(folder)
    store.write(key(number), layout, payload(layout, number))
    store.close()
    return folder / key(number)[:2] / f"{key(number)}.kv"


def forge(path: Path, description: bytes | None = None, **fields: Any) -> None:
    """Change the header and make its digest right again, as somebody with bad intentions would."""
    data = bytearray(path.read_bytes())
    names = ("magic", "version", "region", "description", "payload", "digest")
    header = dict(zip(names, FIXED.unpack_from(data), strict=True))
    if description is not None:
        region = bytearray(max(4096, -(-(FIXED.size + len(description) + 4096) // 4096) * 4096))
        region[FIXED.size : FIXED.size + len(description)] = description
        data = region + data[header["region"] :]
        header |= {"region": len(region), "description": len(description)}
    header |= fields
    FIXED.pack_into(data, 0, *(header[name] for name in names))
    region_end = min(header["region"], len(data))
    digest = xxhash.xxh3_128_digest(bytes(data[: FIXED.size - 16]) + bytes(data[FIXED.size : region_end]))
    data[FIXED.size - 16 : FIXED.size] = digest
    path.write_bytes(data)


def changed(**changes: Any) -> bytes:
    description = {
        "key": key(1),
        "layers": TOY.layers,
        "first_layer": 0,
        "kv_heads": TOY.kv_heads,
        "first_kv_head": 0,
        "tokens": TOY.tokens,
        "parts": [[part.name, part.dtype, part.width] for part in TOY.parts],
        **changes,
    }
    return json.dumps({name: value for name, value in description.items() if value is not None}).encode()


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["CACHEFLOW_TEST_BOMB"],)


def flip(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def cut(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:nbytes])


def replace_by(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


HEADER = file_nbytes(key(1), TOY) - TOY.nbytes
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one byte short": (lambda p: cut(p, p.stat().st_size - 1), SHORT),
    "header only": (lambda p: cut(p, HEADER), SHORT),
    "half a header": (lambda p: cut(p, HEADER // 2), SHORT),
    "a few bytes": (lambda p: cut(p, 10), SHORT),
    "zero length": (lambda p: cut(p, 0), SHORT),
    "one byte long": (lambda p: p.write_bytes(p.read_bytes() + b"\0"), CORRUPT),
    "bit in the magic": (lambda p: flip(p, 0), CORRUPT),
    "bit in the description": (lambda p: flip(p, 60), CORRUPT),
    "bit in a checksum": (lambda p: flip(p, 400, 7), CORRUPT),
    "bit in the padding": (lambda p: flip(p, HEADER - 1), CORRUPT),
    "bit in the first cell": (lambda p: flip(p, HEADER), CORRUPT),
    "bit in the last cell": (lambda p: flip(p, HEADER + TOY.nbytes - 1, 7), CORRUPT),
    "zeros": (lambda p: p.write_bytes(bytes(p.stat().st_size)), CORRUPT),
    "newer version": (lambda p: forge(p, version=2), STALE_FORMAT),
    "older version": (lambda p: forge(p, version=0), STALE_FORMAT),
    "a pickle": (lambda p: p.write_bytes(pickle.dumps(Bomb()) + bytes(p.stat().st_size)), CORRUPT),
    "a pickle as description": (lambda p: forge(p, description=pickle.dumps(Bomb())), CORRUPT),
    "header beyond the file": (lambda p: forge(p, region=1 << 20), SHORT),
    "huge header": (lambda p: forge(p, region=0xFFFFF000), CORRUPT),
    "odd header": (lambda p: forge(p, region=HEADER - 1), CORRUPT),
    "no header": (lambda p: forge(p, region=0), CORRUPT),
    "huge payload": (lambda p: forge(p, payload=2**63), CORRUPT),
    "huge counts": (lambda p: forge(p, description=changed(layers=2**62, tokens=2**62)), CORRUPT),
    "counts that overflow": (lambda p: forge(p, description=changed(layers=2**20, kv_heads=2**20)), CORRUPT),
    "negative counts": (lambda p: forge(p, description=changed(layers=-3, kv_heads=-2)), CORRUPT),
    "fractions": (lambda p: forge(p, description=changed(layers=3.0)), CORRUPT),
    "negative width": (lambda p: forge(p, description=changed(parts=[["k", "float32", -16]])), CORRUPT),
    "unknown dtype": (lambda p: forge(p, description=changed(parts=[["k", "object", 16]])), CORRUPT),
    "parts of another kind": (lambda p: forge(p, description=changed(parts=[1, 2])), CORRUPT),
    "no parts": (lambda p: forge(p, description=changed(parts=[])), CORRUPT),
    "missing field": (lambda p: forge(p, description=changed(tokens=None)), CORRUPT),
    "unknown field": (lambda p: forge(p, description=changed(colour="red")), CORRUPT),
    "version smuggled in": (lambda p: forge(p, description=changed(version=7)), CORRUPT),
    "a list": (lambda p: forge(p, description=b"[1, 2]"), CORRUPT),
    "not JSON": (lambda p: forge(p, description=b"\xff{"), CORRUPT),
    "deep JSON": (lambda p: forge(p, description=b"[" * 60_000), CORRUPT),
    "a number of many digits": (lambda p: forge(p, description=b'{"layers":' + b"9" * 50_000 + b"}"), CORRUPT),
    "another key's": (lambda p: forge(p, description=changed(key=key(2))), CORRUPT),
    "a folder": (replace_by(Path.mkdir), UNREADABLE),
    "a pipe": (replace_by(os.mkfifo), UNREADABLE),
    "a link to another file": (replace_by(lambda p: p.symlink_to(__file__)), UNREADABLE),
    "a link to itself": (replace_by(lambda p: p.symlink_to(p)), UNREADABLE),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("known", [False, True], ids=["unknown file", "header remembered"])
def test_a_damaged_file_is_a_miss_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], reason: str, known: bool
) -> None:
    bomb = tmp_path / "exploded"
    monkeypatch.setenv("CACHEFLOW_TEST_BOMB", str(bomb))
    path = stored(tmp_path / "store")
    store = DiskStore(tmp_path / "store")
    if known:
        assert holds(store, key(1))
    damage(path)
    assert not store.verify(key(1)).ok
    assert [entry.reason in (None, *READ_REASONS) for entry in store.entries()] == [True]
    result, data = read_whole(store, key(1), TOY)
    if known and result.ok:  # only the header was damaged, after it had been read: the cells are checked and right
        assert data == payload(TOY, 1).tobytes()
        assert path.read_bytes()[HEADER:] == data
        return
    assert (result.ok, result.reason) == (False, reason)
    assert store.statistics().read_failures == {reason: 1}
    assert not holds(store, key(1)), "not met again"
    if reason != UNREADABLE:
        assert not path.exists()
        assert read_whole(store, key(1), TOY)[0].reason == MISSING
    if not path.is_dir() or path.is_symlink():
        assert store.write(key(1), TOY, payload(TOY, 1)).reason is None
        assert read_whole(store, key(1), TOY)[1] == payload(TOY, 1).tobytes()
    assert not bomb.exists()
    store.close()


@pytest.mark.parametrize("name", ["half a header", "bit in a checksum", "newer version", "huge counts", "a pipe"])
def test_lookup_does_not_offer_what_it_can_see_is_bad(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGE[name]
    path = stored(tmp_path)
    damage(path)
    store = DiskStore(tmp_path)
    assert store.lookup([key(1), key(1)]) == [None, None]
    assert store.statistics().read_failures == {reason: 1}
    assert store.write(key(1), TOY, payload(TOY, 1)).reason is None


def test_swapped_files_of_equal_size(tmp_path: Path) -> None:
    one, two = stored(tmp_path, 1), stored(tmp_path, 2)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    store = DiskStore(tmp_path)
    assert [read_whole(store, key(number), TOY)[0].reason for number in (1, 2)] == [CORRUPT, CORRUPT]


def test_damage_outside_what_is_read_does_not_matter(tmp_path: Path) -> None:
    """Checksums are per block: a flipped bit in one head of one layer costs nothing to those who do not read it."""
    path = stored(tmp_path, layout=PAGED)
    flip(path, file_nbytes(key(1), PAGED) - 1)
    store = DiskStore(tmp_path)
    last = PAGED.layers - 1
    for layers, heads, ok in (
        (range(last), range(2), True),
        (range(2), range(1), True),
        (range(last, 2), range(2), False),
    ):
        wanted = select(PAGED, payload(PAGED, 1), layers, PAGED.all_parts, heads)
        memory = bytearray(len(wanted))
        read = Read(key=key(1), layout=PAGED, layers=layers, parts=PAGED.all_parts, kv_heads=heads, destination=memory)
        result = store.read([read])[0]
        assert result.ok == ok
        assert not ok or memory == wanted
    assert store.statistics().read_failures == {CORRUPT: 1}


@settings(max_examples=300, deadline=None)
@given(data=st.data(), layout=st.sampled_from([TOY, PAGED, replace(TOY, tokens=3)]))
def test_no_damage_gives_wrong_bytes(data: Any, layout: Layout) -> None:
    """Any flips, cuts, insertions and overwritten stretches: what is reported ok is right."""
    with tempfile.TemporaryDirectory() as folder:
        path = stored(Path(folder), layout=layout)
        content = bytearray(path.read_bytes())
        store = DiskStore(folder)
        if data.draw(st.booleans(), "header remembered"):
            store.lookup([key(1)])
        places = st.one_of(st.integers(0, len(content) - 1), st.integers(0, 600))
        for _ in range(data.draw(st.integers(1, 3))):
            kind = data.draw(st.sampled_from(["flip", "cut", "insert", "overwrite"]))
            at = min(data.draw(places), max(len(content) - 1, 0))
            if kind == "cut":
                del content[at:]
            elif kind == "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            elif kind == "overwrite":
                stretch = data.draw(st.binary(min_size=1, max_size=64))
                content[at : at + len(stretch)] = stretch
            elif content:
                content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        layers, parts, heads = data.draw(selections(layout))
        wanted = select(layout, payload(layout, 1), layers, parts, heads)
        memory = np.zeros(len(wanted), dtype=np.uint8)
        read = Read(key=key(1), layout=layout, layers=layers, parts=parts, kv_heads=heads, destination=memory)
        result = store.read([read])[0]
        assert result.reason in (None, *READ_REASONS)
        assert not result.ok or memory.tobytes() == wanted
        assert result.ok or not path.exists()
        store.close()


@settings(max_examples=150, deadline=None)
@given(description=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)), fields=st.data())
def test_no_forged_header_raises(description: bytes, fields: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = stored(Path(folder))
        numbers = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 4096, 8192]))
        name = fields.draw(st.sampled_from(["region", "payload", "version", "none"]))
        forge(path, description=description, **({} if name == "none" else {name: fields.draw(numbers)}))
        store = DiskStore(folder)
        assert store.lookup([key(1)]) == [None]
        store.close()
