"""How near to the optimum policies come, where it is known: tiny planes; and to lower bounds, for batches and suffixes.

python -m tests.cacheflow.optimum                       # all of it, about four minutes on an idle core
python -m tests.cacheflow.optimum tiny --planes 2000
python -m tests.cacheflow.optimum batches --seeds 4 --policy staircase
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean, median

import numpy as np

from cacheflow import bounds, policies
from cacheflow.commands import _common as common
from cacheflow.costs.base import Costs, ModelShape
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.exact import Objective
from cacheflow.op import COMPUTE, Op
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from models.config import ModelConfig
from tests.cacheflow.strategies import Affine

LLAMA = ModelShape.of(ModelConfig.preset("llama-3.1-8b"), 2)
CHUNK = 512
LINKS = (10, 40, 80)  # Gbps
ONE_BY_ONE = ("layerwise-load", "token", "layer")  # published policies that serve a batch in the order in which it came

AIMS: tuple[tuple[str, int | None, Objective], ...] = (
    ("TTFT of one", 1, "worst"),
    ("mean TTFT of two", 2, "mean"),
    ("worst TTFT of two", 2, "worst"),
    ("restoration", None, "restoration"),
)  # title, requests, objective


class FreeSuffix(Affine):
    """A suffix that takes no time, so that one request's does not delay another's restoration."""

    prefix: dict[str, int]

    def seconds(self, op: Op) -> float:
        if op.kind == COMPUTE and all(part.start >= self.prefix[part.request] for part in op.parts):
            return 0.0
        return super().seconds(op)


def tiny(choose: random.Random, count: int, chunks: int, layers: int) -> tuple[list[Request], FreeSuffix]:
    """A hole now and then, and a link somewhere around balance."""
    project, pair = choose.choice([0.04, 0.1, 0.3]), choose.choice([0.0, 0.02, 0.2])
    batch, compute, cells = [], 0.0, 0
    for id in "ab"[:count]:
        prefix, suffix = chunks * 4 - choose.randrange(4), choose.randrange(1, 4)
        holes = [c for c in range(chunks) if choose.random() < 0.1]
        batch.append(Request.of(id, prefix=prefix, suffix=suffix, chunk=4, layers=layers, holes=holes))
        compute += layers * (prefix * (1 + project) + pair * prefix**2 / 2)
        cells += layers * prefix
    bandwidth = 8 * cells / compute * 10 ** choose.uniform(-0.5, 0.8)
    costs = FreeSuffix((None,) * layers, project=project, pair=pair, bandwidth=bandwidth)
    costs.prefix = {request.id: request.prefix for request in batch}
    return batch, costs


def planes(seed: int, count: int) -> Iterator[tuple[list[Request], FreeSuffix]]:
    """Random tiny planes, one of 6 x 4 and two of 3 x 3 in turn."""
    choose = random.Random(seed)
    for i in range(count):
        yield tiny(choose, 2, 3, 3) if i % 2 else tiny(choose, 1, 6, 4)


def with_suffix(costs: FreeSuffix) -> Affine:
    """The same, but the suffix takes its time."""
    marginals = {"project": costs.project_marginal, "pair": costs.pair_marginal}
    return Affine(costs.shape.windows, **marginals, bandwidth=costs.bandwidth)


def reached(policy: str, batch: Sequence[Request], costs: Costs, objective: Objective) -> float:
    """Seconds of the objective in virtual time."""
    simulation = Simulation(policies.find(policy)(costs), batch)
    if objective == "restoration":
        return simulation.timeline.summary(batch).end
    return (fmean if objective == "mean" else max)(simulation.ttft.values())


def lognormal(count: int, seed: int, suffix: int) -> list[Request]:
    """Prefixes with a median of 12K tokens, sigma 0.8."""
    lengths = 12288 * np.exp(0.8 * np.random.default_rng(seed).standard_normal(count))
    tokens = np.clip(lengths, CHUNK, 131072) // CHUNK * CHUNK
    return [llama_request(f"r{i}", int(n), suffix) for i, n in enumerate(tokens)]


def llama_request(id: str, prefix: int, suffix: int) -> Request:
    return Request.of(id, prefix=prefix, suffix=suffix, chunk=CHUNK, layers=LLAMA.layers)


def llama_costs(gbps: float) -> Roofline:
    return Roofline(LLAMA, device("H100"), bandwidth=gbps * GBPS, fetch_seconds=10e-6)


def llama_ttft(policy: str, costs: Costs, batch: Sequence[Request]) -> list[float]:
    made = policies.find(policy)(costs, staging_cells=CHUNK * LLAMA.layers)
    return list(Simulation(made, batch).ttft.values())


# Tables


def tiny_table(count: int) -> None:
    """Every policy over the exact optimum."""
    rows = []
    cases = list(planes(0, count))
    for title, size, objective in common.progress(AIMS, "searching", unit="objective"):
        ratios: dict[str, list[tuple[float, bool]]] = {name: [] for name in policies.available()}
        for batch, free in cases:
            if len(batch) == size or not size:
                costs = free if objective == "restoration" else with_suffix(free)
                optimum, stored = bounds.exact(batch, costs, objective), all(all(r.stored) for r in batch)
                for name, of in ratios.items():
                    of.append((reached(name, batch, costs, objective) / optimum, stored))
        for name, of in ratios.items() if ratios["load"] else ():
            within, worst = fmean(ratio <= 1.01 for ratio, _ in of), max(of)[0]
            without_holes = max((ratio for ratio, stored in of if stored), default=1.0)
            middle = median(ratio for ratio, _ in of)
            rows.append([title, name, f"{within:.1%}", f"{middle:.4f}", f"{worst:.3f}", f"{without_holes:.3f}"])
    print(f"{count} random cases, one plane of 6 x 4 (chunks x layers) or two of 3 x 3: over the exact optimum\n")
    headers = ["objective", "policy", "within\n1 %", "median", "worst", "worst\nwithout holes"]
    print(common.table(rows, headers, right=range(2, len(headers))))
    print(
        "\nrestoration: until all prefixes are back, if suffixes took no time. That is what staircase plans; "
        "layerwise-load\nand pipelined aim at the first token alone.\n"
    )


def batch_table(policy: str, seeds: int) -> None:
    """A policy against bounds and others, batches of lengths that differ."""
    print(
        f"{policy}, Llama-3.1-8B on H100, log-normal prefixes (median 12K, sigma 0.8), {seeds} batches a row: "
        "mean (highest)\n"
    )
    rows = []
    for count, gbps, suffix in common.progress(list(product((8, 32), LINKS, (64, 512))), "simulating", unit="row"):
        costs = llama_costs(gbps)
        columns: list[list[float]] = [[] for _ in range(5)]
        for seed in range(seeds):
            batch = lognormal(count, seed, suffix)
            ours, theirs = llama_ttft(policy, costs, batch), llama_ttft("two-pointer", costs, batch)
            in_order = sorted(batch, key=lambda request: request.prefix)
            others = [fmean(llama_ttft(name, costs, in_order)) for name in ONE_BY_ONE if name != policy]
            ratios = (
                fmean(ours) / bounds.lower_mean(batch, costs),
                max(ours) / bounds.lower(batch, costs),
                fmean(ours) / fmean(theirs),
                max(ours) / max(theirs),
                fmean(ours) / min(others),
            )
            for column, ratio in zip(columns, ratios, strict=True):
                column.append(ratio)
        rows.append([count, gbps, suffix, *(f"{fmean(column):.3f} ({max(column):.3f})" for column in columns)])
    headers = [
        "requests", "Gbps", "suffix", "mean over\nbound", "worst over\nbound", "mean over\ntwo-pointer's",
        "worst over\ntwo-pointer's", "mean over best\nother, in order",
    ]  # fmt: skip
    print(common.table(rows, headers, right=range(len(headers))))
    print(
        f"\nother, in order: {', '.join(name for name in ONE_BY_ONE if name != policy)}, the shortest prefix first.\n"
    )


def suffix_table() -> None:
    """What restoring first, and running the suffix afterwards, costs."""
    suffixes = (64, 256, 512, 1024, 2048)
    print("Llama-3.1-8B on H100, one request: TTFT over the bound, staircase | pipelined, by tokens of the suffix\n")
    rows = []
    for gbps, tokens in common.progress(list(product(LINKS, (4, 8, 16, 32, 64, 128))), "simulating", unit="row"):
        costs, cells = llama_costs(gbps), []
        for suffix in suffixes:
            request = [llama_request("a", tokens * 1024, suffix)]
            staircase, pipelined = (llama_ttft(name, costs, request)[0] for name in ("staircase", "pipelined"))
            bound = bounds.lower(request, costs)
            cells.append(f"{staircase / bound:.3f} | {pipelined / bound:.3f}")
        rows.append([gbps, f"{tokens}K", *cells])
    headers = ["Gbps", "tokens", *map(str, suffixes)]
    print(common.table(rows, headers, right=range(len(headers))))


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.cacheflow.optimum", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("tiny", "batches", "suffix")
    parser.add_argument("part", nargs="*", help=f"which tables, of {', '.join(parts)}; default all")
    parser.add_argument("--planes", type=common.count, default="500", help="of `tiny`; default %(default)s")
    parser.add_argument("--seeds", type=common.count, default="20", help="batches a row; default %(default)s")
    parser.add_argument("--policy", default="pipelined", help="of `batches`; default %(default)s")
    args = parser.parse_args()
    chosen = args.part or parts
    if not set(chosen) <= set(parts):
        parser.error(f"{' '.join(args.part)} are not all tables; choose of {', '.join(parts)}")
    if "tiny" in chosen:
        tiny_table(args.planes)
    if "batches" in chosen:
        batch_table(args.policy, args.seeds)
    if "suffix" in chosen:
        suffix_table()


if __name__ == "__main__":
    main()
