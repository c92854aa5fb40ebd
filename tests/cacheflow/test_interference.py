"""What loads take from compute: in virtual time, in plans and bounds, in what is learned, and how it is measured."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cacheflow import bounds, interference, policies
from cacheflow.costs.learned import Learned
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.plane import Plane
from cacheflow.policies.stairs import Planner
from cacheflow.request import Request
from cacheflow.simulate import Simulation, VirtualBackend
from cacheflow.stores import MemoryStore
from models.decoder import Decoder
from models.weights import random_weights
from tests.cacheflow.strategies import Affine
from tests.cacheflow.test_pipelined import LLAMA, STAGING, request
from tests.cacheflow.toy import config, objects, prompt, restoring
from tests.stores.faults import Fails

TOKENS = prompt(48)

COSTS = Affine(
    (None,) * 4,
    project=0.0,
    advance=1.0,
    pair=0.0,
    bandwidth=8.0,  # a cell a second
    interference_per_fetch=2.0,
    interference_per_byte=0.25,
)


def compute(start: int, stop: int) -> Op:
    return Op(COMPUTE, range(1), (Part("a", start, stop),))


def ends(backend: VirtualBackend) -> dict[Op, tuple[float, float]]:
    found = {}
    while done := list(backend.wait()):
        found |= {one.op: (one.start, one.end) for one in done}
    return found


class TestBackend:
    FETCHED = Op(FETCH, range(1), (Part("b", 0, 4),))  # ends at 4 and holds up compute by 2 + 4 x 8 / 4 = 10

    def test_compute_that_runs_ends_later_and_what_is_queued_behind_it_starts_later(self) -> None:
        backend = VirtualBackend(COSTS)
        for op in (self.FETCHED, compute(0, 6), compute(6, 8)):
            backend.submit(op)
        assert ends(backend) == {self.FETCHED: (0, 4), compute(0, 6): (0, 16), compute(6, 8): (16, 18)}

    def test_compute_that_comes_meanwhile_waits(self) -> None:
        backend = VirtualBackend(COSTS)
        backend.submit(self.FETCHED)
        assert next(iter(backend.wait())).end == 4
        backend.submit(compute(0, 6))
        assert ends(backend) == {compute(0, 6): (14, 20)}

    def test_compute_that_comes_waits_for_all_that_was_fetched(self) -> None:
        backend, more = VirtualBackend(COSTS), Op(FETCH, range(1), (Part("b", 4, 8),))
        backend.submit(self.FETCHED)
        backend.submit(more)
        assert [next(iter(backend.wait())).end for _ in range(2)] == [4, 8]
        backend.submit(compute(0, 6))
        assert ends(backend) == {compute(0, 6): (24, 30)}

    def test_compute_that_has_ended_does_not(self) -> None:
        backend = VirtualBackend(COSTS)
        for op in (self.FETCHED, compute(0, 3)):
            backend.submit(op)
        assert ends(backend) == {self.FETCHED: (0, 4), compute(0, 3): (0, 3)}

    def test_compute_that_waits_for_a_copy_spends_the_time_waiting(self) -> None:
        costs = Affine((None,) * 4, bandwidth=8.0, advance=1.0, copy_seconds=30.0, interference_per_fetch=10.0)
        backend, copy = VirtualBackend(costs), Op(COPY, range(1), (Part("a", 0, 4),))
        for op in (copy, compute(4, 8), self.FETCHED):
            backend.submit(op)
        assert ends(backend)[compute(4, 8)][0] == 30

    def test_copies_and_fetches_are_not_held_up(self) -> None:
        backend, copy = VirtualBackend(COSTS), Op(COPY, range(4), (Part("a", 0, 8),))
        more = Op(FETCH, range(1), (Part("b", 4, 8),))
        for op in (self.FETCHED, more, copy):
            backend.submit(op)
        assert ends(backend) == {self.FETCHED: (0, 4), more: (4, 8), copy: (0, 0)}


def held_up(per_fetch: float, per_byte: float, gbps: float = 40) -> Roofline:
    return Roofline(
        LLAMA,
        device("H100"),
        bandwidth=gbps * GBPS,
        fetch_seconds=10e-6,
        interference_per_fetch=per_fetch,
        interference_per_byte=per_byte,
    )


PLANNED = [(0.0, 0.0), (100e-6, 0.0), (0.0, 1e-10), (300e-6, 1e-10)]


@pytest.mark.parametrize("gbps", [10, 40])
@pytest.mark.parametrize("taken", PLANNED, ids=str)
def test_pipelined_knows_what_its_loads_take(taken, gbps) -> None:
    """Its plan is what the simulator runs, and near the bound; more pieces cost more, so fewer are fetched."""
    costs, one = held_up(*taken, gbps), request("a", 16384, 64)
    planned = Planner(Plane(one), costs, 8192, STAGING).best(one.prefix)
    simulation = Simulation(policies.find("pipelined")(costs, staging_cells=STAGING), [one])
    assert simulation.ttft["a"] == pytest.approx(planned.seconds, rel=0.02)
    fixed = taken[0] * LLAMA.layers  # of which the bound counts nothing
    assert bounds.lower([one], costs) <= simulation.ttft["a"] <= 1.03 * bounds.lower([one], costs) + fixed


@pytest.mark.parametrize("taken", PLANNED[1:], ids=str)
def test_a_plan_that_does_not_know_is_worse(taken) -> None:
    truth, one = held_up(*taken), request("a", 16384, 64)
    times = [
        Simulation(policies.find("pipelined")(costs, staging_cells=STAGING), [one], costs=truth).ttft["a"]
        for costs in (truth, held_up(0.0, 0.0))
    ]
    assert times[0] < times[1]


def test_bounds_rise_by_what_must_be_loaded() -> None:
    """A prefix of 8 tokens and a suffix of one, in two layers; a fast link."""
    one, options = Request("a", (0, 8, 9), (True,), (None, None)), dict(project=0.0, pair=0.0, head=0.0)
    found = [
        bounds.lower([one], Affine((None, None), bandwidth=8e6, interference_per_byte=taken, **options))
        for taken in (0.0, 1 / 64, 1e9)
    ]
    # The suffix alone; and what 8 loaded cells take, an eighth of a second each (those of the first layer are projected
    # for nothing); and all computed.
    assert found == pytest.approx([2, 3, 10], rel=1e-3)
    means = [
        bounds.lower_mean([one], Affine((None, None), bandwidth=8e6, interference_per_byte=taken, **options))
        for taken in (0.0, 1 / 64, 1e9)
    ]
    assert means == pytest.approx(found, rel=1e-3)


def test_exact_search_refuses_it() -> None:
    with pytest.raises(ValueError, match="interference"):
        bounds.exact([Request.of("a", prefix=8, suffix=1, chunk=8, layers=4)], COSTS)


@pytest.mark.parametrize("copies", [45e9, 2e9])  # bytes/s; slow ones make compute wait
@pytest.mark.parametrize("name", [name for name in policies.available() if name != "recompute"])
def test_what_is_learned_of_compute_is_without_it(name, copies) -> None:
    """Held up by a fifth and more, ops are learned to take what they take alone."""
    truth, learned = held_up(300e-6, 2e-11), Learned(held_up(300e-6, 2e-11))
    truth.copy_bandwidth = learned.undisturbed.copy_bandwidth = copies
    learned.refresh()
    for _ in range(4):
        policy = policies.find(name)(learned, staging_cells=STAGING)
        policy.observe = learned.observe
        Simulation(policy, [request("a", 16384, 64)], costs=truth)
    for row in learned.accuracy():
        if row.kind not in (FETCH, COPY):
            assert row.median < 0.05 and row.factor == pytest.approx(1.0, abs=0.05)
    assert learned.interference_per_fetch == 300e-6 and learned.interference_per_byte == 2e-11


# Measuring


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """Layers that take 1 s in one launch, but for the first 0.3 s more alone, 0.1 more with a fetch and 2 s with every
    chunk of it; and once 9 s. What was really restored is told: chunks, and whether layer by layer."""
    seen: list[tuple[int, bool]] = []
    real = interference._Bench._seconds

    def seconds(self: Any, chunks: int, layer_by_layer: bool, **options: Any) -> float:
        assert real(self, chunks, layer_by_layer, **options) > 0
        seen.append((chunks, layer_by_layer))
        late = 9.0 if len(seen) == 5 else 0.0
        return 1.0 + layer_by_layer * 2 / 3 * (0.3 + 0.1 * (chunks > 0) + 2 * chunks) + late

    monkeypatch.setattr("cacheflow.costs.measure.REPEATS", (1, 1))
    monkeypatch.setattr(interference._Bench, "_seconds", seconds)
    yield seen


def test_it_is_told_by_launches_fetches_and_bytes(make_engine, scripted) -> None:
    store = MemoryStore(1 << 30)
    engine = make_engine(store, costs=None)
    costs = engine.measure(max_tokens=16)
    rounds = [(chunks, apart) for chunks in (0, 1, 3) for apart in (False, True)] * interference.ROUNDS
    assert scripted == [(0, False)] * 2 + rounds
    assert costs.interference_per_fetch == pytest.approx(0.1)
    assert costs.interference_per_byte == pytest.approx(2 * engine.model.config.num_layers / engine.layout.nbytes)
    assert costs.compute_fixed == costs.measurements.compute_fixed == pytest.approx(0.3, abs=0.1)
    assert not objects(store)


def test_ops_for_every_layer_take_what_one_op_does(make_engine) -> None:
    """The measure's own policy does the same work, a launch for every layer."""
    engine = make_engine()
    engine.save(TOKENS[:24])
    found = []
    for policy in ("load", f"{interference.__name__}:LayerByLayer"):
        with restoring(engine, [TOKENS[:40]], policy=policy) as [restored]:
            spans = [span for span in restored.timeline.spans if span.op.kind == COMPUTE]
            found.append((restored.first_token, sum(len(span.op.layers) * span.op.tokens for span in spans)))
    assert found[0] == found[1]
    assert len(spans) == engine.model.config.num_layers


