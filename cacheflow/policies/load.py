"""load: everything loaded, then the suffix. The baseline without recompute."""

from __future__ import annotations

from cacheflow.op import Op
from cacheflow.policies.base import Policy


class Load(Policy):
    """First come, first served; chunk after chunk from the first, all its layers."""

    name = "load"
    rank = 1

    def next_compute(self, now: float) -> Op | None:
        return next(filter(None, map(self.repair, self.active())), None)

    def next_fetch(self, now: float) -> Op | None:
        units = (self.fetch_column(plane, column) for plane in self.active() for column in range(plane.prefix_columns))
        return next(filter(None, units), None)
