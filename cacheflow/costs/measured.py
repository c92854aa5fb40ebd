"""Costs interpolated between what was measured on this machine with idle streams (measure.py measures)."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cacheflow.costs.base import Costs, LayerWork, ModelShape, Span

FORMAT = 2


class Interference(NamedTuple):
    """What ops take from each other, in seconds. launch: of a compute op, beyond its own work. fetch, byte: of a fetch
    and its copy, from compute that runs meanwhile."""

    launch: float
    fetch: float
    byte: float


@dataclass(frozen=True)
class Measurements:
    """Seconds, of one layer unless said otherwise.

    tokens: ascending token counts n at which project and advance were measured: norm, K and V projection, RoPE and page
        write; and everything else that advances n tokens, attention left out.
    queries, contexts: ascending grid of attention, queries [contexts, contexts + queries) against all before them.
    pair: [queries][contexts] seconds per (query, key) pair.
    head: from the last hidden state of one token to its id. compute_fixed: per compute op, the loop's share included.
    """

    tokens: tuple[int, ...]
    project: tuple[float, ...]
    advance: tuple[float, ...]
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    pair: tuple[tuple[float, ...], ...]
    head: float
    compute_fixed: float


class Measured(Costs):
    """Piecewise linear in tokens, bilinear in queries and context; beyond the last point its rate goes on.

    Linear pieces keep the contract of Costs: between two points a time per token lies between theirs, so no op is
    cheaper than its tokens at the best rate measured.
    """

    def __init__(self, shape: ModelShape, measurements: Measurements, **link: Any) -> None:
        super().__init__(shape, **link)
        self.measurements = m = measurements
        tokens = np.asarray(m.tokens)
        self.project_marginal = float(np.min(np.asarray(m.project) / tokens))
        self.advance_marginal = float(np.min(np.asarray(m.advance) / tokens))
        self.pair_marginal = float(np.min(m.pair))
        self.compute_fixed = m.compute_fixed

    def layer_seconds(self, work: LayerWork) -> float:
        m = self.measurements
        gemm = _linear(work.project, m.tokens, m.project) + _linear(work.advance, m.tokens, m.advance)
        return gemm + sum(span.pairs * self._pair_seconds(span) for span in work.spans)

    def head_seconds(self, tokens: int) -> float:
        return tokens * self.measurements.head

    def _pair_seconds(self, span: Span) -> float:
        m = self.measurements
        query, query_share = _place(span.stop - span.start, m.queries)
        context, context_share = _place(span.start, m.contexts)
        by_query = [_between(row[context : context + 2], context_share) for row in m.pair[query : query + 2]]
        return _between(by_query, query_share)

    @property
    def link(self) -> dict[str, float]:
        """What fetches and copies take, as the constructor wants it."""
        return {
            "bandwidth": self.bandwidth,
            "latency": self.latency,
            "fetch_seconds": self.fetch_seconds,
            "copy_bandwidth": self.copy_bandwidth,
            "copy_seconds": self.copy_seconds,
            "interference_per_fetch": self.interference_per_fetch,
            "interference_per_byte": self.interference_per_byte,
        }

    def with_interference(self, found: Interference) -> Measured:
        """The same, and what ops were found to take from each other."""
        m, link = self.measurements, {"interference_per_fetch": found.fetch, "interference_per_byte": found.byte}
        return Measured(self.shape, replace(m, compute_fixed=m.compute_fixed + found.launch), **{**self.link, **link})

    def save(self, path: str | Path) -> None:
        """Write as JSON, link included."""
        shape, measurements = asdict(self.shape), asdict(self.measurements)
        record = {"format": FORMAT, "shape": shape, "measurements": measurements, "link": self.link}
        Path(path).write_text(json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, shape: ModelShape, **link: Any) -> Measured:
        """Read what `save` wrote; link values given replace those saved.

        Raises ValueError for a file that is not such, or is of another model.
        """
        try:
            record = json.loads(Path(path).read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']}")
            saved = ModelShape(**_tuples(record["shape"]))
            measurements = Measurements(**_tuples(record["measurements"]))
            options = {**record["link"], **link}
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no measured costs ({error}); make it with `cacheflow measure`") from None
        if saved != shape:
            raise ValueError(f"{path} was measured with another model or dtype; measure this one")
        return cls(shape, measurements, **options)


def _tuples(record: Any) -> Any:
    """JSON as it was before it was JSON: with tuples for lists."""
    if isinstance(record, dict):
        return {name: _tuples(value) for name, value in record.items()}
    return tuple(map(_tuples, record)) if isinstance(record, list) else record


def _linear(n: int, at: tuple[int, ...], values: tuple[float, ...]) -> float:
    if n == 0:
        return 0.0
    if n > at[-1]:
        return values[-1] * n / at[-1]
    place, share = _place(n, at)
    return _between(values[place : place + 2], share)


def _place(n: int, at: tuple[int, ...]) -> tuple[int, float]:
    """Which of ascending points is the last before n, and how far n is on the way to the next; within the points."""
    place = max(0, bisect_right(at, n) - 1)
    if place + 1 == len(at):
        return place, 0.0
    return place, max(0.0, (n - at[place]) / (at[place + 1] - at[place]))


def _between(values: Sequence[float], share: float) -> float:
    """Of two neighbours, or of the last alone."""
    return values[0] + share * (values[1] - values[0]) if share else values[0]
