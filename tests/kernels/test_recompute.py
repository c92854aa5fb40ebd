"""Norm, QKV, RoPE and the page write of every backend against a float64 formula."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels.batch import Part, RaggedBatch
from tests.kernels import dense
from tests.tolerances import OP, relative_norm

EPS = 1e-5
PAGE = 4


def make(
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 24,
    v_width: int = 16,
    layout: str = "NHD",
    dtype: torch.dtype = torch.float32,
    qk_norm: bool = True,
    bias: bool = True,
) -> SimpleNamespace:
    """Arguments of `recompute` for two parts of which the second is not projected, and what they must give."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden_size = 20
    rows = heads * width + kv_heads * (width + v_width)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.rand(40, width // 2, generator=generator, dtype=table) * 6
    pages = [7, 2, 5], [0, 3]
    case = SimpleNamespace(
        batch=RaggedBatch.build([Part(3, 10, pages[0]), Part(0, 5, pages[1], project=False)], PAGE),
        hidden=normal(12, hidden_size) * 3,
        weights=dict(
            norm_weight=normal(hidden_size),
            qkv_weight=normal(rows, hidden_size),
            qkv_bias=normal(rows) if bias else None,
            q_norm_weight=normal(width) if qk_norm else None,
            k_norm_weight=normal(width) if qk_norm else None,
            cos=angles.cos(),
            sin=angles.sin(),
        ),
        k_pages=dense.pool(9, PAGE, kv_heads, width, layout=layout, dtype=dtype, guard=3),
        v_pages=dense.pool(9, PAGE, kv_heads, v_width, layout=layout, dtype=dtype, guard=3),
        slots=[pages[0][token // PAGE] * PAGE + token % PAGE for token in range(3, 10)],
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


@pytest.mark.parametrize("form", ["qkv", "kv", "q"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "joined"])
@pytest.mark.parametrize("dtype", OP, ids=str)
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


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_optional_steps(ops, qk_norm, bias):
    case = make(qk_norm=qk_norm, bias=bias)
    q = run(ops, case, "qkv")
    assert relative_norm(q, case.q) <= OP[torch.float32]
    assert relative_norm(case.k_pages.flatten(0, 1)[case.slots], case.k[:7]) <= OP[torch.float32]


@pytest.mark.parametrize("heads,kv_heads,width", [(4, 4, 8), (7, 1, 80), (9, 3, 64), (2, 1, 192)])
def test_head_shapes(ops, heads, kv_heads, width):
    case = make(heads=heads, kv_heads=kv_heads, width=width, v_width=width)
    assert relative_norm(run(ops, case, "qkv"), case.q) <= OP[torch.float32]
    assert relative_norm(case.v_pages.flatten(0, 1)[case.slots], case.v[:7]) <= OP[torch.float32]


def test_unknown_form_is_refused(ops):
    with pytest.raises(ValueError, match="form is 'k'; use 'qkv', 'kv' or 'q'"):
        run(ops, make(), "k")


@pytest.mark.parametrize("dtype", OP, ids=str)
def test_rms_norm(ops, dtype):
    x, weight = (torch.randn(5, 30) * 4).to(dtype), torch.randn(30).to(dtype)
    before = x.clone()
    y = ops.rms_norm(x, weight, 0.5)
    assert y.dtype == dtype and torch.equal(x, before)
    assert relative_norm(y, dense.rms_norm(x, weight, 0.5)) <= OP[dtype]


@pytest.mark.parametrize("dtype", OP, ids=str)
def test_activation(ops, dtype):
    gate, up = torch.randn(5, 12).to(dtype), torch.randn(5, 12).to(dtype)
    fused = torch.cat([gate, up], dim=1)
    before = fused.clone()
    y = ops.activation(fused)
    assert y.dtype == dtype and torch.equal(fused, before)
    assert relative_norm(y, F.silu(gate.double()) * up.double()) <= OP[dtype]
