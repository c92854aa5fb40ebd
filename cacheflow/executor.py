"""The loop's back end in real time: compute and copy streams, fetch workers, bounded staging."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cacheflow.costs.base import Costs
from cacheflow.devices import Device, Staging
from cacheflow.loop import AHEAD, Completion, Failures
from cacheflow.op import COMPUTE, COPY, FETCH, SAVE, Op, Part
from cacheflow.sessions import Landing, Prepared, Session, Sessions, alike, staged
from cacheflow.stores.base import ERROR, TIMEOUT, Store, WriteResult
from cacheflow.stores.layout import Layout
from cacheflow.streams import Event, Job, Stream, Workers
from cacheflow.timeline import Span, Timeline
from kernels import ranges
from models.decoder import Decoder

T = TypeVar("T")

STORE = "store"  # the stream that saves
# What an op's NVTX range shows. request: ids, joined by commas and cut. chunks: columns, from the first on.
PAYLOAD = np.dtype(
    [("request", "U32"), *((name, "i8") for name in ("first_chunk", "chunks", "first_layer", "layers", "bytes"))]
)


@dataclass(eq=False)
class Fetch:
    """A fetch in flight. The staging buffer stays with it until its copy has ended or, when it was given up after the
    deadline, until the store returns: a late write must not hit a buffer that somebody else uses by then."""

    op: Op
    buffer: Staging
    landings: list[Landing]
    deadline: float
    job: Job
    start: float = 0.0
    end: float = 0.0
    reasons: list[str | None] = field(default_factory=list)


class Executor:
    """Runs ops. All methods are called on the loop's thread; work runs on streams and workers.

    device: where the model is. streams: makes a stream from its name; None: the device's.
    staging_bytes: of each of the AHEAD staging buffers.
    timeout: seconds that a fetch may take beyond three times its estimate before it counts as lost.
    """

    def __init__(
        self,
        model: Decoder,
        sessions: Sessions,
        store: Store,
        costs: Costs,
        device: Device,
        *,
        staging_bytes: int,
        timeout: float,
        streams: Callable[[str], Stream] | None = None,
    ) -> None:
        self.model = model
        self.sessions = sessions
        self.store = store
        self.costs = costs
        self.device = device
        self.timeout = timeout
        self.timeline = Timeline()
        self._origin = time.perf_counter()
        make = streams or device.stream
        self.compute, self.copy, self.offload = (make(name) for name in (COMPUTE, COPY, STORE))
        self._workers = Workers(AHEAD, "cacheflow-fetch")
        self._staging = [device.staging(staging_bytes) for _ in range(AHEAD)]
        for buffer in self._staging:
            store.register(buffer.host.numpy())
        self._saving = threading.Semaphore(AHEAD)  # what is being saved is bounded, as what is being loaded is
        self._buffers = list(self._staging)  # those that are free
        self._fetches: list[Fetch] = []
        self._hanging: list[Fetch] = []  # given up, and the store has not returned
        self._copies = 0
        self._copied: dict[str, dict[int, tuple[int, Event]]] = {}  # by request and layer: the latest copy, numbered
        self._link_free = 0.0
        self._ended: queue.SimpleQueue[Callable[[], Completion | None]] = queue.SimpleQueue()

    # The loop's protocol

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def can_take(self, kind: str) -> bool:
        if kind != FETCH:
            return True
        for fetch in [fetch for fetch in self._hanging if fetch.job.ended.is_set()]:
            self._hanging.remove(fetch)
            self._buffers.append(fetch.buffer)
        # While the store holds all staging, fetches are taken, and fail at once: a request waits for one timeout of
        # each buffer, not for one of each chunk.
        return bool(self._buffers) or len(self._hanging) == len(self._staging)

    def submit(self, op: Op, landed: Completion | None = None) -> None:
        if op.kind == COMPUTE:
            self._submit_compute(op)
        elif op.kind == FETCH:
            self._submit_fetch(op)
        else:
            assert landed is not None and isinstance(landed.handle, Fetch)
            self._submit_copy(op, landed.handle)

    def wait(self) -> Iterable[Completion]:
        completions: list[Completion] = []
        try:
            take = self._ended.get(timeout=self._seconds_to_deadline())
            while True:
                completion = take()
                if completion is not None:
                    completions.append(completion)
                take = self._ended.get_nowait()
        except queue.Empty:
            return completions + self._expire()

    def drain(self) -> None:
        """After an error: let everything in flight end, and forget what it was for."""
        for stream in (self.compute, self.copy):
            stream.record().wait()
        for fetch in self._fetches:
            fetch.job.ended.wait(max(0.0, fetch.deadline - time.perf_counter()))
            if self._workers.give_up(fetch.job):
                self._hanging.append(fetch)
        self._fetches.clear()
        self._copied.clear()
        while not self._ended.empty():
            self._ended.get()
        hanging = [fetch.buffer for fetch in self._hanging]
        self._buffers = [buffer for buffer in self._staging if not any(buffer is held for held in hanging)]

    def wake(self) -> None:
        """Let `wait` return. May be called from any thread."""
        self._ended.put(lambda: None)

    def forget(self, request: str) -> None:
        """Drop what is kept for a request that has nothing in flight."""
        self._copied.pop(request, None)

    def close(self) -> None:
        for stream in (self.compute, self.copy, self.offload):
            stream.close()
        self._workers.close()

    # Compute

    def _submit_compute(self, op: Op) -> None:
        prepared = self.sessions.prepare(op)
        copied = (self._copied.get(request, {}).get(layer) for request in op.requests for layer in op.layers)
        latest = max(filter(None, copied), key=lambda copy: copy[0], default=None)
        if latest is not None:
            # The op attends to cells of its layers that copies queued so far are still writing into pages. These end in
            # order: the latest is enough.
            self.compute.wait(latest[1])
        self.compute.run(lambda: self._run(prepared), self._reporter(op))

    def _run(self, prepared: Prepared) -> None:
        """Work of the compute stream."""
        op, model, states = prepared.op, self.model, self.sessions.hidden.states
        with ranges.span(op.kind, op.kind, lambda: self._payload(op)):
            batch = prepared.batch.to(self.device.torch_device)
            if prepared.tokens is not None:
                hidden = model.embed(*self._put(prepared.tokens))
            else:
                assert prepared.rows is not None
                hidden = states[self._rows(prepared.rows)]
            model.forward(op.layers, batch, hidden, self.sessions.pages.layers)
            if prepared.keep is not None:
                batch_rows, pool_rows = prepared.keep
                states[self._rows(pool_rows)] = hidden[self._rows(batch_rows)]
            for session, row in prepared.sampled:
                logits = model.logits(hidden[row : row + 1])[0]
                session.logits, session.sampled = self.device.get(logits), self.device.get(logits.argmax())

    def _put(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return self.device.put(tensors)

    def _rows(self, rows: slice | torch.Tensor) -> slice | torch.Tensor:
        return rows if isinstance(rows, slice) else self._put(rows)[0]

    def _payload(self, op: Op) -> NDArray[np.void]:
        """What an op's range shows."""
        columns = [self.sessions[part.request].plane.columns_of(part) for part in op.parts]
        chunks = sum(last - first for first, last in columns)
        first = min(first for first, _ in columns)
        names = ",".join(op.requests)[:32]
        return np.array((names, first, chunks, op.layers.start, len(op.layers), self._bytes(op)), PAYLOAD)

    def _reporter(self, op: Op, after: Callable[[], None] = lambda: None) -> Callable[..., None]:
        """What a stream calls when an op ended: the completion is taken by the loop's thread."""

        def ended(start: float, end: float, error: BaseException | None) -> None:
            def take() -> Completion:
                if error is not None:
                    raise error
                after()
                return self._complete(op, start, end)

            self._ended.put(take)

        return ended

    def _complete(self, op: Op, start: float, end: float, failures: Failures = (), handle: object = None) -> Completion:
        start, end = start - self._origin, end - self._origin
        self.timeline.add(Span(op, op.kind, start, end, self._bytes(op)))
        return Completion(op, start, end, failures, handle)

    def _bytes(self, op: Op) -> int:
        return 0 if op.kind == COMPUTE else op.tokens * len(op.layers) * self.costs.shape.cell_bytes

    def call(self, work: Callable[[], T]) -> T:
        """Run something on the compute stream, behind what is queued there, and wait for its result."""
        result: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        value: list[T] = []
        self.compute.run(lambda: value.append(work()), lambda start, end, error: result.put(error))
        try:
            error = result.get()
        except BaseException:  # interrupted: the caller would give back the pages that the work goes on using
            self.compute.record().wait()
            raise
        if error is not None:
            raise error
        return value[0]

    # Saving

    def save(
        self, session: Session, start: int, layout: Layout, key: str, ended: Callable[[WriteResult], None]
    ) -> None:
        """Write tokens [start, start + layout.tokens) of a session to the store, once all that was queued has run.

        Waits while AHEAD objects are on their way. ended is called on another thread; the session's pages must stay
        until then.
        """
        self._saving.acquire()
        # What was queued so far fills these cells; without the two events stale pages could be stored.
        for stream in (self.compute, self.copy):
            self.offload.wait(stream.record())
        part = Part(session.plane.request.id, start, start + layout.tokens)
        op = Op(SAVE, range(layout.layers), (part,))
        slots = session.slots[part.start : part.stop]
        gathered: list[torch.Tensor] = []
        started = ranges.start(SAVE, SAVE, lambda: layout.nbytes)  # ends on another thread

        def work() -> None:
            pages = self.sessions.pages
            shape = (layout.layers, len(layout.parts), layout.kv_heads, layout.tokens, layout.parts[0].width)
            staging = torch.empty(shape, dtype=self.sessions.dtype, device=self.device.torch_device)
            [places] = self._put(slots)
            self.model.ops.staging_from_pages(pages.k, places, staging[:, 0])
            self.model.ops.staging_from_pages(pages.v, places, staging[:, 1])
            gathered.append(self.device.get(staging))

        def write(begun: float, end: float, error: BaseException | None) -> None:
            result = WriteResult(ok=False, reason=ERROR, nbytes=0)
            try:
                if error is None:
                    result = self.store.write(key, layout, gathered[0].view(torch.uint8).numpy().reshape(-1))
            except Exception:  # a store that raises has not stored; that is all that saving needs to know
                pass
            finally:
                ranges.end(started)
                self._saving.release()
                done = time.perf_counter()
                self.timeline.add(Span(op, STORE, begun - self._origin, done - self._origin, layout.nbytes))
                ended(result)

        self.offload.run(work, write)

    def flush(self) -> None:
        """Wait until everything to be saved is written or refused."""
        saved = self.offload.record()
        try:
            saved.wait()
        except BaseException:  # interrupted: pages given back now could be stored with another prompt's KV
            saved.wait()
            raise

    # Fetch and copy

    def _submit_fetch(self, op: Op) -> None:
        now = time.perf_counter()
        if not self._buffers:
            failures = tuple((part, TIMEOUT) for part in op.parts)
            self._ended.put(lambda: self._complete(op, now, now, failures))
            return
        buffer = self._buffers.pop()
        patience = self.timeout + 3 * (self.costs.latency + AHEAD * self.costs.seconds(op))
        job = Job(lambda: self._fetch(fetch))
        fetch = Fetch(op, buffer, self.sessions.landings(op, buffer), deadline=now + patience, job=job)
        self._fetches.append(fetch)
        self._workers.run(job)

    def _fetch(self, fetch: Fetch) -> None:
        """On a worker's thread."""
        fetch.start = time.perf_counter()
        try:
            with ranges.span(FETCH, FETCH, lambda: self._payload(fetch.op)):
                results = self.store.read([landing.read for landing in fetch.landings])
            fetch.reasons = [
                None if result.ok else result.reason or ERROR for result, _ in zip(results, fetch.landings, strict=True)
            ]
        except Exception:  # a store that answers with anything but a result for each read is one of these
            fetch.reasons = [ERROR] * len(fetch.landings)
        fetch.end = time.perf_counter()
        self._ended.put(lambda: self._arrived(fetch))

    def _arrived(self, fetch: Fetch) -> Completion | None:
        if fetch not in self._fetches:
            return None  # given up
        self._fetches.remove(fetch)
        failures = tuple(
            (landing.part, reason)
            for landing, reason in zip(fetch.landings, fetch.reasons, strict=True)
            if reason is not None
        )
        if len(failures) == len(fetch.landings):
            self._buffers.append(fetch.buffer)
        # Fetches that are in flight together share the link: each counts from the end of the one before it.
        start = min(max(fetch.start, self._link_free), fetch.end)
        self._link_free = max(fetch.end, self._link_free)
        return self._complete(fetch.op, start, fetch.end, failures, fetch)

    def _seconds_to_deadline(self) -> float | None:
        if not self._fetches:
            return None
        return max(0.0, min(fetch.deadline for fetch in self._fetches) - time.perf_counter())

    def _expire(self) -> list[Completion]:
        now = time.perf_counter()
        completions = []
        for fetch in [fetch for fetch in self._fetches if fetch.deadline <= now]:
            if not self._workers.give_up(fetch.job):
                continue  # it has just arrived: the next wait takes it
            self._fetches.remove(fetch)
            self._hanging.append(fetch)
            failures = tuple((landing.part, TIMEOUT) for landing in fetch.landings)
            completions.append(self._complete(fetch.op, fetch.start or now, now, failures))
        return completions

    def _submit_copy(self, op: Op, fetch: Fetch) -> None:
        landings = [x for x, reason in zip(fetch.landings, fetch.reasons, strict=True) if reason is None]
        self.copy.run(
            lambda: self._copy(op, landings, fetch.buffer),
            self._reporter(op, lambda: self._buffers.append(fetch.buffer)),
        )
        self._copies += 1
        copy = self._copies, self.copy.record()
        for request in op.requests:
            self._copied.setdefault(request, {}).update(dict.fromkeys(op.layers, copy))

    def _copy(self, op: Op, landings: list[Landing], buffer: Staging) -> None:
        """Work of the copy stream."""
        pages = self.sessions.pages
        band = slice(op.layers.start, op.layers.stop)
        with ranges.span(COPY, COPY, lambda: self._payload(op)):
            if buffer.device is not buffer.host:
                used = slice(landings[0].start, landings[-1].start + landings[-1].read.nbytes)
                buffer.device[used].copy_(buffer.host[used], non_blocking=True)
            groups = list(alike(landings))
            slots = self.device.put([torch.stack([landing.slots for landing in group]) for group in groups])
            for group, places in zip(groups, slots, strict=True):
                staging = staged(group, buffer.device, self.sessions.dtype)
                self.model.ops.pages_from_staging(staging[:, :, 0], pages.k[band], places)
                self.model.ops.pages_from_staging(staging[:, :, 1], pages.v[band], places)
