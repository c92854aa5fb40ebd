"""Attention of every backend against a dense float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels.attention_reference
import kernels.reference
from kernels.batch import Part, RaggedBatch
from kernels.variants import combine, make
from tests.kernels.conftest import holes
from tests.kernels.dense import Sequences
from tests.tolerances import OP, relative_norm


def check(ops, sequences: Sequences, *parts: tuple[int, int, int], heads: int = 4, window: int | None = None) -> None:
    """out and lse of the parts equal the dense reference."""
    batch = sequences.batch(*parts)
    q = sequences.queries(batch, heads)
    scale = q.shape[2] ** -0.5
    out, lse = ops.attention(
        q, sequences.k_pages, sequences.v_pages, batch=batch, scale=scale, window=window, return_lse=True
    )
    expected, expected_lse = sequences.expected(q, *parts, window=window)
    assert out.shape == expected.shape and out.dtype == q.dtype
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert relative_norm(out, expected) <= OP[q.dtype]
    assert relative_norm(lse, expected_lse) <= OP[q.dtype]


@pytest.mark.parametrize("q_len", [1, 3, 4, 5])
@pytest.mark.parametrize("kv_len", [13, 5])
def test_fewer_queries_than_keys_are_aligned_at_the_end(ops, q_len, kv_len):
    check(ops, Sequences.random([13]), (0, kv_len - q_len, kv_len))


@pytest.mark.parametrize("start,stop", [(0, 4), (3, 7), (4, 9), (8, 9)])
def test_keys_filled_behind_the_part_stay_invisible(ops, start, stop):
    check(ops, Sequences.random([13]), (0, start, stop))


@pytest.mark.parametrize("layout", ["NHD", "HND", "joined"])
@pytest.mark.parametrize("window", [None, 6])
def test_block_table_decides_where_keys_are(ops, layout, window):
    parts = ((0, 5, 18), (1, 0, 7))

    def run(permuted: bool, stale: float) -> torch.Tensor:
        sequences = Sequences.random([21, 7], layout=layout, permuted=permuted, stale=stale)
        batch = sequences.batch(*parts)
        q = sequences.queries(batch, 4)
        return ops.attention(q, sequences.k_pages, sequences.v_pages, batch=batch, scale=0.25, window=window)[0]

    identity = run(permuted=False, stale=float("nan"))
    assert torch.isfinite(identity).all()
    torch.testing.assert_close(run(permuted=True, stale=float("nan")), identity, rtol=0, atol=0)
    torch.testing.assert_close(run(permuted=True, stale=1e4), identity, rtol=0, atol=0)


def test_two_sequences_share_pages(ops):
    sequences = Sequences.random([16])
    sequences.k.append(sequences.k[0])
    sequences.v.append(sequences.v[0])
    sequences.pages.append(sequences.pages[0])
    check(ops, sequences, (0, 12, 16), (1, 9, 13))


def test_two_parts_of_one_sequence_in_either_order(ops):
    sequences = Sequences.random([16, 5])
    check(ops, sequences, (0, 3, 8), (1, 0, 5), (0, 12, 16))
    check(ops, sequences, (0, 12, 16), (0, 3, 8))


@pytest.mark.parametrize("window", [1, 2, 3, 5, 13, 14, 100])
@pytest.mark.parametrize("start,stop", [(12, 13), (8, 13), (0, 13), (2, 4)])
def test_window(ops, window, start, stop):
    check(ops, Sequences.random([13]), (0, start, stop), window=window)


def test_window_of_one_sees_itself_alone(ops):
    sequences = Sequences.random([13])
    batch = sequences.batch((0, 6, 11))
    q = sequences.queries(batch, heads=2)
    out, _ = ops.attention(q, sequences.k_pages, sequences.v_pages, batch=batch, scale=1.0, window=1)
    torch.testing.assert_close(out, sequences.v[0][6:11], rtol=1e-6, atol=0)


@pytest.mark.parametrize("window", [3, 40, 700])
def test_window_over_more_queries_than_one_tile_of_the_reference(window):
    length = 1100
    sequences = Sequences.random([length], kv_heads=1, page_size=16)
    batch = sequences.batch((0, 20, length))
    q = sequences.queries(batch, heads=1)
    out, _ = kernels.reference.attention(
        q, sequences.k_pages, sequences.v_pages, batch=batch, scale=0.25, window=window
    )
    distance = torch.arange(20, length)[:, None] - torch.arange(length)
    scores = torch.einsum("nd,td->nt", q[:, 0].double(), sequences.k[0][:, 0].double()) * 0.25
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    assert relative_norm(out[:, 0], scores.softmax(-1) @ sequences.v[0][:, 0].double()) <= OP[torch.float32]


def test_a_window_bounds_what_the_reference_computes(monkeypatch):
    sizes, attend = [], kernels.attention_reference._attend
    monkeypatch.setattr(
        kernels.attention_reference,
        "_attend",
        lambda q, k, v, **how: sizes.append((q.shape[2], k.shape[2])) or attend(q, k, v, **how),
    )
    sequences = Sequences.random([2000], kv_heads=1, width=8, page_size=16)
    batch = sequences.batch((0, 0, 2000))
    q = sequences.queries(batch, heads=1)
    kernels.reference.attention(q, sequences.k_pages, sequences.v_pages, batch=batch, scale=1.0, window=100)
    tile = kernels.attention_reference.TILE
    assert len(sizes) > 1 and sum(queries for queries, _ in sizes) == 2000
    assert all(queries <= tile and keys <= tile + 99 for queries, keys in sizes)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_ids_behind_the_row_are_never_followed(ops, page_size):
    sequences = Sequences.random([16, 40], page_size=page_size)
    expected = Sequences.random([16, 40], page_size=page_size)
    sequences.pages[0] += [2**31 - 1, -1] * 3
    for parts in (((0, 13, 16),), ((0, 13, 16), (1, 30, 40))):
        check(ops, sequences, *parts)
        check(ops, expected, *parts)


def test_pages_before_the_window_are_never_followed(ops):
    sequences = Sequences.random([16])
    sequences.pages[0][:2] = [-1, 2**31 - 1]  # tokens 0..7; the query at 12 sees 8..12
    check(ops, sequences, (0, 12, 16), window=5)


def test_the_reference_refuses_a_stale_id_next_to_page_zero():
    sequences = Sequences.random([16], permuted=False)
    sequences.pages[0] = [-1, *sequences.pages[0][:3]]
    batch = sequences.batch((0, 12, 16))
    q = sequences.queries(batch, 4)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        kernels.reference.attention(q, sequences.k_pages, sequences.v_pages, batch=batch, scale=1.0)


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (7, 1), (14, 2), (12, 2), (32, 1), (20, 1)])
def test_query_head_uses_its_groups_kv_head(ops, heads, kv_heads):
    check(ops, Sequences.random([9], kv_heads=kv_heads), (0, 4, 9), heads=heads)


@pytest.mark.parametrize("width,v_width", [(8, 8), (24, 24), (80, 80), (96, 96), (192, 192), (24, 16), (16, 24)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_head_size(ops, width, v_width, layout):
    check(ops, Sequences.random([11], width=width, v_width=v_width, layout=layout), (0, 4, 11), (0, 0, 3))
    check(ops, Sequences.random([11], width=width, v_width=v_width, layout=layout), (0, 4, 11), window=3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_dtypes(ops, dtype, window):
    if ops.NAME == "triton" and dtype == torch.float64:
        with pytest.raises(ValueError, match="float64; the kernels take bfloat16, float16 and float32"):
            check(ops, Sequences.random([5], dtype=dtype), (0, 3, 5))
        return
    check(ops, Sequences.random([33], dtype=dtype), (0, 10, 33), (0, 0, 10), window=window)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_ragged_batch_of_the_reference(data):
    check_any_batch(kernels.reference, data)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ragged_batch_of_the_kernel(interpreted, data):
    check_any_batch(interpreted, data)


def check_any_batch(ops, data) -> None:
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]), "page_size")
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4), "lengths")
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 3), (3, 1)]), "heads")
    sequences = Sequences.random(
        lengths,
        kv_heads=kv_heads,
        width=data.draw(st.sampled_from([8, 24]), "width"),
        page_size=page_size,
        layout=data.draw(st.sampled_from(["NHD", "HND", "joined"]), "layout"),
        permuted=data.draw(st.booleans(), "permuted"),
    )
    parts = []
    for index in data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5), "parts"):
        start = data.draw(st.integers(0, lengths[index] - 1))
        parts.append((index, start, data.draw(st.integers(start + 1, lengths[index]))))
    window = data.draw(st.none() | st.integers(1, 45), "window")
    check(ops, sequences, *parts, heads=kv_heads * group, window=window)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_keys_give_zero_and_keys_out_of_bounds_may_be_unfilled(ops, sinks):
    logits = torch.tensor([0.5, float("-inf"), 2.0, -3.0])  # a sink of no weight is none
    variant = combine(holes(), make("attention_sinks", logits=logits) if sinks else None)
    sequences = Sequences.random([40])
    unfilled = sequences.pages[0][:3]  # of tokens 0..11
    sequences.k_pages[unfilled], sequences.v_pages[unfilled] = float("nan"), float("nan")
    batch = sequences.batch((0, 4, 40))
    q = sequences.queries(batch, 4)
    out, lse = ops.attention(
        q, sequences.k_pages, sequences.v_pages, batch=batch, scale=0.25, variant=variant, return_lse=True
    )
    expected, expected_lse = sequences.expected(
        q,
        (0, 4, 40),
        visible=lambda head, query, key: key >= 12 and query % 2 == 0,
        sink=(lambda head: logits[head].item()) if sinks else None,
    )
    assert relative_norm(out, expected) <= OP[torch.float32]
    empty = torch.arange(4, 40) % 2 == 1
    empty[:8] = True
    assert (out[empty] == 0).all()
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)


def test_lse_is_returned_on_request_only(ops):
    sequences = Sequences.random([8])
    batch = sequences.batch((0, 4, 8))
    q = sequences.queries(batch, 4)
    assert ops.attention(q, sequences.k_pages, sequences.v_pages, batch=batch, scale=1.0)[1] is None


def test_consecutive_pages_are_read_without_a_copy():
    gather = kernels.attention_reference._gather
    adjacent, permuted = (Sequences.random([24], permuted=permuted) for permuted in (False, True))
    joined, hnd = (Sequences.random([24], permuted=False, layout=layout) for layout in ("joined", "HND"))
    pool_of = lambda x: x.k_pages.untyped_storage().data_ptr()  # noqa: E731
    for sequences, copied in ((adjacent, False), (permuted, True), (joined, True), (hnd, True)):
        keys = gather(sequences.k_pages, sequences.batch((0, 20, 24)), 0, 5, 23)
        assert (keys.untyped_storage().data_ptr() != pool_of(sequences)) == copied
        assert torch.equal(keys[:, 0].transpose(0, 1), sequences.k[0][5:23])


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(window=0), "window is 0"),
        (dict(heads=3), "3 heads cannot share 2 KV heads"),
        (dict(tokens=3), "q has 3 tokens and the batch 4"),
        (dict(dtype=torch.float16), "one dtype"),
        (dict(scale=0.0), "scale is 0.0; it must be positive"),
        (dict(width=8), "q has heads of 8 elements and K of 16"),
        (dict(page_size=8), r"pages are \[5, 4, 2\] for K .* pages of the batch have 8 tokens"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_misfits_are_refused(ops, change, message):
    sequences = Sequences.random([8])
    batch = RaggedBatch.build([Part(4, 8, sequences.pages[0])], change.get("page_size", 4))
    size = change.get("tokens", 4), change.get("heads", 4), change.get("width", 16)
    q = torch.zeros(size, dtype=change.get("dtype", torch.float32))
    with pytest.raises(ValueError, match=message):
        ops.attention(
            q,
            sequences.k_pages,
            sequences.v_pages,
            batch=batch,
            scale=change.get("scale", 1.0),
            window=change.get("window"),
        )
