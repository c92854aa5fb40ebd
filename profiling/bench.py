"""What the kernel benchmarks share: shapes, floors, checks, timing and tables.

A row is timed only after its check against float64 has passed in the same run. Times are those of the GPU: the call is
captured in a CUDA graph, whose replays are timed by events with the L2 cache flushed before each (Triton's `do_bench`),
so that what Python takes to launch is not in them; it is in a column of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from machine import about

from cacheflow.commands import _common as common
from cacheflow.costs.base import ModelShape
from kernels.batch import Part, RaggedBatch
from models.config import ModelConfig

USER_ERROR = 2
SEED = 0
# A kernel may be wrong, against float64, by this multiple of the error of the reference in the same dtype. A rival may
# by twice that, a guess: it rounds where it likes, and the check has to tell only that it was called rightly.
MULTIPLE, RIVAL_MULTIPLE = 2, 4
FULL, QUICK, TINY = "full", "quick", "tiny"
SOURCE = "vendors' data sheets: dense bf16, memory and host link"


@dataclass(frozen=True)
class Peaks:
    """What a GPU cannot exceed. flops: FLOP/s of dense bf16; memory: bytes/s; link: bytes/s from the host."""

    flops: float
    memory: float
    link: float


# `cacheflow.costs.roofline.DEVICES` has what GPUs reach in practice, which is no floor of a time.
PEAKS = {
    "A100-40G": Peaks(312e12, 1.555e12, 32e9),
    "A100-80G": Peaks(312e12, 2.039e12, 32e9),
    "H100": Peaks(989e12, 3.35e12, 64e9),
    "H200": Peaks(989e12, 4.8e12, 64e9),
    "B200": Peaks(2250e12, 8.0e12, 64e9),
    "L40S": Peaks(362e12, 0.864e12, 32e9),
    "MI300X": Peaks(1307e12, 5.3e12, 64e9),
}


@dataclass(frozen=True)
class Model:
    """One GPU's share of a model."""

    label: str
    shape: ModelShape
    qk_norm: bool = False

    @classmethod
    def preset(cls, name: str, gpus: int = 1) -> Model:
        """gpus: over which heads and MLP are split evenly. Raises ValueError for an unknown name."""
        config = ModelConfig.preset(name)
        whole = ModelShape.of(config, dtype_bytes=2)
        shape = replace(
            whole,
            heads=whole.heads // gpus,
            kv_heads=whole.kv_heads // gpus,
            intermediate=whole.intermediate // gpus,
        )
        return cls(name if gpus == 1 else f"{name} TP{gpus}", shape, config.qk_norm)


TINY_MODEL = Model("tiny", ModelShape(2, 64, 4, 2, 32, 96, 100, (None, None)), qk_norm=True)


def models(size: str) -> list[Model]:
    """The paper's models, the first of them, or one for the interpreter."""
    if size == TINY:
        return [TINY_MODEL]
    found = [Model.preset("llama-3.1-8b")]
    return found if size == QUICK else [*found, Model.preset("llama-3.1-70b", gpus=8), Model.preset("qwen3-8b")]


@dataclass(frozen=True)
class Setting:
    """Where and in what a task runs. page, chunk: tokens of a page, and of a chunk in staging."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    page: int = 64
    chunk: int = 512

    def normal(self, *shape: int) -> torch.Tensor:
        """Normally distributed numbers, the same on every call."""
        generator = torch.Generator(self.device).manual_seed(SEED + sum(shape))
        return torch.randn(*shape, generator=generator, device=self.device).to(self.dtype)

    def pages(self, count: int) -> list[int]:
        """The ids of a pool's pages in an order that no reader can foresee."""
        return torch.randperm(count, generator=torch.Generator().manual_seed(SEED)).tolist()

    def batch(self, start: int, stop: int, pages: Sequence[int]) -> RaggedBatch:
        """One part."""
        return RaggedBatch.build([Part(start, stop, pages)], self.page, self.device)


# Under the interpreter, which computes on the bits of bf16.
TINY_SETTING = Setting(torch.device("cpu"), torch.float16, page=16, chunk=32)


@dataclass(frozen=True)
class Side:
    """One way to do a task.

    run: does it, and returns what `error` judges. error: against float64, relative norm; NaN for anything not written.
    bound: the most that the error may be. rival: what ours is compared with; others are there to be looked at.
    """

    name: str
    run: Callable[[], torch.Tensor]
    error: Callable[[torch.Tensor], float]
    bound: float
    rival: bool = True


