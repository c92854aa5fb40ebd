"""Attention variants, one file each: `kernels/variants/NAME.py` has a function NAME that returns the `Variant`, and a
function `example(heads)` that returns one for tests and for `python -m kernels.aot`. Found by being there."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kernels.variants.base import Variant, combine

__all__ = ["Variant", "combine", "example", "make", "names", "with_window"]


def names() -> list[str]:
    """Every variant there is."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"base", "language"})


def make(name: str, **parameters: Any) -> Variant:
    """The variant of that name. Raises ValueError for a name that is not there."""
    return _function(name, name)(**parameters)


def example(name: str, heads: int) -> Variant:
    """The variant of that name with parameters that show what it does, for this many query heads."""
    return _function(name, "example")(heads)


def with_window(variant: Variant | None, window: int | None) -> Variant:
    """`variant` (None = causal), and a sliding window besides if that is given."""
    return combine(variant, None if window is None else make("sliding_window", window=window))


def _function(name: str, function: str) -> Callable[..., Variant]:
    if name not in names():
        raise ValueError(f"attention variant {name!r} is not one of {', '.join(names())}")
    return getattr(import_module(f"{__name__}.{name}"), function)
