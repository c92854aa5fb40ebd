from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from cacheflow.stores import DiskStore, Layout, Link, MemoryStore, Store
from cacheflow.stores.disk_format import file_nbytes
from tests.cacheflow.stores.support import TOY, key

MakeStore: TypeAlias = Callable[..., Store]


def build(kind: str, folder: Path, objects: int | None = None, layout: Layout = TOY) -> Store:
    """A store of a kind with room for `objects` objects of a layout, or for very many."""
    medium, _, link = kind.partition(" behind a ")
    store: Store
    if medium == "memory":
        store = MemoryStore(2**30 if objects is None else objects * layout.nbytes)
    else:
        store = DiskStore(folder / "store", None if objects is None else objects * file_nbytes(key(0), layout))
    return Link(store, gbps=1000) if link else store


@pytest.fixture(params=["memory", "disk", "memory behind a link", "disk behind a link"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """Makes the one store of a test; the contract is the same for every kind."""
    made: list[Store] = []

    def make(objects: int | None = None, layout: Layout = TOY) -> Store:
        made.append(build(request.param, tmp_path, objects, layout))
        return made[-1]

    yield make
    for store in made:
        store.close()
