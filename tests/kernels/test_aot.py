"""Kernels compiled ahead of time, and what is read from the result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kernels import aot
from kernels.machine_code import Counts, Instruction, MachineCode, find_loops, matrix_flops, parse_amd, parse_sass
from kernels.races import find_races
from tests.interpreter import VARIABLE


def compiling(*command: str) -> str:
    """What `python -m COMMAND` prints in a process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-m", *command], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_recompute_on_every_target():
    shown = json.loads(compiling("kernels.aot", "--kernel", "recompute", "--case", "qwen3-8b, 64", "--json"))
    matrix = {"cuda:80": "HMMA.", "cuda:90": "HGMMA.", "cuda:100": "UTCHMMA", "hip:gfx942": "v_mfma_f32_"}
    wide = ("LDGSTS.128", "LDG.128", "buffer_load_dwordx4", "global_load_dwordx4")
    assert [row["target"] for row in shown["kernels"]] == list(matrix)
    for row in shown["kernels"]:
        assert row["problems"] == []
        loop = row["code"]["loops"][0]
        assert all(opcode.startswith(matrix[row["target"]]) for opcode in loop["matrix"]) and loop["matrix"]
        loads = {opcode for opcode in loop["memory"] if opcode.startswith(("LDG", "buffer_load", "global_load"))}
        assert loads and loads <= set(wide)
        assert row["code"]["spilled"] == 0 and row["code"]["programs"] >= 1 and 0 < row["code"]["registers"] < 256


def test_attention_on_every_target():
    """Both forms, and the tile form with a source that is in staging, of Llama-3.1-8B in bf16 on pages of 64 tokens."""
    cases = [
        word for case in ("tile", "split", "staged bfloat16, tile") for word in ("--case", f"llama-3.1-8b, {case}")
    ]
    shown = json.loads(compiling("kernels.aot", "--kernel", "attention", *cases, "--json"))["kernels"]
    assert len(shown) == 3 * len(aot.TARGETS)
    split = {"cuda:80": "HMMA.", "cuda:90": "HMMA.", "cuda:100": "HMMA.", "hip:gfx942": "v_mfma_f32_"}
    whole = {"cuda:80": "HMMA.", "cuda:90": "HGMMA.", "cuda:100": "UTCHMMA", "hip:gfx942": "v_mfma_f32_"}
    for row in shown:
        assert row["problems"] == []
        kind = (split if row["case"].endswith("split") else whole)[row["target"]]
        loops = [loop for loop in row["code"]["loops"] if loop["matrix"]]
        # That of full tiles, that of tiles that need a mask, and that of what is in staging.
        assert len(loops) == 2 + ("staged" in row["case"])
        for loop in loops:
            assert all(opcode.startswith(kind) for opcode in loop["matrix"])
            # A key and its value are read in 16 bytes at a time or in bulk; page ids are all that is narrower.
            wide = sum(
                n for opcode, n in loop["memory"].items() if re.search(r"LDG.*\.128|UTMALDG|_load_dwordx4", opcode)
            )
            every = sum(n for opcode, n in loop["memory"].items() if re.match(r"LDG|UTMALDG|\w+_load_", opcode))
            assert wide >= 2 and every - wide <= 2
    hopper = {row["case"]: row["scores"] for row in shown if row["target"] == "cuda:90"}
    assert hopper["llama-3.1-8b, tile"] <= 450
    assert hopper["llama-3.1-8b, staged bfloat16, tile"] <= 1.1 * hopper["llama-3.1-8b, tile"]


def test_what_is_compiled():
    found = json.loads(compiling("tests.kernels.uninterpreted"))
    assert found["without_case"] == [] and found["repeated"] == []
    assert found["wrongly_classified"] == []
    # Whatever the batch, nothing is compiled that warm-up has not compiled.
    assert found["unforeseen"] == [] and found["foreseen"] <= 16


