"""How what a store has cuts a prompt into columns. Stores that fail are in test_engine_faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow.keys import chunk_keys
from cacheflow.lookup import Located, Locator
from cacheflow.request import Request
from cacheflow.stores import Layout, MemoryStore, PartSpec
from tests.cacheflow.toy import LeaseBook

FINGERPRINT = "f" * 64


def layout(tokens: int) -> Layout:
    return Layout(layers=1, kv_heads=1, tokens=tokens, parts=(PartSpec("k", "int8", 1), PartSpec("v", "int8", 1)))


class World:
    """A store and a locator; whole texts or parts of them can be put there."""

    def __init__(self, chunk: int, page: int) -> None:
        self.options: dict[str, Any] = dict(chunk_tokens=chunk, page_size=page, fingerprint=FINGERPRINT)
        self.store = LeaseBook(MemoryStore(1 << 20))
        self.locator = Locator(self.store, layout, timeout=10)

    def put(self, tokens: list[int], chunks: set[int], tails: set[tuple[int, int]]) -> None:
        """Store chunks by number, and tails by (chunk, pages)."""
        keys = chunk_keys(tokens, **self.options)
        objects = [(keys.chunks[i], keys.chunk_tokens) for i in chunks]
        objects += [(keys.tail(pages, chunk), pages * keys.page_size) for chunk, pages in tails]
        for key, count in objects:
            assert self.store.write(key, layout(count), bytes(layout(count).nbytes)).ok

    def locate(self, tokens: list[int]) -> Located:
        located = self.locator.locate(tokens, **self.options)
        assert self.store.held == {key: 1 for key in located.leased}
        assert len(set(located.leased)) == len(located.leased)
        self.locator.release(located.leased)
        assert not located.failures and located.seconds >= 0
        stored = tuple(chunk is not None for chunk in located.chunks)
        request = Request("r", located.boundaries, stored, (None,))  # which checks what a request must be
        assert request.tokens == len(tokens)
        for column, chunk in enumerate(located.chunks):
            if chunk is not None:
                assert chunk.key in located.leased
                assert 0 <= chunk.layout.tokens - request.width(column) <= (column == len(stored) - 1)
        return located


@pytest.fixture
def world() -> Iterator[World]:
    made = World(chunk=8, page=4)
    yield made
    made.locator.close()


TEXT = list(range(40))


@pytest.mark.parametrize(
    ("length", "chunks", "tails", "boundaries", "stored"),
    [
        pytest.param(1, set(), set(), (0, 1), (), id="one-token"),
        pytest.param(20, set(), set(), (0, 8, 16, 20), (), id="nothing-there"),
        pytest.param(20, {0, 1}, set(), (0, 8, 16, 20), (True, True), id="chunks"),
        pytest.param(20, {0, 1}, {(2, 1)}, (0, 8, 16, 19, 20), (True, True, True), id="tail-with-the-last-token"),
        pytest.param(22, {0, 1}, {(2, 1)}, (0, 8, 16, 20, 22), (True, True, True), id="tail"),
        pytest.param(16, {0, 1}, set(), (0, 8, 15, 16), (True, True), id="chunk-with-the-last-token"),
        pytest.param(4, set(), {(0, 1)}, (0, 3, 4), (True,), id="tail-alone"),
        pytest.param(40, {0}, {(1, 1)}, (0, 8, 12, 16, 24, 32, 40), (True, True), id="tail-in-the-middle"),
        pytest.param(40, {0, 2}, set(), (0, 8, 16, 24, 32, 40), (True, False, True), id="hole"),
        pytest.param(40, {3}, set(), (0, 8, 16, 24, 32, 40), (False, False, False, True), id="head-gone"),
        pytest.param(40, {0, 2}, {(1, 1)}, (0, 8, 16, 24, 32, 40), (True, False, True), id="tail-before-a-chunk"),
        pytest.param(40, {1}, {(2, 1)}, (0, 8, 16, 20, 24, 32, 40), (False, True, True), id="tail-behind-a-hole"),
        pytest.param(30, {0, 3}, set(), (0, 8, 16, 24, 30), (True,), id="chunk-longer-than-the-prompt"),
    ],
)
def test_columns(world, length, chunks, tails, boundaries, stored):
    world.put(TEXT, chunks, tails)
    located = world.locate(TEXT[:length])
    assert located.boundaries == boundaries
    assert tuple(chunk is not None for chunk in located.chunks) == stored


def test_an_object_of_the_last_token_alone_is_of_no_use():
    world = World(chunk=1, page=1)
    world.put(TEXT, {0, 2}, set())
    located = world.locate(TEXT[:3])
    assert located.boundaries == (0, 1, 2, 3)
    assert [chunk is not None for chunk in located.chunks] == [True, False]
    assert world.locate(TEXT[:1]).chunks == ()
    world.locator.close()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_columns_of_anything(data):
    """Against the rule in words: every chunk that is there up to the last, then the longest tail behind it."""
    page = data.draw(st.integers(1, 3), label="page")
    chunk = page * data.draw(st.integers(1, 3), label="pages in a chunk")
    text = list(range(5 * chunk))
    chunks = data.draw(st.sets(st.integers(0, 4)), label="chunks")
    most = chunk // page - 1
    possible = [(i, pages) for i in range(5) for pages in range(1, most + 1)]
    tails = data.draw(st.sets(st.sampled_from(possible)), label="tails") if possible else set()
    length = data.draw(st.integers(1, len(text)), label="length")
    world = World(chunk, page)
    world.put(text, chunks, tails)
    located = world.locate(text[:length])
    there = [i for i in range(length // chunk) if i in chunks]
    whole = there[-1] + 1 if there else 0
    fitting = [pages for i, pages in tails if i == whole and whole * chunk + pages * page <= length]
    prefix = min(whole * chunk + page * max(fitting, default=0), length - 1)
    assert located.boundaries[len(located.chunks)] == prefix
    columns = [tuple(located.boundaries[i : i + 2]) for i in range(len(located.chunks))]
    for i, (start, stop) in enumerate(columns):
        assert start == i * chunk and stop == min(start + chunk, prefix)
        assert (located.chunks[i] is not None) == (i in chunks if i < whole else True)
    for start, stop in zip(located.boundaries[len(columns) :], located.boundaries[len(columns) + 1 :], strict=False):
        assert stop == min((start // chunk + 1) * chunk, length)
    world.locator.close()
