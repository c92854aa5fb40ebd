"""two-pointer: the paper's first version. An axis per request, and a batch-aware choice of whom to serve.

Source: CacheFlow (arXiv 2604.25080v1). Where the paper is silent: ties go to the earlier request, at most as many ops
are in flight as the loop allows, and where pointers meet the last unit goes to the side that ends it first (axes.py).
"""

from __future__ import annotations

from typing import Any

from cacheflow.op import Op
from cacheflow.plane import Plane
from cacheflow.policies.axes import Axis, LayerAxis, SingleAxis, TokenAxis


class TwoPointer(SingleAxis):
    """Axis by crossover length; I/O to the request with most left to recompute; compute round-robin over all.

    crossover: prefix length in tokens from which the token axis is taken; None: where the costs say that it starts to
        restore sooner than the layer axis.
    """

    name = "two-pointer"
    rank = 5
    axis = TokenAxis  # until `add` has chosen

    def __init__(self, *args: Any, crossover: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.crossover = crossover
        self._turn = 0

    def add(self, plane: Plane) -> None:
        super().add(plane)
        self._axes[plane.request.id] = self._choose(plane)

    def _choose(self, plane: Plane) -> Axis:
        if self.hidden_tokens is not None and plane.request.prefix > self.hidden_tokens:
            return TokenAxis(self, plane)
        if self.crossover is not None:
            return (TokenAxis if plane.request.prefix >= self.crossover else LayerAxis)(self, plane)
        token, layer = TokenAxis(self, plane), LayerAxis(self, plane)
        return token if token.restore_seconds() <= layer.restore_seconds() else layer

    def next_compute(self, now: float) -> Op | None:
        planes = self.active()
        turn = self._turn % max(1, len(planes))
        order = [p for p in planes if p.restored] + planes[turn:] + planes[:turn]
        for plane in order:
            op = self._axes[plane.request.id].next_compute(now)
            if op is not None:
                self._turn = planes.index(plane) + 1
                return op
        return None

    def next_fetch(self, now: float) -> Op | None:
        axes = [self._axes[plane.request.id] for plane in self.active()]
        axes.sort(key=lambda axis: -axis.recompute_seconds())
        return next(filter(None, (axis.next_fetch(now) for axis in axes)), None)
