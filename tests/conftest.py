"""Fixtures of all tests: uninitialised memory is poisoned, and the backends of the kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.recorder import recorder as recorder


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta":
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _poisoning(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():  # a leaf that wants gradients may not be filled otherwise
            return _poison(function(*args, **kwargs))

    return empty


@pytest.fixture(autouse=True, scope="session")
def poisoned_empty() -> Iterator[None]:
    """What `torch.empty` and its kin return is full of NaN, or of the largest integer: reading it unwritten shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _poisoning(torch.empty))
        patch.setattr(torch, "empty_like", _poisoning(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", _poisoning(torch.Tensor.new_empty))
        yield


@pytest.fixture(params=["reference"], scope="session")  # one per session so that Hypothesis may use it too
def ops(request: pytest.FixtureRequest) -> ModuleType:
    """A backend of the kernels; every test of an op runs on each."""
    return importlib.import_module(f"kernels.{request.param}")
