"""cacheflow restore: one document, one question, one policy."""

from __future__ import annotations

import argparse
from argparse import RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from cacheflow.commands import _common as common

DESCRIPTION = """\
Answer a question about a document whose KV is in a store, by recomputing and loading at once. What the store lacks is
computed and stored, so the first run is a cold one and the second restores.
"""
EXAMPLES = """\
examples:
  cacheflow restore --document README.md --question "What is this?" --store /tmp/kv
  cacheflow restore --document README.md --question "And for whom?" --store /tmp/kv --policy token --gbps 0.2
  cacheflow restore --document notes.txt --question "When?" --store /tmp/kv --trace restore.json
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "restore",
        help="answer a question about a stored document",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    common.add_model(parser)
    common.add_engine(parser)
    parser.add_argument("--store", required=True, help="a folder, or memory:SIZE")
    parser.add_argument("--document", type=Path, required=True, metavar="FILE", help="a text file")
    parser.add_argument("--question", required=True, help="put behind the document")
    parser.add_argument("--policy", default="pipelined", help="default %(default)s")
    parser.add_argument(
        "--answer-tokens", type=common.count, default="48", help="most tokens of the answer; default %(default)s"
    )
    parser.add_argument("--trace", type=common.writable, metavar="OUT.json", help="what ran when, for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds, and nothing else")


def run(args: argparse.Namespace) -> int:
    from cacheflow import perfetto
    from cacheflow.text import Tokenizer, read_document

    text = read_document(args.document)
    with common.steps() as step:
        folder = common.model_folder(args.model, step)
        tokenizer = Tokenizer.of(folder)
        prompt = tokenizer.encode(text) + tokenizer.encode(f"\n\nQuestion: {args.question}\nAnswer:")
        with common.engine(args, folder, policy=args.policy) as engine:
            step("measuring costs")
            engine.warmup()
            step("restoring")
            [generated] = engine.generate([prompt], args.answer_tokens)
            assert engine.costs is not None
            restored, backend = generated.restored, engine.model.ops.NAME
            summary = restored.timeline.summary([restored.request], engine.costs)
    if args.trace is not None:
        perfetto.write(restored.timeline, args.trace, requests=[restored.request])
    cells = {source: amount.cells for source, amount in summary.prefix.items()}
    report = {
        "policy": args.policy,
        "device": args.device,
        "dtype": args.dtype,
        "backend": backend,
        "prompt_tokens": len(prompt),
        "prefix_tokens": restored.request.prefix,
        "ttft": restored.ttft,
        "lookup": restored.lookup_seconds,
        "computed_cells": cells["compute"],
        "loaded_cells": cells["load"],
        "busy_compute": summary.busy["compute"],
        "busy_load": summary.busy["fetch"],
        "failures": dict(restored.failures),
        "answer": tokenizer.decode(generated.tokens),
    }
    if args.json:
        common.print_json(report)
        return 0
    print(" ".join(str(report["answer"]).split()))
    failed = ", ".join(f"{count} {reason}" for reason, count in restored.failures.items()) or "none"
    print(
        f"\n{args.policy}: first token after {restored.ttft:.3f} s, look-up {restored.lookup_seconds * 1e3:.1f} ms; "
        f"{args.dtype} on {args.device}, kernels {backend}\n"
        f"{len(prompt)} tokens, {restored.request.prefix} of them in the store: {cells['compute']} cells computed, "
        f"{cells['load']} loaded; compute busy {summary.busy['compute']:.0%}, load {summary.busy['fetch']:.0%}\n"
        f"failed loads: {failed}"
    )
    return 0
