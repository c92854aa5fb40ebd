"""Costs from measurements: their contract whatever was measured, files, and measuring itself."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow.costs.base import LayerWork, ModelShape, Span
from cacheflow.costs.measure import GUESS, link_of, measure
from cacheflow.costs.measured import Measured, Measurements
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.stores import Layout, Link, MemoryStore, PartSpec, StoreWrapper, open_store
from models.decoder import Decoder
from models.weights import random_weights
from tests.cacheflow.toy import config, objects
from tests.stores.faults import Fails, Raises

SHAPE = ModelShape(
    layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=88, vocab=97, windows=(None, 7, 7, None)
)
LAYOUT = Layout(layers=3, kv_heads=2, tokens=8, parts=(PartSpec("k", "float32", 16), PartSpec("v", "float32", 16)))
EPSILON = 1e-12  # of rounding, relative to what is added up


def seconds(most: float = 1.0) -> st.SearchStrategy[float]:
    return st.floats(0, most, allow_subnormal=False)


def grid(most: int, least: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(least, most), min_size=1, max_size=5).map(lambda points: tuple(sorted(points)))


@st.composite
def measurements(draw: Any) -> Measurements:
    """Any numbers, in no order: what a disturbed machine may measure."""
    tokens, queries, contexts = draw(grid(40)), draw(grid(40)), draw(grid(40, least=0))

    def of(points: tuple[int, ...]) -> st.SearchStrategy[tuple[float, ...]]:
        return st.tuples(*[seconds() for _ in points])

    return Measurements(
        tokens=tokens,
        project=draw(of(tokens)),
        advance=draw(of(tokens)),
        queries=queries,
        contexts=contexts,
        pair=tuple(draw(of(contexts)) for _ in queries),
        head=draw(seconds()),
        compute_fixed=draw(seconds()),
    )


@st.composite
def ops(draw: Any) -> Op:
    first = draw(st.integers(0, SHAPE.layers - 1))
    layers = range(first, draw(st.integers(first + 1, SHAPE.layers)))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 60))
        parts.append(Part("r", start, start + draw(st.integers(1, 60)), draw(st.booleans()), draw(st.booleans())))
    return Op(COMPUTE, layers, tuple(parts))


def marginals(costs: Measured, op: Op) -> float:
    """Of every cell that a compute op projects or advances through."""
    total = 0.0
    for part in op.parts:
        for layer in op.layers:
            top = layer == op.layers[-1]
            start = part.stop - 1 if layer == SHAPE.layers - 1 else part.start
            if part.project:
                total += costs.cell_marginals(part.start, part.stop, layer)[0]
            if part.advance or not top:
                total += costs.cell_marginals(start if top else part.start, part.stop, layer)[1]
    return total


@settings(max_examples=200, deadline=None)
@given(measurements(), ops())
def test_no_op_costs_less_than_its_cells(measured, op):
    costs = Measured(SHAPE, measured, bandwidth=1e9)
    least = costs.fixed(COMPUTE) + len(op.layers) * costs.layer_fixed + marginals(costs, op)
    assert costs.seconds(op) >= least * (1 - EPSILON)


@settings(max_examples=100, deadline=None)
@given(measurements(), st.integers(1, 3000), st.integers(1, 3000))
def test_times_go_on_at_the_last_rate_beyond_what_was_measured(measured, n, more):
    """And from point to point in between, where linear interpolation may bend but not jump."""
    costs = Measured(SHAPE, measured, bandwidth=1e9)
    last = measured.tokens[-1]

    def project(tokens: int) -> float:
        return costs.layer_seconds(LayerWork(tokens, ()))

    assert project(last + more) == pytest.approx(measured.project[-1] * (last + more) / last)
    for tokens, value in zip(measured.tokens, measured.project, strict=True):
        assert project(tokens) == pytest.approx(value)
    assert project(0) == 0
    assert min(measured.project) <= project(min(n, last)) <= max(measured.project)


def test_attention_is_interpolated_per_pair():
    measured = Measurements(
        tokens=(1, 100),
        project=(0.0, 0.0),
        advance=(0.0, 0.0),
        queries=(10, 20),
        contexts=(0, 100),
        pair=((1.0, 3.0), (2.0, 8.0)),
        head=0.0,
        compute_fixed=0.0,
    )
    costs = Measured(SHAPE, measured, bandwidth=1e9)

    def pair(start: int, count: int) -> float:
        span = Span(start, start + count, None)
        return costs.layer_seconds(LayerWork(0, (span,))) / span.pairs

    assert [pair(0, 10), pair(100, 10), pair(0, 20), pair(100, 20)] == pytest.approx([1, 3, 2, 8])
    assert pair(50, 10) == pytest.approx(2)
    assert pair(50, 15) == pytest.approx(3.5)
    assert [pair(500, 10), pair(0, 500), pair(0, 1)] == pytest.approx([3, 2, 1])
    assert costs.pair_marginal == 1


# Files


@settings(max_examples=30, deadline=None)
@given(measured=measurements(), bandwidth=st.sampled_from([1.0, 1e9, math.inf]), latency=seconds())
def test_what_was_saved_is_loaded(tmp_path_factory, measured, bandwidth, latency):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    link = dict(bandwidth=bandwidth, latency=latency, fetch_seconds=1e-3, copy_bandwidth=2e9, copy_seconds=1e-5)
    link |= dict(interference_per_fetch=1e-3, interference_per_byte=1e-9)
    Measured(SHAPE, measured, **link).save(path)
    loaded = Measured.load(path, SHAPE)
    assert loaded.measurements == measured and loaded.shape == SHAPE
    for kind in (COMPUTE, FETCH, COPY):
        op = Op(kind, range(1, 3), (Part("r", 3, 11),))
        assert loaded.seconds(op) == Measured(SHAPE, measured, **link).seconds(op)
    assert loaded.latency == latency and loaded.interference(3) == Measured(SHAPE, measured, **link).interference(3) > 0
    assert Measured.load(path, SHAPE, bandwidth=5.0).bandwidth == 5.0


def _saved(tmp_path: Any) -> Any:
    flat = Measurements((1,), (1.0,), (1.0,), (1,), (0,), ((1.0,),), 1.0, 1.0)
    path = tmp_path / "costs.json"
    Measured(SHAPE, flat, bandwidth=1e9).save(path)
    return path


@pytest.mark.parametrize("changes", [dict(layers=5), dict(dtype_bytes=4), dict(windows=(None,) * 4)], ids=str)
def test_costs_of_another_model_are_refused(tmp_path, changes):
    with pytest.raises(ValueError, match="was measured with another model or dtype; measure this one"):
        Measured.load(_saved(tmp_path), dataclasses.replace(SHAPE, **changes))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: "{",
        lambda record: "[]",
        lambda record: json.dumps(record | {"format": 99}),
        lambda record: json.dumps({name: value for name, value in record.items() if name != "shape"}),
        lambda record: json.dumps(record | {"measurements": {"tokens": [1]}}),
        lambda record: json.dumps(record | {"measurements": 3}),
        lambda record: json.dumps(record | {"shape": None}),
    ],
    ids=["no-json", "a-list", "format", "no-shape", "too-little", "a-number", "none"],
)
def test_a_file_that_is_no_costs_is_refused(tmp_path, spoil):
    path = _saved(tmp_path)
    path.write_text(spoil(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=r"holds no measured costs .*; make it with `cacheflow measure`"):
        Measured.load(path, SHAPE)
    with pytest.raises(ValueError, match="holds no measured costs"):
        Measured.load(tmp_path / "nowhere.json", SHAPE)


# Measuring


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("cacheflow.costs.measure.REPEATS", (2, 2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("family", "max_tokens"), [("llama", 1), ("llama", 2), ("llama-1-layer", 17), ("qwen2-window", 64), ("llama", 257)]
)
def test_a_model_is_measured(quick, family, max_tokens):
    shape = config(family, max_position_embeddings=max_tokens)
    model = Decoder(shape, random_weights(shape, 0, torch.float32))
    layout = dataclasses.replace(LAYOUT, layers=shape.num_layers, tokens=48)  # chunks may be longer than any prompt
    steps: list[str] = []
    store = MemoryStore(1 << 20)
    threads = torch.get_num_threads()
    costs = measure(model, store, layout, progress=steps.append)
    assert torch.get_num_threads() == threads
    assert steps and not list(store.entries())
    m = costs.measurements
    for points in (m.tokens, m.queries, m.contexts):
        assert list(points) == sorted(set(points)) and points[-1] <= max_tokens
    numbers = [*m.project, *(rate for row in m.pair for rate in row), m.head, m.compute_fixed]
    assert all(0 < number < 10 for number in numbers)
    assert all(0 <= number < 10 for number in m.advance)
    assert costs.shape == ModelShape.of(model.config, 4)
    for number in (costs.bandwidth, costs.copy_bandwidth):
        assert 0 < number < 1e13
    for kind in (COMPUTE, FETCH, COPY):
        assert 0 < costs.seconds(Op(kind, range(model.config.num_layers), (Part("r", 0, max_tokens),))) < 10


class Remembers(StoreWrapper):
    """Keeps the most objects that were ever there."""

    most = 0

    def write(self, *args: Any) -> Any:
        result = self.store.write(*args)
        self.most = max(self.most, len(list(self.store.entries())))
        return result


@pytest.mark.parametrize("kind", ["memory:1MiB", "disk:"])
def test_a_store_is_timed_and_left_as_it_was(quick, tmp_path, kind):
    store = Remembers(open_store(f"{kind}{tmp_path}/kv" if kind == "disk:" else kind))
    key = "ab" * 32
    payload = torch.randint(256, (LAYOUT.nbytes,), dtype=torch.uint8).numpy()
    store.write(key, LAYOUT, payload)
    link = link_of(store, LAYOUT)
    assert 0 < link["bandwidth"] < 1e13 and link["latency"] == 0
    assert list(objects(store)) == [key]
    assert store.most == 2  # one at a time, so that what is in a full store need not go for it
    store.close()


def test_a_link_is_believed():
    store = Link(MemoryStore(1 << 20), gbps=8, latency=0.25)
    assert link_of(store, LAYOUT) == {"bandwidth": 1e9, "latency": 0.25}
    assert store.statistics().writes == 0


def test_a_store_that_is_too_small_is_refused_in_one_sentence():
    sentence = f"an object of {LAYOUT.nbytes} bytes does not fit the store; raise its capacity"
    with pytest.raises(ValueError, match=sentence):
        link_of(MemoryStore(LAYOUT.nbytes - 1), LAYOUT)


@pytest.mark.parametrize("broken", [Raises, lambda store: Fails(store, "timeout")], ids=["raises", "fails"])
def test_a_store_that_fails_is_guessed_and_not_believed_to_be_fast(broken):
    store = MemoryStore(1 << 20)
    with pytest.warns(UserWarning, match="could not be timed"):
        assert link_of(broken(store), LAYOUT) == {"bandwidth": GUESS, "latency": 0.0}
    assert not objects(store)
    sometimes = broken(store)
    sometimes._times = 2
    assert link_of(sometimes, LAYOUT)["bandwidth"] != GUESS
