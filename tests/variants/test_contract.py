"""What holds for every variant: it is found, tested, combined, compiled anew when its hooks change, and its reference
needs no Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels.attention
import kernels.reference
from kernels.variants import Variant, combine, example, make, names, with_window
from kernels.variants.base import Hook
from kernels.variants.language import jit
from tests.interpreter import VARIABLE, interpret
from tests.kernels.dense import Sequences
from tests.tolerances import KERNEL_MULTIPLE, relative_norm
from tests.variants.check import FORMS, HEADS, check_variant

NAMES = names()


def run(code: str, *arguments: str, **environment: str) -> str:
    """What a program prints in a process that compiles."""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=inherited | environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_five_are_found():
    assert {"alibi", "attention_sinks", "causal", "sliding_window", "soft_cap"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_has_a_test_and_an_example(name):
    assert (Path(__file__).parent / f"test_{name}.py").exists()
    variant = example(name, HEADS)
    assert variant.name == name and variant.__class__ is Variant


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="attention variant 'flash' is not one of alibi, attention_sinks, causal"):
        make("flash")


def test_variants_combine(ops):
    logits, cap = torch.linspace(0.0, 2.0, HEADS), 5.0
    variant = combine(make("soft_cap", cap=cap), make("attention_sinks", logits=logits))
    assert variant.name == "soft_cap+attention_sinks"
    check_variant(
        ops,
        variant,
        window=19,
        score=lambda scores, head, query, keys: cap * torch.tanh(scores / cap),
        sink=lambda head: logits[head].item(),
    )


@pytest.mark.parametrize("form", FORMS, ids=["tile", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted({*NAMES} - {"causal"}))  # whose errors are those of the forms
def test_errors_are_at_most_twice_the_references(interpreted, monkeypatch, name, dtype, form):
    monkeypatch.setattr(kernels.attention, "choose_form", lambda *arguments: form)
    sequences = Sequences.random([60], kv_heads=1, width=64, page_size=16, dtype=dtype)
    batch = sequences.batch((0, 50, 60))
    q = sequences.queries(batch, heads=3)
    how = dict(batch=batch, scale=0.125, variant=example(name, 3), return_lse=True)
    exact = kernels.reference.attention(q.double(), sequences.k_pages.double(), sequences.v_pages.double(), **how)
    ours, references = (
        [
            relative_norm(found, expected)
            for found, expected in zip(
                ops.attention(q, sequences.k_pages, sequences.v_pages, **how), exact, strict=True
            )
        ]
        for ops in (interpreted, kernels.reference)
    )
    assert all(error <= KERNEL_MULTIPLE * theirs for error, theirs in zip(ours, references, strict=True))


def test_two_of_a_kind_do_not_combine():
    with pytest.raises(ValueError, match="'sliding_window' and 'sliding_window' both bring a mask hook; write one var"):
        with_window(make("sliding_window", window=4), 9)


def test_bounds_need_a_mask():
    with pytest.raises(ValueError, match="variant 'bare' has bounds but no mask"):
        Variant("bare", bounds=Hook(lambda first, last, parameters: (0, 0, last, last), None))


@interpret
def everything_mask(head, query, key, parameters):
    return key >= 0


@interpret
def everything_bounds(first, last, parameters):
    return -100, -100, 1000000, 1000000


def test_bounds_are_cut_to_the_keys_that_exist(ops):
    bounds = Hook(lambda first, last, parameters: (-100, -100, 10**6, 10**6), everything_bounds)
    mask = Hook(lambda head, query, key, parameters: key >= 0, everything_mask)
    check_variant(ops, Variant("everything", mask=mask, bounds=bounds))


@interpret
def thirds_mask(head, query, key, parameters):
    return ((key + head) % 3 != 0) | (key == query)


def test_a_mask_without_bounds_is_computed_for_every_key_and_head(ops):
    def visible(head, query, key, parameters=()):
        return ((key + head) % 3 != 0) | (key == query)

    variant = Variant("thirds", mask=Hook(visible, thirds_mask))
    assert variant.key_bounds(3, 9) == (0, 0, 0, 10)
    check_variant(ops, variant, visible=visible)


def test_references_need_no_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch
from kernels.variants import example, names
import kernels.reference
from tests.kernels.dense import Sequences
sequences = Sequences.random([20])
batch = sequences.batch((0, 10, 20))
q = sequences.queries(batch, 4)
for name in names():
    pages = sequences.k_pages, sequences.v_pages
    out, _ = kernels.reference.attention(q, *pages, batch=batch, scale=0.25, variant=example(name, 4))
    print(name, bool(out.isfinite().all()))
"""
    assert run(code).split() == [word for name in NAMES for word in (name, "True")]


HOOKED = """
import importlib, linecache, sys
from pathlib import Path
import torch
from kernels.aot import compile_launch
from kernels.attention import example_launches
from kernels.attention_tiles import Tile
from kernels.launch import Shape
from kernels.variants import Variant
from kernels.variants.base import Hook
folder, *texts = sys.argv[1:]
sys.path.insert(0, folder)
shape = Shape.example(torch.bfloat16, 128, heads=2, kv_heads=2, head_dim=16)
for text in texts:
    Path(folder, "hooked.py").write_text(text)
    sys.modules.pop("hooked", None)
    importlib.invalidate_caches()
    linecache.clearcache()
    hooked = importlib.import_module("hooked")
    variant = Variant("hooked", score=Hook(None, hooked.score, (2.0,)))
    launch = example_launches(shape, "cuda:80", variant, (Tile(16, 16, 1, 1), 1))[0]
    compiled = compile_launch(launch, "cuda:80")
    print(hash(compiled.asm["ptx"]), len(list(Path(folder, "cache").rglob("*.cubin"))))
"""

HOOK = """
from kernels.variants.language import jit, tl

@jit
def inner(score, parameters):
    return score * parameters[0]{inner}

@jit
def score(score, head, query, key, parameters):
    return inner(score, parameters){outer}
"""


def test_an_edited_hook_is_compiled_anew(tmp_path):
    """In the hook itself or in what it calls; and an unedited one is served from the cache."""
    edits = [{}, {}, dict(outer=" + 1"), dict(inner=" + 2")]
    texts = [HOOK.format(**(dict(inner="", outer="") | edit)) for edit in edits]
    fixed = dict(PYTHONDONTWRITEBYTECODE="1", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    plain, again, outer, inner = (line.split() for line in run(HOOKED, str(tmp_path), *texts, **fixed).splitlines())
    assert again == plain and plain[1] == "1"
    assert len({plain[0], outer[0], inner[0]}) == 3 and inner[1] == "3"


def test_a_hook_stays_a_function_without_triton(monkeypatch):
    monkeypatch.setattr("kernels.variants.language.triton", None)
    assert jit(run) is run
