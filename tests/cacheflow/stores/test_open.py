from __future__ import annotations

import os
from pathlib import Path

import pytest

from cacheflow.stores import DiskStore, MemoryStore, StoreError, open_store, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("512M", 512_000_000),
        ("2TiB", 2 * 2**40),
        (" 3kb ", 3000),
        ("4096", 4096),
        ("10B", 10),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "4XB", "4 G i B", "4iB", "1e9", "nan", "0", "0.1B", "٣GiB5"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(StoreError, match=r"is no size; write for example 4GiB|less than one byte"):
        parse_size(text)


def test_memory() -> None:
    store = open_store("memory:4MiB")
    assert isinstance(store, MemoryStore) and store.capacity_bytes == 4 * 2**20


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (f"disk:{tmp_path}/a", f"{tmp_path}/a", tmp_path / "a", "disk:a", "a", "./a", "disk:with:colon"):
        store = open_store(name, capacity_bytes=10**6)
        assert isinstance(store, DiskStore) and store.capacity_bytes == 10**6
        store.close()
    assert sorted(os.listdir(tmp_path)) == ["a", "with:colon"]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("memory:", "names no store"),
        ("disk:", "names no store"),
        ("", "names no store"),
        ("memory:lots", "'lots' is no size"),
        ("redis://host", "unknown kind of store 'redis'; known are memory:SIZE and disk:FOLDER"),
    ],
)
def test_what_names_no_store_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(StoreError, match=complaint):
        open_store(name)


def test_two_capacities_are_refused() -> None:
    with pytest.raises(StoreError, match="says the capacity already"):
        open_store("memory:4GiB", capacity_bytes=5)
    with pytest.raises(StoreError, match="at least one byte"):
        MemoryStore(0)
