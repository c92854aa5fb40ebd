"""Timeline: what ran, where, when, and what follows from it: busy, useful busy, overlap, sources, the critical path."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from cacheflow.costs.base import Costs
from cacheflow.op import COMPUTE, COPY, FETCH, SAVE, Op, Part
from cacheflow.request import Request

STREAMS = ("compute", "fetch", "copy", "store")  # in the order in which tables and pictures show them


@dataclass(frozen=True, slots=True)
class Span:
    """One op on one stream. start, end: seconds since the timeline's origin. bytes: KV moved, 0 for compute."""

    op: Op
    stream: str
    start: float
    end: float
    bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Fill:
    """Columns [first, last) of one request at a band of layers that one op filled. source: "compute" or "load".

    ready: seconds; the end of the op.
    """

    layers: range
    first: int
    last: int
    source: str
    ready: float


@dataclass(frozen=True, slots=True)
class Amount:
    """What came from one source. cells: (column, layer) pairs.

    tokens: (token, layer) pairs over the number of layers, so that the sources of a request add up to its tokens.
    """

    cells: int
    tokens: float


@dataclass(frozen=True)
class Summary:
    """A restoration in numbers. It lasts from the first op's start to the end of the last op that filled a prefix cell.

    start, end: seconds since the timeline's origin. bytes_loaded: KV that reached pages, bytes.
    busy: per stream, the share of the restoration spent inside ops. "fetch" is the paper's load.
    useful: per stream, the same with every op counted at its undisturbed cost, at most once and at most for the time it
        took. Empty without costs.
    overlap: the share in which compute and fetch were both inside ops.
    prefix, total: per source what it filled, of the prefix and of the whole request.
    """

    start: float
    end: float
    busy: Mapping[str, float]
    useful: Mapping[str, float]
    overlap: float
    bytes_loaded: int
    prefix: Mapping[str, Amount]
    total: Mapping[str, Amount]

    @property
    def seconds(self) -> float:
        """How long the restoration took."""
        return self.end - self.start


@dataclass
class Timeline:
    """Spans in the order in which they were reported, which is about that in which they ended. Any thread may add."""

    spans: list[Span] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, span: Span) -> None:
        with self._lock:
            self.spans.append(span)

    def of(self, requests: Collection[str] | None = None) -> list[Span]:
        """The spans that touch any of the requests, or all, by start."""
        with self._lock:
            spans = list(self.spans)
        touched = (s for s in spans if requests is None or any(part.request in requests for part in s.op.parts))
        return sorted(touched, key=lambda span: (span.start, span.end))

    def fills(self, request: Request) -> Iterator[Fill]:
        """What was filled of a request, by whom and when: compute that projects, and copies."""
        for span in self.of({request.id}):
            if span.op.kind in (COMPUTE, COPY):
                source = "compute" if span.op.kind == COMPUTE else "load"
                for part in span.op.parts:
                    if part.request == request.id and part.project:
                        first, last = request.column_at(part.start), request.column_at(part.stop - 1) + 1
                        yield Fill(span.op.layers, first, last, source, span.end)

    def summary(self, requests: Sequence[Request], costs: Costs | None = None) -> Summary:
        """The restoration of one request, or of several at a time. An op for several requests counts for each of them.

        costs: what an undisturbed op takes; without them there is no useful busy.
        """
        names = {request.id for request in requests}
        spans = self.of(names)
        fills = [(request, fill) for request in requests for fill in self.fills(request)]
        start = spans[0].start if spans else 0.0
        end = max((fill.ready for request, fill in fills if fill.first < len(request.stored)), default=start)
        seconds = end - start
        streams = dict.fromkeys([*STREAMS[:3], *(span.stream for span in spans)])
        inside = {stream: _union(_clip([s for s in spans if s.stream == stream], start, end)) for stream in streams}
        busy = {stream: _length(intervals) for stream, intervals in inside.items()}
        useful = {} if costs is None else _useful(spans, busy, costs, start, end)
        both = busy["compute"] + busy["fetch"] - _length(_union([*inside["compute"], *inside["fetch"]]))
        return Summary(
            start=start,
            end=end,
            busy={stream: _share(value, seconds) for stream, value in busy.items()},
            useful={stream: _share(value, seconds) for stream, value in useful.items()},
            overlap=_share(max(0.0, both), seconds),  # sums in another order may differ in their last digit
            bytes_loaded=sum(_bytes(span, names) for span in spans if span.op.kind == COPY),
            prefix={source: _amount(fills, source, whole=False) for source in ("compute", "load")},
            total={source: _amount(fills, source, whole=True) for source in ("compute", "load")},
        )

    def critical_path(self, request: str | None = None) -> float:
        """Seconds of the longest chain of ops that ends with the last compute op, of one request or of all.

        An op depends on the one before it on its stream, a copy on the fetches of its cells, compute on the copies of
        the cells that it may attend to. Where recorded ops overlap only the time past the other's end counts, so the
        chain is never longer than what was recorded; what a TTFT is longer than it is the executor's overhead.
        """
        ends: list[float] = []  # of the longest chain that ends with each span
        before: dict[str, int] = {}
        writers: dict[tuple[str, str], list[int]] = {}  # by kind and request
        spans = self.of()
        for i, span in enumerate(spans):
            needs = {before[span.stream]} if span.stream in before else set()
            source = {COMPUTE: COPY, COPY: FETCH}.get(span.op.kind)
            for part in span.op.parts if source else ():
                for j in writers.get((source or "", part.request), ()):
                    if _needs(span.op, part, spans[j].op):
                        needs.add(j)
            ends.append(max([span.seconds, *(ends[j] + span.end - max(span.start, spans[j].end) for j in needs)]))
            before[span.stream] = i
            for name in span.op.requests:
                writers.setdefault((span.op.kind, name), []).append(i)
        compute = [i for i, span in enumerate(spans) if span.op.kind == COMPUTE]
        final = [i for i in compute if request is None or request in spans[i].op.requests]
        return ends[max(final, key=lambda i: spans[i].end)] if final else 0.0


