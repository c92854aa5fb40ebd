"""Plain float64 formulas, one token at a time, that share nothing with the code under test; and pools to test on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from kernels.batch import Part, RaggedBatch

NAN = float("nan")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    score: Callable[[torch.Tensor, int, int, torch.Tensor], torch.Tensor] | None = None,
    visible: Callable[[int, int, int], bool] | None = None,
    sink: Callable[[int], float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [n, heads, d] at positions start..; k, v: [tokens, kv_heads, width] from position 0. Returns out and lse.
    score(scores, head, position, keys) replaces the scores, visible(head, position, key) hides keys, and sink(head) is
    the score of a key without a value."""
    n, heads, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(n, heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((n, heads), float("-inf"), dtype=torch.float64)
    for i in range(n):
        for head in range(heads):
            position = start + i
            keys = [
                j
                for j in range(position + 1)
                if (window is None or position - j < window) and (visible is None or visible(head, position, j))
            ]
            if not keys and sink is None:
                continue
            keys = torch.tensor(keys, dtype=torch.int64)
            scores = k[keys, head // group].double() @ q[i, head].double() * scale
            if score is not None:
                scores = score(scores, head, position, keys)
            extra = [] if sink is None else [torch.tensor([sink(head)], dtype=torch.float64)]
            lse[i, head] = torch.logsumexp(torch.cat([scores, *extra]), dim=0)
            weights = torch.softmax(torch.cat([scores, *extra]), dim=0)[: len(keys)]
            out[i, head] = weights @ v[keys, head // group].double()
    return out, lse


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, d]; cos, sin: [tokens, d / 2]; pair i is (i, i + d / 2), turned as a complex number."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = turned * torch.complex(cos.double(), sin.double()).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def lazy(elements: int) -> torch.Tensor:
    """float16 memory that the operating system provides where it is touched."""
    return torch.from_numpy(np.empty(elements, dtype=np.int16)).view(torch.float16)


def pool(
    num_pages: int,
    page_size: int,
    kv_heads: int,
    width: int,
    *,
    layout: str = "NHD",
    dtype: torch.dtype = torch.float32,
    stale: float = NAN,
    guard: int = 0,
) -> torch.Tensor:
    """Pages full of `stale`, each head followed by `guard` elements of the pool that belong to nobody.
    [num_pages, page_size, kv_heads, width]."""
    if layout == "NHD":
        base = torch.full((num_pages, page_size, kv_heads, width + guard), stale, dtype=dtype)
    elif layout == "HND":
        base = torch.full((num_pages, kv_heads, page_size, width + guard), stale, dtype=dtype).transpose(1, 2)
    elif layout == "joined":  # another tensor of the same width lies between two pages
        base = torch.full((num_pages, 2, page_size, kv_heads, width + guard), stale, dtype=dtype)[:, 1]
    else:
        raise ValueError(layout)
    return base[..., :width]


@dataclass
class Sequences:
    """Several sequences with all their keys and values, dense and in pages."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    pages: list[list[int]]
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_size: int

    @classmethod
    def random(
        cls,
        lengths: list[int],
        *,
        kv_heads: int = 2,
        width: int = 16,
        v_width: int | None = None,
        page_size: int = 4,
        layout: str = "NHD",
        permuted: bool = True,
        dtype: torch.dtype = torch.float32,
        stale: float = NAN,
        guard: int = 3,
        seed: int = 0,
    ) -> Sequences:
        generator = torch.Generator().manual_seed(seed)
        v_width = width if v_width is None else v_width
        counts = [-(-length // page_size) for length in lengths]
        num_pages = sum(counts) + 3
        # Drawn apart from the values, so that these do not depend on the tables.
        ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        ids = iter(ids if permuted else range(num_pages))
        k_pages = pool(num_pages, page_size, kv_heads, width, layout=layout, dtype=dtype, stale=stale, guard=guard)
        v_pages = pool(num_pages, page_size, kv_heads, v_width, layout=layout, dtype=dtype, stale=stale, guard=guard)
        k = [torch.randn(n, kv_heads, width, generator=generator).to(dtype) for n in lengths]
        v = [torch.randn(n, kv_heads, v_width, generator=generator).to(dtype) for n in lengths]
        pages = [list(islice(ids, count)) for count in counts]
        for row, keys, values in zip(pages, k, v, strict=True):
            for token in range(len(keys)):
                k_pages[row[token // page_size], token % page_size] = keys[token]
                v_pages[row[token // page_size], token % page_size] = values[token]
        return cls(k=k, v=v, pages=pages, k_pages=k_pages, v_pages=v_pages, page_size=page_size)

    def batch(self, *parts: tuple[int, int, int]) -> RaggedBatch:
        """From (sequence, start, stop) each."""
        return RaggedBatch.build(
            [Part(start=start, stop=stop, pages=self.pages[index]) for index, start, stop in parts], self.page_size
        )

    def queries(self, batch: RaggedBatch, heads: int, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(batch.num_tokens, heads, self.k_pages.shape[3], generator=generator)
        return q.to(self.k_pages.dtype)

    def expected(self, q: torch.Tensor, *parts: tuple[int, int, int], **how) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention of the packed q over these parts is, in float64; scale is the true head_dim ** -0.5."""
        outs, offset = [], 0
        for index, start, stop in parts:
            rows = q[offset : offset + stop - start]
            outs.append(attend(rows, self.k[index], self.v[index], start, scale=q.shape[2] ** -0.5, **how))
            offset += stop - start
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])
