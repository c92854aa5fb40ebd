"""Every kernel's error against float64 in every dtype, under the interpreter: `python -m tests.kernels.matrix`.

The second number of a cell is the error over that of the reference in the same dtype; the tests allow KERNEL_MULTIPLE.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from tabulate import tabulate

from tests.interpreter import VARIABLE, load_kernels

load_kernels()
os.environ[VARIABLE] = "1"

import kernels.attention  # noqa: E402
import kernels.reference as reference  # noqa: E402
from kernels import backend  # noqa: E402
from tests.kernels import dense, test_recompute  # noqa: E402
from tests.kernels.test_attention_forms import FORMS, attend  # noqa: E402
from tests.kernels.test_staged import E4M3, SUFFIX, Landed  # noqa: E402
from tests.tolerances import KERNEL_MULTIPLE, relative_norm  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEADS = (64, 80, 96, 128, 256)
Errors = tuple[float, float]  # the kernel's and the reference's


def recompute(width: int, form: str) -> Callable[[torch.dtype], Errors]:
    def errors(dtype: torch.dtype) -> Errors:
        found = []
        for ops in (backend("triton", "cpu"), reference):
            case = test_recompute.make(dtype=dtype, width=width, v_width=width, hidden_size=200, tokens=130)
            q = test_recompute.run(ops, case, form)
            written = test_recompute.errors(case, q if form != "kv" else None)
            found.append(written[0] if form == "q" else max(written))
        return found[0], found[1]

    return errors


def attention(width: int, form: str) -> Callable[[torch.dtype], Errors]:
    def errors(dtype: torch.dtype) -> Errors:
        sequences = dense.Sequences.random([150], kv_heads=1, width=width, page_size=16, dtype=dtype)
        batch = sequences.batch((0, 138, 150))
        q = sequences.queries(batch, heads=4)
        expected, _ = sequences.expected(q, (0, 138, 150))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels.attention, "choose_form", lambda *arguments: FORMS[form])
            ours = [relative_norm(attend(ops, sequences, q, batch)[0], expected) for ops in both()]
        return ours[0], ours[1]

    return errors


def staged(stored: torch.dtype | None) -> Callable[[torch.dtype], Errors]:
    def errors(dtype: torch.dtype) -> Errors:
        landed = Landed.make(SUFFIX, dtype=dtype, stored=stored, width=64)
        ours = [landed.attend(ops) for ops in both()]
        expected, _ = landed.sequences.expected(ours[0][0], SUFFIX)
        found = [relative_norm(out, expected) for _, out, _ in ours]
        return found[0], found[1]

    return errors


def rms_norm(dtype: torch.dtype) -> Errors:
    x, weight = (torch.randn(70, 200) * 4).to(dtype), torch.randn(200).to(dtype)
    expected = dense.rms_norm(x, weight, 0.5)
    found = [relative_norm(ops.rms_norm(x, weight, 0.5), expected) for ops in both()]
    return found[0], found[1]


def activation(dtype: torch.dtype) -> Errors:
    gate, up = (torch.randn(70, 200) * 4).to(dtype), torch.randn(70, 200).to(dtype)
    expected = F.silu(gate.double()) * up.double()
    found = [relative_norm(ops.activation(torch.cat([gate, up], dim=-1)), expected) for ops in both()]
    return found[0], found[1]


def both() -> tuple[object, object]:
    return backend("triton", "cpu"), reference


def rows() -> Iterator[tuple[str, Callable[[torch.dtype], Errors]]]:
    for width in HEADS:
        for form in ("qkv", "kv", "q"):
            yield f"recompute {form}, head {width}", recompute(width, form)
    for width in HEADS:
        for form in ("tile", "split"):
            yield f"attention {form}, head {width}", attention(width, form)
    for stored in (None, torch.int8, E4M3):
        yield f"attention, staged {'as q' if stored is None else str(stored).removeprefix('torch.')}", staged(stored)
    yield "rms_norm", rms_norm
    yield "activation", activation


def main() -> int:
    torch.manual_seed(0)
    table, worst = [], 0.0
    for name, errors in rows():
        cells = []
        for dtype in DTYPES:
            ours, theirs = errors(dtype)
            worst = max(worst, ours / theirs)
            cells.append(f"{ours:.1e}, {ours / theirs:.2f}x")
        table.append([name, *cells])
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    print(tabulate(table, headers=["kernel", *names], tablefmt="github"))
    print(
        f"\nworst {worst:.2f}x the reference's error, {KERNEL_MULTIPLE}x allowed; transfers copy bits (see their tests)"
    )
    return int(not worst <= KERNEL_MULTIPLE)


if __name__ == "__main__":
    raise SystemExit(main())
