from __future__ import annotations

import json
import threading
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cacheflow import perfetto, policies
from cacheflow.costs.base import ModelShape
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from cacheflow.timeline import Amount, Span, Timeline, describe

LAYERS = 4


def op(kind, layers, *parts, request="a", project=True, advance=True):
    return Op(kind, range(*layers), tuple(Part(request, start, stop, project, advance) for start, stop in parts))


def timeline(*spans):
    return Timeline([Span(op, stream, start, end, moved) for op, stream, start, end, moved in spans])


def costs(gbps=40, window=None):
    shape = ModelShape(LAYERS, 4096, 32, 8, 128, 14336, 128256, (window,) * LAYERS)
    return Roofline(shape, device("H100"), bandwidth=gbps * GBPS)


class FixedCosts:
    """Every op takes as long as is said here, undisturbed."""

    def __init__(self, seconds):
        self._seconds = seconds

    def seconds(self, op):
        return self._seconds[op.kind]


REQUEST = Request.of("a", prefix=16, suffix=4, chunk=8, layers=LAYERS)


class TestSummary:
    spans = (
        (op(COMPUTE, (0, 2), (0, 8)), "compute", 1.0, 3.0, 0),
        (op(FETCH, (0, 4), (8, 16)), "fetch", 2.0, 5.0, 800),
        (op(FETCH, (2, 4), (0, 8)), "fetch", 4.0, 8.0, 400),
        (op(COPY, (0, 4), (8, 16)), "copy", 5.0, 5.5, 800),
        (op(COPY, (2, 4), (0, 8)), "copy", 8.0, 9.0, 400),
        (op(COMPUTE, (0, 4), (16, 20)), "compute", 7.0, 11.0, 0),
    )

    def test_window_runs_from_the_first_op_to_the_last_prefix_cell(self):
        summary = timeline(*self.spans).summary([REQUEST])
        assert (summary.start, summary.end, summary.seconds) == (1.0, 9.0, 8.0)

    def test_busy_is_the_union_of_ops_inside_the_window(self):
        summary = timeline(*self.spans).summary([REQUEST])
        assert summary.busy == {"compute": (2 + 2) / 8, "fetch": 6 / 8, "copy": 1.5 / 8}

    def test_overlap_is_the_time_in_which_compute_and_fetch_both_run(self):
        assert timeline(*self.spans).summary([REQUEST]).overlap == (1 + 1) / 8

    def test_useful_busy_counts_undisturbed_costs_clipped_and_at_most_the_time_taken(self):
        undisturbed = FixedCosts({COMPUTE: 1.0, FETCH: 4.0, COPY: 9.0})
        useful = timeline(*self.spans).summary([REQUEST], undisturbed).useful
        assert useful["compute"] == pytest.approx((1 + 1 * 2 / 4) / 8)
        assert useful["fetch"] == pytest.approx(6 / 8)  # 3 of its 4, and 4, but the stream was inside ops for 6
        assert useful["copy"] == pytest.approx(1.5 / 8)

    def test_useful_busy_counts_an_op_once(self):
        fetch = op(FETCH, (0, 4), (0, 16))
        twice = timeline((fetch, "fetch", 0, 2, 1), (fetch, "fetch", 2, 4, 1), (fetch.of(COPY), "copy", 4, 5, 1))
        assert twice.summary([REQUEST], FixedCosts({FETCH: 2.0, COPY: 1.0})).useful["fetch"] == pytest.approx(2 / 5)

    def test_sources_add_up_to_the_prefix_and_bytes_are_those_that_arrived(self):
        summary = timeline(*self.spans).summary([REQUEST])
        assert summary.prefix == {"compute": Amount(2, 4.0), "load": Amount(6, 12.0)}
        assert summary.total == {"compute": Amount(6, 8.0), "load": Amount(6, 12.0)}
        assert summary.bytes_loaded == 1200

    def test_a_fused_op_counts_its_prefix_part_only_and_advancing_fills_nothing(self):
        other = Request.of("b", prefix=8, suffix=8, chunk=8, layers=LAYERS)
        fused = Op(COMPUTE, range(2), (Part("a", 0, 8), Part("a", 16, 20), Part("b", 0, 8, project=False)))
        summary = timeline((fused, "compute", 0.0, 1.0, 0)).summary([REQUEST, other])
        assert summary.prefix["compute"] == Amount(2, 4.0)
        assert summary.total["compute"] == Amount(4, 6.0)

    def test_one_request_of_a_batch_counts_its_own_ops_and_bytes(self):
        other = Request.of("b", prefix=8, suffix=8, chunk=8, layers=LAYERS)
        both = Op(COPY, range(4), (Part("a", 0, 16), Part("b", 0, 8)))
        later = op(COPY, (0, 4), (0, 8), request="a")
        spans = timeline((both, "copy", 0.0, 1.0, 300), (later, "copy", 3.0, 4.0, 50))
        assert spans.summary([other]).end == 1.0
        assert spans.summary([other]).bytes_loaded == 100
        assert spans.summary([REQUEST, other]).bytes_loaded == 350

    def test_nothing_to_restore_takes_no_time(self):
        fresh = Request.of("a", prefix=0, suffix=4, chunk=8, layers=LAYERS)
        for spans in ([], [(op(COMPUTE, (0, 4), (0, 4)), "compute", 1.0, 2.0, 0)]):
            summary = timeline(*spans).summary([fresh])
            assert (summary.seconds, summary.overlap, summary.busy["compute"]) == (0.0, 0.0, 0.0)


