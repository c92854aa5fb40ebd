"""Requests that come, go and fail while others are restored, over a link that changes: what holds for every policy."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from string import ascii_lowercase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow import bounds, policies, workload
from cacheflow.arrivals import CHUNK, Prompt, conversations, poisson
from cacheflow.costs.base import Costs
from cacheflow.costs.learned import Learned
from cacheflow.eviction import EVICTIONS, ChunkStore
from cacheflow.loop import AHEAD, Failures
from cacheflow.op import Op
from cacheflow.plane import LOADING
from cacheflow.policies import launches, pipelined
from cacheflow.policies.base import Policy
from cacheflow.policies.pipelined import OVERTAKEN
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from cacheflow.timeline import Span
from tests.cacheflow import strategies
from tests.cacheflow.legality import Run, When, check, columns, run

SLACK = 1 - 1e-9  # sums in another order


@dataclass(frozen=True)
class Case:
    """A stream, and a policy for it.

    costs: what ops take, but for the link's bandwidth, which becomes that times a factor at times. estimates: of the
    policy; None: the true costs, changes of the link included. learn: whether it refines them by what runs.
    """

    requests: list[Request]
    arrivals: dict[str, When]
    cancels: dict[str, When]
    link: list[tuple[When, float]]
    costs: Costs
    estimates: Costs | None
    learn: bool
    make: Callable[[Costs], Policy]
    lost: float
    seed: int

    @property
    def fastest(self) -> Costs:
        costs = copy.copy(self.costs)
        costs.bandwidth *= max([1.0, *(factor for _, factor in self.link)])
        return costs

    def run(self) -> Run:
        costs = copy.copy(self.costs)
        estimates = costs if self.estimates is None else self.estimates
        if self.learn:
            estimates = Learned(estimates)
        policy = self.make(estimates)
        if isinstance(estimates, Learned):
            policy.observe = estimates.observe
        return run(
            policy,
            self.requests,
            costs=costs,
            fail=losing(self.requests, self.lost, self.seed),
            arrivals=self.arrivals,
            cancels=self.cancels,
            link=[(when, costs.bandwidth * factor) for when, factor in self.link],
        )


def losing(requests: list[Request], share: float, seed: int) -> Callable[[Op], Failures]:
    """Fails a share of all columns, one by one."""
    chance = random.Random(seed)

    def fail(op: Op) -> Failures:
        return tuple((column, "lost") for column in columns(op, requests) if chance.random() < share)

    return fail


def moments(most: int) -> st.SearchStrategy[When]:
    return st.tuples(st.integers(0, most), st.sampled_from([0.0, 0.5, 0.99]))


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    """Up to five requests, some of which are cancelled; most come while others are restored."""
    windows = draw(strategies.windows(max_layers=4))
    small = {"max_prefix": 5, "max_suffix": 2}
    batch = [draw(strategies.requests(windows, id, **small)) for id in "abcde"[: draw(st.integers(1, 5))]]
    ids = [request.id for request in batch]
    costs = draw(strategies.costs(windows))
    arrivals = {id: draw(moments(20)) for id in ids}
    stays = draw(st.dictionaries(st.sampled_from(ids), moments(8), max_size=3))
    return Case(
        batch,
        arrivals=arrivals,
        cancels={id: (arrivals[id][0] + steps, share) for id, (steps, share) in stays.items()},
        link=draw(st.lists(st.tuples(moments(30), st.sampled_from([0.05, 0.25, 4.0, 50.0])), max_size=3)),
        costs=costs,
        estimates=draw(st.none() | strategies.costs(windows)),
        learn=draw(st.booleans()),
        make=draw(strategies.makers(names=[name])),
        lost=draw(st.sampled_from([0.0, 0.0, 0.2, 0.6, 1.0])),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("name", policies.available())
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_request_that_is_wanted_gets_its_first_token(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    result = case.run()
    check(result, cancelled=frozenset(case.cancels))
    for request, ttft in result.ttft.items():
        [one] = [other for other in case.requests if other.id == request]
        assert ttft >= bounds.lower([one], case.fastest) * SLACK
    again = case.run()
    assert (again.arrived, again.done, again.drained) == (result.arrived, result.done, result.drained)
    assert again.spans == result.spans


@settings(max_examples=80, deadline=None)
@given(case=cases("pipelined"))
def test_what_compute_has_to_do_is_runs_of_like_columns(case: Case) -> None:
    """Column by column, whenever a run of columns is looked at anew."""
    pending = launches.Launches._pending

    def checked(climb: launches.Launches) -> list[launches.Run]:
        new, runs, plane = climb._runs is None, pending(climb), climb.plane
        columns: dict[int, tuple[object, ...]] = {}
        for column in range(plane.columns):
            low, top = plane.height[column], climb._top(column)
            if top > low:
                cells = tuple(plane.state[layer][column] for layer in range(low, top))
                columns[column] = (low, top, cells, plane.available[column])
        apart = [c for c in columns if columns[c] != columns.get(c - 1) or LOADING in columns[c][2]]
        if new:
            assert [run.first for run in runs] == apart
            assert [c for run in runs for c in range(run.first, run.last)] == list(columns)
            assert [run.top for run in runs] == [columns[c][1] for c in apart]
        return runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches.Launches, "_pending", checked)
        case.run()


@st.composite
def queues(draw: st.DrawFn, name: str) -> Case:
    """Whole prompts of few lengths, often so many that they wait for each other; nothing fails."""
    layers = draw(st.integers(2, 5))
    windows = (None,) * layers
    size = st.sampled_from([(0, 1), (8, 1), (16, 4), (64, 1)])
    sizes = draw(st.lists(size, min_size=1, max_size=5) | st.lists(size, min_size=24, max_size=26))
    batch = [
        Request.of(id, prefix=prefix, suffix=suffix, chunk=8, layers=layers)
        for id, (prefix, suffix) in zip(ascii_lowercase, sizes, strict=False)
    ]
    costs = strategies.Affine(windows, bandwidth=draw(st.sampled_from([4.0, 8.0, 16.0])))
    gaps = draw(st.lists(moments(7), min_size=len(batch), max_size=len(batch)))
    ended = accumulate(steps for steps, _ in gaps)
    return Case(
        batch,
        arrivals={r.id: (steps, share) for r, steps, (_, share) in zip(batch, ended, gaps, strict=True)},
        cancels={},
        link=draw(st.lists(st.tuples(moments(99), st.sampled_from([0.25, 4.0])), max_size=1)),
        costs=costs,
        estimates=draw(st.none() | st.just(costs)),
        learn=False,
        make=lambda costs: policies.find(name)(costs),
        lost=0.0,
        seed=0,
    )


@pytest.mark.parametrize("name", policies.available())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_queue_is_served_to_its_end(name: str, data: st.DataObject) -> None:
    case = data.draw(queues(name))
    result = case.run()
    check(result)
    for request in case.requests:
        assert result.ttft[request.id] >= bounds.lower([request], case.fastest) * SLACK


# How long `pipelined`, which serves the shortest first, lets a request be overtaken

LAYERS = 4


def overtaken(arrived: dict[str, float], done: dict[str, float]) -> dict[str, int]:
    """How many that came later had their first token before it, by request."""
    return {a: sum(arrived[b] > arrived[a] and done[b] < done[a] for b in done) for a in done}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nobody_is_overtaken_by_more_than_the_limit(data: st.DataObject) -> None:
    """Where nothing is loaded a request can always use what it is given. What was queued when it reached the limit may
    end before it."""
    sizes = data.draw(st.lists(st.sampled_from([1, 4, 30, 200]), min_size=2, max_size=24))
    gaps = data.draw(st.lists(st.sampled_from([0.0, 0.5, 5.0, 40.0]), min_size=len(sizes), max_size=len(sizes)))
    arrivals = dict(zip(ascii_lowercase, accumulate(gaps), strict=False))
    batch = [
        Request.of(id, prefix=0, suffix=tokens, chunk=8, layers=LAYERS)
        for id, tokens in zip(ascii_lowercase, sizes, strict=False)
    ]
    limit = data.draw(st.integers(0, 4))
    costs = strategies.Affine((None,) * LAYERS, bandwidth=8.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelined, "OVERTAKEN", limit)
        ttft = Simulation(policies.find("pipelined")(costs), batch, arrivals=arrivals).ttft
    done = {id: arrivals[id] + seconds for id, seconds in ttft.items()}
    assert max(overtaken(arrivals, done).values()) <= limit + AHEAD


@pytest.mark.parametrize("limit", [OVERTAKEN, 10**9], ids=["limit", "no limit"])
def test_a_long_request_among_short_ones_that_keep_coming(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Part of its first token, and theirs, are loads: when it has reached the limit, those that come do not matter."""
    monkeypatch.setattr(pipelined, "OVERTAKEN", limit)
    costs = strategies.Affine((None,) * LAYERS, bandwidth=8.0)
    long = Request.of("long", prefix=64, suffix=1, chunk=8, layers=LAYERS)
    ends, alone = [], Simulation(policies.find("pipelined")(costs), [long]).ttft["long"]
    for count in (60, 90):
        short = [Request.of(f"short {i}", prefix=8, suffix=1, chunk=8, layers=LAYERS) for i in range(count)]
        arrivals = {"long": 0.0, **{request.id: 5.0 * (i + 1) for i, request in enumerate(short)}}
        ttft = Simulation(policies.find("pipelined")(costs), [long, *short], arrivals=arrivals).ttft
        done = {id: arrivals[id] + seconds for id, seconds in ttft.items()}
        ends.append((done["long"], sorted(done.values())[OVERTAKEN - 1], overtaken(arrivals, done)["long"] / count))
    (end, reached, _), (other_end, _, share) = ends
    if limit == OVERTAKEN:
        assert end == other_end <= reached + 2 * alone
    else:
        assert other_end > 1.2 * end > reached + 2 * alone and share > 0.9


