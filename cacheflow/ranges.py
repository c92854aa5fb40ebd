"""NVTX ranges in the domain `cacheflow`, for Nsight Systems; nothing happens without the nvtx package.

On unless the environment says CACHEFLOW_NVTX=0 when the first range is opened; without a profiler a range costs about
0.1 us more than when off. Spawn worker processes, do not fork them: a profiler attaches to a process as it starts, and
what a forked child does is lost.
"""

from __future__ import annotations

import functools
import os
from types import TracebackType
from typing import Any

DOMAIN = "cacheflow"


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

    name: from a small set, for NVTX keeps every one; what varies goes into the payload. kind: the category, "compute"
    or "fetch". payload: a number to show with the range, tokens or bytes.
    """

    __slots__ = ("_domain", "_kind", "_name", "_payload")

    def __init__(self, name: str, kind: str | None = None, payload: float | None = None) -> None:
        self._name = name
        self._kind = kind
        self._payload = payload

    def __enter__(self) -> None:
        self._domain = domain()  # the pop must meet its push even if the recorder changes in between
        if self._domain is not None:
            self._domain.push_range(message=self._name, category=self._kind, payload=self._payload)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._domain is not None:
            self._domain.pop_range()


def start(name: str, kind: str | None = None, payload: float | None = None) -> Any:
    """Open a range that another thread may close, with `end`; what is returned is for `end` only."""
    here = domain()
    return None if here is None else (here, here.start_range(message=name, category=kind, payload=payload))


def end(started: Any) -> None:
    """Close what `start` opened."""
    if started is not None:
        started[0].end_range(started[1])
