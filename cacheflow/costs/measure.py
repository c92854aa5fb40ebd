"""Measures what costs/measured.py interpolates, with the ops that will run and nothing beside them."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from cacheflow.costs.base import ModelShape, Span
from cacheflow.costs.measured import Measured, Measurements
from cacheflow.stores.base import ERROR, TOO_LARGE, Buffer, Read, Store, aligned_buffer
from cacheflow.stores.layout import Layout
from kernels.batch import Part, RaggedBatch
from models.decoder import Decoder

TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUERIES = (1, 16, 128, 512, 1024, 2048)
CONTEXTS = (0, 256, 1024, 2048, 4096)
BAND = 3  # layers timed together, so that weights come from memory as they do in a real pass
REPEATS = (4, 9)  # of a timing: at least, and at most while SECONDS have not passed
SECONDS = 0.1
GUESS = 1e9  # bytes/s of a store that cannot be timed; a guess
PAGE = 16


def measure(
    model: Decoder,
    store: Store,
    layout: Layout,
    *,
    max_tokens: int = 2048,
    progress: Callable[[str], object] = lambda step: None,
) -> Measured:
    """Time compute, copies and the store's reads. Takes some seconds; nothing else should run meanwhile.

    layout: of a typical object. max_tokens: longest sequence measured; longer ones are extrapolated.
    progress: called with a line before every step.
    """
    max_tokens = min(max_tokens, model.max_positions)
    bench = _Bench(model, max_tokens)
    tokens, queries = _up_to(max_tokens, TOKENS), _up_to(max_tokens, QUERIES)
    contexts = _up_to(max_tokens - 1, CONTEXTS)
    windows = Counter(model.config.windows)
    project, advance, pair = [], [], []
    for n in reversed(tokens):  # the allocator settles on the largest sizes first, as it has in a run
        progress(f"layers, {n} tokens")
        whole, kv = bench.layer(n), bench.project(n)
        attention = sum(layers * bench.attention(n, 0, window) for window, layers in windows.items()) / windows.total()
        project.append(kv)
        advance.append(max(whole - attention - kv, 0.0))
    for n in queries:
        progress(f"attention, {n} queries")
        row = []
        for context in contexts:
            start = min(context, max_tokens - n)
            row.append(bench.attention(n, start) / Span(start, start + n, None).pairs)
        pair.append(tuple(row))
    progress("head and streams")
    measurements = Measurements(
        tokens=tokens,
        project=tuple(reversed(project)),
        advance=tuple(reversed(advance)),
        queries=queries,
        contexts=contexts,
        pair=tuple(pair),
        head=bench.head(),
        compute_fixed=bench.fixed(),
    )
    progress("copies and store")
    copy_seconds, copy_bandwidth = bench.copy(layout)
    shape = ModelShape.of(model.config, model.dtype.itemsize)
    link = link_of(store, layout)
    return Measured(shape, measurements, copy_bandwidth=copy_bandwidth, copy_seconds=copy_seconds, **link)


def link_of(store: Store, layout: Layout) -> dict[str, float]:
    """bandwidth in bytes/s and latency in seconds: a Link's own numbers, else timed on objects written for that."""
    bandwidth = getattr(store, "bandwidth", None)
    if bandwidth is not None:
        return {"bandwidth": bandwidth, "latency": store.latency}  # type: ignore[attr-defined]
    payload = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8).numpy()
    outcomes = [_read_seconds(store, layout, payload) for _ in range(REPEATS[0])]
    if TOO_LARGE in outcomes:
        raise ValueError(f"an object of {layout.nbytes} bytes does not fit the store; raise its capacity")
    seconds = [outcome for outcome in outcomes if isinstance(outcome, float)]
    if not seconds:  # a store that is down now may be back before the next prompt
        warnings.warn(f"the store could not be timed ({outcomes[0]}); {GUESS} bytes/s are assumed", stacklevel=2)
        return {"bandwidth": GUESS, "latency": 0.0}
    return {"bandwidth": layout.nbytes / statistics.median(seconds), "latency": 0.0}


def _read_seconds(store: Store, layout: Layout, payload: Buffer) -> float | str:
    """Time to read an object that is there for this only, or why it could not be read."""
    key = secrets.token_hex(32)
    try:
        written = store.write(key, layout, payload)
        if not written.ok:
            return written.reason or ERROR
        read = Read.whole(key, layout, aligned_buffer(layout.nbytes))
        start = time.perf_counter()
        [result] = store.read([read])
        seconds = time.perf_counter() - start
        return seconds if result.ok else result.reason or ERROR
    except Exception:
        return ERROR
    finally:  # before the next is written, so that at most one object of use had to make room
        with contextlib.suppress(Exception):
            store.delete([key])


