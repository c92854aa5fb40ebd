"""A backend's ops for tests whose tensors are on the host, run on another device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from kernels.variants.base import Hook

# What ops change; all else stays as it was, and large pools need not travel back.
CHANGED = {
    "recompute": ("k_pages", "v_pages"),
    "pages_from_staging": ("pages",),
    "staging_from_pages": ("staging",),
}
POSITIONAL = {"pages_from_staging": ("staging", "pages"), "staging_from_pages": ("pages", "slots", "staging")}
OPS = ("activation", "attention", "pages_from_staging", "recompute", "rms_norm", "staging_from_pages")


class OnDevice:
    """Every call moves what its tensors lie in, whole storages with all that is stale in them, to the device, runs the
    op there, and moves results and whatever the op may write to back. Tensors that share memory share it there too."""

    def __init__(self, ops: ModuleType, device: torch.device | str) -> None:
        self._ops = ops
        self._device = torch.device(device)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        return partial(self._call, name, value) if name in OPS else value

    def _call(self, name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        there = _There(self._device)
        result = op(*there.move(args), **there.move(kwargs))
        named = dict(zip(POSITIONAL.get(name, ()), args, strict=False)) | kwargs
        there.bring_back([named[changed] for changed in CHANGED.get(name, ())])
        return _to_host(result)


class _There:
    """Storages on the device, by the address of those on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: dict[int, torch.Tensor] = {}

    def move(self, value: Any) -> Any:
        """A value with the tensors in it on the device."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self.move, value))
        if isinstance(value, dict):
            return {key: self.move(x) for key, x in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            kept = ("reference", "triton") if isinstance(value, Hook) else ()
            names = [field.name for field in fields(value) if field.name not in kept]
            return replace(value, **{name: self.move(getattr(value, name)) for name in names})
        return value

    def bring_back(self, values: list[Any]) -> None:
        """Write the storages of tensors back to the host."""
        for value in values:
            for tensor in value if isinstance(value, tuple | list) else (value,):
                host = _bytes(tensor)
                host.copy_(self.storages[host.data_ptr()])

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.untyped_storage().nbytes():
            return tensor.to(self.device)
        host = _bytes(tensor)
        if host.data_ptr() not in self.storages:
            self.storages[host.data_ptr()] = host.to(self.device, copy=True)
        storage = self.storages[host.data_ptr()].untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _to_host(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.cpu()
    return type(result)(map(_to_host, result)) if isinstance(result, tuple) else result
