"""One request of `pipelined`: its plan, its loads, and what is changed where estimates were wrong."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import compress, pairwise
from typing import TYPE_CHECKING

import numpy as np

from cacheflow.op import COMPUTE, COPY, FETCH, Op
from cacheflow.plane import EMPTY, Plane
from cacheflow.policies.base import LINK
from cacheflow.policies.early import EarlyLoads
from cacheflow.policies.launches import Launches
from cacheflow.policies.stairs import Planner, Stairs

if TYPE_CHECKING:
    from cacheflow.policies.pipelined import Pipelined

GAIN = 0.02  # share of the time that is left which splitting anew must save
STEEP = 0.003  # share of the time to first token that a slope may cost, see Climb._slope
NARROWEST = 0.5  # columns that a slope leaves for the last layer at least, so that the suffix has a launch to be in


class Climb(Launches):
    """A request on its way up, and what it is to load.

    alone: seconds to its first token, were it the only request. promised: tokens whose hidden states it may keep.
    cell_seconds: of the link per (token, layer) pair, as planned with. row: such pairs of a fetch, as planned, in the
    mean.
    wave: when it came. overtaken: by how many that came later.
    next_row: no layer below has anything to load. nothing_to_load: nothing is planned to be loaded any more, and
    `relieve` has nothing either. Both hold until `changed`: a cell can be loaded again only after a failure, and tops
    move only where that is called.
    """

    def __init__(self, policy: Pipelined, plane: Plane, wave: int) -> None:
        super().__init__(policy, plane)
        self.planner = Planner(plane, policy.costs, policy.token_budget, policy.staging_cells)
        self.stairs: Stairs | None = None
        self._due: float | None = None
        self.promised = 0
        self.cell_seconds = float("inf")
        self.row = 0.0
        self.wave = wave
        self.overtaken = 0
        self._cut: set[int] = set()  # the first and the last layer of which something is loaded
        self.early = EarlyLoads(self)
        self.next_row = 0
        self.nothing_to_load = False

    def due(self, now: float) -> float:
        """When its first token is wanted, counted from when this is first asked; infinite: any time."""
        if self._due is None:
            self._due = now + self.plane.request.deadline
        return self._due

    @cached_property
    def alone(self) -> float:
        return self.planner.estimate()

    @property
    def seconds_left(self) -> float:
        """About how many seconds it still takes, alone."""
        return self.alone * (1 - self.layer / self.plane.layers)

    @property
    def layer(self) -> int:
        """Where the suffix stands: its last column is the last to rise."""
        return self.plane.height[-1]

    def tokens(self, layer: int) -> int:
        """Of its launch at a layer, as planned."""
        request, stairs = self.plane.request, self.stairs
        columns = 0 if stairs is None else stairs.columns if layer else stairs.first
        return request.boundaries[columns] + request.tokens - request.prefix

    @property
    def begun(self) -> bool:
        """Whether anything was filled, or is in flight."""
        plane = self.plane
        return plane.in_flight > 0 or plane.state.count(bytearray([EMPTY]) * plane.columns) < plane.layers

    @property
    def waiting_tokens(self) -> int:
        """Of columns that compute is to take beyond the first layer, and has not begun to."""
        plane = self.plane
        columns = (c for c, top in enumerate(self.tops or ()) if top > 1 and not plane.height[c] and plane.unclaimed[c])
        return sum(map(plane.request.width, columns))

    def follow(self, stairs: Stairs | None, most: int = 0) -> None:
        """Take up a plan, with at most so many columns beyond the first layer; None: load everything but the first
        row."""
        self.stairs = stairs
        count, layers = self.plane.prefix_columns, self.plane.layers
        self.tops = [1] * count
        if stairs is not None:
            self.tops = stairs.tops(count, layers)
            if self.planner.together == 1:  # else either would take more fetches
                self._slope(stairs, most)
                self.early.allow(stairs.seconds)
        self.cell_seconds = self.policy.link_pace.seconds(1)
        left = [layers - top for top in compress(self.tops, self.plane.available)]
        width = self.plane.request.boundaries[count] / max(1, count)
        self._expect(width * sum(left), max(left, default=0))
        self._promise()
        self._cut = {min(self.tops, default=0), layers - 1}
        self.changed()

    def _expect(self, cells: float, layers: int) -> None:
        """Fetches of so many (token, layer) pairs, in so many layers."""
        self.row = min(self.planner.together * cells / max(1, layers), self.planner.staging)

    def _promise(self) -> None:
        """Keep the tokens of all columns that compute takes beyond the first layer from other requests."""
        if self.policy.hidden_tokens is not None:
            self.promised = sum([self.plane.request.width(c) for c, top in enumerate(self.tops or ()) if top > 1])

    def _slope(self, stairs: Stairs, most: int) -> None:
        """Let the number of columns fall from layer to layer, and be what it was in the mean.

        Then compute has hidden states of more columns, and a link that turns out slower leaves fewer that compute must
        take over from the first layer on, where their cells have landed already. Attention of columns further to the
        right takes longer; the slope is as steep as lets that cost STEEP at most. Of n columns more at the first layer,
        and n less at the last, it takes pair_marginal * width**2 * n**2 / 6 a layer longer. A part of that, as cells
        are whole, is moved to the link.
        """
        plane, costs, tops = self.plane, self.policy.costs, self.tops
        assert tops is not None
        steps, count = plane.layers - 1, plane.prefix_columns
        stored = list(compress(range(min(most, count)), plane.request.stored))
        if not stored or not steps or self.planner.overhead(plane.request.width(0)) > costs.fixed(FETCH):
            return  # nothing to slope, or a latency that narrow rows would wait out
        mean, width = sum([tops[c] - 1 for c in stored if tops[c] > 1]) / steps, plane.request.boundaries[count] / count
        reach = min(mean - NARROWEST, len(stored) - mean)
        pairs = costs.pair_marginal * steps * width**2 / 6
        compute = width * (costs.project_marginal + costs.advance_marginal + costs.pair_marginal * mean * width)
        load, allowed = costs.load_seconds(1) * width, STEEP * stairs.seconds
        if compute + load <= 0:
            return
        if pairs > 0 and load > 0:
            shared = allowed * (compute + load) / load
            reach = min(reach, math.sqrt((shared if shared > 2 * (compute + load) else allowed) / pairs))
        if reach < 0.5:
            return
        mean -= pairs * reach**2 / (compute + load) / steps
        reach = min(reach, mean - NARROWEST)
        if reach < 0.5:
            return
        low, high = mean - reach, mean + reach
        begin, end = math.floor(low), min(math.ceil(high), len(stored))
        sloped = np.arange(begin + 1, end + 1)
        x = np.clip(sloped, low, high) - low
        done = np.rint(steps * (np.minimum(sloped, low) + x - x * x / (4 * reach))).astype(int)  # cells, up to a column
        for column, cells in zip(stored[begin:end], np.diff(done, prepend=steps * begin).tolist(), strict=True):
            tops[column] = 1 + cells if cells > 0 else int(column < stairs.first)

    def changed(self) -> None:
        """What compute and link have still to do is to be looked at anew."""
        self.next_row = 0
        self.nothing_to_load = False
        self._runs = None
        self.early.changed()

    # Loads

    def waits_until(self, now: float) -> float:
        """Estimated time at which the loads have landed that the suffix waits for; infinite if it waits for none."""
        plane, layer = self.plane, self.layer
        columns = plane.loadable_columns(self._row(layer), layer) if layer < plane.layers else []
        if columns:
            cells = sum(map(plane.request.width, columns)) * len(self._band(layer, columns))
            return self.policy.free_at(LINK, now) + self.policy.link_pace.seconds(cells)
        return self.policy.lands(plane.request.id, layer, now)

    def next_fetch(self, now: float) -> Op | None:
        plane = self.plane
        for layer in range(self.next_row, plane.layers):
            row = self._row(layer)
            band = self._band(layer, row)
            if layer in self._cut and len(band) == 1 and row:
                stored, pieces = sum([plane.available[c] for c in row]), self.planner.pieces(row[0])
                row = plane.loadable_columns(row, layer)[: -(-stored // pieces)]
            elif len(row) > 1 and self.policy.link_pace.late:
                # Should it not be an outlier, compute takes over from the left.
                row = plane.loadable_columns(row, layer)
                row = row[len(row) // 2 :]
            op = self.policy.fetch_band(plane, band, row)
            if op is not None:
                return op
            self.next_row = layer + 1
        return None

    def _row(self, layer: int) -> list[int]:
        """The columns that are to be loaded at a layer, those that have landed among them."""
        assert self.tops is not None
        return [c for c, top in enumerate(self.tops) if top <= layer]

    def _band(self, layer: int, row: list[int]) -> range:
        """The layers, from this one on, at which the same columns as here are to be loaded, as many as are loaded
        together."""
        plane, stop, together = self.plane, layer + 1, self.planner.together
        if together > 1 and row:
            loadable, last = plane.loadable_columns(row, layer), min(layer + together, plane.layers)
            while stop < last and loadable == plane.loadable_columns(self._row(stop), stop):
                stop += 1
        return range(layer, stop)

    # Where estimates were wrong

    def rebalance(self, now: float, ahead: tuple[float, float] = (0.0, 0.0)) -> bool:
        """Have the first of the columns that were to be loaded computed: as many, and of one more as many layers, as
        let both sides end soonest. Whether that changes anything.

        ahead: seconds of compute and of the link that others take before."""
        plane, policy, tops = self.plane, self.policy, self.tops
        if self.windowed or tops is None:
            return False
        slower, cell = policy.compute_pace.known, policy.link_pace.at(now) * policy.costs.load_seconds(1)
        self.cell_seconds, empty = cell, self._to_load()
        front, suffix = self.layer, plane.part(plane.prefix_columns, plane.columns)
        others = (*plane.parts(c for c in range(plane.prefix_columns) if tops[c] > front), suffix)
        launch = policy.costs.seconds(Op(COMPUTE, range(1), others))
        compute, link = self.left(now, empty)
        compute += ahead[0] + policy.free_at("compute", now) - now
        link += ahead[1] + policy.link_pace.busy(now)
        soonest = before = max(compute, link)
        taken, room = dict[int, int](), policy.hidden_room()
        for c in empty:
            part, height = plane.part(c, c + 1), plane.height[c]
            room -= 0 if plane.holds(c) else part.tokens
            if room < 0:
                break
            # Up to where the suffix stands a climb of its own, from there on in others' launches.
            up = plane.part(c, c + 1, project=False)
            alone = policy.costs.seconds(Op(COMPUTE, range(height, front), (up,))) if height < front >= tops[c] else 0.0
            others = (part, *others)
            beside, launch = -launch, policy.costs.seconds(Op(COMPUTE, range(1), others))
            beside += launch
            begin = max(height, front, tops[c])
            climbs = [slower * (alone + beside * max(0, layer + 1 - begin)) for layer in empty[c]]
            ends = [max(compute + climb, link - cell * part.tokens * count) for count, climb in enumerate(climbs, 1)]
            least = min(ends)
            if least >= soonest:
                break
            soonest, taken[c] = least, empty[c][ends.index(least)] + 1
            compute += climbs[-1]
            link -= cell * part.tokens * len(empty[c])
            if taken[c] <= empty[c][-1]:
                break
        if soonest >= (1 - GAIN) * before:
            return False
        for c, top in taken.items():
            tops[c], empty[c] = top, [layer for layer in empty[c] if layer >= top]
        left = {layer for layers in empty.values() for layer in layers}
        cells = sum([plane.request.width(c) * len(empty[c]) for c in empty])
        self._expect(cells, len(left))
        self._promise()
        self.changed()
        return True

    def left(self, now: float, to_load: dict[int, list[int]] | None = None) -> tuple[float, float]:
        """About how many seconds of compute and of the link its plan still takes, what is in flight left out."""
        policy, width = self.policy, self.plane.request.width
        to_load = self._to_load() if to_load is None else to_load
        cells = sum([width(c) * len(to_load[c]) for c in to_load])
        link = policy.link_pace.at(now) * policy.costs.load_seconds(cells)
        link += cells / max(1.0, self.row) * self.planner.overhead(self.row)
        return policy.compute_pace.known * self._compute_seconds(), link

    def _to_load(self) -> dict[int, list[int]]:
        """The layers at which cells are still to be loaded, of every column that has some."""
        plane, tops, layers = self.plane, self.tops, dict[int, list[int]]()
        assert tops is not None
        for c in range(plane.prefix_columns):
            if plane.available[c] and plane.unclaimed[c] and tops[c] < plane.layers:
                layers[c] = [layer for layer in range(tops[c], plane.layers) if plane.state[layer][c] == EMPTY]
        return {c: empty for c, empty in layers.items() if empty}

    def _compute_seconds(self) -> float:
        """About what compute takes for all that is planned."""
        plane, costs, front = self.plane, self.policy.costs, self.layer
        count = plane.prefix_columns
        tops = [top if plane.available[c] else plane.top(c) for c, top in enumerate(self.tops or ())]
        suffix, seconds, height = plane.part(count, plane.columns), 0.0, plane.height
        marks = {front, plane.layers, *(mark for mark in (*tops, *height[:count]) if mark > front)}
        for below, top in pairwise(sorted(marks)):
            here = [c for c in range(count) if height[c] <= below and tops[c] >= top]
            parts = plane.parts([c for c in here if tops[c] > top])
            parts += plane.parts([c for c in here if tops[c] == top], advance=False)
            seconds += costs.seconds(Op(COMPUTE, range(below, top), (*parts, suffix)))
            seconds += (top - below - 1) * costs.fixed(COMPUTE)
        for c in range(count):
            if tops[c] > front > height[c]:
                up = plane.part(c, c + 1, project=False)
                seconds += costs.seconds(Op(COMPUTE, range(height[c], front), (up,)))
        return seconds

    def relieve(self, now: float) -> Op | None:
        """A load of a cell that compute was to fill, where the link has time for it before compute gets there, and that
        does not hold compute up by more than it saves."""
        plane, policy, tops, costs = self.plane, self.policy, self.tops, self.policy.costs
        assert tops is not None
        top = max(tops, default=0)
        column = max((c for c, t in enumerate(tops) if t == top and plane.available[c]), default=-1)
        layer = top - 1
        if top <= 1 or column < 0 or not plane.loadable(column, layer):
            self.nothing_to_load = self.next_row == plane.layers
            return None
        part = plane.part(column, column + 1)
        if costs.interference(part.tokens) > sum(costs.cell_marginals(part.start, part.stop, layer)):
            return None
        launches = layer - max(self.layer, plane.height[column]) - 1
        reached = policy.free_at("compute", now) + launches * self.alone / plane.layers
        copy = costs.seconds(Op(COPY, range(layer, top), (part,)))
        landed = policy.free_at(LINK, now) + costs.latency + costs.fixed(FETCH) + policy.link_pace.seconds(part.tokens)
        if max(landed, now + copy * policy.copies) + copy >= reached:
            return None
        tops[column] = layer
        self.changed()
        return policy.fetch_row(plane, layer, [column])
