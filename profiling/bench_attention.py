"""Attention beside PyTorch's, flash-attn's and FlashInfer's: chunks, suffixes, decoding, and keys in staging.

    python profiling/bench_attention.py --dry-run
    python profiling/bench_attention.py --quick
    python profiling/bench_attention.py --json

Ours and FlashInfer read K and V from permuted pages; PyTorch and flash-attn get them dense, without what gathering
would cost them. Where the prefix is in staging, the rival is the same kernel behind a copy to pages, in its best case:
one launch for K and one for V.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import bench
import torch
import torch.nn.functional as F
from bench import FULL, MULTIPLE, QUICK, RIVAL_MULTIPLE, TINY, Model, Setting, Side, Task
from torch.nn.attention.bias import causal_lower_right

import kernels
from cacheflow.commands._common import short
from cacheflow.costs.base import Span
from kernels import reference
from kernels.batch import Part, RaggedBatch
from kernels.staged import Staged

K = 1024
# Queries and tokens before them.
PAGED = {
    FULL: [
        *((512, context) for context in (0, 4 * K, 16 * K, 32 * K)),  # a recomputed chunk, the first and later ones
        *((suffix, context) for suffix in (64, 128, 256) for context in (4 * K, 16 * K, 64 * K)),
        (512, 64 * K),
        *((queries, context) for queries in (1, 8) for context in (4 * K, 64 * K)),
    ],
    QUICK: [(512, 0), (512, 16 * K), (64, 16 * K), (1, 16 * K)],
    TINY: [(24, 40), (24, 0), (1, 40)],
}
STAGED = {
    FULL: [(suffix, context) for suffix in (64, 512) for context in (4 * K, 16 * K, 64 * K)],
    QUICK: [(64, 16 * K)],
    TINY: [(8, 64)],
}
STORED = (None, torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class Case:
    """The last `queries` tokens of one sequence against all of it.

    k, v: [tokens, kv_heads, head_dim], what the pages hold as well. staged: what holds the tokens before the queries in
    place of pages, where NaN is then. rows: of q, those that are checked.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: RaggedBatch
    pages: list[int]
    rows: list[int]
    staged: Staged | None = None

    @classmethod
    def random(cls, model: Model, queries: int, context: int, setting: Setting) -> Case:
        shape, stop = model.shape, context + queries
        count = -(-stop // setting.page)
        pages = setting.pages(count)
        k, v = setting.normal(2, stop, shape.kv_heads, shape.head_dim)
        batch = setting.batch(context, stop, pages)
        empty = k.new_zeros(count, setting.page, *k.shape[1:])
        k_pages, v_pages = (empty.index_put(_places(batch, stop, setting.page), dense) for dense in (k, v))
        q = setting.normal(queries, shape.heads, shape.head_dim)
        return cls(q, k, v, k_pages, v_pages, batch, pages, bench.sample(queries))

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    def attend(self, ops: ModuleType = reference) -> torch.Tensor:
        """[queries, heads, head_dim], by the ops of a backend."""
        out, _ = ops.attention(
            self.q, self.k_pages, self.v_pages, batch=self.batch, scale=self.scale, staged=self.staged
        )
        return out

    def expected(self) -> tuple[Callable[[torch.Tensor], float], float]:
        """The error of an output against float64, NaN for one that is not finite; and the reference's own."""
        starts = [self.batch.starts[0] + row for row in self.rows]
        parts = [Part(start, start + 1, self.pages) for start in starts]
        staged, wide_staged = None, None
        if self.staged is not None:
            runs, scales = [*self.staged.runs] * len(parts), (self.staged.k_scale, self.staged.v_scale)
            staged = Staged.build(self.staged.k, self.staged.v, runs, *scales)
            wide_staged = staged
            if self.staged.k_scale is None:
                wide_staged = Staged.build(self.staged.k.double(), self.staged.v.double(), runs)
        batch = RaggedBatch.build(parts, self.batch.page_size, self.q.device)
        some = replace(self, q=self.q[self.rows], batch=batch, staged=staged)
        wide = {name: getattr(some, name).double() for name in ("q", "k_pages", "v_pages")}
        exact = replace(some, **wide, staged=wide_staged).attend()
        own = bench.relative_norm(some.attend(), exact)

        def error(out: torch.Tensor) -> float:
            return bench.relative_norm(out[self.rows], exact) if bool(out.isfinite().all()) else float("nan")

        return error, own


def _places(batch: RaggedBatch, stop: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and offset of tokens [0, stop)."""
    token = torch.arange(stop, device=batch.block_table.device)
    return batch.block_table[0, token // page].long(), token % page


def paged(model: Model, queries: int, context: int, setting: Setting) -> list[Side]:
    """All keys in pages."""
    ops = kernels.backend("triton", setting.device)
    case = Case.random(model, queries, context, setting)
    error, own = case.expected()
    sides = [Side("ours", partial(case.attend, ops), error, MULTIPLE * own, rival=False)]
    return sides + [Side(name, run, error, RIVAL_MULTIPLE * own) for name, run in rivals(case)]


def rivals(case: Case) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """What else can be imported here, by name."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (case.q, case.k, case.v))
    bias = causal_lower_right(q.shape[2], k.shape[2]) if q.shape[2] > 1 else None  # one query sees all

    def sdpa() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=case.scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    yield f"torch SDPA {torch.__version__}", sdpa
    for name, module in (("flash-attn 2", "flash_attn"), ("flash-attn 3", "flash_attn_interface")):
        if case.q.is_cuda and find_spec(module) is not None:
            yield name, partial(_flash_attn, module, case)
    if case.q.is_cuda and find_spec("flashinfer") is not None:
        yield "FlashInfer", _flashinfer(case)


def _flash_attn(module: str, case: Case) -> torch.Tensor:
    dense = (x.unsqueeze(0) for x in (case.q, case.k, case.v))
    out = import_module(module).flash_attn_func(*dense, softmax_scale=case.scale, causal=True)
    return (out[0] if isinstance(out, tuple) else out).squeeze(0)  # some versions add the log-sum-exp


def _flashinfer(case: Case) -> Callable[[], torch.Tensor]:
    @cache
    def planned() -> Any:
        (queries, heads, head_dim), (_, page, kv_heads, _) = case.q.shape, case.k_pages.shape
        int32 = partial(torch.tensor, dtype=torch.int32, device=case.q.device)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=case.q.device)
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            int32([0, queries]),
            int32([0, len(case.pages)]),
            int32(case.pages),
            int32([(len(case.k) - 1) % page + 1]),
            heads,
            kv_heads,
            head_dim,
            page,
            causal=True,
            sm_scale=case.scale,
            q_data_type=case.q.dtype,
            kv_data_type=case.k_pages.dtype,
        )
        return wrapper

    return lambda: planned().run(case.q, (case.k_pages, case.v_pages))


