"""Two pictures of a timeline: what ran where and when, and which cell of a plane came from where and when.

Colours are from Okabe and Ito's palette, which the colour-blind can tell apart. matplotlib is imported when a picture
is drawn, and its global state is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheflow.perfetto import tracks
from cacheflow.plane import Plane
from cacheflow.request import Request
from cacheflow.timeline import Span, Timeline, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPUTED, LOADED, HOLE = "compute", "load", "hole, recomputed"
_COLOURS: dict[str, str] = {"compute": "#0072B2", "fetch": "#E69F00", "copy": "#009E73"}
_OTHER = "#999999"
_RAMPS = {  # early to late
    COMPUTED: ("#CFE3F1", "#6FB0D8", "#0072B2", "#003A5C"),
    LOADED: ("#FCE9BF", "#F0BC4E", "#D98A00", "#7A4A00"),
    HOLE: ("#F3DCE8", "#DB9FC0", "#B45A8C", "#571F40"),
}
_NOT_NEEDED, _EMPTY = "#E4E4E4", "#FFFFFF"
# Colour, marker and line of a policy in every figure. What only computes is blue, what only loads orange, as ops are.
_POLICIES: dict[str, tuple[str, str, Any]] = {
    "recompute": ("#0072B2", "s", "-"),
    "load": ("#E69F00", "s", "-"),
    "layerwise-load": ("#8C6100", "v", (0, (4, 1.5))),
    "token": ("#56B4E9", "o", "-"),
    "layer": ("#009E73", "^", "-"),
    "two-pointer": ("#CC79A7", "D", (0, (4, 1.5))),
    "staircase": ("#6B6B6B", "P", "-"),
    "pipelined": ("#D55E00", "o", "-"),
}
EMPHASISED = "pipelined"


def lanes(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str,
    bound: float | None = None,
    ttft: float | Mapping[str, float] | None = None,
    requests: Mapping[str, Request] | None = None,
    origin: float | None = None,
) -> None:
    """Draw a lane per stream, its ops as bars; the lower bound and the times to first token as vertical lines.

    Where there are several requests, a strip below each bar says which one the op was for first.

    path: its suffix chooses the format (png, svg, pdf). bound, ttft: seconds; ttft of one request, or by request.
    requests: name columns as chunks and suffix instead of token ranges. origin: the timeline's second from which bound
    and ttft count; by default the first op's start.
    Raises ValueError for a timeline without ops.
    """
    rows = tracks(timeline)
    if not rows:
        raise ValueError("the timeline is empty; draw it after something has run")
    begin = min(spans[0].start for spans in rows.values()) if origin is None else origin
    figure = new_figure(13, 1.7 + 0.62 * len(rows))
    axes = figure.add_subplot()
    times = dict(ttft) if isinstance(ttft, Mapping) else {} if ttft is None else {"": ttft}
    last = max([span.end - begin for spans in rows.values() for span in spans] + [bound or 0.0, *times.values()])
    per_ms = figure.get_figwidth() * 0.88 * 72 / (last * 1.02e3)  # points
    ids = list(dict.fromkeys(name for spans in rows.values() for span in spans for name in span.op.requests))
    for row, spans in enumerate(rows.values()):
        _lane(axes, spans, row, begin, per_ms, ids, requests)
    marks = [axes.axvline(bound * 1e3, color="black", linestyle=":", label=f"bound {_ms(bound)}")] if bound else []
    lines = [axes.axvline(seconds * 1e3, color="black", linestyle="--", linewidth=1.2) for seconds in times.values()]
    if lines:
        lines[0].set_label(_times(times))
    axes.set_xlim(0, last * 1.02e3)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlabel("time (ms)")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    kinds = dict.fromkeys(span.op.kind for spans in rows.values() for span in spans)
    colours: dict[str, Any] = {kind: _COLOURS.get(kind, _OTHER) for kind in kinds}
    if 1 < len(ids) <= 8:
        colours |= dict(zip(ids, _shades(len(ids)), strict=True))
    handles = [*_patches(colours), *marks, *lines[:1]]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path)


def plane(request: Request, timeline: Timeline, path: str | Path, *, title: str, origin: float | None = None) -> None:
    """Draw the request's plane: a cell per column and layer, coloured by its source, darker the later it was ready.

    path: its suffix chooses the format (png, svg, pdf). Layer 0 is at the bottom, the suffix at the right.
    origin: the timeline's second from which times count; by default the first op's start.
    """
    from matplotlib.ticker import MaxNLocator

    source, ready = cells(request, timeline)
    begin = min((span.start for span in timeline.of()), default=0.0) if origin is None else origin
    seconds = max(max(row) for row in ready) - begin
    end = seconds if seconds > 0 else 1.0  # nothing has run
    figure = new_figure(min(16.0, 4.5 + 0.16 * request.columns), min(9.0, 2.2 + 0.12 * request.layers))
    axes = figure.add_subplot()
    axes.imshow(_pixels(source, ready, begin, end), origin="lower", aspect="auto", interpolation="nearest")
    _borders(axes, source)
    columns, prefix = request.columns, len(request.stored)
    if prefix < columns:
        axes.axvline(prefix - 0.5, color="black", linewidth=2.5)
        axes.axvline(prefix - 0.5, color="white", linewidth=1.2)
    if columns <= 40 and request.layers <= 40:
        axes.set_xticks([c - 0.5 for c in range(1, columns)], minor=True)
        axes.set_yticks([y - 0.5 for y in range(1, request.layers)], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.5)
        axes.tick_params(which="minor", length=0)
    ticks = list(range(0, prefix, max(1, -(-prefix // 16))))
    axes.set_xticks([*ticks, (prefix + columns - 1) / 2], [*map(str, ticks), "\nsuffix"])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_xlabel("chunk")
    axes.set_ylabel("layer")
    axes.set_title(title, loc="left")
    _keys(figure, axes, {name for row in source for name in row}, end)
    figure.savefig(path)


def cells(request: Request, timeline: Timeline) -> tuple[list[list[str]], list[list[float]]]:
    """Per layer and column where the cell came from ("compute", "load", "hole, recomputed", "not needed", "empty"), and
    the timeline's second at which it was ready (0 for the last two)."""
    asked = Plane(request)
    source = [
        ["empty" if asked.needed(column, layer) else "not needed" for column in range(request.columns)]
        for layer in range(request.layers)
    ]
    ready = [[0.0] * request.columns for _ in range(request.layers)]
    holes = {column for column, stored in enumerate(request.stored) if not stored}
    for fill in timeline.fills(request):
        for layer in fill.layers:
            for column in range(fill.first, fill.last):
                source[layer][column] = HOLE if column in holes and fill.source == COMPUTED else fill.source
                ready[layer][column] = fill.ready
    return source, ready


