"""Prompts that arrive: traces and what is wrong with them, synthetic prompts, and how a prompt becomes a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.arrivals import CHUNK, Prompt, conversations, load_trace, poisson, rate, scaled

GOOD = {"timestamp": 27_482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: Any) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
        return path

    return write


class TestTrace:
    def test_is_read_as_it_is_written(self, trace: Callable[..., Path]) -> None:
        later = {**GOOD, "timestamp": 30_000, "input_length": 1024, "hash_ids": [46, 47]}
        prompts = load_trace(trace(GOOD, later))
        assert prompts == [Prompt("0", 27.482, 1100, (46, 47, 2353)), Prompt("1", 30.0, 1024, (46, 47))]
        assert load_trace(trace(GOOD, later), limit=1) == prompts[:1]

    @pytest.mark.parametrize(
        ("record", "says"),
        [
            ({**GOOD, "input_length": 1537}, "input_length 1537 makes 4 chunks of 512 tokens, but hash_ids has 3"),
            ({**GOOD, "input_length": 1024}, "input_length 1024 makes 2 chunks of 512 tokens, but hash_ids has 3"),
            ({**GOOD, "hash_ids": []}, "hash_ids has 0"),
            ({**GOOD, "hash_ids": [1, 2, 1]}, "a hash id comes twice"),
            ({**GOOD, "timestamp": 27_481}, "timestamp 27481 is before the line above's; sort"),
            ({**GOOD, "timestamp": -1}, "timestamp -1"),
            ({**GOOD, "timestamp": "soon"}, "timestamp soon"),
            ({**GOOD, "timestamp": float("nan")}, "timestamp nan"),
            ({**GOOD, "input_length": 0}, "input_length 0"),
            ({**GOOD, "input_length": 1100.0}, "input_length 1100.0"),
            ({**GOOD, "hash_ids": ["a", "b", "c"]}, "no request"),
            ({**GOOD, "hash_ids": None}, "no request"),
            ({"timestamp": 0, "input_length": 5}, "'hash_ids'"),
            ([1, 2], "no request"),
            ("{", "no request"),
            ("", "no request"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, trace: Callable[..., Path], record: Any, says: str) -> None:
        path = trace(GOOD, record)
        with pytest.raises(ValueError) as raised:
            load_trace(path)
        assert f"{path}, line 2: " in str(raised.value) and says in str(raised.value)

    def test_no_trace(self, trace: Callable[..., Path], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="is empty; give"):
            load_trace(trace())
        with pytest.raises(ValueError, match=r"cannot read .*none\.jsonl.*; give"):
            load_trace(tmp_path / "none.jsonl")


class TestRequest:
    @given(tokens=st.integers(1, 5 * CHUNK + 3), data=st.data())
    def test_columns_are_chunks_and_the_last_token_is_computed(self, tokens: int, data: st.DataObject) -> None:
        chunks = -(-tokens // CHUNK)
        found = data.draw(st.lists(st.booleans(), min_size=chunks, max_size=chunks))
        request = Prompt("a", 0.0, tokens, tuple(range(chunks))).request(found, (None,) * 2)
        assert request.tokens == tokens and request.prefix < tokens
        assert request.stored == tuple(found[: len(request.stored)])
        assert not any(f and i * CHUNK < tokens - 1 for i, f in enumerate(found) if i >= len(request.stored))
        assert not request.stored or request.stored[-1]
        inner = set(request.boundaries[1:-1]) - {tokens - 1}
        assert all(boundary % CHUNK == 0 for boundary in inner)
        assert all(b - a <= CHUNK for a, b in pairwise(request.boundaries))

    def test_holes_and_a_whole_hit(self) -> None:
        prompt = Prompt("a", 0.0, 2 * CHUNK, (7, 8))
        assert prompt.request([True, True], (4,)).boundaries == (0, CHUNK, 2 * CHUNK - 1, 2 * CHUNK)
        assert prompt.request([False, True], (4,)).stored == (False, True)
        assert prompt.request([True, False], (4,)).stored == (True,)
        assert prompt.request([False, False], (4,)).boundaries == (0, CHUNK, 2 * CHUNK)
        assert Prompt("b", 0.0, CHUNK + 1, (7, 8)).request([True, True], (4,)).boundaries == (0, CHUNK, CHUNK + 1)


class TestConversations:
    def test_are_what_is_asked_for(self) -> None:
        prompts = conversations(3000, seed=5, median=6000, sigma=0.8, again=0.0)
        lengths = np.array([prompt.tokens for prompt in prompts])
        assert np.median(lengths) == pytest.approx(6000, rel=0.06)
        assert np.std(np.log(lengths)) == pytest.approx(0.8, rel=0.06)
        assert len({key for prompt in prompts for key in prompt.hashes}) == sum(len(p.hashes) for p in prompts)

    def test_go_on_with_whole_chunks_of_one_before(self) -> None:
        prompts = conversations(500, seed=5, median=2000, again=0.6)
        seen: dict[int, int] = {}
        again = 0
        for prompt in prompts:
            assert len(prompt.hashes) == -(-prompt.tokens // CHUNK)
            known = [key in seen for key in prompt.hashes]
            shared = sum(known)
            assert known == [True] * shared + [False] * (len(known) - shared)
            assert all(seen[key] == i for i, key in enumerate(prompt.hashes[:shared]))
            seen.update((key, i) for i, key in enumerate(prompt.hashes))
            again += shared > 0
        assert again / len(prompts) == pytest.approx(0.6, abs=0.08)

    def test_depend_on_the_seed_alone(self) -> None:
        assert conversations(50, seed=1) == conversations(50, seed=1) != conversations(50, seed=2)


def test_poisson() -> None:
    prompts = poisson(conversations(4000, median=500), rate=4.0, seed=3)
    gaps = np.diff([0.0, *(prompt.at for prompt in prompts)])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05) and gaps.std() == pytest.approx(0.25, rel=0.05)
    assert rate(prompts) == pytest.approx(4.0, rel=0.05)
    assert prompts == poisson(conversations(4000, median=500), rate=4.0, seed=3)


def test_scaled() -> None:
    prompts = poisson(conversations(100), rate=4.0)
    slower = scaled(prompts, 2.0)
    assert [p.at for p in slower] == [2 * p.at for p in prompts]
    assert rate(slower) == pytest.approx(rate(prompts) / 2)
    assert rate(conversations(3)) == float("inf")
    with pytest.raises(ValueError, match="sort them"):
        rate(prompts[::-1])
