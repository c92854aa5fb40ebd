"""Draw what the simulator says, with the lower bound and everything that is published beside it.

    python scripts/figures.py
    python scripts/figures.py --table

Writes figures and a page that shows them all, out/figures/index.html; --table prints the published ratios beside ours
instead. Everything is simulated, so no GPU is needed; one core takes about a minute.
"""

from __future__ import annotations

import argparse
import html
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from cacheflow import bounds, plots, policies, published
from cacheflow.commands import _common as common
from cacheflow.costs.roofline import DEVICES
from cacheflow.published import CHUNK, SINGLE, Comparison, K, Published, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKENS = tuple(CHUNK << i for i in range(9))  # 512 to 128K
LINKS = (1, 2, 5, 10, 20, 40, 80, 160, 400)  # Gbps
BATCHES, SEEDS = (1, 2, 4, 8, 16, 32), 2
EIGHTS = 5  # batches of 8, of which the gain is told
CROSSING = tuple(round(K * 2 ** (i / 2) / CHUNK) * CHUNK for i in range(15))  # tokens: 1K to 128K
WORST_SHOWN = 2.5  # times the bound; lines that leave the picture are elsewhere too slow to matter
PUBLISHED: dict[str, Any] = {"color": "black", "marker": "D", "markerfacecolor": "white", "markersize": 7, "zorder": 5}


# Numbers


@dataclass(frozen=True)
class Sweep:
    """Seconds to the first token by policy, and the lower bound, at each of `at`."""

    at: tuple[Any, ...]
    ttft: dict[str, list[float]]
    bound: list[float]

    def over_bound(self, policy: str) -> list[float]:
        return [seconds / bound for seconds, bound in zip(self.ttft[policy], self.bound, strict=True)]


def sweep(places: Mapping[Any, tuple[Setting, int]]) -> Sweep:
    """One request at a time: where, and its prefix in tokens."""
    at = places.values()
    ttft = {name: [where.ttft(name, n)[0] for where, n in at] for name in policies.available()}
    return Sweep(tuple(places), ttft, [bounds.lower(where.requests([n]), where.costs) for where, n in at])


def batches(where: Setting, sizes: Sequence[int], seeds: int) -> tuple[Sweep, Sweep]:
    """Of batches with log-normal prefixes, the mean TTFT and the last, means over batches; and their bounds.

    Every size gets the same prefixes: as many of a seed's as the largest batch takes, cut into batches.
    """
    most = max(sizes)
    seeded = [published.lengths(most, seed) for seed in range(seeds)]
    drawn = [[all_of[i : i + size] for all_of in seeded for i in range(0, most, size)] for size in sizes]
    mean: dict[str, list[float]] = {}
    last: dict[str, list[float]] = {}
    for name in policies.available():
        times = [[where.ttft(name, *prefixes) for prefixes in same] for same in drawn]
        mean[name] = [fmean(map(fmean, same)) for same in times]
        last[name] = [fmean(map(max, same)) for same in times]
    batch = [[where.requests(prefixes) for prefixes in same] for same in drawn]
    mean_bound = [fmean(bounds.lower_mean(requests, where.costs) for requests in same) for same in batch]
    last_bound = [fmean(bounds.lower(requests, where.costs) for requests in same) for same in batch]
    return Sweep(tuple(sizes), mean, mean_bound), Sweep(tuple(sizes), last, last_bound)


@dataclass(frozen=True)
class Step:
    """What one more idea brings. seconds, last: mean and last TTFT. policy: that it is shown as. alone: requests are
    restored by themselves, one after another."""

    what: str
    seconds: float
    last: float
    policy: str
    alone: bool = False


