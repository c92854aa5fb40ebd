"""Timelines as Chrome traces (the Trace Event Format), which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cacheflow.request import Request
from cacheflow.timeline import STREAMS, Span, Timeline, describe

PROCESS = 1


def events(
    timeline: Timeline, *, requests: Iterable[Request] = (), marks: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """The trace's events: one track per stream, a complete event per op, an instant per mark.

    requests: name columns as chunks and suffix instead of token ranges. marks: seconds, by name ("first token").
    """
    by_id = {request.id: request for request in requests}
    out: list[dict[str, Any]] = [_about("process_name", 0, name="cacheflow")]
    for track, (name, spans) in enumerate(tracks(timeline).items(), start=1):
        out.append(_about("thread_name", track, name=name))
        out.append(_about("thread_sort_index", track, sort_index=track))
        out += [_complete(span, track, by_id) for span in spans]
    for name, seconds in (marks or {}).items():
        out.append({"name": name, "ph": "i", "s": "p", "ts": _us(seconds), "pid": PROCESS, "tid": 0})
    return out


def write(
    timeline: Timeline,
    path: str | Path,
    *,
    requests: Iterable[Request] = (),
    marks: Mapping[str, float] | None = None,
) -> None:
    """The events as a JSON file. Raises OSError when it cannot be written."""
    trace = {"traceEvents": events(timeline, requests=requests, marks=marks), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def tracks(timeline: Timeline) -> dict[str, list[Span]]:
    """Spans by stream; those that overlap others of their stream in "fetch 2", for a track holds one at a time."""
    lanes: dict[str, list[list[Span]]] = {}
    for span in timeline.of():
        stream = lanes.setdefault(span.stream, [])
        for lane in stream:
            if lane[-1].end <= span.start:
                lane.append(span)
                break
        else:
            stream.append([span])
    order = sorted(lanes, key=lambda stream: STREAMS.index(stream) if stream in STREAMS else len(STREAMS))
    return {stream if i == 0 else f"{stream} {i + 1}": lane for stream in order for i, lane in enumerate(lanes[stream])}


def _complete(span: Span, track: int, requests: Mapping[str, Request]) -> dict[str, Any]:
    start, end = _us(span.start), _us(span.end)
    layers = span.op.layers
    return {
        "name": describe(span.op, requests),
        "cat": span.op.kind,
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "pid": PROCESS,
        "tid": track,
        "args": {
            "request": ", ".join(span.op.requests),
            "layers": f"{layers.start}-{layers[-1]}",
            "tokens": span.op.tokens,
            "bytes": span.bytes,
        },
    }


def _about(what: str, track: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": track, "args": args}


def _us(seconds: float) -> float:
    """Microseconds to the nanosecond: rounded alike, neighbours on a track meet instead of overlapping."""
    return round(seconds * 1e6, 3)
