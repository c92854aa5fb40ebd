"""Small chunks for tests, and what a read of them must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from cacheflow.stores import ITEM_BYTES, Layout, PartSpec, Read, ReadResult, Store, aligned_buffer

ROOT = Path(__file__).parents[3]

K_AND_V = (PartSpec("k", "float32", 16), PartSpec("v", "float32", 16))
TOY = Layout(layers=3, kv_heads=2, tokens=8, parts=K_AND_V)
PAGED = Layout(layers=2, kv_heads=2, tokens=64, parts=K_AND_V)  # blocks of exactly one memory page


def key(number: int) -> str:
    return f"{number:064x}"


def payload(layout: Layout, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, layout.nbytes, dtype=np.uint8)


def select(layout: Layout, cells: NDArray[np.uint8], layers: range, parts: tuple[str, ...], heads: range) -> bytes:
    """The selection by plain nested loops over `[layer][part][kv_head]`, independent of the code's offsets."""
    chosen, at = [], 0
    for layer in layout.all_layers:
        for part in layout.parts:
            for head in layout.all_kv_heads:
                nbytes = layout.tokens * part.width * ITEM_BYTES[part.dtype]
                if layer in layers and part.name in parts and head in heads:
                    chosen.append(cells[at : at + nbytes].tobytes())
                at += nbytes
    assert at == layout.nbytes
    return b"".join(chosen)


def read_whole(store: Store, name: str, layout: Layout, aligned: bool = False) -> tuple[ReadResult, bytes]:
    """Read an object; the destination is poisoned first and has a guard byte on both sides when not aligned."""
    memory = aligned_buffer(layout.nbytes) if aligned else np.empty(layout.nbytes + 2, dtype=np.uint8)
    memory[:] = 0xA5
    destination = memory if aligned else memory[1:-1]
    result = store.read([Read.whole(name, layout, destination)])[0]
    assert aligned or (memory[0], memory[-1]) == (0xA5, 0xA5), "written outside the destination"
    return result, destination.tobytes()


def holds(store: Store, name: str) -> bool:
    found = store.lookup([name])[0] is not None
    store.release([name])
    return found


@st.composite
def layouts(draw: Any) -> Layout:
    names = draw(st.lists(st.sampled_from(["k", "v", "k_scale", "v_scale", "latent"]), min_size=1, unique=True))
    parts = tuple(PartSpec(name, draw(st.sampled_from(sorted(ITEM_BYTES))), draw(st.integers(1, 9))) for name in names)
    return Layout(
        layers=draw(st.integers(1, 4)),
        kv_heads=draw(st.integers(1, 4)),
        tokens=draw(st.integers(1, 9)),
        parts=parts,
        first_layer=draw(st.integers(0, 3)),
        first_kv_head=draw(st.integers(0, 3)),
    )


@st.composite
def selections(draw: Any, layout: Layout) -> tuple[range, tuple[str, ...], range]:
    def part_of(whole: range) -> range:
        start = draw(st.integers(whole.start, whole.stop - 1))
        return range(start, draw(st.integers(start + 1, whole.stop)))

    chosen = draw(st.sets(st.sampled_from(layout.all_parts), min_size=1))
    return part_of(layout.all_layers), tuple(n for n in layout.all_parts if n in chosen), part_of(layout.all_kv_heads)
