"""What the executor adds: TTFT less the critical path of its own recorded ops, per policy, on the demo's model.

    python profiling/bench_executor.py
    python profiling/bench_executor.py --tokens 1K --repeats 9 --json

The critical path is the longest chain of recorded ops through stream order and fetch -> copy -> compute. What a TTFT is
longer than it went into deciding, preparing, handing over and waking up.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from machine import about

from cacheflow import demo_model, heap, trials
from cacheflow.commands import _common as common
from cacheflow.engine import Engine
from cacheflow.policies import available
from cacheflow.stores import Link, MemoryStore

CHUNK = 128
SUFFIX = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=common.tokens, default="2K", help="of the prefix; default %(default)s")
    parser.add_argument("--repeats", type=common.count, default="5", help="runs per policy; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args()
    heap.keep_freed_memory()
    rows = []
    with common.steps() as step:
        model = demo_model.ensure(step)
        link = Link(MemoryStore(1 << 30), gbps=float("inf"))
        with Engine(model.folder, link, chunk_tokens=CHUNK) as engine:
            step("measuring costs")
            engine.warmup()
            backend = engine.model.ops.NAME
            tokens = torch.randint(engine.model.config.vocab_size, (args.tokens + SUFFIX,)).tolist()
            step("storing")
            engine.save(tokens[: args.tokens])
            trials.balance(engine, [tokens], None)
            for policy in available():
                step(f"restoring: {policy}")
                shares, milliseconds, ops = [], [], 0
                for _ in range(args.repeats):
                    [restored] = engine.restore([tokens], policy=policy)
                    engine.release(restored)
                    path = restored.timeline.critical_path()
                    shares.append(1 - path / restored.ttft)
                    milliseconds.append((restored.ttft - path) * 1e3)
                    ops = len(restored.timeline.spans)
                rows.append((policy, restored.ttft, ops, statistics.median(milliseconds), statistics.median(shares)))
    if args.json:
        names = ("policy", "ttft_s", "ops", "overhead_ms", "overhead_share")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1))
        return
    print(f"executor overhead, {args.tokens} + {SUFFIX} tokens of {model.label}, median of {args.repeats} runs")
    facts = about("torch", "numpy")
    print(f"{facts['cpu']}, {torch.get_num_threads()} threads, {facts['versions']}")
    print(f"kernels {backend}, commit {facts['commit']}\n")
    shown = [(p, f"{ttft:.3f}", ops, f"{ms:.2f}", f"{share:.2%}") for p, ttft, ops, ms, share in rows]
    print(common.table(shown, ["policy", "TTFT\ns", "ops", "overhead\nms", "of TTFT"], right=range(1, 5)))


if __name__ == "__main__":
    main()
