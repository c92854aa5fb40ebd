"""A stream of prompts on several GPUs with one store between them, in virtual time.

Every GPU has a link of its own to the store, and prefills only: once its first token is out a request leaves, as where
prefill and decode are apart. What it computed is in the store from then on; writing takes nothing of what reads need.
"""

from __future__ import annotations

import copy
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cacheflow import bounds
from cacheflow.arrivals import Prompt
from cacheflow.costs.base import Costs
from cacheflow.eviction import Chunk, ChunkStore
from cacheflow.loop import Completion
from cacheflow.op import COMPUTE, FETCH, Op
from cacheflow.plane import LOADED, Plane
from cacheflow.policies.base import Policy
from cacheflow.simulate import Pending, Server, drive


@dataclass(frozen=True, slots=True)
class Served:
    """A prompt that has its first token. arrived, done: seconds. gpu: its index.

    again: whether more than its first chunk, which is often a preamble that all share, was part of a prompt before it.
    found: tokens that the store had when it arrived. loaded: of them those that were loaded, a share of a token for
        every layer of it. bound: seconds that it would take at least, were it alone.
    """

    id: str
    gpu: int
    arrived: float
    done: float
    tokens: int
    again: bool
    found: int
    loaded: float
    bound: float

    @property
    def ttft(self) -> float:
        return self.done - self.arrived


@dataclass
class Outcome:
    """What became of a stream.

    served: in the order of their first tokens. busy: seconds inside ops by kind, all GPUs together. evicted, refused:
    see ChunkStore.
    """

    gpus: int
    served: list[Served] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, FETCH: 0.0})
    evicted: int = 0
    refused: int = 0

    def add(self, done: Completion) -> None:
        if done.op.kind in self.busy:
            self.busy[done.op.kind] += done.end - done.start

    @property
    def returning(self) -> list[Served]:
        """Those that a store without limit may have had more of than a preamble: the same whatever is dropped."""
        return [request for request in self.served if request.again]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last first token."""
        return max(r.done for r in self.served) - min(r.arrived for r in self.served)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.served) / self.seconds

    @property
    def carried(self) -> float:
        """Requests per second were the busier of compute and link always at work: of a closed loop what the GPUs carry,
        without the end, at which some of them have nothing left."""
        return self.rate / max(self.busy_share(COMPUTE), self.busy_share(FETCH))

    @property
    def hit_share(self) -> float:
        """Of all tokens those that the store had."""
        return sum(r.found for r in self.served) / sum(r.tokens for r in self.served)

    @property
    def recompute_share(self) -> float:
        """Of the tokens that the store had those that were computed nonetheless; 0 if it had none."""
        found = sum(r.found for r in self.served)
        return 1 - sum(r.loaded for r in self.served) / found if found else 0.0

    def busy_share(self, kind: str) -> float:
        """The share of all GPUs' time inside ops of a kind."""
        return self.busy[kind] / (self.gpus * self.seconds)


def quantiles(requests: Sequence[Served]) -> dict[str, float]:
    """Mean, p50, p95 and p99 of the time to first token, in seconds; nothing for no requests."""
    if not requests:
        return {}
    ttft = [request.ttft for request in requests]
    return {"mean": float(np.mean(ttft)), **{f"p{q}": float(np.percentile(ttft, q)) for q in (50, 95, 99)}}


def remembering(costs: Costs) -> Costs:
    """The same costs, but the last op is not worked out again: virtual time asks for what a policy has just asked."""
    same = copy.copy(costs)
    last: tuple[Op | None, float] = None, 0.0

    def seconds(op: Op) -> float:
        nonlocal last
        if last[0] is not op:
            last = op, costs.seconds(op)
        return last[1]

    same.seconds = seconds  # type: ignore[method-assign]
    return same


def run(
    make: Callable[[], Policy],
    prompts: Sequence[Prompt],
    store: ChunkStore,
    *,
    gpus: int = 1,
    at_once: int = 16,
    users: int | None = None,
    think: float = 0.0,
    seed: int = 0,
) -> Outcome:
    """Serve all prompts.

    make: a policy for one GPU; its costs are what ops take.
    at_once: requests that a GPU restores at a time. Others wait there in the order of their arrival.
    users: None: prompts arrive at their times. Otherwise a closed loop of so many users, who take the prompts in their
        order; each comes with the next an exponential think time, of `think` seconds in the mean, after its last.

    A prompt goes to the GPU with the least work: the sum, over its requests without a first token, of the least seconds
    that each takes alone; of equals to the first. What the store has of it is looked up, and kept, when it arrives.
    Raises ValueError for prompts that are not in the order of their arrival.
    """
    if gpus < 1 or at_once < 1 or (users is not None and users < 1) or think < 0:
        raise ValueError(
            f"gpus {gpus}, at_once {at_once} and users {users} must be at least 1, think {think} at least 0"
        )
    if users is None and any(a.at > b.at for a, b in pairwise(prompts)):
        raise ValueError("prompts must be in the order of their arrival; sort them by `at`")
    return _Run(make, prompts, store, gpus, at_once, users, think, seed).outcome


