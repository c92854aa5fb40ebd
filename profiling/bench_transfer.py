"""Staging to pages and back, beside PyTorch's index copy, and beside a copy of the same bytes that moves nothing apart.

    python profiling/bench_transfer.py --dry-run
    python profiling/bench_transfer.py --quick
    python profiling/bench_transfer.py --json

Every shape is one part, K, of a band of layers. The plain copy is what the memory, or the link, can do; it is no rival,
because it leaves the cells where no kernel looks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import bench
import torch
from bench import MULTIPLE, QUICK, TINY, Model, Setting, Side, Task

import kernels
from cacheflow.commands._common import short
from kernels import reference

IN, OUT, HOST = "to pages", "from pages", "pinned host to pages"
Shape = tuple[str, int, int, torch.dtype | None]
E4M3 = torch.float8_e4m3fn


def shapes(model: Model, size: str) -> list[Shape]:
    """Way, layers of the band, tokens, and dtype in staging, None for the model's."""
    layers = model.shape.layers
    if size == TINY:
        return [(IN, layers, 40, None), (IN, layers, 40, torch.int8), (IN, 1, 40, E4M3), (OUT, layers, 40, None)]
    chunk: list[Shape] = [(way, layers, 512, None) for way in (IN, OUT, HOST)]
    if size == QUICK:
        return [*chunk, (IN, layers, 512, torch.int8)]
    quantised: list[Shape] = [(way, layers, 512, stored) for way in (IN, HOST) for stored in (torch.int8, E4M3)]
    return [(IN, 1, 512, None), (IN, 8, 512, None), *chunk, *quantised, (IN, layers, 4096, None), (OUT, 8, 512, None)]


@dataclass(frozen=True, eq=False)
class Case:
    """staging: [layers, kv_heads, tokens, head_dim], on the host or the device, and its scales; pages: [layers, pages,
    page, kv_heads, head_dim], where cells of other tokens are NaN. slots: [tokens]."""

    staging: torch.Tensor
    scales: torch.Tensor | None
    pages: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def random(cls, model: Model, layers: int, tokens: int, stored: torch.dtype | None, setting: Setting) -> Case:
        """Staging is full, pages are NaN."""
        shape = model.shape
        staging, scales = setting.normal(layers, shape.kv_heads, tokens, shape.head_dim), None
        if stored is not None:
            scales = staging.float().abs().amax(dim=3) / (127 if stored == torch.int8 else torch.finfo(stored).max)
            coded = staging.float() / scales.unsqueeze(3)
            staging = (coded.round() if stored == torch.int8 else coded).to(stored)
        count = -(-tokens // setting.page)
        pages = torch.full((layers, count, setting.page, shape.kv_heads, shape.head_dim), float("nan"))
        slots = setting.batch(0, tokens, setting.pages(count)).slots
        return cls(staging, scales, pages.to(setting.device, setting.dtype), slots)

    def cells(self, pages: torch.Tensor) -> torch.Tensor:
        """What pages hold of the tokens, as staging is laid out."""
        return pages.flatten(1, 2)[:, self.slots].transpose(1, 2)

    def exact(self) -> torch.Tensor:
        """Staging in float64."""
        wide = self.staging.to(self.pages.device).double()
        return wide if self.scales is None else wide * self.scales.to(self.pages.device).double().unsqueeze(3)


def sides(model: Model, way: str, layers: int, tokens: int, stored: torch.dtype | None, setting: Setting) -> list[Side]:
    """Ours, PyTorch's and the plain copy, each with a destination of its own."""
    ops = kernels.backend("triton", setting.device)
    case = Case.random(model, layers, tokens, stored, setting)
    if way == OUT:
        return _out_of_pages(case, ops)
    exact, device = case.exact(), setting.device
    known = case.pages.clone()
    staged, scales = case.staging, case.scales
    reference.pages_from_staging(staged, list(known), case.slots, scales)
    bound = MULTIPLE * bench.relative_norm(case.cells(known), exact)
    if way == HOST:
        staged = staged.cpu().pin_memory()
        scales = None if scales is None else scales.cpu().pin_memory()

    def error(pages: torch.Tensor) -> float:
        if int(pages.isfinite().sum()) != case.staging.numel():  # cells of others were written too, or ours were not
            return float("nan")
        return bench.relative_norm(case.cells(pages), exact)

    def ours(pages: torch.Tensor) -> torch.Tensor:
        ops.pages_from_staging(staged, pages, case.slots, scales)
        return pages

    def index_copy(pages: torch.Tensor) -> torch.Tensor:
        values = staged.to(device, non_blocking=True)
        if scales is not None:
            values = (values.float() * scales.to(device, non_blocking=True).unsqueeze(3)).to(pages.dtype)
        pages.flatten(1, 2).index_copy_(1, case.slots, values.transpose(1, 2))
        return pages

    copy = torch.empty_like(case.staging)
    return [
        Side("ours", partial(ours, case.pages.clone()), error, bound, rival=False),
        Side("torch index copy", partial(index_copy, case.pages.clone()), error, bound),
        Side("plain copy", lambda: copy.copy_(staged, non_blocking=True), _equal(case.staging), 0.0, rival=False),
    ]


def _out_of_pages(case: Case, ops: ModuleType) -> list[Side]:
    reference.pages_from_staging(case.staging, list(case.pages), case.slots)
    error = _equal(case.staging)

    def ours(staging: torch.Tensor) -> torch.Tensor:
        ops.staging_from_pages(case.pages, case.slots, staging)
        return staging

    def index_copy(staging: torch.Tensor) -> torch.Tensor:
        return staging.copy_(case.pages.flatten(1, 2).index_select(1, case.slots).transpose(1, 2))

    destinations = [torch.full_like(case.staging, float("nan")) for _ in range(3)]
    return [
        Side("ours", partial(ours, destinations[0]), error, 0.0, rival=False),
        Side("torch index copy", partial(index_copy, destinations[1]), error, 0.0),
        Side("plain copy", lambda: destinations[2].copy_(case.staging), error, 0.0, rival=False),
    ]


def _equal(expected: torch.Tensor) -> Callable[[torch.Tensor], float]:
    return lambda actual: 0.0 if torch.equal(actual, expected) else float("nan")


def tasks(size: str) -> list[Task]:
    """Every model and shape."""
    found = []
    for model in bench.models(size):
        for way, layers, tokens, stored in shapes(model, size):
            nbytes, link = work(model, way, layers, tokens, stored)
            name = "" if stored is None else f", {str(stored).removeprefix('torch.')}"
            what = f"{short(tokens)} tokens of {layers} layers {way}{name}"
            make = partial(sides, model, way, layers, tokens, stored)
            found.append(Task(model.label, what, 0, nbytes, make, link))
    return found


def work(model: Model, way: str, layers: int, tokens: int, stored: torch.dtype | None) -> tuple[int, int]:
    """Bytes in the GPU's memory, and over the host link: every cell read once, with its scale, and written once."""
    shape = model.shape
    rows = layers * shape.kv_heads * tokens
    pages = rows * shape.head_dim * shape.dtype_bytes
    staging = pages if stored is None else rows * (shape.head_dim * stored.itemsize + 4)
    return (pages, staging) if way == HOST else (pages + staging, 0)


if __name__ == "__main__":
    sys.exit(bench.main(__doc__, tasks))
