"""Published figures of hybrid restoration, each with its source, and what the simulator gives at the same settings.

The figures are those that public summaries of the papers report; a setting says no more than they do. Times are in
seconds, ratios above 1 mean faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import exp, log
from statistics import fmean

import numpy as np

from cacheflow import bounds, policies
from cacheflow.costs.base import ModelShape
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.op import COMPUTE, FETCH, Op, Part
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from cacheflow.timeline import Summary
from models.config import ModelConfig

V1 = "CacheFlow v1 (arXiv 2604.25080, April 2026)"
V2 = "CacheFlow v2 (September 2026)"
CAKE = "Cake (ICML 2025)"
MI300X = "Cake's scheme on an MI300X, an independent run"
SHORT = {V1: "v1", V2: "v2", CAKE: "Cake", MI300X: "MI300X"}

K = 1024
CHUNK = 512
LONGALPACA_7B = ModelShape(32, 4096, 32, 32, 128, 11008, 32000, windows=(None,) * 32)


@dataclass(frozen=True)
class Published:
    """values: in the order that `what` names, in `unit`. setting: as far as it is known."""

    source: str
    what: str
    values: tuple[float, ...]
    unit: str
    setting: str

    @property
    def label(self) -> str:
        """What a picture calls it."""
        return f"published, {SHORT[self.source]}"


V1_LENGTH = Published(V1, "over recompute-only, at 6K and 30K tokens", (1.1, 1.7), "x", "GPU, model and link not known")
V1_CUT = Published(V1, "TTFT lower by, least and most", (10, 62), "%", "over vLLM and LMCache, all settings")
V1_GBPS = Published(V1, "speed-up at 40 and 80 Gbps", (1.7, 1.5), "x", "H100; over what, and length, not known")
V1_BATCH = Published(V1, "speed-up of batches of 2 to 8, least and most", (1.6, 2.6), "x", "over what, not known")
V1_BUSY = Published(V1, "busy, compute and link", (88, 78), "%", "not known")
V1_BUSY_LOAD = Published(V1, "busy of load-only, compute and link", (10, 100), "%", "not known")
V1_BUSY_RECOMPUTE = Published(V1, "busy of recompute-only, compute and link", (91, 0), "%", "not known")
V1_STAGES = Published(V1, "TTFT without and with the GPU axis", (0.29, 0.21), "s", "not known")
CROSSOVER = Published(
    V2, "length from which the token axis is sooner", (36 * K,), "tokens", "Llama-3.1-8B, Fig. 2; about"
)
V2_MEAN = Published(V2, "mean TTFT over best rival, least and most", (2.24, 3.00), "x", "streams, not known which")
V2_P95 = Published(V2, "p95 TTFT over best rival, least and most", (1.77, 3.02), "x", V2_MEAN.setting)
V2_P99 = Published(V2, "p99 TTFT over best rival, least and most", (1.48, 2.95), "x", V2_MEAN.setting)
V2_BUSY = Published(V2, "busy, compute and link", (89, 89), "%", "not known")
V2_EVEN = Published(V2, "both sides end within 10 % of each other", (95,), "%", "not known")
V2_GAP = Published(V2, "most that a plan loses on the continuous optimum", (0.0195,), "s", "10 Gbps, chunk 512")
V2_PLANNER = Published(V2, "planning over TTFT, median and p99", (0.019, 0.34), "%", "not known")
V2_PREDICTED = Published(V2, "predicted within 10 %, compute and loads", (92, 98), "%", "not known")
V2_STAGES = Published(V2, "TTFT on 1, 2 and 4 GPUs", (1.59, 0.96, 0.67), "s", "not known")
_FIG_4 = "LongAlpaca-7B, Fig. 4, digitised; close to linear in between"
CAKE_A100 = Published(CAKE, "chunks 0 and 63 computed on an A100", (0.0388, 0.1120), "s", _FIG_4)
CAKE_H100 = Published(CAKE, "chunks 0 and 63 computed on an H100", (0.0274, 0.0935), "s", _FIG_4)
CAKE_LOAD = Published(CAKE, "a chunk loaded at 32 Gbps", (0.0624,), "s", "LongAlpaca-7B, Fig. 4, digitised")
CAKE_TABLE_4 = Published(
    CAKE, "over load-only and over compute-only", (2.20, 1.94), "x", "Table 4: A100, 7B, 16K tokens, 32 Gbps"
)
_RUN = "Llama-3.1-8B, 4e9 B/s; the first token itself included"
MI300X_16K = Published(MI300X, "16K tokens: compute-only, load-only, hybrid", (1.439, 0.591, 0.423), "s", _RUN)
MI300X_32K = Published(MI300X, "32K tokens: compute-only, load-only, hybrid", (3.759, 1.161, 0.833), "s", _RUN)
CAKE_BANDWIDTH = 256 * 2**20 / CAKE_LOAD.values[0]  # bytes/s: what a chunk of LongAlpaca-7B takes at "32 Gbps"

SINGLE = ("recompute", "load")
RIVALS = ("recompute", "load", "layerwise-load", "token")
Pairs = list[tuple[float, float]]


@dataclass(frozen=True)
class Setting:
    """Where and what is restored in virtual time. suffix, chunk: tokens. gbps: decimal Gbit/s."""

    model: str = "llama-3.1-8b"
    device: str = "H100"
    gbps: float = 10
    suffix: int = 64
    chunk: int = CHUNK

    @property
    def shape(self) -> ModelShape:
        return _shape(self.model)

    @property
    def costs(self) -> Roofline:
        return Roofline(self.shape, device(self.device), bandwidth=self.gbps * GBPS)

    def requests(self, lengths: Sequence[int]) -> list[Request]:
        """One for each prefix, all of it stored."""
        layers = self.shape.layers
        return [
            Request.of(f"r{i}", prefix=length, suffix=self.suffix, chunk=self.chunk, layers=layers)
            for i, length in enumerate(lengths)
        ]

    def run(self, policy: str, *lengths: int, arrivals: Sequence[float] | None = None) -> Simulation:
        """Of requests with these prefixes, together. arrivals: seconds; all at 0 without."""
        requests = self.requests(lengths)
        at = None if arrivals is None else {r.id: float(t) for r, t in zip(requests, arrivals, strict=True)}
        return Simulation(policies.find(policy)(self.costs), requests, arrivals=at)

    def ttft(self, policy: str, *lengths: int) -> list[float]:
        """Seconds, in the order of the requests."""
        times = self.run(policy, *lengths).ttft
        return [times[f"r{i}"] for i in range(len(lengths))]

    def summary(self, policy: str, *lengths: int) -> Summary:
        return self.run(policy, *lengths).timeline.summary(self.requests(lengths))

    def over(self, policy: str, rivals: Sequence[str], *lengths: int, of: Callable[..., float] = fmean) -> float:
        """How many times sooner than the best of its rivals; `of` their times in a batch: mean or max."""
        best = min(of(self.ttft(rival, *lengths)) for rival in rivals)
        return best / of(self.ttft(policy, *lengths))

    def __str__(self) -> str:
        return f"{self.model}, {self.device}, {self.gbps:.4g} Gbps, chunk {self.chunk}, suffix {self.suffix}"


@cache
def _shape(model: str) -> ModelShape:
    if model == "longalpaca-7b":
        return LONGALPACA_7B
    return ModelShape.of(ModelConfig.preset(model), dtype_bytes=2)


def lengths(count: int, seed: int, median: int = 12 * K, sigma: float = 0.8) -> list[int]:
    """Prefixes of a batch or a stream: log-normal, rounded to whole chunks, from one of them to 128K tokens."""
    drawn = np.random.default_rng(seed).normal(log(median), sigma, count)
    return [CHUNK * int(min(max(round(exp(x) / CHUNK), 1), 128 * K // CHUNK)) for x in drawn]


def chunk_seconds(setting: Setting, index: int) -> float:
    """Seconds to compute a chunk of a prefix with all before it there."""
    part = Part("a", setting.chunk * index, setting.chunk * (index + 1), advance=False)
    return setting.costs.seconds(Op(COMPUTE, range(setting.shape.layers), (part,)))


def crossover(ratio: Sequence[float], tokens: Sequence[int]) -> float:
    """The length from which a ratio stays at or below 1, interpolated over the logarithm of the length.

    The first length where it always is, infinity where it ends above.
    """
    if ratio[-1] > 1:
        return float("inf")
    for (n, before), (m, after) in reversed(list(pairwise(zip(tokens, ratio, strict=True)))):
        if before > 1:
            return exp(log(n) + (before - 1) / (before - after) * (log(m) - log(n)))
    return float(tokens[0])


LENGTHS = tuple(K << i for i in range(8))  # of the crossover: 1K to 128K, twice each the one before


def axes_ratio(setting: Setting, tokens: int, *, by_chunk: bool = False) -> float:
    """TTFT on the token axis over that on the layer axis.

    by_chunk: on the token axis passes are of one chunk, and where the pointers meet none is cut.
    """
    if by_chunk:
        options = {"token_budget": setting.chunk, "hidden_tokens": 0}
        policy = policies.find("token")(setting.costs, **options)
        token = Simulation(policy, setting.requests([tokens])).ttft["r0"]
    else:
        token = setting.ttft("token", tokens)[0]
    return token / setting.ttft("layer", tokens)[0]


@dataclass(frozen=True)
class Comparison:
    """A published figure beside ours. ours: of the same method, pipelined: of ours, in the order and unit of the
    published values; empty where there is nothing to give. word: why they differ. reading: of what may be meant."""

    published: Published
    ours: tuple[float, ...] = ()
    pipelined: tuple[float, ...] = ()
    setting: str = ""
    word: str = ""
    reading: str = ""


def comparisons() -> list[Comparison]:
    """Everything that is published. Takes about 15 seconds."""
    return [*_length(), *_gbps(), *_batch(), *_busy(), *_axes(), *_stream(), *_plan(), *_cake(), *_not_simulated()]


ENGINE = "We simulate restoration alone: what an engine spends besides is in both sides of a ratio, and lowers it."
GRID = tuple(product(("A100-40G", "H100", "L40S"), (10, 40, 80), (6 * K, 16 * K, 30 * K)))
_GRID = "A100-40G, H100, L40S x 10, 40, 80 Gbps x 6K, 16K, 30K tokens, chunk 512, suffix 64"


def _length() -> list[Comparison]:
    setting = Setting()
    both = [tuple(setting.over(p, ["recompute"], n) for n in (6 * K, 30 * K)) for p in ("two-pointer", "pipelined")]
    first = Comparison(V1_LENGTH, both[0], both[1], str(setting), f"Both rise with the length. {ENGINE}")
    models = ("llama-3.1-8b", "qwen3-8b")
    cuts = []
    for policy in ("two-pointer", "pipelined"):
        gains = [Setting(m, d, g).over(policy, ("recompute", "layerwise-load"), n) for m in models for d, g, n in GRID]
        cuts.append((100 - 100 / min(gains), 100 - 100 / max(gains)))
    word = (
        "Ours is over the better of recompute and layerwise-load in each cell: two resources together save little "
        "more than half. two-pointer loses where the suffix, which layerwise-load hides, is a large part: most at 6K "
        "and 80 Gbps on an L40S."
    )
    return [first, Comparison(V1_CUT, cuts[0], cuts[1], f"{' and '.join(models)}, {_GRID}", word)]


def _gbps() -> list[Comparison]:
    settings = [Setting(gbps=gbps) for gbps in (40, 80)]
    both = [tuple(s.over(p, SINGLE, 16 * K) for s in settings) for p in ("two-pointer", "pipelined")]
    word = (
        "Ours is over the better of recompute and load, which at these speeds is load. Both fall as the link gets "
        "faster. Against a load that does not reach the link's speed gains would be higher; ours does reach it."
    )
    where = "llama-3.1-8b, H100, 16K tokens, chunk 512, suffix 64"
    return [Comparison(V1_GBPS, both[0], both[1], where, word)]


@cache
def batch_gains(policy: str, of: Callable[..., float], seeds: int = 5) -> tuple[float, ...]:
    """Over the better of recompute and load, of batches of 2, 4 and 8, each the mean over seeds."""
    setting = Setting()
    return tuple(fmean(setting.over(policy, SINGLE, *lengths(n, s), of=of) for s in range(seeds)) for n in (2, 4, 8))


def _batch() -> list[Comparison]:
    where = f"{Setting()}; over the better of recompute and load; log-normal prefixes, median 12K, 5 seeds"
    agrees = "Agrees, if it is the batch's last first token that counts."
    waits = "two-pointer advances all requests together, so the first wait for the last, which costs the mean."
    made = []
    for of, reading, word in ((max, "of the last", agrees), (fmean, "of the mean", waits)):
        gains = [batch_gains(policy, of) for policy in ("two-pointer", "pipelined")]
        both = [(min(gain), max(gain)) for gain in gains]
        made.append(Comparison(V1_BATCH, both[0], both[1], where, word, reading))
    return made


@cache
def busy(policy: str) -> tuple[float, float]:
    """Of compute and link while restoring, per cent, mean over GRID."""
    shares = [Setting(device=d, gbps=g).summary(policy, n).busy for d, g, n in GRID]
    return 100 * fmean(s[COMPUTE] for s in shares), 100 * fmean(s[FETCH] for s in shares)


def _busy() -> list[Comparison]:
    where = f"llama-3.1-8b, mean over {_GRID}"
    word = "Virtual time has no gaps between ops, no host in the way, and no estimate that is wrong."
    ours = busy("pipelined")
    return [
        Comparison(V1_BUSY, busy("two-pointer"), ours, where, word),
        Comparison(V1_BUSY_LOAD, busy("load"), (), where, "The suffix comes after the restoration here."),
        Comparison(V1_BUSY_RECOMPUTE, busy("recompute"), (), where, word),
        Comparison(V2_BUSY, busy("staircase"), ours, where, word),
    ]


def _axes() -> list[Comparison]:
    setting = Setting()
    ours = crossover([axes_ratio(setting, n) for n in LENGTHS], LENGTHS)
    chunked = crossover([axes_ratio(setting, n, by_chunk=True) for n in LENGTHS], LENGTHS)
    word = (
        "Far lower here. Our token axis takes large passes, and both axes cut the unit where the pointers meet; chunk "
        f"by chunk and uncut it is {chunked / K:.1f}K. A roofline knows no engine's cost per chunk, which that axis "
        "pays."
    )
    return [Comparison(CROSSOVER, (ours,), (), str(setting), word)]


def stream(setting: Setting, load: float, count: int = 120) -> dict[str, tuple[float, float, float]]:
    """Mean, p95 and p99 of the TTFT, by policy: Poisson arrivals at a load, log-normal prefixes.

    Load 1: arrivals on average as far apart as the lower bound of all requests together over their number.
    """
    prefixes = lengths(count, 0)
    apart = bounds.lower(setting.requests(prefixes), setting.costs) / count / load
    at = np.cumsum(np.random.default_rng(1).exponential(apart, count)).tolist()
    seen = {}
    for policy in (*RIVALS, "staircase", "pipelined"):
        ttft = list(setting.run(policy, *prefixes, arrivals=at).ttft.values())
        seen[policy] = (fmean(ttft), float(np.percentile(ttft, 95)), float(np.percentile(ttft, 99)))
    return seen


def stream_gains(streams: Sequence[Mapping[str, Sequence[float]]], policy: str, rivals: Sequence[str]) -> Pairs:
    """Over the best of the rivals, in mean, p95 and p99: least and most over the streams."""
    gains = [[min(s[rival][i] for rival in rivals) / s[policy][i] for s in streams] for i in range(3)]
    return [(min(over), max(over)) for over in gains]


@cache
def streams() -> tuple[dict[str, tuple[float, float, float]], ...]:
    """At loads 0.5 and 0.7, on an H100 behind 10 Gbps."""
    return tuple(stream(Setting(), load) for load in (0.5, 0.7))


def _stream() -> list[Comparison]:
    where = (
        f"{Setting()}; 120 requests, log-normal prefixes, median 12K, all stored, Poisson arrivals at loads 0.5 and "
        "0.7 of what the bound allows; rivals recompute, load, layerwise-load"
    )
    words = (
        "Far lower here: the token axis, a rival too, computes in large passes, is cut where the pointers meet, and "
        "has no overheads for queues to multiply. The paper's streams and loads are not known to us.",
        "As for the mean.",
        "As for the mean. pipelined serves the shortest first, and the longest wait.",
    )
    rows = zip((V2_MEAN, V2_P95, V2_P99), words, strict=True)
    ours, best = (stream_gains(streams(), policy, RIVALS) for policy in ("staircase", "pipelined"))
    made = [Comparison(p, ours[i], best[i], f"{where}, token", word) for i, (p, word) in enumerate(rows)]
    alone = [stream_gains(streams(), policy, RIVALS[:-1])[0] for policy in ("staircase", "pipelined")]
    word = "One resource alone cannot carry these loads, so this ratio grows with the length of the stream."
    return [*made, Comparison(V2_MEAN, alone[0], alone[1], where, word, "token axis no rival")]


def sides_apart(setting: Setting, policy: str, tokens: int) -> float:
    """How much sooner the one of compute and loads ends than the other, over the restoration's time."""
    simulation = setting.run(policy, tokens)
    filling = [s for s in simulation.timeline.spans if any(p.project and p.start < tokens for p in s.op.parts)]
    ends = [max((s.end for s in filling if s.op.kind == kind), default=0.0) for kind in (COMPUTE, FETCH)]
    return (max(ends) - min(ends)) / max(ends)