def code(**changes) -> MachineCode:
    loop = Counts(instructions=295, matrix={"HMMA.16816.F32.BF16": 16}, memory={"LDGSTS.128": 4})
    made = MachineCode(
        registers=94,
        spilled=0,
        shared=1 << 14,
        warps=4,
        programs=2,
        everything=replace(loop, instructions=900),
        loops=(loop,),
    )
    return replace(made, **changes)


def test_instructions_per_1000_scores():
    # A published kernel's loop of 16 queries by 32 keys of 128 elements, and a second loop of half the instructions.
    assert round(aot.instructions_per_1000_scores(code(), head_dim=128, ttgir="")) == 2305
    half = replace(code().loops[0], instructions=147)
    both = code(loops=(code().loops[0], half))
    assert round(aot.instructions_per_1000_scores(both, head_dim=128, ttgir="")) == 1727
    # One instruction of 128 x 128 x 16 out of four that the intermediate code calls one of 128 x 128 x 64.
    loop = Counts(instructions=240, matrix={"UTCHMMA": 4}, memory={})
    ttgir = "ttng.tc_gen5_mma %a, %b, %d, %t, %t : !ttg.memdesc<128x64xbf16, #s>, !ttg.memdesc<64x128xbf16, #s>, !ttg.m"
    tensor = code(loops=(loop,), everything=loop)
    assert aot.instructions_per_1000_scores(tensor, head_dim=128, ttgir=ttgir) == 1000 * 240 * 4 * 4 * 128 / (
        2 * 128 * 128 * 64
    )
    assert aot.instructions_per_1000_scores(code(loops=()), head_dim=128, ttgir="") is None


@pytest.mark.parametrize(
    "opcode,flops",
    [
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 2 * 16 * 8 * 8),
        ("HGMMA.64x256x16.F32.BF16", 2 * 64 * 256 * 16 // 4),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", 2 * 64 * 128 * 32 // 4),
        ("v_mfma_f32_32x32x8_bf16", 2 * 32 * 32 * 8),
        ("v_mfma_f32_16x16x16_f16", 2 * 16 * 16 * 16),
        ("UTCHMMA", None),
    ],
)
def test_flops_of_a_matrix_instruction(opcode, flops):
    assert matrix_flops(opcode) == flops


SASS = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDG.E.128 R4, [R2] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0030*/              @!P0 BRA 0x60 ;
        /*0040*/                   STL.64 [R1], R4 ;
        /*0050*/                   BRA 0x10 ;
        /*0060*/              @P1  EXIT ;
        /*0070*/                   EXIT ;
        /*0080*/                   BRA 0x80;
"""
AMD = """
    s_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:
    buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen ; comment
    v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
    s_cbranch_scc1 .LBB0_1
    s_endpgm