def staged(model: Model, queries: int, context: int, stored: torch.dtype | None, setting: Setting) -> list[Side]:
    """All keys before the queries in staging, in whole chunks."""
    ops = kernels.backend("triton", setting.device)
    full = Case.random(model, queries, context, setting)
    chunks = context // setting.chunk
    slots = setting.pages(chunks)
    whole = [_stored(dense[:context].transpose(0, 1).contiguous(), stored) for dense in (full.k, full.v)]
    (k, v), (k_scale, v_scale) = (
        [None if x is None else _chunked(x, slots, setting.chunk) for x in both] for both in zip(*whole, strict=True)
    )
    assert k is not None and v is not None
    table = Staged.build(k, v, [(0, slots)], k_scale, v_scale)
    page, offset = _places(full.batch, context, setting.page)
    token_slots = page * setting.page + offset
    pools = [pool.index_put((page, offset), pool.new_tensor(float("nan"))) for pool in (full.k_pages, full.v_pages)]

    def missing() -> Case:
        return replace(full, k_pages=pools[0].clone(), v_pages=pools[1].clone())

    def copy(case: Case, ops: ModuleType) -> Case:
        for pages, (values, scales) in zip((case.k_pages, case.v_pages), whole, strict=True):
            scale = None if scales is None else scales.unsqueeze(0)
            ops.pages_from_staging(values.unsqueeze(0), pages.unsqueeze(0), token_slots, scale)
        return case

    direct, copied, ready = replace(missing(), staged=table), missing(), copy(missing(), reference)
    error, own = direct.expected()
    bound = MULTIPLE * own
    return [
        Side("ours, from staging", partial(direct.attend, ops), error, bound, rival=False),
        Side("copied to pages, then attended", lambda: copy(copied, ops).attend(ops), error, bound),
        Side("attended, copied before", partial(ready.attend, ops), error, bound, rival=False),
    ]


def _stored(dense: torch.Tensor, stored: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[kv_heads, tokens, head_dim] as a store holds it, and a scale for each row where it is quantised."""
    if stored is None:
        return dense, None
    wide = dense.float()
    scale = wide.abs().amax(dim=2) / (127 if stored == torch.int8 else torch.finfo(stored).max)
    coded = wide / scale.unsqueeze(2)
    return (coded.round() if stored == torch.int8 else coded).to(stored), scale


def _chunked(x: torch.Tensor, slots: list[int], chunk: int) -> torch.Tensor:
    """[kv_heads, tokens, ...] as [slots, kv_heads, chunk, ...], chunk i in slots[i]."""
    out = x.new_zeros(len(slots), x.shape[0], chunk, *x.shape[2:])
    for number, slot in enumerate(slots):
        out[slot] = x[:, number * chunk : (number + 1) * chunk]
    return out


def tasks(size: str) -> list[Task]:
    """Models that differ in nothing that attention sees share a row."""
    same: dict[tuple[int, int, int], list[Model]] = {}
    for model in bench.models(size):
        same.setdefault((model.shape.heads, model.shape.kv_heads, model.shape.head_dim), []).append(model)
    found = []
    for group in same.values():
        model, label = group[0], ", ".join(model.label for model in group)
        for queries, context in PAGED[size]:
            what = f"{queries} behind {short(context) if context else 0}"
            flops, nbytes = work(model, queries, context)
            found.append(Task(label, what, flops, nbytes, partial(paged, model, queries, context)))
        for queries, context in STAGED[size]:
            for stored in STORED:
                name = "model dtype" if stored is None else str(stored).removeprefix("torch.")
                flops, nbytes = work(model, queries, context, stored)
                make = partial(staged, model, queries, context, stored)
                found.append(Task(label, f"{queries} behind {short(context)}, staged {name}", flops, nbytes, make))
    return found


def work(model: Model, queries: int, context: int, stored: torch.dtype | None = None) -> tuple[int, int]:
    """FLOPs, and bytes: Q, K and V read once, the output written. stored: of what is before the queries; quantised
    rows come with four bytes of scale for each of K and V."""
    shape = model.shape
    flops = Span(context, context + queries, None).pairs * shape.pair_flops
    cell = shape.cell_bytes if stored is None else 2 * shape.kv_heads * (shape.head_dim * stored.itemsize + 4)
    rows = 2 * queries * shape.heads * shape.head_dim * shape.dtype_bytes
    return flops, rows + queries * shape.cell_bytes + context * cell


if __name__ == "__main__":
    sys.exit(bench.main(__doc__, tasks))
