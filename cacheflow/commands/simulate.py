"""cacheflow simulate: what each policy would take on a GPU and a link that need not be here."""

from __future__ import annotations

import argparse
import math
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from cacheflow.commands import _common as common
from cacheflow.costs.roofline import DEVICES, GBPS, Device, Roofline, device

if TYPE_CHECKING:
    from cacheflow.costs.base import Costs, ModelShape
    from cacheflow.policies import Policy
    from cacheflow.request import Request
    from cacheflow.simulate import Simulation

DESCRIPTION = """\
Predict the time to first token of every policy by running it in virtual time, over a grid of link speeds and prefix
lengths, for a prompt whose prefix is stored and whose suffix is new. Ops take what a roofline of the model's shape and
the device's numbers says. `bound` is the lower bound: no policy can be faster.
"""
EXAMPLES = """\
examples:
  cacheflow simulate
  cacheflow simulate --model qwen3-8b --device A100-40G --gbps 25,100 --tokens 16K,32K
  cacheflow simulate --device MyGPU --gemm 400e12 --attention 200e12 --memory 3e12 --host 50e9
  cacheflow simulate --batch 8 --tokens 8K --policy load,two-pointer --json
  cacheflow simulate --fetch-us 1000 --gbps 40 --tokens 1K,4K,16K
  cacheflow simulate --policy token --gbps 40 --tokens 8K --trace token.json       then open it in ui.perfetto.dev
"""
SLACK = 0.98  # a bound that is beaten by more than this has a mistake in it, or the simulation has