def gains(where: Setting, drawn: Sequence[Sequence[int]]) -> tuple[list[Step], float]:
    """From one resource to everything, means over batches of such prefixes; and the lower bound of the mean TTFT."""

    def step(what: str, policy: str, times: Sequence[Sequence[float]], alone: bool = False) -> Step:
        return Step(what, fmean(map(fmean, times)), fmean(map(max, times)), policy, alone)

    def of(what: str, policy: str) -> Step:
        return step(what, policy, [where.ttft(policy, *prefixes) for prefixes in drawn])

    single = min((of(f"one resource ({name})", name) for name in SINGLE), key=lambda step: step.seconds)
    axes = [of(f"{name} axis", name) for name in ("layer", "token")]
    steps = [single, *axes, of("better axis of each", "two-pointer"), of("staircase", "staircase")]
    if max(map(len, drawn)) == 1:
        steps.append(of("suffix folded in", "pipelined"))
    else:
        each = [[where.ttft("pipelined", prefix)[0] for prefix in prefixes] for prefixes in drawn]
        came, short = ([list(accumulate(order(times))) for times in each] for order in (list, sorted))
        steps.append(step("suffix folded in,\none by one as they came", "pipelined", came, alone=True))
        steps.append(step("the shortest first", "pipelined", short, alone=True))
        steps.append(of("planned together", "pipelined"))
    return steps, fmean(bounds.lower_mean(where.requests(prefixes), where.costs) for prefixes in drawn)


def crossing(gbps: float, tokens: Sequence[int], *, by_chunk: bool = False) -> list[float]:
    """TTFT on the token axis over that on the layer axis, at each length."""
    return [published.axes_ratio(Setting(gbps=gbps), n, by_chunk=by_chunk) for n in tokens]


# Figures


@dataclass(frozen=True)
class Picture:
    """A figure that was written: its file's name, its title, and what it shows."""

    file: str
    title: str
    caption: str


def by_length(out: Path) -> Picture:
    sweeps = {f"{gbps} Gbps": sweep({n: (Setting(gbps=gbps), n) for n in TOKENS}) for gbps in (10, 40)}
    _curves(out / "length.png", sweeps, "cached prefix (tokens)", _tokens_axis)
    return Picture(
        "length.png",
        "Length of the prefix",
        "TTFT of one request, and the same over the lower bound, which no schedule can beat. Llama-3.1-8B on an H100, "
        f"suffix 64 tokens. On the right, lines are cut at {WORST_SHOWN:g} times the bound.",
    )


def by_bandwidth(out: Path) -> Picture:
    sweeps = {f"suffix {n}": sweep({g: (Setting(gbps=g, suffix=n), 16 * K) for g in LINKS}) for n in (64, 1024)}
    _curves(out / "bandwidth.png", sweeps, "link (Gbps)", _links_axis)
    return Picture(
        "bandwidth.png",
        "Speed of the link",
        "TTFT of one request of 16K tokens, Llama-3.1-8B on an H100, with a short and a long suffix. Where the link "
        "is fast, much of what is left is the suffix, and it counts whether that runs beside the loads. At 400 Gbps "
        "copies from pinned memory, of which the bound knows only one, are slower than the link.",
    )


def by_device(out: Path) -> Picture:
    sweeps = {g: sweep({name: (Setting(device=name, gbps=g), 16 * K) for name in DEVICES}) for g in (10, 40)}
    figure = plots.new_figure(11, 6.6)
    for axes, (gbps, found) in zip(figure.subplots(2, 1, sharex=True), sweeps.items(), strict=True):
        _groups(axes, found.at, {name: [s * 1e3 for s in times] for name, times in found.ttft.items()}, 0.84)
        top = 1.25e3 * max(max(times) for name, times in found.ttft.items() if name != "recompute")
        for bar in (bar for bar in axes.patches if bar.get_height() > top):
            x, value = bar.get_x() + bar.get_width() / 2, f"{bar.get_height():,.0f}"
            axes.text(x, top * 0.97, value, rotation=90, ha="center", va="top", color="white", fontsize=8)
        for x, bound in enumerate(found.bound):
            axes.plot([x - 0.44, x + 0.44], [bound * 1e3] * 2, ":", color="black", linewidth=1.6)
        axes.set_ylim(0, top)
        axes.set_title(f"{gbps} Gbps", loc="left", fontsize=10)
        axes.set_ylabel("TTFT (ms)")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        _plain(axes)
        axes.grid(axis="x", visible=False)
    _legend(figure, [*figure.axes[0].get_legend_handles_labels()[0], _bound_key()])
    figure.savefig(out / "gpu.png")
    return Picture(
        "gpu.png",
        "GPU",
        "TTFT of one request of 16K tokens, Llama-3.1-8B, suffix 64 tokens; bars with a number are cut. Rates of "
        "A100 and H100 are fitted to published chunk times; those of the others are guesses from their data sheets. "
        "The H200 differs from the H100 in memory bandwidth alone, which a prefill hardly uses.",
    )


