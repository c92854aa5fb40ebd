from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.stores import Layout, PartSpec
from tests.cacheflow.stores.support import K_AND_V, TOY, layouts, payload, select, selections


@given(data=st.data(), layout=layouts())
def test_ranges_cut_out_exactly_the_selection(data: Any, layout: Layout) -> None:
    layers, parts, heads = data.draw(selections(layout))
    cells = payload(layout, 0)
    ranges = layout.ranges(layers, parts, heads)
    cut = b"".join(cells[offset : offset + nbytes].tobytes() for offset, nbytes in ranges)
    assert cut == select(layout, cells, layers, parts, heads)
    assert layout.selection_nbytes(layers, parts, heads) == len(cut)
    ends = [offset + nbytes for offset, nbytes in ranges]
    assert all(end < start for end, (start, _) in zip(ends, ranges[1:], strict=False)), "neighbours are one range"


@given(data=st.data(), layout=layouts())
def test_a_band_of_layers_is_one_range(data: Any, layout: Layout) -> None:
    layers, _, _ = data.draw(selections(layout))
    assert layout.ranges(layers, layout.all_parts, layout.all_kv_heads) == [
        ((layers.start - layout.first_layer) * layout.layer_nbytes, len(layers) * layout.layer_nbytes)
    ]


@given(layout=layouts())
def test_blocks_tile_the_payload(layout: Layout) -> None:
    offsets = [layout.block_offset(block) for block in range(layout.num_blocks + 1)]
    assert offsets[0] == 0 and offsets[-1] == layout.nbytes
    assert list(np.diff(offsets)) == [layout.block_nbytes(block) for block in range(layout.num_blocks)]


@pytest.mark.parametrize(
    ("layers", "parts", "heads", "complaint"),
    [
        (range(0, 4), ("k",), range(2), "layers must be"),
        (range(-1, 1), ("k",), range(2), "layers must be"),
        (range(2, 2), ("k",), range(2), "layers must be"),
        (range(0, 3, 2), ("k",), range(2), "layers must be"),
        (range(1), ("k",), range(1, 3), "kv_heads must be"),
        (range(1), (), range(2), "parts must be"),
        (range(1), ("v", "k"), range(2), "in this order"),
        (range(1), ("k", "k"), range(2), "in this order"),
        (range(1), ("scale",), range(2), "parts must be"),
    ],
)
def test_selections_outside_are_refused(layers: range, parts: tuple[str, ...], heads: range, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TOY.ranges(layers, parts, heads)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"layers": -1},
        {"kv_heads": 2**40},
        {"tokens": 1.5},
        {"tokens": True},
        {"first_layer": -1},
        {"parts": ()},
        {"parts": (K_AND_V[0], K_AND_V[0])},
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be a whole number|needs parts"):
        Layout(**{"layers": 1, "kv_heads": 1, "tokens": 1, "parts": K_AND_V, **changes})


@pytest.mark.parametrize(
    ("name", "dtype", "width"), [("", "int8", 1), ("K", "int8", 1), ("k", "int4", 1), ("k", "int8", 0)]
)
def test_impossible_parts_are_refused(name: str, dtype: str, width: int) -> None:
    with pytest.raises(ValueError, match=r"name|dtype|width"):
        PartSpec(name, dtype, width)
