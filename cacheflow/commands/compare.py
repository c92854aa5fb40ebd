"""cacheflow compare: every policy on the same batch, in real time, on this machine."""

from __future__ import annotations

import argparse
from argparse import RawDescriptionHelpFormatter
from typing import TYPE_CHECKING, Any

from cacheflow.commands import _common as common

if TYPE_CHECKING:
    from cacheflow.trials import Outcome

DESCRIPTION = """\
Store the KV of some prompts, then restore them as one batch under every policy, in turns, and print the mean and the
worst time to first token of each policy's median run. Prompts are random tokens, so nothing is shared.
"""
EXAMPLES = """\
examples:
  cacheflow compare --batch 4
  cacheflow compare --batch 8 --tokens 256,512,1K --gbps 0.5 --policy load,token,two-pointer
  cacheflow compare --model ~/models/llama --costs costs.json --json
"""
SEED = 0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="time every policy on the same batch, on this machine",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    common.add_model(parser)
    common.add_engine(parser)
    parser.add_argument("--batch", type=common.count, default="1", help="prompts at once; default %(default)s")
    parser.add_argument(
        "--tokens",
        type=common.listed(common.tokens),
        default="512,1K,1536,768",
        help="prefixes, taken in turn, K = 1024; default %(default)s",
    )
    parser.add_argument("--suffix", type=common.tokens, default="32", help="new tokens each; default %(default)s")
    parser.add_argument(
        "--policy", type=common.listed(str), metavar="NAMES", help="policies by name, or module:Class; default all"
    )
    parser.add_argument(
        "--rounds",
        type=common.count,
        default="3",
        help="each measures costs and runs every policy; default %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds, and nothing else")


def run(args: argparse.Namespace) -> int:
    import torch

    from cacheflow import policies, trials

    names = args.policy or list(policies.available())
    for name in names:
        policies.find(name)
    args.store = "memory:8GiB"
    generator = torch.Generator().manual_seed(SEED)
    with common.steps() as step:
        folder = common.model_folder(args.model, step)
        lengths = [args.tokens[i % len(args.tokens)] for i in range(args.batch)]
        room = sum(lengths) + args.batch * (args.suffix + common.PAGE)
        # What one policy taught would serve those behind it.
        with common.engine(args, folder, cache_tokens=room, link=True, learn=False) as engine:
            step("measuring costs")
            engine.warmup()
            vocab = engine.model.config.vocab_size
            prefixes = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
            prompts = [p + torch.randint(vocab, (args.suffix,), generator=generator).tolist() for p in prefixes]
            for prefix in prefixes:
                step("storing the prefixes")
                engine.save(prefix)
            trials.balance(engine, prompts, args.gbps)
            outcomes = trials.run(engine, prompts, names, args.rounds, progress=step)
            gbps, backend = engine.known_costs.bandwidth * 8 / 1e9, engine.model.ops.NAME
    rows = [_row(outcome) for outcome in outcomes]
    if args.json:
        common.print_json({"gbps": gbps, "backend": backend, "tokens": lengths, "rows": rows})
    else:
        print(
            f"{args.batch} prompts at once, prefixes of {', '.join(map(str, lengths))} tokens, suffix {args.suffix}; "
            f"link {gbps:.3f} Gbps, {args.dtype} on {args.device}, kernels {backend}, medians of {args.rounds} rounds\n"
        )
        _print(rows)
    beaten = [row["policy"] for row in rows if min(row["mean_over_bound"], row["worst_over_bound"]) < trials.SLACK]
    if beaten:
        raise RuntimeError(f"{', '.join(beaten)} ran below a lower bound: the costs or the bound are wrong")
    return 0


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "mean_ttft_s": outcome.median(lambda trial: trial.mean_ttft),
        "worst_ttft_s": outcome.median(lambda trial: trial.worst_ttft),
        "mean_over_bound": outcome.median(lambda trial: trial.mean_ratio_to_bound),
        "worst_over_bound": outcome.median(lambda trial: trial.ratio_to_bound),
        "mean_over_simulated": outcome.median(lambda trial: trial.ratio_to_simulated),
        "busy_compute": outcome.median(lambda trial: trial.summary.busy["compute"]),
        "busy_load": outcome.median(lambda trial: trial.summary.busy["fetch"]),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    best = min(row["mean_ttft_s"] for row in rows)
    shown = [
        [
            row["policy"],
            f"{'*' if row['mean_ttft_s'] == best else ''}{row['mean_ttft_s']:.3f}",
            f"{row['worst_ttft_s']:.3f}",
            f"{row['mean_over_bound']:.3f}",
            f"{row['worst_over_bound']:.3f}",
            f"{row['mean_over_simulated']:.3f}",
            f"{row['busy_compute']:.0%}",
            f"{row['busy_load']:.0%}",
        ]
        for row in rows
    ]
    headers = ["policy", "mean TTFT\ns", "worst TTFT\ns", "mean over\nbound", "worst over\nbound"]
    headers += ["mean over\nsimulated", "busy\ncompute", "busy\nload"]
    print(common.table(shown, headers, right=range(1, len(headers))))
    print(
        "\n* best. bound: no schedule can have a lower mean, or all first tokens sooner. "
        "busy: share of the restoration inside ops."
    )
