"""A link that changes its speed while a prompt is restored: every policy against a planner that knew.

    python profiling/bench_link_change.py
    python profiling/bench_link_change.py --tokens 1K --rounds 5 --json
    python profiling/bench_link_change.py --simulate

The link drops to a quarter of its speed, or gets four times as fast, when `pipelined` would be half-way had it stayed
as it was. Policies are told the speed that it has at the start, and learn. The planner that knew is `pipelined` with
the one speed, of many tried in virtual time along the link's true course, with which it ends soonest; it does not
learn.

--simulate: in virtual time alone, Llama-3.1-8B on an H100.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from machine import about

from cacheflow import bounds, demo_model, heap, policies, trials
from cacheflow.commands import _common as common
from cacheflow.costs.base import Costs, LayerWork, ModelShape
from cacheflow.costs.learned import Learned
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.engine import Engine
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.plane import Plane
from cacheflow.policies import Policy
from cacheflow.request import Request
from cacheflow.simulate import Server, drive
from cacheflow.stores import Link, MemoryStore
from models.config import ModelConfig

CHUNK = 128
KNEW = "knew"
FACTORS = (0.25, 4.0)
POLICIES = tuple(name for name in policies.available() if name != "recompute")
# Speeds that the planner that knew tries: from less than the slower to more than the faster, in equal ratios.
TRIES, MARGIN = 33, 1.5
# --simulate: Gbps, tokens; 10 us a fetch is a guess.
SIMULATED = tuple((gbps, tokens) for gbps in (10, 40, 80) for tokens in (8192, 32768))
SIMULATED_CHUNK, SIMULATED_SUFFIX, FETCH_SECONDS = 512, 64, 10e-6

Make = Callable[[str, Costs], Policy]


@dataclass(frozen=True)
class Course:
    """A link's bandwidth: `before` bytes/s, and `factor` times that from `at` seconds on."""

    before: float
    factor: float = 1.0
    at: float = math.inf

    def ends(self, start: float, nbytes: float) -> float:
        """When so many bytes have moved that begin to at `start` seconds."""
        soon = max(0.0, self.at - start) * self.before
        if nbytes <= soon:
            return start + nbytes / self.before
        return max(start, self.at) + (nbytes - soon) / (self.before * self.factor)

    def moved(self, until: float) -> float:
        """Bytes that can move before `until` seconds."""
        return self.before * (min(until, self.at) + self.factor * max(0.0, until - self.at))


class Following(Costs):
    """Costs whose link follows a course, for a back end in virtual time, which asks once for every op, as it is given.

    now: the back end's clock.
    """

    def __init__(self, costs: Costs, course: Course, now: Callable[[], float]) -> None:
        super().__init__(
            costs.shape,
            bandwidth=course.before,
            latency=costs.latency,
            fetch_seconds=costs.fetch_seconds,
            copy_bandwidth=costs.copy_bandwidth,
            copy_seconds=costs.copy_seconds,
            interference_per_fetch=costs.interference_per_fetch,
            interference_per_byte=costs.interference_per_byte,
        )
        self._costs, self._course, self._now = costs, course, now
        self._free = 0.0  # when all fetches given so far have ended

    def layer_seconds(self, work: LayerWork) -> float:
        return self._costs.layer_seconds(work)

    def head_seconds(self, tokens: int) -> float:
        return self._costs.head_seconds(tokens)

    def seconds(self, op: Op) -> float:
        if op.kind != FETCH:
            return self._costs.seconds(op)
        start = max(self._free, self._now() + self.latency)
        self._free = self._course.ends(start + self.fetch_seconds, op.tokens * len(op.layers) * self.shape.cell_bytes)
        return self._free - start


def simulate(policy: Policy, request: Request, costs: Costs, course: Course) -> float:
    """TTFT of a policy's run in virtual time."""
    ttft: list[float] = []
    truth = Following(costs, course, lambda: server.backend.now())
    server = Server(policy, truth, on_done=lambda plane, now: ttft.append(now))
    drive([server], [(0.0, 0, request)], lambda request, now: server.add(Plane(request)))
    return ttft[0]


def told(costs: Costs, bandwidth: float) -> Costs:
    """The same costs with another speed of the link, bytes/s."""
    other = copy.copy(costs)
    other.bandwidth = bandwidth
    return other


def knew(make: Make, request: Request, costs: Costs, course: Course) -> tuple[float, float]:
    """The speed, bytes/s, with which `pipelined` ends soonest, and its TTFT in virtual time."""
    ends = sorted((course.before, course.before * course.factor))
    low, high = ends[0] / MARGIN, ends[1] * MARGIN
    speeds = [*ends, *(low * (high / low) ** (i / (TRIES - 1)) for i in range(TRIES))]
    times = {speed: simulate(make("pipelined", told(costs, speed)), request, costs, course) for speed in speeds}
    best = min(times, key=times.__getitem__)
    return best, times[best]