def by_batch(out: Path) -> Picture:
    mean, last = batches(Setting(), BATCHES, SEEDS)
    _curves(out / "batch.png", {"mean TTFT": mean, "last TTFT": last}, "requests at once", _batch_axis)
    return Picture(
        "batch.png",
        "Size of the batch",
        "Mean TTFT of a batch, and that of its last request, with their bounds. Llama-3.1-8B on an H100, 10 Gbps, "
        f"suffix 64; {max(BATCHES) * SEEDS} prefixes, log-normal with a median of 12K tokens, cut into batches of each "
        "size. two-pointer advances all requests together, as published: the mean comes close to the last.",
    )


def axes_meet(out: Path) -> Picture:
    figure = plots.new_figure(10, 4.6)
    axes = figure.subplots()
    from matplotlib import colormaps

    shown = (5, 10, 20, 40, 80)
    for i, gbps in enumerate(shown):
        colour = colormaps["viridis"](0.9 * i / (len(shown) - 1))
        axes.plot(CROSSING, crossing(gbps, CROSSING), color=colour, linewidth=1.8, label=f"{gbps} Gbps")
    chunked = crossing(10, CROSSING, by_chunk=True)
    axes.plot(CROSSING, chunked, "--", color="#6B6B6B", linewidth=1.5, label="10 Gbps, chunk by chunk, uncut")
    axes.axhline(1, color="black", linewidth=0.8)
    [tokens] = published.CROSSOVER.values
    axes.plot([tokens], [1], linestyle="none", label=published.CROSSOVER.label, **PUBLISHED)
    axes.annotate(
        "published crossover, about 36K",
        (tokens, 1),
        xytext=(0, 14),
        textcoords="offset points",
        ha="center",
        fontsize=9,
    )
    axes.text(CROSSING[-1], 1.2, "layer axis sooner", fontsize=10, ha="right")
    axes.text(CROSSING[0], 0.85, "token axis sooner", fontsize=10)
    _tokens_axis(axes, CROSSING)
    axes.set_xlabel("cached prefix (tokens)")
    axes.set_ylabel("TTFT, token over layer axis")
    axes.set_ylim(0.78, 1.4)
    _plain(axes)
    _legend(figure, axes.get_legend_handles_labels()[0])
    figure.savefig(out / "crossover.png")
    return Picture(
        "crossover.png",
        "Where the axes cross",
        "Below 1 the token axis is sooner: late chunks cost more to compute, and it loads those. Llama-3.1-8B on an "
        "H100, suffix 64. Here the crossover is far below the published one: the token axis computes several chunks "
        "in a pass, and where the pointers meet the last unit is cut. Dashed: passes of one chunk, none cut on the "
        "token axis, which leaves up to a chunk's time. Neither knows what an engine spends on each chunk.",
    )


def where_from(out: Path) -> Picture:
    one = Setting(gbps=40)
    panels = {
        "16K tokens, suffix 64, 40 Gbps": (one, [[16 * K]]),
        "16K tokens, suffix 1024, 40 Gbps": (replace(one, suffix=1024), [[16 * K]]),
        "batch of 8, suffix 64, 40 Gbps, mean": (one, [published.lengths(8, seed) for seed in range(EIGHTS)]),
    }
    figure = plots.new_figure(11, 8.4)
    found = [gains(where, drawn) for where, drawn in panels.values()]
    grid = figure.subplots(3, 1, height_ratios=[len(steps) for steps, _ in found])
    for axes, title, (steps, bound) in zip(grid, panels, found, strict=True):
        _bars(axes, steps, bound)
        axes.set_title(title, loc="left", fontsize=10)
    figure.axes[-1].set_xlabel("TTFT (ms)")
    _legend(figure, [_bound_key()])
    figure.savefig(out / "gain.png")
    return Picture(
        "gain.png",
        "Where the gain comes from",
        "Each bar adds one idea to the one above; in brackets, how many times sooner it is than the first. "
        f"Llama-3.1-8B on an H100. Of the batch (log-normal prefixes, median 12K tokens, mean over {SEEDS} seeds) "
        "bars are the mean TTFT, and the last request's is written beside; pale bars are requests restored by "
        "themselves, one after another. The better axis of each comes with the published way to serve a batch, all "
        "requests together, which costs the mean more than the axis brings. Planning together weighs the last "
        "request too.",
    )