CASES = {
    "one": [Request.of("a", prefix=4096, suffix=64, chunk=512, layers=LAYERS)],
    "tail": [Request.of("a", prefix=1300, suffix=700, chunk=512, layers=LAYERS)],
    "holes": [Request.of("a", prefix=4096, suffix=64, chunk=512, layers=LAYERS, holes=[0, 3, 7])],
    "window": [Request.of("a", prefix=4096, suffix=64, chunk=512, layers=LAYERS, window=700)],
    "batch": [Request.of(f"r{i}", prefix=512 * (i + 1), suffix=64, chunk=512, layers=LAYERS) for i in range(4)],
    "no prefix": [Request.of("a", prefix=0, suffix=64, chunk=512, layers=LAYERS)],
}


@pytest.mark.parametrize("name", policies.available())
@pytest.mark.parametrize("case", CASES)
class TestSimulated:
    @pytest.fixture
    def run(self, name, case):
        return Simulation(policies.find(name)(costs(window=700 if case == "window" else None)), CASES[case])

    def test_summary_is_consistent(self, run, case):
        requests = CASES[case]
        summary = run.timeline.summary(requests, costs())
        assert summary.end <= max(run.ttft.values())
        for stream, busy in summary.busy.items():
            assert 0 <= summary.useful[stream] <= busy <= 1 + 1e-12
        assert summary.overlap <= min(summary.busy["compute"], summary.busy["fetch"]) + 1e-12
        restored = summary.prefix["compute"].tokens + summary.prefix["load"].tokens
        if case != "window":
            assert restored == pytest.approx(sum(request.prefix for request in requests))
        assert restored <= sum(request.prefix for request in requests)
        cell_bytes = costs().shape.cell_bytes
        assert summary.bytes_loaded == pytest.approx(summary.prefix["load"].tokens * LAYERS * cell_bytes)

    def test_critical_path_is_no_longer_than_the_ttft(self, run, case):
        for request in CASES[case]:
            assert 0 < run.timeline.critical_path(request.id) <= run.ttft[request.id] * (1 + 1e-9)
        assert run.timeline.critical_path() <= max(run.ttft.values()) * (1 + 1e-9)

    def test_trace_is_valid(self, run, case, tmp_path):
        path = tmp_path / "trace.json"
        perfetto.write(run.timeline, path, requests=CASES[case], marks=run.ttft)
        check_trace(json.loads(path.read_text()), len(run.timeline.spans))


class TestCriticalPath:
    def test_in_virtual_time_it_is_the_ttft_of_a_policy_that_never_waits_for_a_decision(self):
        for name in ("recompute", "load", "layerwise-load"):
            run = Simulation(policies.find(name)(costs()), CASES["one"])
            assert run.timeline.critical_path("a") == pytest.approx(run.ttft["a"])

    def test_gaps_between_ops_are_not_on_it(self):
        fetch = op(FETCH, (0, 4), (0, 16))
        gaps = timeline(
            (fetch, "fetch", 0.5, 2.5, 1),
            (fetch.of(COPY), "copy", 2.6, 3.6, 1),
            (op(COMPUTE, (0, 4), (16, 20)), "compute", 4.0, 5.0, 0),
        )
        assert gaps.critical_path() == pytest.approx(2 + 1 + 1)

    def test_compute_does_not_depend_on_copies_that_it_cannot_attend_to(self):
        later, above = op(COPY, (0, 4), (8, 16)), op(COPY, (2, 4), (0, 8))
        first = op(COMPUTE, (0, 2), (0, 8))
        assert timeline((later, "copy", 0, 3, 1), (first, "compute", 3, 4, 0)).critical_path() == 1
        assert timeline((above, "copy", 0, 3, 1), (first, "compute", 3, 4, 0)).critical_path() == 1

    def test_a_cell_that_is_only_projected_depends_on_no_copy_of_its_layer(self):
        copy, project = op(COPY, (2, 3), (0, 8)), op(COMPUTE, (2, 3), (8, 16), advance=False)
        assert timeline((copy, "copy", 0, 3, 1), (project, "compute", 3, 4, 0)).critical_path() == 1

    def test_concurrent_fetches_of_one_link_count_their_union(self):
        first, second = op(FETCH, (0, 4), (0, 8)), op(FETCH, (0, 4), (8, 16))
        spans = timeline(
            (first, "fetch", 0, 3, 1),
            (second, "fetch", 1, 4, 1),
            (second.of(COPY), "copy", 4, 5, 1),
            (op(COMPUTE, (0, 4), (16, 20)), "compute", 5, 6, 0),
        )
        assert spans.critical_path() == 6

    def test_without_compute_it_is_nothing(self):
        assert timeline((op(COPY, (0, 4), (0, 8)), "copy", 0, 3, 1)).critical_path() == 0


