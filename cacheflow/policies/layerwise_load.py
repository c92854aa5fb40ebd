"""layerwise-load: layer after layer loaded, the suffix climbing behind (LMCache, HiCache, CachedAttention)."""

from __future__ import annotations

from cacheflow.op import Op
from cacheflow.plane import Plane
from cacheflow.policies.base import Policy


class LayerwiseLoad(Policy):
    """First come, first served; the suffix, and holes, take every layer as soon as its needed cells are there."""

    name = "layerwise-load"
    rank = 2

    def next_compute(self, now: float) -> Op | None:
        return next(filter(None, map(self._climb, self.active())), None)

    def _climb(self, plane: Plane) -> Op | None:
        return next(filter(None, (plane.climb(c, self.token_budget) for c in plane.compute_only)), None)

    def next_fetch(self, now: float) -> Op | None:
        rows = (
            self.fetch_row(plane, layer, range(plane.prefix_columns))
            for plane in self.active()
            for layer in plane.empty_layers(range(plane.prefix_columns))
        )
        return next(filter(None, rows), None)
