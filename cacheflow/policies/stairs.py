"""Staircases: which leading columns of a request are computed at each layer, and how long that takes with the suffix
climbing behind the loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cacheflow.costs.base import Costs, LayerWork, Span
from cacheflow.op import COMPUTE, COPY, FETCH
from cacheflow.plane import Plane

Seconds = NDArray[np.float64]
Run = tuple[int, int, int]  # layers, columns computed there, columns that go on above


@dataclass(frozen=True)
class Stairs:
    """columns are computed through all layers, one more up to `partly` layers of those above the first, and in the
    first layer `first` columns. seconds: until the first token. compute, link: seconds of each that this takes."""

    columns: int
    partly: int
    first: int
    seconds: float
    compute: float
    link: float

    def tops(self, count: int, layers: int) -> list[int]:
        """[count]: for each column at how many layers it is computed, from the first up."""
        stairs = [layers] * self.columns + [1 + self.partly] * (self.partly > 0)
        return (stairs + [1] * (self.first - len(stairs)) + [0] * count)[:count]


class Planner:
    """Chooses stairs for one request. Times are in seconds from when it is asked.

    Layers run in order, a launch each: at a layer the computed columns are projected, those that go on and the suffix
    are advanced. A launch begins when the layer's other cells have landed, and these are loaded in the order of layers.
    Row 0 can be projected for all columns, since a projection attends to nothing: the first launch waits for no load
    then. Where the link is much faster it is better loaded like the others.
    """

    def __init__(self, plane: Plane, costs: Costs, token_budget: int, staging_cells: int | None) -> None:
        request = plane.request
        self.costs = costs
        self.layers = request.layers
        self.count = plane.prefix_columns
        self.bounds = request.boundaries
        self.tokens = request.tokens
        self.budget = token_budget
        self.staging = staging_cells or request.tokens * request.layers
        self.holes = [(self.bounds[c], self.bounds[c + 1]) for c, stored in enumerate(request.stored) if not stored]
        self._launches: dict[tuple[int, int, bool], float] = {}

    def best(self, most: int, compute_at: float = 0.0, link_at: float = 0.0) -> Stairs:
        """The stairs with the soonest first token, with at most so many columns that go beyond the first layer, when
        compute is free in `compute_at` seconds and the link in `link_at`."""
        steps = max(1, self.layers - 1)
        found: list[Stairs] = []
        for row in (True, False) if self.costs.load_seconds(1) < self.costs.project_marginal else (True,):

            def stairs(units: int, row: bool = row) -> Stairs:
                return self.evaluate(*divmod(units, steps), row, compute_at, link_at)

            found += _valley(stairs, min(most, self.count) * steps)
        return min(found, key=lambda stairs: stairs.seconds)

    def evaluate(
        self, columns: int, partly: int, row: bool = True, compute_at: float = 0.0, link_at: float = 0.0
    ) -> Stairs:
        """How long stairs take. row: whether all of row 0 is projected."""
        costs, more = self.costs, min(columns + 1, self.count)
        above = self.layers - 1
        first = self.count if row else more if partly else columns
        runs: list[Run] = [(1, first, (more if partly else columns) if above else 0)]
        if above:
            upper = above - partly  # layers with `columns` columns, the last layer among them
            runs += [(partly - 1, more, more), (1, more, columns)] if upper and partly else []
            runs += [(upper - 1, columns, columns), (1, columns, 0)] if upper else [(partly - 1, more, more)]
            runs += [] if upper else [(1, more, 0)]
        time, landed, compute, link, done = compute_at, link_at + costs.latency, 0.0, 0.0, 0
        for layers, computed, on in runs:
            if layers < 1:
                continue
            done += layers
            launch = self._launch(computed, on, last=done == self.layers)
            fetch, copy = self._fetch(computed)
            if fetch:
                # Waiting for the first of these layers' loads, or for the last, is all that can hold them up. They
                # land as fast as the slower of link and copies is.
                step = max(fetch, copy)
                time = max(time + launch * layers, landed + fetch + copy + launch * layers)
                landed += step * layers
                time = max(time, landed - step + fetch + copy + launch)
            else:
                time += launch * layers
            compute += launch * layers
            link += fetch * layers
        return Stairs(columns, partly, first, time, compute, link)

    def _fetch(self, columns: int) -> tuple[float, float]:
        """Seconds on the link of a layer of which so many columns are computed, and of what is copied at its end."""
        costs = self.costs
        loaded = self.bounds[self.count] - self.bounds[columns]
        loaded -= sum(stop - start for start, stop in self.holes if start >= self.bounds[columns])
        if not loaded:
            return 0.0, 0.0
        fetches = -(-loaded // self.staging)
        copied = min(loaded, self.staging) * costs.shape.cell_bytes / costs.copy_bandwidth
        return fetches * costs.fixed(FETCH) + costs.load_seconds(loaded), costs.fixed(COPY) + copied

    def _launch(self, computed: int, on: int, last: bool) -> float:
        """Seconds of a layer at which so many columns are computed and so many of them go on."""
        key = (computed, on, last)
        if key not in self._launches:
            self._launches[key] = self._launch_seconds(*key)
        return self._launches[key]

    def _launch_seconds(self, computed: int, on: int, last: bool) -> float:
        costs, bounds, window = self.costs, self.bounds, None
        right = [(start, stop) for start, stop in self.holes if start >= bounds[computed]]
        project = bounds[computed] + sum(stop - start for start, stop in right) + self.tokens - bounds[self.count]
        spans = [Span(0, bounds[on], window)] if on else []
        spans += [] if last else [Span(start, stop, window) for start, stop in right]
        spans.append(Span(self.tokens - 1 if last else bounds[self.count], self.tokens, window))
        launches = max(1, -(-project // self.budget))
        seconds = costs.layer_seconds(LayerWork(project, tuple(spans))) + (launches - 1) * costs.layer_fixed
        return seconds + launches * costs.fixed(COMPUTE) + (costs.head_seconds(1) if last else 0.0)


def _valley(function: Callable[[int], Stairs], last: int) -> list[Stairs]:
    """The lowest values of something over 0..last that falls and then rises, by bisection."""
    low, high = 0, last
    while high - low > 2:
        middle = (low + high) // 2
        if function(middle).seconds <= function(middle + 1).seconds:
            high = middle + 1
        else:
            low = middle + 1
    return [function(i) for i in range(low, high + 1)]


OPTIONS, BINS = 24, 64  # splits of a request, and differences of the two clocks, that a batch's plan tells apart
WEIGHTS = (0.0, 0.5, 1.5)  # of the last first token against the sum of all, by the number of requests
PATIENCE = 1.05  # how much longer than the shortest the mean may be for the sake of the last


def plan_batch(planners: Sequence[Planner], most: Sequence[int], compute_at: float, link_at: float) -> list[Stairs]:
    """Stairs for requests that are served in this order, each with at most so many columns beyond the first layer.

    Both resources work on without a gap, so that a request is done when both have done their sums up to it: with C and
    D the sums of compute and link seconds of those before, at max(C + compute, D + link). The sum of that over all, and
    the last of it times a weight, is minimised by a dynamic program backwards over D - C: what a choice does to those
    behind it is in that difference, and in the seconds by which it moves all of them. Of the plans for several weights
    that one is taken which ends soonest and whose mean is at most PATIENCE times the shortest.
    """
    choices = [_options(planner, limit) for planner, limit in zip(planners, most, strict=True)]
    compute = [np.array([stairs.compute for stairs in options]) for options in choices]
    link = [np.array([stairs.link for stairs in options]) for options in choices]
    start = link_at - compute_at
    plans = []
    for weight in WEIGHTS:
        picked = _dynamic_program(compute, link, start, weight * len(choices))
        times = _times(compute, link, start, picked)
        plans.append((sum(times), times[-1], picked))
    shortest = min(total for total, _, _ in plans)
    _, _, picked = min((plan for plan in plans if plan[0] <= PATIENCE * shortest), key=lambda plan: plan[1])
    return [options[option] for options, option in zip(choices, picked, strict=True)]


def _options(planner: Planner, most: int) -> list[Stairs]:
    steps = max(1, planner.layers - 1)
    units = min(most, planner.count) * steps
    spread = dict.fromkeys(i * units // OPTIONS for i in range(OPTIONS + 1))
    return [planner.evaluate(*divmod(unit, steps)) for unit in spread]


def _dynamic_program(compute: Sequence[Seconds], link: Sequence[Seconds], start: float, weight: float) -> list[int]:
    """Which option each request takes. compute, link: [options] seconds, by request. start: of the link's clock."""
    reach = abs(start) + sum(float(np.abs(d - c).max()) for c, d in zip(compute, link, strict=True)) + 1e-9
    # Close together near 0, since there are short requests among long ones.
    differences = reach * np.sinh(np.linspace(-8, 8, BINS)) / np.sinh(8)
    values, best = np.zeros(BINS), list[NDArray[np.int64]]()
    for behind, (c, d) in enumerate(zip(reversed(compute), reversed(link), strict=True)):
        own = np.maximum(c, differences[:, None] + d)  # [bins, options], as what follows
        moved = np.interp((differences[:, None] + d - c).ravel(), differences, values).reshape(own.shape)
        cost = own * (1 + weight if behind == 0 else 1) + c * (behind + weight if behind else 0) + moved
        best.append(np.argmin(cost, axis=1))
        values = np.min(cost, axis=1)
    picked, difference = [], start
    for c, d, of_bins in zip(compute, link, reversed(best), strict=True):
        picked.append(int(of_bins[int(np.abs(differences - difference).argmin())]))
        difference += float(d[picked[-1]] - c[picked[-1]])
    return picked


def _times(compute: Sequence[Seconds], link: Sequence[Seconds], start: float, picked: Sequence[int]) -> list[float]:
    """Seconds to each first token."""
    times, computed, loaded = [], 0.0, start
    for c, d, option in zip(compute, link, picked, strict=True):
        computed += float(c[option])
        loaded += float(d[option])
        times.append(max(computed, loaded))
    return times
