"""One command for a machine with a GPU: does everything run there, how fast, and is what it restores right?

    python scripts/gpu_check.py
    python scripts/gpu_check.py --only tests

Compiles every kernel test for the GPU that is here, runs the kernel benchmarks (short) and restores one prompt under
every policy with its timeline. Ends with a table; writes the same as JSON, and the timelines, into --out. Takes up to
eight minutes. Exit status 1: something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cacheflow import trials
from cacheflow.commands import _common as common
from cacheflow.demo import pictures
from cacheflow.engine import Engine
from cacheflow.policies import available
from cacheflow.stores import Link, MemoryStore
from kernels import backend
from models.config import ModelConfig
from models.decoder import Decoder
from models.weights import random_weights

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("tests", "benchmarks", "restoration")
# Tests that compile kernels: those of the ops, of the variants, and of the engine on a GPU.
TESTS = (
    "tests/kernels/test_recompute.py",
    "tests/kernels/test_transfer.py",
    "tests/kernels/test_pointwise.py",
    "tests/kernels/test_attention.py",
    "tests/kernels/test_attention_forms.py",
    "tests/kernels/test_staged.py",
    "tests/variants",
    "tests/test_gpu.py",
)
BENCHMARKS = ("bench_attention", "bench_recompute", "bench_transfer")
# Seconds before a step counts as failed. Together less than eight minutes.
TESTS_TIMEOUT, BENCHMARK_TIMEOUT = 240.0, 60.0
MODEL, LAYERS = "llama-3.1-8b", 8
PREFIX, SUFFIX, CHUNK = 16384, 128, 512
TOLERANCE = 3e-2  # of bf16 logits against a cold run, relative norm; a guess


@dataclass(frozen=True)
class Result:
    """One line of the table. details: what the line was made of, for the JSON."""

    step: str
    what: str
    ok: bool
    seconds: float
    says: str
    details: Any = field(default=None, repr=False)


def run_tests() -> list[Result]:
    """Each file in a process of its own, as many at a time as there are cores for two each."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return list(pool.map(_test, TESTS))


def _test(path: str) -> Result:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", path]
    command += ["-m", "gpu"] if path.endswith("test_gpu.py") else []
    done, seconds = _process(command, TESTS_TIMEOUT, CACHEFLOW_TEST_DEVICE="cuda")
    if done is None:
        return Result("tests", path, False, seconds, f"more than {TESTS_TIMEOUT:.0f} s")
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]
    failed = re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.M)
    return Result("tests", path, done.returncode == 0, seconds, last, failed and done.stdout[-20_000:])


def run_benchmark(name: str) -> Result:
    """The short form of a kernel benchmark."""
    command = [sys.executable, str(ROOT / "profiling" / f"{name}.py"), "--quick", "--json"]
    done, seconds = _process(command, BENCHMARK_TIMEOUT)
    if done is None:
        return Result("benchmarks", name, False, seconds, f"more than {BENCHMARK_TIMEOUT:.0f} s")
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        return Result("benchmarks", name, False, seconds, (done.stderr or done.stdout).strip()[-300:])
    speedups = [row["speedup"] for row in report["rows"] if row["speedup"]]
    says = f"{len(report['rows'])} rows, {len(report['failures'])} failed checks"
    if speedups:
        says += f"; best rival over ours {min(speedups):.2f} to {max(speedups):.2f}"
    return Result("benchmarks", name, done.returncode == 0, seconds, says, report)


def run_restoration(
    out: Path,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    config: ModelConfig | None = None,
    prefix: int = PREFIX,
    suffix: int = SUFFIX,
    chunk: int = CHUNK,
    tolerance: float = TOLERANCE,
) -> list[Result]:
    """One prompt, random weights in the shape of a real model's first layers, every policy; the link balanced.

    Writes two pictures and a Perfetto trace per policy into `out`.
    """
    if config is None:
        whole = ModelConfig.preset(MODEL)
        config = replace(whole, num_layers=LAYERS, windows=whole.windows[:LAYERS])
    model = Decoder(config, random_weights(config, 0, dtype, device), backend(None, device))
    link = Link(MemoryStore(16 << 30), gbps=float("inf"))
    results = []
    with Engine(model, link, chunk_tokens=chunk, cache_tokens=2 * (prefix + suffix)) as engine:
        start = time.perf_counter()
        engine.warmup()
        warm = time.perf_counter() - start
        results.append(Result("restoration", "warm-up", True, warm, f"kernels {engine.model.ops.NAME}, {dtype}, costs"))
        tokens = torch.randint(
            config.vocab_size, (prefix + suffix,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        engine.save(tokens[:prefix])
        [cold] = trials.balance(engine, [tokens], None)
        assert cold.logits is not None
        outcomes = trials.run(engine, [tokens], list(available()), rounds=1)
        for outcome in outcomes:
            trial = outcome.typical
            [restored] = trial.batch
            assert restored.logits is not None
            error = trials.relative_error(restored.logits, cold.logits)
            busy = trial.summary.busy
            says = (
                f"TTFT {trial.mean_ttft * 1e3:.1f} ms, {trials.speedup(outcomes, outcome.policy):.2f}x the better of "
                f"recompute and load, over bound {trial.ratio_to_bound:.2f}, over simulated "
                f"{trial.ratio_to_simulated:.2f}, busy compute {busy['compute']:.0%} load {busy['fetch']:.0%}, "
                f"error {error:.1e}"
            )
            ok = error <= tolerance and not restored.failures
            details = {
                "ttft_s": trial.mean_ttft,
                "bound_s": trial.bound,
                "simulated_s": trial.simulated,
                "busy": dict(busy),
                "overlap": trial.summary.overlap,
                "error": error,
                "gbps": link.bandwidth * 8 / 1e9,
            }
            results.append(Result("restoration", outcome.policy, ok, trial.mean_ttft, says, details))
        pictures(out, outcomes)
    return results


def _process(
    command: Sequence[str], timeout: float, **environment: str
) -> tuple[subprocess.CompletedProcess[str] | None, float]:
    """None: it took too long."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, timeout=timeout, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return None, timeout
    return done, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=STEPS, help="repeatable; default: all")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_check"), metavar="FOLDER", help="default %(default)s")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu_check: PyTorch sees no GPU here; `make test` checks everything else", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT / "profiling"))  # programs, not a package
    from machine import about

    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    facts = about("torch", "triton", "numpy") | {
        "gpu": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda or torch.version.hip),
    }
    for name, value in facts.items():
        print(f"{name:9}{value}")
    results: list[Result] = []
    steps = args.only or STEPS
    if "tests" in steps:
        results += run_tests()
    if "benchmarks" in steps:
        results += map(run_benchmark, BENCHMARKS)
    if "restoration" in steps:
        try:
            results += run_restoration(args.out)
        except Exception as error:  # the other steps' results are worth printing
            results.append(Result("restoration", "", False, 0.0, f"{type(error).__name__}: {error}"))
    seconds = time.perf_counter() - begun
    rows = [[r.step, r.what, "ok" if r.ok else "FAILED", f"{r.seconds:.1f}", r.says] for r in results]
    print(f"\n{common.table(rows, ['step', 'what', '', 's', ''], right=[3])}\n\n{seconds:.0f} s in all")
    report = {**facts, "seconds": seconds, "results": [asdict(result) for result in results]}
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {args.out}: report.json, and per policy -lanes.png, -plane.png, .perfetto.json")
    return int(not all(result.ok for result in results))


if __name__ == "__main__":
    sys.exit(main())
