"""What only kernels that are not interpreted can tell, as JSON; tests run it as a process of its own."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

import kernels
from kernels import aot, triton_ops
from kernels.batch import Part, RaggedBatch
from kernels.launch import Launch, Shape
from kernels.variants import Variant, with_window

TARGET = "cuda:90"
PAGE, LAYERS, HIDDEN, WINDOW = 16, 3, 64, 600


def kernels_without_case() -> list[str]:
    """Launched kernels of the package that `aot_cases` of no module compiles."""
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(kernels.__path__, "kernels.")]
    functions = {
        x
        for module in modules
        for name, x in vars(module).items()
        if isinstance(x, triton.JITFunction) and name.endswith("_kernel")
    }
    compiled = {case.launch.kernel for target in aot.TARGETS for _, case in aot.find_cases(target)}
    return sorted(x.__name__ for x in functions - compiled)


def repeated_cases() -> list[str]:
    """Names that two cases of a module share."""
    names = [f"{module}: {case.name}" for module, case in aot.find_cases(TARGET)]
    return sorted({name for name in names if names.count(name) > 1})


def wrongly_classified() -> list[str]:
    """Arguments that Triton compiles for other than `Launch.specialisation` says."""
    wrong = set()
    for module, case in aot.find_cases(TARGET):
        launch = case.launch
        made = launch.specialisation()
        types, constants, attributes = dict(made.types), dict(made.constants), dict(made.attributes)
        for index, parameter in enumerate(launch.kernel.params):
            value = launch.arguments.get(parameter.name, parameter.default)
            if parameter.is_constexpr:
                same = constants[(index,)] == value
            else:
                by_value = not parameter.do_not_specialize
                aligned = by_value and not parameter.do_not_specialize_on_alignment
                kind, known = native_specialize_impl(BaseBackend, value, False, by_value, aligned)
                same = kind == types[parameter.name] and _flat((index,), known) == {
                    path: attributes.get(path, constants.get(path))
                    for path in _paths((index,), kind)
                    if path in attributes or constants.get(path) is not None
                }
            if not same:
                wrong.add(f"{module}: {case.name}: {parameter.name} = {value}")
    return sorted(wrong)


def _paths(path: tuple[int, ...], kind: Any) -> list[tuple[int, ...]]:
    return [(*path, i) for i in range(len(kind))] if isinstance(kind, tuple) else [path]


def _flat(path: tuple[int, ...], known: Any) -> dict[tuple[int, ...], Any]:
    """What Triton knows of a value, by path: "D" is its word for divisible by 16."""
    if isinstance(known, tuple):
        return {(*path, i): _flat(path, x).get(path) for i, x in enumerate(known) if _flat(path, x)}
    return {} if known in (None, "") else {path: "tt.divisibility" if known == "D" else known}


def unforeseen() -> tuple[int, list[str]]:
    """How many specialisations warm-up compiles for a model with and without windows, and those that ops of many sizes
    meet besides."""
    heads, kv_heads, width = 4, 2, 32
    base = torch.zeros(2, LAYERS, 64, PAGE, kv_heads, width, dtype=torch.bfloat16)
    shape = Shape(HIDDEN, 96, heads, base[0, 0], base[1, 0], qkv_bias=True, qk_norm=True)
    variants = Variant("causal"), with_window(None, WINDOW)
    foreseen = {launch.specialisation() for launch in triton_ops.launches(shape, TARGET, variants)}
    met = {}
    Launch.run = lambda self: met.setdefault(self.specialisation(), self)
    for module in ("recompute", "attention"):
        importlib.import_module(f"kernels.{module}").target_of = lambda device: TARGET
    rows = (heads + 2 * kv_heads) * width
    one = {name: torch.zeros(n, dtype=torch.bfloat16) for name, n in (("h", HIDDEN), ("r", rows), ("w", width))}
    table = torch.zeros(2048, width // 2)
    for start, stop in ((0, 1), (3, 4), (0, 15), (1, 17), (0, 64), (5, 133), (0, 512), (100, 1000)):
        parts = [Part(start, stop, range(64)), Part(0, 7, [63], project=False)]
        batch = RaggedBatch.build(parts, PAGE)
        for selected in (batch, batch.projected.batch):
            hidden = torch.zeros(1100, HIDDEN, dtype=torch.bfloat16)[3 : 3 + selected.num_tokens]
            for form in ("qkv", "kv", "q"):
                triton_ops.recompute(
                    hidden,
                    form=form,
                    batch=selected,
                    norm_weight=one["h"],
                    qkv_weight=torch.zeros(rows, HIDDEN, dtype=torch.bfloat16),
                    qkv_bias=one["r"],
                    q_norm_weight=one["w"],
                    k_norm_weight=one["w"],
                    eps=1e-6,
                    cos=table,
                    sin=table,
                    k_pages=base[0, 1],
                    v_pages=base[1, 1],
                )
            q = torch.zeros(selected.num_tokens, heads, width, dtype=torch.bfloat16)
            for window in (None, WINDOW):
                triton_ops.attention(q, base[0, 2], base[1, 2], batch=selected, scale=0.1, window=window)
            triton_ops.rms_norm(hidden, one["h"], 1e-6)
            triton_ops.activation(torch.zeros(selected.num_tokens, 192, dtype=torch.bfloat16))
        for layers in (range(1), range(LAYERS)):
            staging = torch.zeros(len(layers), 2, kv_heads, stop - start, width, dtype=torch.bfloat16)
            for part in (0, 1):
                pages = base[part, layers.start : layers.stop]
                triton_ops.pages_from_staging(staging[:, part], pages, batch.slots[: stop - start])
                triton_ops.staging_from_pages(pages, batch.slots[: stop - start].abs(), staging[:, part])
    return len(foreseen), sorted(f"{made.kernel} {made}" for made in met.keys() - foreseen)


def main() -> None:
    """Prints all of the above."""
    count, besides = unforeseen()
    found = {
        "without_case": kernels_without_case(),
        "repeated": repeated_cases(),
        "wrongly_classified": wrongly_classified(),
        "foreseen": count,
        "unforeseen": besides,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
