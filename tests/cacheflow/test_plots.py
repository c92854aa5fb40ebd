from __future__ import annotations

import os
import warnings
from dataclasses import replace

import numpy as np
import pytest

from cacheflow import plots, policies
from cacheflow.costs.base import ModelShape
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from cacheflow.timeline import Timeline

matplotlib = pytest.importorskip("matplotlib")


def simulate(name, *requests):
    windows = requests[0].windows
    shape = ModelShape(len(windows), 4096, 32, 8, 128, 14336, 128256, windows)
    return Simulation(policies.find(name)(Roofline(shape, device("H100"), bandwidth=40 * GBPS)), requests)


CASES = {
    "plain": Request.of("a", prefix=2048, suffix=64, chunk=512, layers=6),
    "holes": Request.of("a", prefix=2000, suffix=700, chunk=512, layers=6, holes=[0, 2]),
    "window": Request.of("a", prefix=4096, suffix=64, chunk=512, layers=6, window=600),
    "one cell": Request.of("a", prefix=0, suffix=1, chunk=512, layers=1),
}


@pytest.fixture(autouse=True)
def strict():
    """No warning, and no change of matplotlib's global state."""
    before = dict(matplotlib.rcParams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", policies.available())
def test_pictures_of_every_policy_are_written(name, tmp_path):
    request = CASES["holes"]
    run = simulate(name, request)
    plots.lanes(run.timeline, tmp_path / "lanes.png", title=name, bound=0.01, ttft=run.ttft["a"])
    plots.plane(request, run.timeline, tmp_path / "plane.png", title=name)
    for picture in ("lanes.png", "plane.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["token", "layerwise-load"])
def test_every_cell_has_its_source(name, case):
    request = CASES[case]
    run = simulate(name, request)
    source, ready = plots.cells(request, run.timeline)
    count = {kind: sum(row.count(kind) for row in source) for kind in ("compute", "load", plots.HOLE, "not needed")}
    total = run.timeline.summary([request]).total
    assert count["compute"] + count[plots.HOLE] == total["compute"].cells
    assert count["load"] == total["load"].cells
    assert sum(count.values()) == request.columns * request.layers
    assert (count["not needed"] > 0) == (case == "window")
    assert count[plots.HOLE] == (2 * request.layers if case == "holes" else 0)
    assert all((when > 0) == (kind != "not needed") for kinds, row in zip(source, ready, strict=True)
               for kind, when in zip(kinds, row, strict=True))  # fmt: skip


def test_cells_of_different_sources_and_times_differ_in_colour():
    request = CASES["holes"]
    run = simulate("token", request)
    source, ready = plots.cells(request, run.timeline)
    pixels = plots._pixels(source, ready, 0.0, max(max(row) for row in ready))
    assert pixels.shape == (request.layers, request.columns, 4)
    colours = {}
    for kinds, times, row in zip(source, ready, pixels, strict=True):
        for kind, time, pixel in zip(kinds, times, row, strict=True):
            colours.setdefault(tuple(np.round(pixel, 6)), set()).add((kind, time))
    assert all(len(cells) == 1 for cells in colours.values())


def test_svg_names_streams_lines_and_chunks(tmp_path):
    matplotlib_text = {"svg.fonttype": "none"}
    request = CASES["plain"]
    run = simulate("load", request)
    with matplotlib.rc_context(matplotlib_text):
        path = tmp_path / "lanes.svg"
        plots.lanes(run.timeline, path, title="load", bound=0.005, ttft=run.ttft["a"], requests={"a": request})
    text = path.read_text()
    for word in ("compute", "fetch", "copy", "bound 5.0 ms", f"TTFT {run.ttft['a'] * 1e3:.1f} ms", "L0-5 chunk 0"):
        assert word in text


def test_a_batch_names_its_requests_and_their_times(tmp_path):
    batch = [Request.of(f"r{i}", prefix=1024 * (i + 1), suffix=64, chunk=512, layers=6) for i in range(3)]
    run = simulate("two-pointer", *batch)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plots.lanes(run.timeline, tmp_path / "lanes.svg", title="batch", ttft=run.ttft)
    text = (tmp_path / "lanes.svg").read_text()
    assert all(f"{request.id} {run.ttft[request.id] * 1e3:.1f} ms" in text for request in batch)
    for request in batch:
        plots.plane(request, run.timeline, tmp_path / f"{request.id}.png", title=request.id)
        assert os.path.getsize(tmp_path / f"{request.id}.png") > 0


def test_times_count_from_the_first_op_of_a_timeline_that_began_later(tmp_path):
    request = CASES["plain"]
    run = simulate("token", request)
    later = Timeline([replace(span, start=span.start + 7, end=span.end + 7) for span in run.timeline.spans])
    for name, spans in (("now", run.timeline), ("later", later)):
        plots.lanes(spans, tmp_path / f"lanes-{name}.png", title="", ttft=run.ttft["a"])
        plots.plane(request, spans, tmp_path / f"plane-{name}.png", title="")
    for picture in ("lanes", "plane"):
        image, same = (plots_image(tmp_path / f"{picture}-{name}.png") for name in ("now", "later"))
        assert np.abs(image - same).max() < 0.1


def plots_image(path):
    from matplotlib.image import imread

    return imread(path)


def test_an_empty_timeline_has_no_lanes_but_a_plane(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        plots.lanes(Timeline(), tmp_path / "lanes.png", title="nothing")
    plots.plane(CASES["plain"], Timeline(), tmp_path / "plane.png", title="nothing yet")
    source, _ = plots.cells(CASES["plain"], Timeline())
    assert {kind for row in source for kind in row} == {"empty"}
