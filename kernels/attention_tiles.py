"""What a program of the attention kernel does at a time, and over how many programs the keys are cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels.batch import RaggedBatch
from kernels.launch import PROCESSORS
from kernels.staged import QUANTISED
from kernels.variants import Variant


@dataclass(frozen=True)
class Tile:
    """What a program does at a time: rows (tokens times heads of a group) and keys.

    edge_stages: stages of the loop over tiles that need a mask.
    descriptor: full tiles are loaded as bulk tensor copies where a page is whole tiles and strides allow it.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    edge_stages: int = 1
    descriptor: bool = False


# The tile form and the split form, by target and by bytes of a key: the wider of K's and V's heads, padded to a power
# of two. Guesses, made after static figures (no spills, then the fewest instructions for a score, on the shapes of
# `aot_cases`) and not yet timed.
_TILES: dict[str, dict[int, tuple[Tile, Tile]]] = {
    "cuda:80": {
        128: (Tile(128, 64, 8, 2, edge_stages=2), Tile(16, 64, 4, 3)),
        256: (Tile(128, 64, 8, 2, edge_stages=2), Tile(16, 64, 4, 3)),
        512: (Tile(64, 64, 8, 2), Tile(16, 32, 4, 2)),
    },
    "cuda:90": {
        128: (Tile(128, 64, 4, 3, descriptor=True), Tile(16, 64, 4, 3)),
        256: (Tile(128, 64, 8, 3, descriptor=True), Tile(16, 64, 4, 3)),
        512: (Tile(128, 32, 8, 3, descriptor=True), Tile(16, 64, 8, 2)),
    },
    "cuda:100": {
        128: (Tile(128, 64, 4, 3, descriptor=True), Tile(16, 64, 4, 3)),
        256: (Tile(128, 64, 8, 3, descriptor=True), Tile(16, 64, 4, 3)),
        512: (Tile(128, 32, 8, 3, descriptor=True), Tile(16, 32, 4, 2)),
    },
    "hip:gfx942": {
        128: (Tile(128, 64, 4, 2), Tile(16, 64, 4, 2)),
        256: (Tile(128, 64, 4, 2), Tile(16, 64, 4, 2)),
        512: (Tile(128, 32, 4, 1), Tile(16, 32, 4, 2)),
    },
    # Small, so that short sequences have several tiles.
    "interpreter": {1024: (Tile(32, 16, 1, 1), Tile(16, 16, 1, 1))},
}
# For GPUs whose shared memory may be smaller.
_OTHER_TILES = {512: (Tile(64, 32, 4, 2), Tile(16, 32, 4, 2))}
# Decoding 8-bit keys takes registers.
_QUANTISED_TILES = {
    "cuda:80": {
        128: (Tile(64, 64, 8, 2), Tile(16, 64, 4, 2)),
        256: (Tile(32, 64, 4, 2), Tile(16, 64, 4, 2)),
        512: (Tile(16, 32, 4, 1), Tile(16, 32, 4, 1)),
    },
    "cuda:90": {256: (Tile(128, 64, 8, 3), Tile(16, 64, 4, 2)), 512: (Tile(64, 16, 8, 2), Tile(16, 32, 4, 1))},
    "cuda:100": {
        128: (Tile(128, 64, 8, 2), Tile(16, 32, 4, 2)),
        256: (Tile(128, 64, 8, 3), Tile(16, 64, 8, 2)),
        512: (Tile(64, 32, 8, 1), Tile(16, 32, 4, 1)),
    },
    "hip:gfx942": {256: (Tile(128, 64, 4, 2), Tile(16, 64, 4, 2)), 512: (Tile(64, 32, 4, 1), Tile(16, 32, 4, 1))},
}
# float32 does without tensor cores on NVIDIA: tf32 would be less exact than the reference.
_FLOAT32_TILES = {512: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)), 1024: (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1))}
# Keys of a split: fewer are not worth the merge. A guess.
_SPLIT_KEYS = 256
_MAX_SPLITS = 64


def choose_tiles(target: str, k: torch.Tensor, v: torch.Tensor, staged: torch.dtype | None) -> tuple[Tile, Tile]:
    """The tile form and the split form for heads as wide as K's and V's, and what is in staging."""
    key_bytes = max(triton.next_power_of_2(x.shape[3]) for x in (k, v)) * k.dtype.itemsize
    table = _TILES.get(target, _OTHER_TILES)
    if target != "interpreter" and k.dtype == torch.float32:
        table = _FLOAT32_TILES
    elif staged in QUANTISED:
        table = _QUANTISED_TILES.get(target, table)
    return table[min(size for size in table if size >= key_bytes)]


def choose_form(
    batch: RaggedBatch, variant: Variant, group: int, kv_heads: int, tiles: tuple[Tile, Tile], target: str
) -> tuple[Tile, int]:
    """The tile, and the number of splits that gives every multiprocessor a program."""
    rows = [(stop - start) * group for start, stop in zip(batch.starts, batch.stops, strict=True)]
    large, small = tiles
    tile, programs = (small, 2) if max(rows) <= 2 * small.rows else (large, 1)
    keys = 0
    for start, stop in zip(batch.starts, batch.stops, strict=True):
        begin, _, _, end = variant.key_bounds(start, stop - 1)
        keys = max(keys, end - begin)
    ready = kv_heads * sum(triton.cdiv(n, tile.rows) for n in rows)
    wanted = triton.cdiv(programs * PROCESSORS.get(target, 100), ready)
    return tile, max(1, min(wanted, keys // _SPLIT_KEYS, _MAX_SPLITS))