@dataclass(frozen=True)
class Task:
    """One shape of one op.

    flops, nbytes, link_bytes: what has to be computed, moved in the GPU's memory, and moved over the host link.
    make: its sides, ours first, on tensors that are made then.
    """

    model: str
    what: str
    flops: int
    nbytes: int
    make: Callable[[Setting], list[Side]]
    link_bytes: int = 0

    def floor(self, peaks: Peaks) -> tuple[float, str]:
        """Seconds below which no GPU with these peaks can be, and what sets them."""
        bounds = {
            "compute": self.flops / peaks.flops,
            "memory": self.nbytes / peaks.memory,
            "link": self.link_bytes / peaks.link,
        }
        by = max(bounds, key=bounds.__getitem__)
        return bounds[by], by


@dataclass(frozen=True)
class Times:
    """Microseconds: on the GPU, and on the host until the call returns."""

    median: float
    p20: float
    p80: float
    host: float


@dataclass(frozen=True)
class Row:
    """One side of one task. times: None where only the check was asked for. gbps: over the link where
    that is used. floor: microseconds. speedup: of ours, the fastest rival's median over its own."""

    model: str
    what: str
    side: str
    error: float
    bound: float
    times: Times | None
    tflops: float | None
    gbps: float | None
    floor: float
    speedup: float | None


@dataclass(frozen=True)
class Failure:
    """A side whose check did not pass, or that could not run."""

    model: str
    what: str
    side: str
    reason: str


def relative_norm(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| over all elements, in float64; NaN anywhere gives NaN, which passes no bound."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()).clamp_min(1e-300))


def sample(count: int, most: int = 16) -> list[int]:
    """Some of `count` rows, the first and the last among them: those that a check looks at."""
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))[: most - 2].tolist()
    return sorted({0, count - 1, *chosen})


def check(task: Task, side: Side) -> float | Failure:
    """Run a side once and judge what it did: its error, if that is within bounds."""
    try:
        error = side.error(side.run())
    except Exception as raised:  # a rival that cannot do this shape must not end the run, nor pass unseen
        return Failure(task.model, task.what, side.name, f"{type(raised).__name__}: {' '.join(str(raised).split())}")
    if not error <= side.bound:  # so that NaN fails
        return Failure(task.model, task.what, side.name, f"error {error:.2e} where {side.bound:.2e} is allowed")
    return error


def measure(run: Callable[[], object], quick: bool) -> Times:
    """Time a call that has run before, so that nothing is compiled."""
    from triton.testing import do_bench

    hosts = []
    for _ in range(11):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        hosts.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    median, p20, p80 = do_bench(graph.replay, warmup=25, rep=50 if quick else 200, quantiles=[0.5, 0.2, 0.8])
    return Times(median * 1e3, p20 * 1e3, p80 * 1e3, statistics.median(hosts) * 1e6)


def rows(task: Task, setting: Setting, peaks: Peaks, quick: bool, timed: bool) -> Iterator[Row | Failure]:
    """Check every side of a task, then time those that passed."""
    floor, _ = task.floor(peaks)
    passed: list[tuple[Side, float, Times | None]] = []
    sides = task.make(setting)
    for side in sides:
        error = check(task, side)
        if isinstance(error, Failure):
            yield error
        else:
            passed.append((side, error, measure(side.run, quick) if timed else None))
    best = min((times.median for side, _, times in passed if side.rival and times), default=None)
    for side, error, times in passed:
        seconds = None if times is None else times.median / 1e6
        yield Row(
            model=task.model,
            what=task.what,
            side=side.name,
            error=error,
            bound=side.bound,
            times=times,
            tflops=None if seconds is None else task.flops / seconds / 1e12,
            gbps=None if seconds is None else (task.link_bytes or task.nbytes) / seconds / 1e9,
            floor=floor * 1e6,
            speedup=best / times.median if side is sides[0] and times and best else None,
        )


def peaks_of(name: str | None) -> tuple[str, Peaks]:
    """Those of a GPU by its name here, or of the one that is there. Raises ValueError for one that is not listed."""
    if name is None and torch.cuda.is_available():
        there = torch.cuda.get_device_name()
        name = next((key for key in PEAKS if all(part in there for part in key.split("-"))), there)
    name = name or "H100"
    if name not in PEAKS:
        raise ValueError(f"the peaks of {name!r} are not known; name one of {', '.join(PEAKS)} with --peaks")
    return name, PEAKS[name]