@dataclass(frozen=True)
class Cell:
    """Link speed and prefix length, and what came out: seconds to the first token by policy (the mean over the batch),
    and the lower bound of that."""

    gbps: float
    tokens: int
    ttft: dict[str, float]
    bound: float

    @property
    def best(self) -> float:
        return min(self.ttft.values())

    @property
    def ratio(self) -> float:
        """The best policy's time over the bound."""
        return self.best / self.bound


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="predict every policy's time to first token",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    grid = parser.add_argument_group("grid (comma-separated lists)")
    grid.add_argument(
        "--gbps", type=common.listed(common.positive), default="10,40,80", help="link, Gbit/s; default %(default)s"
    )
    grid.add_argument(
        "--tokens",
        type=common.listed(common.tokens),
        default="4K,8K,16K,32K,64K,128K",
        help="cached prefix, tokens, K = 1024; default %(default)s",
    )
    grid.add_argument(
        "--policy", type=common.listed(str), metavar="NAMES", help="policies by name, or module:Class; default all"
    )
    prompt = parser.add_argument_group("requests")
    prompt.add_argument("--suffix", type=common.tokens, default="64", help="new tokens; default %(default)s")
    prompt.add_argument("--chunk", type=common.tokens, default="512", help="tokens of a chunk; default %(default)s")
    prompt.add_argument(
        "--batch", type=common.count, default="1", help="equal requests at once; times are their mean; default 1"
    )
    add_parts(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON, times in seconds, and nothing else")
    one = "of one policy, link speed and length: "
    output.add_argument("--trace", type=common.writable, metavar="OUT.json", help=one + "what ran when, for Perfetto")
    output.add_argument("--lanes", type=common.writable, metavar="OUT.png", help=one + "the same as a picture")
    output.add_argument("--plane", type=common.writable, metavar="OUT.png", help=one + "which cell came from where")


def add_parts(parser: argparse.ArgumentParser) -> None:
    """--model, --device, a device's numbers and --fetch-us, for the functions below."""
    parts = parser.add_argument_group("model, device and link")
    parts.add_argument(
        "--model",
        default="llama-3.1-8b",
        help="a preset's name (an unknown one lists them), or a checkpoint's folder or config.json; "
        "default %(default)s",
    )
    parts.add_argument(
        "--device",
        default="H100",
        help=f"{', '.join(DEVICES)}, or another name and all of the numbers below; default %(default)s",
    )
    parts.add_argument("--gemm", type=common.positive, help="reached in large GEMMs, FLOP/s, e.g. 245e12")
    parts.add_argument("--attention", type=common.positive, help="reached in prefill attention, FLOP/s, e.g. 131e12")
    parts.add_argument("--memory", type=common.positive, help="device memory, bytes/s, e.g. 2.7e12")
    parts.add_argument("--host", type=common.positive, help="pinned host memory to device, bytes/s, e.g. 45e9")
    parts.add_argument(
        "--fetch-us", type=common.positive, help="microseconds that every fetch takes besides its bytes; default none"
    )


def run(args: argparse.Namespace) -> int:
    from cacheflow import policies

    model, machine = shape(args.model), gpu(args)
    chosen = {name: policies.find(name) for name in args.policy or policies.available()}
    single = len(args.gbps) == len(args.tokens) == len(chosen) == 1
    if (args.trace or args.lanes or args.plane) and not single:
        raise ValueError(
            f"{len(args.gbps)} link speeds, {len(args.tokens)} lengths and {len(chosen)} policies are too many for one "
            "--trace, --lanes or --plane; give one --gbps, one --tokens and one --policy"
        )
    cells = []
    grid = [(gbps, tokens) for gbps in args.gbps for tokens in args.tokens]
    for gbps, tokens in common.progress(grid, "simulating", unit="cell"):
        costs = Roofline(model, machine, bandwidth=gbps * GBPS, fetch_seconds=fetch_seconds(args))
        cells.append(_simulate(args, gbps, tokens, chosen, costs))
    report = _report if args.json else _table
    report(args, machine, cells)
    for path in filter(None, (args.trace, args.lanes, args.plane)):
        how = "; open it in ui.perfetto.dev" if path == args.trace else ""
        print(f"wrote {path}{how}", file=sys.stderr)
    beaten = [cell for cell in cells if cell.ratio < SLACK]
    for cell in beaten:
        at = f"{cell.gbps:g} Gbps and {common.short(cell.tokens)} tokens"
        print(f"cacheflow: at {at} a policy takes {cell.ratio:.3f} of the lower bound: one is wrong", file=sys.stderr)
    return 1 if beaten else 0


def _simulate(
    args: argparse.Namespace, gbps: float, tokens: int, chosen: dict[str, type[Policy]], costs: Costs
) -> Cell:
    from cacheflow import bounds
    from cacheflow.request import Request
    from cacheflow.simulate import Simulation

    windows = costs.shape.windows
    requests = []
    for i in range(args.batch):
        request = Request.of(f"r{i}", prefix=tokens, suffix=args.suffix, chunk=args.chunk, layers=len(windows))
        requests.append(Request(request.id, request.boundaries, request.stored, windows))
    ttft, lowest = {}, bounds.lower(requests, costs)
    for name, policy in chosen.items():
        simulation = Simulation(policy(costs), requests)
        ttft[name] = fmean(simulation.ttft.values())
        _draw(args, f"{name}, {common.short(tokens)} tokens, {gbps:g} Gbps", simulation, requests, lowest)
    return Cell(gbps, tokens, ttft, bounds.lower_mean(requests, costs))


def _draw(args: argparse.Namespace, title: str, simulation: Simulation, requests: list[Request], bound: float) -> None:
    if args.trace:
        from cacheflow import perfetto

        marks = {f"{name} first token": seconds for name, seconds in simulation.ttft.items()}
        perfetto.write(simulation.timeline, args.trace, requests=requests, marks=marks)
    if args.lanes or args.plane:
        from cacheflow import plots

        if args.lanes:
            by_id = {request.id: request for request in requests}
            ttft: Any = simulation.ttft if len(requests) > 1 else simulation.ttft[requests[0].id]
            plots.lanes(simulation.timeline, args.lanes, title=title, bound=bound, ttft=ttft, requests=by_id)
        if args.plane:
            plots.plane(requests[0], simulation.timeline, args.plane, title=title)


def shape(model: str) -> ModelShape:
    """Of a preset's name, a checkpoint's folder or its config.json. Raises ValueError for anything else."""
    from cacheflow.costs.base import ModelShape
    from models.config import ModelConfig

    path = Path(model)
    if path.exists():
        config = ModelConfig.from_folder(path.parent if path.name == "config.json" else path)
    else:
        try:
            config = ModelConfig.preset(model)
        except ValueError as error:
            raise ValueError(f"{error}, and there is no folder of that name") from None
    return ModelShape.of(config, 4 if config.dtype == "float32" else 2)


def gpu(args: argparse.Namespace) -> Device:
    """The device that the arguments name. Raises ValueError for one that is neither known nor complete."""
    names = ("gemm", "attention", "memory", "host")
    numbers = {name: value for name in names if (value := getattr(args, name)) is not None}
    name = next((known for known in DEVICES if known.casefold() == args.device.casefold()), args.device)
    if name not in DEVICES and len(numbers) < len(names):
        missing = ", ".join(f"--{name}" for name in names if name not in numbers)
        raise ValueError(f"device {name!r} is not one of {', '.join(DEVICES)}; to name another give also {missing}")
    return device(name, **numbers)


def fetch_seconds(args: argparse.Namespace) -> float:
    """What every fetch takes besides its bytes."""
    return (args.fetch_us or 0.0) * 1e-6


def each_fetch(args: argparse.Namespace) -> str:
    """The same for people; nothing where it is nothing."""
    return f", {args.fetch_us:,g} us a fetch" if args.fetch_us else ""


def _report(args: argparse.Namespace, machine: Device, cells: Iterable[Cell]) -> None:
    common.print_json(
        {
            "model": args.model,
            "device": machine.name,
            "fetch_seconds": fetch_seconds(args),
            "suffix": args.suffix,
            "chunk": args.chunk,
            "batch": args.batch,
            "cells": [
                {
                    "gbps": cell.gbps,
                    "tokens": cell.tokens,
                    "ttft_seconds": cell.ttft,
                    "bound_seconds": cell.bound,
                    "best_over_bound": cell.ratio,
                }
                for cell in cells
            ],
        }
    )


def _table(args: argparse.Namespace, machine: Device, cells: list[Cell]) -> None:
    what = "mean TTFT" if args.batch > 1 else "TTFT"
    each = f"{args.batch} requests at once, " if args.batch > 1 else ""
    print(
        f"{args.model} on {machine.name}{each_fetch(args)}, {each}chunk {args.chunk}, suffix {args.suffix} tokens. "
        f"{what} in ms, simulated; * best\n"
    )
    names = list(cells[0].ttft)
    headers = ["Gbps", "tokens", *(name.replace("-", "-\n") for name in names), "bound", "best/\nbound"]
    rows = []
    for cell in cells:
        times = [_ms(seconds, math.isclose(seconds, cell.best, rel_tol=1e-9)) for seconds in cell.ttft.values()]
        rows.append([f"{cell.gbps:g}", common.short(cell.tokens), *times, _ms(cell.bound), f"{cell.ratio:.3f}"])
    print(common.table(rows, headers, right=range(len(headers))))


def _ms(seconds: float, best: bool = False) -> str:
    return f"{'*' if best else ''}{seconds * 1e3:,.1f}"
