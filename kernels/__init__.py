"""The operations of a transformer layer over paged keys and values; nothing here knows of schedules or stores."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

BACKENDS = {"reference": "kernels.reference", "triton": "kernels.triton_ops"}


def backend(name: str | None, device: torch.device | str) -> ModuleType:
    """The ops of one backend, as a module; its NAME belongs into every report.

    name: a key of `BACKENDS`; None = "triton" on a GPU and "reference" on a CPU. device: where the tensors will be.
    Raises ValueError for another name, and RuntimeError if the backend cannot run on the device: there is no other
    backend to fall back to.
    """
    device = torch.device(device)
    if name is None:
        name = "reference" if device.type == "cpu" else "triton"
    if name not in BACKENDS:
        raise ValueError(f"there is no backend {name!r}; choose from {', '.join(BACKENDS)}")
    try:
        ops = importlib.import_module(BACKENDS[name])
    except ModuleNotFoundError as error:
        raise RuntimeError(f"backend {name} needs {error.name}; install it, or name the reference backend") from error
    if name == "triton":
        ops.target_of(device)  # raises where Triton cannot run
    return ops