def main(doc: str | None, tasks: Callable[[str], list[Task]], argv: Sequence[str] | None = None) -> int:
    """The command line of a benchmark. tasks: by size, FULL, QUICK or TINY. Returns the exit status: 0, 1 where a check
    failed, 2 for what the user can mend."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print shapes, bytes, FLOPs and floors; needs no GPU")
    parser.add_argument("--check", action="store_true", help="check and time nothing; TRITON_INTERPRET=1 on a CPU")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, in under a minute")
    parser.add_argument("--page", type=int, choices=(16, 32, 64, 128), default=64, help="tokens; default %(default)s")
    parser.add_argument("--peaks", metavar="GPU", help=f"whose floors, of {', '.join(PEAKS)}; default: the GPU here")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args(argv)
    interpreted = args.check and os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
    size = TINY if interpreted else QUICK if args.quick else FULL
    try:
        name, peaks = peaks_of(args.peaks)
        if not (args.dry_run or interpreted or torch.cuda.is_available()):
            raise ValueError("there is no GPU here; --dry-run prints shapes, bytes, FLOPs and floors without one")
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return USER_ERROR
    if args.dry_run:
        _print_plan(tasks(size), name, peaks, args.json)
        return 0
    setting = TINY_SETTING if interpreted else Setting(torch.device("cuda"), page=args.page)
    dtype = str(setting.dtype).removeprefix("torch.")
    facts = about("torch", "triton", "numpy") | {
        "gpu": "none, interpreted" if interpreted else torch.cuda.get_device_name(),
        "peaks": f"{name}, {SOURCE}",
        "setting": f"{dtype}, pages of {setting.page}, chunks of {setting.chunk} tokens",
    }
    done: list[Row | Failure] = []
    for task in common.progress(tasks(size), "benchmark"):
        done += rows(task, setting, peaks, args.quick, timed=not args.check)
    found = [row for row in done if isinstance(row, Row)]
    failures = [failure for failure in done if isinstance(failure, Failure)]
    if args.json:
        report = {**facts, "rows": [asdict(row) for row in found], "failures": [asdict(one) for one in failures]}
        common.print_json(report)
    else:
        for key, value in facts.items():
            print(f"{key:9}{value}")
        print()
        (_print_checks if args.check else _print_rows)(found)
        for one in failures:
            print(f"FAILED {one.model}, {one.what}, {one.side}: {one.reason}")
    return 1 if failures or not found else 0


def _print_plan(tasks: Sequence[Task], name: str, peaks: Peaks, as_json: bool) -> None:
    plan = []
    for task in tasks:
        seconds, by = task.floor(peaks)
        amounts = {"flops": task.flops, "bytes": task.nbytes, "link_bytes": task.link_bytes}
        plan.append({"model": task.model, "shape": task.what, **amounts, "floor_us": seconds * 1e6, "bound_by": by})
    if as_json:
        print(json.dumps({"peaks": name, "source": SOURCE, "tasks": plan}, indent=2))
        return
    print(f"floors of {name} ({SOURCE})\n")
    shown = [
        (
            one["model"],
            one["shape"],
            f"{task.flops / 1e9:.3f}",
            f"{task.nbytes / 1e6:.3f}",
            f"{task.link_bytes / 1e6:.3f}",
            f"{one['floor_us']:.2f}",
            one["bound_by"],
        )
        for one, task in zip(plan, tasks, strict=True)
    ]
    print(
        common.table(
            shown, ["model", "shape", "GFLOP", "MB", "MB over\nthe link", "floor\nus", "set by"], right=range(2, 6)
        )
    )


def _print_checks(found: Sequence[Row]) -> None:
    shown = [(row.model, row.what, row.side, f"{row.error:.1e}", f"{row.bound:.1e}") for row in found]
    print(common.table(shown, ["model", "shape", "side", "error", "allowed"], right=range(3, 5)))


def _print_rows(found: Sequence[Row]) -> None:
    shown = []
    for row in found:
        assert row.times is not None and row.tflops is not None and row.gbps is not None
        times = (row.times.median, row.times.p20, row.times.p80)
        shown.append(
            (
                row.model,
                row.what,
                row.side,
                *(f"{value:.1f}" for value in times),
                f"{row.times.host:.0f}",
                f"{row.tflops:.1f}",
                f"{row.gbps:.0f}",
                f"{row.floor / row.times.median:.0%}",
                "" if row.speedup is None else f"{row.speedup:.2f}x",
            )
        )
    headers = ["model", "shape", "side", "median\nus", "p20", "p80", "host\nus", "TFLOP/s", "GB/s", "floor/\nmedian"]
    print(common.table(shown, [*headers, "best rival/\nours"], right=range(3, 11)))
    print(
        "\nfloor: what FLOPs and bytes take at the peaks. host: until the call returns. every row passed its check.\n"
    )
