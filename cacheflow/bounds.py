"""Times that no schedule can beat: a lower bound for planes of any size, and the exact optimum of tiny ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cacheflow.costs.base import Costs
from cacheflow.exact import exact
from cacheflow.op import COMPUTE, COPY, FETCH
from cacheflow.plane import Plane
from cacheflow.request import Request

__all__ = ["exact", "lower"]

Seconds = NDArray[np.float64]


def lower(requests: Sequence[Request], costs: Costs) -> float:
    """Seconds before which not all requests can have their first token; of one request, a lower bound of its TTFT.

    All requests are there at time 0. Of `costs` only what every op costs at least is used: marginals, fixed terms,
    latency, and the language-model head for one token. Proof, for any schedule that the plane permits:

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
    3. If nothing is loaded, all items are computed. Otherwise the time is at least max(all compute, load and what
       follows it), whose minimum over sets of items is at least that over fractions of items: a fractional knapsack,
       solved by taking items in ascending order of compute seconds per load second saved until the two sides meet.
    """
    work = _Work()
    for request in requests:
        work.add(request, costs)
    overhead = costs.fixed(COMPUTE) + len(costs.shape.windows) * costs.layer_fixed + costs.head_seconds(1)
    always = overhead + work.always
    items, loads = np.concatenate([[], *work.items]), np.concatenate([[], *work.loads])
    if not len(items):
        return always
    copy = costs.fixed(COPY) + work.narrowest * costs.shape.cell_bytes / costs.copy_bandwidth
    tail = costs.fixed(COMPUTE) + costs.layer_fixed + work.last_advance + costs.head_seconds(1)
    outside = costs.latency + costs.fixed(FETCH) + copy + tail
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(items / loads)  # where the link is infinitely fast, any order
    compute = always + np.concatenate([[0.0], np.cumsum(items[order])])
    load = outside + np.concatenate([[0.0], np.cumsum(loads[order[::-1]])])[::-1]
    return min(float(compute[-1]), _meeting(compute, load))


def _meeting(rising: Seconds, falling: Seconds) -> float:
    """The least max(rising, falling) of two piecewise linear functions over the same points."""
    met = int(np.argmax(rising >= falling)) if rising[-1] >= falling[-1] else len(rising)
    if met in (0, len(rising)):
        return float(rising[0] if met == 0 else falling[-1])
    before, after = falling[met - 1] - rising[met - 1], rising[met] - falling[met]
    share = before / (before + after)
    return float(rising[met - 1] + share * (rising[met] - rising[met - 1]))


@dataclass
class _Work:
    """Undisturbed seconds of what must be computed, and of every cell that may be computed or loaded."""

    always: float = 0.0
    items: list[Seconds] = field(default_factory=list)
    loads: list[Seconds] = field(default_factory=list)
    last_advance: float = float("inf")
    narrowest: int = 0  # tokens

    def add(self, request: Request, costs: Costs) -> None:
        layers, prefix = request.layers, len(request.stored)
        bounds = np.asarray(request.boundaries)
        starts, stops = bounds[:-1], bounds[1:]
        by_window = {w: costs.cell_marginals(starts, stops, request.windows.index(w)) for w in set(request.windows)}
        project = np.stack([by_window[w][0] for w in request.windows], axis=1)  # [columns, layers], as all below
        advance = np.stack([by_window[w][1] for w in request.windows], axis=1)
        below = np.cumsum(advance, axis=1) - advance
        _, last_advance = costs.cell_marginals(request.tokens - 1, request.tokens, layers - 1)
        self.last_advance = min(self.last_advance, last_advance)
        self.always += float(project[prefix:].sum() + below[prefix:, -1].sum()) + last_advance

        need = np.array([np.frombuffer(row, dtype=bool) for row in Plane(request).need])
        column, layer = np.nonzero(need[:, :prefix].T)
        first = np.diff(column, prepend=-1) != 0
        climbed = below[column, layer]
        item = project[column, layer] + climbed - np.where(first, 0.0, np.roll(climbed, 1))
        stored = np.asarray(request.stored, dtype=bool)[column]
        widths = (stops - starts)[column[stored]]
        self.always += float(item[~stored].sum())
        self.items.append(item[stored])
        self.loads.append(widths * costs.load_seconds(1))
        if len(widths):
            self.narrowest = min(self.narrowest or request.tokens, int(widths.min()))