class _Gpu:
    """work: seconds by request, see `run`."""

    def __init__(self, index: int, policy: Policy, at_once: int, outcome: Outcome, done: _Done) -> None:
        self.index = index
        self.at_once = at_once
        self.work: dict[str, float] = {}
        self.waiting: deque[Plane] = deque()
        self.server = Server(
            policy,
            policy.costs,
            record=outcome.add,
            on_done=lambda plane, now: done(self, plane, now),
            on_drained=lambda plane: self.admit(),
        )

    def admit(self) -> None:
        while self.waiting and len(self.server.policy.planes) < self.at_once:
            self.server.add(self.waiting.popleft())


_Done = Callable[[_Gpu, Plane, float], None]


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What is known of a request that was not served yet."""

    arrived: float
    prompt: Prompt
    chunks: list[Chunk]
    found: list[Chunk]
    again: bool
    bound: float


class _Run:
    def __init__(
        self,
        make: Callable[[], Policy],
        prompts: Sequence[Prompt],
        store: ChunkStore,
        gpus: int,
        at_once: int,
        users: int | None,
        think: float,
        seed: int,
    ) -> None:
        self.store = store
        self.outcome = Outcome(gpus)
        self._gpus = [_Gpu(i, make(), at_once, self.outcome, self._done) for i in range(gpus)]
        self._costs = self._gpus[0].server.policy.costs
        self._tickets: dict[str, _Ticket] = {}
        self._seen: set[int] = set()
        self._pending: Pending[Prompt] = []
        self._rest: Iterator[tuple[float, int, Prompt]] = iter(())  # what users have still to bring
        if users is None:
            self._pending = [(prompt.at, i, prompt) for i, prompt in enumerate(prompts)]
        else:
            thinks = np.random.default_rng(seed).exponential(1.0, len(prompts)) * think
            self._rest = ((float(t), i, p) for i, (t, p) in enumerate(zip(thinks, prompts, strict=True)))
            for _ in range(users):
                self._next_user(0.0)
        drive([gpu.server for gpu in self._gpus], self._pending, self._arrive)
        self.outcome.evicted, self.outcome.refused = store.evicted, store.refused

    def _next_user(self, now: float) -> None:
        for seconds, order, prompt in self._rest:
            heapq.heappush(self._pending, (now + seconds, order, prompt))
            return

    def _arrive(self, prompt: Prompt, now: float) -> None:
        shape = self._costs.shape
        size = shape.layers * shape.cell_bytes
        chunks = [Chunk(key, i, prompt.chunk_tokens(i) * size) for i, key in enumerate(prompt.hashes)]
        there = self.store.find(chunks)
        request = prompt.request(there, shape.windows)
        found = [chunk for chunk, is_there in zip(chunks, there, strict=True) if is_there]
        again = not self._seen.isdisjoint(prompt.hashes[1:])
        self._seen.update(prompt.hashes)
        ticket = _Ticket(now, prompt, chunks, found, again, bounds.lower([request], self._costs))
        self._tickets[prompt.id] = ticket
        gpu = min(self._gpus, key=lambda gpu: sum(gpu.work.values()))
        gpu.work[prompt.id] = ticket.bound
        gpu.waiting.append(Plane(request))
        gpu.admit()

    def _done(self, gpu: _Gpu, plane: Plane, now: float) -> None:
        ticket = self._tickets.pop(plane.request.id)
        del gpu.work[plane.request.id]
        self.store.release(ticket.found, now)
        self.store.write(ticket.chunks, now)
        request = plane.request
        stored = [(request.width(column), column) for column in range(plane.prefix_columns) if request.stored[column]]
        columns = list(zip(*plane.state, strict=True))
        loaded = sum(width * columns[column].count(LOADED) for width, column in stored)
        self.outcome.served.append(
            Served(
                id=request.id,
                gpu=gpu.index,
                arrived=ticket.arrived,
                done=now,
                tokens=request.tokens,
                again=ticket.again,
                found=sum(width for width, _ in stored),
                loaded=loaded / plane.layers,
                bound=ticket.bound,
            )
        )
        self._next_user(now)
