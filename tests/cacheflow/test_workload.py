"""Streams of prompts: each is served once, whatever arrives when; queues behave as theory says; what is printed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow import bounds, cli, policies, workload
from cacheflow.arrivals import CHUNK, Prompt, conversations, poisson
from cacheflow.costs.base import Costs
from cacheflow.eviction import EVICTIONS, ChunkStore
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.plane import Plane
from cacheflow.policies.base import Policy
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from tests.cacheflow import strategies
from tests.cacheflow.strategies import Affine

COSTS = Affine((None,) * 2, advance=1e-3, project=1e-4, pair=1e-6, bandwidth=64e3, latency=0.01, copy_bandwidth=1e6)
SLACK = 1 - 1e-9


def unlimited() -> ChunkStore:
    return ChunkStore(None, EVICTIONS["lru"](COSTS, CHUNK))


def prompt(id: str, at: float, tokens: int, first: int = 0) -> Prompt:
    return Prompt(id, at, tokens, tuple(range(first, first + -(-tokens // CHUNK))))


def serve(name: str, prompts: list[Prompt], store: ChunkStore | None = None, **options: Any) -> workload.Outcome:
    return workload.run(lambda: policies.find(name)(COSTS), prompts, store or unlimited(), **options)


@st.composite
def streams(draw: st.DrawFn) -> list[Prompt]:
    """Up to ten prompts in three families that share beginnings, some at the same time."""
    at = accumulate(draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 30.0]), min_size=1, max_size=10)))
    prompts = []
    for i, when in enumerate(at):
        tokens, family = draw(st.integers(1, 4 * CHUNK)), draw(st.integers(0, 2))
        shared = draw(st.integers(0, 4))
        hashes = (10 * family + c if c < shared else 1000 * (i + 1) + c for c in range(-(-tokens // CHUNK)))
        prompts.append(Prompt(f"p{i}", when, tokens, tuple(hashes)))
    return prompts


class Watched(ChunkStore):
    """Asserts after every write that the capacity is kept, and at the end that nothing is in use."""

    def write(self, chunks: Any, now: float) -> None:
        super().write(chunks, now)
        assert self.capacity is None or self.used <= self.capacity

    @property
    def in_use(self) -> int:
        return len(self._uses)


class TestRun:
    @settings(max_examples=150, deadline=None)
    @given(data=st.data(), prompts=streams(), make=strategies.makers())
    def test_every_prompt_is_served_once(
        self, data: st.DataObject, prompts: list[Prompt], make: Callable[[Costs], Policy]
    ) -> None:
        gpus, at_once = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
        users = data.draw(st.none() | st.integers(1, 4))
        capacity = data.draw(st.none() | st.integers(0, 8).map(lambda n: n * CHUNK * 2 * 8))
        name = data.draw(st.sampled_from(sorted(EVICTIONS)))
        together: list[int] = []

        def watched() -> Policy:
            policy, add = make(COSTS), policy_add

            def counting(plane: Plane) -> None:
                add(policy, plane)
                together.append(len(policy.planes))

            policy.add = counting  # type: ignore[method-assign]
            return policy

        def policy_add(policy: Policy, plane: Plane) -> None:
            type(policy).add(policy, plane)

        outcomes, stores = [], []
        for _ in range(2):
            stores.append(Watched(capacity, EVICTIONS[name](COSTS, CHUNK)))
            outcomes.append(
                workload.run(watched, prompts, stores[-1], gpus=gpus, at_once=at_once, users=users, think=0.5, seed=7)
            )
        outcome, store = outcomes[0], stores[0]
        assert outcome == outcomes[1], "the same stream twice"
        assert sorted(r.id for r in outcome.served) == sorted(p.id for p in prompts)
        assert max(together) <= at_once
        assert store.in_use == 0
        tokens = {p.id: p.tokens for p in prompts}
        for request in outcome.served:
            assert request.ttft >= request.bound * SLACK > 0
            assert 0 <= request.loaded <= request.found < request.tokens == tokens[request.id]
            assert 0 <= request.gpu < gpus
        assert all(a.done <= b.done for a, b in pairwise(outcome.served))
        assert all(0 <= outcome.busy_share(kind) <= 1 + 1e-9 for kind in (COMPUTE, FETCH))
        if users is None:
            assert {r.id: r.arrived for r in outcome.served} == {p.id: p.at for p in prompts}
        if users is not None:
            events = sorted([(r.done, -1) for r in outcome.served] + [(r.arrived, 1) for r in outcome.served])
            assert max(accumulate(change for _, change in events)) <= users

    @pytest.mark.parametrize("load", [0.3, 0.5])
    def test_one_server_with_equal_prompts_is_an_m_d_1_queue(self, load: float) -> None:
        seconds = COSTS.seconds(Op(COMPUTE, range(2), (Part("0", 0, 100),)))
        prompts = poisson([Prompt(str(i), 0.0, 100, (i,)) for i in range(5000)], load / seconds, seed=2)
        served = serve("recompute", prompts).served
        free = 0.0
        for request, arriving in zip(served, prompts, strict=True):  # Lindley's recursion
            free = max(free, arriving.at) + seconds
            assert request.id == arriving.id and request.done == pytest.approx(free)
        waiting = np.mean([request.ttft for request in served]) - seconds
        assert waiting == pytest.approx(load * seconds / (2 * (1 - load)), rel=0.1)  # Pollaczek and Khinchine

    def test_a_stream_that_is_served_faster_than_it_arrives_is_served_as_each_alone(self) -> None:
        prompts = [prompt(str(i), 1000.0 * i, 700 + i, first=10 * i) for i in range(4)]
        for request, alone in zip(serve("load", prompts).served, prompts, strict=True):
            assert request.ttft == pytest.approx(serve("load", [alone]).served[0].ttft)

    def test_what_is_found(self) -> None:
        """A prompt that comes before its like is done finds nothing, one that comes after it all but the last token."""
        first = serve("load", [prompt("a", 0.0, 4 * CHUNK)]).served[0].done
        again = [prompt("a", 0.0, 4 * CHUNK), prompt("b", first * 0.99, 4 * CHUNK), prompt("c", first * 3, 4 * CHUNK)]
        found = {name: [r.found for r in serve(name, again).served] for name in ("load", "recompute")}
        assert found["load"] == found["recompute"] == [0, 0, 4 * CHUNK - 1]
        shares = {name: serve(name, again).recompute_share for name in ("load", "recompute", "token")}
        assert (shares["load"], shares["recompute"]) == (0.0, 1.0) and 0.1 < shares["token"] < 0.9
        assert serve("load", again).hit_share == pytest.approx((4 * CHUNK - 1) / (12 * CHUNK))

    def test_who_comes_back_depends_on_the_prompts_alone(self) -> None:
        """More than the first chunk, which may be everyone's, must have been seen, be it still stored or not."""
        stream = [prompt("a", 0.0, 3 * CHUNK), prompt("b", 0.0, 9 * CHUNK), prompt("c", 900.0, CHUNK)]
        stream += [Prompt("d", 900.0, 2 * CHUNK, (0, 99)), Prompt("e", 900.0, 2 * CHUNK, (98, 1))]
        for store in (unlimited(), ChunkStore(0, EVICTIONS["lru"](COSTS, CHUNK))):
            assert {r.id for r in serve("load", stream, store).returning} == {"b", "e"}

    @pytest.mark.parametrize(("evict", "found"), [("lru", 2 * CHUNK), ("restoration", 2 * CHUNK - 1)])
    def test_a_store_that_is_too_small_leaves_holes(self, evict: str, found: int) -> None:
        """Of four chunks it keeps two: the first for LRU, the last for a restorer, for whom the others are holes."""
        store = ChunkStore(2 * CHUNK * 2 * 8, EVICTIONS[evict](COSTS, CHUNK))
        again = [prompt("a", 0.0, 4 * CHUNK), prompt("b", 1000.0, 4 * CHUNK)]
        b = serve("load", again, store).served[1]
        assert b.found == found == b.loaded
        assert (store.evicted, store.refused) == (0, 4)

    def test_goes_to_the_gpu_with_the_least_work(self) -> None:
        sizes = [2000, 300, 300, 300, 2000]
        prompts = [prompt(f"{i}", 0.0, size, first=10 * i) for i, size in enumerate(sizes)]
        gpu = {request.id: request.gpu for request in serve("recompute", prompts, gpus=2).served}
        assert [gpu[p.id] for p in prompts] == [0, 1, 1, 1, 1]
        later = [*prompts, prompt("5", 1000.0, 300, first=60)]
        assert serve("recompute", later, gpus=2).served[-1].gpu == 0

    def test_two_gpus_share_nothing_but_the_store(self) -> None:
        prompts = [prompt("a", 0.0, 900), prompt("b", 0.0, 900, first=10)]
        one, two = serve("recompute", prompts), serve("recompute", prompts, gpus=2)
        alone = serve("recompute", prompts[:1]).served[0].ttft
        assert [r.ttft for r in two.served] == [alone, alone]
        assert max(r.ttft for r in one.served) > 1.9 * alone
        found = serve("load", [prompts[0], prompt("c", 50.0, 900), prompt("d", 50.0, 900)], gpus=2).served
        assert [r.found for r in found] == [0, 899, 899] and {r.gpu for r in found[1:]} == {0, 1}

    def test_waits_in_order_where_no_more_may_be_restored(self) -> None:
        """A policy that takes the shortest first sees one prompt at a time."""
        prompts = [prompt(f"{i}", 0.0, 2000 - 300 * i, first=10 * i) for i in range(5)]
        assert [r.id for r in serve("pipelined", prompts, at_once=1).served] == ["0", "1", "2", "3", "4"]

    def test_closed_loop(self) -> None:
        prompts = conversations(1500, median=600, again=0.0)
        lone = serve("recompute", prompts, users=1)
        assert [r.id for r in lone.served] == [p.id for p in prompts]
        assert all(a.done == b.arrived for a, b in pairwise(lone.served))
        assert lone.busy_share(COMPUTE) == pytest.approx(1.0)
        thinking = serve("recompute", prompts, users=1, think=5.0).served
        gaps = [b.arrived - a.done for a, b in pairwise(thinking)]
        assert np.mean(gaps) == pytest.approx(5.0, rel=0.1) and np.std(gaps) == pytest.approx(5.0, rel=0.15)
        many = serve("recompute", prompts, users=8, gpus=2)
        assert many.rate == pytest.approx(2 * lone.rate, rel=0.02)
        few = serve("recompute", prompts[:31], users=8, gpus=4)
        assert (
            few.carried == pytest.approx(4 * serve("recompute", prompts[:31], users=1).rate) and few.carried > few.rate
        )

    def test_values_that_make_no_sense(self) -> None:
        prompts = [prompt("a", 1.0, 10), prompt("b", 0.0, 10)]
        with pytest.raises(ValueError, match="order of their arrival"):
            serve("load", prompts)
        for wrong in ({"gpus": 0}, {"at_once": 0}, {"users": 0}, {"think": -1.0}):
            with pytest.raises(ValueError, match=f"{next(iter(wrong))} {next(iter(wrong.values()))}"):
                serve("load", prompts, **wrong)


