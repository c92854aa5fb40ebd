"""What an attention variant is: hooks, each twice, in PyTorch and in Triton. Importable without Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, eq=False)
class Hook:
    """One change to attention.

    reference: a function on PyTorch tensors or, for `bounds`, on integers.
    triton: the same as a `@jit` function at module level. It is compiled into the kernel, so it may not close over
        anything, and kernels with other hooks, or with the same hook edited, are other kernels.
    parameters: numbers and tensors, the last argument of both as a tuple. Not compiled in, except that Triton tells
        apart an integer of 1, multiples of 16, and the others.
    """

    reference: Callable[..., Any]
    triton: Any
    parameters: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Variant:
    """An attention variant. Causality holds besides; hooks that are None change nothing.

    head, query and key are integers that broadcast against the scores: the query head, and positions in the sequence.

    score(score, head, query, key, parameters) -> score. Natural units, after the softmax scale.
    mask(head, query, key, parameters) -> bool, True = visible.
    bounds(first, last, parameters) -> (begin, full_begin, full_end, end), of the mask, for queries [first, last]: keys
        outside [begin, end) are seen by none of them, and only these may never have been filled; keys in
        [full_begin, full_end) are seen by all, and no mask is computed there. Without bounds it is, for every key.
    sink(head, parameters) -> float. A key without a value: it has a share of the softmax, and is in the log-sum-exp.
    """

    name: str
    score: Hook | None = None
    mask: Hook | None = None
    bounds: Hook | None = None
    sink: Hook | None = None

    def __post_init__(self) -> None:
        if self.bounds is not None and self.mask is None:
            raise ValueError(f"variant {self.name!r} has bounds but no mask; bounds only say where a mask matters")

    def key_bounds(self, first: int, last: int) -> tuple[int, int, int, int]:
        """`bounds` for queries [first, last], with causality and cut to the keys that exist: nobody sees a key outside
        [begin, end), and all see those in [full_begin, full_end) as far as causality allows."""
        if self.bounds is not None:
            begin, full_begin, full_end, end = self.bounds.reference(first, last, self.bounds.parameters)
        else:
            begin, full_begin, full_end, end = 0, 0, (last + 1 if self.mask is None else 0), last + 1
        return max(begin, 0), max(full_begin, 0), full_end, min(end, last + 1)


def combine(*variants: Variant | None) -> Variant:
    """One variant with the hooks of all that are given. Raises ValueError where two bring the same hook."""
    given = [variant for variant in variants if variant is not None]
    hooks: dict[str, Hook] = {}
    for field in fields(Variant):
        found = [variant for variant in given if field.name != "name" and getattr(variant, field.name) is not None]
        if len(found) > 1:
            raise ValueError(
                f"variants {' and '.join(repr(v.name) for v in found)} both bring a {field.name} hook; "
                "write one variant whose hook does both"
            )
        if found:
            hooks[field.name] = getattr(found[0], field.name)
    return Variant("+".join(variant.name for variant in given) or "causal", **hooks)
