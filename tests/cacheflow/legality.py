"""Runs a policy in virtual time and checks what ran by first principles, token by token, trusting no plane."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from math import inf

from cacheflow.costs.base import Costs
from cacheflow.loop import AHEAD, Completion, Failures, Loop
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.plane import Plane
from cacheflow.policies.base import Policy
from cacheflow.request import Request
from cacheflow.simulate import VirtualBackend
from cacheflow.timeline import Span

EPSILON = 1e-9  # of a second in times of seconds: sums in another order

Cell = tuple[str, int, int]  # request, column, layer


When = tuple[int, float]  # after so many ops have ended, at a share, from 0 on and below 1, of the time to the next end
START: When = (0, 0.0)


@dataclass
class Run:
    """What happened. arrived, done, drained: seconds on the clock. failed: by fetch op. held: most prefix tokens whose
    hidden states were kept between two ops."""

    requests: Sequence[Request]
    policy: Policy
    planes: dict[str, Plane] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    drained: list[tuple[str, float]] = field(default_factory=list)
    failed: dict[Op, Failures] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    held: int = 0

    @property
    def ttft(self) -> dict[str, float]:
        return {request: done - self.arrived[request] for request, done in self.done.items()}


def run(
    policy: Policy,
    requests: Sequence[Request],
    *,
    costs: Costs | None = None,
    fail: Callable[[Op], Failures] = lambda op: (),
    arrivals: Mapping[str, When] | None = None,
    cancels: Mapping[str, When] | None = None,
    link: Sequence[tuple[When, float]] = (),
) -> Run:
    """Drive the policy until every request has come and gone.

    arrivals, cancels: when requests come, and are cancelled if they have come and are not done. link: when the costs'
    bandwidth becomes what. Where nothing is in flight, what comes next comes at once.
    """
    result = Run(requests, policy)
    truth = costs or policy.costs

    def failing(op: Op) -> Failures:
        result.failed[op] = fail(op)
        return result.failed[op]

    backend = HiddenStates(truth, failing, result)
    loop = Loop(
        policy,
        backend,
        on_done=lambda plane, now: result.done.update({plane.request.id: now}),
        on_drained=lambda plane: result.drained.append((plane.request.id, backend.now())),
    )

    def arrive(request: Request) -> None:
        result.arrived[request.id] = backend.now()
        result.planes[request.id] = Plane(request)
        policy.add(result.planes[request.id])

    def cancel(request: str) -> None:
        if request in policy.planes:
            policy.cancel(request)

    events: list[tuple[When, Callable[[], None]]] = [
        *(((arrivals or {}).get(request.id, START), partial(arrive, request)) for request in requests),
        *((when, partial(cancel, request)) for request, when in (cancels or {}).items()),
        *((when, partial(setattr, truth, "bandwidth", bandwidth)) for when, bandwidth in link),
    ]
    pending = deque(sorted(events, key=lambda event: event[0]))
    ended, since = 0, 0.0
    while pending or not loop.idle:
        if pending and (pending[0][0][0] <= ended or loop.idle):
            when = pending[0][0]
            if backend.next_end < inf and when[0] == ended:
                backend.advance(max(backend.now(), since + when[1] * (backend.next_end - since)))
            while pending and pending[0][0] == when:
                pending.popleft()[1]()
        else:
            loop.settle()
            ended, since = ended + 1, backend.now()
        loop.issue()
    result.spans = backend.timeline.spans
    return result


class HiddenStates(VirtualBackend):
    """Keeps hidden states as a real back end must: those that a plane holds when an op is queued, and no others."""

    def __init__(self, costs: Costs, fail: Callable[[Op], Failures], result: Run) -> None:
        super().__init__(costs, fail)
        self.result = result
        self.kept: set[tuple[str, int]] = set()

    def submit(self, op: Op, landed: Completion | None = None) -> None:
        super().submit(op, landed)
        if op.kind != COMPUTE:
            return
        planes = self.result.planes
        columns = {(part.request, c) for part in op.parts for c in range(*planes[part.request].columns_of(part))}
        assert op.layers.start == 0 or columns <= self.kept, "the hidden state was given up"
        self.kept = {(r, c) for r, c in self.kept | columns if planes[r].holds(c)}
        held = (planes[r].request.width(c) for r, c in self.kept if c < planes[r].prefix_columns)
        self.result.held = max(self.result.held, sum(held))


def check(run: Run, cancelled: frozenset[str] = frozenset()) -> None:
    """Assert everything that must hold of what ran, whatever the policy."""
    by_id = {request.id: request for request in run.requests}
    for kind in (COMPUTE, FETCH, COPY):
        spans = sorted((s for s in run.spans if s.op.kind == kind), key=lambda s: (s.start, s.end))
        assert all(a.end <= b.start + EPSILON for a, b in pairwise(spans)), f"{kind} ops overlap"
    landed = _check_fetches(run, by_id)
    filled = _check_copies(run, by_id, landed)
    _check_compute(run, by_id, filled)
    for request in run.requests:
        plane = run.planes[request.id]
        assert plane.in_flight == 0
        spans = [span for span in run.spans if request.id in span.op.requests]
        assert all(span.start >= run.arrived[request.id] for span in spans)
        [drained] = [at for other, at in run.drained if other == request.id]
        assert all(span.end <= drained for span in spans), "its pages may be used while an op is in flight"
        if request.id not in cancelled:
            assert needed(request, _holes(request)) <= {cell[1:] for cell in filled if cell[0] == request.id}
            assert request.id in run.done
    assert run.policy.idle and not _remembered(vars(run.policy), by_id)


def _remembered(value: object, requests: Container[str]) -> bool:
    """Whether a plane or the id of a request is anywhere in what a policy holds."""
    if isinstance(value, Mapping):
        return any(_remembered(item, requests) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | deque):
        return any(_remembered(item, requests) for item in value)
    return isinstance(value, Plane) or (isinstance(value, str) and value in requests)


def columns(op: Op, requests: Sequence[Request]) -> list[Part]:
    """The columns of an op, each as a part of its own."""
    boundaries = {request.id: request.boundaries for request in requests}
    return [
        Part(part.request, start, stop)
        for part in op.parts
        for start, stop in pairwise(boundaries[part.request])
        if part.start <= start and stop <= part.stop
    ]


def needed(request: Request, lost: frozenset[int]) -> set[tuple[int, int]]:
    """(column, layer) of all cells that must be filled when prefix columns `lost` can only be computed."""
    layers, suffix = request.layers, range(len(request.stored), request.columns)
    found: set[tuple[int, int]] = set()
    climbed: set[tuple[int, int]] = set()
    work = [(column, layer) for column in suffix for layer in range(layers)]
    work += [(column, layers - 1) for column in attended(request, request.tokens - 1, request.tokens, layers - 1)]
    while work:
        column, layer = work.pop()
        if (column, layer) in found:
            continue
        found.add((column, layer))
        if column in suffix or column in lost:
            start, stop = request.boundaries[column], request.boundaries[column + 1]
            for below in range(layer):
                if (column, below) not in climbed:
                    climbed.add((column, below))
                    work += [(other, below) for other in attended(request, start, stop, below)]
    return found


@cache
def attended(request: Request, start: int, stop: int, layer: int) -> frozenset[int]:
    """Columns that hold a key which one of tokens [start, stop) sees."""
    window, b = request.windows[layer], request.boundaries
    keys = {k for t in range(start, stop) for k in range(t + 1) if window is None or t - k < window}
    return frozenset(c for c in range(request.columns) if keys & set(range(b[c], b[c + 1])))


def _holes(request: Request) -> frozenset[int]:
    return frozenset(c for c, stored in enumerate(request.stored) if not stored)


def _columns(request: Request, part: Part) -> range:
    assert part.start in request.boundaries and part.stop in request.boundaries
    return range(request.boundaries.index(part.start), request.boundaries.index(part.stop))


def _cells(by_id: dict[str, Request], op: Op, parts: Sequence[Part] | None = None) -> Iterator[Cell]:
    for part in op.parts if parts is None else parts:
        for column in _columns(by_id[part.request], part):
            for layer in op.layers:
                yield part.request, column, layer


def _check_fetches(run: Run, by_id: dict[str, Request]) -> dict[Cell, float]:
    """Only stored and needed cells are fetched, no column again once it has failed. Returns when cells landed."""
    landed: dict[Cell, float] = {}
    lost: dict[str, set[int]] = {request.id: set(_holes(request)) for request in run.requests}
    failures: Counter[tuple[str, int]] = Counter()
    events = [(s.start, 1, s) for s in run.spans if s.op.kind == FETCH]
    events += [(s.end, 0, s) for s in run.spans if s.op.kind == FETCH]
    for _, started, span in sorted(events, key=lambda event: event[:2]):
        failed = set(_cells(by_id, span.op, [part for part, _ in run.failed[span.op]]))
        if started:
            need = {r: needed(by_id[r], frozenset(lost[r])) for r in span.op.requests}
            cells = len(list(_cells(by_id, span.op)))
            size, staging = span.op.tokens * len(span.op.layers), run.policy.staging_cells
            assert staging is None or size <= staging or cells == 1, f"{size} pairs in a fetch of at most {staging}"
            for request, column, layer in _cells(by_id, span.op):
                assert by_id[request].stored[column], "fetched what is not stored"
                assert (column, layer) in need[request], "fetched what is not needed"
        else:
            for cell in set(_cells(by_id, span.op)) - failed:
                assert cell not in landed, "fetched twice"
                landed[cell] = span.end
            for request, column in {(request, column) for request, column, _ in failed}:
                failures[request, column] += 1
                lost[request].add(column)
    # A second op may have been in flight when the first of a column failed.
    assert all(count <= AHEAD for count in failures.values()), "a failed load was tried again"
    return landed


def _check_copies(run: Run, by_id: dict[str, Request], landed: dict[Cell, float]) -> dict[Cell, float]:
    filled: dict[Cell, float] = {}
    for span in (s for s in run.spans if s.op.kind == COPY):
        for cell in _cells(by_id, span.op):
            assert landed[cell] <= span.start + EPSILON, "copied before it landed"
            assert cell not in filled, "copied twice"
            filled[cell] = span.end
    assert set(filled) == set(landed), "landed and never copied"
    return filled


def _check_compute(run: Run, by_id: dict[str, Request], filled: dict[Cell, float]) -> None:
    """Adds what compute fills to `filled`."""
    height: dict[tuple[str, int], int] = defaultdict(int)
    for span in sorted((s for s in run.spans if s.op.kind == COMPUTE), key=lambda s: (s.start, s.end)):
        op = span.op
        for layer in op.layers:
            for part in op.parts:
                for column in _columns(by_id[part.request], part):
                    if layer == op.layers.start:
                        assert layer in (0, height[part.request, column]), "no hidden state there"
                    cell = (part.request, column, layer)
                    assert part.project != (cell in filled), "filled twice" if part.project else "not projected"
                    filled.setdefault(cell, span.start)
            for part in op.parts:
                request = by_id[part.request]
                for column in _columns(request, part):
                    height[part.request, column] = layer + (layer < op.layers[-1] or part.advance)
                if layer == op.layers[-1] and not part.advance:
                    continue
                last_layer = layer == request.layers - 1
                start = part.stop - 1 if last_layer else part.start
                for column in attended(request, start, part.stop, layer):
                    assert filled.get((part.request, column, layer), float("inf")) <= span.start + EPSILON
                if last_layer and part.stop == request.tokens:
                    suffix = range(len(request.stored), request.columns)
                    assert all((part.request, c, row) in filled for c in suffix for row in range(request.layers))
                    assert run.done.get(part.request, span.end) == span.end
    ends = {r: max(s.end for s in run.spans if s.op.kind == COMPUTE and r in s.op.requests) for r in run.done}
    assert ends == run.done, "compute after the first token"
