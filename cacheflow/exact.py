"""The true optimum of tiny planes, by search: what bounds and policies are checked against."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, count
from typing import Literal, NamedTuple, TypeAlias

from cacheflow.costs.base import Costs
from cacheflow.op import COMPUTE, COPY, FETCH
from cacheflow.plane import Plane
from cacheflow.request import Request

Objective = Literal["worst", "mean", "restoration"]


def exact(requests: Sequence[Request], costs: Costs, objective: Objective = "worst") -> float:
    """The least seconds, over all schedules that the planes permit, until the objective is reached.

    objective: "worst": until the last request has its first token (of one request: its TTFT); "mean": the mean of the
        requests' TTFTs; "restoration": until all needed prefix cells are filled.
    costs: purely marginal: an op must take the sum of its cells' marginals, fixed terms and latency must be 0.

    One request of 12 chunks by 8 layers or two of 5 by 5 take about a second, and for the mean two of 4 by 4, three of
    3 by 2 or four of 2 by 2. Raises ValueError for other costs.

    With such costs ops of one cell lose nothing: any larger op can be cut into its projections and advances, layer by
    layer, and each of them ends no later than the op did. So schedules are sequences of *moves*: project a cell, or
    advance a column over one. The link never waits, and brings cells in the order in which moves first need them, which
    ends every move as early as any order does; a move that needs cells not yet filled decides that they are loaded.

    Three facts keep the search small. The state is what is filled and how high columns are; of ways to the same state
    only those count that are not later on both clocks. A move that waits for no new load may be made as early as
    possible, since that only hides more of later waiting: it is made at once or, if it need not be made at all, never.
    And states are taken in the order of a lower bound (A*). For the mean an earlier move may delay another request's
    end, so the order of ends is searched too: moves of the request that is to end next follow the rule above, moves of
    others only fill its waiting for loads; any that do not are as good after it has ended.
    """
    fixed = (costs.fixed(COMPUTE), costs.layer_fixed, costs.fixed(FETCH), costs.fixed(COPY), costs.latency)
    if any(fixed) or costs.copy_bandwidth != float("inf") or costs.interference(1):
        raise ValueError(
            f"exact search needs costs without fixed terms, latency, copies and interference, not {fixed} seconds"
        )
    if objective == "restoration" and not any(request.stored for request in requests):
        return 0.0
    return _Search(requests, costs, objective).solve()


@dataclass(frozen=True)
class _Column:
    """project, advance, load: seconds, by layer and per cell. attends: by layer, columns, counted from this one.

    need: a bit per layer. request: its index. last: whether it holds the last token.
    """

    project: tuple[float, ...]
    advance: tuple[float, ...]
    attends: tuple[range, ...]
    load: float
    need: int
    source: Literal["stored", "hole", "suffix"]
    request: int
    last: bool

    def must(self, filled: int) -> bool:
        """Whether its next move has to be made some time."""
        return self.source != "stored" and (self.last or self.need & ~filled > 0)


class _Progress(NamedTuple):
    """A column's height, the bits of its filled layers, and whether its next move was turned down."""

    height: int = 0
    filled: int = 0
    refused: bool = False


State: TypeAlias = tuple[_Progress, ...]


class _Rest(NamedTuple):
    """Seconds that still go into a column alone.

    compute: in any case. load: if nothing more is computed by choice. items: what every cell that may be computed by
    choice costs, and saves of load. after: what follows all loads of the column's request.
    """

    compute: float
    load: float
    items: tuple[tuple[float, float], ...]
    after: float = 0.0


class _Node(NamedTuple):
    """compute, link: seconds until all moves have ended and all loads have landed. ended: sum of TTFTs so far.

    next_end: for the mean, the request that is to end next. filler: the compute clock before the last move of another
        request; what `next_end` waits for must land later, or the move had better follow.
    """

    state: State
    compute: float = 0.0
    link: float = 0.0
    ended: float = 0.0
    final: bool = False
    next_end: int | None = None
    filler: float = 0.0

    def with_(self, changed: dict[int, _Progress], compute: float | None = None, link: float | None = None) -> _Node:
        state = tuple(changed.get(i, progress) for i, progress in enumerate(self.state))
        compute = self.compute if compute is None else compute
        return self._replace(state=state, compute=compute, link=self.link if link is None else link)


