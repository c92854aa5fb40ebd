"""Look-up: which of a prompt's chunks the store has, and how that cuts the prompt into columns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cacheflow.keys import Keys, chunk_keys
from cacheflow.sessions import StoredChunk
from cacheflow.stores.base import ERROR, MISMATCH, TIMEOUT, Store
from cacheflow.stores.layout import Layout
from cacheflow.streams import Job, Workers

ASK_AGAIN = 10  # timeouts until a store that hangs in a look-up is asked again, should it never return; a guess


@dataclass(frozen=True)
class Located:
    """What the store has of a prompt.

    boundaries: of the prompt's columns, see Request. chunks: the object of every prefix column, None for a hole.
    leased: keys to be given back to the store when the request is over.
    failures: reasons, one per look-up that failed or object of another layout. seconds: spent.
    """

    keys: Keys
    boundaries: tuple[int, ...]
    chunks: tuple[StoredChunk | None, ...]
    leased: tuple[str, ...]
    failures: tuple[str, ...]
    seconds: float


@dataclass
class _Answer:
    found: list[StoredChunk | None]
    leased: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Locator:
    """Cuts prompts by what a store has.

    layout: of an object of so many tokens, for the model at hand; an object of any other layout is a miss.
    timeout: seconds that a look-up may take.
    """

    def __init__(self, store: Store, layout: Callable[[int], Layout], timeout: float) -> None:
        self.store = store
        self.layout = layout
        self.timeout = timeout
        self._workers = Workers(1, "cacheflow-lookup")
        self._hanging: Job | None = None
        self._ask_again = 0.0

    def locate(self, tokens: Sequence[int] | NDArray[np.integer[Any]], **key_options: Any) -> Located:
        """Look up every whole chunk, and the longest tail behind the last chunk found.

        At least the prompt's last token stays out of the prefix: its logits are what the prompt is for.
        """
        start = time.perf_counter()
        keys = chunk_keys(tokens, **key_options)
        size, page = keys.chunk_tokens, keys.page_size
        leased: list[str] = []
        failures: list[str] = []
        try:
            found = self._lookup(keys.chunks, [size] * len(keys.chunks), leased, failures)
            while found and found[-1] is None:
                found.pop()
            if len(found) * size < keys.num_tokens:
                tails = keys.tails(len(found))
                lengths = [pages * page for pages in range(1, len(tails) + 1)]
                there = self._lookup(tails, lengths, leased, failures)
                found += [tail for tail in there if tail is not None][-1:]
        except BaseException:  # KeyboardInterrupt too
            self.release(leased)
            raise
        widths = [size if chunk is None else chunk.layout.tokens for chunk in found]
        if sum(widths) >= keys.num_tokens and widths[-1] == 1:
            found.pop()  # an object of the last token alone has nothing to restore
        return Located(
            keys=keys,
            boundaries=self._boundaries(keys, widths[: len(found)]),
            chunks=tuple(found),
            leased=tuple(leased),
            failures=tuple(failures),
            seconds=time.perf_counter() - start,
        )

    def release(self, leased: Sequence[str]) -> None:
        """Give leases back. A store that fails here keeps them; that is its loss, not the prompt's."""
        with contextlib.suppress(Exception):
            self.store.release(leased)

    @staticmethod
    def _boundaries(keys: Keys, widths: list[int]) -> tuple[int, ...]:
        cuts = [0]
        for width in widths:
            cuts.append(min(cuts[-1] + width, keys.num_tokens - 1))
        while cuts[-1] < keys.num_tokens:
            cuts.append(min((cuts[-1] // keys.chunk_tokens + 1) * keys.chunk_tokens, keys.num_tokens))
        return tuple(cuts)

    def _lookup(
        self, keys: Sequence[str], tokens: Sequence[int], leased: list[str], failures: list[str]
    ) -> list[StoredChunk | None]:
        """What the store has of objects of so many tokens: nothing where it raises or hangs. leased, failures: added
        to."""
        if not keys:
            return []
        if self._hanging and not self._hanging.ended.is_set() and time.monotonic() < self._ask_again:
            failures.append(TIMEOUT)  # a batch of prompts waits for one timeout, not for one each
            return [None] * len(keys)
        wanted = [StoredChunk(key, self.layout(count)) for key, count in zip(keys, tokens, strict=True)]
        answer = _Answer([None] * len(keys))
        job = Job(lambda: self._ask(wanted, answer), late=lambda: self.release(answer.leased))
        self._workers.run(job)
        try:
            job.ended.wait(self.timeout)
        finally:  # an interrupt must not lose leases
            late = self._workers.give_up(job)
            if not late:
                leased += answer.leased
        if late:
            self._hanging, self._ask_again = job, time.monotonic() + ASK_AGAIN * self.timeout
            failures.append(TIMEOUT)
            return [None] * len(keys)
        failures += answer.failures
        return answer.found

    def _ask(self, wanted: Sequence[StoredChunk], answer: _Answer) -> None:
        """On a worker's thread."""
        alien = []
        try:
            infos = self.store.lookup([chunk.key for chunk in wanted])
            for i, (chunk, info) in enumerate(zip(wanted, infos, strict=True)):
                if info is None:
                    continue
                answer.leased.append(chunk.key)
                if info.layout == chunk.layout:
                    answer.found[i] = chunk
                else:
                    answer.failures.append(MISMATCH)
                    alien.append(chunk.key)
            if alien:
                self.store.delete(alien)  # as a read of it would: it is in the way of a good one
        except Exception:
            answer.failures.append(ERROR)

    def close(self) -> None:
        self._workers.close()
