"""What planning costs: milliseconds until a policy has its first op for a batch, against tokens, layers and requests.

    python profiling/bench_planner.py
    python profiling/bench_planner.py --policy pipelined --repeats 20 --json

The requests are equal, their costs those of Llama-3.1-8B's layers on an H100 behind 10 Gbps. A policy plans when it is
first asked: what it does then for a batch that has just come is what is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

from machine import about

from cacheflow.commands import _common as common
from cacheflow.costs.base import ModelShape
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.plane import Plane
from cacheflow.policies import available, find
from cacheflow.request import Request
from models.config import ModelConfig

CHUNK, SUFFIX = 512, 64
BATCHES = (
    (8192, 32, 1),
    (131072, 32, 1),
    (131072, 64, 1),
    (8192, 32, 16),
    (131072, 64, 16),
)  # tokens, layers, requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=common.listed(str), metavar="NAMES", help="default: all")
    parser.add_argument("--repeats", type=common.count, default="9", help="of which the median; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args()
    names = args.policy or list(available())
    rows = [(batch, {name: _milliseconds(name, *batch, args.repeats) for name in names}) for batch in BATCHES]
    if args.json:
        fields = ("tokens", "layers", "requests")
        print(json.dumps([dict(zip(fields, batch, strict=True)) | times for batch, times in rows], indent=1))
        return
    facts = about("numpy")
    print(f"ms until the first ops, median of {args.repeats}; {facts['cpu']}, {facts['versions']}\n")
    shown = [[common.short(batch[0]), *batch[1:], *(f"{times[n]:.2f}" for n in names)] for batch, times in rows]
    print(common.table(shown, ["tokens", "layers", "requests", *names], right=range(3 + len(names))))


def _milliseconds(name: str, tokens: int, layers: int, requests: int, repeats: int) -> float:
    config = ModelShape.of(ModelConfig.preset("llama-3.1-8b"), dtype_bytes=2)
    costs = Roofline(replace(config, layers=layers, windows=(None,) * layers), device("H100"), bandwidth=10 * GBPS)
    batch = [Request.of(f"r{i}", prefix=tokens, suffix=SUFFIX, chunk=CHUNK, layers=layers) for i in range(requests)]
    seconds = []
    for _ in range(repeats):
        policy = find(name)(costs, staging_cells=CHUNK * layers)
        planes = [Plane(request) for request in batch]
        start = time.perf_counter()
        for plane in planes:
            policy.add(plane)
        policy.next("link", 0.0)
        policy.next("compute", 0.0)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


if __name__ == "__main__":
    main()
