"""A bounded store: what it holds, what it drops, and that what is in use stays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cacheflow.eviction import EVICTIONS, Chunk, ChunkStore, Eviction
from tests.cacheflow.strategies import Affine

CHUNK = 8
COSTS = Affine((None,) * 2, bandwidth=8.0, pair=0.1)
NAMES = sorted(EVICTIONS)


def chunks(prompt: Any, count: int, size: int = 1) -> list[Chunk]:
    return [Chunk((prompt, i), i, size) for i in range(count)]


def eviction(name: str) -> Eviction:
    return EVICTIONS[name](COSTS, CHUNK)


def held(store: ChunkStore, among: list[Chunk]) -> list[int]:
    return [chunk.position for chunk in among if chunk.key in store]


class Machine(RuleBasedStateMachine):
    """Prompts share beginnings, find, release and write in any order; a plain account of it all is kept beside."""

    @initialize(name=st.sampled_from(NAMES), capacity=st.none() | st.integers(0, 40))
    def start(self, name: str, capacity: int | None) -> None:
        self.store = ChunkStore(capacity, eviction(name))
        self.now = 0.0
        self.finds: list[list[Chunk]] = []
        self.sizes: dict[Any, int] = {}

    def prompt(self, family: int, own: int, count: int) -> list[Chunk]:
        keys = [(family, i) if i < 3 else (family, own, i) for i in range(count)]
        return [Chunk(key, i, 1 + hash(key) % 4) for i, key in enumerate(keys)]

    @rule(family=st.integers(0, 2), own=st.integers(0, 2), count=st.integers(0, 8), wait=st.sampled_from([0.0, 0.5]))
    def write(self, family: int, own: int, count: int, wait: float) -> None:
        self.now += wait
        prompt = self.prompt(family, own, count)
        self.sizes.update((chunk.key, chunk.bytes) for chunk in prompt)
        before = self.store.refused
        self.store.write(prompt, self.now)
        assert sum(chunk.key not in self.store for chunk in prompt) == self.store.refused - before

    @rule(family=st.integers(0, 2), own=st.integers(0, 2), count=st.integers(0, 8), wait=st.sampled_from([0.0, 2.0]))
    def find(self, family: int, own: int, count: int, wait: float) -> None:
        self.now += wait
        prompt = self.prompt(family, own, count)
        there = self.store.find(prompt)
        assert there == tuple(chunk.key in self.store for chunk in prompt)
        self.finds.append([chunk for chunk, is_there in zip(prompt, there, strict=True) if is_there])

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.finds:
            found = self.finds.pop(data.draw(st.integers(0, len(self.finds) - 1)))
            self.store.release(found, self.now)

    @invariant()
    def holds_what_it_says_and_never_too_much(self) -> None:
        there = sum(size for key, size in self.sizes.items() if key in self.store)
        assert self.store.used == there
        assert self.store.capacity is None or there <= self.store.capacity

    @invariant()
    def keeps_what_is_in_use(self) -> None:
        assert all(chunk.key in self.store for found in self.finds for chunk in found)

    def teardown(self) -> None:
        """Once nothing is in use any more, everything can be dropped."""
        for found in self.finds:
            self.store.release(found, self.now)
        capacity = self.store.capacity
        if capacity:
            self.store.write([Chunk("large", 0, capacity)], self.now + 1)
            assert "large" in self.store and self.store.used == capacity


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class TestLru:
    def test_drops_the_least_recently_used_and_of_a_prompt_its_end(self) -> None:
        store = ChunkStore(8, eviction("lru"))
        old, new = chunks("old", 4), chunks("new", 4)
        store.write(old, 0.0)
        store.write(new, 1.0)
        store.write(chunks("next", 2), 2.0)
        assert held(store, old) == [0, 1] and held(store, new) == [0, 1, 2, 3]
        found = [c for c, there in zip(old, store.find(old), strict=True) if there]
        store.release(found, 3.0)
        store.write(chunks("more", 4), 4.0)
        assert held(store, old) == [0, 1] and held(store, new) == []

    def test_of_a_prompt_that_does_not_fit_the_beginning_stays(self) -> None:
        store = ChunkStore(6, eviction("lru"))
        store.write(chunks("a", 8), 0.0)
        assert held(store, chunks("a", 8)) == [0, 1, 2, 3, 4, 5] and store.refused == 2


class TestRestoration:
    def test_of_what_was_used_together_the_beginning_goes_first(self) -> None:
        store = ChunkStore(8, eviction("restoration"))
        store.write(chunks("a", 8), 0.0)
        store.write(chunks("b", 2), 5.0)
        assert held(store, chunks("a", 8)) == [2, 3, 4, 5, 6, 7]

    def test_of_a_prompt_that_does_not_fit_the_end_stays(self) -> None:
        store = ChunkStore(6, eviction("restoration"))
        store.write(chunks("a", 8), 0.0)
        assert held(store, chunks("a", 8)) == [2, 3, 4, 5, 6, 7]

    def test_recency_is_weighed_against_cost(self) -> None:
        rule = eviction("restoration")
        cheap, dear = rule.recompute_seconds(0), rule.recompute_seconds(7)  # type: ignore[attr-defined]
        assert dear > 2 * cheap
        for times, dropped in ((0.9, 0), (1.1, 7)):  # the dear one is that much older than it is dearer
            store = ChunkStore(2, eviction("restoration"))
            first, last = Chunk("cheap", 0, 1), Chunk("dear", 7, 1)
            now = 100.0
            store.write([last], now - 10 * times * dear / cheap)
            store.write([first], now - 10)
            store.write([Chunk("new", 3, 1)], now)
            assert held(store, [first, last]) == [7 - dropped]

    @given(position=st.integers(0, 300))
    def test_cost_is_that_of_the_cells(self, position: int) -> None:
        """By the formula: projection and advance of 8 tokens at 2 layers, each token attending to all up to itself."""
        pairs = sum(range(position * CHUNK + 1, (position + 1) * CHUNK + 1))
        seconds = 2 * (CHUNK * (0.05 + 1.0) + 0.1 * pairs)
        rule: Any = eviction("restoration")
        assert rule.recompute_seconds(position) == pytest.approx(seconds / (2 * CHUNK * 8))

    @settings(deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.floats(0, 9)), min_size=1, max_size=30),
        st.integers(0, 29),
    )
    def test_victim_is_the_minimum_over_all(self, used: list[tuple[int, float]], gone: int) -> None:
        rule: Any = eviction("restoration")
        there = {}
        for i, (position, at) in enumerate(sorted(used, key=lambda item: item[1])):
            there[Chunk(i, position, 1)] = at
            rule.add([Chunk(i, position, 1)], at)
        for chunk in [chunk for chunk in there if chunk.key == gone]:
            del there[chunk]
            rule.discard(chunk)
        victim = rule.victim(10.0)
        if not there:
            assert victim is None
            return
        worth = {chunk: rule.recompute_seconds(chunk.position) / (10.0 - at) for chunk, at in there.items()}
        assert worth[victim] == pytest.approx(min(worth.values()))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_dropped_for_what_cannot_fit(name: str) -> None:
    store = ChunkStore(6, eviction(name))
    store.write(chunks("a", 6), 0.0)
    store.write([Chunk("large", 0, 7)], 1.0)
    assert len(held(store, chunks("a", 6))) == 6 and store.refused == 1 and store.evicted == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_of_another_length_is_not_the_same(name: str) -> None:
    store = ChunkStore(None, eviction(name))
    store.write([Chunk("a", 0, 3)], 0.0)
    assert store.find([Chunk("a", 0, 3)]) == (True,) and store.find([Chunk("a", 0, 2)]) == (False,)


def test_a_capacity_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        ChunkStore(-1, eviction("lru"))
