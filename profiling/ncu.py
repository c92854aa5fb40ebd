"""One kernel at one shape under Nsight Compute.

    python profiling/ncu.py attention-tile --tokens 512 --context 16K
    python profiling/ncu.py recompute-kv --model qwen3-8b --tokens 2K --output out/kv
    python profiling/ncu.py transfer-in --dry-run

The kernel runs twice before it is profiled, so that it is compiled and loaded. Attention is profiled in the form that
this shape gets; a merge of split keys is a kernel of its own and is not profiled. `ncu-ui OUTPUT.ncu-rep` opens what is
written.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import bench
import bench_attention
import bench_recompute
import bench_transfer
import torch
from bench import Model, Setting

import kernels
from cacheflow.commands import _common as common

TILE, SPLIT = "attention-tile", "attention-split"
# The Triton kernel that is profiled.
KERNELS = {
    TILE: "attention_kernel",
    SPLIT: "attention_kernel",
    "recompute-qkv": "recompute_kernel",
    "recompute-kv": "recompute_kernel",
    "recompute-q": "recompute_kernel",
    "transfer-in": "pages_from_staging_kernel",
    "transfer-out": "staging_from_pages_kernel",
    "activation": "activation_kernel",
    "norm": "rms_norm_kernel",
}
MODELS = {
    model.label.replace(" ", "-").lower(): model for model in [*bench.models(bench.FULL), Model.preset("smollm2-135m")]
}
TOKENS = {SPLIT: 1}
WARMUP = 2


def command(kernel: str, model: str, tokens: int, context: int, output: Path) -> list[str]:
    """The command line of ncu, which runs this file."""
    return [
        "ncu",
        "--set=full",
        "--import-source=yes",
        "--profile-from-start=off",
        f"--kernel-name={KERNELS[kernel]}",
        "--launch-count=1",
        "--force-overwrite",
        f"--export={output}",
        sys.executable,
        str(Path(__file__).resolve()),
        kernel,
        f"--model={model}",
        f"--tokens={tokens}",
        f"--context={context}",
        "--profiled",
    ]


def call(kernel: str, model: Model, tokens: int, context: int, setting: Setting) -> Callable[[], object]:
    """What launches the kernel. Raises ValueError for a shape that gets another form of attention."""
    op, _, form = kernel.partition("-")
    if op == "attention":
        wanted = attention_form(model, tokens, context, setting)
        if wanted != form:
            raise ValueError(f"{tokens} tokens behind {context} run in the {wanted} form; give --tokens for {kernel}")
        return bench_attention.paged(model, tokens, context, setting)[0].run
    if op == "recompute":
        return bench_recompute.sides(model, tokens, form, setting)[0].run  # type: ignore[arg-type]
    if op == "transfer":
        way = {"in": bench_transfer.IN, "out": bench_transfer.OUT}[form]
        return bench_transfer.sides(model, way, model.shape.layers, tokens, None, setting)[0].run
    ops = kernels.backend("triton", setting.device)
    if op == "activation":
        gate_up = setting.normal(tokens, 2 * model.shape.intermediate)
        return lambda: ops.activation(gate_up)
    x, weight = setting.normal(tokens, model.shape.hidden), setting.normal(model.shape.hidden)
    return lambda: ops.rms_norm(x, weight, 1e-5)


def attention_form(model: Model, tokens: int, context: int, setting: Setting) -> str:
    """ "tile" or "split": what `kernels.attention` takes for this shape."""
    from kernels.attention_tiles import choose_form, choose_tiles
    from kernels.launch import target_of
    from kernels.variants import Variant

    shape, target = model.shape, target_of(setting.device)
    pages = torch.empty(1, setting.page, shape.kv_heads, shape.head_dim, dtype=setting.dtype, device="meta")
    batch = setting.batch(context, context + tokens, range(-(-(context + tokens) // setting.page)))
    tiles = choose_tiles(target, pages, pages, None)
    group = shape.heads // shape.kv_heads
    tile, _ = choose_form(batch, Variant("causal"), group, shape.kv_heads, tiles, target)
    return "tile" if tile == tiles[0] else "split"


def profiled(run: Callable[[], object]) -> None:
    """Under ncu: compile, then one call that it sees."""
    for _ in range(WARMUP):
        run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: that of ncu, or 2 for what the user can mend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=KERNELS, metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="default %(default)s")
    parser.add_argument("--tokens", type=common.tokens, help="queries, or tokens moved; default 512, split form 1")
    parser.add_argument("--context", type=int_or_tokens, default=16 * 1024, help="before them; attention; default 16K")
    parser.add_argument("--output", type=Path, help="without suffix; default out/ncu/KERNEL")
    parser.add_argument("--dry-run", action="store_true", help="print ncu's command line")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    tokens = args.tokens or TOKENS.get(args.kernel, 512)
    output = args.output or Path("out/ncu") / args.kernel
    words = command(args.kernel, args.model, tokens, args.context, output)
    if args.dry_run:
        print(shlex.join(words))
        return 0
    try:
        if args.profiled:
            profiled(call(args.kernel, MODELS[args.model], tokens, args.context, Setting(torch.device("cuda"))))
            return 0
        if shutil.which("ncu") is None:
            raise ValueError("ncu is not on the PATH; install Nsight Compute, or see its command line with --dry-run")
    except ValueError as error:
        print(f"ncu.py: {error}", file=sys.stderr)
        return bench.USER_ERROR
    output.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.run(words, check=False).returncode


def int_or_tokens(text: str) -> int:
    """A number of tokens, or none."""
    return 0 if text.strip() == "0" else common.tokens(text)


if __name__ == "__main__":
    sys.exit(main())
