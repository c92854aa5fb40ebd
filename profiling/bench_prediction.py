"""How well a TTFT is known before the run: restorations of varying length, suffix and bandwidth on this machine, each
predicted in virtual time and then run.

    python profiling/bench_prediction.py
    python profiling/bench_prediction.py --runs 30 --policy pipelined,two-pointer,load --seed 1 --json

Predicted with costs as they were before the run: "measured", with nothing running beside, every few runs anew, since
what a shared machine can do changes by the minute; and "learned", those refined by the ops of the runs since. The
engine plans with the learned ones; what it is going to do is simulated with either.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from machine import about, text

from cacheflow import demo_model, heap, policies
from cacheflow.commands import _common as common
from cacheflow.costs.base import Costs
from cacheflow.engine import Engine
from cacheflow.op import COMPUTE, FETCH
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from cacheflow.stores import Link, MemoryStore

CHUNK = 128
PREFIXES, SUFFIXES, GBPS = (256, 2048), (8, 256), (0.1, 1.0)  # drawn evenly in their logarithm
STEP = 64  # tokens; prefixes are multiples, so that every other one ends with a tail
LEARN = 8  # runs before those that count, which only teach
REFRESH = 20  # runs from one measurement of the costs to the next
WITHIN, ASKED = 0.1, 0.95
WORST = 5  # runs that are shown
MEASURED, LEARNED = "measured", "learned"
TTFT = "TTFT"


@dataclass(frozen=True)
class Setting:
    """prefix, suffix: tokens. gbps: decimal Gbit/s of the link."""

    policy: str
    prefix: int
    suffix: int
    gbps: float


@dataclass(frozen=True)
class Prediction:
    """Of a TTFT or of an op. what: TTFT, or the op's kind. predicted: by the costs used. Seconds."""

    what: str
    seconds: float
    predicted: Mapping[str, float]

    def error(self, costs: str) -> float:
        return abs(self.predicted[costs] / self.seconds - 1)


@dataclass(frozen=True)
class Run:
    """others: share of the CPUs that other processes took meanwhile."""

    setting: Setting
    ttft: Prediction
    ops: tuple[Prediction, ...]
    others: float


@dataclass(frozen=True)
class Errors:
    """|predicted / actual - 1| of so many. within: the share of at most WITHIN."""

    policy: str
    what: str
    costs: str
    count: int
    within: float
    median: float
    p90: float
    worst: float


def draw(count: int, names: Sequence[str], seed: int) -> list[Setting]:
    """Settings at random, policies in turn."""
    generator = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(generator.uniform(math.log(low), math.log(high)))

    return [
        Setting(
            policy=names[i % len(names)],
            prefix=round(between(*PREFIXES) / STEP) * STEP,
            suffix=round(between(*SUFFIXES)),
            gbps=between(*GBPS),
        )
        for i in range(count)
    ]


def runs(
    engine: Engine,
    settings: Sequence[Setting],
    *,
    seed: int = 0,
    refresh: int = REFRESH,
    progress: Callable[[str], object] = lambda step: None,
) -> Iterator[Run]:
    """Store the text that all settings are cut from, then predict and run each.

    engine: over a Link, and learning. refresh: costs are measured before the first run and so many behind it.
    """
    link = engine.store
    assert isinstance(link, Link) and engine.learn
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(engine.model.config.vocab_size, (count,), generator=generator).tolist()

    document = tokens(max((setting.prefix for setting in settings), default=0))
    progress("storing")
    for prefix in sorted({setting.prefix for setting in settings}, reverse=True):
        engine.save(document[:prefix])  # the longest, and of the others their tails
    for i, setting in enumerate(settings):
        if i % refresh == 0:
            progress(f"run {i + 1} of {len(settings)}: measuring costs")
            engine.measure()
        progress(f"run {i + 1} of {len(settings)}")
        yield _run(engine, link, setting, document[: setting.prefix] + tokens(setting.suffix))


def _run(engine: Engine, link: Link, setting: Setting, prompt: list[int]) -> Run:
    link.set_bandwidth(setting.gbps)
    engine.known_costs.bandwidth = link.bandwidth
    engine.learned.refresh()
    learned = copy.deepcopy(engine.learned)  # goes on learning while it runs
    costs: dict[str, Costs] = {MEASURED: learned.undisturbed, LEARNED: learned}
    request = Request.of(
        "r", prefix=setting.prefix, suffix=setting.suffix, chunk=engine.chunk_tokens, layers=learned.shape.layers
    )
    predicted = {
        name: Simulation(engine.make_policy(setting.policy, learned), [request], costs=known).ttft["r"]
        for name, known in costs.items()
    }
    own, all_busy, start = time.process_time(), _busy(), time.perf_counter()
    [restored] = engine.restore([prompt], policy=setting.policy, ids=["r"])
    seconds = time.perf_counter() - start
    others = max(0.0, _busy() - all_busy - (time.process_time() - own)) / seconds / (os.cpu_count() or 1)
    engine.release(restored)
    if restored.request != request or restored.failures:
        raise RuntimeError(f"the store did not give what was stored: {restored.request}, {restored.failures}")
    ops = tuple(
        Prediction(span.stream, span.seconds, {name: known.seconds(span.op) for name, known in costs.items()})
        for span in restored.timeline.of({"r"})
        if span.op.kind in (COMPUTE, FETCH)
    )
    return Run(setting, Prediction(TTFT, restored.ttft, predicted), ops, min(1.0, others))


