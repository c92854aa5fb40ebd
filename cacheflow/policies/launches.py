"""What compute does for one request of `pipelined`: launches of what is ready at a layer."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain, groupby, pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple

from cacheflow.op import COMPUTE, Op
from cacheflow.plane import EMPTY, LOADING, Plane

if TYPE_CHECKING:
    from cacheflow.policies.pipelined import Pipelined

JOINED = 100  # times its fixed cost: up to which an op goes through more layers than one


class Run(NamedTuple):
    """Columns [first, last) that stand at the same height and have the same cells filled below `top`, the layer up to
    which compute has something to do for them."""

    first: int
    last: int
    top: int


class Launches:
    """A request's columns on their way up, each as far as it is planned to be computed.

    tops: for every prefix column at how many layers, from the first up, compute is to fill it; None: not planned yet.
    windowed: columns behind a window attend to cells that nobody else needs; then all but the first row is loaded.
    """

    def __init__(self, policy: Pipelined, plane: Plane) -> None:
        self.policy = policy
        self.plane = plane
        self.tops: list[int] | None = None
        self.windowed = any(plane.request.windows)
        self.copying = [0] * plane.layers  # copies in flight, by layer
        self._runs: list[Run] | None = None  # see _pending; None: to be looked at anew

    def next_compute(self, now: float, room: float) -> Op | None:
        """The lowest launch that can go, no longer than `room` seconds. The suffix waits for its layer's loads as long
        as something else runs."""
        plane, height = self.plane, self.plane.height
        runs, standing, bottom = list[Run](), dict[int, list[Run]](), plane.layers
        for run in self._pending():
            if self._unfinished(run):
                runs.append(run)
                layer = height[run.first]
                standing.setdefault(layer, []).append(run)
                if layer < bottom and run.last > plane.prefix_columns:
                    bottom = layer
        self._runs = runs
        for layer in sorted(standing):
            here = standing[layer]
            # Below the suffix there are failed loads, and columns that compute took over.
            op = self._first_climb(here, room) if layer < bottom else self._launch(layer, here, now, room)
            if op is not None or (layer == bottom and self.policy.compute_queued):
                return op
        return None

    def _pending(self) -> list[Run]:
        """What compute has to do, left to right, as of the last change of plan; some of it may be done since."""
        if self._runs is not None:
            return self._runs
        plane, runs, before = self.plane, list[Run](), None
        state = b"".join(plane.state)
        up = [state[column :: plane.columns] for column in range(plane.columns)]  # each from the first layer up
        assert self.tops is not None
        # The last column goes all the way; _top says for others without a plan.
        tops = chain(self.tops, repeat(0, plane.columns - plane.prefix_columns - 1), [plane.layers])
        needs = zip(*plane.need, strict=True) if self.windowed else repeat(None)
        first = 0
        for _, group in groupby(zip(plane.height, tops, plane.available, up, needs, strict=False)):
            last = first + len(list(group))
            top, height = self._top(first), plane.height[first]
            cells = up[first][height:top]
            alike = (height, top, cells, plane.available[first])
            if alike == before and LOADING not in cells:
                runs[-1] = runs[-1]._replace(last=last)
            elif top > height:
                cuts = range(first, last + 1) if LOADING in cells else (first, last)
                runs += [Run(left, right, top) for left, right in pairwise(cuts)]
            first, before = last, alike if top > height else None
        self._runs = runs
        return runs

    def _unfinished(self, run: Run) -> bool:
        plane = self.plane
        if run.last == plane.columns:
            return plane.height[run.first] < plane.layers
        return plane.state[run.top - 1][run.first] == EMPTY

    def _top(self, column: int) -> int:
        """One past the highest layer at which compute has something to do for the column; 0: nowhere."""
        plane = self.plane
        if column == plane.columns - 1:
            return plane.layers
        if column >= plane.prefix_columns or not plane.available[column]:
            return plane.top(column)
        assert self.tops is not None
        for layer in range(self.tops[column] - 1, plane.height[column] - 1, -1):
            if plane.state[layer][column] == EMPTY and plane.needed(column, layer):
                return layer + 1
        return 0

    def _launch(self, layer: int, runs: list[Run], now: float, room: float) -> Op | None:
        """What of these runs can go up this layer now; where that is more than the token budget, or takes longer than
        `room` seconds, the leftmost of as many equal launches as it takes."""
        plane, policy = self.plane, self.policy
        ready = self._ready(layer, runs)
        if not ready:
            return None
        if runs[-1].last > plane.prefix_columns >= ready[-1].last and self._suffix_waits(layer, ready, runs[-1], now):
            return None
        band, tokens = range(layer, layer + 1), self._tokens(ready)
        launches = math.ceil(tokens / policy.token_budget)
        chosen = self._leftmost(ready, tokens / launches) if launches > 1 else ready
        op = self._op(band, chosen)
        if chosen == runs:
            op = self._joined(op, chosen, room)
        while room < float("inf") and policy.costs.seconds(op) > room:
            launches *= 2
            fewer = self._leftmost(ready, tokens / launches)
            if fewer == chosen:
                return None
            chosen, op = fewer, self._op(band, fewer)
        if chosen[-1].last < ready[len(chosen) - 1].last:
            self._cut_behind(chosen[-1])
        return op

    def _ready(self, layer: int, runs: list[Run]) -> list[Run]:
        """Those that can go up this layer in one launch: what they attend to is filled, or one of them projects it."""
        plane, ready, top = self.plane, list[Run](), self.plane.layers - 1
        filled, cells = plane.filled_row(layer), plane.state[layer]
        for run in runs:
            project = cells[run.first] == EMPTY
            if self._goes_on(run, layer):
                query = run.last - 1 if layer == top else run.first
                first = plane.request.first_attended(query, layer) if self.windowed else 0
                if filled.find(0, first, run.first if project else run.last) >= 0:
                    continue
            elif not project:
                continue
            ready.append(run)
            filled[run.first : run.last] = b"\1" * (run.last - run.first)
        return ready

    def _projects(self, run: Run, layer: int) -> bool:
        return self.plane.state[layer][run.first] == EMPTY

    def _goes_on(self, run: Run, layer: int) -> bool:
        """Whether its hidden states are of use above the layer."""
        return layer + 1 < run.top or run.last == self.plane.columns

    def _tokens(self, runs: Iterable[Run]) -> int:
        bounds = self.plane.request.boundaries
        return sum(bounds[run.last] - bounds[run.first] for run in runs)

    def _op(self, band: range, runs: Iterable[Run]) -> Op:
        parts: list[tuple[int, int, bool, bool]] = []
        for run in runs:
            flags = self._projects(run, band[0]), self._goes_on(run, band[-1])
            if parts and parts[-1][1:] == (run.first, *flags):
                parts[-1] = (parts[-1][0], run.last, *flags)
            else:
                parts.append((run.first, run.last, *flags))
        return Op(COMPUTE, band, tuple(self.plane.part(a, b, project=p, advance=on) for a, b, p, on in parts))

    def _leftmost(self, ready: list[Run], share: float) -> list[Run]:
        """The leftmost columns that are so many tokens together, or more by less than a column; but no more than the
        token budget, unless it is one column."""
        plane, bounds, budget = self.plane, self.plane.request.boundaries, self.policy.token_budget
        tokens, chosen = 0, list[Run]()
        for run in ready:
            if tokens >= min(share, budget):
                break
            enough = bisect_left(bounds, bounds[run.first] + share - tokens)
            fits = plane.within(run.first, budget - tokens)
            if chosen and bounds[fits] - bounds[run.first] > budget - tokens:
                break  # not even one column
            chosen.append(Run(run.first, min(max(enough, run.first + 1), fits, run.last), run.top))
            tokens += bounds[chosen[-1].last] - bounds[run.first]
            if chosen[-1].last < run.last:
                break
        return chosen

    def _cut_behind(self, run: Run) -> None:
        """What is pending there is two runs from now on, of which this one is the first."""
        pending = self._pending()
        at = next(i for i, other in enumerate(pending) if other.first <= run.first < other.last)
        first, last, top = pending[at]
        pending[at : at + 1] = [Run(first, run.last, top), Run(run.last, last, top)]

    def _joined(self, op: Op, runs: list[Run], room: float) -> Op:
        """The same through more layers, as far as nothing waits there and an op's fixed cost is worth it."""
        plane, layer, stop = self.plane, op.layers.start, op.layers.stop
        most = min(JOINED * self.policy.costs.fixed(COMPUTE), room)
        if stop == plane.layers or 2 * (seconds := self.policy.costs.seconds(op)) > most:
            return op
        started = {plane.height[run.first] for run in self._pending() if self._unfinished(run)}
        while stop < plane.layers and seconds * (stop + 1 - layer) <= most and stop not in started:
            goes = all(self._goes_on(run, stop - 1) and self._alike(run, layer, stop) for run in runs)
            if not goes or self.copying[stop] or len(self._ready(stop, runs)) < len(runs):
                break
            stop += 1
        return self._op(range(layer, stop), runs) if stop > op.layers.stop else op

    def _alike(self, run: Run, layer: int, other: int) -> bool:
        return self._projects(run, layer) == self._projects(run, other)

    def _suffix_waits(self, layer: int, ready: list[Run], suffix: Run, now: float) -> bool:
        """Whether the suffix had better wait with the others for its loads, than come later in a launch of its own."""
        plane, policy, band = self.plane, self.policy, range(layer, layer + 1)
        if policy.compute_queued:
            return True
        row = plane.state[layer]
        if row.find(LOADING, 0, plane.prefix_columns) < 0 or any(
            plane.loadable(column, layer) for column in range(plane.prefix_columns)
        ):
            return False
        ops = [self._op(band, runs) for runs in (ready, [suffix], [*ready, suffix])]
        apart, alone, together = map(policy.costs.seconds, ops)
        return policy.lands(plane.request.id, layer, now) - now < apart + alone - together

    def _first_climb(self, runs: Iterable[Run], room: float) -> Op | None:
        """A climb of the first column that can; it may end within a run."""
        columns = ((column, run.last) for run in runs for column in range(run.first, run.last))
        op = next(filter(None, (self.plane.climb(c, self.policy.token_budget, last) for c, last in columns)), None)
        if op is None or (room < float("inf") and self.policy.costs.seconds(op) > room):
            return None
        self._runs = None
        return op
