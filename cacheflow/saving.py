"""Saving: which objects a text makes, and which of them are whole in pages and not in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cacheflow.executor import Executor
from cacheflow.keys import chunk_keys
from cacheflow.results import Restored, Saved
from cacheflow.stores.base import EXISTS, WriteResult
from cacheflow.stores.layout import Layout


def save(
    batch: Sequence[tuple[Restored, Sequence[int]]],
    executor: Executor,
    layout: Callable[[int], Layout],
    key_options: dict[str, Any],
) -> Saved:
    """Store every chunk and tail that is complete in pages and not in the store; waits until all is written.

    batch: prompts, and the tokens behind each whose KV is in pages too. layout: of an object of so many tokens.
    """
    results: list[WriteResult] = []
    try:
        for restored, more in batch:
            for start, count, key in objects([*restored.tokens.tolist(), *more], key_options):
                if restored.session is not None and _storable(restored, start, start + count, key):
                    executor.save(restored.session, start, layout(count), key, results.append)
    finally:
        executor.flush()  # also before an error makes the caller give back the pages
    refused = Counter(str(r.reason) for r in results if r.reason not in (None, EXISTS))
    written = [r for r in results if r.reason is None]
    return Saved(len(written), sum(r.nbytes for r in written), dict(refused))


def objects(tokens: Sequence[int], key_options: dict[str, Any]) -> list[tuple[int, int, str]]:
    """(first token, tokens, key) of every object that a text makes."""
    keys = chunk_keys(tokens, **key_options)
    objects = [(i * keys.chunk_tokens, keys.chunk_tokens, key) for i, key in enumerate(keys.chunks)]
    start = len(keys.chunks) * keys.chunk_tokens
    tail_pages = (len(tokens) - start) // keys.page_size
    if tail_pages:
        objects.append((start, tail_pages * keys.page_size, keys.tail(tail_pages)))
    return objects


def _storable(restored: Restored, start: int, stop: int, key: str) -> bool:
    """Not in the store, and whole in pages: with sliding windows, cells that nobody needed were not restored."""
    assert restored.session is not None
    plane, request = restored.session.plane, restored.request
    for column, chunk in enumerate(restored.located.chunks):
        if chunk is not None and chunk.key == key and plane.available[column]:
            return False
    first, last = request.column_at(start), request.column_at(min(stop, request.tokens) - 1) + 1
    return start >= request.tokens or all(plane.filled(first, last, layer) for layer in range(plane.layers))
