"""What a compiled kernel's machine code says: registers, spills, occupancy, and the instructions of its loops.

Read from the disassembly of NVIDIA's cubin (cuobjdump comes with Triton) and from the assembly of AMD's compiler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import triton

MATRIX = re.compile(r"HMMA|IMMA|QMMA|OMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA|v_s?mfma|v_wmma")
_SASS_MEMORY = re.compile(
    r"(LDGSTS|LDG|STG|LDSM|LDS|STSM|STS|LDL|STL|UTMALDG|UTMASTG|UBLKCP|LDTM|STTM|REDG|RED|ATOMG)\b"
)
_SASS_WIDTH = re.compile(r"\d+|[US]\d+|MT?88|x\d+|[1-5]D")  # the suffixes that tell how wide an access is
_AMD_MEMORY = re.compile(r"(global|buffer|scratch|flat)_(load|store|atomic)|ds_(read|write)")

# NVIDIA: shared memory and threads of a multiprocessor (CUDA programming guide, compute capabilities).
_SHARED_KIB = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100}
_THREADS = {80: 2048, 86: 1536, 87: 1536, 89: 1536, 90: 2048, 100: 2048, 103: 2048, 120: 1536}
# AMD: local data share of a compute unit.
_LDS_KIB = {"gfx90a": 64, "gfx942": 64, "gfx950": 160}

# Loops of fewer instructions wait for a barrier.
_SMALLEST_LOOP = 24


@dataclass(frozen=True)
class Instruction:
    """label: what a jump names, or None. target: the label jumped to, or None. falls_through: the next may follow."""

    label: Any
    opcode: str
    target: Any = None
    falls_through: bool = True


@dataclass(frozen=True)
class Counts:
    """Instructions of some stretch of code: all, those that multiply matrices, and memory accesses, by opcode."""

    instructions: int
    matrix: Mapping[str, int]
    memory: Mapping[str, int]


@dataclass(frozen=True)
class MachineCode:
    """registers: of a thread. spilled: bytes of a thread's registers that go to memory and back. shared: bytes of a
    program's shared memory. warps: of a program. programs: as many fit on a multiprocessor at once, 0 = it cannot be
    launched. everything: of the whole kernel. loops: innermost, that with the most matrix instructions first.
    """

    registers: int
    spilled: int
    shared: int
    warps: int
    programs: int
    everything: Counts
    loops: tuple[Counts, ...]


def read_code(kernel: Any) -> MachineCode:
    """kernel: what `triton.compile` returned."""
    return _read_cuda(kernel) if kernel.metadata.target.backend == "cuda" else _read_hip(kernel)


def matrix_flops(opcode: str) -> int | None:
    """Floating-point operations of one matrix instruction, as issued by one warp; None where the opcode does not say
    (tcgen05 reads its shape from a descriptor)."""
    if match := re.match(r"[HIQ]GMMA\.(\d+)x(\d+)x(\d+)", opcode):
        m, n, k = map(int, match.groups())
        return 2 * m * n * k // 4  # four warps issue it together
    if match := re.match(r"[HIQO]MMA\.168(\d+)", opcode):
        return 2 * 16 * 8 * int(match[1])
    if match := re.search(r"(?:mfma|wmma)_\w*?_(\d+)x(\d+)x(\d+)", opcode):
        m, n, k = map(int, match.groups())
        return 2 * m * n * k
    return None


def find_loops(code: list[Instruction]) -> list[set[int]]:
    """Natural loops, as sets of indices into `code`: a back edge leads to a block that dominates its origin."""
    position = {x.label: i for i, x in enumerate(code) if x.label is not None}
    jumps = {i: position[x.target] for i, x in enumerate(code) if x.target in position}
    breaks = (i + 1 for i in range(len(code) - 1) if i in jumps or not code[i].falls_through)
    starts = sorted({0, *jumps.values(), *breaks})
    ends = [start - 1 for start in starts[1:]] + [len(code) - 1]
    block_at = {start: block for block, start in enumerate(starts)}
    entry = len(starts)
    successors = [{block_at[jumps[end]]} if end in jumps else set() for end in ends] + [set()]
    for block, end in enumerate(ends[:-1]):
        if code[end].falls_through:
            successors[block].add(block + 1)
    reached: set[int] = set()
    for block in range(entry):
        if block not in reached:  # the start, or where an indirect branch goes
            successors[entry].add(block)
            _reach(block, successors, reached)
    predecessors = [{p for p in range(entry + 1) if block in successors[p]} for block in range(entry)]
    dominators = _dominators(predecessors, entry)
    loops: dict[int, set[int]] = {}
    for tail in range(entry):
        for head in successors[tail] & dominators[tail]:
            _reach(tail, predecessors, loops.setdefault(head, {head}))
    return [{i for block in body for i in range(starts[block], ends[block] + 1)} for body in loops.values()]


def _reach(start: int, edges: list[set[int]], reached: set[int]) -> None:
    """Adds to `reached` what can be reached from `start` without passing what is in it already."""
    waiting = [start]
    while waiting:
        block = waiting.pop()
        if block not in reached:
            reached.add(block)
            waiting += edges[block]


def _dominators(predecessors: list[set[int]], entry: int) -> list[set[int]]:
    everything = set(range(entry + 1))
    dominators = [everything] * entry + [{entry}]
    changed = True
    while changed:
        changed = False
        for block in range(entry):
            found = {block} | set.intersection(*(dominators[p] for p in predecessors[block]))
            changed |= found != dominators[block]
            dominators[block] = found
    return dominators


def _count(opcodes: Iterable[str], memory: re.Pattern[str]) -> Counts:
    listed = [opcode for opcode in opcodes if opcode not in ("NOP", "label")]
    accesses: Counter[str] = Counter()
    for opcode in filter(memory.match, listed):
        name, *suffixes = opcode.split(".")
        accesses[".".join([name, *filter(_SASS_WIDTH.fullmatch, suffixes)])] += 1
    matrix = Counter(filter(MATRIX.match, listed))
    return Counts(len(listed), dict(matrix.most_common()), dict(sorted(accesses.items())))


def _count_loops(code: list[Instruction], memory: re.Pattern[str]) -> tuple[Counts, ...]:
    loops = [body for body in find_loops(code) if len(body) >= _SMALLEST_LOOP]
    innermost = [body for body in loops if not any(other < body for other in loops)]
    counts = [_count((code[i].opcode for i in sorted(body)), memory) for body in innermost]
    return tuple(sorted(counts, key=lambda count: (-sum(count.matrix.values()), -count.instructions)))


def _read_cuda(kernel: Any) -> MachineCode:
    meta = kernel.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        sass, usage = (
            subprocess.run(
                [triton.knobs.nvidia.cuobjdump.path, option, cubin.name], check=True, text=True, capture_output=True
            ).stdout
            for option in ("--dump-sass", "--dump-resource-usage")
        )
    resources = re.search(rf"Function {meta.name}:\s+REG:(\d+)", usage)
    assert resources is not None, usage
    registers = int(resources[1])
    code = parse_sass(next(part for part in sass.split("Function : ")[1:] if part.split()[0] == meta.name))
    everything = _count((x.opcode for x in code), _SASS_MEMORY)
    # Warp specialisation adds warps to those that were asked for.
    total = re.search(r'"ttg.total-num-warps" = (\d+)', kernel.asm["ttgir"])
    warps = int(total[1]) if total else meta.num_warps
    tensor_memory = getattr(meta, "tmem_size", 0) or 0
    arch = meta.target.arch
    programs = min(
        65536 // (warps * -(-registers * 32 // 256) * 256),
        _THREADS[arch] // 32 // warps,
        _SHARED_KIB[arch] * 1024 // (meta.shared + 1024),  # the driver keeps 1 KiB of each
        512 // max(16, 1 << max(0, tensor_memory - 1).bit_length()),
    )
    return MachineCode(
        registers=registers,
        spilled=sum(n * _sass_bytes(op) for op, n in everything.memory.items() if op.startswith(("STL", "LDL"))),
        shared=meta.shared,
        warps=warps,
        programs=programs,
        everything=everything,
        loops=_count_loops(code, _SASS_MEMORY),
    )


def parse_sass(text: str) -> list[Instruction]:
    """The instructions of one function in cuobjdump's output."""
    code = []
    for address, line in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+([^;]*);", text, re.M):
        match = re.match(r"(@\S+\s+)?(\S+)\s*(.*)", line.strip())
        assert match is not None, line
        predicate, opcode, operands = match.groups()
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
        # "BRA P1, X", "BRA.U UP0, X" and "@P0 BRA X" may fall through; "BRA X", BRX, EXIT and RET do not.
        leaves = opcode.split(".")[0] in ("EXIT", "RET", "BRX") or (opcode.startswith("BRA") and "," not in operands)
        code.append(
            Instruction(
                label=int(address, 16),
                opcode=opcode,
                target=int(target[1], 16) if target else None,
                falls_through=bool(predicate) or not leaves,
            )
        )
    return code


