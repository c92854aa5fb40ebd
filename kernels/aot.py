"""Compiles every kernel for GPUs that need not be here, and says what came out: `python -m kernels.aot`.

A module of this package with kernels has a function

    def aot_cases(target: str) -> Iterator[Case]

which yields, for a target like "cuda:90" or "hip:gfx942", a `kernels.launch.Case` for each shape worth watching. The
launch in it is the one that the op itself would make, with tensors on the device "meta", so that what is compiled here
is what is compiled there. Modules are found by having the function; there is no list.

Compiling is not enough: a kernel that wants too much shared or tensor memory compiles without a word and fails when it
is loaded. Exit status 1: something does not compile, cannot be launched, spills, lacks matrix instructions, or races.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from tabulate import tabulate
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels
from kernels.launch import Case, Launch
from kernels.machine_code import MachineCode, matrix_flops, read_code
from kernels.races import find_races

_GLOBAL_LOAD = re.compile(r"LDG|UTMALDG|UBLKCP|(global|buffer|flat)_load")
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


@dataclass(frozen=True)
class Report:
    """One row. code: None if it does not compile. problems: why the exit status is 1.

    scores: warp instructions per 1000 scores of attention, 1000 * instructions * warps * 4 * head_dim / matrix FLOPs
    of all warps, instructions and FLOPs summed over one round of every loop with matrix instructions; None elsewhere.
    """

    kernel: str
    case: str
    target: str
    code: MachineCode | None
    scores: float | None
    problems: tuple[str, ...]


def find_cases(target: str, kernel: str = "", names: Sequence[str] = ("",)) -> Iterator[tuple[str, Case]]:
    """(module name within this package, case) of all kernels, of those modules whose name begins with `kernel`, and of
    those cases whose name contains one of `names`."""
    for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
        name = found.name.removeprefix("kernels.")
        if name.startswith(kernel):
            cases = getattr(importlib.import_module(found.name), "aot_cases", None)
            for case in cases(target) if cases else ():
                if any(text in case.name for text in names):
                    yield name, case


def compile_launch(launch: Launch, target: str) -> Any:
    """Compiles a launch for a target; what `triton.compile` returns. The interpreter has to be off."""
    backend, arch = target.split(":")
    gpu = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
    made = launch.specialisation()
    source = ASTSource(
        launch.kernel,
        signature=dict(made.types),
        constexprs=dict(made.constants),
        attrs={path: [[attribute, 16]] for path, attribute in made.attributes},
    )
    return triton.compile(source, target=gpu, options=dict(launch.options))


def report(module: str, case: Case, target: str) -> Report:
    """Compiles one case and judges it."""
    row = Report(kernel=module, case=case.name, target=target, code=None, scores=None, problems=())
    try:
        compiled = compile_launch(case.launch, target)
    except Exception as error:  # whatever a compiler raises is the finding, and the other kernels are still of interest
        return replace(row, problems=(f"does not compile: {type(error).__name__}: {str(error)[-300:]}",))
    code, ttgir = read_code(compiled), compiled.asm["ttgir"]
    scores = None if case.head_dim is None else instructions_per_1000_scores(code, case.head_dim, ttgir)
    return replace(row, code=code, scores=scores, problems=find_problems(code, ttgir, case.matrix))


def find_problems(code: MachineCode, ttgir: str, matrix: bool) -> tuple[str, ...]:
    """What disqualifies compiled code. ttgir: its intermediate form. matrix: it must have matrix instructions."""
    found = {
        "cannot be launched": code.programs == 0,
        f"spills {code.spilled} bytes": code.spilled > 0,
        "no matrix instructions": matrix and not code.everything.matrix,
    }
    return (*(problem for problem, is_so in found.items() if is_so), *(f"races: {race}" for race in find_races(ttgir)))


def instructions_per_1000_scores(code: MachineCode, head_dim: int, ttgir: str) -> float | None:
    """`Report.scores`; None if no loop has matrix instructions whose FLOPs are known."""
    loops = [loop for loop in code.loops if loop.matrix]
    named = {opcode for loop in loops for opcode in loop.matrix}
    flops = {opcode: (matrix_flops(opcode) or 0) * code.warps for opcode in named}
    unknown = sum(n for opcode, n in code.everything.matrix.items() if opcode.startswith("UTC"))
    if unknown:  # one thread issues it for the whole program; all of them share what the intermediate code multiplies
        for opcode in named:
            flops[opcode] = flops[opcode] or _tensor_memory_flops(ttgir) // unknown
    total = sum(n * flops[opcode] for loop in loops for opcode, n in loop.matrix.items())
    instructions = sum(loop.instructions for loop in loops)
    return 1000 * instructions * code.warps * 4 * head_dim / total if total else None


def _tensor_memory_flops(ttgir: str) -> int:
    """FLOPs of every tcgen05 multiplication that the code names, once each."""
    operand = r"!ttg\.memdesc<(?:\d+x)*?(\d+)x(\d+)x[a-z]"
    shapes = re.findall(rf"tc_gen5_mma .*? : {operand}.*?, {operand}", ttgir)
    return sum(2 * int(m) * int(k) * int(n) for m, k, _, n in shapes)


def _table(rows: Sequence[Report]) -> str:
    return tabulate([_cells(row) for row in rows], headers="keys", floatfmt=".0f", tablefmt="github")


def _cells(row: Report) -> dict[str, Any]:
    """One row of the table; loop: that with the most matrix instructions, or all code if there is none."""
    cells: dict[str, Any] = {"kernel": row.kernel, "case": row.case, "target": row.target}
    if row.code is not None:
        counts = row.code.loops[0] if row.code.loops else row.code.everything
        loads = {name: n for name, n in counts.memory.items() if _GLOBAL_LOAD.match(name)}
        cells |= {
            "registers": row.code.registers,
            "spills": row.code.spilled,
            "shared KiB": round(row.code.shared / 1024),
            "programs / SM": row.code.programs,
            "loop": counts.instructions,
            "matrix": _listed(counts.matrix),
            "loads": _listed(loads),
            "per 1000 scores": row.scores,
        }
    return cells | {"problems": "; ".join(row.problems)}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", metavar="GPU", help=f"default: {', '.join(TARGETS)}; repeatable")
    parser.add_argument("--kernel", default="", metavar="MODULE", help="only modules whose name begins with this")
    parser.add_argument("--case", action="append", metavar="TEXT", help="only shapes whose name has this; repeatable")
    parser.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    arguments = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    rows, names = [], arguments.case or [""]
    for target in arguments.target or TARGETS:
        for module, case in find_cases(target, arguments.kernel, names):
            rows.append(report(module, case, target))
            print(f"{target} {module}: {case.name}", file=sys.stderr, flush=True)
    if not rows:
        parser.error(f"no module {arguments.kernel!r}* has a case with {' or '.join(map(repr, names))} in its name")
    if arguments.json:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        print(json.dumps({**versions, "kernels": [asdict(row) for row in rows]}, indent=1))
    else:
        print(f"Triton {triton.__version__}\n\n{_table(rows)}")
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