def utilisation(out: Path) -> Picture:
    names = list(policies.available())
    figure = plots.new_figure(10, 4.8)
    axes = figure.subplots()
    for shift, resource, colour in ((-0.19, 0, "#0072B2"), (0.19, 1, "#E69F00")):
        shares = [published.busy(name)[resource] for name in names]
        places = [y + shift for y in range(len(names))]
        axes.barh(places, shares, 0.36, color=colour, label=("compute", "link")[resource])
    rows = {
        "recompute": published.V1_BUSY_RECOMPUTE,
        "load": published.V1_BUSY_LOAD,
        "two-pointer": published.V1_BUSY,
        "staircase": published.V2_BUSY,
    }
    for name, figures in rows.items():
        y = names.index(name)
        axes.plot(figures.values, [y - 0.19, y + 0.19], linestyle="none", clip_on=False, **PUBLISHED)
        version = "v1" if figures.source == published.V1 else "v2"
        axes.text(
            107, y, f"published, {version}: {figures.values[0]:g} / {figures.values[1]:g}", va="center", fontsize=9
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 104)
    axes.set_xlabel("busy while restoring (%)")
    _plain(axes)
    axes.grid(axis="y", visible=False)
    _legend(figure, [*axes.get_legend_handles_labels()[0], _published_key("published")])
    figure.savefig(out / "busy.png")
    return Picture(
        "busy.png",
        "How busy compute and link are",
        "Share of the restoration that each is inside ops, mean over A100-40G, H100, L40S x 10, 40, 80 Gbps x 6K, "
        "16K, 30K tokens. Virtual time has no gaps between ops and no wrong estimates; the published figures are "
        "measured, at settings that are not known.",
    )


def paper(out: Path) -> Picture:
    figure = plots.new_figure(11, 8.2)
    (first, second), (third, fourth) = figure.subplots(2, 2)
    tokens = tuple(n * K for n in (6, 8, 12, 16, 20, 24, 30))
    for device, line in (("A100-40G", ":"), ("H100", "-")):
        for name in ("two-pointer", "pipelined"):
            over = [Setting(device=device).over(name, ["recompute"], n) for n in tokens]
            style = {"color": plots.policy_colour(name), "linestyle": line, "linewidth": 1.8}
            first.plot([n / K for n in tokens], over, label=f"{name}, {device}", **style)
    first.plot((6, 30), published.V1_LENGTH.values, linestyle="none", label=published.V1_LENGTH.label, **PUBLISHED)
    first.set_xlabel("cached prefix (K tokens)")
    first.set_title("over recompute-only, 10 Gbps", loc="left", fontsize=10)
    first.legend(fontsize=8, frameon=False)

    names = ("two-pointer", "pipelined")
    by_link = {name: [Setting(gbps=g).over(name, SINGLE, 16 * K) for g in (40, 80)] for name in names}
    _groups(second, ("40 Gbps", "80 Gbps"), by_link)
    second.plot((0, 1), published.V1_GBPS.values, linestyle="none", label=published.V1_GBPS.label, **PUBLISHED)
    second.set_title("H100, 16K tokens, over the better of recompute and load", loc="left", fontsize=10)
    second.set_ylim(top=2.3)
    second.legend(fontsize=8, frameon=False, loc="upper right")

    for name in names:
        for of, line, what in ((max, "-", "last"), (fmean, ":", "mean")):
            style = {"color": plots.policy_colour(name), "linestyle": line, "marker": "o", "markersize": 4}
            third.plot(range(3), published.batch_gains(name, of), label=f"{name}, {what}", **style)
    low, high = published.V1_BATCH.values
    band = {"facecolor": "#EEEEEE", "edgecolor": "black", "linewidth": 0.8, "zorder": 0}
    third.axhspan(low, high, label=published.V1_BATCH.label, **band)
    third.set_xticks(range(3), ("batch of 2", "4", "8"))
    third.set_title("H100, 10 Gbps, over the better of recompute and load", loc="left", fontsize=10)
    third.legend(fontsize=8, frameon=False)

    for shift, name in ((-0.15, "staircase"), (0.15, "pipelined")):
        pairs = published.stream_gains(published.streams(), name, published.RIVALS)
        style = {"color": plots.policy_colour(name), "marker": "o", "markersize": 5}
        _ranges(fourth, [i + shift for i in range(3)], pairs, name, style)
    measured = [figures.values for figures in (published.V2_MEAN, published.V2_P95, published.V2_P99)]
    _ranges(fourth, range(3), measured, published.V2_MEAN.label, PUBLISHED)
    fourth.axhline(1, color="black", linewidth=0.8)
    fourth.set_xticks(range(3), ("mean", "p95", "p99"))
    fourth.set_title("streams, over the best rival", loc="left", fontsize=10)
    fourth.set_xlim(-0.5, 2.5)
    fourth.legend(fontsize=8, frameon=False, loc="lower left")
    for axes in figure.axes:
        axes.set_ylabel("times sooner")
        axes.set_ylim(bottom=0)
        _plain(axes)
    figure.savefig(out / "cacheflow.png")
    return Picture(
        "cacheflow.png",
        "The paper's figures beside ours",
        "Published ratios of CacheFlow's first and second version, as far as their settings are known, and what we "
        "simulate with Llama-3.1-8B. What v1's gains by bandwidth and batch are over is not known; batches here have "
        "log-normal prefixes. Streams: 120 requests, all stored, Poisson arrivals at loads 0.5 and 0.7 of what the "
        "bound allows; lines reach from the least to the most. The table below has every setting.",
    )


