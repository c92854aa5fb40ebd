"""What a fetch and its copy take from compute that runs beside them."""

from __future__ import annotations

import contextlib
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cacheflow.costs.measure import Bench, up_to
from cacheflow.devices import Device
from cacheflow.op import COMPUTE, FETCH
from cacheflow.stores.base import Buffer, Store, StoreWrapper, WriteResult
from cacheflow.stores.layout import Layout
from cacheflow.stores.link import Link
from cacheflow.streams import Stream
from models.decoder import Decoder

if TYPE_CHECKING:
    from cacheflow.engine import Engine

TOKENS = (256, 512, 1024, 2048)  # of the passes that keep compute busy; the first that lasts ROW_SECONDS is taken
ROW_SECONDS = 5e-3  # from one layer's fetch to the next
BUSY = 1.5  # times as long as the loads take, compute has work
ROUNDS = 5
REPEATS = 3  # passes at least
LOADED = 512  # tokens that are loaded at once, if a chunk is not longer
LAYERWISE, WHOLE = "layerwise-load", "load"  # policies: a fetch for every layer, and one for every chunk


class Make(Protocol):
    """Makes an engine over a store that another one uses too, with streams as it is told; see Engine."""

    def __call__(self, store: Store, streams: Callable[[str], Stream], cache_tokens: int) -> Engine: ...


def measure_interference(
    make: Make, model: Decoder, store: Store, device: Device, layout: Layout
) -> tuple[float, float]:
    """interference_per_fetch and interference_per_byte of Costs, in seconds.

    Chunks are restored, one of them layer by layer and LOADED tokens at once, behind a queue of layers on the compute
    stream: what these take longer than alone is what fetches, copies and the loop took from them. Medians of ROUNDS.
    layout: of a stored chunk. They are written to the store, and deleted; where that cannot be, 0 and 0 are returned.
    """
    if layout.tokens >= model.max_positions or layout.layers == 1:
        return 0.0, 0.0  # no prompt is as long; nothing to tell fetches from bytes by
    seconds, sizes = ROW_SECONDS * layout.layers, up_to(min(TOKENS[-1], model.max_positions), TOKENS)
    undelayed = _Remembers(store.store if isinstance(store, Link) else store)
    streams: dict[str, Stream] = {}

    def stream(name: str) -> Stream:
        return streams.setdefault(name, device.stream(name))

    chunks = max(1, min(LOADED, model.max_positions - 1) // layout.tokens)
    tokens = np.random.default_rng().integers(model.config.vocab_size, size=chunks * layout.tokens + 1).tolist()
    prompts = {LAYERWISE: tokens[: layout.tokens + 1], WHOLE: tokens}
    link = Link(undelayed, gbps=math.inf)
    with make(link, stream, len(tokens)) as engine:
        try:
            engine.save(tokens[:-1])
            works = {policy: partial(_restore, engine, prompt, policy, seconds) for policy, prompt in prompts.items()}
            fetches = {policy: work() for policy, work in works.items()}
            if fetches != {LAYERWISE: layout.layers, WHOLE: chunks}:
                raise _NotLoadedError(f"{fetches} fetches")
            busy = _Busy(streams[COMPUTE], Bench(model, sizes[-1]), sizes, BUSY * seconds)
            times = [
                [busy.seconds(work) for work in (lambda: 0, works[LAYERWISE], works[WHOLE])] for _ in range(ROUNDS)
            ]
        except _NotLoadedError as error:
            warnings.warn(f"what loads take from compute could not be timed ({error}); none is assumed", stacklevel=2)
            return 0.0, 0.0
        finally:
            with contextlib.suppress(Exception):
                undelayed.delete(undelayed.written)
    layerwise = statistics.median(one - alone for alone, one, _ in times)  # layers x fetch + chunk
    whole = statistics.median(one - alone for alone, _, one in times) / chunks  # fetch + chunk
    fetch = max(0.0, layerwise - whole) / (layout.layers - 1)
    return fetch, max(0.0, whole - fetch) / layout.nbytes


class _Remembers(StoreWrapper):
    """A store that knows what was written to it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.written: list[str] = []

    def write(self, key: str, layout: Layout, payload: Buffer | bytes) -> WriteResult:
        self.written.append(key)
        return self.store.write(key, layout, payload)


class _NotLoadedError(Exception):
    """The chunks were not stored, or not read."""


def _restore(engine: Engine, prompt: Sequence[int], policy: str, seconds: float) -> int:
    """In how many fetches, over a link that takes so many seconds for them."""
    chunks, link = len(prompt) // engine.chunk_tokens, engine.store
    assert isinstance(link, Link)
    link.set_bandwidth(chunks * engine.layout.nbytes * 8 / 1e9 / seconds)
    [restored] = engine.restore([prompt], policy=policy)
    engine.release(restored)
    if restored.failures:
        raise _NotLoadedError(f"failures: {dict(restored.failures)}")
    return sum(span.op.kind == FETCH for span in restored.timeline.spans)


class _Busy:
    """A compute stream with layers queued on it, enough for so many seconds."""

    def __init__(self, stream: Stream, bench: Bench, sizes: Sequence[int], seconds: float) -> None:
        self._stream, self._count = stream, REPEATS
        for tokens in sizes:
            self._work = bench.band(tokens)
            each = min(self.seconds(lambda: None) for _ in range(2)) / REPEATS
            if each >= ROW_SECONDS:
                break
        self._count = max(REPEATS, math.ceil(seconds / each))

    def seconds(self, beside: Callable[[], object]) -> float:
        """That the layers take, something else done meanwhile."""
        times: list[tuple[float, float]] = []
        failed: list[BaseException] = []

        def ended(start: float, end: float, error: BaseException | None) -> None:
            times.append((start, end))
            if error is not None:
                failed.append(error)

        for _ in range(self._count):
            self._stream.run(self._work, ended)
        done = self._stream.record()
        try:
            beside()
        finally:
            done.wait()
        if failed:
            raise failed[0]
        return times[-1][1] - times[0][0]
