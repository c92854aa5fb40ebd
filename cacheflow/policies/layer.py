"""layer: the layer axis alone, two pointers that meet."""

from __future__ import annotations

from cacheflow.policies.axes import LayerAxis, SingleAxis


class Layer(SingleAxis):
    """Compute rises from the first layer, loads fall from the last, all tokens at once."""

    name = "layer"
    rank = 4
    axis = LayerAxis
