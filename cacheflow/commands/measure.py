"""cacheflow measure: what ops cost on this machine."""

from __future__ import annotations

import argparse
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cacheflow.commands import _common as common

if TYPE_CHECKING:
    from cacheflow.costs.learned import Accuracy, Learned
    from cacheflow.costs.measured import Measurements
    from cacheflow.engine import Engine

SUFFIX, SEED = 32, 0  # tokens behind the text that --learn restores, and of what they are drawn

DESCRIPTION = """\
Time a model's layers, attention, head, copies and a store's reads, with nothing beside them, and print seconds. What
--out writes is read by the --costs of other commands. Run it on an idle machine: what else runs is measured too.

--learn goes on to restore a text under every policy, to refine the costs by what ops take beside each other, and to
print how far from the truth each kind of op was predicted before and after; --out keeps that too, beside the costs.
"""
EXAMPLES = """\
examples:
  cacheflow measure                                 the demo's model and a store in memory
  cacheflow measure --model ~/models/llama --store /var/kv --tokens 8K --out costs.json
  cacheflow measure --learn 2 --out costs.json      costs.learned.json has what was learned
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "measure",
        help="measure what ops cost on this machine",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    common.add_model(parser)
    parser.add_argument("--store", default="memory:1GiB", help="memory:SIZE or a folder; default %(default)s")
    parser.add_argument(
        "--tokens", type=common.tokens, default="2K", help="longest sequence measured; default %(default)s"
    )
    parser.add_argument("--learn", type=common.count, metavar="ROUNDS", help="restore so many times under every policy")
    parser.add_argument("--out", type=common.writable, metavar="COSTS.json", help="write the costs there")
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds, and nothing else")


def run(args: argparse.Namespace) -> int:
    from cacheflow.costs.learned import beside

    with common.steps() as step, common.engine(args, common.model_folder(args.model, step)) as engine:
        backend = engine.model.ops.NAME
        costs = engine.measure(max_tokens=args.tokens, progress=step)
        learned = None if args.learn is None else _learn(engine, args.tokens, args.learn, step)
    if args.out is not None:
        costs.save(args.out)
        if learned is not None:
            learned.save(beside(args.out))
    m = costs.measurements
    if args.json:
        names = ("bandwidth", "copy_bandwidth", "interference_per_fetch", "interference_per_byte")
        speeds = {name: getattr(costs, name) for name in names}
        rows = {} if learned is None else {"learned": [asdict(row) for row in learned.accuracy()]}
        common.print_json({"device": args.device, "backend": backend, **asdict(m), **speeds, **rows})
    else:
        print(f"one layer in {args.dtype} on {args.device}, kernels {backend}; attention left out\n")
        _print(m)
        print(
            f"\nhead {m.head * 1e3:.2f} ms a token; fixed {m.compute_fixed * 1e6:.0f} us per compute op; "
            f"store {costs.bandwidth / 1e9:.2f} GB/s, copy to pages {costs.copy_bandwidth / 1e9:.2f} GB/s\n"
            f"every fetch takes {costs.interference_per_fetch * 1e3:.2f} ms from compute, and a GB "
            f"{costs.interference_per_byte * 1e9:.2f} s"
        )
        if learned is not None:
            _print_learned(learned.accuracy())
    return 0


def _learn(engine: Engine, tokens: int, rounds: int, step: Callable[[str], object]) -> Learned:
    """What an engine learns from restoring a text of so many tokens, suffix included."""
    import numpy as np

    from cacheflow.policies import available

    most = min(engine.model.max_positions, engine.pages.num_pages * engine.page_size)
    prompt = np.random.default_rng(SEED).integers(engine.model.config.vocab_size, size=min(tokens, most)).tolist()
    step("learning: saving a text")
    engine.save(prompt[: max(1, len(prompt) - SUFFIX)])
    for number in range(1, rounds + 1):
        for policy in available():
            step(f"learning: round {number} of {rounds}, {policy}")
            for restored in engine.restore([prompt], policy=policy):
                engine.release(restored)
    return engine.learned


def _print_learned(rows: Sequence[Accuracy]) -> None:
    print("\nlearned from what ran: |predicted / actual - 1|, each op predicted before it was learned from\n")
    cells = [
        [row.kind, row.ops, f"{row.factor:.2f}"]
        + [f"{error:.1%}" for error in (row.undisturbed_median, row.undisturbed_p90, row.median, row.p90)]
        for row in rows
    ]
    headers = ["op", "seen", "over\nundisturbed", "undisturbed:\nmedian", "\np90", "learned:\nmedian", "\np90"]
    print(common.table(cells, headers, right=range(1, len(headers))))


def _print(m: Measurements) -> None:
    rows = [
        [n, f"{project * 1e3:.3f}", f"{advance * 1e3:.3f}", f"{(project + advance) / n * 1e6:.1f}"]
        for n, project, advance in zip(m.tokens, m.project, m.advance, strict=True)
    ]
    print(common.table(rows, ["tokens", "project\nms", "advance\nms", "both, per token\nus"], right=range(4)))
    print("\nattention of one layer, ns per (query, key) pair\n")
    grid = [[n, *(f"{pair * 1e9:.1f}" for pair in row)] for n, row in zip(m.queries, m.pair, strict=True)]
    headers = ["queries", *(f"context\n{c}" for c in m.contexts)]
    print(common.table(grid, headers, right=range(len(headers))))
