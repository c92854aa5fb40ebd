"""bench_prediction: that predictions come from what was known before the run, and its figures against those by hand."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import bench_prediction as bench
import pytest
import torch

from cacheflow.costs.roofline import GBPS
from cacheflow.engine import Engine
from cacheflow.op import COMPUTE, FETCH
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from cacheflow.stores import Link, MemoryStore
from tests.cacheflow.toy import CHUNK, LAYERS, PAGE, ToyCosts, decoder

MEASURED, LEARNED = bench.MEASURED, bench.LEARNED
SETTINGS = [
    bench.Setting("pipelined", prefix=40, suffix=5, gbps=0.01),
    bench.Setting("load", prefix=28, suffix=1, gbps=0.02),
    bench.Setting("pipelined", prefix=28, suffix=9, gbps=0.02),
    bench.Setting("token", prefix=8, suffix=3, gbps=0.05),
    bench.Setting("recompute", prefix=40, suffix=5, gbps=0.01),
]


class Watched(Engine):
    """Measures what it is told to, and remembers what it knew before each run of a setting."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.measured = 0
        self.before: list[Any] = []

    def measure(self) -> Any:
        self.measured += 1
        self.costs = ToyCosts(self.model)
        return self.costs

    def restore(self, prompts: Any, *, policy: Any = None, **options: Any) -> Any:
        if policy is not None:  # `save` names none
            self.before.append((self.store.bandwidth, copy.deepcopy(self.learned)))  # type: ignore[attr-defined]
        return super().restore(prompts, policy=policy, **options)


@pytest.fixture
def engine() -> Iterator[Watched]:
    torch.set_num_threads(1)
    link = Link(MemoryStore(1 << 26), gbps=math.inf)
    options: dict[str, Any] = dict(chunk_tokens=CHUNK, page_size=PAGE, cache_tokens=256, timeout=60)
    with Watched(decoder(), link, **options) as made:
        made.warmup()
        yield made


def simulated(engine: Engine, setting: bench.Setting, plan: Any, costs: Any) -> float:
    request = Request.of("r", prefix=setting.prefix, suffix=setting.suffix, chunk=CHUNK, layers=LAYERS)
    return Simulation(engine.make_policy(setting.policy, plan), [request], costs=costs).ttft["r"]


def test_what_is_predicted_was_known_before_the_run(engine):
    done = list(bench.runs(engine, SETTINGS, refresh=2))
    assert engine.measured == 1 + 3
    assert [run.setting for run in done] == SETTINGS and len(engine.before) == len(SETTINGS)
    for run, (bandwidth, learned) in zip(done, engine.before, strict=True):
        setting = run.setting
        assert bandwidth == learned.undisturbed.bandwidth == setting.gbps * GBPS
        assert run.ttft.what == bench.TTFT and 0 < run.ttft.seconds < 60 and 0 <= run.others <= 1
        assert run.ttft.predicted == {
            MEASURED: simulated(engine, setting, learned, learned.undisturbed),
            LEARNED: simulated(engine, setting, learned, learned),
        }
    # Nothing is learned yet in the first runs after the costs were measured.
    assert all(run.ttft.predicted[MEASURED] == run.ttft.predicted[LEARNED] for run in done[::2])


def test_what_runs_took_is_in_later_predictions(engine):
    done = list(bench.runs(engine, SETTINGS))
    assert engine.measured == 1 + 1
    assert any(run.ttft.predicted[MEASURED] != run.ttft.predicted[LEARNED] for run in done)


def test_ops_are_predicted_by_kind(engine):
    done = list(bench.runs(engine, SETTINGS))
    for run in done:
        by_kind = {kind: [op for op in run.ops if op.what == kind] for kind in (COMPUTE, FETCH)}
        assert sum(map(len, by_kind.values())) == len(run.ops)
        assert bool(by_kind[FETCH]) == (run.setting.policy != "recompute") and by_kind[COMPUTE]
        # One after another on their stream, all before the first token.
        assert all(sum(op.seconds for op in ops) <= run.ttft.seconds * (1 + 1e-9) for ops in by_kind.values())
        assert all(op.predicted[MEASURED] > 0 and op.predicted[LEARNED] > 0 for op in run.ops)
    [load] = [run for run in done if run.setting.policy == "load"]
    cells = sum(op.predicted[MEASURED] for op in load.ops if op.what == FETCH)
    assert cells == pytest.approx(28 * LAYERS * engine.known_costs.shape.cell_bytes / (0.02 * GBPS))


def test_a_store_that_has_lost_something_is_no_run(engine):
    engine.store.store = MemoryStore(1)
    with pytest.raises(RuntimeError, match="the store did not give what was stored"):
        list(bench.runs(engine, SETTINGS[:1]))


