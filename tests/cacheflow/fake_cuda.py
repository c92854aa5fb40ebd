"""A torch.cuda that records: what is launched runs at once on the host, and every call is kept in order."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

Call = tuple[Any, ...]


class FakeCuda:
    """calls: ("stream", number), ("event", number), ("record", event, stream), ("wait", stream, event),
    ("synchronize", event), ("pinned", bytes), ("memory", bytes) for a device tensor that is asked for by name, and
    ("device synchronize",); every one with the name of the thread behind it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self.slow = 0.0  # seconds that an event takes to be reached
        self._numbers = itertools.count()
        self._current = threading.local()
        made, this = torch.empty, self

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self.number = this.log("event", next(this._numbers))
                self.timed = enable_timing
                self.time: float | None = None

            def record(self) -> None:
                self.time = time.perf_counter()
                this.log("record", self.number, this.current)

            def synchronize(self) -> None:
                this.log("synchronize", self.number)
                time.sleep(this.slow)

            def elapsed_time(self, other: Event) -> float:
                assert self.timed and other.timed and self.time is not None and other.time is not None
                return (other.time - self.time) * 1e3

        class Stream:
            def __init__(self, device: torch.device, priority: int = 0) -> None:
                self.number = this.log("stream", next(this._numbers))

            def wait_event(self, event: Event) -> None:
                assert event.time is not None, "waiting for an event that was not recorded does nothing"
                this.log("wait", self.number, event.number)

            def synchronize(self) -> None:
                this.log("device synchronize")

        def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            tensor = made(*size, **options)
            if pin_memory:
                this.log("pinned", tensor.nbytes)
            return tensor

        @contextmanager
        def stream(entered: Stream) -> Iterator[None]:
            before, self._current.stream = self.current, entered.number
            try:
                yield
            finally:
                self._current.stream = before

        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "synchronize", lambda device=None: self.log("device synchronize"))

    @property
    def current(self) -> int | None:
        """The number of the stream that the calling thread is in."""
        return getattr(self._current, "stream", None)

    def log(self, name: str, *values: Any) -> Any:
        self.calls.append((name, *values, threading.current_thread().name))
        return values[0] if values else None

    def named(self, name: str, since: int = 0) -> list[Call]:
        return [call for call in self.calls[since:] if call[0] == name]
