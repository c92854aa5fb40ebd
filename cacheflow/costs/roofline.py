"""Costs from a model's shape and a device's numbers: what a GPU that is not here would take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cacheflow.costs.base import Costs, LayerWork, ModelShape

GBPS = 1e9 / 8  # bytes per second in one decimal gigabit per second


@dataclass(frozen=True)
class Device:
    """What a device reaches in practice, not its data sheet's peaks.

    gemm, attention: FLOP/s of large bf16 GEMMs and of causal prefill attention.
    memory: bytes/s of device memory, which bounds GEMMs over few tokens by their weights.
    host: bytes/s from pinned host memory to the device, one direction.
    op_seconds, layer_seconds: launch costs per compute op, and per layer in it.
    """

    name: str
    gemm: float
    attention: float
    memory: float
    host: float
    op_seconds: float = 50e-6
    layer_seconds: float = 10e-6


# A100 and H100 efficiencies: least-squares fit of Cake's Fig. 4 (LongAlpaca-7B, 512-token chunks), which one common
# efficiency cannot fit. Others: the same fractions of their data sheets' dense bf16 peaks and bandwidths; guesses.
DEVICES = {
    device.name: device
    for device in (
        Device("A100-40G", gemm=173e12, attention=118e12, memory=1.3e12, host=22e9),
        Device("H100", gemm=245e12, attention=131e12, memory=2.7e12, host=45e9),
        Device("H200", gemm=245e12, attention=131e12, memory=3.9e12, host=45e9),
        Device("L40S", gemm=100e12, attention=68e12, memory=0.7e12, host=22e9),
        Device("MI300X", gemm=280e12, attention=150e12, memory=4.3e12, host=45e9),
    )
}


def device(name: str, **numbers: Any) -> Device:
    """A preset by name, with numbers replaced; or, all numbers given, a device of its own.

    Raises ValueError for an unknown name that does not come with all its numbers, or an unknown number.
    """
    try:
        return replace(DEVICES[name], **numbers) if name in DEVICES else Device(name, **numbers)
    except TypeError as error:
        raise ValueError(
            f"device {name!r} is not one of {', '.join(DEVICES)}; to name another give gemm, attention (FLOP/s), "
            f"memory and host (bytes/s): {error}"
        ) from None


class Roofline(Costs):
    """GEMMs at the larger of their FLOPs over `gemm` and their weights over `memory`; attention at `attention`."""

    def __init__(self, shape: ModelShape, device: Device, **link: Any) -> None:
        super().__init__(shape, **{"copy_bandwidth": device.host, "copy_seconds": device.layer_seconds, **link})
        self.device = device
        self.project_marginal = shape.project_flops / device.gemm
        self.advance_marginal = shape.advance_flops / device.gemm
        self.pair_marginal = shape.pair_flops / device.attention
        self.compute_fixed = device.op_seconds
        self.layer_fixed = device.layer_seconds

    def layer_seconds(self, work: LayerWork) -> float:
        shape, advance, pairs = self.shape, 0, 0
        for span in work.spans:
            advance += span.stop - span.start
            pairs += span.pairs
        flops = work.project * shape.project_flops + advance * shape.advance_flops
        weights = (work.project > 0) * shape.project_flops + (advance > 0) * shape.advance_flops
        gemm = max(flops / self.device.gemm, weights / 2 * shape.dtype_bytes / self.device.memory)
        return self.layer_fixed + gemm + pairs * self.pair_marginal

    def head_seconds(self, tokens: int) -> float:
        flops = self.shape.head_flops
        weights = (tokens > 0) * flops / 2 * self.shape.dtype_bytes
        return max(tokens * flops / self.device.gemm, weights / self.device.memory)
