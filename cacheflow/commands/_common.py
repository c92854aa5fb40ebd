"""What commands share: reading values as people write them, progress, output."""

from __future__ import annotations

import json
import math
import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from cacheflow.engine import Engine

PAGE = 16  # tokens of a page in every command that runs an engine
T = TypeVar("T")
_TOKENS = re.compile(r"(\d+)([km]?)", re.IGNORECASE)


def tokens(text: str) -> int:
    """A number of tokens: "4096", "4K" (times 1024), "1M"."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is no number of tokens; write for example 4096, 4K or 1M")
    return int(match[1]) * 1024 ** ["", "k", "m"].index(match[2].lower())


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0: "40", "2.7e12"."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentTypeError(f"{text!r} is no number above 0; write for example 40 or 2.7e12")
    return value


def listed(item: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A comma-separated list of such values."""

    def read(text: str) -> list[T]:
        return list(dict.fromkeys(item(part) for part in text.split(",")))

    return read


def short(tokens: int) -> str:
    """A number of tokens as it is read by `tokens`: 131072 is "128K"."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def progress(items: Sequence[T], what: str, unit: str = "it") -> Iterable[T]:
    """The items, with a bar on stderr if that is a terminal and they take more than two seconds."""
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(
        items, desc=what, unit=unit, delay=2.0, leave=False, file=sys.stderr, disable=not sys.stderr.isatty()
    )
    return bar


def add_model(parser: Any) -> None:
    """--model, and where and how it runs."""
    parser.add_argument(
        "--model",
        default="demo",
        metavar="FOLDER",
        help="a Hugging Face checkpoint; default: the demo's, downloaded on first use",
    )
    add_device(parser)


def add_device(parser: Any) -> None:
    """--device, --dtype and --backend."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default %(default)s")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default %(default)s"
    )
    parser.add_argument(
        "--backend", choices=("reference", "triton"), help="kernels; default: triton on a GPU, reference on a CPU"
    )


def add_engine(parser: Any) -> None:
    """What an engine and its link can be told."""
    parser.add_argument(
        "--chunk", type=tokens, default="128", help=f"tokens of a chunk, a multiple of {PAGE}; default %(default)s"
    )
    parser.add_argument("--gbps", type=positive, help="put the store behind a link of so many decimal Gbit/s")
    parser.add_argument("--latency", type=positive, metavar="MS", help="milliseconds until a link's first byte")
    parser.add_argument(
        "--costs",
        metavar="COSTS.json",
        help="written by `cacheflow measure --out`; default: measure. What its --learn kept in COSTS.learned.json is "
        "taken up too where costs are refined (not by compare); neither file is changed",
    )


def model_folder(name: str, step: Callable[[str], None]) -> Path:
    """The folder of a checkpoint; "demo" is the demo's model, made on first use."""
    if name != "demo":
        return Path(name)
    from cacheflow import demo_model

    model = demo_model.ensure(step)
    if not model.tokenizer:
        print(f"cacheflow: {model.label}", file=sys.stderr)
    return model.folder


@contextmanager
def engine(
    args: Namespace,
    folder: Path,
    policy: str = "pipelined",
    cache_tokens: int = 16384,
    link: bool = False,
    learn: bool | None = None,
) -> Iterator[Engine]:
    """An engine over the store that the arguments name, behind a link if they, or the caller, want one.

    learn: see Engine; if it may, it goes on from what was learned over the costs that the arguments name.
    """
    import torch

    from cacheflow.costs.base import ModelShape
    from cacheflow.costs.learned import Learned, beside
    from cacheflow.costs.measure import link_of
    from cacheflow.costs.measured import Measured
    from cacheflow.engine import Engine
    from cacheflow.stores import Link, Store, open_store

    gbps, latency, costs_file = (getattr(args, name, None) for name in ("gbps", "latency", "costs"))
    store: Store = open_store(args.store)
    if link or gbps or latency:
        store = Link(store, gbps=gbps or math.inf, latency=(latency or 0.0) / 1e3)
    with (
        closing(store),
        Engine(
            folder,
            store,
            policy=policy,
            device=args.device,
            dtype=getattr(torch, args.dtype),
            backend=args.backend,
            chunk_tokens=getattr(args, "chunk", 128),
            page_size=PAGE,
            cache_tokens=cache_tokens,
            learn=learn,
        ) as made,
    ):
        if costs_file is not None:
            shape = ModelShape.of(made.model.config, made.model.dtype.itemsize)
            made.costs = measured = Measured.load(costs_file, shape, **link_of(store, made.layout))
            if learn is not False and beside(costs_file).exists():
                made.costs = Learned.load(beside(costs_file), measured, machine=made.machine)
        yield made


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done, in one line on stderr if that is a terminal."""
    from tqdm import tqdm

    with tqdm(bar_format="{desc} {elapsed}", leave=False, file=sys.stderr, disable=not sys.stderr.isatty()) as line:
        yield line.set_description_str


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str], right: Iterable[int] = ()) -> str:
    """A table of text; columns are left-aligned but for those in `right`."""
    from tabulate import tabulate

    numbers = set(right)
    align = ["right" if i in numbers else "left" for i in range(len(headers))]
    return str(tabulate(list(rows), headers=headers, colalign=align, disable_numparse=True))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def writable(text: str) -> Path:
    """A file to write, in a folder that exists."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"{text!r} cannot be written; name a file in a folder that exists")
    return path