@pytest.mark.parametrize("limit", [OVERTAKEN, 10**9], ids=["limit", "no limit"])
def test_a_long_prompt_in_a_workload(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(pipelined, "OVERTAKEN", limit)
    costs = strategies.Affine((None,) * LAYERS, advance=1e-3, project=1e-4, pair=1e-7, bandwidth=1e4)
    prompts = [Prompt("long", 0.0, 20 * CHUNK, tuple(range(20)))]
    prompts += [Prompt(str(i), 0.5 * (i + 1), CHUNK, (100 + i,)) for i in range(60)]  # each takes two seconds
    served = workload.run(lambda: policies.find("pipelined")(costs), prompts, unlimited(costs)).served
    before = [request.id for request in served].index("long")
    assert (before <= OVERTAKEN + AHEAD) == (limit == OVERTAKEN)


def unlimited(costs: Costs) -> ChunkStore:
    return ChunkStore(None, EVICTIONS["lru"](costs, CHUNK))


# Seeds


def stream(name: str, seed: int, users: int | None = None) -> tuple[workload.Outcome, list[Span]]:
    """A workload by seed, and one of its requests' columns in a simulation with failures by seed."""
    windows = (None,) * LAYERS
    costs = strategies.Affine(windows, advance=1e-3, project=1e-4, pair=1e-7, bandwidth=3e4, latency=0.01, loss=0.01)
    prompts = conversations(16, seed=1 if users else seed, median=1200, again=0.6)
    if users is None:
        prompts = poisson(prompts, rate=0.5, seed=seed)
    store = ChunkStore(20 * CHUNK * LAYERS * 8, EVICTIONS["restoration"](costs, CHUNK))
    outcome = workload.run(
        lambda: policies.find(name)(costs), prompts, store, gpus=2, at_once=3, users=users, think=2.0, seed=seed
    )
    batch = [Request.of(id, prefix=60, suffix=5, chunk=8, layers=LAYERS) for id in "abcd"]
    simulation = Simulation(
        policies.find(name)(costs),
        batch,
        fail=losing(batch, 0.2, seed),
        arrivals={request.id: 0.03 * i for i, request in enumerate(batch)},
    )
    return outcome, simulation.timeline.spans


@pytest.mark.parametrize("users", [None, 3], ids=["open", "closed"])
@pytest.mark.parametrize("name", policies.available())
def test_a_stream_depends_on_its_seed_alone(name: str, users: int | None) -> None:
    outcome, spans = stream(name, 1, users)
    again, spans_again = stream(name, 1, users)
    other, spans_other = stream(name, 2, users)
    assert outcome == again and spans == spans_again
    assert outcome.served != other.served
    assert (spans == spans_other) == (name == "recompute")  # which loads nothing that could fail


def test_streams_do_not_depend_on_the_process() -> None:
    """Nor on the order of sets, which is another in every process."""
    code = (
        "from cacheflow import policies\n"
        "from tests.cacheflow.test_request_streams import stream\n"
        "print([stream(name, 1) for name in policies.available()])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(outputs[0]) > 10_000 and outputs[0] == outputs[1]
