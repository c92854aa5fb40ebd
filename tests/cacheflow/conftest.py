from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch

from cacheflow.engine import Engine
from cacheflow.stores import MemoryStore, Store
from models.decoder import Decoder
from tests.cacheflow.toy import CHUNK, PAGE, LeaseBook, ToyCosts, assert_nothing_held, decoder, poison

MakeEngine: TypeAlias = Callable[..., Engine]


def _own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("cacheflow")}


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
        }
        engine = Engine(model, LeaseBook(store or MemoryStore(1 << 30)), **{**defaults, **options})
        poison(engine)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        assert_nothing_held(engine)
        engine.close()
    deadline = time.monotonic() + 5
    while (left := _own_threads() - before) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not [thread.name for thread in left if not thread.name.startswith("cacheflow-disk")]