def unaware(make: Make, name: str, request: Request, costs: Costs, course: Course) -> float:
    """TTFT in virtual time of a policy that learns, as an engine has it, and was told the speed at the start."""
    learned = copy.deepcopy(costs) if isinstance(costs, Learned) else Learned(costs)
    policy = make(name, learned)
    policy.observe = learned.observe
    return simulate(policy, request, costs, course)


def bound(request: Request, costs: Costs, course: Course) -> float:
    """Seconds before which no schedule has the first token along the course: the first that what can move until then
    allows. See `cacheflow.bounds.lower`."""
    last, chunk = costs.shape.layers - 1, max(map(request.width, range(request.columns)))
    # No less than what `lower` lets pass, after the last load, until the first token.
    tail = costs.seconds(Op(COMPUTE, range(last, last + 1), (Part("", request.tokens - 1, request.tokens),)))
    tail += costs.fetch_seconds + costs.seconds(Op(COPY, range(last, last + 1), (Part("", 0, chunk),)))
    low, high = tail, bounds.lower([request], told(costs, course.before * min(1.0, course.factor)))
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        speed = course.moved(middle) / (middle - tail)  # so that as many bytes fit before the tail
        if bounds.lower([request], told(costs, speed)) <= middle:
            high = middle
        else:
            low = middle
    return low


def half_way(make: Make, request: Request, costs: Costs, factor: float) -> Course:
    """The course that changes when `pipelined` is half-way."""
    same = Course(costs.bandwidth)
    return Course(costs.bandwidth, factor, simulate(make("pipelined", costs), request, costs, same) / 2)


@dataclass(frozen=True)
class Row:
    """One policy, or the planner that knew, along one course. Seconds; over_knew: median ratio within a round."""

    factor: float
    policy: str
    ttft_s: float
    over_knew: float
    simulated_s: float
    simulated_over_knew: float


def run(
    engine: Engine,
    tokens: Sequence[int],
    suffix: int,
    names: Sequence[str],
    rounds: int,
    progress: Callable[[str], object] = lambda step: None,
) -> list[Row]:
    """Restore a prompt of which all but the suffix is stored, along every course, policies and the planner that knew in
    turns.

    engine: over a Link, with costs that have its bandwidth.
    """
    for name in names:
        progress(f"learning: {name}")
        _restore(engine, tokens, name)
    learned = engine.learned
    request = Request.of(
        "r",
        prefix=len(tokens) - suffix,
        suffix=suffix,
        chunk=engine.chunk_tokens,
        layers=learned.shape.layers,
    )
    rows = []
    for factor in FACTORS:
        # Every run begins with what the runs before the first have taught, and a link as it is at the start.
        learned = copy.deepcopy(learned)
        learned.undisturbed.bandwidth = math.inf
        learned.refresh()
        learned.undisturbed.bandwidth = _link(engine).bandwidth
        learned.refresh()
        course = half_way(engine.make_policy, request, learned, factor)
        speed, virtual = knew(engine.make_policy, request, learned, course)
        simulated = {KNEW: virtual}
        simulated |= {name: unaware(engine.make_policy, name, request, learned, course) for name in names}
        times: dict[str, list[float]] = {name: [] for name in simulated}
        for number in range(1, rounds + 1):
            for name, seconds in times.items():
                progress(f"link {_describe(factor)}: round {number} of {rounds}, {name}")
                costs = copy.deepcopy(learned)
                if name == KNEW:
                    costs.bandwidth = speed
                seconds.append(_run(engine, tokens, name, costs, course))
        rows += _rows(factor, times, simulated)
    return rows


def _rows(factor: float, times: Mapping[str, Sequence[float]], simulated: Mapping[str, float]) -> list[Row]:
    return [
        Row(
            factor=factor,
            policy=name,
            ttft_s=statistics.median(seconds),
            over_knew=statistics.median(a / b for a, b in zip(seconds, times[KNEW], strict=True)),
            simulated_s=simulated[name],
            simulated_over_knew=simulated[name] / simulated[KNEW],
        )
        for name, seconds in times.items()
    ]


def _run(engine: Engine, tokens: Sequence[int], name: str, costs: Learned, course: Course) -> float:
    """TTFT of a run along a course, whose time starts with the call."""
    link, gbps = _link(engine), course.before / GBPS
    before = engine.costs, engine.learn
    engine.costs, engine.learn = costs, name != KNEW
    change = threading.Timer(course.at, link.set_bandwidth, [gbps * course.factor])
    change.start()
    try:
        return _restore(engine, tokens, "pipelined" if name == KNEW else name)
    finally:
        change.cancel()
        change.join()
        link.set_bandwidth(gbps)
        engine.costs, engine.learn = before


def _restore(engine: Engine, tokens: Sequence[int], policy: str) -> float:
    [restored] = engine.restore([tokens], policy=policy)
    engine.release(restored)
    if restored.failures:
        raise RuntimeError(f"the store did not give what was stored: {dict(restored.failures)}")
    return restored.ttft


def _link(engine: Engine) -> Link:
    assert isinstance(engine.store, Link), "the bandwidth of something else cannot be changed"
    return engine.store


@dataclass(frozen=True)
class Simulated:
    """One setting in virtual time. Seconds. over_knew: by policy."""

    gbps: float
    tokens: int
    factor: float
    bound_s: float
    knew_s: float
    over_knew: Mapping[str, float]