def _busy() -> float:
    """Seconds of work of all CPUs since the machine started, other guests' left out; 0 where nothing tells."""
    words = text("/proc/stat").split("\n", 1)[0].split()[1:]
    return sum(int(word) for i, word in enumerate(words[:7]) if i not in (3, 4)) / os.sysconf("SC_CLK_TCK")


def errors(done: Sequence[Run]) -> list[Errors]:
    """Of TTFTs and ops, by policy, what was predicted and costs."""
    rows = []
    for policy in dict.fromkeys(run.setting.policy for run in done):
        own = [run for run in done if run.setting.policy == policy]
        found = [one for run in own for one in (run.ttft, *run.ops)]
        for what in (TTFT, COMPUTE, FETCH):
            for costs in (MEASURED, LEARNED):
                of = sorted(one.error(costs) for one in found if one.what == what)
                if of:
                    within = sum(error <= WITHIN for error in of) / len(of)
                    p90 = of[math.ceil(0.9 * len(of)) - 1]
                    rows.append(Errors(policy, what, costs, len(of), within, statistics.median(of), p90, of[-1]))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=common.count, default="100", help="restorations; default %(default)s")
    parser.add_argument(
        "--policy", type=common.listed(str), metavar="NAMES", default="pipelined", help="in turn; default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths, bandwidths and tokens; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds, and nothing else")
    args = parser.parse_args(argv)
    try:
        for name in args.policy:
            policies.find(name)
    except ValueError as error:
        parser.error(str(error))
    heap.keep_freed_memory()
    settings = draw(LEARN + args.runs, args.policy, args.seed)
    with common.steps() as step:
        model = demo_model.ensure(step)
        link = Link(MemoryStore(1 << 30), gbps=math.inf)
        with Engine(model.folder, link, chunk_tokens=CHUNK, cache_tokens=2 * PREFIXES[1]) as engine:
            engine.warmup()
            done = list(runs(engine, settings, seed=args.seed, progress=step))[LEARN:]
            backend = engine.model.ops.NAME
    rows = errors(done)
    if args.json:
        common.print_json({"errors": [asdict(row) for row in rows], "runs": [_plain(run) for run in done]})
        return
    facts = about("torch", "numpy")
    print(
        f"{len(done)} restorations of {model.label}, prefixes of {PREFIXES[0]} to {PREFIXES[1]} tokens, suffixes of "
        f"{SUFFIXES[0]} to {SUFFIXES[1]}, {GBPS[0]} to {GBPS[1]} Gbps\n"
        f"costs measured every {REFRESH} runs and learned from there on, {LEARN} runs before the first that counts"
    )
    print(f"{facts['cpu']}, {torch.get_num_threads()} threads, {facts['versions']}")
    print(f"kernels {backend}, commit {facts['commit']}\n")
    _print(rows, done)


def _plain(run: Run) -> dict[str, object]:
    """A run for JSON, ops left out."""
    return {**asdict(run.setting), "ttft": run.ttft.seconds, "predicted": run.ttft.predicted, "others": run.others}


def _print(rows: Sequence[Errors], done: Sequence[Run]) -> None:
    shown = [
        [row.policy, row.what, row.costs, row.count]
        + [f"{value:.1%}" for value in (row.within, row.median, row.p90, row.worst)]
        + ["met" if row.within >= ASKED else "missed"]
        for row in rows
    ]
    headers = ["policy", "of", "costs", "count", f"within\n{WITHIN:.0%}", "error:\nmedian", "\np90", "\nworst"]
    print(common.table(shown, [*headers, f"{ASKED:.0%}\nasked"], right=range(3, 8)))
    others = sorted(run.others for run in done)
    print(
        f"\nerror: |predicted / actual - 1|, predicted before the run. other processes took "
        f"{statistics.median(others):.0%} of the CPUs in the median run, {others[-1]:.0%} in the worst\n"
    )
    worst = sorted(done, key=lambda run: run.ttft.error(LEARNED), reverse=True)[:WORST]
    cells = [
        [run.setting.policy, run.setting.prefix, run.setting.suffix]
        + [f"{value:.3f}" for value in (run.setting.gbps, run.ttft.seconds)]
        + [f"{run.ttft.predicted[costs]:.3f}" for costs in (MEASURED, LEARNED)]
        + [f"{run.others:.0%}"]
        for run in worst
    ]
    headers = ["worst by learned", "prefix", "suffix", "Gbps", "TTFT\ns", "predicted:\nmeasured", "\nlearned", "others"]
    print(common.table(cells, headers, right=range(1, len(headers))))


if __name__ == "__main__":
    main()
