"""Costs refined while running: undisturbed costs times what ops were seen to take, a factor per kind and size of op."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cacheflow.costs.base import Costs, LayerWork, Span
from cacheflow.op import COMPUTE, COPY, FETCH, Kind, Op

FORMAT = 2
# Ops of a class whose median ratio counts. Two of five may be outliers, and three show that a resource has changed. In
# virtual time, with a tenth of noise on every op, plans lost 1.6 % of TTFT with windows of 3, 1.1 % of 5, 0.8 % of 7.
WINDOW = 5
# Guesses:
PRIOR = 2  # ops that what was believed before a class was seen stands for, until WINDOW of its own are there
CLIP = 1e4  # no op says more than that it took so many times more, or less, than undisturbed
PAIRS = (5, 32)  # fixed costs from neighbouring ops: of so many pairs at least, of the last so many
FLOOR = 0.5  # of an op's seconds over undisturbed ones, what its factor is at least, should its fixed cost be wrong
APART = 1.5  # times the work of one, that a pair's other has at least; of equal ops no fixed share can be told
SIZES = 32  # classes of compute: tokens by their nearest power of two
# Compute ops of which the sum counts, how many times more or less than learned an op may take to be one of these, and
# how many ops stand for what is learned without: guesses.
SUMMED, LEFT, DOUBT = 64, 1.5, 8
ERRORS = 1000  # predictions of a kind that its reported error is of

ADVANCE, PROJECT, HEAD = "advance", "project", "head"
COMPUTES = (ADVANCE, PROJECT, HEAD)
KINDS = (*COMPUTES, FETCH, COPY)
Class: TypeAlias = tuple[str, int]  # a kind of KINDS; log2 of tokens for the first two, else 0
Sample: TypeAlias = tuple[float, float]  # undisturbed seconds without the fixed cost, and measured ones with it


@dataclass(frozen=True)
class Accuracy:
    """How well the ops of a kind were predicted, each before it was learned from: |predicted / actual - 1|.

    kind: "advance" and "project" (compute, by what is most of it), "head", "fetch", "copy". ops: learned from, in all.
    factor: seconds beyond the fixed cost over undisturbed ones, as the last ops had it.
    median, p90: of the learned costs' errors. undisturbed_median, undisturbed_p90: of the errors without learning.
    """

    kind: str
    ops: int
    factor: float
    median: float
    p90: float
    undisturbed_median: float
    undisturbed_p90: float


class Learned(Costs):
    """Costs that follow what ops take here and now. `observe` is told of every op that ran.

    An op takes its kind's fixed cost and, over it, the undisturbed seconds of its work times a factor. Layers of a
    compute op have a factor by what is most of their GEMMs, advancing or projecting, and by how many tokens: linear in
    their logarithm between classes that were seen, level beyond. Fetches and copies have one each.

    A factor is the median of its class's last WINDOW ratios. Unlike a mean, or Huber's clipped one, that needs no
    scale of the noise, does not move for one outlier however large, and follows a lasting change after three ops
    instead of with a tail. A class that was seen less often is filled up with PRIOR times the median of all such
    classes, and that with ones. An op counts for the class that is most of it.
    A fixed cost is the median of where the lines through neighbouring ops of different size meet zero work; with fewer
    than PAIRS[0] such pairs it is the undisturbed one, times what the smallest ops took over undisturbed ones.
    A median leaves out what many small delays add up to: compute is scaled by the sum of what the last SUMMED ops took,
    of classes seen often enough and outliers left out, over the sum of what was learned of them.
    Of ops that are free undisturbed, copies say, nothing is learned.

    Learned costs keep the contract of Costs with marginals of their own, scaled by the least factor. What is below
    anything that this machine could do undisturbed still takes `undisturbed`, which learning leaves as it is.

    machine: on what ops run; what is learned on one is refused on another.
    """

    def __init__(self, undisturbed: Costs, *, machine: str = "") -> None:
        self.undisturbed = undisturbed
        self.machine = machine
        self._samples: dict[Class, deque[Sample]] = {}
        self._intercepts: dict[Kind, deque[float]] = {kind: deque(maxlen=PAIRS[1]) for kind in (COMPUTE, FETCH, COPY)}
        self._sums: deque[tuple[float, float]] = deque(maxlen=SUMMED)  # seconds of compute ops: taken, and learned
        self._scale = 1.0
        self._errors: dict[str, deque[tuple[float, float]]] = {}
        self._ops: dict[str, int] = {}
        self._link = _link(undisturbed)
        self.refresh()

    # Costs

    def layer_seconds(self, work: LayerWork) -> float:
        name, tokens = self._size(work)
        size = min(math.log2(tokens), SIZES - 1.001)
        low, factors = int(size), self._factors[name]
        factor = factors[low] + (size - low) * (factors[low + 1] - factors[low])
        return factor * self.undisturbed.layer_seconds(work)

    def head_seconds(self, tokens: int) -> float:
        return self._head * self.undisturbed.head_seconds(tokens)

    def _size(self, work: LayerWork) -> tuple[str, int]:
        advance, shape = work.advance, self.shape
        if advance * shape.advance_flops >= work.project * shape.project_flops:
            return ADVANCE, max(1, advance)
        return PROJECT, work.project

    # Learning

    def observe(self, op: Op, seconds: float) -> None:
        """Learn from an op that ran, whole, in so many seconds on its resource. What is no time is passed over."""
        whole = self.undisturbed.seconds(op)
        if not (seconds > 0 and math.isfinite(seconds) and whole > 0):
            return
        seconds = min(max(seconds, whole / CLIP), whole * CLIP)
        its_class = self._class(op)
        name = its_class[0]
        self._errors.setdefault(name, deque(maxlen=ERRORS)).append(
            (abs(self.seconds(op) / seconds - 1), abs(whole / seconds - 1))
        )
        self._ops[name] = self._ops.get(name, 0) + 1
        if op.kind == COMPUTE and len(self._samples.get(its_class, ())) == WINDOW:
            learned = self.seconds(op) / self._scale
            if 1 / LEFT < seconds / learned < LEFT:
                self._sums.append((seconds, learned))
        work = whole - self.undisturbed.fixed(op.kind)
        if work <= 1e-9 * whole:
            self._intercepts[op.kind].append(seconds)
        else:
            samples = self._samples.setdefault(its_class, deque(maxlen=WINDOW))
            if samples:
                self._intercepts[op.kind].extend(_intercept(samples[-1], (work, seconds)))
            samples.append((work, seconds))
        if op.kind == COMPUTE:
            self._refresh_compute()
        else:
            self._refresh_link()

    def refresh(self) -> None:
        """Take up changes of the undisturbed costs: a link that was given other numbers is learned anew."""
        costs = self.undisturbed
        if self._link != _link(costs):
            self._link = _link(costs)
            for kind in (FETCH, COPY):
                self._samples.pop((kind, 0), None)
                self._intercepts[kind].clear()
        self._refresh_link()
        self._refresh_compute()

    def _refresh_link(self) -> None:
        costs = self.undisturbed
        self.shape, self.latency = costs.shape, costs.latency
        self.interference_per_fetch = costs.interference_per_fetch
        self.interference_per_byte = costs.interference_per_byte
        self.fetch_seconds, self.copy_seconds = self._fixed(FETCH), self._fixed(COPY)
        self.bandwidth = costs.bandwidth / _median(self._ratios((FETCH, 0)), 1.0)
        self.copy_bandwidth = costs.copy_bandwidth / _median(self._ratios((COPY, 0)), 1.0)

    def _refresh_compute(self) -> None:
        costs = self.undisturbed
        self.revision += 1
        took, learned = (sum(of) for of in zip(*self._sums, strict=True)) if self._sums else (0.0, 0.0)
        doubt = DOUBT * learned / max(1, len(self._sums))
        self._scale = (took + doubt) / (learned + doubt) if learned else 1.0
        self._compute_fixed = self._fixed(COMPUTE)  # not scaled
        self.compute_fixed = self._scale * self._compute_fixed
        ratios = {its_class: self._ratios(its_class) for its_class in self._samples if its_class[0] in COMPUTES}
        usual = _usual(ratios.values())
        self._head = self._scale * _median(ratios.get((HEAD, 0), []), usual)
        self._factors = {
            name: [self._scale * factor for factor in _curve({i: ratios[n, i] for n, i in ratios if n == name}, usual)]
            for name in COMPUTES[:2]
        }
        least = min(map(min, self._factors.values()))
        self.project_marginal = least * costs.project_marginal
        self.advance_marginal = least * costs.advance_marginal
        self.pair_marginal = least * costs.pair_marginal
        self.layer_fixed = least * costs.layer_fixed

    def _class(self, op: Op) -> Class:
        """What most of an op's undisturbed time goes to."""
        if op.kind != COMPUTE:
            return op.kind, 0
        parts: dict[Class, float] = {}
        for work, count in self.undisturbed.layer_works(op).items():
            name, tokens = self._size(work)
            key = name, min(round(math.log2(tokens)), SIZES - 1)
            parts[key] = parts.get(key, 0.0) + count * self.undisturbed.layer_seconds(work)
        if op.layers.stop == self.shape.layers:
            parts[HEAD, 0] = self.undisturbed.head_seconds(sum(part.advance for part in op.parts))
        return max(parts, key=lambda key: parts[key])

    def _fixed(self, kind: Kind) -> float:
        before, intercepts = self.undisturbed.fixed(kind), self._intercepts[kind]
        if len(intercepts) >= PAIRS[0]:
            return max(statistics.median(intercepts), before / CLIP)
        names = (kind,) if kind in KINDS else COMPUTES
        seen = [samples for (name, _), samples in self._samples.items() if name in names]
        smallest = min(seen, key=lambda samples: samples[-1][0], default=())
        return before * _median([seconds / (work + before) for work, seconds in smallest], 1.0)

    def _fixed_of(self, name: str) -> float:
        return self.fetch_seconds if name == FETCH else self.copy_seconds if name == COPY else self._compute_fixed

    def _ratios(self, its_class: Class) -> list[float]:
        fixed = self._fixed_of(its_class[0])
        return [
            max((seconds - fixed) / work, FLOOR * seconds / (work + fixed))
            for work, seconds in self._samples.get(its_class, ())
        ]

    # Reporting and keeping

    def accuracy(self) -> list[Accuracy]:
        """Of every kind that was learned from."""
        rows = []
        for kind in KINDS:
            if kind in self._errors:
                errors = np.asarray(self._errors[kind])
                (median, p90), (before, p90_before) = np.percentile(errors, (50, 90), axis=0).T.tolist()
                ratios = [
                    ratio for its_class in self._samples if its_class[0] == kind for ratio in self._ratios(its_class)
                ]
                factor = statistics.median(ratios or [1.0])
                rows.append(Accuracy(kind, self._ops[kind], factor, median, p90, before, p90_before))
        return rows

    def save(self, path: str | Path) -> None:
        """Write what was learned as JSON. It means something over the same undisturbed costs only: save them too."""
        record = {
            "format": FORMAT,
            **self._origin(),
            "link": self._link,
            "samples": [[*its_class, [*seen]] for its_class, seen in self._samples.items()],
            "intercepts": {kind: [*seen] for kind, seen in self._intercepts.items()},
            "sums": [*self._sums],
            "errors": {kind: [*seen] for kind, seen in self._errors.items()},
            "ops": self._ops,
        }
        Path(path).write_text(json.dumps(record) + "\n")

    @classmethod
    def load(cls, path: str | Path, undisturbed: Costs, *, machine: str = "") -> Learned:
        """Go on from what `save` wrote. What was learned of a link that has other numbers by now is left out.

        Raises ValueError for a file that is not such, or was learned on another machine, with another model, or over
        other undisturbed costs of compute.
        """
        learned = cls(undisturbed, machine=machine)
        try:
            record = json.loads(Path(path).read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']}")
            origin = {name: record[name] for name in learned._origin()}
            learned._take_up(record)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} holds no learned costs ({error}); delete it to learn anew") from None
        for name, other in (
            ("machine", f"on {origin['machine']!r}, which is not {machine!r}"),
            ("model", "with another model or dtype"),
            ("undisturbed", "over other undisturbed costs"),
        ):
            if origin[name] != learned._origin()[name]:
                raise ValueError(f"{path} was learned {other}; delete it to learn anew")
        return learned

    def _take_up(self, record: Any) -> None:
        same_link = tuple(record["link"]) == self._link
        for name, size, seen in record["samples"]:
            if name not in KINDS or not 0 <= size < SIZES:
                raise ValueError(f"class {name!r}, {size!r}")
            if name not in (FETCH, COPY) or same_link:
                self._samples[name, size] = deque([(_positive(x), _positive(y)) for x, y in seen], WINDOW)
        for kind, seen in self._intercepts.items():
            if kind == COMPUTE or same_link:
                seen.extend(map(_finite, record["intercepts"][kind]))
        self._sums.extend((_positive(took), _positive(learned)) for took, learned in record["sums"])
        for name, errors in record["errors"].items():
            self._ops[name] = int(record["ops"][name])
            self._errors[name] = deque([(_finite(a), _finite(b)) for a, b in errors], ERRORS)
        self.refresh()

    def _origin(self) -> dict[str, Any]:
        """What something learned belongs to, as JSON gives it back."""
        costs, works = self.undisturbed, [LayerWork(n, (Span(0, n, None),)) for n in (1, 16, 256, 4096)]
        numbers = [*map(costs.layer_seconds, works), costs.head_seconds(1), costs.fixed(COMPUTE), costs.layer_fixed]
        digest = hashlib.sha256(repr([float(number) for number in numbers]).encode()).hexdigest()
        model = {**asdict(self.shape), "windows": list(self.shape.windows)}
        return {"machine": self.machine, "model": model, "undisturbed": digest}


