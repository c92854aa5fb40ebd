"""Norm, QKV projection, RoPE and the page write in one kernel, beside the same steps as PyTorch ops.

python profiling/bench_recompute.py --dry-run
python profiling/bench_recompute.py --quick
python profiling/bench_recompute.py --json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal

import bench
import torch
import torch.nn.functional as F
from bench import FULL, MULTIPLE, QUICK, RIVAL_MULTIPLE, TINY, Model, Setting, Side, Task

import kernels
from kernels import reference
from kernels.batch import RaggedBatch

Form = Literal["qkv", "kv", "q"]
TOKENS = {FULL: (1, 64, 512, 2048, 8192), QUICK: (64, 512, 2048), TINY: (40,)}
FORMS: tuple[Form, ...] = ("qkv", "kv", "q")
BEFORE = 4096  # tokens before those that are computed, a multiple of every page size
EPS = 1e-5


@dataclass(frozen=True, eq=False)
class Case:
    """Tokens of one sequence at one layer. weights: arguments of `recompute` by name. k_pages, v_pages: NaN."""

    hidden: torch.Tensor
    batch: RaggedBatch
    weights: dict[str, Any]
    k_pages: torch.Tensor
    v_pages: torch.Tensor

    @classmethod
    def random(cls, model: Model, tokens: int, setting: Setting) -> Case:
        shape, before = model.shape, BEFORE // setting.page
        count = -(-tokens // setting.page)
        batch = setting.batch(BEFORE, BEFORE + tokens, [0] * before + setting.pages(count))
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        position = torch.arange(BEFORE + tokens, device=setting.device)[:, None]
        angles = position * 1e4 ** -torch.linspace(0, 1, shape.head_dim // 2, device=setting.device)
        weights: dict[str, Any] = dict(
            norm_weight=setting.normal(shape.hidden),
            qkv_weight=setting.normal(rows, shape.hidden) * shape.hidden**-0.5,
            eps=EPS,
            cos=angles.cos(),
            sin=angles.sin(),
        )
        for name in ("q_norm_weight", "k_norm_weight") if model.qk_norm else ():
            weights[name] = setting.normal(shape.head_dim)
        pool = torch.full(
            (count, setting.page, shape.kv_heads, shape.head_dim), float("nan"), device=setting.device
        ).to(setting.dtype)
        return cls(setting.normal(tokens, shape.hidden), batch, weights, pool, pool.clone())

    def apart(self) -> Case:
        """The same with pages of its own, NaN."""
        return replace(self, k_pages=self.k_pages.clone(), v_pages=self.v_pages.clone())

    def results(self, q: torch.Tensor, form: Form) -> torch.Tensor:
        """What the form gives, [tokens, elements]: Q, and K and V as found in the pages."""
        found = [] if form == "kv" else [q]
        if form != "q":
            found += [pages.flatten(0, 1)[self.batch.slots] for pages in (self.k_pages, self.v_pages)]
        return torch.cat([x.flatten(1) for x in found], dim=1)

    def run(self, ops: ModuleType, form: Form) -> torch.Tensor:
        """Q, or the pages of K where there is none, by the ops of a backend."""
        pages = dict(k_pages=self.k_pages, v_pages=self.v_pages)
        q = ops.recompute(self.hidden, form=form, batch=self.batch, **self.weights, **pages)
        return self.k_pages if q is None else q

    def wide(self) -> Case:
        """The same in float64, with pages of its own."""
        weights = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in self.weights.items()}
        return Case(self.hidden.double(), self.batch, weights, self.k_pages.double(), self.v_pages.double())


def sides(model: Model, tokens: int, form: Form, setting: Setting) -> list[Side]:
    """Ours and PyTorch's."""
    ops = kernels.backend("triton", setting.device)
    ours = Case.random(model, tokens, setting)
    theirs, same, exact = ours.apart(), ours.apart(), ours.wide()
    expected = exact.results(exact.run(reference, form), form)
    own = bench.relative_norm(same.results(same.run(reference, form), form), expected)

    def error(case: Case, q: torch.Tensor) -> float:
        return bench.relative_norm(case.results(q, form), expected)

    return [
        Side("ours", partial(ours.run, ops, form), partial(error, ours), MULTIPLE * own, rival=False),
        Side("torch, unfused", partial(unfused, theirs, form), partial(error, theirs), RIVAL_MULTIPLE * own),
    ]


def unfused(case: Case, form: Form) -> torch.Tensor:
    """The steps one after the other, as a model in PyTorch has them."""
    kv_heads, head_dim = case.k_pages.shape[2:]
    w, kv_rows = case.weights, kv_heads * head_dim
    q_rows = len(w["qkv_weight"]) - 2 * kv_rows
    rows = {"qkv": slice(None), "kv": slice(q_rows, None), "q": slice(0, q_rows)}[form]
    normed = F.rms_norm(case.hidden, case.hidden.shape[1:], w["norm_weight"], EPS)
    out = F.linear(normed, w["qkv_weight"][rows])
    cos, sin = (
        torch.cat([w[name][case.batch.positions]] * 2, dim=-1).unsqueeze(1).to(out.dtype) for name in ("cos", "sin")
    )

    def head(x: torch.Tensor, norm: str) -> torch.Tensor:
        x = x.unflatten(1, (-1, head_dim))
        if norm in w:
            x = F.rms_norm(x, (head_dim,), w[norm], EPS)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin

    if form != "q":
        k, v = out[:, -2 * kv_rows :].chunk(2, dim=1)
        case.k_pages.flatten(0, 1).index_copy_(0, case.batch.slots, head(k, "k_norm_weight"))
        case.v_pages.flatten(0, 1).index_copy_(0, case.batch.slots, v.unflatten(1, (-1, head_dim)))
    return case.k_pages if form == "kv" else head(out[:, :q_rows], "q_norm_weight")


def tasks(size: str) -> list[Task]:
    """Every model, number of tokens and form."""
    return [
        Task(model.label, f"{tokens} tokens, {form}", *work(model, tokens, form), partial(sides, model, tokens, form))
        for model in bench.models(size)
        for tokens in TOKENS[size]
        for form in FORMS
    ]


def work(model: Model, tokens: int, form: Form) -> tuple[int, int]:
    """FLOPs of the projection, and bytes: hidden states, weights and rotary tables read once, results written once."""
    shape = model.shape
    kv, q = 2 * shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    rows = {"qkv": kv + q, "kv": kv, "q": q}[form]
    rotary = tokens * shape.head_dim * 4
    moved = tokens * shape.hidden + rows * shape.hidden + tokens * rows
    return 2 * tokens * rows * shape.hidden, moved * shape.dtype_bytes + rotary


if __name__ == "__main__":
    sys.exit(bench.main(__doc__, tasks))
