"""cacheflow demo: the whole of it on this machine, in one table."""

from __future__ import annotations

import argparse
from argparse import RawDescriptionHelpFormatter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheflow.commands import _common as common

if TYPE_CHECKING:
    from cacheflow.demo import Report

DESCRIPTION = """\
Take a real Llama model and a real document, store the document's KV, forget it, and restore it under every policy.
The link between store and engine is limited, by default so that loading everything takes as long as recomputing
everything. Writes report.json, two pictures and a Perfetto trace per policy.
"""
EXAMPLES = """\
examples:
  cacheflow demo
  cacheflow demo --gbps 0.5                        a faster link than this machine's compute
  cacheflow demo --document notes.txt --question "Who is responsible?"
"""
LEGEND = """\
speed-up: over the better of recompute and load. bound: no schedule can be faster. simulated: the same policy in virtual
time, with costs measured in the same round. busy: share of the restoration inside ops. cells: (chunk, layer) pairs of
the prefix. error: of the first token's logits against a cold run, relative norm."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="restore a real model's KV under every policy, on this machine",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--document", type=Path, metavar="FILE", help="a text file; default: this package's LICENSE, 2000 tokens of it"
    )
    parser.add_argument("--question", help="what is asked about the document; default: one about its terms")
    common.add_device(parser)
    parser.add_argument("--gbps", type=common.positive, help="of the link, decimal Gbit/s; default: balance")
    parser.add_argument(
        "--rounds",
        type=common.count,
        default="3",
        help="each measures costs and runs every policy; default %(default)s",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print report.json instead of the table")


def run(args: argparse.Namespace) -> int:
    from cacheflow import demo, trials

    with common.steps() as step:
        report = demo.run(
            args.out,
            document=args.document,
            question=args.question or demo.QUESTION,
            device=args.device,
            dtype=args.dtype,
            backend=args.backend,
            gbps=args.gbps,
            rounds=args.rounds,
            progress=step,
        )
    if args.json:
        common.print_json(asdict(report))
    else:
        _print(report, args.out)
    beaten = [row.policy for row in report.rows if row.ratio_to_bound < trials.SLACK]
    if beaten:
        raise RuntimeError(f"{', '.join(beaten)} ran below the lower bound: the costs or the bound are wrong")
    return 0


def _print(report: Report, out: Path) -> None:
    print(
        f"{report.model}; {report.document}, {report.document_tokens} tokens ({report.kv_bytes / 2**20:.0f} MiB of KV) "
        f"in chunks of {report.chunk_tokens}, prompt {report.prompt_tokens} tokens\n"
        f"link {report.gbps:.3f} Gbps, {report.dtype} on {report.device}, kernels {report.backend}, "
        f"torch {report.torch}, {report.threads} threads, medians of {report.rounds} rounds\n"
    )
    headers = [
        "policy", "TTFT\ns", "speed-\nup", "over\nbound", "over\nsimulated", "busy\ncompute", "busy\nload",
        "cells\ncomputed", "cells\nloaded", "error",
    ]  # fmt: skip
    rows = []
    for row in report.rows:
        cells = row.computed_cells + row.loaded_cells
        rows.append(
            [
                row.policy,
                f"{row.ttft_s:.3f}",
                f"{row.speedup_vs_best_single:.2f}x",
                f"{row.ratio_to_bound:.3f}",
                f"{row.ratio_to_simulated:.3f}",
                f"{row.busy_compute:.0%}",
                f"{row.busy_load:.0%}",
                f"{row.computed_cells / cells:.0%}",
                f"{row.loaded_cells / cells:.0%}",
                f"{row.logits_rel_err:.1e}",
            ]
        )
    print(common.table(rows, headers, right=range(1, len(headers))))
    print()
    by_text: dict[str, list[str]] = {}
    for row in report.rows:
        by_text.setdefault(row.text, []).append(row.policy)
    for text, policies in by_text.items():
        who = "every policy" if len(policies) == len(report.rows) else ", ".join(policies)
        print(f"answer of {who}: {' '.join(text.split())}")
    print(
        f"recompute over Transformers' unchunked prefill: {report.recompute_vs_transformers:.3f}\n"
        f"load over bytes / bandwidth: {report.load_vs_bytes:.3f}\n"
        f"cold logits against Transformers': {report.transformers_logits_rel_err:.1e}\n\n"
        f"{LEGEND}\nwritten to {out}: report.json, POLICY-lanes.png, POLICY-plane.png, POLICY.perfetto.json"
    )
