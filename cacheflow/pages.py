"""The page pool, where KV lives while requests use it, and the hidden pool, where hidden states wait between ops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class Rows:
    """Which of n numbered rows are free. Hands out runs of neighbours where it can: they can be read without a copy."""

    def __init__(self, count: int) -> None:
        self._free = bytearray(b"\1" * count)
        self.free = count

    def take(self, count: int) -> list[int] | None:
        """`count` ascending row numbers, neighbours if there is such a run; None if fewer are free."""
        if count > self.free:
            return None
        self.free -= count
        run = self._free.find(b"\1" * count)
        if run >= 0:
            rows = list(range(run, run + count))
        else:
            rows, at = [], -1
            for _ in range(count):
                at = self._free.find(b"\1", at + 1)
                rows.append(at)
        for row in rows:
            self._free[row] = 0
        return rows

    def give_back(self, rows: Iterable[int]) -> None:
        for row in rows:
            if self._free[row]:
                raise RuntimeError(f"row {row} was given back twice")
            self._free[row] = 1
            self.free += 1


class PagePool:
    """KV pages of all requests.

    k, v: [layers, num_pages, page_size, kv_heads, head_dim] in the model's dtype, NHD. A page id is valid at every
    layer. The memory is not cleared: what is stale stays there until it is overwritten, and nobody may read it.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of at least one token, not {num_pages} of {page_size}")
        shape = (layers, num_pages, page_size, kv_heads, head_dim)
        self.page_size = page_size
        self.num_pages = num_pages
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self._rows = Rows(num_pages)

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer (k_pages, v_pages), each [num_pages, page_size, kv_heads, head_dim]."""
        return list(zip(self.k, self.v, strict=True))

    @property
    def free_pages(self) -> int:
        return self._rows.free

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> list[int] | None:
        """Ids of pages for so many tokens, ascending and without gaps if possible; None if too few are free."""
        return self._rows.take(self.pages_for(tokens))

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. The caller answers for it that no op in flight reads or writes them any more."""
        self._rows.give_back(pages)

    def slots(self, pages: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """[stop - start] int64: where tokens [start, stop) of a request with these pages lie."""
        position = torch.arange(start, stop)
        table = torch.as_tensor(pages, dtype=torch.int64)
        return table[position // self.page_size] * self.page_size + position % self.page_size


class HiddenPool:
    """Hidden states of columns between two ops: the GPU memory that the hidden budget limits.

    states: [tokens, hidden] in the model's dtype. Rows are reused as soon as they are given back, which is safe
    because every op that reads or writes them runs on the one compute stream, in order.
    """

    def __init__(self, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.states = torch.empty(tokens, hidden, dtype=dtype, device=device)
        self._rows = Rows(tokens)

    def allocate(self, tokens: int) -> torch.Tensor:
        """[tokens] int64 row numbers, on the host. Raises MemoryError if too few are free."""
        rows = self._rows.take(tokens)
        if rows is None:
            raise MemoryError(
                f"hidden states of {tokens} tokens do not fit the {self._rows.free} free rows of "
                f"{len(self.states)}; raise hidden_tokens"
            )
        return torch.tensor(rows, dtype=torch.int64)

    def release(self, rows: torch.Tensor) -> None:
        self._rows.give_back(rows.tolist())
