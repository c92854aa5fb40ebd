"""Fixtures of the kernels' tests: both backends, the Triton one under the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import BACKENDS, backend
from kernels.variants import Variant
from kernels.variants.base import Hook
from tests.interpreter import DEVICE, VARIABLE, interpret, load_kernels
from tests.on_device import OnDevice

load_kernels()

GUARD = 64


@pytest.fixture(params=BACKENDS if DEVICE is None else [DEVICE], scope="session")  # so that Hypothesis may use it too
def ops(request: pytest.FixtureRequest) -> Iterator[ModuleType | OnDevice]:
    """A backend of the kernels; every test of an op runs on each, or, compiled, on the GPU that the tests are for."""
    if DEVICE is not None:
        yield OnDevice(backend("triton", DEVICE), DEVICE)
        return
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "triton":
            patch.setenv(VARIABLE, "1")
        yield backend(request.param, "cpu")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> ModuleType | OnDevice:
    """The Triton backend under the interpreter, or on the GPU that the tests are for."""
    if DEVICE is not None:
        return OnDevice(backend("triton", DEVICE), DEVICE)
    monkeypatch.setenv(VARIABLE, "1")
    return backend("triton", "cpu")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `Tensor.new_empty` returns, results of the ops among it, lies between guards that nobody may write."""
    made, new_empty = [], torch.Tensor.new_empty

    def between_guards(self: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
        inside = new_empty(self, *size, **kwargs)
        whole = torch.full((inside.numel() + 2 * GUARD,), 77, dtype=inside.dtype, device=inside.device)
        made.append(whole)
        whole[GUARD : GUARD + inside.numel()] = inside.flatten()
        return whole[GUARD : GUARD + inside.numel()].view(inside.shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", between_guards)
    yield
    assert made and all((whole[:GUARD] == 77).all() and (whole[-GUARD:] == 77).all() for whole in made)


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every `Launch` that runs from now on."""
    from kernels.launch import Launch

    ran: list[Any] = []
    run: Callable[[Launch], None] = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (ran.append(self), run(self))[1])
    return ran


@interpret
def holes_mask(head, query, key, parameters):
    return (query % 2 == 0) & (key >= parameters[0])


@interpret
def holes_bounds(first, last, parameters):
    return parameters[0], 0, 0, last + 1


def holes() -> Variant:
    """Queries at even positions see keys from 12 on; the others see none."""
    return Variant(
        "holes",
        mask=Hook(lambda head, query, key, parameters: (query % 2 == 0) & (key >= parameters[0]), holes_mask, (12,)),
        bounds=Hook(lambda first, last, parameters: (parameters[0], 0, 0, last + 1), holes_bounds, (12,)),
    )