"""


def test_loops_of_machine_code():
    sass = parse_sass(SASS)
    assert [x.opcode for x in sass[:3]] == ["S2R", "LDG.E.128", "HMMA.16816.F32.BF16"]
    assert sorted(map(sorted, find_loops(sass))) == [[1, 2, 3, 4, 5], [8]]
    amd = parse_amd(AMD)
    assert [sorted(body) for body in find_loops(amd)] == [[1, 2, 3, 4]]


def test_nested_loops_and_unreachable_blocks():
    jump = lambda label, target, falls=True: Instruction(label, "BRA", target, falls)  # noqa: E731
    inner_and_outer = [
        Instruction(0, "A"),
        Instruction(1, "B"),
        jump(2, 1),
        jump(3, 0),
        Instruction(4, "EXIT", None, False),
    ]
    assert sorted(map(sorted, find_loops(inner_and_outer))) == [[0, 1, 2, 3], [1, 2]]
    # A jump into the middle of what would be a loop: no block of it dominates the others.
    irreducible = [
        jump(0, 2),
        Instruction(1, "A"),
        Instruction(2, "B"),
        jump(3, 1),
        Instruction(4, "EXIT", None, False),
    ]
    assert find_loops(irreducible) == []


def loop(x_slots: int, pendings: int = 1) -> str:
    """A pipelined loop of Triton 3.7.1 for Hopper, cut to what matters: two copies ahead of the multiplication."""
    x, w = f"!ttg.memdesc<{x_slots}x128x64xbf16, #s, mutable>", "!ttg.memdesc<3x64x128xbf16, #s, mutable>"
    copies = "\n".join(
        f"""
    %x_{i} = ttg.memdesc_index %x[%i{i}] : {x} -> !ttg.memdesc<128x64xbf16>
    %a_{i} = ttg.async_copy_global_to_local %p, %x_{i} mask %m other %z : tensor<128x64x!tt.ptr<bf16>>
    %w_{i} = ttg.memdesc_index %w[%i{i}] : {w} -> !ttg.memdesc<64x128xbf16>
    %b_{i} = ttg.async_copy_global_to_local %p, %w_{i} mask %m other %z : tensor<64x128x!tt.ptr<bf16>>"""
        for i in range(3)
    ).splitlines()
    return "\n".join(
        [
            *copies[:10],
            "    %r:4 = scf.for %k = %c0 to %K step %c64 iter_args(%acc = %z) -> (tensor<128x128xf32>) {",
            f"      %x_8 = ttg.memdesc_index %x[%e] : {x} -> !ttg.memdesc<128x64xbf16>",
            f"      %w_8 = ttg.memdesc_index %w[%e] : {w} -> !ttg.memdesc<64x128xbf16>",
            "      %w_9 = ttg.memdesc_trans %w_8 {order = array<i32: 1, 0>} : !ttg.memdesc<64x128xbf16>",
            "      %d = ttng.warp_group_dot %x_8, %w_9, %acc {inputPrecision = 0 : i32, isAsync = true} : !ttg.memdesc",
            f"      %e:2 = ttng.warp_group_dot_wait %d, %x_8 {{pendings = {pendings} : i32}} : tensor<128x128xf32>",
            *("  " + line for line in copies[10:]),
            "      scf.yield %e : tensor<128x128xf32>",
            "    }",
        ]
    )


def test_a_buffer_too_few_is_a_race():
    assert find_races(loop(x_slots=2)) == ["%x is overwritten while a multiplication reads it"]
    assert find_races(loop(x_slots=3)) == []
    assert find_races(loop(x_slots=2, pendings=0)) == []  # it is waited for before the copy


def test_exit_status_and_table(monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE, raising=False)
    cases = [("k", SimpleNamespace(name="c"))]
    row = aot.Report(kernel="k", case="c", target="cuda:90", code=code(), scores=123.4, problems=())
    monkeypatch.setattr(aot, "find_cases", lambda target, kernel, names: cases if kernel != "none" else [])
    monkeypatch.setattr(aot, "report", lambda module, case, target: row)
    assert aot.main(["--target", "cuda:90"]) == 0
    shown = capsys.readouterr().out
    assert "16 HMMA.16816.F32.BF16" in shown and "4 LDGSTS.128" in shown and " 123 |" in shown
    for change in (dict(problems=("spills 8 bytes",)), dict(problems=("does not compile: X",), code=None)):
        monkeypatch.setattr(aot, "report", lambda module, case, target, c=change: replace(row, **c))
        assert aot.main(["--target", "cuda:90"]) == 1
        assert change["problems"][0] in capsys.readouterr().out
    with pytest.raises(SystemExit):
        aot.main(["--kernel", "none"])
    assert "no module 'none'* has a case" in capsys.readouterr().err


def test_nothing_is_compiled_while_interpreting(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(SystemExit):
        aot.main([])
    assert "TRITON_INTERPRET is set, so nothing would be compiled; unset it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes,ttgir,problems",
    [
        ({}, "", ()),
        (dict(programs=0), "", ("cannot be launched",)),
        (dict(spilled=24), "", ("spills 24 bytes",)),
        (dict(everything=Counts(900, {}, {})), "", ("no matrix instructions",)),
        ({}, loop(x_slots=2), ("races: %x is overwritten while a multiplication reads it",)),
    ],
    ids=["none", "resources", "spill", "matrix", "race"],
)
def test_problems(changes, ttgir, problems):
    assert aot.find_problems(code(**changes), ttgir, matrix=True) == problems