class _Bench:
    """Times ops on the calling thread."""

    def __init__(self, model: Decoder, max_tokens: int) -> None:
        self.model = model
        config = model.config
        count = -(-max_tokens // PAGE)
        shape = (BAND, count, PAGE, config.kv_heads, config.head_dim)
        k, v = self._random(*shape), self._random(*shape)
        # Every layer of the model gets one of BAND page tensors: enough to time on, without a whole pool.
        self.pages = [(k[i % BAND], v[i % BAND]) for i in range(config.num_layers)]
        self.ids = list(range(count))
        self.hidden = self._random(max_tokens, config.hidden_size)
        self._layer = 0
        self._attention: dict[tuple[int, int, int | None], float] = {}

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, dtype=self.model.dtype, device=self.model.device)

    def _time(self, work: Callable[[], object]) -> float:
        """Undisturbed seconds: the fastest of some runs, since whatever else a machine does only ever adds."""
        work()
        seconds: list[float] = []
        while len(seconds) < REPEATS[0] or (len(seconds) < REPEATS[1] and sum(seconds) < SECONDS):
            seconds.append(_timed(work, self.model.device))
        return min(seconds)

    def _band(self, layers: int) -> range:
        """The next layers, round and round, so that their weights are not in a cache."""
        layers = min(layers, self.model.config.num_layers)
        start = self._layer if self._layer + layers <= self.model.config.num_layers else 0
        self._layer = start + layers
        return range(start, start + layers)

    def _batch(self, start: int, stop: int, advance: int | None = None) -> RaggedBatch:
        return RaggedBatch.build([Part(start, stop, self.ids, True, advance)], PAGE, self.model.device)

    def layer(self, n: int) -> float:
        batch, hidden = self._batch(0, n), self.hidden[:n]
        layers = min(BAND, self.model.config.num_layers)
        states = hidden.clone()

        def run() -> None:
            states.copy_(hidden)  # or they would grow from run to run
            self.model.forward(self._band(layers), batch, states, self.pages)

        return self._time(run) / layers

    def project(self, n: int) -> float:
        batch, hidden = self._batch(0, n, advance=0), self.hidden[:n]
        return self._time(lambda: self.model.forward(self._band(1), batch, hidden, self.pages))

    def attention(self, n: int, start: int, window: int | None = None) -> float:
        point = (n, start, window)
        if point not in self._attention:
            self._attention[point] = self._time_attention(*point)
        return self._attention[point]

    def _time_attention(self, n: int, start: int, window: int | None) -> float:
        config = self.model.config
        q = self._random(n, config.heads, config.head_dim)
        batch = self._batch(start, start + n)
        k, v = self.pages[0]
        return self._time(lambda: self.model.ops.attention(q, k, v, batch=batch, scale=config.scale, window=window))

    def head(self) -> float:
        return self._time(lambda: int(self.model.logits(self.hidden[:1]).argmax()))

    def fixed(self) -> float:
        """An op of one token less what its layer takes: embedding, hand-over."""
        tokens = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        return self._time(lambda: self.model.embed(tokens))

    def copy(self, layout: Layout) -> tuple[float, float]:
        """Fixed seconds and bytes/s of staging to pages."""
        shape = (layout.layers, 2, layout.kv_heads, layout.tokens, layout.parts[0].width)
        on_gpu = self.model.device.type == "cuda"
        host = torch.zeros(shape, dtype=self.model.dtype, pin_memory=on_gpu)
        staging = host.to(self.model.device)
        # An object may be longer than any sequence.
        slots = (torch.arange(layout.tokens) % (len(self.ids) * PAGE)).to(self.model.device)
        pages = [k for k, _ in self.pages]

        def run(layers: int) -> None:
            if on_gpu:
                staging[:layers].copy_(host[:layers], non_blocking=True)
            self.model.ops.pages_from_staging(staging[:layers, 0], pages[:layers], slots)
            self.model.ops.pages_from_staging(staging[:layers, 1], pages[:layers], slots)

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            one, whole = self._time(partial(run, 1)), self._time(partial(run, layout.layers))
        finally:
            torch.set_num_threads(threads)
        if layout.layers == 1 or whole <= one:
            return 0.0, layout.nbytes / whole
        bandwidth = layout.nbytes * (1 - 1 / layout.layers) / (whole - one)
        return max(0.0, whole - layout.nbytes / bandwidth), bandwidth


def _up_to(most: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    return (*(n for n in grid if n < most), most)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
