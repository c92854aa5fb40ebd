"""Norm, QKV, RoPE and the page write of every backend against a float64 formula."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kernels.reference
from kernels.batch import Part, RaggedBatch
from tests.kernels import dense
from tests.tolerances import KERNEL_MULTIPLE, OP, relative_norm

EPS = 1e-5
PAGE = 4
LOW = (torch.float32, torch.float16, torch.bfloat16)


def make(
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 24,
    v_width: int = 16,
    layout: str = "NHD",
    dtype: torch.dtype = torch.float32,
    qk_norm: bool = True,
    bias: bool = True,
    hidden_size: int = 20,
    tokens: int = 7,
) -> SimpleNamespace:
    """Arguments of `recompute` for two parts, of `tokens` from the third on and of 5, of which the second is not
    projected, and what they must give."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows = heads * width + kv_heads * (width + v_width)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.rand(tokens + 33, width // 2, generator=generator, dtype=table) * 6
    count = -(-(3 + tokens) // PAGE)
    free = torch.randperm(count + 5, generator=generator).tolist()
    pages = free[:count], free[-2:]
    case = SimpleNamespace(
        batch=RaggedBatch.build([Part(3, 3 + tokens, pages[0]), Part(0, 5, pages[1], project=False)], PAGE),
        hidden=normal(tokens + 5, hidden_size) * 3,
        weights=dict(
            norm_weight=normal(hidden_size),
            qkv_weight=normal(rows, hidden_size),
            qkv_bias=normal(rows) if bias else None,
            q_norm_weight=normal(width) if qk_norm else None,
            k_norm_weight=normal(width) if qk_norm else None,
            cos=angles.cos(),
            sin=angles.sin(),
        ),
        k_pages=dense.pool(count + 5, PAGE, kv_heads, width, layout=layout, dtype=dtype, guard=3),
        v_pages=dense.pool(count + 5, PAGE, kv_heads, v_width, layout=layout, dtype=dtype, guard=3),
        slots=[pages[0][token // PAGE] * PAGE + token % PAGE for token in range(3, 3 + tokens)],
        tokens=tokens,
    )
    w = case.weights
    normed = dense.rms_norm(case.hidden, w["norm_weight"], EPS)
    out = normed @ w["qkv_weight"].double().T + (w["qkv_bias"].double() if bias else 0)
    q, k, v = out.split([heads * width, kv_heads * width, kv_heads * v_width], dim=1)
    q, k, v = q.unflatten(1, (heads, -1)), k.unflatten(1, (kv_heads, -1)), v.unflatten(1, (kv_heads, -1))
    if qk_norm:
        q, k = dense.rms_norm(q, w["q_norm_weight"], EPS), dense.rms_norm(k, w["k_norm_weight"], EPS)
    cos, sin = w["cos"][case.batch.positions], w["sin"][case.batch.positions]
    case.q, case.k, case.v = dense.rotate(q, cos, sin), dense.rotate(k, cos, sin), v
    return case


def run(ops, case: SimpleNamespace, form: str) -> torch.Tensor | None:
    return ops.recompute(
        case.hidden,
        form=form,
        batch=case.batch,
        eps=EPS,
        k_pages=case.k_pages,
        v_pages=case.v_pages,
        **case.weights,
    )


def storage(pages: torch.Tensor) -> torch.Tensor:
    """Everything in the pool, guards included, in memory order."""
    elements = pages.untyped_storage().nbytes() // pages.element_size()
    return pages.as_strided((elements,), (1,), 0)


def errors(case: SimpleNamespace, q: torch.Tensor | None) -> list[float]:
    """Of Q, if there is one, and of the K and V in the pages of the first part's tokens."""
    found = [] if q is None else [relative_norm(q, case.q)]
    for pages, expected in ((case.k_pages, case.k), (case.v_pages, case.v)):
        found.append(relative_norm(pages.flatten(0, 1)[case.slots], expected[: case.tokens]))
    return found


@pytest.mark.parametrize("form", ["qkv", "kv", "q"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "joined"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_forms(ops, form, layout, dtype):
    case = make(layout=layout, dtype=dtype)
    before = case.hidden.clone()
    q = run(ops, case, form)
    assert torch.equal(case.hidden, before)
    assert (q is None) == (form == "kv")
    if q is not None:
        assert q.dtype == dtype and relative_norm(q, case.q) <= OP[dtype]
    for pages, expected in ((case.k_pages, case.k), (case.v_pages, case.v)):
        cells = pages.flatten(0, 1)
        written = 0
        if form != "q":  # only the seven tokens of the first part go in; the second has its cells
            assert relative_norm(cells[case.slots], expected[:7]) <= OP[dtype]
            written = cells[case.slots].numel()
        assert int(storage(pages).isfinite().sum()) == written  # guards, other pages and other offsets untouched


def test_float64_is_the_references(interpreted):
    case = make(dtype=torch.float64)
    assert max(errors(case, run(kernels.reference, case, "qkv"))) <= OP[torch.float64]
    with pytest.raises(ValueError, match=r"hidden is torch.float64; the kernel takes bfloat16, float16 and float32"):
        run(interpreted, case, "qkv")


# Rows that are whole steps of the loop and rows that are not; one tile of tokens with another begun behind it.
@pytest.mark.parametrize(
    "heads,kv_heads,width,hidden_size",
    [(4, 2, 64, 256), (3, 1, 80, 200), (2, 2, 96, 200), (8, 2, 128, 256), (2, 1, 256, 200)],
)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_errors_are_at_most_twice_the_references(interpreted, heads, kv_heads, width, hidden_size, dtype):
    options = dict(heads=heads, kv_heads=kv_heads, width=width, v_width=width, hidden_size=hidden_size, tokens=130)
    case, same = make(dtype=dtype, **options), make(dtype=dtype, **options)
    pairs = zip(
        errors(case, run(interpreted, case, "qkv")), errors(same, run(kernels.reference, same, "qkv")), strict=True
    )
    assert all(error <= KERNEL_MULTIPLE * of_reference for error, of_reference in pairs)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_optional_steps(ops, qk_norm, bias):
    case = make(qk_norm=qk_norm, bias=bias)
    assert max(errors(case, run(ops, case, "qkv"))) <= OP[torch.float32]


@pytest.mark.parametrize(
    "heads,kv_heads,width,v_width",
    [(4, 4, 8, 8), (7, 1, 80, 80), (9, 3, 64, 64), (2, 1, 192, 16), (4, 2, 16, 24), (4, 2, 16, 15)],
)
def test_head_shapes(ops, heads, kv_heads, width, v_width):
    case = make(heads=heads, kv_heads=kv_heads, width=width, v_width=v_width)
    assert max(errors(case, run(ops, case, "qkv"))) <= OP[torch.float32]
    for pages in (case.k_pages, case.v_pages):
        assert int(storage(pages).isfinite().sum()) == 7 * kv_heads * pages.shape[3]


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65])
def test_any_number_of_tokens(ops, tokens):
    case = make(tokens=tokens)
    assert max(errors(case, run(ops, case, "qkv"))) <= OP[torch.float32]


def test_no_tokens(ops):
    case = make()
    case.hidden, case.batch = case.hidden[:0], case.batch._select((0, 0)).batch
    assert run(ops, case, "qkv").shape == (0, 4, 24)
    assert storage(case.k_pages).isnan().all()


@pytest.mark.usefixtures("guarded")
def test_nothing_around_the_queries_is_written(interpreted):
    for width in (24, 64):
        case = make(width=width, tokens=21)
        assert relative_norm(run(interpreted, case, "qkv"), case.q) <= OP[torch.float32]


def test_rows_of_a_larger_tensor(ops):
    case = make()
    wide = torch.full((12, 50), float("nan"))
    wide[:, 7:27] = case.hidden
    case.hidden = wide[:, 7:27]
    assert max(errors(case, run(ops, case, "qkv"))) <= OP[torch.float32]


def test_large_hidden_states_and_weights_stay_within_float16(ops):
    case = make(dtype=torch.float16)
    case.hidden[:, 3] = 30000.0  # what some models have in a few channels, where the norm's weight is not small
    case.weights["norm_weight"][3] = 30.0
    same = SimpleNamespace(**vars(case) | dict(hidden=case.hidden.double()))
    same.weights = {name: None if w is None else w.double() for name, w in case.weights.items()}
    same.k_pages, same.v_pages = case.k_pages.double(), case.v_pages.double()
    case.q, _ = run(kernels.reference, same, "qkv"), None
    case.k, case.v = (pages.flatten(0, 1)[case.slots] for pages in (same.k_pages, same.v_pages))
    assert max(errors(case, run(ops, case, "qkv"))) <= OP[torch.float16]


def test_pages_beyond_32_bits(ops):
    case = make(dtype=torch.float16)
    stride, last = 276480, 7801
    pages = dense.lazy((last + 1) * stride).view(last + 1, PAGE, 270, 256)
    case.k_pages, case.v_pages = pages[:, :, :2, :24], pages[:, :, 2:4, :16]
    case.batch = RaggedBatch.build([Part(3, 10, [0, last, last - 1]), Part(0, 5, [1, 2], project=False)], PAGE)
    case.slots = case.batch.slots[:7]
    assert max(errors(case, run(ops, case, "qkv"))) <= OP[torch.float16]


def test_hidden_states_beyond_32_bits(ops):
    case = make(dtype=torch.float16)
    stride = 2**31 // 11 + 1
    spread = dense.lazy(11 * stride + 20).as_strided((12, 20), (stride, 1))
    spread.copy_(case.hidden)
    case.hidden = spread
    assert max(errors(case, run(ops, case, "qkv"))) <= OP[torch.float16]


def test_unknown_form_is_refused(ops):
    with pytest.raises(ValueError, match="form is 'k'; use 'qkv', 'kv' or 'q'"):
        run(ops, make(), "k")


@pytest.mark.parametrize(
    "name,change,message",
    [
        ("cos", lambda x: x.double(), r"cos is \[40, 12\] torch.float64; .* it has to be \[40, 12\] torch.float32"),
        ("qkv_bias", lambda x: x[1:], r"qkv_bias is \[175\] .* it has to be \[176\]"),
        (
            "qkv_weight",
            lambda x: x[:-1],
            "qkv_weight has 175 rows; without 2 heads of K and V these are no whole Q heads",
        ),
        ("qkv_weight", lambda x: x.T.contiguous().T, "qkv_weight is not contiguous"),
        ("k_norm_weight", lambda x: x.half(), r"k_norm_weight is \[24\] torch.float16"),
    ],
    ids=["dtype", "length", "rows", "contiguous", "other dtype"],
)
def test_misfits_are_refused(interpreted, name, change, message):
    case = make()
    case.weights[name] = change(case.weights[name])
    with pytest.raises(ValueError, match=message):
        run(interpreted, case, "qkv")


def test_hidden_states_of_another_batch_are_refused(interpreted):
    case = make()
    case.hidden = case.hidden[1:]
    with pytest.raises(ValueError, match=r"positions is \[12\] .* it has to be \[11\]"):
        run(interpreted, case, "qkv")


def test_heads_that_do_not_fit_a_tile_are_refused(interpreted):
    with pytest.raises(ValueError, match="heads have 258 and 16 elements; the kernel takes up to 256"):
        run(interpreted, make(width=258), "qkv")
