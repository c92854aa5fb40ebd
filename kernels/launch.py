"""A kernel launch as a value: ops run it, warm-up compiles it, and `python -m kernels.aot` does so without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.ranges import span

# Triton's interpreter keeps the place of the program that runs in one global, and streams on a CPU are threads.
_INTERPRETER = threading.Lock()

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels compute on; float64 is the reference's."""

PROCESSORS = {"cuda:80": 108, "cuda:90": 132, "cuda:100": 148, "hip:gfx942": 304, "interpreter": 1}
"""Multiprocessors of a target's largest GPU, which a launch should give work."""

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "u1",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


def target_of(device: torch.device) -> str:
    """What kernels on this device are compiled for: "cuda:90", "hip:gfx942", or "interpreter" on a CPU with
    TRITON_INTERPRET=1. Raises RuntimeError where Triton can run on neither."""
    if device.type == "cuda" and torch.cuda.is_available():
        return _device_target(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return "interpreter"
    raise RuntimeError(
        f"Triton kernels cannot run on device {str(device)!r} here; use the reference backend on a CPU, "
        "or set TRITON_INTERPRET=1 before Python starts"
    )


@cache
def _device_target(index: int) -> str:
    if torch.version.hip:
        return f"hip:{torch.cuda.get_device_properties(index).gcnArchName.split(':')[0]}"
    major, minor = torch.cuda.get_device_capability(index)
    return f"cuda:{major * 10 + minor}"


@dataclass(frozen=True)
class Specialisation:
    """What Triton compiles once: equal for two launches exactly if the second finds the first's code.

    types: Triton type by parameter, "constexpr" for what is compiled in; constants: those values, by path (the index of
    the parameter, then of the element of a tuple); attributes: what is known of a run-time value, by path.
    """

    kernel: str
    types: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    attributes: tuple[tuple[tuple[int, ...], str], ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch.

    kernel: a @triton.jit function. grid: programs along up to three axes; none are started if one of them is 0.
    arguments: value by parameter, run-time and constexpr alike. Tensors on the device "meta" will do to compile.
    options: num_warps, num_stages and what else a compiler understands.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Starts it on the current stream. Raises RuntimeError if the interpreter would compute on the bits of
        bf16."""
        if 0 in self.grid:
            return
        with span(self.kernel.__name__, "kernel"):
            self._run()

    def _run(self) -> None:
        if not isinstance(self.kernel, InterpretedFunction):
            self.kernel[self.grid](**self.arguments, **self.options)
            return
        with _INTERPRETER:
            if any(isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 for x in self.arguments.values()):
                _require_bfloat16()
            self.kernel[self.grid](**self.arguments)

    def compile(self) -> None:
        """Compiles it for the current device and loads the code there, so that `run` will do neither."""
        if not isinstance(self.kernel, InterpretedFunction):
            compiled = self.kernel.warmup(grid=self.grid, **self.arguments, **self.options)
            compiled._init_handles()  # or the first launch would load the code, and that synchronises

    def specialisation(self) -> Specialisation:
        """What this launch makes Triton compile, following its rules for run-time values."""
        types: list[tuple[str, Any]] = []
        constants: list[tuple[tuple[int, ...], Any]] = []
        attributes: list[tuple[tuple[int, ...], str]] = []
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments.get(parameter.name, parameter.default)
            kind = _classify(
                value,
                (index,),
                constants,
                attributes,
                constant=parameter.is_constexpr,
                by_value=not parameter.do_not_specialize,
                aligned=not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment),
            )
            types.append((parameter.name, kind))
        return Specialisation(
            kernel=f"{self.kernel.__module__}.{self.kernel.__name__}",
            types=tuple(types),
            constants=tuple(constants),
            attributes=tuple(attributes),
            options=tuple(sorted(self.options.items())),
        )


@dataclass(frozen=True, eq=False)
class Shape:
    """What of a model and its pages decides which kernels are compiled for it.

    hidden_size, intermediate_size, heads: of the model, or of its share on this device.
    k_pages, v_pages: one layer's, as in `kernels.reference`; tensors on the device "meta" will do.
    qkv_bias, qk_norm: whether the model has them.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    qkv_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def example(
        cls, dtype: torch.dtype, hidden_size: int, heads: int, kv_heads: int, head_dim: int, **options: bool
    ) -> Shape:
        """A model of this shape with NHD pages of 64 tokens, for code that is compiled and not run."""
        pages = torch.empty(4096, 64, kv_heads, head_dim, dtype=dtype, device="meta")
        return cls(hidden_size, 4 * hidden_size, heads, k_pages=pages, v_pages=pages, **options)

    @property
    def dtype(self) -> torch.dtype:
        """Of everything but rotary tables."""
        return self.k_pages.dtype

    def meta(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor that has no memory, by default of the model's dtype."""
        return torch.empty(size, dtype=dtype or self.dtype, device="meta")


@dataclass(frozen=True, eq=False)
class Case:
    """A launch that `python -m kernels.aot` compiles and judges.

    name: of the shape, in the tables. launch: its tensors are on the device "meta".
    matrix: its code must have matrix instructions. head_dim: of attention, by which scores are counted; None = none.
    """

    name: str
    launch: Launch
    matrix: bool = True
    head_dim: int | None = None


def _classify(
    value: Any,
    path: tuple[int, ...],
    constants: list[tuple[tuple[int, ...], Any]],
    attributes: list[tuple[tuple[int, ...], str]],
    *,
    constant: bool,
    by_value: bool,
    aligned: bool,
) -> Any:
    """The Triton type of one argument; what is compiled in or known besides is appended to the lists."""
    if isinstance(value, tuple) and not constant:
        every = dict(constant=False, by_value=True, aligned=True)
        return tuple(_classify(x, (*path, i), constants, attributes, **every) for i, x in enumerate(value))
    # A jit function (a hook) and a 1 are compiled in as well, as is None.
    one = by_value and type(value) is int and value == 1
    if constant or value is None or one or isinstance(value, triton.JITFunction | tl.constexpr):
        constants.append((path, value.value if isinstance(value, tl.constexpr) else value))
        return "constexpr"
    if isinstance(value, torch.Tensor):
        if aligned and value.data_ptr() % 16 == 0:
            attributes.append((path, "tt.divisibility"))
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        if aligned and by_value and value % 16 == 0:
            attributes.append((path, "tt.divisibility"))
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel takes no {type(value).__name__}; pass tensors, descriptors, numbers, None or constexprs")


def outer_strides(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Every stride but the last. Raises ValueError, naming the tensor, if its last dimension is not contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; kernels need it contiguous")
    return tensor.stride()[:-1]


@triton.jit
def _squares(values, out):
    index = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(values + index)
    tl.store(out + index, tl.dot(x, x).to(tl.bfloat16))


@cache  # of success only: an exception is not remembered
def _require_bfloat16() -> None:
    """Lets the interpreter, which holds bf16 as integers, show that it multiplies and rounds them as numbers."""
    values = ((torch.arange(256) % 13 - 6) / 8).view(16, 16)  # sums are exact in float32 and round either way in bf16
    out = torch.zeros(16, 16, dtype=torch.bfloat16)
    _squares[(1,)](values.to(torch.bfloat16), out)
    if not torch.equal(out, (values @ values).to(torch.bfloat16)):
        raise RuntimeError(
            f"the interpreter of Triton {triton.__version__} computes on the bits of bfloat16; "
            "use float32 or float16 with TRITON_INTERPRET=1, or the reference backend"
        )