def describe(op: Op, requests: Mapping[str, Request] | None = None) -> str:
    """An op in a few words: "compute L0-29 chunks 0-3"; of a request that is not given, "fetch L4 tokens 0-2047"."""
    words = [op.kind, f"L{op.layers.start}" if len(op.layers) == 1 else f"L{op.layers.start}-{op.layers[-1]}"]
    by_request: dict[str, list[Part]] = {}
    for part in op.parts:
        by_request.setdefault(part.request, []).append(part)
    known = {} if requests is None or op.kind == SAVE else requests  # what is saved may go beyond the prompt
    what = {name: _ranges(parts, known.get(name)) for name, parts in by_request.items()}
    if len(what) == 1:
        return " ".join([*words, *what.values()])
    return " ".join([*words, "; ".join(f"{name}: {ranges}" for name, ranges in what.items())])


def _ranges(parts: Iterable[Part], request: Request | None, most: int = 3) -> str:
    cuts: list[tuple[int, int]] = []
    suffix = False
    for part in sorted(parts, key=lambda part: part.start):
        first, last = part.start, part.stop
        if request is not None:
            suffix |= part.stop > request.prefix
            first, last = request.column_at(first), min(request.column_at(last - 1) + 1, len(request.stored))
        if cuts and first <= cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], max(last, cuts[-1][1]))
        elif first < last:
            cuts.append((first, last))
    runs = [f"{first}" if last == first + 1 else f"{first}-{last - 1}" for first, last in cuts]
    if len(runs) > most:
        runs[most:] = [f"and {len(runs) - most} more"]
    unit = "token" if request is None else "chunk"
    plural = "s" if len(runs) > 1 or any(last > first + 1 for first, last in cuts) else ""
    named = [f"{unit}{plural} {', '.join(runs)}"] if runs else []
    return ", ".join([*named, *["suffix"] * suffix])


def _needs(op: Op, part: Part, writer: Op) -> bool:
    layers = op.layers if part.advance else op.layers[:-1]  # a cell that is only projected attends to nothing
    if writer.layers.start >= layers.stop or layers.start >= writer.layers.stop:
        return False
    low = 0 if op.kind == COMPUTE else part.start
    return any(p.request == part.request and low < p.stop and p.start < part.stop for p in writer.parts)


def _useful(spans: list[Span], busy: Mapping[str, float], costs: Costs, start: float, end: float) -> dict[str, float]:
    total = dict.fromkeys(busy, 0.0)
    counted: set[Op] = set()
    for span in spans:
        inside = min(span.end, end) - max(span.start, start)
        if inside > 0 and span.op not in counted:
            counted.add(span.op)
            total[span.stream] += min(inside, costs.seconds(span.op) * inside / span.seconds)
    return {stream: min(seconds, busy[stream]) for stream, seconds in total.items()}


def _amount(fills: Iterable[tuple[Request, Fill]], source: str, whole: bool) -> Amount:
    cells, pairs, layers = 0, 0, 1
    for request, fill in fills:
        last = fill.last if whole else min(fill.last, len(request.stored))
        if fill.source == source and fill.first < last:
            cells += (last - fill.first) * len(fill.layers)
            pairs += (request.boundaries[last] - request.boundaries[fill.first]) * len(fill.layers)
            layers = request.layers  # one model, one number
    return Amount(cells, pairs / layers)


def _clip(spans: Iterable[Span], start: float, end: float) -> list[tuple[float, float]]:
    return [(max(s.start, start), min(s.end, end)) for s in spans if s.start < end and s.end > start]


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _bytes(span: Span, requests: Collection[str]) -> int:
    return span.bytes * sum(part.tokens for part in span.op.parts if part.request in requests) // span.op.tokens


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
