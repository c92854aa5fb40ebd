"""Request: how a prompt is cut into columns, and who attends to whom."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.request import Request
from tests.cacheflow import strategies
from tests.cacheflow.legality import attended


@pytest.mark.parametrize(
    ("prefix", "suffix", "boundaries", "chunks"),
    [
        pytest.param(16, 3, (0, 8, 16, 19), 2, id="whole-chunks"),
        pytest.param(12, 3, (0, 8, 12, 15), 2, id="tail"),
        pytest.param(12, 13, (0, 8, 12, 16, 24, 25), 2, id="suffix-starts-inside-a-chunk"),
        pytest.param(16, 17, (0, 8, 16, 24, 32, 33), 2, id="suffix-of-several-chunks"),
        pytest.param(0, 9, (0, 8, 9), 0, id="no-prefix"),
        pytest.param(0, 1, (0, 1), 0, id="one-token"),
        pytest.param(5, 3, (0, 5, 8), 1, id="prefix-shorter-than-a-chunk"),
    ],
)
def test_columns(prefix: int, suffix: int, boundaries: tuple[int, ...], chunks: int) -> None:
    request = Request.of("a", prefix=prefix, suffix=suffix, chunk=8, layers=3, window=4)
    assert request.boundaries == boundaries
    assert request.stored == (True,) * chunks
    assert request.windows == (4, 4, 4)
    assert (request.prefix, request.tokens, request.columns) == (prefix, prefix + suffix, len(boundaries) - 1)
    assert sum(map(request.width, range(request.columns))) == prefix + suffix
    for token in range(request.tokens):
        column = request.column_at(token)
        assert boundaries[column] <= token < boundaries[column + 1]


def test_holes_are_not_stored() -> None:
    assert Request.of("a", prefix=32, suffix=1, chunk=8, layers=1, holes=[0, 2]).stored == (False, True, False, True)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"boundaries": (0,)}, "at least one token"),
        ({"boundaries": (1, 4, 8)}, r"\(1, 4, 8\)"),
        ({"boundaries": (0, 4, 4, 8)}, "ascend"),
        ({"stored": (True, True, True)}, "last token is always computed"),
        ({"windows": ()}, "per layer"),
        ({"windows": (None, 0)}, r"at least 1, not \(None, 0\)"),
    ],
    ids=str,
)
def test_impossible_request(wrong: dict[str, Any], shown: str) -> None:
    fields: dict[str, Any] = {"id": "a", "boundaries": (0, 4, 8, 9), "stored": (True, False), "windows": (None, 3)}
    with pytest.raises(ValueError, match=shown):
        Request(**{**fields, **wrong})


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"suffix": 0}, "suffix 0"),
        ({"prefix": -1}, "prefix -1"),
        ({"chunk": 0}, "chunk 0"),
        ({"layers": 0}, "layers 0"),
        ({"holes": [2]}, r"holes \[2\]"),
    ],
    ids=str,
)
def test_impossible_lengths(wrong: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        Request.of("a", **{"prefix": 16, "suffix": 1, "chunk": 8, "layers": 2, **wrong})


@given(strategies.windows().flatmap(strategies.requests), st.data())
def test_first_attended(request: Request, data: st.DataObject) -> None:
    column = data.draw(st.integers(0, request.columns - 1))
    layer = data.draw(st.integers(0, request.layers - 1))
    start, stop = request.boundaries[column], request.boundaries[column + 1]
    queries = (stop - 1 if layer == request.layers - 1 else start, stop)
    assert attended(request, *queries, layer) == set(range(request.first_attended(column, layer), column + 1))
