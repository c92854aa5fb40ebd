"""cacheflow workload: prompts that arrive over time, on several GPUs with a bounded store between them."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheflow.commands import _common as common
from cacheflow.commands.simulate import SLACK, add_parts, each_fetch, fetch_seconds, gpu, shape

if TYPE_CHECKING:
    from cacheflow.arrivals import Prompt
    from cacheflow.costs.base import ModelShape
    from cacheflow.costs.roofline import Device
    from cacheflow.workload import Outcome

DESCRIPTION = """\
Run every policy, in virtual time, on a stream of prompts: a trace in Mooncake's format, or synthetic conversations.
Each GPU has a link of its own to one store, which holds what earlier prompts have computed and drops what does not fit.
Prompts go to the GPU with the least work. The time to first token counts from the arrival, waiting included.

A stream's load is its rate over the rate that --reference carries with the same machines, link and store: what it gets
done when every GPU always has --at-once prompts, and the busier of its compute and its link never rests.
"""
EXAMPLES = """\
examples:
  cacheflow workload
  cacheflow workload --load 0.5,0.7,0.9 --gbps 10,40 --store 250GiB --evict lru,restoration
  cacheflow workload --trace conversation_trace.jsonl --gpus 8 --load 0.7 --jobs 2
  cacheflow workload --trace conversation_trace.jsonl --gpus 8 --stretch 1.5 --policy load,two-pointer --json
  cacheflow workload --arrivals closed --users 32 --think 10
