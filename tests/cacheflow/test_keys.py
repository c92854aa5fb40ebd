from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.keys import MAX_TOKEN_ID, Keys, chunk_keys, model_fingerprint

ROOT = Path(__file__).parents[2]
CHECKPOINT = "5e" * 32
CONFIG: dict[str, Any] = {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODEL = model_fingerprint(CHECKPOINT, CONFIG, "float32")
IDS = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=40)


def keys(tokens: Any, **changes: Any) -> Keys:
    return chunk_keys(tokens, **{"chunk_tokens": 8, "page_size": 4, "fingerprint": MODEL, **changes})


def all_keys(made: Keys) -> list[str]:
    return [*made.chunks, *(tail for chunk in range(len(made.chunks) + 1) for tail in made.tails(chunk))]


def test_keys_are_pinned() -> None:
    """Stored chunks outlive a release: whoever changes how keys are made must raise KEY_VERSION and this test."""
    made = keys(range(20))
    assert made.chunks[1] == "41b5b83e6b09304e5af3665028eb4c35c1c2751e73dd7f57d46c0e5b9afdc45c"
    assert made.tail(1) == "b26c2a302df0eeda62fab7c45eb403271ee9b6e04f9eeeeb3ecc6f83c6932428"


def test_equal_in_fresh_interpreters_with_other_hash_seeds() -> None:
    program = (
        "import numpy as np\n"
        "from cacheflow.keys import *\n"
        f"model = model_fingerprint({CHECKPOINT!r}, {CONFIG!r}, 'float32')\n"
        "made = chunk_keys(np.arange(30, dtype=np.int32), 8, 4, model, b'adapter', 'tenant')\n"
        "print(made.chunks, made.tails())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    made = keys(range(30), adapter=b"adapter", namespace="tenant")
    assert said == {f"{made.chunks} {made.tails()}\n"}


@pytest.mark.parametrize("dtype", ["int32", "int64", ">i8", ">i4", "uint16", "uint64"])
def test_integer_type_does_not_matter(dtype: str) -> None:
    tokens = list(range(100, 121))
    expected = all_keys(keys(tokens))
    assert all_keys(keys(np.array(tokens, dtype=dtype))) == expected
    assert all_keys(keys(np.repeat(np.array(tokens, dtype=dtype), 2)[::2])) == expected, "strided"


@given(shared=IDS, one=IDS, other=IDS)
def test_chunks_are_shared_exactly_as_far_as_tokens_are(shared: list[int], one: list[int], other: list[int]) -> None:
    a, b = shared + one, shared + other
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    first, second = keys(a).chunks, keys(b).chunks
    whole = same // 8
    assert first[:whole] == second[:whole]
    assert not set(first[whole:]) & set(second[whole:])


@given(tokens=IDS)
def test_no_two_places_share_a_key(tokens: list[int]) -> None:
    made = all_keys(keys(tokens))
    assert len(set(made)) == len(made)
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in made)


def test_a_longer_prompt_finds_the_tail_a_shorter_one_stored() -> None:
    stored = chunk_keys(range(29), 16, 4, MODEL)
    reader = chunk_keys(range(100), 16, 4, MODEL)
    assert stored.chunks == reader.chunks[:1]
    assert stored.tails() == reader.tails(1)[:3]
    assert [reader.tail(pages, 1) for pages in (1, 2, 3)] == list(reader.tails(1)), "a whole chunk is no tail"


@pytest.mark.parametrize(
    ("tokens", "chunks", "tails"), [(0, 0, 0), (1, 0, 0), (3, 0, 0), (4, 0, 1), (8, 1, 0), (15, 1, 1), (16, 2, 0)]
)
def test_counts(tokens: int, chunks: int, tails: int) -> None:
    made = keys(range(tokens))
    assert (len(made.chunks), len(made.tails())) == (chunks, tails)


def test_keys_outlive_changes_to_the_callers_array() -> None:
    tokens = np.arange(20)
    made, expected = keys(tokens), keys(range(20)).tails()
    tokens[:] = 0
    assert made.tails() == expected


