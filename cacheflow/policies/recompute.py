"""recompute: everything computed, as an engine does on a miss. The baseline without a store."""

from __future__ import annotations

from cacheflow.op import Op
from cacheflow.plane import Plane
from cacheflow.policies.base import Policy


class Recompute(Policy):
    """First come, first served; passes of up to the token budget through all layers, the suffix in the last of them."""

    name = "recompute"
    rank = 0

    def add(self, plane: Plane) -> None:
        super().add(plane)
        plane.forget()

    def next_compute(self, now: float) -> Op | None:
        for plane in self.active():
            for column in range(plane.columns):
                if plane.must_compute(column):
                    return plane.climb(column, self.token_budget)
        return None

    def next_fetch(self, now: float) -> Op | None:
        return None
