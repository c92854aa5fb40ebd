"""What a profile says of overlap, on exports with known times."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import overlap
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow import perfetto
from cacheflow.op import Op, Part
from cacheflow.request import Request
from cacheflow.timeline import Span, Timeline
from tests.profiling.export import Export

REQUEST = Request.of("r", prefix=2, suffix=1, chunk=1, layers=2)


def two_streams() -> Export:
    """Compute runs from 0 to 60; its KV is read from 5 to 35, and copied from 40 to 100."""
    export = Export()
    export.range("restore", 0, 120, "token")
    export.op("compute", 0, 3)
    export.op("fetch", 5, 35, by=2)
    export.op("copy", 36, 39)
    export.kernel(0, 60, launched=1)
    export.memcpy(40, 80, launched=37)
    export.kernel(80, 100, launched=38, name="pages_from_staging_kernel")
    return export


def test_two_streams(tmp_path):
    ops, gpu = overlap.analyse(two_streams().write(tmp_path / "x.sqlite"))
    assert (ops.policy, ops.source, ops.seconds) == ("token", "ops", 100e-9)
    assert ops.busy == pytest.approx({"compute": 0.6, "fetch": 0.3, "copy": 0.6, "store": 0})
    assert ops.overlap == pytest.approx(0.3)
    assert gpu.busy == pytest.approx({"compute": 0.6, "fetch": 0, "copy": 0.6, "store": 0})
    assert gpu.overlap == pytest.approx(0.2)


@pytest.mark.parametrize(
    "missing,busy,both",
    [
        ("CUPTI_ACTIVITY_KIND_MEMCPY", {"compute": 0.6, "fetch": 0.3, "copy": 0.2}, 0.3),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", {"compute": 0.6, "fetch": 0.3, "copy": 0.63}, 0.3),
        ("NVTX_EVENTS", {"compute": 0.6, "fetch": 0, "copy": 0.6}, 0),
        ("CUPTI_ACTIVITY_KIND_KERNEL", {"compute": 3 / 80, "fetch": 30 / 80, "copy": 40 / 80}, 0),
    ],
    ids=["no copies", "no launches", "no ranges", "no kernels"],
)
def test_a_missing_table(tmp_path, missing, busy, both):
    """Without launches what ran is counted as what it is, and beside it what the ranges say."""
    ops, _ = overlap.analyse(two_streams().write(tmp_path / "x.sqlite", without=(missing,)))
    assert ops.busy == pytest.approx(busy | {"store": 0})
    assert ops.overlap == pytest.approx(both)
    assert ops.policy == ("whole report" if missing == "NVTX_EVENTS" else "token")


def test_nothing_but_strings(tmp_path):
    path = Export().write(tmp_path / "x.sqlite")
    assert overlap.analyse(path) == []
    with pytest.raises(ValueError, match="holds no kernel, no copy and no op"):
        overlap.report([path])


def test_what_is_no_export_is_refused(tmp_path, capsys):
    (tmp_path / "x.sqlite").write_text("no database, but long enough to be taken for one by its size" * 20)
    assert overlap.main([str(tmp_path / "x.sqlite")]) == 2
    assert "is no SQLite export of Nsight Systems" in capsys.readouterr().err
    assert overlap.main([str(tmp_path / "y.sqlite")]) == 2
    assert "y.sqlite is not there" in capsys.readouterr().err


def busy(export: Export, path: Path) -> dict[str, float]:
    """Nanoseconds in ops, by kind."""
    ops, *_ = overlap.analyse(export.write(path / "x.sqlite"))
    return {kind: round(share * ops.seconds * 1e9) for kind, share in ops.busy.items() if share}


def test_an_op_is_that_of_the_launching_thread(tmp_path):
    export = Export()
    export.range("restore", 0, 100)
    export.op("compute", 0, 50, by=1)
    export.op("copy", 0, 50, by=2)
    export.kernel(60, 70, launched=10, by=1)
    export.kernel(70, 90, launched=10, by=2)
    export.kernel(0, 500, launched=11, by=1, process=8)  # of another process, with the same correlation id
    assert busy(export, tmp_path) == {"compute": 10, "copy": 20}


def test_nested_ranges(tmp_path):
    """The innermost op counts, whatever other ranges are inside; outside of ops a kernel is compute."""
    export = Export()
    export.range("restore", 0, 100, "load")
    export.op("compute", 0, 60)
    export.op("copy", 10, 30)
    export.range("attention", 12, 28, "kernel")
    export.op("copy", 62, 63)  # in the next one, which begins with it
    export.op("compute", 62, 66)
    export.kernel(100, 110, launched=5)
    export.kernel(120, 145, launched=15)
    export.kernel(150, 153, launched=40)
    export.kernel(160, 161, launched=61, name="staging_from_pages_kernel")
    export.kernel(170, 177, launched=62)
    export.kernel(180, 181, launched=70)
    found = busy(export, tmp_path)
    # Both kernels of the outer op, with what is between them; an op without kernels; and the last one.
    assert found == {"compute": 53 + 4 + 1, "copy": 25 + 7, "store": 1}


def test_a_range_that_another_thread_ends_owns_nothing(tmp_path):
    export = Export()
    export.range("restore", 0, 100)
    export.op("save", 0, 90, event=60)
    export.kernel(10, 30, launched=5)
    assert busy(export, tmp_path) == {"compute": 20, "store": 30}


def test_ranges_of_other_domains_are_not_ours(tmp_path):
    export = Export()
    export.domain("NCCL", 9)
    export.range("restore", 0, 10, domain=9)
    export.op("copy", 0, 10, domain=9)
    export.kernel(0, 30, launched=5)
    assert busy(export, tmp_path) == {"compute": 30}
    export.rows["NVTX_EVENTS"] = [row for row in export.rows["NVTX_EVENTS"] if row[2] != 75]  # recorded too late
    (tmp_path / "x.sqlite").unlink()
    assert busy(export, tmp_path) == {"copy": 30}


def test_restorations_by_policy(tmp_path, capsys):
    export = Export()
    for number, (policy, length) in enumerate((("load", 10), ("token", 20), ("token", 40))):
        begin = number * 1000
        export.range("restore", begin, begin + 100, policy, registered=False)
        export.op("compute", begin, begin + 2)
        export.op("fetch", begin, begin + 10, by=2)
        export.kernel(begin, begin + length, launched=begin + 1)
    export.kernel(500, 990, launched=500)  # between them
    path = str(export.write(tmp_path / "x.sqlite"))
    found = [one for one in overlap.analyse(path) if one.source == "ops"]
    assert [(one.policy, round(one.seconds * 1e9)) for one in found] == [("load", 10), ("token", 20), ("token", 40)]
    assert [one.overlap for one in found] == pytest.approx([1, 0.5, 0.25])
    assert overlap.main([path, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["load"] * 2 + ["token"] * 4
    assert rows[2]["busy"]["fetch"] == pytest.approx(0.5)
    assert overlap.main([path]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["token", "ops", "2", "0.00", "100%", "38%", "0%", "0%", "38%"] in lines


def timeline(spans: list[tuple[str, int, int]]) -> Timeline:
    """Ops that fill the prefix; times in nanoseconds."""
    part = (Part("r", 0, 1),)
    return Timeline([Span(Op(kind, range(1), part), kind, start / 1e9, end / 1e9) for kind, start, end in spans])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["compute", "fetch", "copy"]), st.integers(0, 99), st.integers(1, 60)), min_size=1
    )
)
def test_shares_are_those_of_the_timeline(drawn):
    spans = [(kind, start, start + length) for kind, start, length in drawn]
    export = Export()
    export.range("restore", 0, 10_000)
    for number, (kind, start, end) in enumerate(spans):
        if kind == "fetch":
            export.op(kind, start, end, by=100 + number)
        else:
            export.op(kind, 10 * number, 10 * number + 5)
            export.kernel(start, start + (end - start) // 2, launched=10 * number + 1)
            export.kernel(end - 1, end, launched=10 * number + 2)
    with tempfile.TemporaryDirectory() as folder:
        ops, _ = overlap.analyse(export.write(Path(folder) / "x.sqlite"))
    summary = timeline(spans).summary([REQUEST])
    assert ops.seconds == pytest.approx(summary.seconds, abs=1e-12)
    assert ops.overlap == pytest.approx(summary.overlap)
    assert {kind: ops.busy[kind] for kind in summary.busy} == pytest.approx(dict(summary.busy))


def test_a_trace_tells_when_the_prefix_was_back(tmp_path):
    """The suffix's op is in the trace, and in the profile, but not in the restoration."""
    recorded = timeline([("compute", 0, 4000), ("fetch", 1000, 3000), ("copy", 4000, 8000)])
    recorded.add(Span(Op("compute", range(2), (Part("r", 2, 3),)), "compute", 8e-6, 12e-6))
    path = tmp_path / "trace.json"
    perfetto.write(recorded, path, requests=[REQUEST])
    export = Export()
    export.range("restore", 0, 20_000, "token")
    export.op("compute", 0, 10)
    export.op("fetch", 1000, 3000, by=2)
    export.kernel(0, 4000, launched=1)
    export.op("copy", 3500, 3600)
    export.memcpy(4000, 8000, launched=3550)
    export.op("compute", 3700, 3800)
    export.kernel(8000, 12000, launched=3750)
    ops, _, known = overlap.report([export.write(tmp_path / "x.sqlite")], path)
    summary = recorded.summary([REQUEST])
    for one in (ops, known):
        assert one.seconds == pytest.approx(summary.seconds) == pytest.approx(8e-6)
        assert {kind: one.busy[kind] for kind in summary.busy} == pytest.approx(dict(summary.busy))
        assert one.overlap == pytest.approx(summary.overlap) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="is no trace of `cacheflow restore --trace`"):
        overlap.of_trace(tmp_path / "x.sqlite")
