"""Triton for hooks, where it is there: a variant's reference is importable without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = tl = None

__all__ = ["jit", "tl"]


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` for hooks. Without Triton a hook is never launched, and stays what it is."""
    if triton is None:
        return function
    function.__globals__.setdefault("tl", tl)  # where the interpreter looks for the language
    return triton.jit(function)
