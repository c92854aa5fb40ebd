"""What all cost models share: the work of an op, counted from a model's shape, and the times of link and copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cacheflow.op import COMPUTE, FETCH, Kind, Op

Positions = TypeVar("Positions", int, NDArray[np.int64])


class Config(Protocol):
    """The fields of a model configuration that costs depend on (models.config.ModelConfig has them)."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def window(self, layer: int) -> int | None: ...


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only transformer that decide how long restoring takes.

    windows: per layer the sliding window in tokens, or None. dtype_bytes: of weights and KV.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    windows: tuple[int | None, ...]
    dtype_bytes: int = 2

    @classmethod
    def of(cls, config: Config, dtype_bytes: int) -> ModelShape:
        return cls(
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            windows=tuple(config.window(layer) for layer in range(config.num_layers)),
            dtype_bytes=dtype_bytes,
        )

    @cached_property
    def cell_bytes(self) -> int:
        """KV bytes of one token at one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @cached_property
    def project_flops(self) -> int:
        """FLOPs to project one token's K and V at one layer."""
        return 4 * self.hidden * self.kv_heads * self.head_dim

    @cached_property
    def advance_flops(self) -> int:
        """FLOPs of the GEMMs that advance one token through one layer: Q and output projection, MLP."""
        return 4 * self.hidden * self.heads * self.head_dim + 6 * self.hidden * self.intermediate

    @cached_property
    def pair_flops(self) -> int:
        """FLOPs of attention per (query, key) pair at one layer, all heads: Q K^T and P V."""
        return 4 * self.heads * self.head_dim

    @cached_property
    def head_flops(self) -> int:
        """FLOPs of the language-model head for one token."""
        return 2 * self.hidden * self.vocab


class Span(NamedTuple):
    """Queries [start, stop) of one sequence that attention at one layer answers, and the window they see through."""

    start: int
    stop: int
    window: int | None

    @property
    def pairs(self) -> int:
        """(query, key) pairs: query p sees min(p + 1, window) keys."""
        return _pairs(self.start, self.stop, self.window)


def _pairs(start: Positions, stop: Positions, window: int | None) -> Positions:
    if window is None:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    return _keys(stop, window) - _keys(start, window)


def _keys(tokens: Positions, window: int) -> Positions:
    """Keys seen by all queries before position `tokens`."""
    beyond = (tokens > window) * (tokens - window)
    return (tokens - beyond) * (tokens - beyond + 1) // 2 + beyond * window


class LayerWork(NamedTuple):
    """What one layer of a compute op does: tokens projected, and the spans that are advanced."""

    project: int
    spans: tuple[Span, ...]

    @property
    def advance(self) -> int:
        return sum([span.stop - span.start for span in self.spans])