def cake(out: Path) -> Picture:
    figure = plots.new_figure(11, 4.4)
    first, second, third = figure.subplots(1, 3, width_ratios=(1.3, 0.8, 1.3))
    curves = ((published.CAKE_A100, "A100-40G", "#0072B2", "-"), (published.CAKE_H100, "H100", "#0072B2", "--"))
    for figures, device, colour, line in curves:
        where = published.cake_setting(device)
        chunks = [published.chunk_seconds(where, i) * 1e3 for i in range(64)]
        first.plot(range(64), chunks, line, color=colour, label=f"compute, {device}")
        first.plot((0, 63), [s * 1e3 for s in figures.values], linestyle="none", clip_on=False, **PUBLISHED)
    [load] = published.CAKE_LOAD.values
    where = published.cake_setting("A100-40G")
    ours = where.costs.load_seconds(CHUNK * where.shape.layers)
    first.plot((0, 63), [ours * 1e3] * 2, color="#E69F00", label="load, 32 Gbps")
    first.plot((0, 63), [load * 1e3] * 2, linestyle="none", clip_on=False, **PUBLISHED)
    first.set_xlabel("chunk")
    first.set_ylabel("ms")
    first.set_title("Fig. 4, LongAlpaca-7B, 512 tokens", loc="left", fontsize=10)
    first.legend(fontsize=8, frameon=False)

    where = replace(where, suffix=1)
    by_rival = {p: [where.over(p, [rival], 16 * K) for rival in SINGLE[::-1]] for p in ("token", "pipelined")}
    _groups(second, ("over\nload-only", "over\ncompute-only"), by_rival)
    second.plot((0, 1), published.CAKE_TABLE_4.values, linestyle="none", **PUBLISHED)
    second.set_ylabel("times sooner")
    second.set_title("Table 4, A100, 16K tokens", loc="left", fontsize=10)
    second.set_ylim(top=3.1)
    second.legend(fontsize=8, frameon=False, loc="upper right")

    mi300x, names = Setting(device="MI300X", gbps=32, suffix=1), ("recompute", "load", "token")
    for i, (figures, n) in enumerate(((published.MI300X_16K, 16 * K), (published.MI300X_32K, 32 * K))):
        for j, (name, seconds) in enumerate(zip(names, figures.values, strict=True)):
            x = 4 * i + j
            third.bar(x, mi300x.ttft(name, n)[0], 0.8, color=plots.policy_colour(name), label=None if i else name)
            third.plot([x], [seconds], linestyle="none", **PUBLISHED)
    third.set_xticks((1, 5), ("16K tokens", "32K tokens"))
    third.set_ylabel("TTFT (s)")
    third.set_title("MI300X, Llama-3.1-8B, 32 Gbps", loc="left", fontsize=10)
    third.legend(fontsize=8, frameon=False, loc="upper left")
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        _plain(axes)
    _legend(figure, [_published_key("published: Cake (left, middle), an independent run of its scheme (right)")])
    figure.savefig(out / "cake.png")
    return Picture(
        "cake.png",
        "Cake's figures beside ours",
        "Left: chunk times that Cake publishes, at the ends of its digitised Fig. 4, and ours; the two rates of a "
        "device were fitted to them. Middle: its Table 4. Right: an independent run of its scheme; published times "
        "hold 55 ms (16K) and 90 ms (32K) besides restoration, and our MI300X's rates are guesses.",
    )


