"""Times that no schedule can beat: a lower bound for planes of any size, and the exact optimum of tiny ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cacheflow.costs.base import Costs
from cacheflow.exact import exact
from cacheflow.op import COMPUTE, COPY, FETCH
from cacheflow.plane import Plane
from cacheflow.request import Request

__all__ = ["exact", "lower", "lower_mean"]

WEIGHTS, FINER = 256, 33  # of compute against load that are tried, and again around the best of them

Seconds = NDArray[np.float64]


def lower(requests: Sequence[Request], costs: Costs) -> float:
    """Seconds before which not all requests can have their first token; of one request, a lower bound of its TTFT.

    All requests are there at time 0. Of `costs` only what every op costs at least is used: marginals, fixed terms,
    latency, interference per byte, and the language-model head for one token. Proof, for any schedule that the plane
    permits:

    1. *Compute.* The suffix is projected at every layer and advanced through all but the last, where its last token
       is. A hole is projected at its needed layers and advanced through all layers below the highest of them. Of a
       stored column with needed layers n_1 < n_2 < ... let k cells be computed. The highest of them is at n_k or above,
       so the column costs at least k projections and the advances below n_k (none through the top cell's own layer: it
       is KV-only). That is g_1 + ... + g_k, g_i being a projection and the advances from n_(i-1) to n_i, and not less
       than the k cheapest of all its g. So whatever cells are computed cost at least as much as some set of as many
       *items* (column, g).
    2. *Load.* Every other needed cell crosses the link. If there is one, the last of them lands no sooner than the
       latency, a fetch's fixed cost and all their bytes over the bandwidth. As it is needed, the suffix attends to it,
       or a column that must be computed for the suffix's sake does. Compute is not queued before all that it attends
       to has landed, and the last token ends after every other suffix cell is filled. So what follows, after at least
       the smallest possible copy, is an op that contains the last token's last layer and the head.
       Before that op begins, every cell that crosses the link has held up compute by its share of `interference`. So a
       cell takes of compute the less of that and of its g in either case, and what is left of its g if computed.
    3. If nothing is loaded, all items are computed. Otherwise the time is at least max(all compute, load and what
       follows it), whose minimum over sets of items is at least that over fractions of items: a fractional knapsack,
       solved by taking items in ascending order of compute seconds per load second saved until the two sides meet.
    """
    works = [_Work.of(request, costs) for request in requests]
    overhead, outside = _beside(works, costs)
    always = overhead + sum(work.always for work in works)
    items, loads = (np.concatenate(of) for of in zip(*((work.items, work.loads) for work in works), strict=True))
    if not len(items):
        return always
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(items / loads)  # where the link is infinitely fast, any order
    compute = always + np.concatenate([[0.0], np.cumsum(items[order])])
    load = outside + np.concatenate([[0.0], np.cumsum(loads[order[::-1]])])[::-1]
    return min(float(compute[-1]), _meeting(compute, load))


def lower_mean(requests: Sequence[Request], costs: Costs) -> float:
    """Seconds below which the mean of the requests' TTFTs cannot be; of one request, what `lower` gives.

    All requests are there at time 0. Proof, for any schedule: let T_1 <= T_2 <= ... be its first tokens' times in the
    order in which they come. By T_k some k requests have behind them what steps 1 and 2 of `lower` say of them.

    1. *Alone.* Of any k requests one takes at least the k-th smallest `lower` of a single request, so T_k does. The
       last of all is no sooner than `lower` of all.
    2. *One machine.* If the k load nothing, T_k is at least k whole recomputes, the cheapest. Otherwise it is at least
       max(compute, load) >= a * compute + (1 - a) * load for every weight a in [0, 1]: a single machine, on which a
       request takes a times what it computes in any case, and for every item the less of a times its compute and
       (1 - a) times its load. The k requests take at least the k smallest such times together (shortest first is best
       on one machine), and what `lower` counts once per batch comes on top. Every k may take the weight that gives
       most: a Lagrangian relaxation, as good as the linear program that takes fractions of requests, k together.
    """
    works = [_Work.of(request, costs) for request in requests]
    overhead, outside = _beside(works, costs)
    recompute = overhead + np.cumsum(np.sort([work.always + work.items.sum() for work in works]))

    def one_machine(weights: Seconds) -> Seconds:  # [requests, weights], concave in the weights
        work = np.cumsum(np.sort([work.weighted(weights) for work in works], axis=0), axis=0)
        return work + weights * overhead + (1 - weights) * outside

    even = np.sort(np.concatenate([[0.0, 1.0], *(work.even for work in works)]))
    weights = np.unique(even[np.linspace(0, len(even) - 1, min(len(even), WEIGHTS)).round().astype(int)])
    best = one_machine(weights).argmax(axis=1)
    between = weights[np.maximum(best - 1, 0)], weights[np.minimum(best + 1, len(weights) - 1)]
    weights = np.unique(np.linspace(*between, FINER))
    alone = np.sort([lower([request], costs) for request in requests])
    ends = np.maximum(alone, np.minimum(recompute, one_machine(weights).max(axis=1)))
    ends[-1] = max(ends[-1], lower(requests, costs))
    return float(ends.mean())


def _meeting(rising: Seconds, falling: Seconds) -> float:
    """The least max(rising, falling) of two piecewise linear functions over the same points."""
    met = int(np.argmax(rising >= falling)) if rising[-1] >= falling[-1] else len(rising)
    if met in (0, len(rising)):
        return float(rising[0] if met == 0 else falling[-1])
    before, after = falling[met - 1] - rising[met - 1], rising[met] - falling[met]
    share = before / (before + after)
    return float(rising[met - 1] + share * (rising[met] - rising[met - 1]))


@dataclass(frozen=True)
class _Work:
    """One request, in undisturbed seconds, with what `lower` calls its items.

    always: of compute, in any case. items, loads: [cells that may be computed or loaded]; of either choice, on top.
    last_advance: of its last token, through the last layer. narrowest: tokens of the narrowest cell that may be loaded.
    """

    always: float
    items: Seconds
    loads: Seconds
    last_advance: float
    narrowest: int

    @classmethod
    def of(cls, request: Request, costs: Costs) -> _Work:
        layers, prefix = request.layers, len(request.stored)
        bounds = np.asarray(request.boundaries)
        starts, stops = bounds[:-1], bounds[1:]
        by_window = {w: costs.cell_marginals(starts, stops, request.windows.index(w)) for w in set(request.windows)}
        project = np.stack([by_window[w][0] for w in request.windows], axis=1)  # [columns, layers], as all below
        advance = np.stack([by_window[w][1] for w in request.windows], axis=1)
        below = np.cumsum(advance, axis=1) - advance
        _, last_advance = costs.cell_marginals(request.tokens - 1, request.tokens, layers - 1)
        suffix = float(project[prefix:].sum() + below[prefix:, -1].sum()) + last_advance

        need = np.array([np.frombuffer(row, dtype=bool) for row in Plane(request).need])
        column, layer = np.nonzero(need[:, :prefix].T)
        first = np.diff(column, prepend=-1) != 0
        climbed = below[column, layer]
        item = project[column, layer] + climbed - np.where(first, 0.0, np.roll(climbed, 1))
        stored = np.asarray(request.stored, dtype=bool)[column]
        widths = (stops - starts)[column[stored]]
        held_up = np.minimum(item[stored], widths * costs.interference(1, fetches=0))
        return cls(
            always=suffix + float(item[~stored].sum()) + float(held_up.sum()),
            items=item[stored] - held_up,
            loads=widths * costs.load_seconds(1),
            last_advance=last_advance,
            narrowest=int(widths.min(initial=request.tokens)),
        )

    @cached_property
    def even(self) -> Seconds:
        """[cells]; the weights of compute at which either choice weighs the same."""
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(self.loads / (self.items + self.loads))  # where both take no time, any weight

    def weighted(self, weights: Seconds) -> Seconds:
        """[weights]; the least of weight * compute + (1 - weight) * load."""
        order = np.argsort(self.even)
        loaded = np.concatenate([[0.0], np.cumsum(self.loads[order])])
        computed = self.always + np.concatenate([np.cumsum(self.items[order[::-1]])[::-1], [0.0]])
        at = np.searchsorted(self.even[order], weights)  # items that are loaded
        return weights * computed[at] + (1 - weights) * loaded[at]


def _beside(works: Sequence[_Work], costs: Costs) -> tuple[float, float]:
    """Seconds that a batch computes, and that it takes if anything is loaded, besides its requests' own."""
    head = costs.head_seconds(1)
    overhead = costs.fixed(COMPUTE) + len(costs.shape.windows) * costs.layer_fixed + head
    narrowest = min((work.narrowest for work in works if len(work.items)), default=0)
    copy = costs.fixed(COPY) + narrowest * costs.shape.cell_bytes / costs.copy_bandwidth
    tail = costs.fixed(COMPUTE) + costs.layer_fixed + min(work.last_advance for work in works) + head
    return overhead, costs.latency + costs.fixed(FETCH) + copy + tail
