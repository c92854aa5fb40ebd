"""Rotary position embedding: which frequencies a configuration asks for, and their tables.

Formulas are those of Transformers' `modeling_rope_utils`, computed in the same order and precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a configuration is read without PyTorch, tables are made with it
    import torch

# Parameters each type may have besides rope_type, type, rope_theta and partial_rotary_factor.
_PARAMETERS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True)
class Rope:
    """A static rotary embedding over the whole head.

    kind: "default", "linear", "llama3" or "yarn". theta: base wavelength. attention_factor: factor of cos and sin.
    The others have Transformers' meaning, and are left at their defaults where the kind has no use for them.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rope:
        """From a `config.json`, `rope_parameters` or the older `rope_theta` and `rope_scaling`. Raises ValueError for
        an unknown type or parameter, or one that is missing."""
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"rope_parameters is {given!r}; it must be an object with a rope_type")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _PARAMETERS:
            raise ValueError(f"rope_type {kind!r} is not supported; supported are {', '.join(sorted(_PARAMETERS))}")
        unknown = sorted(set(given) - _PARAMETERS[kind] - _COMMON)
        if unknown:
            raise ValueError(
                f"rope_type {kind!r} with parameter {unknown[0]!r} is not supported; "
                f"supported are {', '.join(sorted(_PARAMETERS[kind] | {'rope_theta'}))}"
            )
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor {partial} is not supported; only whole heads are rotated (1.0)")
        theta = float(given.get("rope_theta", config.get("rope_theta", cls.theta)))
        if kind == "default":
            return cls(theta=theta)
        maximum = config["max_position_embeddings"]
        original = config.get("original_max_position_embeddings")
        if original is None:
            original = given.get("original_max_position_embeddings", maximum)
        factor = given.get("factor")
        if factor is None and kind == "yarn":
            factor = maximum / original
        factor = _number(kind, "factor", factor)
        if kind == "linear":
            return cls(kind=kind, theta=theta, factor=factor)
        scaled = cls(kind=kind, theta=theta, factor=factor, original_max_positions=int(original))
        if kind == "llama3":
            low, high = (_number(kind, name, given.get(name)) for name in ("low_freq_factor", "high_freq_factor"))
            return replace(scaled, low_freq_factor=low, high_freq_factor=high)
        return replace(
            scaled,
            beta_fast=float(given.get("beta_fast") or 32),
            beta_slow=float(given.get("beta_slow") or 1),
            truncate=bool(given.get("truncate", True)),
            attention_factor=_yarn_attention_factor(factor, given),
        )

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians per position of each pair: [head_dim / 2] float32."""
        import torch

        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse = 1.0 / (self.theta**exponent)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "llama3":
            return self._llama3_frequencies(inverse)
        if self.kind == "yarn":
            return self._yarn_frequencies(head_dim, self.theta**exponent)
        return inverse

    def tables(
        self, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every position, times the attention factor: [max_positions, head_dim / 2] each, of `dtype`
        (float32 or float64)."""
        import torch

        inverse = self.inverse_frequencies(head_dim).to(device=device, dtype=dtype)
        angles = torch.arange(max_positions, device=device, dtype=dtype)[:, None] * inverse
        return angles.cos().mul_(self.attention_factor), angles.sin_().mul_(self.attention_factor)

    def _llama3_frequencies(self, inverse: torch.Tensor) -> torch.Tensor:
        assert self.original_max_positions and self.low_freq_factor and self.high_freq_factor
        original, low, high = self.original_max_positions, self.low_freq_factor, self.high_freq_factor
        wavelength = 2 * math.pi / inverse
        scaled = (inverse / self.factor).where(wavelength > original / low, inverse)
        smooth = (original / wavelength - low) / (high - low)
        smoothed = (1 - smooth) * scaled / self.factor + smooth * scaled
        medium = ~(wavelength < original / high) & ~(wavelength > original / low)
        return smoothed.where(medium, scaled)

    def _yarn_frequencies(self, head_dim: int, wavelengths: torch.Tensor) -> torch.Tensor:
        assert self.original_max_positions and self.beta_fast and self.beta_slow
        low, high = (self._correction(head_dim, beta) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        import torch

        # The width is kept above zero as Transformers does.
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
        extrapolated = 1 - ramp.clamp(0, 1)
        return (1.0 / (self.factor * wavelengths)) * (1 - extrapolated) + (1.0 / wavelengths) * extrapolated

    def _correction(self, head_dim: int, rotations: float) -> float:
        """The dimension that turns `rotations` times within the original length."""
        assert self.original_max_positions
        return (head_dim * math.log(self.original_max_positions / (rotations * 2 * math.pi))) / (
            2 * math.log(self.theta)
        )


def _yarn_attention_factor(factor: float, given: Mapping[str, Any]) -> float:
    if given.get("attention_factor") is not None:
        return _number("yarn", "attention_factor", given["attention_factor"])
    mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(kind: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"rope_type {kind!r} has {name} {value!r}; it needs a number above 0")
    return float(value)