times = st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted)
recorded = st.lists(st.tuples(st.sampled_from([COMPUTE, FETCH, COPY]), times, st.integers(0, 1)), max_size=12)


@example(  # the sums differ in their last digit
    [
        (COMPUTE, [0.0, 0.5659891501270621], 0),
        (FETCH, [5.0, 6.0], 0),
        (FETCH, [1.0022482776118404, 4.5], 0),
        (COPY, [0.0, 6.0], 0),
    ]
)
@given(recorded)
def test_whatever_was_recorded_shares_stay_below_one_and_the_critical_path_below_the_whole(spans):
    parts = [(0, 8), (8, 16)]
    any_timeline = timeline(
        *((op(kind, (0, LAYERS), parts[part]), kind, start, end, 1) for kind, (start, end), part in spans)
    )
    summary = any_timeline.summary([REQUEST])
    assert all(0 <= share <= 1 + 1e-9 for share in (*summary.busy.values(), summary.overlap))
    whole = max((s.end for s in any_timeline.spans), default=0) - min((s.start for s in any_timeline.spans), default=0)
    assert any_timeline.critical_path() <= whole + 1e-9
    check_trace({"traceEvents": perfetto.events(any_timeline)}, len(spans))


def test_any_thread_may_add():
    spans = Timeline()
    span = Span(op(COPY, (0, 4), (0, 8)), "copy", 0, 1)
    threads = [threading.Thread(target=lambda: [spans.add(span) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        spans.critical_path()
        spans.summary([REQUEST])
    assert len(spans.spans) == 8 * 500


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (op(COMPUTE, (0, 4), (0, 16)), "compute L0-3 chunks 0-1"),
        (op(COMPUTE, (2, 3), (8, 16), (16, 20)), "compute L2 chunk 1, suffix"),
        (op(COMPUTE, (0, 4), (8, 20)), "compute L0-3 chunk 1, suffix"),
        (op(FETCH, (3, 4), (0, 8), request="c"), "fetch L3 tokens 0-7"),
        (Op(COPY, range(4), (Part("a", 0, 8), Part("c", 0, 1))), "copy L0-3 a: chunk 0; c: token 0"),
    ],
    ids=["band", "fused", "across the border", "unknown request", "batch"],
)
def test_ops_are_described_in_the_words_of_the_plane(described, expected):
    assert describe(described, {"a": REQUEST}) == expected


def test_many_scattered_columns_are_counted_and_not_all_named():
    wide = Request.of("a", prefix=80, suffix=1, chunk=8, layers=LAYERS)
    parts = [(8 * column, 8 * column + 8) for column in range(0, 10, 2)]
    assert describe(op(FETCH, (0, 1), *parts), {"a": wide}) == "fetch L0 chunks 0, 2, 4, and 2 more"


def check_trace(trace, ops):
    """Against the Trace Event Format: fields and their types, and on each track one event at a time."""
    by_track = {}
    names = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] in "MXi"
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        if event["ph"] == "i":
            assert event["s"] == "p" and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert set(event["args"]) == {"request", "layers", "tokens", "bytes"}
            by_track.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, by_track.values())) == ops
    assert set(by_track) <= set(names) and len(set(names.values())) == len(names)
    for events in by_track.values():
        ordered = sorted(events)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(ordered))


def test_trace_has_a_track_per_stream_and_another_for_what_overlaps():
    first, second = op(FETCH, (0, 4), (0, 8)), op(FETCH, (0, 4), (8, 16))
    spans = timeline(
        (first, "fetch", 0, 3, 10),
        (second, "fetch", 1, 4, 20),
        (op(COMPUTE, (0, 4), (0, 8)), "compute", 0.0, 1.5, 0),
    )
    events = perfetto.events(spans, requests=[REQUEST], marks={"first token": 4.5})
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["compute", "fetch", "fetch 2"]
    compute = next(event for event in events if event["name"] == "compute L0-3 chunk 0")
    assert (compute["ts"], compute["dur"]) == (0, 1.5e6)
    assert compute["args"] == {"request": "a", "layers": "0-3", "tokens": 8, "bytes": 0}
    mark = next(event for event in events if event["ph"] == "i")
    assert (mark["name"], mark["ts"]) == ("first token", 4.5e6)