"""
ARRIVALS = ("trace", "poisson", "closed")


@dataclass(frozen=True)
class Case:
    """One run: everything that it depends on. factor: of the trace's arrival times, rate: of Poisson arrivals; a closed
    loop of `users` has neither."""

    policy: str
    gbps: float
    evict: str
    model: ModelShape
    machine: Device
    fetch_seconds: float
    store: int | None
    gpus: int
    at_once: int
    seed: int
    factor: float | None = None
    rate: float | None = None
    users: int | None = None
    think: float = 0.0

    def run(self, prompts: list[Prompt]) -> Outcome:
        from cacheflow import arrivals, policies, workload
        from cacheflow.costs.roofline import GBPS, Roofline
        from cacheflow.eviction import EVICTIONS, ChunkStore

        link = {"bandwidth": self.gbps * GBPS, "fetch_seconds": self.fetch_seconds}
        costs = workload.remembering(Roofline(self.model, self.machine, **link))
        if self.rate is not None:
            prompts = arrivals.poisson(prompts, self.rate, self.seed)
        elif self.factor is not None:
            prompts = arrivals.scaled(prompts, self.factor)
        policy = policies.find(self.policy)
        return workload.run(
            lambda: policy(costs),
            prompts,
            ChunkStore(self.store, EVICTIONS[self.evict](costs, arrivals.CHUNK)),
            gpus=self.gpus,
            at_once=self.at_once,
            users=self.users,
            think=self.think,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Row:
    """A run, and what came out. load: see the description; None in a closed loop."""

    case: Case
    load: float | None
    outcome: Outcome


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "workload",
        help="predict every policy under a stream of prompts",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    rows = parser.add_argument_group("rows (comma-separated lists)")
    rows.add_argument(
        "--policy", type=common.listed(str), metavar="NAMES", help="by name, or module:Class; default all"
    )
    rows.add_argument(
        "--gbps", type=common.listed(common.positive), default="40", help="a GPU's link, Gbit/s; default %(default)s"
    )
    rows.add_argument("--load", type=common.listed(common.positive), help="scale arrivals to these loads; default 0.7")
    rows.add_argument("--evict", type=common.listed(str), default="lru", help="lru, restoration; default %(default)s")
    stream = parser.add_argument_group("prompts and arrivals")
    stream.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in Mooncake's format; default synthetic")
    stream.add_argument("--requests", type=common.count, help="how many; default all of a trace, or 500")
    stream.add_argument("--median", type=common.tokens, default="12K", help="synthetic, tokens; default %(default)s")
    stream.add_argument(
        "--sigma", type=common.positive, default="0.8", help="synthetic, log-normal; default %(default)s"
    )
    stream.add_argument(
        "--again", type=share, default="0.5", help="synthetic, how many go on with another; default %(default)s"
    )
    stream.add_argument("--arrivals", choices=ARRIVALS, help="default: trace with --trace, else poisson")
    stream.add_argument("--rate", type=common.positive, help="of poisson, prompts/s, instead of --load")
    stream.add_argument("--stretch", type=common.positive, help="factor of a trace's times, instead of --load")
    stream.add_argument("--users", type=common.count, help="of closed; default --at-once for every GPU")
    stream.add_argument("--think", type=common.positive, help="of closed, mean seconds between prompts; default none")
    stream.add_argument("--seed", type=int, default=0, help="default %(default)s")
    machines = parser.add_argument_group("machines")
    machines.add_argument("--gpus", type=common.count, default="1", help="default %(default)s")
    machines.add_argument("--store", type=size, metavar="SIZE", help="of all KV stored, e.g. 500GiB; default no limit")
    machines.add_argument(
        "--at-once", type=common.count, default="16", help="prompts that a GPU restores at a time; default %(default)s"
    )
    machines.add_argument("--reference", default="pipelined", help="whose rate is load 1; default %(default)s")
    add_parts(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--jobs", type=common.count, default="1", help="processes; default %(default)s")
    output.add_argument("--compact", action="store_true", help="a column per link and load, and only mean TTFTs")
    output.add_argument("--json", action="store_true", help="print JSON, times in seconds, and nothing else")


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write a number from 0 to 1, for example 0.5")
    return value


def size(text: str) -> int:
    """Bytes: "500GiB"."""
    from cacheflow.stores import parse_size  # late, for it imports NumPy

    return parse_size(text)


def run(args: argparse.Namespace) -> int:
    from cacheflow import arrivals, policies

    kind = _arrivals(args)
    names = args.policy or list(policies.available())
    for name in [*names, args.reference]:
        policies.find(name)
    _known(args.evict)
    if args.trace:
        prompts = arrivals.load_trace(args.trace, args.requests)
    else:
        prompts = arrivals.conversations(
            args.requests or 500, seed=args.seed, median=args.median, sigma=args.sigma, again=args.again
        )
    if kind == "trace" and math.isinf(arrivals.rate(prompts)):
        raise ValueError(f"all prompts of {args.trace} arrive at once; give --arrivals poisson or closed")
    common_case = Case(
        policy=args.reference,
        gbps=args.gbps[0],
        evict=args.evict[0],
        model=shape(args.model),
        machine=gpu(args),
        fetch_seconds=fetch_seconds(args),
        store=args.store,
        gpus=args.gpus,
        at_once=args.at_once,
        seed=args.seed,
        users=args.at_once * args.gpus,
    )
    full = [dataclasses.replace(common_case, gbps=gbps) for gbps in args.gbps]
    carried: dict[float, float] = {}
    if kind != "closed":
        for case, outcome in zip(full, _run_all(args, full, prompts, "what the reference carries"), strict=True):
            carried[case.gbps] = outcome.carried
    cases: list[Case] = []
    loads: list[float | None] = []
    for gbps, load, evict, name in product(args.gbps, args.load or [None], args.evict, names):
        case = dataclasses.replace(common_case, policy=name, gbps=gbps, evict=evict)
        if kind == "closed":
            users = args.users or case.users
            cases.append(dataclasses.replace(case, users=users, think=args.think or 0.0))
            loads.append(None)
            continue
        rate = load * carried[gbps] if load else args.rate or arrivals.rate(prompts) / (args.stretch or 1.0)
        times = {"rate": rate} if kind == "poisson" else {"factor": arrivals.rate(prompts) / rate}
        cases.append(dataclasses.replace(case, users=None, **times))
        loads.append(rate / carried[gbps])
    outcomes = _run_all(args, cases, prompts, "serving")
    rows = [Row(*row) for row in zip(cases, loads, outcomes, strict=True)]
    figures = list(map(_figures, rows))
    if args.json:
        _report(args, kind, prompts, carried, rows[0].case.machine.name, figures)
    else:
        _head(args, kind, prompts, carried, rows[0].case.machine.name)
        (_compact if args.compact else _table)(figures)
    beaten = [(row, worst) for row in rows if (worst := min(r.ttft / r.bound for r in row.outcome.served)) < SLACK]
    for row, worst in beaten:
        print(f"cacheflow: {row.case.policy} takes {worst:.3f} of the lower bound: one is wrong", file=sys.stderr)
    return 1 if beaten else 0


def _arrivals(args: argparse.Namespace) -> str:
    kind = args.arrivals or ("trace" if args.trace else "poisson")
    if kind == "trace" and not args.trace:
        raise ValueError("--arrivals trace needs --trace FILE; or choose poisson or closed")
    alien = {
        "--rate": args.rate and kind != "poisson",
        "--stretch": args.stretch and kind != "trace",
        "--users": args.users and kind != "closed",
        "--think": args.think and kind != "closed",
        "--load": args.load and kind == "closed",
    }
    for option in (option for option, is_alien in alien.items() if is_alien):
        raise ValueError(f"{option} says nothing about --arrivals {kind}; leave one of them out")
    if args.load and (args.rate or args.stretch):
        raise ValueError("--load sets the rate itself; leave --rate and --stretch out")
    if not (args.load or args.rate or args.stretch) and kind == "poisson":
        args.load = [0.7]
    return kind


def _known(names: list[str]) -> None:
    from cacheflow.eviction import EVICTIONS

    for name in names:
        if name not in EVICTIONS:
            raise ValueError(f"--evict {name!r} is unknown; choose of {', '.join(EVICTIONS)}")


def _run_all(args: argparse.Namespace, cases: list[Case], prompts: list[Prompt], what: str) -> Iterator[Outcome]:
    if args.jobs == 1:
        yield from (case.run(prompts) for case in common.progress(cases, what, unit="run"))
        return
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(case.run, prompts) for case in cases]
        for future in common.progress(futures, what, unit="run"):
            yield future.result()


def _figures(row: Row) -> dict[str, Any]:
    from cacheflow.op import COMPUTE, FETCH
    from cacheflow.workload import quantiles

    outcome = row.outcome
    return {
        "gbps": row.case.gbps,
        "load": row.load,
        "evict": row.case.evict,
        "policy": row.case.policy,
        "rate": outcome.rate,
        "seconds": outcome.seconds,
        "ttft_seconds": quantiles(outcome.served),
        "returning": len(outcome.returning),
        "returning_ttft_seconds": quantiles(outcome.returning),
        "hit_share": outcome.hit_share,
        "recompute_share": outcome.recompute_share,
        "busy_compute": outcome.busy_share(COMPUTE),
        "busy_link": outcome.busy_share(FETCH),
        "evicted": outcome.evicted,
        "refused": outcome.refused,
    }


def _report(
    args: argparse.Namespace,
    kind: str,
    prompts: list[Prompt],
    carried: dict[float, float],
    device: str,
    figures: list[dict[str, Any]],
) -> None:
    common.print_json(
        {
            "model": args.model,
            "device": device,
            "fetch_seconds": fetch_seconds(args),
            "gpus": args.gpus,
            "at_once": args.at_once,
            "store_bytes": args.store,
            "prompts": len(prompts),
            "tokens": sum(prompt.tokens for prompt in prompts),
            "arrivals": kind,
            "seed": args.seed,
            "reference": args.reference,
            "carried": [{"gbps": gbps, "rate": rate} for gbps, rate in carried.items()],
            "rows": figures,
        }
    )


def _head(args: argparse.Namespace, kind: str, prompts: list[Prompt], carried: dict[float, float], device: str) -> None:
    from cacheflow import arrivals

    mean = sum(prompt.tokens for prompt in prompts) / len(prompts)
    store = "a store without limit" if args.store is None else f"a store of {args.store / 2**30:.4g} GiB"
    print(
        f"{args.model} on {args.gpus} {device}{each_fetch(args)}, {store}; {len(prompts):,} prompts of {mean:,.0f} "
        f"tokens in the mean, {kind} arrivals, at most {args.at_once} at once on a GPU"
    )
    offered = f"; the trace's own rate is {arrivals.rate(prompts):.2f}" if kind == "trace" else ""
    for gbps, rate in carried.items():
        print(f"{gbps:g} Gbps: {args.reference} carries {rate:.2f} prompts/s ({rate * mean:,.0f} tokens/s){offered}")
    print()


def _table(figures: list[dict[str, Any]]) -> None:
    headers = ["Gbps", "load", "evict", "policy", *(f"TTFT\n{q}" for q in ("mean", "p50", "p95", "p99"))]
    headers += ["back\nmean", "back\np95", "hit", "re-\ncomputed", "busy\ncompute", "busy\nlink", "prompts\n/s"]
    lines = []
    for row in figures:
        times = [_seconds(row["ttft_seconds"].get(q)) for q in ("mean", "p50", "p95", "p99")]
        times += [_seconds(row["returning_ttft_seconds"].get(q)) for q in ("mean", "p95")]
        shares = [f"{row[k]:.0%}" for k in ("hit_share", "recompute_share", "busy_compute", "busy_link")]
        names = [f"{row['gbps']:g}", _load(row), row["evict"], row["policy"]]
        lines.append([*names, *times, *shares, f"{row['rate']:.2f}"])
    print(common.table(lines, headers, right=[0, 1, *range(4, len(headers))]))
    print(
        "\nTTFT in s, simulated. load: rate over what the reference carries. back: prompts that share more than their\n"
        "first chunk with one before. hit: of all tokens those that the store had; recomputed: of those. busy: of the\n"
        "time of all GPUs."
    )


def _compact(figures: list[dict[str, Any]]) -> None:
    """A row per eviction and policy, a column per link and load."""
    columns = list(dict.fromkeys((row["gbps"], _load(row)) for row in figures))
    cells = {(row["evict"], row["policy"], row["gbps"], _load(row)): row for row in figures}
    best: dict[tuple[float, str], float] = {}
    for row in figures:
        at = row["gbps"], _load(row)
        best[at] = min(best.get(at, math.inf), row["ttft_seconds"]["mean"])
    lines = []
    for evict, policy in dict.fromkeys((row["evict"], row["policy"]) for row in figures):
        line = [evict, policy]
        for at in columns:
            row = cells[(evict, policy, *at)]
            mean, back = row["ttft_seconds"]["mean"], row["returning_ttft_seconds"].get("mean")
            line.append(
                f"{'*' if mean == best[at] else ''}{_short(mean)}{'' if back is None else f' ({_short(back)})'}"
            )
        lines.append(line)
    headers = ["evict", "policy", *(f"{gbps:g} Gbps\n{load}".rstrip() for gbps, load in columns)]
    print(common.table(lines, headers, right=range(2, len(headers))))
    print(
        "\nMean TTFT in s, simulated: of all prompts, and (of those that share more than their first chunk with one\n"
        "before). * best. Under the link's speed, the load: the rate over what the reference carries."
    )


def _load(row: dict[str, Any]) -> str:
    return "" if row["load"] is None else f"{row['load']:.2f}"


def _short(seconds: float) -> str:
    """Three digits, more only before the point."""
    return f"{seconds:.2f}" if seconds < 9.995 else f"{seconds:.1f}" if seconds < 99.95 else f"{seconds:,.0f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f}"
