"""Triton's CPU interpreter, made right for bf16 and fp8, and faster: what tests need to run kernels without a GPU.

Triton 3.6 and 3.7 hold bf16 as uint16 and fp8 as uint8 in their interpreter, and then
- dot, + - * /, comparisons, fma and sums of bf16 compute on the raw bits;
- float32 to bf16 truncates where a GPU rounds to nearest even; to fp8, values that round up to a power of two come out
  halved, nothing saturates, and an fp8 NaN reads as a number;
- bf16 constants raise AttributeError, and casts between integers and bf16 copy bits.

Only values change: masks, indexing and memory accesses stay as they were.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kernels

VARIABLE = "TRITON_INTERPRET"
# A GPU for which kernels are compiled instead: "cuda". For `scripts/gpu_check.py`.
DEVICE = os.environ.get("CACHEFLOW_TEST_DEVICE")


def load_kernels() -> None:
    """Imports every kernel so that it will be interpreted: Triton decides that when a function is decorated. The
    variable does not stay set: whoever launches says so with the fixture `interpreted`, and processes that tests start
    compile unless told otherwise. Nothing happens where the tests compile for a GPU."""
    if DEVICE is not None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
            importlib.import_module(module.name)
    mend()


def interpret(function: Callable[..., Any]) -> Any:
    """`triton.jit` for a kernel or hook that a test defines: interpreted, unless the tests compile for a GPU."""
    import triton
    import triton.language as tl

    function.__globals__.setdefault("tl", tl)  # where the interpreter looks for the language
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE is None:
            patch.setenv(VARIABLE, "1")
        return triton.jit(function)


def mend() -> None:
    """Replaces what is wrong in the interpreter of the installed Triton. Call it once."""
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    types = {
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    raw = {tl.bfloat16, tl.float8e4nv, tl.float8e5}  # kept as unsigned integers
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
        """Data of one Triton type as data of another, rounded to nearest even as GPUs do."""
        bits = torch.from_numpy(np.ascontiguousarray(data))
        values = bits.view(types[source]).float() if source in raw else bits
        if target not in raw:
            return values.numpy().astype(interpreter._get_np_dtype(target))
        if target.primitive_bitwidth == 8:  # GPUs saturate; NaN stays NaN
            top = torch.finfo(types[target]).max
            values = values.float().clamp(-top, top)
        out = values.to(torch.float32).to(types[target])
        return out.view(torch.uint16 if target == tl.bfloat16 else torch.uint8).numpy()

    def is_bfloat16(value: Any) -> bool:
        return isinstance(value, handle) and value.dtype.scalar == tl.bfloat16

    def widen(value: Any) -> Any:
        return handle(convert(value.data, tl.bfloat16, tl.float32), tl.float32) if is_bfloat16(value) else value

    def narrow(value: Any) -> Any:
        if value.data.dtype == bool:
            return value
        return handle(convert(value.data, tl.float32, tl.bfloat16), tl.bfloat16)

    def in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the builder, on float32 copies of its bf16 operands and with its result rounded."""

        def wrapped(self: Any, *operands: Any) -> Any:
            if not any(map(is_bfloat16, operands)):
                return method(self, *operands)
            return narrow(method(self, *map(widen, operands)))

        return wrapped

    convert_float, cast, dot = interpreter._convert_float, builder.cast_impl, builder.create_dot
    reduce, original_call = interpreter.ReduceScanOpInterface.apply, interpreter.InterpretedFunction.__call__

    def mended_convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
        if rounding == ir.ROUNDING_MODE.RTZ or source not in types or target not in types:
            return convert_float(data, source, target, rounding)
        return convert(data, source, target)

    def mended_cast(self: Any, value: Any, target: tl.dtype) -> Any:
        if not {value.dtype.scalar, target.scalar} & raw:
            return cast(self, value, target)
        return handle(convert(value.data, value.dtype.scalar, target.scalar), target.scalar)

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest)

    def mended_reduce(self: Any, operand: Any) -> Any:
        if isinstance(operand, tuple) or operand.dtype != tl.bfloat16:
            return reduce(self, operand)
        wide = reduce(self, tl.tensor(widen(operand.handle), tl.block_type(tl.float32, list(operand.shape))))
        kind = wide.type.with_element_ty(tl.bfloat16) if wide.type.is_block() else tl.bfloat16
        return tl.tensor(narrow(wide.handle), kind)

    def constant(self: Any, value: float) -> Any:
        return handle(convert(np.array([value], np.float32), tl.float32, tl.bfloat16), tl.bfloat16)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        """A call from a kernel to a function. The original patches the whole language first, which for our functions
        the launch has done, and which takes half of a test's time."""
        if self.fn.__module__.startswith("triton."):
            return original_call(self, *arguments, **keywords)
        return self.rewrite()(*arguments, **keywords)

    interpreter._convert_float = mended_convert_float
    interpreter.ReduceScanOpInterface.apply = mended_reduce
    interpreter.InterpretedFunction.__call__ = call
    builder.cast_impl, builder.create_dot, builder.get_bf16 = mended_cast, mended_dot, constant
    for name in ("binary_op", "unary_op", "create_clampf", "create_fma"):
        setattr(builder, name, in_float32(getattr(builder, name)))
