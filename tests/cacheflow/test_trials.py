"""Policies side by side on one engine: what `compare` prints."""

from __future__ import annotations

import pytest

from cacheflow import trials
from cacheflow.commands import compare
from tests.cacheflow.toy import prompt


def test_means_and_last_first_tokens_are_each_over_a_bound_of_their_own(make_engine, capsys):
    engine = make_engine()
    prompts = [prompt(45), prompt(30, seed=1), prompt(60, seed=2)]
    engine.save(prompts[0])
    outcomes = trials.run(engine, prompts, ["load", "pipelined"], rounds=2)
    assert [len(outcome.trials) for outcome in outcomes] == [2, 2]
    for outcome in outcomes:
        for trial in outcome.trials:
            ttft = [restored.ttft for restored in trial.batch]
            assert trial.mean_ratio_to_bound * trial.mean_bound == pytest.approx(sum(ttft) / 3)
            assert trial.ratio_to_bound * trial.bound == pytest.approx(max(ttft))
            assert 0 < trial.mean_bound < trial.bound
    rows = [compare._row(outcome) for outcome in outcomes]
    compare._print(rows)
    table = capsys.readouterr().out
    for row in rows:
        [line] = [line.split() for line in table.splitlines() if line.startswith(row["policy"])]
        assert line[3:6] == [f"{row[k]:.3f}" for k in ("mean_over_bound", "worst_over_bound", "mean_over_simulated")]
    assert table.count("*") == 2  # the best, and what that means
