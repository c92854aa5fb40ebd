"""pipelined: layer by layer up a staircase, the suffix in the same launches. Ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cacheflow.op import COMPUTE, FETCH, Op
from cacheflow.plane import EMPTY, Plane
from cacheflow.policies.base import LINK, Policy
from cacheflow.policies.stairs import Planner, Stairs, plan_batch

OVERTAKEN = 16  # requests that came later and may end before one; after that it goes first
MEMORY = 0.7  # share of what is known of the link's speed that one more fetch leaves in place; a guess


class Pipelined(Policy):
    """Compute takes the layers in order: at each, the layer's share of columns and the suffix in one launch, as soon as
    the layer's other cells have landed. The link runs ahead in the order in which that needs them. Splits are chosen so
    that both sides end together, and moved when they turn out not to.

    Requests are finished one after another, the shortest first, and none is overtaken by more than OVERTAKEN that came
    after it; what one leaves of a resource goes to the next. Splits of a batch are chosen together.
    """

    name = "pipelined"
    rank = 7

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slowdown = 1.0  # of the link against its estimates
        self._climbs: dict[str, _Climb] = {}
        self._wave = 0  # requests that are added with nothing asked between them come at the same time

    def add(self, plane: Plane) -> None:
        super().add(plane)
        self._climbs[plane.request.id] = _Climb(self, plane, self._wave)

    def remove(self, request: str) -> None:
        super().remove(request)
        gone = self._climbs.pop(request)
        for climb in self._climbs.values():
            climb.overtaken += gone.plane.done and climb.wave < gone.wave

    def finished(self, op: Op, seconds: float) -> None:
        super().finished(op, seconds)
        estimate = self.costs.seconds(op) if op.kind == FETCH else 0.0
        if estimate > 0:
            self.slowdown = MEMORY * self.slowdown + (1 - MEMORY) * seconds / estimate

    def next_compute(self, now: float) -> Op | None:
        order = self._order(now)
        op = next(filter(None, (climb.next_compute(now) for climb in order)), None)
        if op is None and not self._queued["compute"]:
            op = next(filter(None, (climb.take_over(now) for climb in order)), None)
        return op

    def next_fetch(self, now: float) -> Op | None:
        order = self._order(now)
        planned = next(filter(None, (climb.next_fetch(now) for climb in order)), None)
        return planned or next(filter(None, (climb.relieve(now) for climb in order)), None)

    def _order(self, now: float) -> list[_Climb]:
        """Who is served before whom; those that are new have a plan from here on."""
        climbs = [self._climbs[plane.request.id] for plane in self.active()]
        climbs.sort(key=lambda climb: (0, climb.wave) if climb.overtaken >= OVERTAKEN else (1, climb.alone))
        self._wave += 1
        if not all(climb.tops is not None for climb in climbs):
            self._plan(climbs, now)
        return climbs

    def _plan(self, order: list[_Climb], now: float) -> None:
        """Splits for requests that nothing was begun for, which may have been planned before others came."""
        climbs = [climb for climb in order if not climb.begun]
        for climb in climbs:
            climb.promised = 0
        open_to_stairs = [climb for climb in climbs if not climb.windowed]
        compute, link = zip(*(climb.left() for climb in order), strict=True)
        ahead = self.free_at("compute", now) - now + sum(compute), self.free_at(LINK, now) - now + sum(link)
        most = [self._hidden_columns(climb) for climb in open_to_stairs]
        if len(open_to_stairs) == 1:
            chosen = [open_to_stairs[0].planner.best(most[0], *ahead)]
        else:
            chosen = plan_batch([climb.planner for climb in open_to_stairs], most, *ahead) if open_to_stairs else []
        for climb in climbs:
            climb.follow(chosen.pop(0) if not climb.windowed else None)

    def link_seconds(self, tokens: int, layers: int = 1) -> float:
        """What moving so much takes, by what the link was seen to do."""
        return self.slowdown * self.costs.load_seconds(tokens * layers)

    @property
    def compute_queued(self) -> bool:
        """Whether anything is queued on compute."""
        return bool(self._queued["compute"])

    def _hidden_columns(self, climb: _Climb) -> int:
        """How many leading columns of a request may wait between layers, beside what others were promised."""
        bounds, count = climb.plane.request.boundaries, climb.plane.prefix_columns
        if self.hidden_tokens is None:
            return count
        left = self.hidden_tokens - sum(other.promised for other in self._climbs.values())
        columns = next((c for c in range(count) if bounds[c + 1] > left), count)
        climb.promised = bounds[columns]
        return columns


class _Climb:
    """One request on its way up.

    tops: for every prefix column at how many layers, from the first up, compute is to fill it; None: not planned yet.
    windowed: columns behind a window attend to cells that nobody else needs; then all but the first row is loaded.
    alone: seconds to its first token, were it the only request. promised: tokens whose hidden states it may keep.
    wave: when it came. overtaken: by how many that came later.
    """

    def __init__(self, policy: Pipelined, plane: Plane, wave: int) -> None:
        self.policy = policy
        self.plane = plane
        self.planner = Planner(plane, policy.costs, policy.token_budget, policy.staging_cells)
        self.stairs: Stairs | None = None
        self.tops: list[int] | None = None
        self.windowed = any(plane.request.windows)
        self.alone = self.planner.best(plane.prefix_columns).seconds
        self.promised = 0
        self.wave = wave
        self.overtaken = 0
        self._next_row = 0  # no layer below has anything to load

    @property
    def begun(self) -> bool:
        """Whether anything was filled, or is in flight."""
        plane = self.plane
        return plane.in_flight > 0 or any(plane.height) or plane.unclaimed != plane.missing

    def left(self) -> tuple[float, float]:
        """About how many seconds of compute and of the link its plan still takes; 0 before anything was begun."""
        if self.stairs is None or not self.begun:
            return 0.0, 0.0
        plane = self.plane
        climbed, loaded = min(plane.height[plane.prefix_columns :]) / plane.layers, self._next_row / plane.layers
        return self.stairs.compute * (1 - climbed), self.stairs.link * (1 - loaded)

    def follow(self, stairs: Stairs | None) -> None:
        """Take up a plan; None: load everything but the first row."""
        self.stairs = stairs
        count = self.plane.prefix_columns
        self.tops = [1] * count if stairs is None else stairs.tops(count, self.plane.layers)
        self.promised = sum(self.plane.request.width(c) for c, top in enumerate(self.tops) if top > 1)

    # Planned

    def next_compute(self, now: float) -> Op | None:
        """The lowest launch that can go. The suffix waits for its layer's loads as long as something else runs."""
        plane = self.plane
        pending = [c for c in range(plane.columns) if self._pending(c)]
        suffix = [c for c in pending if c >= plane.prefix_columns]
        bottom = min((plane.height[c] for c in suffix), default=plane.layers)
        for layer in sorted({plane.height[c] for c in pending}):
            columns = [c for c in pending if plane.height[c] == layer]
            # Below the suffix there are failed loads, and columns that compute took over.
            op = self._first_climb(columns) if layer < bottom else self._launch(layer, columns)
            if op is not None or (layer == bottom and self.policy.compute_queued):
                return op
        return None

    def next_fetch(self, now: float) -> Op | None:
        plane, tops = self.plane, self.tops
        assert tops is not None
        for layer in range(self._next_row, plane.layers):
            row = (c for c in range(plane.prefix_columns) if tops[c] <= layer)
            op = self.policy.fetch_row(plane, layer, row)
            if op is not None:
                return op
            # Behind windows a cell may be needed later, when a load has failed.
            if not self.windowed and EMPTY not in plane.state[layer][: plane.prefix_columns]:
                self._next_row = max(self._next_row, layer)
        return None

    # Where estimates were wrong

    def relieve(self, now: float) -> Op | None:
        """A load of a cell that compute was to fill, where the link has time for it before compute gets there."""
        plane, policy, tops = self.plane, self.policy, self.tops
        assert tops is not None
        column = max((c for c in range(len(tops)) if plane.available[c]), key=lambda c: (tops[c], c), default=-1)
        layer = tops[column] - 1 if column >= 0 else 0
        if layer < 1 or not plane.loadable(column, layer):
            return None
        bottom = min(plane.height[plane.prefix_columns :])
        reached = policy.free_at("compute", now) + (layer - bottom - 1) * self.alone / plane.layers
        landed = policy.free_at(LINK, now) + policy.link_seconds(plane.request.width(column))
        if landed + policy.costs.fixed(FETCH) >= reached:
            return None
        tops[column] = layer
        return policy.fetch_row(plane, layer, [column])

    def take_over(self, now: float) -> Op | None:
        """A climb of a column that was to be loaded, where compute has nothing else to do and the link is behind."""
        plane, policy = self.plane, self.policy
        left = sum(
            plane.request.width(c) * plane.unclaimed[c] for c in range(plane.prefix_columns) if plane.available[c]
        )
        column = next((c for c in range(plane.prefix_columns) if plane.available[c] and plane.unclaimed[c]), None)
        if column is None or self.windowed:
            return None
        op = plane.climb(column, policy.token_budget, last=column + 1)
        if op is None or policy.hidden_left() < op.tokens:
            return None
        band = range(plane.height[column], plane.layers)
        climb = policy.costs.seconds(Op(COMPUTE, band, (plane.part(column, column + 1, advance=False),)))
        spared = policy.link_seconds(plane.request.width(column), plane.unclaimed[column])
        if climb >= policy.free_at(LINK, now) - now + policy.link_seconds(left) - spared:
            return None
        assert self.tops is not None
        self.tops[column] = plane.layers
        return op

    # Launches

    def _pending(self, column: int) -> bool:
        """Whether compute has something to do for the column."""
        plane = self.plane
        if column == plane.columns - 1:
            return plane.height[column] < plane.layers
        if column >= plane.prefix_columns or not plane.available[column]:
            return plane.missing[column] > 0
        assert self.tops is not None
        height, top = plane.height[column], self.tops[column]
        if height >= top or not plane.unclaimed[column]:
            return False
        if plane.state[height][column] == EMPTY and plane.needed(column, height):
            return True
        above = range(height + 1, top)
        return any(plane.state[layer][column] == EMPTY and plane.needed(column, layer) for layer in above)

    def _goes_on(self, column: int, layer: int) -> bool:
        plane = self.plane
        if column >= plane.prefix_columns:
            return layer < plane.layers - 1 or column == plane.columns - 1
        if plane.available[column]:
            assert self.tops is not None
            return self.tops[column] > layer + 1
        return any(
            plane.state[above][column] == EMPTY and plane.needed(column, above)
            for above in range(layer + 1, plane.layers)
        )

    def _launch(self, layer: int, columns: list[int]) -> Op | None:
        """What of these columns can go up this layer now; where that is more than the token budget, the leftmost of as
        many equal launches as it takes."""
        plane, bounds = self.plane, self.plane.request.boundaries
        state, filled = plane.state[layer], plane.filled_row(layer)  # filled: and what this launch projects
        ready: list[tuple[int, bool, bool]] = []
        for column in columns:
            on, project = self._goes_on(column, layer), state[column] == EMPTY
            first = plane.request.first_attended(column, layer)
            if (project or filled[column]) and filled.find(0, first, column) < 0 if on else project:
                ready.append((column, project, on))
                filled[column] = 1
        if not ready:
            return None
        waits = columns[-1] >= plane.prefix_columns and ready[-1][0] < plane.prefix_columns
        if waits and self.policy.compute_queued:
            # For the suffix a launch of its own, later, would be dearer than waiting while something runs.
            return None
        total = sum(bounds[column + 1] - bounds[column] for column, _, _ in ready)
        share = total / -(-total // self.policy.token_budget)
        runs: list[list[int]] = []  # first, last, project, on; neighbours that are treated alike joined
        tokens = 0
        for column, project, on in ready:
            width = bounds[column + 1] - bounds[column]
            if runs and (tokens + width > self.policy.token_budget or tokens >= share):
                break
            tokens += width
            if runs and runs[-1][1:] == [column, project, on]:
                runs[-1][1] = column + 1
            else:
                runs.append([column, column + 1, project, on])
        parts = (plane.part(a, b, project=bool(project), advance=bool(on)) for a, b, project, on in runs)
        return Op(COMPUTE, range(layer, layer + 1), tuple(parts))

    def _first_climb(self, columns: Iterable[int]) -> Op | None:
        plane, budget = self.plane, self.policy.token_budget
        return next(filter(None, (plane.climb(c, budget) for c in columns)), None)
