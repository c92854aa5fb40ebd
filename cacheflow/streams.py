"""Streams and events on a CPU: threads that run their work in order and wait for each other only where told to.

The interface is that of CUDA streams, so one back end drives both: work on one stream is ordered, work on two streams
is not, unless one waits for an event that the other recorded.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

Ended = Callable[[float, float, BaseException | None], None]


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> object:
        """Block the calling thread until the point is reached."""


class Stream(Protocol):
    """An ordered queue of work."""

    def run(self, work: Callable[[], None], ended: Ended) -> None:
        """Queue work. ended(start, end, error) is called on the stream's thread, times from time.perf_counter."""

    def record(self) -> Event:
        """An event that is reached when all work queued so far has ended."""

    def wait(self, event: Event) -> None:
        """Let work queued from now on start only after the event."""

    def close(self) -> None:
        """End the stream when its queue is empty."""


class CpuStream:
    """A stream whose work is run by a thread of its own.

    threads: intra-op threads that PyTorch may use for this stream's work.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        started = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(threads, started), name=name, daemon=True)
        self._thread.start()
        started.wait()

    def run(self, work: Callable[[], None], ended: Ended) -> None:
        def timed() -> None:
            error: BaseException | None = None
            start = time.perf_counter()
            try:
                work()
            except BaseException as caught:  # handed to whoever waits for the op, on their thread
                error = caught
            ended(start, time.perf_counter(), error)

        self._queue.put(timed)

    def record(self) -> Event:
        event = threading.Event()
        self._queue.put(event.set)
        return event

    def wait(self, event: Event) -> None:
        self._queue.put(event.wait)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self, threads: int, started: threading.Event) -> None:
        # The number belongs to the calling thread, but a thread's first use of it takes whatever was set last by any
        # thread: streams are therefore started one after the other, and each sets its own and uses it at once.
        torch.set_num_threads(threads)
        torch.get_num_threads()
        started.set()
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                item()


class Job:
    """Work for Workers, which raises nothing. late: called behind it if it was given up before it returned."""

    def __init__(self, work: Callable[[], None], late: Callable[[], None] = lambda: None) -> None:
        self.work = work
        self.late = late
        self.ended = threading.Event()
        self.given_up = False


class Workers:
    """Daemon threads for work that may hang: look-ups in a store and reads from it.

    A worker whose job hangs is given up with it and replaced, so that as many as wanted are always there; when the job
    returns it ends.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._name = name
        self._count = count
        self._lock = threading.Lock()
        for _ in range(count):
            self._start()

    def run(self, job: Job) -> None:
        self._queue.put(job)

    def give_up(self, job: Job) -> bool:
        """The job hangs: start another worker in the place of its own. False: it has ended already."""
        with self._lock:
            if job.ended.is_set():
                return False
            job.given_up = True
        self._start()
        return True

    def close(self) -> None:
        """End all idle workers; those that hang end when they return."""
        for _ in range(self._count):
            self._queue.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job.work()
            with self._lock:
                job.ended.set()
            if job.given_up:
                job.late()
                return