class Costs(ABC):
    """Seconds of an op on undisturbed resources.

    For every way of cutting work into ops, seconds(op) >= fixed(kind) + the sum of its cells' marginals, a compute op
    layer_fixed more for each layer of its band: what a small op loses against a large one belongs to the op, never to
    the cell. bounds.py builds on that.

    bandwidth: of the link, bytes per second. latency: seconds before a fetch's first byte; overlaps other transfers.
    fetch_seconds, copy_seconds: fixed per op. copy_bandwidth: staging to pages, bytes per second.
    interference_per_fetch, interference_per_byte: seconds by which a fetch and its copy hold up compute, with which
        they may share CPU cores and memory.
    project_marginal, advance_marginal: seconds per token and layer. pair_marginal: per (query, key) pair and layer.
    compute_fixed: seconds per compute op. layer_fixed: seconds per layer of a compute op, whatever it holds.
    revision: differs whenever seconds of compute ops do.
    """

    project_marginal: float
    advance_marginal: float
    pair_marginal: float
    compute_fixed: float
    layer_fixed: float = 0.0
    interference_per_fetch: float = 0.0
    interference_per_byte: float = 0.0
    revision: int = 0

    def __init__(
        self,
        shape: ModelShape,
        *,
        bandwidth: float,
        latency: float = 0.0,
        fetch_seconds: float = 0.0,
        copy_bandwidth: float = float("inf"),
        copy_seconds: float = 0.0,
        interference_per_fetch: float = 0.0,
        interference_per_byte: float = 0.0,
    ) -> None:
        if not bandwidth > 0 or not copy_bandwidth > 0:
            raise ValueError(f"bandwidths must be above 0 bytes/s, not {bandwidth} (link) and {copy_bandwidth} (copy)")
        self.shape = shape
        self.bandwidth = bandwidth
        self.latency = latency
        self.fetch_seconds = fetch_seconds
        self.copy_bandwidth = copy_bandwidth
        self.copy_seconds = copy_seconds
        self.interference_per_fetch = interference_per_fetch
        self.interference_per_byte = interference_per_byte

    def seconds(self, op: Op) -> float:
        """Undisturbed duration of an op on its resource, in seconds; a fetch's latency is not part of it."""
        if op.kind == COMPUTE:
            return self._compute(op)
        cells = op.tokens * len(op.layers)
        if op.kind == FETCH:
            return self.fetch_seconds + self.load_seconds(cells)
        return self.copy_seconds + cells * self.shape.cell_bytes / self.copy_bandwidth

    def fixed(self, kind: Kind) -> float:
        """Seconds that every op of a kind costs at least, whatever it holds."""
        if kind == COMPUTE:
            return self.compute_fixed
        return self.fetch_seconds if kind == FETCH else self.copy_seconds

    def load_seconds(self, cells: int) -> float:
        """Seconds that the link needs to move so many (token, layer) pairs of KV."""
        return cells * self.shape.cell_bytes / self.bandwidth

    def interference(self, cells: int, fetches: int = 1) -> float:
        """Seconds by which fetches of so many (token, layer) pairs, and their copies, hold up compute."""
        return fetches * self.interference_per_fetch + cells * self.shape.cell_bytes * self.interference_per_byte

    @abstractmethod
    def layer_seconds(self, work: LayerWork) -> float:
        """Seconds of one layer of a compute op."""

    @abstractmethod
    def head_seconds(self, tokens: int) -> float:
        """Seconds to get the ids that follow `tokens` last hidden states."""

    def _compute(self, op: Op) -> float:
        total = self.compute_fixed
        for work, count in self.layer_works(op).items():
            total += count * self.layer_seconds(work)
        if op.layers.stop == self.shape.layers:
            total += self.head_seconds(sum([part.advance for part in op.parts]))
        return total

    def layer_works(self, op: Op) -> dict[LayerWork, int]:
        """The work of each layer of a compute op, equal layers counted together."""
        below, top = self.shape.windows[op.layers.start : op.layers.stop - 1], op.layers.stop - 1
        project = sum([p.stop - p.start for p in op.parts if p.project])
        works: dict[LayerWork, int] = {}
        for window in dict.fromkeys(below):
            work = LayerWork(project, tuple([Span(p.start, p.stop, window) for p in op.parts]))
            works[work] = below.count(window)
        window, last = self.shape.windows[top], top == self.shape.layers - 1
        spans = [Span(p.stop - 1 if last else p.start, p.stop, window) for p in op.parts if p.advance]
        work = LayerWork(project, tuple(spans))
        works[work] = works.get(work, 0) + 1
        return works

    def cell_marginals(self, start: Positions, stop: Positions, layer: int) -> tuple[Any, Any]:
        """The least seconds that projecting, and advancing, tokens [start, stop) at a layer adds to any op.

        start, stop: numbers, or arrays of the tokens at which several cells begin and end; so are the seconds.
        """
        tokens, pairs = stop - start, _pairs(start, stop, self.shape.windows[layer])
        return tokens * self.project_marginal, tokens * self.advance_marginal + pairs * self.pair_marginal