def test_a_store_that_loads_nothing_is_no_measure(make_engine, scripted) -> None:
    store = MemoryStore(1 << 30)
    engine = make_engine(Fails(store, "error"), costs=None)
    with (
        pytest.warns(UserWarning, match="the store could not be timed"),
        pytest.warns(UserWarning, match="what loads take from compute could not be timed"),
    ):
        assert engine.measure(max_tokens=16).interference(8) == 0
    assert not objects(store)


def test_a_mistake_is_no_lack_of_room(make_engine, monkeypatch) -> None:
    """Only what a GPU without room raises is passed over."""

    def full(self: Any) -> dict[int, float]:
        raise torch.OutOfMemoryError("full")

    def wrong(self: Any) -> dict[int, float]:
        raise RuntimeError("stuck")

    monkeypatch.setattr("cacheflow.costs.measure.REPEATS", (1, 1))
    monkeypatch.setattr(interference._Bench, "excess", full)
    with pytest.warns(UserWarning, match="could not be timed"):
        assert make_engine(costs=None).measure(max_tokens=16).interference(8) == 0
    monkeypatch.setattr(interference._Bench, "excess", wrong)
    with pytest.raises(RuntimeError, match="stuck"):
        make_engine(costs=None).measure(max_tokens=16)


@pytest.mark.parametrize(("family", "positions"), [("llama-1-layer", 512), ("llama", 8)])
def test_a_model_with_nothing_to_tell_by_is_left_alone(make_engine, scripted, family, positions) -> None:
    shape = config(family, max_position_embeddings=positions)
    engine = make_engine(model=Decoder(shape, random_weights(shape, 0, torch.float32)), costs=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.measure(max_tokens=8).interference(8) == 0
    assert not scripted