FIGURES = (by_length, by_bandwidth, by_device, by_batch, axes_meet, where_from, utilisation, paper, cake)


def _curves(path: Path, sweeps: dict[str, Sweep], label: str, ticks: Callable[[Axes, Sequence[Any]], None]) -> None:
    """A row for each sweep: times on the left, over the bound on the right."""
    figure = plots.new_figure(11, 1.2 + 3.4 * len(sweeps))
    grid = figure.subplots(len(sweeps), 2, squeeze=False, sharex=True)
    for (left, right), (title, found) in zip(grid, sweeps.items(), strict=True):
        for name, times in found.ttft.items():
            left.plot(found.at, [seconds * 1e3 for seconds in times], **plots.policy_line(name))
            right.plot(found.at, found.over_bound(name), **plots.policy_line(name))
        left.plot(found.at, [s * 1e3 for s in found.bound], ":", color="black", linewidth=1.8, label="lower bound")
        right.axhline(1, color="black", linestyle=":", linewidth=1.8)
        left.set_yscale("log")
        left.set_ylabel("TTFT (ms)")
        left.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        right.set_ylim(0.97, WORST_SHOWN)
        right.set_ylabel("over the lower bound")
        for axes in (left, right):
            axes.set_title(title, loc="left", fontsize=10)
            ticks(axes, found.at)
            _plain(axes)
    for axes in grid[-1]:
        axes.set_xlabel(label)
    _legend(figure, grid[0][0].get_legend_handles_labels()[0])
    figure.savefig(path)


def _bars(axes: Axes, steps: Sequence[Step], bound: float) -> None:
    batch = any(step.alone for step in steps)
    for y, step in enumerate(steps):
        colour = plots.policy_colour(step.policy)
        axes.barh(y, step.seconds * 1e3, 0.72, color=colour, alpha=0.45 if step.alone else 1.0)
        text = f"{step.seconds * 1e3:,.0f} ms" + (f" ({steps[0].seconds / step.seconds:.2f}x)" if y else "")
        text += f"; last {step.last * 1e3:,.0f} ms" if batch else ""
        end = (step.seconds * 1e3, y)
        axes.annotate(text, end, xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.axvline(bound * 1e3, color="black", linestyle=":", linewidth=1.8)
    axes.set_yticks(range(len(steps)), [step.what for step in steps], fontsize=9)
    axes.set_xlim(0, max(step.seconds for step in steps) * (1.32e3 if batch else 1.14e3))
    axes.invert_yaxis()
    _plain(axes)
    axes.grid(axis="y", visible=False)


def _groups(axes: Axes, places: Sequence[str], values: Mapping[str, Sequence[float]], share: float = 0.7) -> None:
    """Bars by policy at each place. share: of the axis that bars take."""
    width = share / len(values)
    for i, (name, heights) in enumerate(values.items()):
        at = [x + (i - (len(values) - 1) / 2) * width for x in range(len(places))]
        axes.bar(at, heights, width * 0.94, color=plots.policy_colour(name), label=name)
    axes.set_xticks(range(len(places)), places)


def _ranges(
    axes: Axes, at: Iterable[float], pairs: Sequence[Sequence[float]], label: str, style: Mapping[str, Any]
) -> None:
    for i, (x, pair) in enumerate(zip(at, pairs, strict=True)):
        axes.plot([x, x], pair, linewidth=2, label=None if i else label, **style)


def _tokens_axis(axes: Axes, at: Sequence[int]) -> None:
    shown = [n for n in TOKENS if at[0] <= n <= at[-1]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [common.short(n) for n in shown])
    axes.minorticks_off()


def _links_axis(axes: Axes, at: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(at, [f"{x:g}" for x in at])
    axes.minorticks_off()


def _batch_axis(axes: Axes, at: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(x) for x in at])


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)


def _bound_key() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color="black", linestyle=":", linewidth=1.8, label="lower bound")


def _published_key(label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", label=label, **PUBLISHED)


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, fontsize=9)