def test_remembering_costs_changes_nothing() -> None:
    asked: list[Op] = []

    class Counting(Affine):
        def seconds(self, op: Op) -> float:
            asked.append(op)
            return super().seconds(op)

    prompts = poisson(conversations(15, median=2000), rate=0.2)
    slow = Counting((None,) * 2, bandwidth=64e3)
    outcomes, counts = [], []
    for costs in (slow, workload.remembering(slow)):
        asked.clear()
        outcomes.append(workload.run(lambda costs=costs: policies.find("token")(costs), prompts, unlimited()))
        counts.append(len(asked))
    assert outcomes[0] == outcomes[1] and counts[1] < 0.7 * counts[0]


def test_quantiles() -> None:
    served = [
        workload.Served(
            str(i), 0, arrived=float(i), done=2.0 * i, tokens=1, again=False, found=0, loaded=0.0, bound=0.0
        )
        for i in range(101)
    ]
    assert workload.quantiles(served) == {"mean": 50.0, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert workload.quantiles([]) == {}


class TestSimulation:
    """Arrivals outside of workloads."""

    @settings(max_examples=150, deadline=None)
    @given(batch=strategies.batches(), make=strategies.makers(), data=st.data())
    def test_arrivals_under_failures(self, batch: list[Request], make: Any, data: st.DataObject) -> None:
        costs = data.draw(strategies.costs(batch[0].windows))
        arrivals = {request.id: data.draw(st.floats(0, 50)) for request in batch if data.draw(st.booleans())}
        chance = random.Random(data.draw(st.integers(0, 99)))

        def fail(op: Op) -> Any:
            return tuple((part, "lost") for part in op.parts) if chance.random() < 0.2 else ()

        simulation = Simulation(make(costs), batch, fail=fail, arrivals=arrivals)
        for request in batch:
            assert simulation.ttft[request.id] >= bounds.lower([request], costs) * SLACK
            first = min(span.start for span in simulation.timeline.of({request.id}))
            assert first >= arrivals.get(request.id, 0.0)

    @pytest.mark.parametrize("name", sorted(policies.available()))
    def test_one_that_comes_when_all_is_done_is_restored_as_if_alone(self, name: str) -> None:
        windows = (None,) * 4
        batch = [Request.of(id, prefix=48, suffix=5, chunk=8, layers=4) for id in "ab"]
        costs = Affine(windows, bandwidth=16.0, latency=0.5)
        alone = Simulation(policies.find(name)(costs), batch[:1]).ttft["a"]
        both = Simulation(policies.find(name)(costs), batch, arrivals={"b": 1000.0})
        assert both.ttft == pytest.approx({"a": alone, "b": alone})
        early = Simulation(policies.find(name)(costs), batch, arrivals={"b": alone / 2})
        assert max(early.ttft.values()) > 1.1 * alone
        kinds = Counter(span.op.kind for span in early.timeline.spans if "b" in span.op.requests)
        assert kinds[COMPUTE] and bool(kinds[COPY]) == (name != "recompute")


# The command

SMALL = ["workload", "--requests", "12", "--median", "2K", "--policy", "load,token", "--reference", "token"]
TRACE = [
    {"timestamp": 400 * i, "input_length": 1600, "output_length": 9, "hash_ids": [0, 1, 10 * i + 2, 10 * i + 3]}
    for i in range(12)
]


@pytest.fixture
def cacheflow(capsys: Any) -> Callable[..., tuple[int, str, str]]:
    def call(*argv: Any) -> tuple[int, str, str]:
        status = cli.main(list(map(str, argv)))
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)))
    return path


