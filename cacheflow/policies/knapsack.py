"""The dynamic programs behind `staircase`: splits of every request's blocks of layers, by bytes saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cacheflow.costs.base import Costs
from cacheflow.op import COMPUTE, Op, Part
from cacheflow.plane import Plane

if TYPE_CHECKING:
    from cacheflow.policies.staircase import Stairs

BLOCKS = 8  # of layers: the first layer alone, since a projection there needs no advance, and equal groups above
LEVELS = 33  # splits that a block may have, 0 and all among them
SAMPLES = 12  # passes and widths that are asked of the costs; between them interpolation
BINS = 1024  # of bytes saved by a batch
EDGE_BINS = 512  # of bytes saved by the columns that are cut cell by cell
UNITS = 256  # of bytes saved by a request
CHOICES = 64  # amounts of bytes saved that a batch may choose from for one request
EDGE = 8  # columns of a batch that are cut cell by cell

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def plan(batch: Sequence[Stairs], costs: Costs, compute: float = 0.0, link: float = 0.0, *, flat: bool = False) -> None:
    """Set the tops of all choosable columns of a batch so that max(compute, load) is least.

    compute, link: seconds that each side is busy anyway. flat: columns are whole, or only projected in the first layer.

    Stairs of blocks of layers first; then, where blocks are too coarse for both sides to end together, the columns at
    the edge of the stairs again, each for itself and cell by cell.
    """
    tables = [Table(stairs, columns, flat) for stairs in batch if (columns := stairs.choosable())]
    if not tables:
        return
    knapsack = Knapsack(sum(table.cells for table in tables), BINS, grain=max(table.unit for table in tables))
    choices = [table.choices(CHOICES if len(tables) > 1 else BINS) for table in tables]
    for table, units in zip(tables, choices, strict=True):
        knapsack.add(units * table.unit, table.seconds[units])
    for table, units, chosen in zip(tables, choices, knapsack.best(costs, compute, link), strict=True):
        table.choose(int(units[chosen]))

    edge = [(table.stairs, c) for table in tables for c in table.edge(max(1, EDGE // len(tables)))]
    heights = [table.heights(c, flat) for table in tables for c in table.edge(max(1, EDGE // len(tables)))]
    for stairs, column in edge:
        stairs.tops[column] = 0
    cells, grain = sum(s.widths[c] * s.plane.layers for s, c in edge), max(s.widths[c] for s, c in edge)
    knapsack = Knapsack(cells, EDGE_BINS, grain)
    for (stairs, column), tops in zip(edge, heights, strict=True):
        knapsack.add(tops * stairs.widths[column], np.array([stairs.cost(column, int(top)) for top in tops]))
    compute += sum(table.stairs.cost(c, table.stairs.tops[c]) for table in tables for c in table.columns)
    rest = sum(table.cells - table.saved_cells() for table in tables) - knapsack.cells
    for (stairs, column), tops, chosen in zip(edge, heights, knapsack.best(costs, compute, link, rest), strict=True):
        stairs.tops[column] = int(tops[chosen])


class Table:
    """The least compute seconds of one request by how much it saves the link.

    columns: that are to be chosen for. cells: their (token, layer) pairs. unit: of saving, in cells.
    blocks: layers of each. levels: how many of the columns a block may recompute.
    seconds: [units]; the least for that much saved.
    """

    def __init__(self, stairs: Stairs, columns: list[int], flat: bool) -> None:
        self.stairs, self.columns = stairs, columns
        layers = stairs.plane.layers
        size = max(1, layers - 1 if flat else -(-(layers - 1) // (BLOCKS - 1)))
        self.blocks = [1, *(min(size, layers - start) for start in range(1, layers, size))]
        self.levels = _spread(len(columns) + 1, LEVELS)
        # [levels]; seconds of the first layer, seconds of any other, tokens
        first, upper, tokens = (
            np.concatenate([[0.0], np.cumsum(np.asarray(of)[columns])])[self.levels]
            for of in (stairs.first, stairs.upper, stairs.widths)
        )
        self.cells = int(tokens[-1]) * layers
        self.unit = 1.0 if self.cells <= UNITS else tokens[-1] / (len(self.levels) - 1) * size
        self.saved = np.rint(np.outer(self.blocks, tokens) / self.unit).astype(np.int64)  # [blocks, levels] units
        units = np.arange(int(self.saved[:, -1].sum()) + 1)
        way = np.where(units == self.saved[0][:, None], first[:, None], np.inf)
        way[self.levels < stairs.floor] = np.inf
        self._ways = [way]  # [blocks][levels, units]; the least seconds up to the block if that is its split
        most = int(self.saved[1:, -1].max(initial=0))
        least = np.full((len(self.levels), most + len(units)), np.inf)  # units below 0 are impossible
        for saved, size in zip(self.saved[1:], self.blocks[1:], strict=True):
            # Blocks below recompute as many columns, or more.
            least[::-1, most:] = np.minimum.accumulate(way[::-1])
            rows = np.arange(0, least.size, least.shape[1])[:, None]
            way = least.take(rows + units + (most - saved[:, None])) + size * upper[:, None]
            self._ways.append(way)
        self.seconds = way.min(axis=0)

    def choices(self, most: int) -> Ints:
        """Amounts of units that can be saved, thinned out to `most`."""
        units = np.flatnonzero(np.isfinite(self.seconds))
        return units[_spread(len(units), most)]

    def choose(self, units: int) -> None:
        """Set the stairs that save so much for the least compute."""
        level, tops = 0, np.zeros(len(self.columns), dtype=np.int64)
        for size, way, saved in zip(reversed(self.blocks), reversed(self._ways), self.saved[::-1], strict=True):
            level += int(np.argmin(way[level:, units]))
            units -= int(saved[level])
            tops[: self.levels[level]] += size
        for column, top in zip(self.columns, tops.tolist(), strict=True):
            self.stairs.tops[column] = top

    def heights(self, column: int, flat: bool) -> Ints:
        """The tops that a column may have."""
        layers = self.stairs.plane.layers
        least = int(column in self.columns[: self.stairs.floor])
        return np.array([top for top in ((0, 1, layers) if flat else range(layers + 1)) if top >= least])

    def saved_cells(self) -> int:
        return sum(self.stairs.widths[c] * self.stairs.tops[c] for c in self.columns)

    def edge(self, most: int) -> list[int]:
        """The columns nearest to where the stairs fall, where they fall most first."""
        tops = np.array([self.stairs.plane.layers, *(self.stairs.tops[c] for c in self.columns), 0])
        falls, at = np.flatnonzero(tops[:-1] > tops[1:]), np.arange(len(self.columns))
        distance = np.abs(at[:, None] + 0.5 - falls)  # fall f is between columns f - 1 and f
        drop = (tops[:-1] - tops[1:])[falls]
        nearest = np.lexsort((-drop[np.argmin(distance, axis=1)], distance.min(axis=1)))[:most]
        return [self.columns[i] for i in sorted(nearest)]


class Knapsack:
    """A choice from every one of several sets, each with what it saves the link and what it costs compute.

    cells: the most that can be saved, (token, layer) pairs. They are counted in about `bins` equal bins, so what n
    choices save is known to n / 2 bins, and exactly where all of it is in multiples of `grain`.
    """

    def __init__(self, cells: int, bins: int, grain: float) -> None:
        self.cells = cells
        fit = int(grain * bins / cells)  # bins that a grain may be cut into
        self.bin = max(1.0, grain / fit) if fit else cells / bins
        self.least = np.zeros(1)  # [bins]; seconds
        self._chosen: list[tuple[Ints, Ints]] = []

    def add(self, saved: NDArray[Any], seconds: Floats) -> None:
        """saved, seconds: [choices]."""
        bins = np.rint(saved / self.bin).astype(np.int64)
        most = int(bins.max())
        beyond = np.full(most, np.inf)
        padded = np.concatenate([beyond, self.least, beyond])
        ways = padded[np.arange(len(self.least) + most) + (most - bins[:, None])] + seconds[:, None]
        best = np.argmin(ways, axis=0)
        self.least = ways[best, np.arange(ways.shape[1])]
        self._chosen.append((best, bins[best]))

    def best(self, costs: Costs, compute: float, link: float, rest: int = 0) -> list[int]:
        """The choice from every set with which max(compute, load) is least.

        compute, link: seconds that each side is busy besides. rest: cells that are loaded besides.
        """
        loaded = rest + np.maximum(0.0, self.cells - np.arange(len(self.least)) * self.bin)
        load = np.where(loaded > 0, link + loaded * costs.load_seconds(1), 0.0)
        bin, chosen = int(np.argmin(np.maximum(compute + self.least, load))), list[int]()
        for best, bins in reversed(self._chosen):
            chosen.append(int(best[bin]))
            bin -= int(bins[bin])
        return chosen[::-1]


def seconds(plane: Plane, costs: Costs, token_budget: int, band: range) -> Floats:
    """[prefix columns]; seconds that each column adds to passes over the band, in its highest layer only projected.

    Marginals are exact; what passes take beyond them is asked of the costs at some passes and widths, and interpolated.
    """
    bounds = np.asarray(plane.request.boundaries[: plane.prefix_columns + 1])
    marginal = np.zeros(len(bounds) - 1)
    for window in set(plane.request.windows[: band.stop]):
        layer = plane.request.windows.index(window)
        project, advance = costs.cell_marginals(bounds[:-1], bounds[1:], layer)
        marginal += project * plane.request.windows[: band.stop].count(window)
        marginal += advance * plane.request.windows[: band.stop - 1].count(window)
    total = np.concatenate([[0.0], np.cumsum(marginal)])

    def beyond(first: int, last: int) -> float:
        part = Part(plane.request.id, int(bounds[first]), int(bounds[last]), advance=False)
        return costs.seconds(Op(COMPUTE, band, (part,))) - float(total[last] - total[first])

    cuts = [0]
    while cuts[-1] < len(marginal):
        fits = int(np.searchsorted(bounds, bounds[cuts[-1]] + token_budget, side="right")) - 1
        cuts.append(max(fits, cuts[-1] + 1))
    passes = _spread(len(cuts) - 1, SAMPLES)
    sampled = [beyond(cuts[i], cuts[i + 1]) for i in passes]
    at_cuts = np.concatenate([[0.0], np.cumsum(np.interp(range(len(cuts) - 1), passes, sampled))])
    inside = [c for c in (1, 2, 4, 8, 16, 32) if c < cuts[1]]  # a small pass is dearer by the token
    knots = [0, *inside, *cuts[1:]]
    more = np.interp(bounds, bounds[knots], [0.0, *(beyond(0, c) for c in inside), *at_cuts[1:]])
    return np.maximum(np.diff(total + more), 0.0)


def _spread(count: int, most: int) -> Ints:
    """At most so many of 0..count - 1, evenly, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
