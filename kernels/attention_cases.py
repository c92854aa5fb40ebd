"""The shapes on which `python -m kernels.aot` compiles attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton

from kernels.attention import example_launches
from kernels.attention_tiles import choose_tiles
from kernels.launch import Case, Shape
from kernels.staged import QUANTISED
from kernels.variants import Variant, example, make, names, with_window


def aot_cases(target: str) -> Iterator[Case]:
    """Every head size, GQA and MQA in bf16, the other dtypes, page sizes, every variant, those that models combine, and
    staging in every dtype."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    shapes = {
        "llama-3.1-8b": Shape.example(bf16, 4096, heads=32, kv_heads=8, head_dim=128),
        "qwen2-0.5b": Shape.example(bf16, 896, heads=14, kv_heads=2, head_dim=64),
        "head 80": Shape.example(bf16, 2560, heads=32, kv_heads=32, head_dim=80),
        "head 96": Shape.example(bf16, 3072, heads=32, kv_heads=32, head_dim=96),
        "head 256": Shape.example(bf16, 2048, heads=8, kv_heads=1, head_dim=256),
        "llama-3.1-8b fp16": Shape.example(fp16, 4096, heads=32, kv_heads=8, head_dim=128),
        "llama-3.1-8b fp32": Shape.example(fp32, 4096, heads=32, kv_heads=8, head_dim=128),
    }
    causal = Variant("causal")
    for name, shape in shapes.items():
        yield from _cases(name, shape, target, causal)
    for name in ("llama-3.1-8b", "head 256"):
        kv_heads, head_dim = shapes[name].k_pages.shape[2:]
        pages = torch.empty(4096, 16, kv_heads, head_dim, dtype=bf16, device="meta")
        yield from _cases(f"{name}, page 16", replace(shapes[name], k_pages=pages, v_pages=pages), target, causal)
    llama = shapes["llama-3.1-8b"]
    for name in names():
        yield from _cases(f"llama-3.1-8b, {name}", llama, target, example(name, llama.heads))
    gemma = Shape.example(bf16, 3584, heads=16, kv_heads=8, head_dim=256)
    yield from _cases("gemma-2-9b", gemma, target, with_window(make("soft_cap", cap=50.0), 4096))
    gpt_oss = Shape.example(bf16, 2880, heads=64, kv_heads=8, head_dim=64)
    yield from _cases("gpt-oss-20b", gpt_oss, target, with_window(example("attention_sinks", gpt_oss.heads), 128))
    for name in ("llama-3.1-8b", "qwen2-0.5b", "head 256", "llama-3.1-8b fp16"):
        for dtype in (shapes[name].dtype, *QUANTISED):
            staged = f"{name}, staged {dtype}".replace("torch.", "")
            yield from _cases(staged, shapes[name], target, causal, dtype)


def _cases(name: str, shape: Shape, target: str, variant: Variant, staged: torch.dtype | None = None) -> Iterator[Case]:
    tiles = choose_tiles(target, shape.k_pages, shape.v_pages, staged)
    for form, tile, splits in zip(("tile", "split"), tiles, (1, 2), strict=True):
        launch, *merge = example_launches(shape, target, variant, (tile, splits), staged)
        matrix = shape.dtype != torch.float32 or target.startswith("hip")
        head_dim = triton.next_power_of_2(shape.k_pages.shape[3])  # what is multiplied, padding included
        yield Case(name=f"{name}, {form}", launch=launch, matrix=matrix, head_dim=head_dim)
        yield from (Case(name=f"{name}, merge", launch=launch, matrix=False) for launch in merge)
