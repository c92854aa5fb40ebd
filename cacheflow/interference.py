"""What ops take from each other: the loop's share of a launch, and what a fetch and its copy take from the compute that
runs meanwhile."""

from __future__ import annotations

import contextlib
import math
import statistics
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from cacheflow.costs.measured import Interference
from cacheflow.op import COMPUTE, FETCH, Op
from cacheflow.plane import Plane
from cacheflow.policies.layerwise_load import LayerwiseLoad
from cacheflow.stores.base import Buffer, Store, StoreWrapper, WriteResult
from cacheflow.stores.layout import Layout
from cacheflow.stores.link import Link

if TYPE_CHECKING:
    from cacheflow.engine import Engine

SUFFIX = (64, 128, 256, 512, 1024, 2048)  # tokens that are computed; the first that take LAYER_SECONDS a layer
LAYER_SECONDS = 4e-3
LOADED = 512  # tokens that are loaded: two chunks at least, so that bytes are told from fetches
PACE = 0.8  # of the time that compute has work, loads take
ROUNDS = 5


class LayerByLayer(LayerwiseLoad):
    """The same, a launch for every layer."""

    name = ""  # for measuring only

    def _climb(self, plane: Plane) -> Op | None:
        op = super()._climb(plane)
        if op is None or len(op.layers) == 1:
            return op
        return Op(COMPUTE, op.layers[:1], tuple(part._replace(advance=True) for part in op.parts))


def measure_interference(
    make: Callable[[Store, int], Engine], positions: int, store: Store, layout: Layout, windowed: bool
) -> Interference:
    """Restore a text of which nothing, one chunk, and several are stored, with the suffix in a launch for every layer
    beside a fetch for every layer, and in one launch when all is there: what the former take longer is what launches,
    fetches and bytes take. Medians of ROUNDS.

    make: an engine over a store, with pages for so many tokens. positions: of the model, at most. layout: of a stored
    chunk. windowed: whether the model has sliding windows, so that not all that is stored is loaded; nothing is
    measured then. Chunks are written to the store, and deleted; where that cannot be, nothing is assumed to interfere.
    """
    chunks = min(max(2, LOADED // layout.tokens), (positions - SUFFIX[0]) // layout.tokens)
    chunks = min(chunks, layout.layers)  # a layer of them in one fetch
    if layout.layers == 1 or chunks < 2 or windowed:
        return Interference(0.0, 0.0, 0.0)  # nothing to tell by
    kept = _Remembers(store.store if isinstance(store, Link) else store)
    most = min(positions, chunks * layout.tokens + SUFFIX[-1])
    try:
        with make(Link(kept, gbps=math.inf), most) as engine:
            excess = _Bench(engine, layout, chunks, most).excess()
    except (_NotLoadedError, torch.OutOfMemoryError) as error:  # a GPU may have no room for a second engine
        warnings.warn(f"what loads take from compute could not be timed ({error}); none is assumed", stacklevel=2)
        return Interference(0.0, 0.0, 0.0)
    finally:
        with contextlib.suppress(Exception):
            kept.delete(kept.written)
    launch = max(0.0, excess[0])
    cells = max(0.0, (excess[chunks] - excess[1]) / (chunks - 1))
    return Interference(launch, max(0.0, excess[1] - launch - cells), cells * layout.layers / layout.nbytes)


class _Bench:
    """Restores, and adds up what compute takes."""

    def __init__(self, engine: Engine, layout: Layout, chunks: int, most: int) -> None:
        self.engine, self.layout, self.chunks = engine, layout, chunks
        tokens = np.random.default_rng().integers(engine.model.config.vocab_size, size=most).tolist()
        self._document, self._suffix = tokens[: chunks * layout.tokens], tokens[chunks * layout.tokens :]
        for count in (n for n in SUFFIX if n <= len(self._suffix)):
            suffix = self._suffix[:count]
            if min(self._seconds(0, layer_by_layer=False, suffix=suffix) for _ in range(2)) >= LAYER_SECONDS:
                break
        self._suffix = suffix
        engine.save(self._document)

    def excess(self) -> dict[int, float]:
        """By chunks that are loaded: seconds that a layer takes longer in a launch of its own, beside loads."""
        counts = sorted({0, 1, self.chunks})
        found = dict[int, list[float]]((count, []) for count in counts)
        for _ in range(ROUNDS):
            for count in counts:
                alone = self._seconds(count, layer_by_layer=False)
                beside = self._seconds(count, layer_by_layer=True, within=PACE * alone * self.layout.layers)
                # The first launch is made, and the first fetch ends, when nothing else runs.
                found[count].append((beside - alone) * self.layout.layers / (self.layout.layers - 1))
        return {count: statistics.median(seconds) for count, seconds in found.items()}

    def _seconds(
        self, chunks: int, layer_by_layer: bool, suffix: list[int] | None = None, within: float = 0.0
    ) -> float:
        """Of compute for a layer, in the mean. within: seconds that the link takes for all."""
        engine, nbytes = self.engine, chunks * self.layout.nbytes
        assert isinstance(engine.store, Link)
        engine.store.set_bandwidth(nbytes * 8 / 1e9 / within if nbytes and within else math.inf)
        prompt = self._document[: chunks * self.layout.tokens] + (suffix or self._suffix)
        name = f"{__name__}:{LayerByLayer.__name__}" if layer_by_layer else "load"
        [restored] = engine.restore([prompt], policy=name)
        engine.release(restored)
        spans = restored.timeline.spans
        fetches, loads = sum(span.op.kind == FETCH for span in spans), self.layout.layers if layer_by_layer else chunks
        if restored.failures or fetches != (loads if chunks else 0):
            raise _NotLoadedError(f"{fetches} fetches, failures: {dict(restored.failures)}")
        return sum(span.seconds for span in spans if span.op.kind == COMPUTE) / self.layout.layers


class _Remembers(StoreWrapper):
    """A store that knows what was written to it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.written: list[str] = []

    def write(self, key: str, layout: Layout, payload: Buffer | bytes) -> WriteResult:
        result = self.store.write(key, layout, payload)
        if result.ok and result.reason is None:  # not what was there before
            self.written.append(key)
        return result


class _NotLoadedError(Exception):
    """The chunks were not stored, or not read."""