def policy_colour(name: str) -> str:
    """The same in every figure; grey for a policy that is not of this package."""
    return _POLICIES.get(name, (_OTHER, "x", ":"))[0]


def policy_line(name: str) -> dict[str, Any]:
    """How a policy's line is drawn: keywords of `Axes.plot`. Ours is the heaviest and lies on top."""
    colour, marker, line = _POLICIES.get(name, (_OTHER, "x", ":"))
    ours = name == EMPHASISED
    return {
        "label": name,
        "color": colour,
        "marker": marker,
        "linestyle": line,
        "linewidth": 2.8 if ours else 1.5,
        "markersize": 5.5 if ours else 4.0,
        "zorder": 3.0 if ours else 2.0,
    }


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; it needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def _lane(
    axes: Axes,
    spans: list[Span],
    row: int,
    begin: float,
    per_ms: float,
    ids: list[str],
    requests: Mapping[str, Request] | None,
) -> None:
    bars = [((span.start - begin) * 1e3, span.seconds * 1e3) for span in spans]
    colours = [_COLOURS.get(span.op.kind, _OTHER) for span in spans]
    wide = sorted(width for _, width in bars)[len(bars) // 2] * per_ms > 6
    edges: Any = "white" if wide else colours  # between thin bars, white would hide the colour
    axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=colours, edgecolors=edges, linewidths=0.6 if wide else 0.3)
    if len(ids) > 1:
        shades = dict(zip(ids, _shades(len(ids)), strict=True))
        of = [shades[span.op.requests[0]] for span in spans]
        axes.broken_barh(bars, (row + 0.26, 0.12), facecolors=of, edgecolors="none")
    for span, (start, width) in zip(spans, bars, strict=True):
        text = describe(span.op, requests)
        words = text.split(" ")
        whose = span.op.requests[0] if len(ids) > 1 and len(span.op.requests) == 1 else ""
        below = f"{whose} {words[1]}".strip()
        for shown in (f"{whose} {text}".strip(), f"{below}\n{' '.join(words[2:])}", below, words[1]):
            if max(map(len, shown.split("\n"))) * 4.2 + 4 <= width * per_ms:  # points, of the font below
                ink = "white" if span.op.kind == "compute" else "black"
                axes.text(start + width / 2, row, shown, ha="center", va="center", fontsize=7, color=ink)
                break


