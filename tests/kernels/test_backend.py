"""Choosing a backend, launching in it, and refusing what it would get wrong."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading

import pytest
import torch

import kernels
import kernels.reference
from kernels import backend
from kernels.launch import Launch, Shape
from kernels.norm import rms_norm_kernel
from tests.interpreter import VARIABLE

OPS = ("activation", "attention", "pages_from_staging", "recompute", "rms_norm", "staging_from_pages")


def test_a_cpu_gets_the_reference_and_a_name_is_obeyed(interpreted):
    assert backend(None, "cpu") is kernels.reference and kernels.reference.NAME == "reference"
    assert backend("triton", torch.device("cpu")) is interpreted and interpreted.NAME == "triton"
    assert backend("reference", "cuda") is kernels.reference


def test_nothing_falls_back(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=r"cannot run on device 'cpu' here; .* set TRITON_INTERPRET=1 before Python"):
        backend("triton", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="cannot run on device 'cuda:1' here; use the reference backend on a CPU"):
        backend(None, "cuda:1")
    with pytest.raises(ValueError, match="there is no backend 'cutlass'; choose from reference, triton"):
        backend("cutlass", "cpu")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(kernels.BACKENDS, "triton", "kernels_of_nobody")
    with pytest.raises(RuntimeError, match="backend triton needs kernels_of_nobody; install it"):
        backend(None, "cuda")


def test_the_reference_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import kernels; print(kernels.backend(None, 'cpu').NAME)"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.stdout.strip() == "reference", done.stderr


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_one_signature(op, interpreted):
    ours, theirs = (inspect.signature(getattr(ops, op)).parameters for ops in (interpreted, kernels.reference))
    assert list(ours) == list(theirs)
    for name in ours:
        assert (ours[name].kind, ours[name].default) == (theirs[name].kind, theirs[name].default)


def test_an_interpreter_that_computes_on_bits_is_refused():
    code = """
import torch
from kernels import backend
ops = backend("triton", "cpu")
print(ops.rms_norm(torch.ones(2, 8), torch.ones(8), 0.0).sum().item())
ops.rms_norm(torch.ones(2, 8).bfloat16(), torch.ones(8).bfloat16(), 0.0)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env={VARIABLE: "1"})
    assert done.stdout.strip() == "16.0"
    assert "computes on the bits of bfloat16; use float32 or float16 with TRITON_INTERPRET=1" in done.stderr


def test_warm_up_lists_what_it_compiled(interpreted):
    pages = torch.zeros(4, 16, 2, 32)
    shape = Shape(hidden_size=64, intermediate_size=96, heads=4, k_pages=pages, v_pages=pages)
    warm = interpreted.warmup(shape, "cpu")
    assert {"recompute_kernel", "attention_kernel", "rms_norm_kernel", "activation_kernel"} <= {
        launch.kernel.__name__ for launch in warm
    }
    assert len(warm) == len(interpreted.launches(shape, "interpreter")) <= 16


def test_compiling_loads_the_code(monkeypatch):
    done = []

    class Compiled:
        def _init_handles(self):
            done.append("loaded")

    class Kernel:
        def warmup(self, *, grid, **arguments):
            done.append((grid, arguments))
            return Compiled()

    Launch(kernel=Kernel(), grid=(3,), arguments=dict(x=1), options=dict(num_warps=4)).compile()
    assert done == [((3,), dict(x=1, num_warps=4)), "loaded"]


def test_streams_may_launch_at_once(interpreted):
    x = torch.arange(1.0, 601.0).view(20, 30)
    expected = kernels.reference.rms_norm(x, torch.ones(30), 0.0)
    wrong = []

    def launch() -> None:
        for _ in range(10):
            y = interpreted.rms_norm(x, torch.ones(30), 0.0)
            if not torch.allclose(y, expected):
                wrong.append(y)

    threads = [threading.Thread(target=launch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_launch_without_programs_does_nothing(interpreted):
    Launch(kernel=rms_norm_kernel, grid=(0, 3), arguments={}).run()