def simulations(settings: Sequence[tuple[float, int]], names: Sequence[str]) -> list[Simulated]:
    """settings: Gbps and tokens of a prefix."""
    shape = ModelShape.of(ModelConfig.preset("llama-3.1-8b"), dtype_bytes=2)

    def make(name: str, costs: Costs) -> Policy:
        return policies.find(name)(costs, staging_cells=SIMULATED_CHUNK * shape.layers)

    rows = []
    for gbps, tokens in settings:
        costs = Roofline(shape, device("H100"), bandwidth=gbps * GBPS, fetch_seconds=FETCH_SECONDS)
        request = Request.of("r", prefix=tokens, suffix=SIMULATED_SUFFIX, chunk=SIMULATED_CHUNK, layers=shape.layers)
        for factor in FACTORS:
            course = half_way(make, request, costs, factor)
            _, best = knew(make, request, costs, course)
            over = {name: unaware(make, name, request, costs, course) / best for name in names}
            rows.append(Simulated(gbps, tokens, factor, bound(request, costs, course), best, over))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=common.tokens, default="2K", help="of the prefix; default %(default)s")
    parser.add_argument("--suffix", type=common.tokens, default="32", help="new tokens; default %(default)s")
    parser.add_argument("--rounds", type=common.count, default="3", help="of which the median; default %(default)s")
    parser.add_argument("--policy", type=common.listed(str), metavar="NAMES", help="default: all that load")
    parser.add_argument("--simulate", action="store_true", help="virtual time alone; runs nothing")
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds, and nothing else")
    args = parser.parse_args(argv)
    names = args.policy or list(POLICIES)
    try:
        for name in names:
            policies.find(name)
    except ValueError as error:
        parser.error(str(error))
    if args.simulate:
        found = simulations(SIMULATED, names)
        if args.json:
            common.print_json([asdict(one) for one in found])
        else:
            _print_simulated(found, names)
        return
    heap.keep_freed_memory()
    with common.steps() as step:
        model = demo_model.ensure(step)
        link = Link(MemoryStore(1 << 30), gbps=math.inf)
        room = args.tokens + args.suffix + common.PAGE
        with Engine(model.folder, link, chunk_tokens=CHUNK, cache_tokens=room) as engine:
            step("measuring costs")
            engine.warmup()
            generator = torch.Generator().manual_seed(0)
            size = (args.tokens + args.suffix,)
            tokens = torch.randint(engine.model.config.vocab_size, size, generator=generator).tolist()
            step("storing")
            engine.save(tokens[: args.tokens])
            trials.balance(engine, [tokens], None)
            rows = run(engine, tokens, args.suffix, names, args.rounds, step)
            gbps, backend = link.bandwidth / GBPS, engine.model.ops.NAME
    if args.json:
        common.print_json({"gbps": gbps, "rows": [asdict(row) for row in rows]})
        return
    facts = about("torch", "numpy")
    print(
        f"{args.tokens} + {args.suffix} tokens of {model.label}, link {gbps:.3f} Gbps, medians of {args.rounds} rounds"
    )
    print(f"{facts['cpu']}, {torch.get_num_threads()} threads, {facts['versions']}")
    print(f"kernels {backend}, commit {facts['commit']}\n")
    _print(rows)


def _describe(factor: float) -> str:
    return f"to 1/{1 / factor:g}" if factor < 1 else f"times {factor:g}"


def _print(rows: Sequence[Row]) -> None:
    shown = [
        [_describe(row.factor), row.policy]
        + [f"{value:.3f}" for value in (row.ttft_s, row.over_knew, row.simulated_s, row.simulated_over_knew)]
        for row in rows
    ]
    headers = ["link,\nhalf-way", "policy", "TTFT\ns", "over\nknew", "simulated\ns", "over\nknew"]
    print(common.table(shown, headers, right=range(2, 6)))
    print(f"\n{KNEW}: pipelined, told before the run the one speed that is best along the link's whole course.")


def _print_simulated(found: Sequence[Simulated], names: Sequence[str]) -> None:
    shown = [
        [f"{one.gbps:g}", common.short(one.tokens), _describe(one.factor), f"{one.knew_s * 1e3:,.1f}"]
        + [f"{value:.3f}" for value in (one.knew_s / one.bound_s, *(one.over_knew[name] for name in names))]
        for one in found
    ]
    headers = ["Gbps", "tokens", "link,\nhalf-way", f"{KNEW}\nms", f"{KNEW} over\nbound"]
    headers += [f"{name.replace('-', '-' + chr(10))}" for name in names]
    print(
        f"llama-3.1-8b on H100, chunk {SIMULATED_CHUNK}, suffix {SIMULATED_SUFFIX}; "
        f"TTFT over that of {KNEW}, simulated\n"
    )
    print(common.table(shown, headers, right=(0, 1, *range(3, len(headers)))))
    print(f"\n{KNEW}: pipelined, told before the run the one speed that is best along the link's whole course.")


if __name__ == "__main__":
    main()