def _shades(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](i / max(1, count - 1)) for i in range(count)]


def _patches(colours: Mapping[str, Any]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, edgecolor="none", label=name) for name, colour in colours.items()]


def _times(ttft: Mapping[str, float], most: int = 4) -> str:
    order = sorted(ttft, key=lambda name: ttft[name])
    shown = ", ".join(f"{name} {_ms(ttft[name])}".strip() for name in order[:most])
    return f"TTFT {shown}" + (f", last {_ms(ttft[order[-1]])}" if len(order) > most else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{0 if seconds >= 1 else 1}f} ms"


def _ramp(name: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, _RAMPS[name])


def _pixels(source: list[list[str]], ready: list[list[float]], begin: float, end: float) -> Any:
    import numpy as np
    from matplotlib.colors import to_rgba

    names, times = np.array(source), (np.array(ready) - begin) / end
    pixels = np.zeros((*names.shape, 4))
    for name in _RAMPS:
        pixels[names == name] = _ramp(name)(times[names == name])
    pixels[names == "not needed"] = to_rgba(_NOT_NEEDED)
    pixels[names == "empty"] = to_rgba(_EMPTY)
    return pixels


def _borders(axes: Axes, source: list[list[str]]) -> None:
    """The staircase: a line wherever two neighbours come from different sources."""
    from matplotlib.collections import LineCollection

    lines = []
    for y, row in enumerate(source):
        for x, name in enumerate(row):
            if x + 1 < len(row) and row[x + 1] != name:
                lines.append([(x + 0.5, y - 0.5), (x + 0.5, y + 0.5)])
            if y + 1 < len(source) and source[y + 1][x] != name:
                lines.append([(x - 0.5, y + 0.5), (x + 0.5, y + 0.5)])
    axes.add_collection(LineCollection(lines, colors="black", linewidths=0.9, capstyle="projecting"))


def _keys(figure: Figure, axes: Axes, present: set[str], end: float) -> None:
    """A legend of all sources, and a colour bar for each that has times."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    timed = [name for name in _RAMPS if name in present]
    for i, name in enumerate(timed):  # the first comes to stand outermost and carries the scale of all
        bar = figure.colorbar(ScalarMappable(Normalize(0, end * 1e3), _ramp(name)), ax=axes, pad=0.01, aspect=30)
        bar.set_label("" if i else "ready after (ms)")
        if i:
            bar.set_ticks([])
    plain = {"not needed": _NOT_NEEDED, "empty": _EMPTY}
    handles = _patches({name: _RAMPS[name][1] for name in timed} | {n: c for n, c in plain.items() if n in present})
    for handle in handles:
        handle.set_edgecolor("black")
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
