from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch

from cacheflow.engine import Engine
from cacheflow.stores import MemoryStore, Store
from models.decoder import Decoder
from tests.cacheflow.toy import CHUNK, PAGE, LeaseBook, ToyCosts, assert_nothing_held, decoder, eventually, poison

MakeEngine: TypeAlias = Callable[..., Engine]


def _own_threads() -> set[threading.Thread]:
    return {
        thread for thread in threading.enumerate() if thread.name.startswith("cacheflow") and "disk" not in thread.name
    }


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Makes engines over the toy model, a store with a lease book and stale pages. After the test each must hold
    nothing, and end all its threads."""
    torch.set_num_threads(1)
    before = _own_threads()
    made: list[Engine] = []

    def make(store: Store | None = None, model: Decoder | None = None, **options: Any) -> Engine:
        model = model or decoder()
        defaults = {
            "chunk_tokens": CHUNK,
            "page_size": PAGE,
            "cache_tokens": 512,
            "costs": ToyCosts(model),
            "timeout": 60,  # what is slow for any other reason than a test's own must not look like a fault
        }
        engine = Engine(model, LeaseBook(store or MemoryStore(1 << 30)), **{**defaults, **options})
        poison(engine)
        made.append(engine)
        return engine

    yield make
    try:
        for engine in made:
            assert_nothing_held(engine)
    finally:
        for engine in made:
            engine.close()
    assert eventually(lambda: not _own_threads() - before), _own_threads() - before