# Tables and the page


HEADERS = ("source", "what", "published", "same method", "pipelined", "published at", "ours at", "why they differ")


def rows(compared: Iterable[Comparison]) -> list[tuple[str, ...]]:
    """Cells of the table of published figures, under HEADERS."""
    made = []
    for each in compared:
        figures = each.published
        values = (_values(figures, v) for v in (figures.values, each.ours, each.pipelined))
        what = f"{figures.what}; {each.reading}" if each.reading else figures.what
        made.append((published.SHORT[figures.source], what, *values, figures.setting, each.setting or "-", each.word))
    return made


def _values(figures: Published, values: Sequence[float]) -> str:
    if not values:
        return "-"
    if figures.unit == "tokens":
        return ", ".join(f"{value / K:.3g}K" for value in values)
    if figures.unit == "s" and max(values) < 0.2:
        return ", ".join(f"{value * 1e3:.1f}" for value in values) + " ms"
    places = (3 if max(values) < 1 else 0) if figures.unit == "%" else 2
    return ", ".join(f"{value:.{places}f}" for value in values) + f" {figures.unit}"


def table(compared: Iterable[Comparison]) -> str:
    """As text: figures in a table, then settings and reasons by number."""
    cells = rows(compared)
    lines = [(str(i), *cell[:5]) for i, cell in enumerate(cells, 1)]
    notes = []
    for i, (*_, theirs, ours, word) in enumerate(cells, 1):
        text = f"Published: {theirs}. " + (f"Ours: {ours}. " if ours != "-" else "") + word
        notes.append(textwrap.fill(text, 118, initial_indent=f"{i:>2}  ", subsequent_indent="    "))
    sources = textwrap.fill("; ".join(f"{short}: {source}" for source, short in published.SHORT.items()) + ".", 118)
    return "\n\n".join([common.table(lines, ["", *HEADERS[:5]], right=[0, 3, 4, 5]), sources, "\n".join(notes)])


ABOUT = (
    "Simulated: every policy runs in virtual time on a roofline of the model and the device. Rates of A100 and H100 "
    "fit published chunk times, the others and all fixed costs are guesses, and nothing is counted that an engine does "
    "besides restoring. Published figures are what public summaries of the papers report; they are drawn as diamonds, "
    "or as a band, and say so."
)
STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
img { width: 100%; height: auto; } figure { margin: 0 0 3em; } figcaption { max-width: 75ch; }
h1, h2 { line-height: 1.2; } table { border-collapse: collapse; font-size: 13px; line-height: 1.35; }
th, td { text-align: left; vertical-align: top; padding: 0.35em 0.6em; border-bottom: 1px solid #ddd; }
td:nth-child(3), td:nth-child(4), td:nth-child(5) { white-space: nowrap; } .wide { overflow-x: auto; }
"""


def page(pictures: Iterable[Picture], compared: Iterable[Comparison]) -> str:
    """The page: every figure with its caption, and the table of published figures."""
    shown = "\n".join(
        f'<figure id="{Path(picture.file).stem}">\n<h2>{html.escape(picture.title)}</h2>\n'
        f'<img src="{picture.file}" alt="{html.escape(picture.title)}">\n'
        f"<figcaption>{html.escape(picture.caption)}</figcaption>\n</figure>"
        for picture in pictures
    )
    head = "".join(f"<th>{name}</th>" for name in HEADERS)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows(compared)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>CacheFlow, simulated</title>
<style>
{STYLE}</style>
</head>
<body>
<h1>CacheFlow, simulated</h1>
<p>{html.escape(ABOUT)}</p>
{shown}
<h2 id="published">Everything published, beside ours</h2>
<p>{html.escape("; ".join(f"{short}: {source}" for source, short in published.SHORT.items()))}.</p>
<div class="wide">
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
</body>
</html>
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/figures"), metavar="FOLDER", help="default %(default)s")
    parser.add_argument("--table", action="store_true", help="print published figures beside ours, and draw nothing")
    args = parser.parse_args(argv)
    if args.table:
        print(table(published.comparisons()))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = [draw(args.out) for draw in common.progress(FIGURES, "drawing", unit="figure")]
    (args.out / "index.html").write_text(page(pictures, published.comparisons()), encoding="utf-8")
    print(f"wrote {args.out / 'index.html'} and {len(pictures)} figures beside it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
