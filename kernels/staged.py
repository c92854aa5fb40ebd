"""Chunks that attention reads from a staging buffer, where they landed, in place of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

QUANTISED = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class Staged:
    """For every part of a batch a run of whole chunks in the store's layout, complete and verified.

    k: [slots, kv_heads, chunk_tokens, head_dim]; v: [..., v_head_dim]; any strides whose last dimension is contiguous.
        The dtype of the queries, or int8 or float8_e4m3fn with scales.
    k_scale, v_scale: [slots, kv_heads, chunk_tokens] float32: a key is its row of k times its scale. None = as stored.
    table: [sequences, max_chunks] int32, the slot of every chunk of a run, at the chunk's number in its sequence; the
        rest is undefined.
    start, stop: [sequences] int32, the tokens of the run; equal where a part reads nothing from staging.
    runs: by part, the number of the first chunk and the slots; on the host.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    table: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor
    runs: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def build(
        cls,
        k: torch.Tensor,
        v: torch.Tensor,
        runs: Sequence[tuple[int, Sequence[int]]],
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> Staged:
        """runs: for every part of the batch, the number of the run's first chunk and its slots; no slots = no run.
        Raises ValueError for tensors that do not fit together, or a slot that is not there."""
        _check(k, v, k_scale, v_scale)
        width = max((first + len(slots) for first, slots in runs), default=0)
        table = torch.full((len(runs), max(width, 1)), -1, dtype=torch.int32)
        for row, (first, slots) in zip(table, runs, strict=True):
            wrong = next((slot for slot in slots if not 0 <= slot < len(k)), None)
            if wrong is not None or first < 0:
                raise ValueError(f"a run from chunk {first} in slots {list(slots)} is not in staging of {len(k)} slots")
            row[first : first + len(slots)] = torch.tensor(slots, dtype=torch.int32)
        chunk = k.shape[2]
        start = torch.tensor([first * chunk for first, _ in runs], dtype=torch.int32)
        stop = torch.tensor([(first + len(slots)) * chunk for first, slots in runs], dtype=torch.int32)
        return cls(
            k=k,
            v=v,
            k_scale=k_scale,
            v_scale=v_scale,
            table=table.to(k.device, non_blocking=True),
            start=start.to(k.device, non_blocking=True),
            stop=stop.to(k.device, non_blocking=True),
            runs=tuple((first, tuple(slots)) for first, slots in runs),
        )

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.k.shape[2]

    def tokens(self, part: int) -> range:
        """The tokens of a part's sequence that are in staging."""
        first, slots = self.runs[part]
        return range(first * self.chunk_tokens, (first + len(slots)) * self.chunk_tokens)


def _check(k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        raise ValueError(f"staged K is {list(k.shape)} {k.dtype} and V {list(v.shape)} {v.dtype}; stage them alike")
    for scale in (k_scale, v_scale):
        if (scale is None) == (k.dtype in QUANTISED):
            raise ValueError(f"staged {k.dtype} needs {'scales' if scale is None else 'no scales'}; give K's and V's")
        if scale is not None and (scale.shape != k.shape[:3] or scale.dtype != torch.float32):
            raise ValueError(
                f"scales are {list(scale.shape)} {scale.dtype}; give one float32 for each token and head, "
                f"{list(k.shape[:3])}"
            )
