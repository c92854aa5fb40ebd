"""Where a model runs, as the executor sees it: streams, staging, and the way between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cacheflow.op import COMPUTE
from cacheflow.stores.base import aligned_buffer
from cacheflow.streams import CpuStream, Stream


@dataclass(frozen=True, eq=False)
class Staging:
    """One staging buffer. host: [bytes] uint8, which a store reads into. device: as many, where the model is; on a CPU
    the same memory."""

    host: torch.Tensor
    device: torch.Tensor


class Device(Protocol):
    """A place for models. `put` and `get` are called inside work of one of its streams, and belong to it."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are made."""

    def stream(self, name: str) -> Stream:
        """A new stream: "compute", "copy" or "store"."""

    def staging(self, nbytes: int) -> Staging:
        """A new staging buffer."""

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Host tensors on the device, without waiting for it."""

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device tensor on the host, there when the stream's work up to now has ended."""


class CpuDevice:
    """Streams are threads, and host and device are the same memory."""

    torch_device = torch.device("cpu")

    def stream(self, name: str) -> Stream:
        """`compute` has PyTorch's intra-op threads, the others have one each."""
        threads = torch.get_num_threads()
        stream = CpuStream(f"cacheflow-{name}", threads if name == COMPUTE else 1)
        torch.set_num_threads(threads)
        return stream

    def staging(self, nbytes: int) -> Staging:
        buffer = torch.from_numpy(aligned_buffer(nbytes))
        return Staging(buffer, buffer)

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def open_device(name: str) -> Device:
    """The device of a name: "cpu", "cuda" or "cuda:1". Raises ValueError for one that is not here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; use cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return CpuDevice()
    if device.type != "cuda":
        raise ValueError(f"device {name!r} is not supported; use cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(f"device {name!r} is not here: PyTorch {torch.__version__} sees {count} GPUs; use cpu")
    from cacheflow.cuda import CudaDevice

    return CudaDevice(device)
