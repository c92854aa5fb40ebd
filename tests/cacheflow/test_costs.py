"""Costs: what an op is made of, and that no way of cutting work is cheaper than its cells."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow.costs.base import Costs, LayerWork, ModelShape, Span
from cacheflow.costs.roofline import DEVICES, GBPS, Roofline, device
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from tests.cacheflow import strategies
from tests.cacheflow.strategies import Affine

LLAMA = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, windows=(None,) * 32)


@given(st.integers(0, 40), st.integers(1, 20), st.none() | st.integers(1, 50))
def test_pairs(start: int, tokens: int, window: int | None) -> None:
    seen = sum(min(query + 1, window or query + 1) for query in range(start, start + tokens))
    assert Span(start, start + tokens, window).pairs == seen


def test_counts_of_a_model() -> None:
    """Llama-3.1-8B: 128 KiB of KV per token; twice its parameters in FLOPs per token, embedding apart."""
    assert LLAMA.cell_bytes * LLAMA.layers == 128 * 1024
    per_token = LLAMA.layers * (LLAMA.project_flops + LLAMA.advance_flops) + LLAMA.head_flops
    assert per_token / 2 == pytest.approx(8.03e9 - 128256 * 4096, rel=1e-3)


class TestWork:
    windows = (None, 3, None)

    def works(self, layers: range, *parts: Part) -> dict[LayerWork, int]:
        return dict(Affine(self.windows, bandwidth=1.0).layer_works(Op(COMPUTE, layers, parts)))

    def test_below_the_top_everything_advances(self) -> None:
        assert self.works(range(2), Part("a", 4, 8)) == {
            LayerWork(4, (Span(4, 8, None),)): 1,
            LayerWork(4, (Span(4, 8, 3),)): 1,
        }

    def test_kv_only_at_the_top(self) -> None:
        assert self.works(range(2), Part("a", 4, 8, advance=False)) == {
            LayerWork(4, (Span(4, 8, None),)): 1,
            LayerWork(4, ()): 1,
        }

    def test_one_token_advances_at_the_last_layer(self) -> None:
        assert self.works(range(2, 3), Part("a", 4, 8)) == {LayerWork(4, (Span(7, 8, None),)): 1}

    def test_nothing_is_projected_twice(self) -> None:
        assert self.works(range(1), Part("a", 4, 8, project=False), Part("b", 0, 2)) == {
            LayerWork(2, (Span(4, 8, None), Span(0, 2, None))): 1
        }

    def test_equal_layers_are_counted_together(self) -> None:
        costs = Affine((None,) * 64, bandwidth=1.0)
        works = costs.layer_works(Op(COMPUTE, range(63), (Part("a", 0, 8),)))
        assert works == {LayerWork(8, (Span(0, 8, None),)): 63}

    def test_the_head_is_paid_once_for_every_last_token(self) -> None:
        costs = Affine((None,), project=0, advance=0, pair=0, head=5.0, bandwidth=1.0)
        parts = (Part("a", 0, 3), Part("a", 3, 5, advance=False), Part("b", 0, 4))
        assert costs.seconds(Op(COMPUTE, range(1), parts)) == 10.0


@given(strategies.windows(), st.data())
def test_marginals_of_many_cells_at_once(windows: tuple[int | None, ...], data: st.DataObject) -> None:
    costs = data.draw(strategies.costs(windows))
    layer = data.draw(st.integers(0, len(windows) - 1))
    bounds = np.unique(data.draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=8, unique=True)))
    project, advance = costs.cell_marginals(bounds[:-1], bounds[1:], layer)
    for i, (start, stop) in enumerate(pairwise(bounds.tolist())):
        assert (project[i], advance[i]) == pytest.approx(costs.cell_marginals(start, stop, layer))
        if i:  # marginals add up: a cell that is cut costs what it cost whole
            whole = costs.cell_marginals(int(bounds[i - 1]), stop, layer)
            assert (project[i] + project[i - 1], advance[i] + advance[i - 1]) == pytest.approx(whole)


@st.composite
def staircases(draw: st.DrawFn, windows: tuple[int | None, ...]) -> list[Op]:
    """Work of several requests cut into ops in a random way.

    Every request is cut into columns; each is computed up to a height of its own, band by band; ops that stand at the
    same layers may be joined. Ops need not be in a legal order: costs do not know.
    """
    layers, pieces = len(windows), []
    for request in "ab"[: draw(st.integers(1, 2))]:
        bounds = draw(st.lists(st.integers(0, 30), min_size=2, max_size=5, unique=True).map(sorted))
        for start, stop in pairwise(bounds):
            cuts = draw(st.lists(st.integers(0, layers), min_size=2, max_size=4, unique=True).map(sorted))
            for low, high in pairwise(cuts):
                project, advance = draw(st.booleans()), high < cuts[-1] or draw(st.booleans())
                pieces.append((range(low, high), Part(request, start, stop, project, advance)))
    joined: dict[tuple[range, int], list[Part]] = {}
    for i, (band, part) in enumerate(pieces):
        joined.setdefault((band, draw(st.just(0) | st.just(i))), []).append(part)
    return [Op(COMPUTE, band, tuple(parts)) for (band, _), parts in joined.items()]


def least(costs: Costs, op: Op) -> float:
    """What the contract allows an op to cost at least."""
    total = costs.fixed(COMPUTE) + len(op.layers) * costs.layer_fixed
    for part in op.parts:
        for layer in op.layers:
            project, advance = costs.cell_marginals(part.start, part.stop, layer)
            total += project * part.project
            if layer == costs.shape.layers - 1:
                advance = costs.cell_marginals(part.stop - 1, part.stop, layer)[1]
            total += advance * (part.advance or layer < op.layers[-1])
    heads = sum(part.advance for part in op.parts) if op.layers.stop == costs.shape.layers else 0
    return total + (costs.head_seconds(1) if heads else 0.0)


@settings(max_examples=300, deadline=None)
@given(strategies.windows(), st.data())
def test_no_cut_is_cheaper_than_its_cells(windows: tuple[int | None, ...], data: st.DataObject) -> None:
    costs = data.draw(strategies.costs(windows))
    for op in data.draw(staircases(windows)):
        assert costs.seconds(op) >= least(costs, op) * (1 - 1e-9)


@pytest.mark.parametrize("name", sorted(DEVICES))
@pytest.mark.parametrize("tokens", [1, 37, 512, 8192])
def test_devices_keep_the_contract(name: str, tokens: int) -> None:
    costs = Roofline(LLAMA, device(name), bandwidth=10 * GBPS)
    for start in (0, 1000, 131072):
        for layers in (range(1), range(32), range(31, 32)):
            op = Op(COMPUTE, layers, (Part("a", start, start + tokens),))
            assert least(costs, op) * (1 - 1e-9) <= costs.seconds(op) <= 3 * least(costs, op) + 0.02


def test_cutting_a_pass_costs_more() -> None:
    costs = Roofline(LLAMA, device("H100"), bandwidth=10 * GBPS)
    whole = costs.seconds(Op(COMPUTE, range(32), (Part("a", 0, 4096),)))
    chunks = sum(costs.seconds(Op(COMPUTE, range(32), (Part("a", i, i + 16),))) for i in range(0, 4096, 16))
    assert chunks > 2 * whole


class TestLink:
    costs = Affine((None,) * 4, bandwidth=16.0, fetch_seconds=3.0, copy_bandwidth=64.0, copy_seconds=0.5, latency=9.0)

    def test_a_fetch_is_bytes_over_bandwidth(self) -> None:
        op = Op(FETCH, range(1, 4), (Part("a", 0, 5), Part("b", 5, 10)))
        assert self.costs.seconds(op) == 3.0 + 10 * 3 * 8 / 16
        assert self.costs.load_seconds(30) == 15.0

    def test_a_copy_is_bytes_over_its_bandwidth(self) -> None:
        assert self.costs.seconds(Op(COPY, range(2), (Part("a", 0, 5),))) == 0.5 + 10 * 8 / 64

    def test_fixed(self) -> None:
        costs = Affine((None,), compute_fixed=7.0, bandwidth=1.0, fetch_seconds=3.0, copy_seconds=0.5)
        assert [costs.fixed(kind) for kind in (COMPUTE, FETCH, COPY)] == [7.0, 3.0, 0.5]

    @pytest.mark.parametrize("wrong", [{"bandwidth": 0.0}, {"bandwidth": -1.0}, {"copy_bandwidth": math.nan}])
    def test_impossible_bandwidth(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="above 0"):
            Affine((None,), **{"bandwidth": 1.0, **wrong})


class TestDevices:
    def test_numbers_may_be_replaced(self) -> None:
        assert device("H100", host=1e9).host == 1e9
        assert device("H100", host=1e9).gemm == DEVICES["H100"].gemm

    def test_a_device_of_its_own(self) -> None:
        assert device("mine", gemm=1e12, attention=1e12, memory=1e11, host=1e10).name == "mine"

    @pytest.mark.parametrize(("name", "numbers"), [("H1000", {}), ("H100", {"flops": 1.0}), ("mine", {"gemm": 1.0})])
    def test_unknown(self, name: str, numbers: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=name):
            device(name, **numbers)

    def test_small_ops_wait_for_weights(self) -> None:
        costs = Roofline(LLAMA, device("H100", op_seconds=0.0, layer_seconds=0.0), bandwidth=1.0)
        one = costs.seconds(Op(COMPUTE, range(31), (Part("a", 0, 1),)))
        weights = 31 * (LLAMA.project_flops + LLAMA.advance_flops) / 2 * 2
        assert one == pytest.approx(weights / 2.7e12, rel=1e-3)
        assert costs.seconds(Op(COMPUTE, range(31), (Part("a", 0, 16),))) == pytest.approx(one, rel=1e-3)


def test_shape_of_a_configuration() -> None:
    from models.config import ModelConfig

    shape = ModelShape.of(ModelConfig.preset("llama-3.1-8b"), dtype_bytes=2)
    assert shape == LLAMA
