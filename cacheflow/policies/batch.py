"""Stairs of the requests of a batch, chosen together: a dynamic program over the difference of the two clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cacheflow.policies.stairs import SAMPLED, Planner, Stairs

Seconds = NDArray[np.float64]

BINS = 64  # differences of the two clocks that are told apart
WEIGHTS = (0.0, 0.75, 1.5, 2.25, 3.0, 6.0)  # of the last first token against the sum of all, by the number of requests


def plan_batch(
    planners: Sequence[Planner],
    most: Sequence[int],
    compute_at: float,
    link_at: float,
    objective: Callable[[float, float], float],
) -> list[Stairs]:
    """Stairs for requests that are served in this order, each with at most so many columns beyond the first layer.

    Both resources work on without a gap, so that a request is done when both have done their sums up to it: with C and
    D the sums of compute and link seconds of those before, at max(C + compute, D + link). The sum of that over all, and
    the last of it times a weight, is minimised by a dynamic program backwards over D - C: what a choice does to those
    behind it is in that difference, and in the seconds by which it moves all of them. Of the plans for several weights,
    and that in which each ends as soon as it can, the one is taken whose objective, a function of the mean and of the
    last, is least.
    """
    choices = [_Options(planner, limit) for planner, limit in zip(planners, most, strict=True)]
    start = link_at - compute_at
    plans = [_follow(choices, picked, start) for picked in (*_dynamic_program(choices, start), None)]
    best = min(plans, key=lambda plan: objective(sum(plan.ends) / len(plan.ends), plan.ends[-1]))
    return [options.stairs(*split) for options, split in zip(choices, best.splits, strict=True)]


class _Options:
    """Splits of one request, between nothing and `most` columns, and [options] seconds of compute and of the link.

    What attention takes beyond other work grows with the square of the columns; all else is close to linear between
    the splits that are worked out.
    """

    def __init__(self, planner: Planner, most: int) -> None:
        spread = planner.spread(most)
        splits, bounds = [planner.split(i) for i in spread], planner.bounds
        tokens = [bounds[c] + partly / planner.steps * (bounds[c + 1] - bounds[c]) for c, partly in splits]
        pairs = planner.costs.pair_marginal * planner.steps * np.square(tokens) / 2
        sampled = sorted({*range(0, len(spread), SAMPLED), len(spread) - 1})
        at, pairs_at = [spread[i] for i in sampled], pairs[sampled]
        compute, link = list[Seconds](), list[Seconds]()
        for first in planner.rows:
            exact = [planner.evaluate(columns, partly, first) for columns, partly in (splits[i] for i in sampled)]
            compute.append(pairs + np.interp(spread, at, [stairs.compute for stairs in exact] - pairs_at))
            link.append(np.interp(spread, at, [stairs.link for stairs in exact]))
        self.compute, self.link = np.concatenate(compute), np.concatenate(link)
        self.seconds = list(zip(self.compute.tolist(), self.link.tolist(), strict=True))  # the same as plain numbers
        self._planner, self._spread = planner, spread

    def soonest(self, difference: float) -> int:
        """The option that ends first, if the link is `difference` seconds behind compute before."""
        return int(np.maximum(self.compute, difference + self.link).argmin())

    def beyond(self, option: int, difference: float) -> float:
        """How far from an option to a neighbour both sides end together; 0 if they do not on the way."""
        at, (compute, link) = option % len(self._spread), self.seconds[option]
        late = difference + link - compute
        for other in (-1, 1):
            if 0 <= at + other < len(self._spread):
                compute, link = self.seconds[option + other]
                later = difference + link - compute
                if late * later < 0:
                    return other * late / (late - later)
        return 0.0

    def stairs(self, option: int, beyond: float) -> Stairs:
        row, at = divmod(option, len(self._spread))
        units = round(float(np.interp(at + beyond, range(len(self._spread)), self._spread)))
        return self._planner.evaluate(*self._planner.split(units), self._planner.rows[row])


def _dynamic_program(choices: Sequence[_Options], start: float) -> list[list[int]]:
    """For every weight, which option each request takes. start: of the link's clock against that of compute."""
    steps = [options.link - options.compute for options in choices]
    reach = abs(start) + sum(float(np.abs(step).max()) for step in steps) + 1e-9
    # Close together near 0, since there are short requests among long ones.
    differences = reach * np.sinh(np.linspace(-8, 8, BINS)) / np.sinh(8)
    apart, weights = np.diff(differences), len(choices) * np.array(WEIGHTS)[:, None, None]
    values, best = np.zeros((len(WEIGHTS), BINS)), list[NDArray[np.int64]]()
    for behind, (options, step) in enumerate(zip(reversed(choices), reversed(steps), strict=True)):
        own = np.maximum(options.compute, differences[:, None] + options.link)  # [bins, options]; cost: of each weight
        after = differences[:, None] + step
        left = np.searchsorted(differences[1:-1], after)
        share = (after - differences[left]) / apart[left]
        cost = own * (1 + weights) if behind == 0 else own + options.compute * (behind + weights)
        cost += values.take(left, axis=1) * (1 - share) + values.take(left + 1, axis=1) * share
        best.append(np.argmin(cost, axis=2))
        values = np.take_along_axis(cost, best[-1][..., None], axis=2)[..., 0]
    picked, difference = list[NDArray[np.int64]](), np.full(len(WEIGHTS), start, float)
    for step, of_bins in zip(steps, reversed(best), strict=True):
        nearest = np.abs(differences - difference[:, None]).argmin(axis=1)
        picked.append(of_bins[range(len(WEIGHTS)), nearest])
        difference += step[picked[-1]]
    plans: list[list[int]] = np.transpose(picked).tolist()
    return plans


@dataclass(frozen=True)
class _Plan:
    """splits: an option of each request, and how far beyond it. ends: seconds to each first token."""

    splits: list[tuple[int, float]]
    ends: list[float]


def _follow(choices: Sequence[_Options], picked: Sequence[int] | None, start: float) -> _Plan:
    """What becomes of options, or, without, of those that end first; each moved to where both sides end together."""
    splits, ends, computed, loaded = list[tuple[int, float]](), list[float](), 0.0, start
    for i, options in enumerate(choices):
        option = options.soonest(loaded - computed) if picked is None else picked[i]
        beyond = options.beyond(option, loaded - computed)
        compute, link = options.seconds[option]
        other_compute, other_link = options.seconds[option + (beyond > 0) - (beyond < 0)]
        computed += compute + abs(beyond) * (other_compute - compute)
        loaded += link + abs(beyond) * (other_link - link)
        splits.append((option, beyond))
        ends.append(max(computed, loaded))
    return _Plan(splits, ends)