class TestCommand:
    def test_a_row_for_every_policy_link_load_and_eviction(self, cacheflow: Any) -> None:
        options = ["--gbps", "10,40", "--load", "0.5,0.9", "--evict", "lru,restoration", "--store", "1GiB"]
        status, out, err = cacheflow(*SMALL, *options)
        rows = [line.split() for line in out.splitlines() if line.lstrip().startswith(("10 ", "40 ")) and "%" in line]
        assert status == 0 and err == ""
        assert [row[:4] for row in rows] == [
            [gbps, load, evict, policy]
            for gbps in ("10", "40")
            for load in ("0.50", "0.90")
            for evict in ("lru", "restoration")
            for policy in ("load", "token")
        ]
        assert out.count(" Gbps: token carries ") == 2

    def test_compact(self, cacheflow: Any) -> None:
        """The same means, a column per link and load."""
        run = [*SMALL, "--gbps", "10,40", "--load", "0.5,0.9", "--evict", "lru,restoration", "--store", "1GiB"]
        rows = json.loads(cacheflow(*run, "--json")[1])["rows"]
        status, out, err = cacheflow(*run, "--compact")
        table = [
            line.replace("*", "").split() for line in out.splitlines() if line.startswith(("lru ", "restoration "))
        ]
        assert status == 0 and err == ""
        assert [line[:2] for line in table] == [[e, p] for e in ("lru", "restoration") for p in ("load", "token")]
        for evict, policy, *cells in table:
            same = [row for row in rows if (row["evict"], row["policy"]) == (evict, policy)]
            means = [(row["ttft_seconds"]["mean"], row["returning_ttft_seconds"]["mean"]) for row in same]
            assert cells == [text for mean, back in means for text in (f"{mean:.2f}", f"({back:.2f})")]
        by_column: dict[Any, list[float]] = {}
        for row in rows:
            by_column.setdefault((row["gbps"], row["load"]), []).append(row["ttft_seconds"]["mean"])
        best = sum(means.count(min(means)) for means in by_column.values())
        assert out.count("*") == best + 1 and len(by_column) == 4  # one in the legend

    def test_json(self, cacheflow: Any) -> None:
        status, out, err = cacheflow(*SMALL, "--load", "0.5,0.8", "--json")
        report = json.loads(out)
        assert status == 0 and err == ""
        assert (report["prompts"], report["reference"], report["arrivals"]) == (12, "token", "poisson")
        [carried] = report["carried"]
        assert [row["load"] for row in report["rows"]] == [0.5, 0.5, 0.8, 0.8]
        for row in report["rows"]:
            assert set(row["ttft_seconds"]) == {"mean", "p50", "p95", "p99"}
            assert 0 < row["busy_compute"] <= 1 and row["rate"] < 1.5 * row["load"] * carried["rate"]

    def test_jobs_change_nothing(self, cacheflow: Any) -> None:
        one, two = (cacheflow(*SMALL, "--json", "--jobs", n) for n in (1, 2))
        assert one == two == cacheflow(*SMALL, "--json")
        assert one != cacheflow(*SMALL, "--json", "--seed", 1)

    def test_a_trace(self, cacheflow: Any, trace: Path) -> None:
        """As it is, stretched, and at a load: what its arrivals are scaled to."""
        run = ["workload", "--trace", trace, "--policy", "load", "--reference", "load", "--json"]
        as_it_is, stretched, loaded = (
            json.loads(cacheflow(*run, *more)[1]) for more in ([], ["--stretch", 2], ["--load", 0.5])
        )
        carried = as_it_is["carried"][0]["rate"]
        assert as_it_is["rows"][0]["load"] == pytest.approx(11 / 4.4 / carried)
        assert stretched["rows"][0]["load"] == pytest.approx(11 / 8.8 / carried)
        assert loaded["rows"][0]["load"] == 0.5
        assert stretched["rows"][0]["seconds"] == pytest.approx(2 * 4.4, rel=0.1)
        assert as_it_is["tokens"] == 12 * 1600 and as_it_is["rows"][0]["hit_share"] > 0.3
        short = json.loads(cacheflow(*run, "--requests", 5)[1])
        assert short["prompts"] == 5

    def test_closed(self, cacheflow: Any) -> None:
        report = json.loads(cacheflow(*SMALL, "--arrivals", "closed", "--users", 3, "--think", 2, "--json")[1])
        assert report["carried"] == [] and [row["load"] for row in report["rows"]] == [None, None]
        assert cacheflow(*SMALL, "--arrivals", "closed")[0] == 0

    @pytest.mark.parametrize(
        ("argv", "value", "remedy"),
        [
            (["--evict", "lru,fifo"], "'fifo'", "restoration"),
            (["--policy", "tokn"], "'tokn'", "two-pointer"),
            (["--reference", "best"], "'best'", "two-pointer"),
            (["--trace", "/no/such.jsonl"], "/no/such.jsonl", "give a file"),
            (["--arrivals", "trace"], "--trace FILE", "poisson"),
            (["--users", "3"], "--users", "leave"),
            (["--think", "3"], "--think", "leave"),
            (["--stretch", "3"], "--stretch", "leave"),
            (["--rate", "3", "--load", "0.5"], "--load", "leave"),
            (["--arrivals", "closed", "--load", "0.5"], "--load", "leave"),
            (["--store", "much"], "'much'", "4GiB"),
            (["--again", "1.5"], "'1.5'", "from 0 to 1"),
            (["--gpus", "0"], "'0'", "at least 1"),
        ],
    )
    def test_wrong_values_end_in_one_sentence(self, cacheflow: Any, argv: list[str], value: str, remedy: str) -> None:
        status, out, err = cacheflow(*SMALL, *argv)
        assert status == 2 and out == "" and len(err.splitlines()) == 1
        assert value in err and remedy in err

    def test_a_trace_whose_prompts_come_all_at_once(self, cacheflow: Any, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(json.dumps({**record, "timestamp": 5}) for record in TRACE))
        status, _, err = cacheflow(*SMALL, "--trace", path)
        assert status == 2 and str(path) in err and "poisson" in err
        assert cacheflow(*SMALL, "--trace", path, "--arrivals", "poisson")[0] == 0

    def test_a_bound_that_is_beaten_fails(self, cacheflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cacheflow.workload.bounds.lower", lambda requests, costs: 1e6)
        status, out, err = cacheflow(*SMALL)
        assert status == 1 and "of the lower bound: one is wrong" in err and "token" in out
