"""Streams, events and staging on a GPU. Everything that the steady state needs is made once: nothing here allocates
device memory or synchronises the device while requests are restored."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cacheflow.devices import Staging
from cacheflow.op import COPY
from cacheflow.streams import Ended, Event
from kernels.batch import to_device

EVENTS = 16  # pairs that a stream begins with; more are made while more work is queued


class CudaDevice:
    """One GPU. device: "cuda" or "cuda:N"."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._clock = _Clock(self.torch_device)

    def stream(self, name: str) -> CudaStream:
        # Copies into pages take little of the GPU and compute waits for them: their blocks go first.
        return CudaStream(name, self.torch_device, self._clock, priority=-1 if name == COPY else 0)

    def staging(self, nbytes: int) -> Staging:
        # Pinned memory begins at a page, as direct I/O wants it.
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return Staging(host, torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device))

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return to_device(tensors, self.torch_device)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


class _Clock:
    """Times of CUDA events on the clock of time.perf_counter."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin.synchronize()
        self._start = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        """When an event was reached."""
        return self._start + self._origin.elapsed_time(event) / 1e3


@dataclass(eq=False)
class CudaEvent:
    """The end of some work of a stream.

    end: may have been recorded anew for later work of the same stream, once this work has ended: who then waits for it
    waits longer than needed, never too short. reached: set when the work has ended and its `ended` was called.
    """

    end: torch.cuda.Event | None = None
    reached: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Block the calling thread until the work has ended and whoever asked was told."""
        self.reached.wait()


@dataclass(frozen=True)
class _Launched:
    start: torch.cuda.Event
    point: CudaEvent
    ended: Ended
    error: BaseException | None


class CudaStream:
    """A CUDA stream. Work is launched by the thread that queues it; a thread of its own waits for it to end.

    The interface is that of CpuStream, with one difference that its users know: work launches, so what it gives back
    is there only when `ended` is called.
    """

    def __init__(self, name: str, device: torch.device, clock: _Clock, priority: int = 0) -> None:
        self._clock = clock
        self._stream = torch.cuda.Stream(device, priority=priority)
        self._pairs: queue.SimpleQueue[tuple[torch.cuda.Event, torch.cuda.Event]] = queue.SimpleQueue()
        with torch.cuda.stream(self._stream):
            for _ in range(EVENTS):
                start, end = _pair()
                start.record()  # an event is only made when it is recorded for the first time
                end.record()
                self._pairs.put((start, end))
        self._last = CudaEvent()
        self._last.reached.set()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"cacheflow-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None], ended: Ended) -> None:
        start, end = self._pair()
        error: BaseException | None = None
        with torch.cuda.stream(self._stream), torch.inference_mode():
            start.record()
            try:
                work()
            except BaseException as caught:  # handed to whoever waits for the op, when what it launched has ended
                error = caught
            end.record()
        self._last = CudaEvent(end)
        self._launched.put(_Launched(start, self._last, ended, error))

    def record(self) -> Event:
        return self._last

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        if not event.reached.is_set():
            assert event.end is not None
            self._stream.wait_event(event.end)

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join()

    def _pair(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        try:
            return self._pairs.get_nowait()
        except queue.Empty:
            return _pair()

    def _watch(self) -> None:
        while (launched := self._launched.get()) is not None:
            end = launched.point.end
            assert end is not None
            error = launched.error
            times = (0.0, 0.0)
            try:
                end.synchronize()
                times = self._clock.seconds(launched.start), self._clock.seconds(end)
            except RuntimeError as broken:  # a kernel failed: CUDA says so to whoever asks next
                error = error or broken
            launched.ended(*times, error)
            launched.point.reached.set()
            self._pairs.put((launched.start, end))


def _pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events that are timed, and that a thread may sleep on."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
