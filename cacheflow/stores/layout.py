"""How the cells of one chunk lie in its object: `[layer][part][kv_head][token][width]`.

A *block* is the `[token][width]` of one (layer, part, kv_head): the smallest thing that can be read and the unit of the
checksums. Blocks are numbered in layout order, so every selection of layers, parts and heads is a few runs of
consecutive blocks, and a band of layers with all parts and all heads is exactly one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from types import MappingProxyType

FORMAT_VERSION = 1

ITEM_BYTES = MappingProxyType(
    {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
    }
)
"""Bytes of one element, by dtype name."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
# Far above any model; below it all products fit 64 bits, so a hostile description cannot ask for absurd work.
_MOST = 2**20


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of a cell: K, V, scales, latents, a boundary activation.

    Args:
        name: short lower-case name, for example `k`.
        dtype: a key of `ITEM_BYTES`.
        width: elements per token and head.
    """

    name: str
    dtype: str
    width: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"a part's name is lower-case letters, digits and underscores, got {self.name!r}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"part {self.name!r} has dtype {self.dtype!r}; known are {', '.join(ITEM_BYTES)}")
        _count("width", self.width, least=1)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token and head."""
        return self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """What an object holds. Two layouts are compatible only when equal; equal sizes mean nothing.

    Args:
        layers: layers in the object.
        kv_heads: KV heads in the object.
        tokens: tokens of the chunk or tail.
        parts: the parts of every cell, in stored order.
        first_layer: global index of the first layer: a pipeline stage's object says which band it holds.
        first_kv_head: global index of the first head: so a rank's share is never taken for another rank's.
        version: format of the object.

    Layers and heads are named by their global index everywhere.
    """

    layers: int
    kv_heads: int
    tokens: int
    parts: tuple[PartSpec, ...]
    first_layer: int = 0
    first_kv_head: int = 0
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "tokens"):
            _count(name, getattr(self, name), least=1)
        for name in ("first_layer", "first_kv_head", "version"):
            _count(name, getattr(self, name), least=0)
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a layout needs parts with different names, got {names}")

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.layers * self.layer_nbytes

    @cached_property
    def layer_nbytes(self) -> int:
        """Bytes of one layer with all parts and heads."""
        return self._part_starts[-1]

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the payload."""
        return self.layers * len(self.parts) * self.kv_heads

    @cached_property
    def all_layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.layers)

    @cached_property
    def all_parts(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @cached_property
    def all_kv_heads(self) -> range:
        return range(self.first_kv_head, self.first_kv_head + self.kv_heads)

    @cached_property
    def _block_sizes(self) -> tuple[int, ...]:
        """Bytes of a block, by part."""
        return tuple(self.tokens * part.token_nbytes for part in self.parts)

    @cached_property
    def _part_starts(self) -> tuple[int, ...]:
        """Byte of a layer at which each part starts, and the layer's end."""
        return (0, *accumulate(self.kv_heads * size for size in self._block_sizes))

    def block_nbytes(self, block: int) -> int:
        """Bytes of block number `block`."""
        return self._block_sizes[block // self.kv_heads % len(self.parts)]

    def block_offset(self, block: int) -> int:
        """Byte at which block number `block` starts; `num_blocks` gives the payload's end."""
        row, head = divmod(block, self.kv_heads)
        layer, part = divmod(row, len(self.parts))
        return layer * self.layer_nbytes + self._part_starts[part] + head * self._block_sizes[part]

    def runs(self, layers: range, parts: Sequence[str], kv_heads: range) -> list[range]:
        """Blocks of a selection as runs of consecutive numbers, in layout order.

        Raises:
            ValueError: the selection is empty, not in this layout, or names parts in another order than stored.
        """
        indices = self._check(layers, parts, kv_heads)
        runs: list[range] = []
        for layer in range(layers.start - self.first_layer, layers.stop - self.first_layer):
            for part in indices:
                start = (layer * len(self.parts) + part) * self.kv_heads + kv_heads.start - self.first_kv_head
                if runs and runs[-1].stop == start:
                    runs[-1] = range(runs[-1].start, start + len(kv_heads))
                else:
                    runs.append(range(start, start + len(kv_heads)))
        return runs

    def ranges(self, layers: range, parts: Sequence[str], kv_heads: range) -> list[tuple[int, int]]:
        """The same selection as `(offset, nbytes)` of contiguous bytes of the payload."""
        runs = self.runs(layers, parts, kv_heads)
        bounds = [(self.block_offset(run.start), self.block_offset(run.stop)) for run in runs]
        return [(start, stop - start) for start, stop in bounds]

    def selection_nbytes(self, layers: range, parts: Sequence[str], kv_heads: range) -> int:
        """Bytes of the same selection."""
        indices = self._check(layers, parts, kv_heads)
        return len(layers) * len(kv_heads) * sum(self._block_sizes[part] for part in indices)

    def _check(self, layers: range, parts: Sequence[str], kv_heads: range) -> Sequence[int]:
        """The parts' positions."""
        _within("layers", layers, self.all_layers)
        _within("kv_heads", kv_heads, self.all_kv_heads)
        names = self.all_parts
        if parts == names:
            return range(len(names))
        indices = [names.index(part) if part in names else -1 for part in parts]
        if not indices or -1 in indices or any(b <= a for a, b in pairwise(indices)):
            raise ValueError(f"parts must be some of {names} in this order, got {tuple(parts)}")
        return indices


def _count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError(f"{name} must be a whole number in {least}..{_MOST}, got {value!r}")


def _within(name: str, asked: range, there: range) -> None:
    if asked.step != 1 or not there.start <= asked.start < asked.stop <= there.stop:
        raise ValueError(f"{name} must be a non-empty range within {there}, got {asked}")