def beside(path: str | Path) -> Path:
    """Where what was learned over saved costs is kept: costs.json has costs.learned.json."""
    return Path(path).with_suffix(".learned.json")


def this_machine() -> str:
    """The CPUs here, by name and number."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{os.cpu_count()} x {next(names, platform.processor())}"


def _median(ratios: Sequence[float], before: float, of: int | None = None) -> float:
    """The median of what so many ops (None: one each) say, and of what was believed before while they are few."""
    few = WINDOW - (len(ratios) if of is None else of)
    return statistics.median([*ratios, *[before] * min(PRIOR, max(0, few))])


def _usual(classes: Collection[Sequence[float]]) -> float:
    """The median over classes, each counting three times at most, however often it runs."""
    return _median([ratio for own in classes for ratio in own[-3:]], 1.0, of=sum(map(len, classes)))


def _curve(ratios: Mapping[int, Sequence[float]], usual: float) -> list[float]:
    """Factors at powers of two of tokens, by the ratios of some; usual: of any compute."""
    if not ratios:
        return [usual] * SIZES
    usual, seen = _usual(ratios.values()), sorted(ratios)
    factors: list[float] = np.interp(np.arange(SIZES), seen, [_median(ratios[i], usual) for i in seen]).tolist()
    return factors


def _intercept(before: Sample, after: Sample) -> Iterator[float]:
    """Where the line through two ops meets zero work, if they are far enough apart to tell."""
    (x, y), (x2, y2) = sorted((before, after))
    if x2 >= APART * x:
        yield y - x * (y2 - y) / (x2 - x)


def _link(costs: Costs) -> tuple[float, ...]:
    return costs.bandwidth, costs.fetch_seconds, costs.copy_bandwidth, costs.copy_seconds


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} among the numbers")
    return float(value)


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError(f"{value} where it takes time")
    return _finite(value)
