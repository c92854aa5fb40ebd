"""bench_link_change: courses by hand, what a planner that knew can be, and that real links really change."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import bench_link_change as bench
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheflow import bounds, policies
from cacheflow.costs.base import Costs, ModelShape
from cacheflow.costs.learned import Learned
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.engine import Engine
from cacheflow.op import FETCH, Op, Part
from cacheflow.policies import Policy
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from cacheflow.stores import Link, MemoryStore
from models.config import ModelConfig
from tests.cacheflow.toy import CHUNK, PAGE, ToyCosts, decoder, prompt

SHAPE = ModelShape.of(ModelConfig.preset("llama-3.1-8b"), dtype_bytes=2)
REQUEST = Request.of("r", prefix=4096, suffix=64, chunk=512, layers=SHAPE.layers)

numbers = st.floats(1e-3, 1e3)
courses = st.builds(bench.Course, before=numbers, factor=st.floats(0.01, 100), at=st.one_of(st.just(math.inf), numbers))


def roofline(gbps: float = 40, **options: float) -> Roofline:
    return Roofline(SHAPE, device("H100"), bandwidth=gbps * GBPS, fetch_seconds=10e-6, **options)


def make(name: str, costs: Costs) -> Policy:
    return policies.find(name)(costs, staging_cells=512 * SHAPE.layers)


def test_a_course_by_hand():
    course = bench.Course(before=100.0, factor=0.25, at=2.0)
    assert [course.ends(start, 100.0) for start in (0.0, 1.0, 1.5, 2.0, 5.0)] == [1.0, 2.0, 4.0, 6.0, 9.0]
    assert [course.moved(until) for until in (0.0, 1.0, 2.0, 6.0)] == [0.0, 100.0, 200.0, 300.0]
    assert bench.Course(before=100.0).ends(7.0, 50.0) == 7.5


@given(courses, st.floats(0, 1e3), st.integers(0, 100_000))
def test_as_much_moves_as_a_transfer_takes(course, start, nbytes):
    end = course.ends(start, nbytes)
    assert end >= start
    assert course.moved(end) - course.moved(start) == pytest.approx(nbytes, rel=1e-6, abs=1e-6 * course.moved(end))


@given(courses, st.lists(st.integers(1, 100), min_size=1, max_size=8), st.lists(st.floats(0, 50), min_size=8))
def test_fetches_follow_each_other_along_the_course(course, tokens, gaps):
    """However far apart they are given, and whatever they are cut into."""
    clock = [0.0]
    costs = bench.Following(roofline(latency=0.5), course, lambda: clock[0])
    cell, free = SHAPE.cell_bytes, 0.0
    for count, gap in zip(tokens, gaps, strict=False):
        seconds = costs.seconds(Op(FETCH, range(1), (Part("r", 0, count),)))
        start = max(free, clock[0] + 0.5)
        free = course.ends(start + 10e-6, count * cell)
        assert seconds == pytest.approx(free - start)
        clock[0] += gap


@pytest.mark.parametrize("name", bench.POLICIES)
def test_along_a_level_course_it_is_the_simulator(name):
    costs = roofline(latency=1e-3)
    expected = Simulation(make(name, costs), [REQUEST]).ttft["r"]
    assert bench.simulate(make(name, costs), REQUEST, costs, bench.Course(costs.bandwidth)) == pytest.approx(expected)
    late = bench.Course(costs.bandwidth, 0.25, at=expected)
    assert bench.simulate(make(name, costs), REQUEST, costs, late) == pytest.approx(expected)


@pytest.mark.parametrize("factor", bench.FACTORS)
def test_load_by_hand(factor):
    costs = roofline()
    whole = Simulation(make("load", costs), [REQUEST]).ttft["r"]
    nbytes = REQUEST.prefix * SHAPE.layers * SHAPE.cell_bytes
    course = bench.Course(costs.bandwidth, factor, at=0.5 * nbytes / costs.bandwidth)
    longer = 0.5 * nbytes / costs.bandwidth * (1 / factor - 1)
    seconds = bench.simulate(make("load", costs), REQUEST, costs, course)
    assert seconds == pytest.approx(whole + longer, rel=1e-2)  # of the fixed seconds of fetches a few fall elsewhere


@pytest.mark.parametrize("factor", bench.FACTORS)
@pytest.mark.parametrize("gbps", [10, 80])
def test_who_knew_is_between_the_bound_and_those_who_did_not(gbps, factor):
    costs = roofline(gbps)
    course = bench.half_way(make, REQUEST, costs, factor)
    same = Simulation(make("pipelined", costs), [REQUEST]).ttft["r"]
    assert (course.before, course.factor, course.at) == (costs.bandwidth, factor, pytest.approx(same / 2))
    speed, seconds = bench.knew(make, REQUEST, costs, course)
    assert bench.bound(REQUEST, costs, course) <= seconds
    assert seconds == bench.simulate(make("pipelined", bench.told(costs, speed)), REQUEST, costs, course)
    for other in (course.before, course.before * factor):
        assert seconds <= bench.simulate(make("pipelined", bench.told(costs, other)), REQUEST, costs, course)
    for name in bench.POLICIES:
        assert bench.bound(REQUEST, costs, course) <= bench.unaware(make, name, REQUEST, costs, course)
    assert costs.bandwidth == gbps * GBPS
    # Half-way a link that drops cannot make it sooner than it was, nor one that gets faster later.
    assert (seconds > same) == (factor < 1)


@pytest.mark.parametrize(
    ("gbps", "tokens", "limit"), [(10, 8192, 1.08), (40, 8192, 1.11), (80, 8192, 1.1), (10, 32768, 1.1)]
)
def test_pipelined_is_not_far_behind_who_knew_that_the_link_drops(gbps, tokens, limit):
    costs, request = roofline(gbps), Request.of("r", prefix=tokens, suffix=64, chunk=512, layers=SHAPE.layers)
    course = bench.half_way(make, request, costs, 0.25)
    assert (
        bench.unaware(make, "pipelined", request, costs, course) <= limit * bench.knew(make, request, costs, course)[1]
    )


def test_the_bound_of_a_level_course_is_that_of_its_speed():
    costs = roofline()
    exact = bounds.lower([REQUEST], costs)
    assert 0.99 * exact <= bench.bound(REQUEST, costs, bench.Course(costs.bandwidth)) <= exact * (1 + 1e-9)
    drop = bench.Course(costs.bandwidth, 0.25, at=exact / 2)
    quarter = bounds.lower([REQUEST], bench.told(costs, costs.bandwidth / 4))
    assert exact < bench.bound(REQUEST, costs, drop) < quarter


def test_who_did_not_know_learns_without_teaching_others():
    costs = roofline()
    course = bench.half_way(make, REQUEST, costs, 0.25)
    learned = Learned(costs)
    times = [bench.unaware(make, "pipelined", REQUEST, known, course) for known in (costs, learned, learned)]
    assert len(set(times)) == 1 and learned.bandwidth == costs.bandwidth and not learned.accuracy()


def test_simulations(monkeypatch, capsys):
    monkeypatch.setattr(bench, "SIMULATED", ((40, 4096),))
    bench.main(["--simulate", "--policy", "load,pipelined", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["gbps"], row["tokens"], row["factor"]) for row in rows] == [(40, 4096, f) for f in bench.FACTORS]
    for row in rows:
        assert row["bound_s"] <= row["knew_s"] and list(row["over_knew"]) == ["load", "pipelined"]
    bench.main(["--simulate", "--policy", "token"])
    out = capsys.readouterr().out
    assert "to 1/4" in out and "times 4" in out and "token" in out


# Real runs


class Watched(Engine):
    """Remembers with what each run was planned, and whether it learned."""

    planned: ClassVar[list[tuple[str, bool, Any]]]

    def restore(self, prompts: Any, *, policy: Any = None, **options: Any) -> Any:
        self.planned.append((policy, self.learn, self.costs))
        return super().restore(prompts, policy=policy, **options)


class Turned(Link):
    """Remembers what its speed was set to, Gbit/s."""

    set_to: ClassVar[list[float]]

    def set_bandwidth(self, gbps: float) -> None:
        super().set_bandwidth(gbps)
        self.set_to.append(gbps)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    torch.set_num_threads(1)
    monkeypatch.setattr(Watched, "planned", [], raising=False)
    monkeypatch.setattr(Turned, "set_to", [], raising=False)
    options: dict[str, Any] = dict(chunk_tokens=CHUNK, page_size=PAGE, cache_tokens=256, timeout=60, learn=True)
    with Watched(decoder(), Turned(MemoryStore(1 << 26), gbps=math.inf), costs=ToyCosts(decoder()), **options) as made:
        yield made


def test_a_real_link_changes_while_it_loads(engine):
    tokens, names = prompt(69), ["load", "pipelined"]
    engine.save(tokens[:64])
    link, nbytes = engine.store, 64 * engine.model.config.num_layers * ToyCosts(decoder()).shape.cell_bytes
    base = nbytes * 8 / 1e9 / 0.4  # loading everything takes 0.4 s, and `pipelined` a part of that
    link.set_bandwidth(base)
    engine.known_costs.bandwidth = link.bandwidth
    before = engine.costs
    Watched.planned.clear()
    Turned.set_to.clear()
    rows = bench.run(engine, tokens, 5, names, rounds=2)
    assert engine.costs is before and engine.learn and link.bandwidth == pytest.approx(base * GBPS)
    assert [(row.factor, row.policy) for row in rows] == [
        (factor, name) for factor in bench.FACTORS for name in (bench.KNEW, *names)
    ]
    for row in rows:
        assert 0 < row.ttft_s < 60 and row.simulated_s > 0
        if row.policy == bench.KNEW:
            assert row.over_knew == row.simulated_over_knew == 1
    # `load` was under way whenever the link changed, and every run left it as it had been.
    for factor in bench.FACTORS:
        changes = [i for i, gbps in enumerate(Turned.set_to) if gbps == pytest.approx(base * factor)]
        assert len(changes) >= 2
        assert all(Turned.set_to[i + 1] == pytest.approx(base) for i in changes)
    runs = Watched.planned[len(names) :]  # behind those to learn from
    assert [(name, learn) for name, learn, _ in runs] == [("pipelined", False), ("load", True), ("pipelined", True)] * 4
    assert len({id(costs) for *_, costs in runs}) == len(runs)
    assert all(costs.undisturbed.bandwidth == pytest.approx(base * GBPS) for *_, costs in runs)
    factors = [factor for factor in bench.FACTORS for _ in range(2)]
    for factor, (_, _, costs) in zip(factors, runs[::3], strict=True):
        low, high = sorted((base * GBPS, base * GBPS * factor))
        assert low / 1.51 < costs.bandwidth < high * 1.51


def test_rows_by_hand():
    times = {bench.KNEW: [1.0, 2.0, 4.0], "load": [3.0, 2.0, 5.0]}
    knew, load = bench._rows(0.25, times, {bench.KNEW: 2.0, "load": 5.0})
    assert (knew.ttft_s, knew.over_knew, knew.simulated_over_knew) == (2.0, 1.0, 1.0)
    assert (load.ttft_s, load.over_knew, load.simulated_s, load.simulated_over_knew) == (3.0, 1.25, 5.0, 2.5)


def test_a_store_that_has_lost_something_is_no_run(engine):
    tokens = prompt(69)
    engine.save(tokens[:64])
    engine.store.read = lambda reads: []  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the store did not give what was stored"):
        bench.run(engine, tokens, 5, ["load"], rounds=1)


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(bench.demo_model, "ensure", lambda step: SimpleNamespace(folder=decoder(), label="a toy"))
    monkeypatch.setattr("cacheflow.costs.measure.REPEATS", (1, 1))
    monkeypatch.setattr(bench, "CHUNK", 32)
    words = ["--tokens", "64", "--suffix", "8", "--rounds", "1", "--policy", "pipelined"]
    bench.main([*words, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["gbps"] > 0 and len(report["rows"]) == 2 * len(bench.FACTORS)
    bench.main(words)
    assert "64 + 8 tokens of a toy, link" in capsys.readouterr().out


def test_an_unknown_policy_is_named(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--policy", "nearest"])
    assert "nearest" in capsys.readouterr().err
