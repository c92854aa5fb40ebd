"""staircase: near the optimum of restoration time, never behind single axes, online."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow import bounds, policies
from cacheflow.costs.base import Costs, ModelShape
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.loop import Loop
from cacheflow.op import COMPUTE, FETCH
from cacheflow.plane import Plane
from cacheflow.policies.knapsack import plan
from cacheflow.policies.staircase import Staircase, Stairs
from cacheflow.request import Request
from cacheflow.simulate import Simulation, VirtualBackend
from tests.cacheflow import optimum, strategies
from tests.cacheflow.strategies import Affine

DEVICES = ("A100-40G", "H100")
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)


def llama(layers: int = 32, gbps: float = 40, name: str = "H100") -> Roofline:
    """Llama-3.1-8B, or as much of it as has so many layers."""
    shape = ModelShape(layers, 4096, 32, 8, 128, 14336, 128256, windows=(None,) * layers)
    return Roofline(shape, device(name), bandwidth=gbps * GBPS, latency=1e-3, fetch_seconds=1e-4)


def prompt(tokens: int, costs: Costs, id: str = "a", suffix: int = 64, **options: Any) -> Request:
    """A prefix that ends in a tail, and a suffix."""
    return Request.of(id, prefix=tokens - 37, suffix=suffix, chunk=512, layers=costs.shape.layers, **options)


def restoration(policy: str, requests: list[Request], costs: Costs, actual: Costs | None = None) -> float:
    """Seconds until all prefixes are back, in virtual time."""
    return Simulation(policies.find(policy)(costs), requests, costs=actual).timeline.summary(requests).end


def test_tiny_planes_within_a_per_cent_of_the_optimum() -> None:
    for batch, costs in optimum.planes(seed=0, count=500):
        ratio = restoration("staircase", batch, costs) / bounds.exact(batch, costs, "restoration")
        assert ratio <= (1 + 1e-9 if all(all(request.stored) for request in batch) else 1.01)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("gbps", [10, 40, 80])
def test_never_behind_single_axes(name: str, gbps: float) -> None:
    costs = llama(gbps=gbps, name=name)
    for tokens in LENGTHS:
        request = prompt(tokens, costs)
        best = min(restoration(other, [request], costs) for other in ("token", "layer", "two-pointer"))
        assert restoration("staircase", [request], costs) <= best, tokens


@pytest.mark.parametrize("ratio", [1 / 3, 1, 3, 7])
def test_harmonic_law(ratio: float) -> None:
    """1 / s_io + 1 / s_comp = 1 where every unit costs the same."""
    layers, tokens = 32, 8192
    costs = Affine((None,) * layers, project=ratio / tokens, advance=0, pair=0, head=0, bandwidth=8 * tokens)
    request = Request.of("a", prefix=tokens, suffix=1, chunk=512, layers=layers)
    hybrid = restoration("staircase", [request], costs)
    shares = [hybrid / restoration(name, [request], costs) for name in ("load", "recompute")]
    assert sum(shares) == pytest.approx(1, abs=0.002)
    assert max(shares) < 0.9


def planned(batch: list[Request], costs: Costs) -> tuple[float, float]:
    """max(compute, load) as planned, and its least were cells divisible and in any order: a fractional knapsack."""
    stairs = [Stairs(Plane(request), costs, 8192) for request in batch]
    plan(stairs, costs)
    ends = sum(s.compute_left() for s in stairs), costs.load_seconds(sum(s.load_left() for s in stairs))
    layers = costs.shape.layers
    items = np.array([(f, w) for s in stairs for f, w in zip(s.first, s.widths, strict=True)])
    upper = np.array([(u, w) for s in stairs for u, w in zip(s.upper, s.widths, strict=True)])
    items = np.concatenate([items, upper * (layers - 1)])
    items = items[np.argsort(items[:, 0] / items[:, 1])]
    compute, saved = np.cumsum(items, axis=0).T
    load = (saved[-1] - saved) * costs.load_seconds(1)
    met = int(np.argmax(compute >= load))
    before_compute, before_load = (compute[met - 1], load[met - 1]) if met else (0.0, saved[-1] * costs.load_seconds(1))
    share = (before_load - before_compute) / (before_load - before_compute + compute[met] - load[met])
    return max(ends), float(before_compute + share * (compute[met] - before_compute))


@pytest.mark.parametrize(("tokens", "count", "gap"), [(4096, 1, 5e-3), (131072, 1, 5e-4), (131072, 16, 6e-3)])
def test_what_coarse_blocks_and_bins_lose(tokens: int, count: int, gap: float) -> None:
    for name in DEVICES:
        for gbps in (10, 40, 80):
            costs = llama(layers=64, gbps=gbps, name=name)
            end, ideal = planned([prompt(tokens - 100 * i, costs, str(i)) for i in range(count)], costs)
            assert ideal * (1 - 1e-9) <= end <= ideal * (1 + gap)


def test_restores_first_and_runs_the_suffix_afterwards() -> None:
    costs = llama()
    request = prompt(16384, costs)
    spans = Simulation(Staircase(costs), [request]).timeline.spans
    suffix = [s for s in spans if s.op.kind == COMPUTE and s.op.parts[0].start >= request.prefix]
    assert len(suffix) == 1 and suffix[0].start >= max(s.end for s in spans if s is not suffix[0])


def tops(policy: Staircase, request: str = "a") -> list[int]:
    """The plan, made now."""
    policy.next("link", 0.0)
    return policy._stairs[request].tops


def test_stairs_fall() -> None:
    costs = llama()
    policy = Staircase(costs)
    policy.add(Plane(prompt(32768, costs)))
    found = tops(policy)
    edge = next(i for i, top in enumerate(found) if top < 32)
    assert found[:edge] == [32] * edge and edge > 4
    assert set(found[edge + 16 :]) <= {0, 1}  # a projection in the first layer costs next to nothing


def test_a_small_hidden_budget_makes_stairs_flat() -> None:
    costs = llama()
    request = prompt(32768, costs)
    free, flat = Staircase(costs), Staircase(costs, hidden_tokens=100)
    for policy in (free, flat):
        policy.add(Plane(request))
    assert set(tops(flat)) <= {0, 1, 32} and set(tops(free)) - {0, 1, 32}
    bounded = Simulation(Staircase(costs, hidden_tokens=100), [request]).timeline.summary([request]).end
    assert bounded <= 1.03 * restoration("staircase", [request], costs)


def test_behind_windows_only_the_first_layer_is_computed_by_choice() -> None:
    request = Request.of("a", prefix=64, suffix=3, chunk=8, layers=4, window=20, holes=[6])
    costs = Affine(request.windows, bandwidth=0.1)
    ops = [span.op for span in Simulation(Staircase(costs), [request]).timeline.spans]
    above = [op for op in ops if op.kind == COMPUTE and op.layers.stop > 1]
    assert {request.column_at(part.start) for op in above for part in op.parts} == {6, 8}
    assert any(op.kind == FETCH for op in ops)


@pytest.mark.parametrize(("slower", "most"), [(0.5, 1.75), (0.8, 1.15), (1.25, 1.05), (2.0, 1.05), (4.0, 1.05)])
def test_the_side_that_is_free_takes_over(slower: float, most: float) -> None:
    """A link slower than was thought costs little against a plan that knew; a faster one, no more than what compute had
    been given to do already."""
    thought, actual = llama(gbps=40), llama(gbps=40 / slower)
    request = prompt(32768, thought)
    knew = restoration("staircase", [request], actual)
    assert restoration("staircase", [request], thought, actual) <= most * knew


def test_a_later_request_changes_what_has_not_started() -> None:
    """Two requests alike share the link; the first, which had it for itself, recomputes more from then on."""
    costs = llama(gbps=80)
    policy = Staircase(costs)
    policy.add(Plane(prompt(32768, costs)))
    alone = list(tops(policy))
    started = policy.next("compute", 0.0)
    assert started is not None
    policy.add(Plane(prompt(4096, costs, "b")))
    first, second = list(tops(policy)), policy._stairs["b"].tops
    kept = range(*policy.planes["a"].columns_of(started.parts[0]))
    assert [first[c] for c in kept] == [alone[c] for c in kept]
    assert first != alone and any(second)
    left = policy._stairs.values()
    compute, load = sum(s.compute_left() for s in left), costs.load_seconds(sum(s.load_left() for s in left))
    assert compute + costs.seconds(started) == pytest.approx(load, rel=0.05)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_requests_come_and_go(data: st.DataObject) -> None:
    """Whenever requests arrive, leave, or lose a load: every op is legal, and every request that stays is served."""
    batch = data.draw(strategies.batches())
    costs = data.draw(strategies.costs(batch[0].windows))
    estimates = data.draw(st.just(costs) | strategies.costs(batch[0].windows))
    arrivals = {request.id: data.draw(st.integers(0, 15)) for request in batch}
    leaves = {request.id: data.draw(st.integers(0, 30)) for request in batch if data.draw(st.booleans())}
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    policy = Staircase(
        estimates, token_budget=data.draw(st.integers(1, 30)), hidden_tokens=data.draw(st.sampled_from([None, 8]))
    )
    done: list[str] = []
    backend = VirtualBackend(costs, lambda op: tuple((part, "lost") for part in op.parts if chance.random() < 0.2))
    loop = Loop(policy, backend, on_done=lambda plane, now: done.append(plane.request.id))
    for step in range(3000):
        for request in batch:
            if arrivals[request.id] == step:
                policy.add(Plane(request))
            if leaves.get(request.id) == step and request.id in policy.planes:
                policy.cancel(request.id)
        loop.step()
        if loop.idle and step > max(arrivals.values()):
            break
    assert loop.idle and len(set(done)) == len(done)
    assert {request.id for request in batch} - set(leaves) <= set(done)