def _sass_bytes(opcode: str) -> int:
    return {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}.get(opcode.partition(".")[2], 4)


def _read_hip(kernel: Any) -> MachineCode:
    meta, text = kernel.metadata, kernel.asm["amdgcn"]

    def value(key: str) -> int:
        match = re.search(rf"{re.escape(key)}:?\s+(\d+)", text)
        assert match is not None, key
        return int(match[1])

    code = parse_amd(text.split(".Lfunc_end0")[0])
    by_shared = _LDS_KIB[meta.target.arch] * 1024 // max(meta.shared, 1)
    by_registers = value("; Occupancy") * 4 // meta.num_warps  # waves of each of the four SIMD units
    return MachineCode(
        registers=value(".vgpr_count"),
        spilled=4 * value(".vgpr_spill_count"),
        shared=meta.shared,
        warps=meta.num_warps,
        programs=min(by_shared, by_registers),
        everything=_count((x.opcode for x in code), _AMD_MEMORY),
        loops=_count_loops(code, _AMD_MEMORY),
    )


def parse_amd(text: str) -> list[Instruction]:
    """The instructions, and labels as instructions of their own, of one function of AMD's assembly."""
    code = []
    for line in text.splitlines():
        line = line.split(";")[0].strip()
        if match := re.match(r"(\.LBB\w+):", line):
            code.append(Instruction(label=match[1], opcode="label"))
        elif match := re.match(r"([a-z]\w+)(?:\s+(.*))?$", line):
            target = (match[2] or "").strip() if "branch" in match[1] else None
            falls_through = match[1] not in ("s_branch", "s_endpgm")
            code.append(Instruction(label=None, opcode=match[1], target=target, falls_through=falls_through))
    return code