def prediction(what: str, seconds: float, measured: float, learned: float) -> bench.Prediction:
    return bench.Prediction(what, seconds, {MEASURED: measured, LEARNED: learned})


def test_errors_by_hand():
    setting = bench.Setting("pipelined", 256, 8, 0.1)
    # Off by 50 %, and learned by 0.5, 1.5, ... 19.5 %.
    done = [
        bench.Run(
            setting,
            prediction(bench.TTFT, 2.0, 1.0, 2.0 * (1 + (i - 0.5) / 100)),
            (prediction(FETCH, 1.0, 1.0, 0.85), prediction(COMPUTE, 4.0, 3.9, 2.0)),
            0.0,
        )
        for i in range(1, 21)
    ]
    other = bench.Run(bench.Setting("load", 256, 8, 0.1), prediction(bench.TTFT, 1.0, 1.05, 3.0), (), 0.0)
    rows = {(row.policy, row.what, row.costs): row for row in bench.errors([*done, other])}
    assert len(rows) == 6 + 2

    def figures(*key: str) -> tuple[float, ...]:
        row = rows[key]
        return row.count, row.within, row.median, row.p90, row.worst

    assert figures("pipelined", bench.TTFT, MEASURED) == (20, 0, 0.5, 0.5, 0.5)
    assert figures("pipelined", bench.TTFT, LEARNED) == pytest.approx((20, 0.5, 0.1, 0.175, 0.195))
    assert figures("pipelined", FETCH, MEASURED) == (20, 1, 0, 0, 0)
    assert figures("pipelined", FETCH, LEARNED) == pytest.approx((20, 0, 0.15, 0.15, 0.15))
    assert figures("pipelined", COMPUTE, MEASURED) == pytest.approx((20, 1, 0.025, 0.025, 0.025))
    assert figures("load", bench.TTFT, LEARNED) == (1, 0, 2.0, 2.0, 2.0)


def test_settings_are_drawn_evenly_and_by_seed():
    drawn = bench.draw(2000, ["load", "token"], seed=3)
    assert drawn == bench.draw(2000, ["load", "token"], seed=3) != bench.draw(2000, ["load", "token"], seed=4)
    assert [setting.policy for setting in drawn[:3]] == ["load", "token", "load"]
    for values, (low, high) in (
        ([s.prefix for s in drawn], bench.PREFIXES),
        ([s.suffix for s in drawn], bench.SUFFIXES),
        ([s.gbps for s in drawn], bench.GBPS),
    ):
        assert low <= min(values) < 1.1 * low and high / 1.1 < max(values) <= high
        assert sum(value < math.sqrt(low * high) for value in values) / len(values) == pytest.approx(0.5, abs=0.05)
    assert all(setting.prefix % bench.STEP == 0 for setting in drawn)
    assert {setting.prefix % bench.CHUNK for setting in drawn} == {0, bench.STEP}  # with a tail and without


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the toy model."""
    monkeypatch.setattr(bench.demo_model, "ensure", lambda step: SimpleNamespace(folder=decoder(), label="a toy"))
    monkeypatch.setattr("cacheflow.costs.measure.REPEATS", (1, 1))
    for name, value in dict(CHUNK=32, STEP=16, PREFIXES=(32, 128), SUFFIXES=(1, 32), LEARN=2).items():
        monkeypatch.setattr(bench, name, value)


def test_the_command(toy, capsys):
    bench.main(["--runs", "4", "--policy", "pipelined,load", "--json"])
    report = json.loads(capsys.readouterr().out)
    settings = bench.draw(6, ["pipelined", "load"], 0)[2:]
    assert [run["prefix"] for run in report["runs"]] == [setting.prefix for setting in settings]
    found = {(row["policy"], row["what"]) for row in report["errors"] if row["costs"] == LEARNED}
    every = {(policy, what) for policy in ("pipelined", "load") for what in (bench.TTFT, COMPUTE, FETCH)}
    assert found | {("pipelined", FETCH)} == every  # whether it pays to load at all is for the machine to say
    ttft = next(row for row in report["errors"] if row["what"] == bench.TTFT)
    own = [abs(r["predicted"][MEASURED] / r["ttft"] - 1) for r in report["runs"] if r["policy"] == "pipelined"]
    assert (ttft["count"], ttft["worst"]) == (2, max(own))
    bench.main(["--runs", "1"])
    out = capsys.readouterr().out
    assert "1 restorations of a toy" in out and "pipelined" in out and "other processes took" in out


def test_an_unknown_policy_is_named(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--policy", "nearest"])
    assert "nearest" in capsys.readouterr().err