def _plan() -> list[Comparison]:
    even = [sides_apart(Setting(device=d, gbps=g), "staircase", n) <= 0.1 for d, g, n in GRID]
    one = replace(Setting(), suffix=1)
    tokens = (4 * K, 8 * K, 16 * K, 32 * K)
    gaps = []
    for policy in ("staircase", "pipelined"):
        lower = [bounds.lower(one.requests([n]), one.costs) for n in tokens]
        gaps.append((max(one.ttft(policy, n)[0] - b for n, b in zip(tokens, lower, strict=True)),))
    word = "Ours is what TTFT loses on a lower bound, which is below the optimum that theirs is measured from."
    return [
        Comparison(V2_EVEN, (100 * fmean(even),), (), f"llama-3.1-8b, {_GRID}", "Estimates are exact here."),
        Comparison(V2_GAP, gaps[0], gaps[1], f"{one}; 4K, 8K, 16K, 32K tokens", word),
    ]


def _cake() -> list[Comparison]:
    made = []
    for published, name in ((CAKE_A100, "A100-40G"), (CAKE_H100, "H100")):
        setting = cake_setting(name)
        word = "The device's two rates are fitted to these very figures."
        made.append(Comparison(published, tuple(chunk_seconds(setting, i) for i in (0, 63)), (), str(setting), word))
    a100 = replace(cake_setting("A100-40G"), suffix=1)
    load = a100.costs.load_seconds(CHUNK * a100.shape.layers)
    made.append(Comparison(CAKE_LOAD, (load,), (), str(a100), "The bandwidth is the one that this figure gives."))
    both = [tuple(a100.over(p, [rival], 16 * K) for rival in ("load", "recompute")) for p in ("token", "pipelined")]
    word = "Theirs has an engine's overheads, and loads in chunks of 128 tokens."
    made.append(Comparison(CAKE_TABLE_4, both[0], both[1], f"{a100}, 16K tokens", word))
    mi300x = Setting(device="MI300X", gbps=32, suffix=1)
    for published, n in ((MI300X_16K, 16 * K), (MI300X_32K, 32 * K)):
        times = tuple(mi300x.ttft(p, n)[0] for p in ("recompute", "load", "token"))
        word = "The device's rates are guesses; published times hold 55 ms (16K) and 90 ms (32K) besides restoration."
        made.append(Comparison(published, times, (), f"{mi300x}, {n // K}K tokens", word))
    return made


def cake_setting(name: str) -> Setting:
    """LongAlpaca-7B behind the link whose speed Cake's Fig. 4 gives."""
    return Setting("longalpaca-7b", name, gbps=CAKE_BANDWIDTH / GBPS)


def _not_simulated() -> list[Comparison]:
    return [
        Comparison(V1_STAGES, word="Several GPUs are not simulated."),
        Comparison(V2_STAGES, word="Several GPUs are not simulated."),
        Comparison(V2_PLANNER, word="Virtual time does not count it; profiling/bench_planner.py measures ours."),
        Comparison(
            V2_PREDICTED, word="Virtual time has nothing to predict; profiling/bench_prediction.py measures ours."
        ),
    ]