class _Search:
    def __init__(self, requests: Sequence[Request], costs: Costs, objective: Objective) -> None:
        self.objective = objective
        self.layers = requests[0].layers
        self.columns = [c for index, request in enumerate(requests) for c in self._columns(index, request, costs)]
        self.of = [[i for i, c in enumerate(self.columns) if c.request == r] for r in range(len(requests))]
        self.rest = cache(self._rest)

    def _columns(self, index: int, request: Request, costs: Costs) -> Iterator[_Column]:
        plane, b, layers = Plane(request), request.boundaries, range(self.layers)
        for c in range(plane.prefix_columns if self.objective == "restoration" else plane.columns):
            marginals = [costs.cell_marginals(b[c], b[c + 1], layer) for layer in layers]
            advance = [seconds for _, seconds in marginals]
            if c == plane.columns - 1:
                advance[-1] = costs.cell_marginals(b[-1] - 1, b[-1], self.layers - 1)[1] + costs.head_seconds(1)
            yield _Column(
                project=tuple(seconds for seconds, _ in marginals),
                advance=tuple(advance),
                attends=tuple(range(request.first_attended(c, layer) - c, 1) for layer in layers),
                load=costs.load_seconds(request.width(c)),
                need=sum(plane.needed(c, layer) << layer for layer in layers),
                source="stored" if plane.available[c] else "hole" if c < plane.prefix_columns else "suffix",
                request=index,
                last=c == plane.columns - 1,
            )

    def solve(self) -> float:
        newest = count(0, -1)  # of equal bounds the newest, which is the furthest, comes first
        heap: list[tuple[float, int, _Node]] = []
        best: dict[tuple[State, int | None], list[_Node]] = {}
        children: Iterable[_Node] = self._choose(_Node((_Progress(),) * len(self.columns)))
        bound = 0.0
        while True:
            for child in children:
                others = best.setdefault((child.state, child.next_end), [])
                if child.final or not any(_dominates(other, child) for other in others):
                    others[:] = [other for other in others if not _dominates(child, other)]
                    others.append(child)
                    rounded = float(f"{self._bound(child):.10g}")  # equal but for the order of sums
                    heapq.heappush(heap, (max(bound, rounded), next(newest), child))
            bound, _, node = heapq.heappop(heap)
            if node.final:
                return self._bound(node)
            # Nothing to do where a better way to the same state was found.
            children = self._children(node) if node in best[node.state, node.next_end] else ()

    def _choose(self, node: _Node) -> Iterator[_Node]:
        """For the mean, which request is to end next."""
        if self.objective != "mean":
            yield node
            return
        state = tuple(progress._replace(refused=False) for progress in node.state)
        for request in self._going(state):
            yield node._replace(state=state, next_end=request, filler=0.0)

    def _children(self, node: _Node) -> Iterator[_Node]:
        if self.objective == "restoration" and self._complete(node.state, "hole"):
            left = sum(self.rest(i, at).load for i, at in enumerate(node.state))
            yield node._replace(compute=max(node.compute, node.link + left), final=True)
        waiting = []
        going = self._going(node.state)
        for i, (column, at) in enumerate(zip(self.columns, node.state, strict=True)):
            if column.request not in going or node.next_end not in (None, column.request):
                continue
            if self._unfilled(at) and not at.refused:
                yield self._project(node, i)
            else:
                loads = self._loads(node.state, i)
                if loads:
                    waiting.append((i, loads))
                if loads != [] or at.refused:
                    continue
                yield from self._advance(node, i, [])
            if not column.must(at.filled):
                yield node.with_({i: at._replace(refused=True)})
            return  # one decision at a time, and waiting for loads comes last
        for i, loads in waiting:
            yield from (child for child in self._advance(node, i, loads) if child.link > node.filler)
        if node.next_end is not None:
            yield from self._fill(node, going)

    def _fill(self, node: _Node, going: list[int]) -> Iterator[_Node]:
        """Moves of other requests, short of their last, while the one that is to end next waits for loads."""
        for i, (column, at) in enumerate(zip(self.columns, node.state, strict=True)):
            if column.request == node.next_end or column.request not in going:
                continue
            if self._unfilled(at):
                yield self._project(node, i)._replace(filler=node.compute)
            loads = self._loads(node.state, i)
            if loads is not None and at.height < self.layers - 1:
                filler = 0.0 if loads else node.compute
                yield from (child._replace(filler=filler) for child in self._advance(node, i, loads))

    def _unfilled(self, at: _Progress) -> bool:
        return at.height < self.layers and not at.filled >> at.height & 1

    def _going(self, state: State) -> list[int]:
        return [r for r in range(len(self.of)) if not self._ended(state, r)]

    def _loads(self, state: State, i: int) -> list[int] | None:
        """Columns whose cells would be loaded for column i to advance; None where it cannot or has no reason to."""
        height, filled, _ = state[i]
        column = self.columns[i]
        if height == self.layers - 1 and column.last:
            if not self._complete(state, "suffix", self.of[column.request]):
                return None
        elif filled >> (height + 1) == (1 << self.layers) - 1 >> (height + 1):
            return None  # nothing to project above
        loads = [i + j for j in column.attends[height] if not state[i + j].filled >> height & 1]
        possible = all(self.columns[j].source == "stored" and self.columns[j].need >> height & 1 for j in loads)
        return loads if possible else None

    def _complete(self, state: State, source: str, among: Iterable[int] | None = None) -> bool:
        among = range(len(self.columns)) if among is None else among
        return not any(self.columns[i].source == source and self.columns[i].need & ~state[i].filled for i in among)

    def _ended(self, state: State, request: int) -> bool:
        last = self.of[request][-1] if self.of[request] else None
        return last is not None and self.columns[last].last and state[last].height == self.layers

    def _project(self, node: _Node, i: int) -> _Node:
        height, filled, _ = node.state[i]
        changed = {i: _Progress(height, filled | 1 << height)}
        return node.with_(changed, compute=node.compute + self.columns[i].project[height])

    def _advance(self, node: _Node, i: int, loads: list[int]) -> Iterator[_Node]:
        height = node.state[i].height
        changed: dict[int, _Progress] = {}
        for j in loads:
            at, filled, refused = node.state[j]
            changed[j] = _Progress(at, filled | 1 << height, refused and at != height)  # at its height: a new next move
        changed[i] = _Progress(height + 1, changed.get(i, node.state[i]).filled)
        link = node.link + sum(self.columns[j].load for j in loads)
        compute = max(node.compute, link) + self.columns[i].advance[height]
        moved = node.with_(changed, compute=compute, link=link)
        if height + 1 < self.layers:
            yield moved
            return
        moved = moved._replace(ended=node.ended + compute, final=not self._going(moved.state))
        yield from [moved] if moved.final else self._choose(moved)

    def _bound(self, node: _Node) -> float:
        """A lower bound of the objective; of a final node the objective itself."""
        if node.final:
            return node.ended / len(self.of) if self.objective == "mean" else node.compute
        if node.next_end is None:
            return self._latest(range(len(self.columns)), node)
        others = [r for r in self._going(node.state) if r != node.next_end]
        ended = node.ended
        for k in range(len(others) + 1):  # it ends first; when k others have ended too, some k have their work done
            sets = ([node.next_end, *some] for some in combinations(others, k))
            ended += min(self._latest([i for r in requests for i in self.of[r]], node) for requests in sets)
        return ended / len(self.of)

    def _latest(self, columns: Iterable[int], node: _Node) -> float:
        """A lower bound of the time at which the last of the columns' requests ends.

        The larger of two relaxations: any fraction of any item may be computed, and so many whole items are computed,
        the cheapest, while as many of the narrowest are loaded as are left.
        """
        rests = [self.rest(i, node.state[i]) for i in columns]
        compute = node.compute + sum(rest.compute for rest in rests)
        after = [rest.after for rest in rests if rest.after]  # at least one of them runs when all loads have landed
        load = node.link + sum(rest.load for rest in rests) + min(after, default=0.0)
        items = [item for rest in rests for item in rest.items]
        by_ratio = sorted(items, key=lambda item: item[0] / item[1])
        cheapest, widest = sorted(item[0] for item in items), sorted((item[1] for item in items), reverse=True)
        whole = zip(cheapest, widest, strict=True)
        return max(_meet(compute, load, by_ratio, fractions=True), _meet(compute, load, whole, fractions=False))

    def _rest(self, i: int, progress: _Progress) -> _Rest:
        column, (height, filled, refused) = self.columns[i], progress
        missing = [layer for layer in range(self.layers) if column.need & ~filled & 1 << layer]
        by_choice = missing
        if refused and column.source == "stored":
            by_choice = [layer for layer in missing if layer != height] if not filled >> height & 1 else []
        seconds, at = [], height
        for layer in by_choice:
            seconds.append(column.project[layer] + sum(column.advance[at:layer]))
            at = max(at, layer)
        if column.source == "stored":
            return _Rest(0.0, column.load * len(missing), tuple((g, column.load) for g in seconds))
        if not column.last:
            return _Rest(sum(seconds), 0.0, ())
        return _Rest(sum(seconds) + sum(column.advance[at:]), 0.0, (), column.advance[-1] if at < self.layers else 0.0)


def _meet(compute: float, load: float, items: Iterable[tuple[float, float]], *, fractions: bool) -> float:
    """The least max(compute, load) when items (compute seconds, load seconds), in order, go from load to compute."""
    for more, less in items:
        if compute + more >= load - less:
            if fractions and compute < load:
                return compute + more * (load - compute) / (more + less)
            return max(compute, min(load, compute + more))
        compute, load = compute + more, load - less
    return max(compute, load)


def _dominates(node: _Node, other: _Node) -> bool:
    no_later = node.compute <= other.compute and node.link <= other.link and node.ended <= other.ended
    return no_later and node.filler <= other.filler
