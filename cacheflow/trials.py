"""Running policies side by side on one engine: what the demo and `cacheflow compare` print."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cacheflow import bounds
from cacheflow.engine import Engine
from cacheflow.results import Generated, Restored
from cacheflow.simulate import Simulation
from cacheflow.stores import Link
from cacheflow.timeline import Summary

SINGLE = ("recompute", "load")  # the policies that use one resource: what the others have to beat
SLACK = 0.98  # a time below the bound by more than this has a mistake in it, or the bound has


@dataclass(frozen=True)
class Trial:
    """One policy's run over a batch. Times in seconds.

    batch: the run itself, pages released. tokens: what was generated behind each prompt, the first token included.
    simulated: mean TTFT of the same policy in virtual time, with costs that were measured in the same round.
    bound, mean_bound: with these costs, of the time until the whole batch has its first tokens, and of the mean TTFT.
    """

    policy: str
    batch: tuple[Restored, ...]
    tokens: tuple[tuple[int, ...], ...]
    simulated: float
    bound: float
    mean_bound: float
    summary: Summary

    @property
    def mean_ttft(self) -> float:
        return statistics.fmean(restored.ttft for restored in self.batch)

    @property
    def worst_ttft(self) -> float:
        return worst_ttft(self.batch)

    @property
    def ratio_to_bound(self) -> float:
        return self.worst_ttft / self.bound

    @property
    def mean_ratio_to_bound(self) -> float:
        return self.mean_ttft / self.mean_bound

    @property
    def ratio_to_simulated(self) -> float:
        return self.mean_ttft / self.simulated

    @property
    def overhead(self) -> float:
        """The executor's share of the last TTFT: what it is longer than the critical path of its own recorded ops."""
        return 1 - self.batch[0].timeline.critical_path() / self.worst_ttft


@dataclass(frozen=True)
class Outcome:
    """A policy's trials, one per round."""

    policy: str
    trials: tuple[Trial, ...]

    def median(self, value: Callable[[Trial], float]) -> float:
        """Of a value over the rounds."""
        return statistics.median(map(value, self.trials))

    @property
    def typical(self) -> Trial:
        """The round with the median mean TTFT; of an even number the faster of two."""
        return sorted(self.trials, key=lambda trial: trial.mean_ttft)[(len(self.trials) - 1) // 2]


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    policies: Sequence[str],
    rounds: int,
    *,
    answer_tokens: int = 1,
    stop_tokens: Sequence[int] = (),
    baseline: Callable[[], object] = lambda: None,
    progress: Callable[[str], object] = lambda step: None,
) -> list[Outcome]:
    """Restore the same prompts under every policy, `rounds` times.

    Machines are shared, and what they can do changes by the minute. So every round measures the costs anew and runs
    every policy once: a ratio of two times means something within a round, and its median over rounds is what counts.

    answer_tokens, stop_tokens: what the last round generates, after what is timed.
    baseline: called once per round, for something else that is to be timed beside the policies.
    progress: called before every step.
    """
    trials: dict[str, list[Trial]] = {policy: [] for policy in policies}
    for number in range(1, rounds + 1):
        progress(f"round {number} of {rounds}: measuring costs")
        engine.measure()
        baseline()
        for policy in policies:
            progress(f"round {number} of {rounds}: {policy}")
            generated = engine.generate(
                prompts, answer_tokens if number == rounds else 1, stop_tokens=stop_tokens, policy=policy, save=False
            )
            trials[policy].append(_trial(engine, policy, generated))
    return [Outcome(policy, tuple(done)) for policy, done in trials.items()]


def _trial(engine: Engine, policy: str, generated: Sequence[Generated]) -> Trial:
    batch = tuple(one.restored for one in generated)
    requests = [restored.request for restored in batch]
    simulation = Simulation(engine.make_policy(policy), requests)
    return Trial(
        policy=policy,
        batch=batch,
        tokens=tuple(tuple(one.tokens) for one in generated),
        simulated=statistics.fmean(simulation.ttft.values()),
        bound=bounds.lower(requests, engine.known_costs),
        mean_bound=bounds.lower_mean(requests, engine.known_costs),
        summary=batch[0].timeline.summary(requests, engine.known_costs),
    )


def balance(engine: Engine, prompts: Sequence[Sequence[int]], gbps: float | None) -> list[Restored]:
    """Set the bandwidth of the engine's Link, and give a cold run of the prompts: the fastest of three, released.

    gbps: decimal Gbit/s; None: such that loading all prefixes takes as long as the cold run.
    """
    assert isinstance(engine.store, Link), "the bandwidth of something else cannot be set"
    runs = []
    for _ in range(3):
        batch = engine.restore(prompts, policy="recompute")
        for restored in batch:
            engine.release(restored)
        runs.append(batch)
    cold = min(runs, key=worst_ttft)
    if gbps is None:
        shape = engine.known_costs.shape
        cells = sum(restored.request.prefix for restored in cold) * shape.layers
        gbps = cells * shape.cell_bytes * 8 / 1e9 / worst_ttft(cold)
    engine.store.set_bandwidth(gbps)
    engine.known_costs.bandwidth = engine.store.bandwidth
    return cold


def worst_ttft(batch: Sequence[Restored]) -> float:
    return max(restored.ttft for restored in batch)


def speedup(outcomes: Sequence[Outcome], policy: str) -> float:
    """Over the better of recompute and load: mean TTFTs of each round, their median ratio.

    Raises ValueError if neither ran.
    """
    single = [outcome.trials for outcome in outcomes if outcome.policy in SINGLE]
    if not single:
        raise ValueError(f"speed-ups are over the better of {' and '.join(SINGLE)}; let at least one of them run too")
    [ours] = [outcome.trials for outcome in outcomes if outcome.policy == policy]
    best = [min(trial.mean_ttft for trial in round) for round in zip(*single, strict=True)]
    return statistics.median(time / trial.mean_ttft for time, trial in zip(best, ours, strict=True))


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    difference = torch.linalg.vector_norm(logits.double() - reference.double())
    return float(difference / torch.linalg.vector_norm(reference.double()))