OTHER_ROOTS = {
    "adapter A": {"adapter": b"A" * 32},
    "adapter B": {"adapter": b"B" * 32},
    "A reloaded with other weights": {"adapter": b"A" * 31 + b"a"},
    "digests that end alike": {"adapter": b"B" * 30 + b"AA"},
    "other weights": {"fingerprint": model_fingerprint("6e" + CHECKPOINT[2:], CONFIG, "float32")},
    "digest that ends alike": {"fingerprint": model_fingerprint("0" * 60 + CHECKPOINT[60:], CONFIG, "float32")},
    "other dtype": {"fingerprint": model_fingerprint(CHECKPOINT, CONFIG, "float16")},
    "tenant": {"namespace": "tenant"},
    "adapter as namespace": {"namespace": "A" * 32},
    "adapter and namespace, cut elsewhere": {"adapter": b"A" * 31, "namespace": "A"},
    "adapter and namespace, cut again elsewhere": {"adapter": b"A" * 30, "namespace": "AA"},
    "other chunk size": {"chunk_tokens": 4},
}


def test_everything_that_changes_kv_changes_every_key() -> None:
    sets = [set(all_keys(keys(range(20), **changes))) for changes in ({}, *OTHER_ROOTS.values())]
    assert len(set.union(*sets)) == sum(map(len, sets))


def test_no_adapter_has_one_key() -> None:
    assert keys(range(8), adapter=b"").chunks == keys(range(8), adapter=None).chunks


OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "linear x2": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "linear x4": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "yarn with another beta": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}},
    "theta": {"rope_theta": 10001},
    "eps": {"rms_norm_eps": 1e-6},
    "heads": {"num_key_value_heads": 16, "head_dim": 2},
    "one more field": {"qk_norm": True},
    "flag as number": {"qk_norm": 1},
    "list": {"layers": [1, 23]},
    "list cut elsewhere": {"layers": [12, 3]},
    "text for a number": {"head_dim": "16"},
}


def test_every_config_field_is_in_the_fingerprint() -> None:
    prints = [model_fingerprint(CHECKPOINT, {**CONFIG, **change}, "float32") for change in OTHER_CONFIGS.values()]
    assert len({MODEL, *prints}) == len(prints) + 1


def test_a_fingerprint_knows_meaning_not_spelling() -> None:
    reordered = dict(reversed(list(CONFIG.items())))
    assert model_fingerprint(CHECKPOINT.upper(), {**reordered, "rope_theta": 10000}, "float32") == MODEL


@pytest.mark.parametrize(
    ("checkpoint", "config", "dtype", "complaint"),
    [
        (CHECKPOINT[:-1], {}, "float32", "full digest"),
        ("x" * 64, {}, "float32", "hex"),
        (CHECKPOINT, {"eps": float("nan")}, "float32", r"config\['eps'\] is nan"),
        (CHECKPOINT, {"a": {"b": [object()]}}, "float32", r"config\['a'\]\['b'\]\[0\] is a object"),
        (CHECKPOINT, {1: 2}, "float32", "not strings"),
        (CHECKPOINT, {}, "", "kv_dtype"),
    ],
)
def test_what_has_no_canonical_form_is_refused(checkpoint: str, config: Any, dtype: str, complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint):
        model_fingerprint(checkpoint, config, dtype)


@pytest.mark.parametrize(
    ("tokens", "changes", "complaint"),
    [
        ([1, -1], {}, "got -1"),
        ([1, 2**31], {}, "got 2147483648"),
        ([1, 2**70], {}, "integers"),
        ([1.0], {}, "float64"),
        ([True], {}, "bool"),
        (["1"], {}, "integers"),
        ([[1]], {}, "2 dimensions"),
        ([1], {"page_size": 3}, "whole number of pages"),
        ([1], {"page_size": 0}, "whole number of pages"),
        ([1], {"chunk_tokens": 0}, "whole number of pages"),
        ([1], {"fingerprint": MODEL[:32]}, "64 hex digits"),
        ([1], {"adapter": "name"}, "bytes of a digest"),
    ],
)
def test_what_cannot_be_tokens_is_refused(tokens: Any, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint):
        keys(tokens, **changes)


@pytest.mark.parametrize(("pages", "chunk"), [(0, None), (2, None), (1, 4), (1, -1), (2, 0)])
def test_tails_that_cannot_be_are_refused(pages: int, chunk: int | None) -> None:
    with pytest.raises(ValueError, match=r"tails of 1 to 1 pages|no chunk"):
        keys(range(20)).tail(pages, chunk)
