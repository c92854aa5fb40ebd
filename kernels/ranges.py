"""NVTX ranges in the domain `cacheflow`, for Nsight Systems; nothing happens without the nvtx package.

On unless the environment says CACHEFLOW_NVTX=0 when the first range is opened; without a profiler a range costs about
a microsecond more than when off. Spawn worker processes, do not fork them: a profiler attaches to a process as it
starts, and what a forked child does is lost.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

DOMAIN = "cacheflow"
COLORS = {"compute": 0x4CAF50, "fetch": 0x2196F3, "copy": 0xFF9800, "save": 0x9C27B0, "kernel": 0x9E9E9E}  # RGB


@functools.cache
def domain() -> Any:
    """The NVTX domain; None where ranges are off or the package is missing."""
    if os.environ.get("CACHEFLOW_NVTX") == "0":
        return None
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx.get_domain(DOMAIN)


class span:
    """A range around the work of one thread, as a context manager; closed on exceptions too.

    name: from a small set, for NVTX keeps every one; what varies goes into the payload. kind: the category, of a small
        set too; those in COLORS have a colour.
    payload: makes what to show with the range, a number or a NumPy record; called only where ranges are on.
    """

    __slots__ = ("_domain", "_kind", "_name", "_payload")

    def __init__(self, name: str, kind: str | None = None, payload: Callable[[], Any] | None = None) -> None:
        self._name = name
        self._kind = kind
        self._payload = payload

    def __enter__(self) -> None:
        self._domain = domain()  # the pop must meet its push even if the recorder changes in between
        if self._domain is not None:
            self._domain.push_range(**_attributes(self._name, self._kind, self._payload))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._domain is not None:
            self._domain.pop_range()


def start(name: str, kind: str | None = None, payload: Callable[[], Any] | None = None) -> Any:
    """Open a range that another thread may close, with `end`; what is returned is for `end` only."""
    here = domain()
    return None if here is None else (here, here.start_range(**_attributes(name, kind, payload)))


def end(started: Any) -> None:
    """Close what `start` opened."""
    if started is not None:
        started[0].end_range(started[1])


def _attributes(name: str, kind: str | None, payload: Callable[[], Any] | None) -> dict[str, Any]:
    return dict(
        message=name,
        color=COLORS.get(kind or ""),
        category=kind,
        payload=None if payload is None else payload(),
    )
