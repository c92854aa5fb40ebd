"""A store of bounded capacity in virtual time, and what it drops to make room."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from cacheflow.costs.base import Costs


class Chunk(NamedTuple):
    """An object that may be stored. position: of the chunk in its prompt. bytes: of its KV."""

    key: Hashable
    position: int
    bytes: int


class Eviction(ABC):
    """Keeps track of what may be dropped, and says what is dropped first. Times never fall."""

    name: ClassVar[str]
    end_first: ClassVar[bool]  # of one prompt, whether its end is kept rather than its beginning

    def __init__(self, costs: Costs, chunk_tokens: int) -> None:
        """costs: what recompute would take. chunk_tokens: of a whole chunk."""
        self.costs = costs
        self.chunk_tokens = chunk_tokens

    @abstractmethod
    def add(self, chunks: Iterable[Chunk], now: float) -> None:
        """Chunks of one prompt, in its order, that are not in use any more."""

    @abstractmethod
    def discard(self, chunk: Chunk) -> None:
        """The chunk is in use again, or gone."""

    @abstractmethod
    def victim(self, now: float) -> Chunk | None:
        """What to drop first; None if nothing may be dropped."""


class Lru(Eviction):
    """The least recently used; of a prompt its end first, as stores for readers that need a whole prefix have it."""

    name = "lru"
    end_first = False

    def __init__(self, costs: Costs, chunk_tokens: int) -> None:
        super().__init__(costs, chunk_tokens)
        self._order: OrderedDict[Chunk, None] = OrderedDict()

    def add(self, chunks: Iterable[Chunk], now: float) -> None:
        for chunk in reversed(list(chunks)):
            self._order[chunk] = None
            self._order.move_to_end(chunk)

    def discard(self, chunk: Chunk) -> None:
        self._order.pop(chunk, None)

    def victim(self, now: float) -> Chunk | None:
        return next(iter(self._order), None)


class Restoration(Eviction):
    """The least worth to a restorer: the smallest seconds of recompute per byte over seconds since last use.

    value(chunk) = recompute(position) / age. A restorer computes the beginning of a prefix while it loads the end, so a
    chunk is of use whatever is left of those before it, and the later it is the dearer it is to recompute, since it
    attends to more. Dropping early chunks first is Pensieve's rule (EuroSys 2025); cost over age is that of hyperbolic
    caching (Blankstein et al., ATC 2017) without its count of uses; to put them together like this is ours.

    Chunks at one position cost the same, so the oldest of each position are all that have to be compared.
    """

    name = "restoration"
    end_first = True

    def __init__(self, costs: Costs, chunk_tokens: int) -> None:
        super().__init__(costs, chunk_tokens)
        self._at: list[OrderedDict[Chunk, float]] = []  # by position: when last used, oldest first
        self._oldest = np.empty(0)
        self._seconds = np.empty(0)

    def recompute_seconds(self, position: int) -> float:
        """Least seconds per byte to compute the chunk at a position, all before it being there."""
        start, stop = position * self.chunk_tokens, (position + 1) * self.chunk_tokens
        shape = self.costs.shape
        layers = Counter(shape.windows.index(window) for window in shape.windows)
        seconds = sum(count * sum(self.costs.cell_marginals(start, stop, layer)) for layer, count in layers.items())
        return float(seconds) / (self.chunk_tokens * shape.layers * shape.cell_bytes)

    def add(self, chunks: Iterable[Chunk], now: float) -> None:
        for chunk in chunks:
            while chunk.position >= len(self._at):
                self._seconds = np.append(self._seconds, self.recompute_seconds(len(self._at)))
                self._oldest = np.append(self._oldest, np.inf)
                self._at.append(OrderedDict())
            used = self._at[chunk.position]
            used[chunk] = now
            used.move_to_end(chunk)
            self._oldest[chunk.position] = next(iter(used.values()))

    def discard(self, chunk: Chunk) -> None:
        if chunk.position < len(self._at):
            used = self._at[chunk.position]
            used.pop(chunk, None)
            self._oldest[chunk.position] = next(iter(used.values()), np.inf)

    def victim(self, now: float) -> Chunk | None:
        # The largest age over cost; of several that were used just now, which all have 0, the first.
        worst = int(np.argmax((now - self._oldest) / self._seconds)) if self._at else 0
        return next(iter(self._at[worst]), None) if self._at else None


EVICTIONS: dict[str, type[Eviction]] = {cls.name: cls for cls in (Lru, Restoration)}


class ChunkStore:
    """What is stored when. Chunks that a prompt has found are in use, and kept, until it releases them.

    capacity: bytes; None: no limit. used: bytes. evicted, refused: how many chunks were dropped, and were not stored
    because everything else was in use.
    """

    def __init__(self, capacity: int | None, eviction: Eviction) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"a store's capacity is {capacity}; it must be at least 0 bytes")
        self.capacity = capacity
        self.eviction = eviction
        self.used = 0
        self.evicted = 0
        self.refused = 0
        self._chunks: dict[Hashable, Chunk] = {}
        self._uses: Counter[Hashable] = Counter()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._chunks

    def find(self, chunks: Sequence[Chunk]) -> tuple[bool, ...]:
        """Which of a prompt's chunks are there. Those that are must be released."""
        found = tuple(self._chunks.get(chunk.key) == chunk for chunk in chunks)
        for chunk, there in zip(chunks, found, strict=True):
            if there:
                self._uses[chunk.key] += 1
                self.eviction.discard(chunk)
        return found

    def release(self, chunks: Iterable[Chunk], now: float) -> None:
        """Chunks that one prompt found, in its order, are not in use by it any more."""
        free = []
        for chunk in chunks:
            self._uses[chunk.key] -= 1
            if not self._uses[chunk.key]:
                del self._uses[chunk.key]
                free.append(chunk)
        self.eviction.add(free, now)

    def write(self, chunks: Sequence[Chunk], now: float) -> None:
        """Store what is not there of a prompt; what is counts as used. A prompt pushes out nothing of its own."""
        unused = []
        for chunk in reversed(chunks) if self.eviction.end_first else chunks:
            if chunk.key not in self._chunks:
                if not self._make_room(chunk.bytes, now):
                    self.refused += 1
                    continue
                self._chunks[chunk.key] = chunk
                self.used += chunk.bytes
            elif chunk.key in self._uses or self._chunks[chunk.key] != chunk:
                continue
            unused.append(chunk)
            self.eviction.discard(chunk)
        self.eviction.add(sorted(unused, key=lambda chunk: chunk.position), now)

    def _make_room(self, size: int, now: float) -> bool:
        if self.capacity is None:
            return True
        while self.used + size > self.capacity:
            victim = self.eviction.victim(now) if size <= self.capacity else None
            if victim is None:
                return False
            self.eviction.discard(victim)
            del self._chunks[victim.key]
            self.used -= victim.bytes
            self.evicted += 1
        return True
