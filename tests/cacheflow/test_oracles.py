"""Published numbers of hybrid restoration, reproduced by real policies in virtual time.

Sources: Cake (ICML 2025), Fig. 4 digitised and Table 4; an independent run of Cake's scheme on an MI300X.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from cacheflow import policies
from cacheflow.costs.base import Costs, LayerWork, ModelShape
from cacheflow.costs.roofline import DEVICES, GBPS, Roofline, device
from cacheflow.op import COMPUTE, Op, Part
from cacheflow.plane import Plane
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from tests.cacheflow.strategies import Affine

CHUNK = 512
LONGALPACA = ModelShape(32, 4096, 32, 32, 128, 11008, 32000, windows=(None,) * 32)
LLAMA = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, windows=(None,) * 32)

# Seconds to compute chunk 0 and chunk 63, LongAlpaca-7B; close to linear in between.
FIGURE_4 = {"A100-40G": (0.0388, 0.1120), "H100": (0.0274, 0.0935)}
CAKE_BANDWIDTH = 256 * 2**20 / 0.0624  # "32 Gbps": a flat 62.4 ms for a chunk of 256 MiB


class Curve(Costs):
    """A chunk's compute time as measured: linear in its index, equal for all layers."""

    project_marginal = advance_marginal = pair_marginal = compute_fixed = 0.0

    def __init__(self, shape: ModelShape, first: float, slope: float, **link: Any) -> None:
        super().__init__(shape, **link)
        self.first, self.slope = first, slope

    def seconds(self, op: Op) -> float:
        if op.kind != COMPUTE:
            return super().seconds(op)
        total = 0.0
        for part in op.parts:
            for start in range(part.start, part.stop, CHUNK):
                share = min(CHUNK, part.stop - start) / CHUNK * len(op.layers) / self.shape.layers
                total += share * (self.first + self.slope * (start // CHUNK))
        return total

    def layer_seconds(self, work: LayerWork) -> float:
        raise NotImplementedError

    def head_seconds(self, tokens: int) -> float:
        raise NotImplementedError


def restore(name: str, costs: Costs, tokens: int) -> tuple[float, float]:
    """Seconds to the first token of a prefix of whole chunks and one more token, and how many chunks were computed."""
    request = Request.of("a", prefix=tokens, suffix=1, chunk=CHUNK, layers=costs.shape.layers)
    simulation = Simulation(policies.find(name)(costs), [request])
    ops = (span.op for span in simulation.timeline.spans if span.op.kind == COMPUTE)
    computed = sum(len(op.layers) * part.tokens for op in ops for part in op.parts if part.stop <= tokens)
    return simulation.ttft["a"], computed / costs.shape.layers / CHUNK


def speedups(name: str, costs: Costs, tokens: int) -> tuple[float, float]:
    """Of a hybrid over load-only and over compute-only."""
    hybrid = restore(name, costs, tokens)[0]
    return restore("load", costs, tokens)[0] / hybrid, restore("recompute", costs, tokens)[0] / hybrid


class TestHarmonicLaw:
    @pytest.mark.parametrize("ratio", [1 / 3, 1, 3, 7])
    def test_layer_axis(self, ratio: float) -> None:
        """1 / s_io + 1 / s_comp = 1 where every unit costs the same."""
        layers, tokens = 32, 8192
        costs = Affine((None,) * layers, project=ratio / tokens, advance=0, pair=0, head=0, bandwidth=8 * tokens)
        s_io, s_comp = speedups("layer", costs, tokens)
        assert 1 / s_io + 1 / s_comp == pytest.approx(1, abs=0.002)
        assert min(s_io, s_comp) > 1.1

    @pytest.mark.parametrize(
        ("costs", "tokens", "total"),
        [
            pytest.param(
                Curve(LONGALPACA, 0.0388, (0.1120 - 0.0388) / 63, bandwidth=CAKE_BANDWIDTH), 16384, 0.92, id="cake-16k"
            ),
            pytest.param(Curve(LLAMA, 0.0287, 0.000888, bandwidth=4e9), 32768, 0.90, id="mi300x-32k"),
            pytest.param(Roofline(LLAMA, device("H100"), bandwidth=20 * GBPS), 131072, 0.83, id="llama-128k"),
        ],
    )
    def test_token_axis_beats_it(self, costs: Costs, tokens: int, total: float) -> None:
        """(K - j) / K + cum(j) / cum(K) is below 1, because late chunks cost more."""
        s_io, s_comp = speedups("token", costs, tokens)
        assert 1 / s_io + 1 / s_comp == pytest.approx(total, abs=0.01)

    @pytest.mark.parametrize("name", ["A100-40G", "H100"])
    @pytest.mark.parametrize("gbps", [10, 20, 40])
    def test_token_axis_gives_the_formula(self, name: str, gbps: int) -> None:
        """At any setting, with every chunk's own cost, the meeting chunk cut where both sides end together."""
        costs, tokens = Roofline(LLAMA, device(name), bandwidth=gbps * GBPS), 65536
        plane = Plane(Request.of("a", prefix=tokens, suffix=1, chunk=CHUNK, layers=costs.shape.layers))
        band, count = range(costs.shape.layers), plane.prefix_columns
        chunks = [costs.seconds(Op(COMPUTE, band, (plane.part(c, c + 1, advance=False),))) for c in range(count)]
        cum, load = [0.0, *accumulate(chunks)], costs.load_seconds(CHUNK * costs.shape.layers)
        j = max(j for j in range(count) if cum[j] <= (count - j) * load)
        share = ((count - j) * load - cum[j]) / (chunks[j] + load)
        total = (count - j - share) / count + (cum[j] + share * chunks[j]) / cum[-1]
        s_io, s_comp = speedups("token", costs, tokens)
        assert 1 / s_io + 1 / s_comp == pytest.approx(total, abs=0.01)


class TestCake:
    @pytest.mark.parametrize("name", FIGURE_4)
    def test_gemm_and_attention_have_efficiencies_of_their_own(self, name: str) -> None:
        """The presets are the least-squares fit of the curve, which one common efficiency cannot fit."""
        first, last = FIGURE_4[name]
        curve = np.linspace(first, last, 64)
        starts = CHUNK * np.arange(64)
        gemm = np.full(64, CHUNK * 32.0 * (LONGALPACA.project_flops + LONGALPACA.advance_flops))
        pairs = CHUNK * starts + CHUNK * (CHUNK + 1) / 2
        flops = np.stack([gemm, 32.0 * LONGALPACA.pair_flops * pairs], axis=1)
        fit = 1 / np.linalg.lstsq(flops, curve, rcond=None)[0]
        assert fit == pytest.approx([DEVICES[name].gemm, DEVICES[name].attention], rel=0.01)
        common = np.linspace(1e14, 3e14, 2001)[:, None]
        best = np.abs(flops.sum(axis=1) / common / curve - 1).max(axis=1).min()
        assert best == pytest.approx({"A100-40G": 0.115, "H100": 0.196}[name], abs=0.002)

    @pytest.mark.parametrize("name", FIGURE_4)
    def test_roofline_follows_the_curve(self, name: str) -> None:
        """Within 3 %: we project at the last layer where Cake also advances."""
        costs = Roofline(LONGALPACA, device(name), bandwidth=CAKE_BANDWIDTH)
        for index, measured in enumerate(np.linspace(*FIGURE_4[name], 64)):
            part = Part("a", CHUNK * index, CHUNK * (index + 1), advance=False)
            assert costs.seconds(Op(COMPUTE, range(32), (part,))) == pytest.approx(measured, rel=0.03)
        assert costs.load_seconds(CHUNK * 32) == pytest.approx(0.0624)

    def test_16k_on_an_a100(self) -> None:
        first, last = FIGURE_4["A100-40G"]
        costs = Curve(LONGALPACA, first, (last - first) / 63, bandwidth=CAKE_BANDWIDTH)
        assert restore("token", costs, 16384)[1] == pytest.approx(18, abs=0.1)
        ours = speedups("token", costs, 16384)
        assert ours == pytest.approx((2.28, 2.07), rel=0.01)
        assert ours == pytest.approx((2.20, 1.94), rel=0.08)  # measured, Table 4


class TestMI300X:
    """Chunk 0 takes 28.7 ms, every further one 0.888 ms more; the first token itself 55 ms at 16K and 90 ms at 32K."""

    @pytest.mark.parametrize(
        ("tokens", "outside", "compute", "load", "hybrid", "meeting"),
        [(16384, 0.055, 1.439, 0.591, 0.423, 10.5), (32768, 0.090, 3.759, 1.161, 0.833, 20)],
    )
    def test_cakes_scheme(
        self, tokens: int, outside: float, compute: float, load: float, hybrid: float, meeting: float
    ) -> None:
        costs = Curve(LLAMA, 0.0287, 0.000888, bandwidth=4e9)
        assert restore("token", costs, tokens)[1] == pytest.approx(meeting, abs=1)
        for name, measured in (("token", hybrid), ("load", load), ("recompute", compute)):
            assert restore(name, costs, tokens)[0] + outside == pytest.approx(measured, rel=0.03)
