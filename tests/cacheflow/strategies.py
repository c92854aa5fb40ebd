"""Hypothesis strategies: requests of every shape, costs that keep the contract of Costs, policies and their limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st

from cacheflow import policies
from cacheflow.costs.base import Costs, LayerWork, ModelShape
from cacheflow.costs.roofline import Roofline, device
from cacheflow.policies.base import Policy
from cacheflow.request import Request


def shape(windows: tuple[int | None, ...]) -> ModelShape:
    """A toy model: 8 bytes of KV per token and layer."""
    layers = len(windows)
    return ModelShape(layers, hidden=8, heads=4, kv_heads=1, head_dim=2, intermediate=16, vocab=11, windows=windows)


class Affine(Costs):
    """Fixed costs, marginal costs, and a loss that is the larger the smaller an op's layer is.

    loss: seconds that a layer of one token loses. Everything 0 but the marginals: ops cost what their cells cost.
    """

    def __init__(
        self,
        windows: tuple[int | None, ...],
        *,
        project: float = 0.05,
        advance: float = 1.0,
        pair: float = 0.01,
        head: float = 0.3,
        compute_fixed: float = 0.0,
        layer_fixed: float = 0.0,
        loss: float = 0.0,
        **link: Any,
    ) -> None:
        super().__init__(shape(windows), **link)
        self.project_marginal, self.advance_marginal, self.pair_marginal = project, advance, pair
        self.compute_fixed, self.layer_fixed = compute_fixed, layer_fixed
        self.head, self.loss = head, loss

    def layer_seconds(self, work: LayerWork) -> float:
        pairs = sum(span.pairs for span in work.spans)
        marginals = work.project * self.project_marginal + work.advance * self.advance_marginal
        lost = self.loss / max(1, work.project + work.advance)
        return self.layer_fixed + lost + marginals + pairs * self.pair_marginal

    def head_seconds(self, tokens: int) -> float:
        return tokens * self.head


@st.composite
def windows(draw: st.DrawFn, max_layers: int = 5) -> tuple[int | None, ...]:
    """None everywhere, one window everywhere, or layers that differ."""
    layers = draw(st.integers(1, max_layers))
    window = st.none() | st.integers(1, 12)
    return draw(
        st.just((None,) * layers)
        | st.integers(1, 12).map(lambda w: (w,) * layers)
        | st.lists(window, min_size=layers, max_size=layers).map(tuple)
    )


@st.composite
def requests(
    draw: st.DrawFn,
    windows: tuple[int | None, ...],
    id: str = "a",
    max_prefix: int = 6,
    max_suffix: int = 3,
    plain: bool = False,
) -> Request:
    """Columns of uneven width, holes unless `plain`, some suffix columns; often no prefix, or a single token."""
    width = st.integers(1, 5)
    prefix = draw(st.lists(width, max_size=max_prefix))
    suffix = draw(st.lists(width, min_size=1, max_size=max_suffix) | st.just([1]))
    stored = st.booleans() | st.just(True)
    present = [True] * len(prefix) if plain else draw(st.lists(stored, min_size=len(prefix), max_size=len(prefix)))
    return Request(id, (0, *accumulate(prefix + suffix)), tuple(present), windows)


@st.composite
def batches(draw: st.DrawFn, max_requests: int = 3, max_layers: int = 5, **options: Any) -> list[Request]:
    """One request or several of one model."""
    model = draw(windows(max_layers))
    return [draw(requests(model, id, **options)) for id in "abc"[: draw(st.integers(1, max_requests))]]


@st.composite
def costs(draw: st.DrawFn, windows: tuple[int | None, ...]) -> Costs:
    """Roofline or Affine; link, latency, copies and interference from none to dominant."""
    link = {
        "bandwidth": draw(st.floats(-1, 3).map(lambda power: 10**power) | st.just(float("inf"))),
        "latency": draw(st.sampled_from([0.0, 0.5, 20.0])),
        "fetch_seconds": draw(st.sampled_from([0.0, 0.1, 3.0])),
        "copy_bandwidth": draw(st.sampled_from([float("inf"), 50.0, 2.0])),
        "copy_seconds": draw(st.sampled_from([0.0, 0.1])),
        "interference_per_fetch": draw(st.sampled_from([0.0, 0.1, 3.0])),
        "interference_per_byte": draw(st.sampled_from([0.0, 0.01, 1.0])),
    }
    if draw(st.booleans()):
        speeds = {name: 10 ** draw(st.floats(2, 4)) for name in ("gemm", "attention", "memory", "host")}
        overhead = {name: draw(st.sampled_from([0.0, 0.1, 2.0])) for name in ("op_seconds", "layer_seconds")}
        return Roofline(shape(windows), device("toy", **speeds, **overhead), **link)
    part = st.floats(0, 1)
    return Affine(
        windows,
        project=draw(part),
        advance=draw(part) + 0.01,
        pair=draw(part) / 10,
        head=draw(part),
        compute_fixed=draw(part),
        layer_fixed=draw(part) / 10,
        loss=draw(part),
        **link,
    )


@st.composite
def marginal_costs(draw: st.DrawFn, windows: tuple[int | None, ...]) -> Affine:
    """What exact search takes: nothing but marginals."""
    project = draw(st.sampled_from([0.01, 0.05, 0.3, 1.0]))
    pair = draw(st.sampled_from([0.0, 0.02, 0.2]))
    return Affine(windows, project=project, pair=pair, bandwidth=8 * 10 ** draw(st.floats(-1, 1.3)))


@st.composite
def makers(draw: st.DrawFn, limits: bool = True, names: Sequence[str] = ()) -> Callable[[Costs], Policy]:
    """Makes a policy of any kind, or of one of those named, with limits from tight to none."""
    name = draw(st.sampled_from(names or list(policies.available())))
    options: dict[str, Any] = {}
    if limits:
        options["token_budget"] = draw(st.integers(1, 30))
        options["hidden_tokens"] = draw(st.none() | st.integers(1, 30))
        options["staging_cells"] = draw(st.none() | st.integers(1, 60))
    if name == "two-pointer":
        options["crossover"] = draw(st.sampled_from([None, 0, 10**9]))
    return lambda costs: policies.find(name)(costs, **options)
