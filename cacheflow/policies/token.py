"""token: the token axis alone, two pointers that meet (Cake)."""

from __future__ import annotations

from cacheflow.policies.axes import SingleAxis, TokenAxis


class Token(SingleAxis):
    """Compute walks forward from the first chunk, loads backward from the last."""

    name = "token"
    rank = 3
    axis = TokenAxis
