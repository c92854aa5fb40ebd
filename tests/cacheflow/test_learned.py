"""Costs that learn: what they follow and what they do not, that nothing fed to them breaks them, and what is kept."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheflow import bounds, cli, policies
from cacheflow.costs.base import Costs, LayerWork, ModelShape, Span
from cacheflow.costs.learned import WINDOW, Learned, beside, this_machine
from cacheflow.costs.measured import Measured
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.op import COMPUTE, COPY, FETCH, Kind, Op, Part
from cacheflow.policies.token import Token
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from models.decoder import Decoder
from tests.cacheflow import strategies
from tests.cacheflow.strategies import Affine
from tests.cacheflow.test_costs import least, staircases
from tests.cacheflow.toy import ToyCosts, check, decoder, prompt, restoring

LLAMA = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, windows=(None,) * 32)
FETCHES = 3  # after which a change of the link must be known
SLACK = 1.03  # of a TTFT planned with what was learned, over one planned with true costs


def roofline(compute: float = 1.0, link: float = 1.0, copy: float = 1.0) -> Roofline:
    """Llama-3.1-8B on an H100 at 40 Gbps; each resource so many times slower."""
    h100 = device("H100")
    speeds = {name: getattr(h100, name) / compute for name in ("gemm", "attention", "memory")}
    fixed = {name: getattr(h100, name) * compute for name in ("op_seconds", "layer_seconds")}
    machine = replace(h100, **speeds, **fixed, host=h100.host / copy)
    return Roofline(LLAMA, machine, bandwidth=40 * GBPS / link, copy_seconds=1e-5)


class World(Costs):
    """What ops take in truth: costs, times what `disturbed` says of every op."""

    def __init__(self, costs: Costs, disturbed: Callable[[Op], float]) -> None:
        self.shape, self.latency = costs.shape, costs.latency
        self.costs, self.disturbed = costs, disturbed

    def seconds(self, op: Op) -> float:
        return self.disturbed(op) * self.costs.seconds(op)

    def layer_seconds(self, work: LayerWork) -> float:
        raise NotImplementedError

    head_seconds = layer_seconds  # type: ignore[assignment]


def a_request(tokens: int) -> Request:
    return Request.of("a", prefix=tokens, suffix=64, chunk=512, layers=LLAMA.layers)


def ttft(name: str, estimates: Costs, request: Request, truth: Costs) -> float:
    """In virtual time; Learned estimates learn."""
    policy = policies.find(name)(estimates)
    if isinstance(estimates, Learned):
        policy.observe = estimates.observe
    return Simulation(policy, [request], costs=truth).ttft[request.id]


def op(kind: Kind, tokens: int, layers: int = 32, *, start: int = 0, advance: bool = True) -> Op:
    return Op(kind, range(layers), (Part("a", start, start + tokens, advance=advance),))


def project(tokens: int) -> Op:
    return op(COMPUTE, tokens, 1, advance=False)


# What it is for


@pytest.mark.parametrize("wrong", [{"compute": 2.0}, {"compute": 0.5}, {"link": 2.0}, {"link": 0.5}], ids=str)
@pytest.mark.parametrize("tokens", [4096, 32768])
@pytest.mark.parametrize("name", list(policies.available()))
def test_wrong_costs_cost_nothing_after_some_requests(name: str, tokens: int, wrong: dict[str, float]) -> None:
    truth, request, learned = roofline(), a_request(tokens), Learned(roofline(**wrong))
    times = [ttft(name, learned, request, truth) for _ in range(6)]
    assert max(times[3:]) <= SLACK * ttft(name, truth, request, truth)


@pytest.mark.parametrize("factor", [4.0, 0.01])
@pytest.mark.parametrize("tokens", [4096, 32768])
@pytest.mark.parametrize("name", list(policies.available()))
def test_wrong_fixed_costs_mislead_nobody_for_long(name: str, tokens: int, factor: float) -> None:
    """Many small ops, whose fixed cost is not as believed, say little of what large ones take."""
    truth, request = roofline(), a_request(tokens)
    launches = replace(truth.device, op_seconds=truth.device.op_seconds * factor)
    learned = Learned(Roofline(LLAMA, launches, bandwidth=truth.bandwidth, copy_seconds=truth.copy_seconds))
    times = [ttft(name, learned, request, truth) for _ in range(5)]
    assert max(times[1:]) <= SLACK * ttft(name, truth, request, truth)


@pytest.mark.parametrize(("wrong", "lost"), [({"compute": 0.5}, 1.4), ({"link": 2.0}, 1.4)], ids=str)
def test_what_it_saves(wrong: dict[str, float], lost: float) -> None:
    """Without learning the same wrong costs are paid for in every request."""
    truth, request, unlearned = roofline(), a_request(32768), roofline(**wrong)
    assert ttft("token", unlearned, request, truth) > lost * ttft("token", truth, request, truth)


@pytest.mark.parametrize("fault", [100.0, 0.01])
def test_requests_among_noise_and_outliers(fault: float) -> None:
    """A tenth of noise on every op, and a fiftieth of loads that take a hundred times as long, or as little."""
    request = a_request(16384)
    best = ttft("two-pointer", roofline(), request, roofline())
    ratios = []
    for seed in range(10):
        draw, learned = random.Random(seed), Learned(roofline(compute=2.0))

        def disturbed(op: Op, draw: random.Random = draw) -> float:
            return draw.lognormvariate(0, 0.1) * (fault if op.kind != COMPUTE and draw.random() < 0.02 else 1.0)

        for _ in range(4):
            ttft("two-pointer", learned, request, World(roofline(), disturbed))
        ratios.append(ttft("two-pointer", learned, request, roofline()) / best)
    assert statistics.median(ratios) <= SLACK


def test_a_link_that_halves_is_met_within_the_request() -> None:
    request, plain, fetches = a_request(32768), roofline(), Counter[str]()

    def halves(op: Op) -> float:
        fetches[op.kind] += 1
        return 2.0 if op.kind == FETCH and fetches[FETCH] > 5 else 1.0

    times = {}
    for name, estimates in (("plain", plain), ("learned", Learned(plain)), ("knowing", roofline(link=2.0))):
        fetches.clear()
        times[name] = ttft("token", estimates, request, World(plain, halves))
    assert times["learned"] < times["plain"]
    assert times["learned"] <= 1.01 * times["knowing"]


# What is learned


@pytest.mark.parametrize("change", [2.0, 0.5, 4.0, 0.1])
def test_a_lasting_change_is_followed_within_a_few_fetches(change: float) -> None:
    costs, fetch = roofline(), op(FETCH, 512)
    learned = Learned(costs)
    for _ in range(50):
        learned.observe(fetch, costs.seconds(fetch))
    for _ in range(FETCHES):
        learned.observe(fetch, change * costs.seconds(fetch))
    assert learned.seconds(fetch) == pytest.approx(change * costs.seconds(fetch))
    assert learned.load_seconds(100) == pytest.approx(change * costs.load_seconds(100))
    assert learned.seconds(op(COMPUTE, 512)) == costs.seconds(op(COMPUTE, 512))


@given(
    factor=st.floats(0.3, 3),
    at=st.integers(0, 30),
    outlier=st.sampled_from([100.0, 0.01, 1e6, 1e-9]),
    kind=st.sampled_from([COMPUTE, FETCH, COPY]),
    sizes=st.lists(st.sampled_from([128, 256, 512, 1024]), min_size=31, max_size=31),
)
@example(factor=1.0, at=0, outlier=100.0, kind=FETCH, sizes=[512] * 31)
def test_one_outlier_changes_nothing_much(factor: float, at: int, outlier: float, kind: Kind, sizes: list[int]) -> None:
    """However many ops came before it; after it, too, every prediction stays between the first belief and the truth."""
    costs = Affine((None,) * 4, bandwidth=16.0, copy_bandwidth=40.0)
    learned = Learned(costs)
    low, high = min(1.0, factor) * 0.99, max(1.0, factor) * 1.01
    for i, tokens in enumerate(sizes):
        one = op(kind, tokens, 4)
        learned.observe(one, costs.seconds(one) * factor * (outlier if i == at else 1.0))
        for other in (64, 512, 4096):
            assert low <= learned.seconds(op(kind, other, 4)) / costs.seconds(op(kind, other, 4)) <= high


def test_what_many_small_delays_add_up_to_is_learned() -> None:
    """Every third op is late by 0.4 of itself: the median is none the wiser, the sum of many is."""
    costs = roofline()
    learned, one = Learned(costs), op(COMPUTE, 512)
    for i in range(200):
        learned.observe(one, costs.seconds(one) * (1.0 if i % 3 else 1.4))
        assert 0.99 <= learned.seconds(one) / costs.seconds(one) <= 1.4
    assert learned.seconds(one) == pytest.approx((1 + 0.4 / 3) * costs.seconds(one), rel=0.03)
    assert learned.head_seconds(1) / costs.head_seconds(1) == pytest.approx(1 + 0.4 / 3, rel=0.03)


@pytest.mark.parametrize("kind", [COMPUTE, FETCH, COPY])
def test_fixed_costs_show_in_ops_of_different_size(kind: Kind) -> None:
    link = {"bandwidth": 16.0, "copy_bandwidth": 40.0}
    fixed = {COMPUTE: {"compute_fixed": 7.0}, FETCH: {"fetch_seconds": 7.0}, COPY: {"copy_seconds": 7.0}}[kind]
    truth = Affine((None,) * 8, pair=0.0, head=0.0, **link, **fixed)
    learned = Learned(Affine((None,) * 8, pair=0.0, head=0.0, **link))
    draw = random.Random(0)
    for _ in range(60):
        one = op(kind, 8, draw.randint(1, 7))
        learned.observe(one, truth.seconds(one) * draw.uniform(0.98, 1.02))
    assert learned.fixed(kind) == pytest.approx(7.0, rel=0.1)
    for layers in (1, 3, 7):
        assert learned.seconds(op(kind, 8, layers)) == pytest.approx(truth.seconds(op(kind, 8, layers)), rel=0.05)


def test_ops_of_one_size_say_nothing_of_their_fixed_cost() -> None:
    costs = Affine((None,), bandwidth=16.0, fetch_seconds=1.0)
    learned = Learned(costs)
    for _ in range(50):
        learned.observe(op(FETCH, 8, 1), 9.0)
    assert learned.seconds(op(FETCH, 8, 1)) == pytest.approx(9.0)
    for tokens in (1, 8, 100):  # so all of it is believed to be as much slower
        assert learned.seconds(op(FETCH, tokens, 1)) == pytest.approx(9 / 5 * costs.seconds(op(FETCH, tokens, 1)))


def test_a_fixed_cost_that_is_believed_too_high_leaves_work_a_price() -> None:
    costs = Affine((None,) * 8, bandwidth=16.0)
    learned = Learned(costs)
    for layers in (1, 7) * 4:
        learned.observe(op(FETCH, 8, layers), 7.0 + costs.seconds(op(FETCH, 8, layers)))
    for _ in range(WINDOW):
        learned.observe(op(FETCH, 8, 1), costs.seconds(op(FETCH, 8, 1)))
    assert learned.fixed(FETCH) == pytest.approx(7.0)  # more than the last ops took at all
    assert learned.load_seconds(100) > 0.1 * costs.load_seconds(100)


def test_sizes_and_kinds_of_compute_are_apart() -> None:
    costs = Roofline(LLAMA, device("H100", op_seconds=0.0), bandwidth=1e9)
    learned = Learned(costs)
    for _ in range(WINDOW):
        for one, slower in ((op(COMPUTE, 64, 31), 3.0), (op(COMPUTE, 1024, 31), 1.5), (project(512), 0.5)):
            learned.observe(one, slower * costs.seconds(one))

    def factor(tokens: int) -> float:
        work = LayerWork(tokens, (Span(0, tokens, None),))
        return learned.layer_seconds(work) / costs.layer_seconds(work)

    assert factor(64) == pytest.approx(3.0) and factor(1024) == pytest.approx(1.5)
    assert factor(8) == pytest.approx(3.0) and factor(8192) == pytest.approx(1.5)  # level beyond what was seen
    assert factor(256) == pytest.approx(2.25)  # linear in the logarithm between
    only = LayerWork(512, ())
    assert learned.layer_seconds(only) / costs.layer_seconds(only) == pytest.approx(0.5)
    assert learned.seconds(op(FETCH, 512)) == costs.seconds(op(FETCH, 512))


def test_a_class_that_is_new_is_believed_to_be_like_the_others() -> None:
    costs = roofline()
    learned = Learned(costs)
    for tokens in (64, 512, 4096):
        for _ in range(WINDOW):
            learned.observe(op(COMPUTE, tokens, 31), 2 * costs.seconds(op(COMPUTE, tokens, 31)))
    work = LayerWork(512, ())
    assert learned.layer_seconds(work) == pytest.approx(2 * costs.layer_seconds(work), rel=0.01)
    assert learned.head_seconds(1) == pytest.approx(2 * costs.head_seconds(1), rel=0.01)


def test_bounds_use_the_undisturbed_costs_which_stay_as_they_are() -> None:
    costs, request = roofline(), a_request(8192)
    before = bounds.lower([request], costs)
    learned = Learned(costs)
    for _ in range(4):
        ttft("two-pointer", learned, request, roofline(compute=3.0, link=3.0))
    assert bounds.lower([request], learned.undisturbed) == before
    assert bounds.lower([request], learned) > 2 * before


def test_a_link_that_was_given_other_numbers_is_learned_anew() -> None:
    costs = roofline()
    learned = Learned(costs)
    for kind in (FETCH, COMPUTE):
        for _ in range(WINDOW):
            learned.observe(op(kind, 512), 3 * costs.seconds(op(kind, 512)))
    costs.bandwidth *= 10
    learned.refresh()
    assert learned.seconds(op(FETCH, 512)) == costs.seconds(op(FETCH, 512))
    assert learned.seconds(op(COMPUTE, 512)) == pytest.approx(3 * costs.seconds(op(COMPUTE, 512)), rel=0.01)


# Whatever is fed


any_seconds = (
    st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-6, 1e6) | st.sampled_from([0.0, -1.0, 5e-324])
)


@st.composite
def fed(draw: st.DrawFn, windows: tuple[int | None, ...]) -> list[tuple[Op, float]]:
    """Ops of every kind, and what they took, which need make no sense."""
    compute = draw(st.lists(staircases(windows), max_size=4).map(lambda cuts: [o for cut in cuts for o in cut]))
    transfers = st.builds(
        lambda kind, tokens, layers: op(kind, tokens, layers),
        st.sampled_from([FETCH, COPY]),
        st.integers(1, 40),
        st.integers(1, len(windows)),
    )
    ops = draw(st.permutations(compute + draw(st.lists(transfers, max_size=20))))
    return [(one, draw(any_seconds)) for one in ops for _ in range(draw(st.integers(1, 3)))]


@settings(max_examples=200, deadline=None)
@given(strategies.windows(), st.data())
def test_predictions_keep_the_contract_whatever_is_fed(windows: tuple[int | None, ...], data: st.DataObject) -> None:
    costs = data.draw(strategies.costs(windows))
    learned = Learned(costs)
    for one, seconds in data.draw(fed(windows)):
        learned.observe(one, seconds)
    for one in data.draw(staircases(windows)):
        assert learned.seconds(one) >= least(learned, one) * (1 - 1e-9)
    for one in [*data.draw(staircases(windows)), *(op(kind, 7, 1) for kind in (FETCH, COPY))]:
        predicted = learned.seconds(one)
        assert math.isfinite(predicted)
        assert predicted > 0 or costs.seconds(one) == 0
    for row in learned.accuracy():
        assert row.ops > 0
        assert all(math.isfinite(x) for x in (row.factor, row.median, row.p90, row.undisturbed_p90))


@settings(max_examples=100, deadline=None)
@given(strategies.windows(), st.data())
def test_policies_end_whatever_was_learned(windows: tuple[int | None, ...], data: st.DataObject) -> None:
    costs, request = data.draw(strategies.costs(windows)), data.draw(strategies.requests(windows))
    learned = Learned(costs)
    for one, seconds in data.draw(fed(windows)):
        learned.observe(one, seconds)
    policy = data.draw(strategies.makers())(learned)
    policy.observe = learned.observe
    factors = st.floats(0.01, 100)
    simulation = Simulation(policy, [request], costs=World(costs, lambda op: data.draw(factors)))
    assert simulation.ttft["a"] >= 0


# Error


def test_accuracy_is_of_predictions_made_before() -> None:
    costs = Affine((None,), bandwidth=8.0)
    learned = Learned(costs)
    for seconds in [2.0] * 10 + [4.0]:
        learned.observe(op(FETCH, 1, 1), seconds)  # believed to take one
    [row] = learned.accuracy()
    # Predicted 1, 1, 1.5, then 2: by then three of two have the majority over the prior.
    assert (row.kind, row.ops, row.factor) == ("fetch", 11, 2.0)
    assert row.median == 0.0 and row.p90 == pytest.approx(0.5)
    assert row.undisturbed_median == pytest.approx(0.5) and row.undisturbed_p90 == pytest.approx(0.5)


def test_what_was_never_seen_has_no_error() -> None:
    assert Learned(roofline()).accuracy() == []


# Keeping


def taught(costs: Costs, machine: str = "here") -> Learned:
    learned = Learned(costs, machine=machine)
    draw = random.Random(1)
    world = World(costs, lambda op: draw.uniform(1, 3))
    for name in ("two-pointer", "layer", "recompute"):
        ttft(name, learned, a_request(4096), world)
    return learned


def predictions(learned: Learned) -> list[float]:
    ops = [op(kind, n, layers) for kind in (COMPUTE, FETCH, COPY) for n in (1, 100, 5000) for layers in (1, 32)]
    return [*map(learned.seconds, [*ops, project(300)]), learned.project_marginal, learned.fixed(FETCH)]


def test_what_was_learned_is_kept(tmp_path: Path) -> None:
    learned = taught(roofline())
    learned.save(tmp_path / "x.json")
    loaded = Learned.load(tmp_path / "x.json", roofline(), machine="here")
    assert predictions(loaded) == predictions(learned) != predictions(Learned(roofline()))
    assert loaded.accuracy() == learned.accuracy()
    for again in (learned, loaded):
        again.observe(op(FETCH, 512), 1.0)
        again.observe(op(COMPUTE, 512), 1.0)
    assert predictions(loaded) == predictions(learned)


@settings(max_examples=50, deadline=None)
@given(strategies.windows(), st.data())
def test_whatever_was_fed_is_kept(
    tmp_path_factory: pytest.TempPathFactory, windows: tuple[int | None, ...], data: st.DataObject
) -> None:
    costs = data.draw(strategies.costs(windows))
    learned = Learned(costs)
    for one, seconds in data.draw(fed(windows)):
        learned.observe(one, seconds)
    path = tmp_path_factory.mktemp("kept") / "x.json"
    learned.save(path)
    loaded = Learned.load(path, costs)
    assert loaded.accuracy() == learned.accuracy()
    for one in [*data.draw(staircases(windows)), *(op(kind, 7, 1) for kind in (FETCH, COPY))]:
        assert loaded.seconds(one) == learned.seconds(one)


def test_of_another_link_only_compute_is_kept(tmp_path: Path) -> None:
    learned, faster = taught(roofline()), roofline(link=0.5)
    learned.save(tmp_path / "x.json")
    loaded = Learned.load(tmp_path / "x.json", faster, machine="here")
    assert loaded.seconds(op(FETCH, 512)) == faster.seconds(op(FETCH, 512))
    assert loaded.seconds(op(COMPUTE, 512)) == learned.seconds(op(COMPUTE, 512))


@pytest.mark.parametrize(
    ("costs", "machine", "says"),
    [
        (roofline(), "there", "on 'here', which is not 'there'"),
        (Roofline(replace(LLAMA, dtype_bytes=4), device("H100"), bandwidth=1.0), "here", "with another model or dtype"),
        (roofline(compute=1.01), "here", "over other undisturbed costs"),
    ],
    ids=["machine", "model", "costs"],
)
def test_what_was_learned_elsewhere_is_refused(tmp_path: Path, costs: Costs, machine: str, says: str) -> None:
    path = tmp_path / "x.json"
    taught(roofline()).save(path)
    with pytest.raises(ValueError, match=f"x.json was learned {says}; delete it to learn anew"):
        Learned.load(path, costs, machine=machine)


SPOIL: dict[str, Callable[[dict[str, Any]], Any]] = {
    "format": lambda record: {**record, "format": 99},
    "no format": lambda record: {key: value for key, value in record.items() if key != "format"},
    "a list": lambda record: [record],
    "no samples": lambda record: {**record, "samples": None},
    "a class that is none": lambda record: {**record, "samples": [["walk", 3, [[1.0, 1.0]]]]},
    "a size that is none": lambda record: {**record, "samples": [["advance", 99, [[1.0, 1.0]]]]},
    "no time": lambda record: {**record, "samples": [["fetch", 0, [[1.0, 0.0]]]]},
    "infinite": lambda record: {**record, "samples": [["fetch", 0, [[1.0, math.inf]]]]},
    "half a sample": lambda record: {**record, "samples": [["fetch", 0, [[1.0]]]]},
    "fixed costs that are none": lambda record: {**record, "intercepts": {**record["intercepts"], "fetch": [math.nan]}},
    "errors without ops": lambda record: {**record, "ops": {}},
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=list(SPOIL))
def test_a_file_that_holds_no_learned_costs(tmp_path: Path, spoil: Callable[[dict[str, Any]], Any]) -> None:
    path = tmp_path / "x.json"
    taught(roofline()).save(path)
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=r"x.json holds no learned costs \(.+\); delete it to learn anew"):
        Learned.load(path, roofline(), machine="here")


@pytest.mark.parametrize("text", ["", "{", "3", "null"])
def test_a_file_that_is_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match=r"nowhere.json holds no learned costs"):
        Learned.load(tmp_path / "nowhere.json", roofline())
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no learned costs"):
        Learned.load(path, roofline())


# Where ops are reported


class Book:
    def __init__(self) -> None:
        self.seen: list[tuple[Op, float]] = []

    def __call__(self, op: Op, seconds: float) -> None:
        self.seen.append((op, seconds))


def test_a_policy_passes_on_what_ran_whole() -> None:
    """Not the part of a fetch that arrived while another failed: its seconds are those of both."""
    costs, request = roofline(), a_request(8192)
    policy, book = policies.find("layerwise-load")(costs), Book()
    policy.observe = book
    lost: list[Op] = []

    def fail(op: Op) -> Any:
        if lost or (len(op.parts) == 1 and op.parts[0].tokens <= 512):
            return ()
        lost.append(op)
        return ((Part("a", 0, 512), "bad"),)

    simulation = Simulation(policy, [request], fail=fail)
    spans = Counter(span.op for span in simulation.timeline.spans)
    assert len(lost) == 1
    assert Counter(op for op, _ in book.seen) == spans - Counter(lost)
    assert {op.kind for op, _ in book.seen} == {COMPUTE, FETCH, COPY}
    assert all(seconds == pytest.approx(costs.seconds(op)) for op, seconds in book.seen)


class Spy(Token):
    """Says what it plans with."""

    name = ""
    costs_seen: ClassVar[list[Costs]] = []

    def __init__(self, costs: Costs, **options: Any) -> None:
        super().__init__(costs, **options)
        self.costs_seen.append(costs)


SPY = f"{__name__}:Spy"


def restore(engine: Any) -> None:
    tokens = prompt(100, seed=5)
    engine.save(tokens)
    for policy in ("load", SPY):
        with restoring(engine, [[*tokens, 1, 2]], policy=policy) as [restored]:
            check(engine, restored)


@pytest.fixture
def spied() -> Iterator[list[Costs]]:
    Spy.costs_seen.clear()
    yield Spy.costs_seen
    Spy.costs_seen.clear()


def test_an_engine_learns_and_plans_with_it(make_engine, spied) -> None:
    engine = make_engine(learn=True)
    restore(engine)
    assert spied == [engine.learned]
    rows = {row.kind: row for row in engine.learned.accuracy()}
    assert {"advance", "fetch"} <= set(rows) and all(row.ops > 0 for row in rows.values())
    assert engine.known_costs is engine.costs is engine.learned.undisturbed
    assert engine.make_policy().costs is engine.known_costs
    assert engine.make_policy(costs=engine.learned).costs is engine.learned
    before = engine.learned.accuracy()
    Simulation(engine.make_policy(costs=engine.learned), [Request.of("x", prefix=64, suffix=4, chunk=8, layers=3)])
    assert engine.learned.accuracy() == before, "what only was simulated is no experience"


def test_costs_that_are_given_are_taken_at_their_word(make_engine, spied) -> None:
    engine = make_engine()
    restore(engine)
    assert spied == [engine.costs]
    assert engine.learned.accuracy() == []


@pytest.mark.parametrize("learn", [None, False])
def test_learned_costs_that_are_given_go_on_unless_told_otherwise(make_engine, spied, learn) -> None:
    given = Learned(ToyCosts(decoder()))
    engine = make_engine(costs=given, learn=learn)
    restore(engine)
    assert spied == [given]
    assert (given.accuracy() == []) == (learn is False)
    assert engine.known_costs is given.undisturbed


def test_costs_that_are_measured_are_learned_over(make_engine, monkeypatch) -> None:
    monkeypatch.setattr("cacheflow.costs.measure.REPEATS", (1, 1))
    engine = make_engine(costs=None)
    restore(engine)
    first = engine.learned
    assert first.accuracy() and first.machine == this_machine()
    engine.measure()
    assert engine.learned is not first and engine.learned.undisturbed is engine.costs
    assert engine.learned.accuracy() == []


def test_an_engine_takes_up_the_bandwidth_that_is_set(make_engine) -> None:
    engine = make_engine(learn=True)
    restore(engine)
    assert engine.learned.bandwidth != engine.known_costs.bandwidth
    engine.known_costs.bandwidth *= 2
    with restoring(engine, [prompt(20, seed=9)]):  # nothing of it is stored
        assert engine.learned.bandwidth == engine.known_costs.bandwidth


# The command


@pytest.fixture
def toy_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Iterator[Callable[..., str]]:
    monkeypatch.setattr("cacheflow.costs.measure.REPEATS", (1, 1))
    monkeypatch.setattr(Decoder, "from_folder", classmethod(lambda cls, *args: decoder()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def call(*argv: object) -> str:
        assert cli.main(["measure", "--model", "toy", *map(str, argv)]) == 0
        return str(capsys.readouterr().out)

    yield call
    torch.set_num_threads(threads)


def test_measure_shows_and_keeps_what_was_learned(toy_command, tmp_path) -> None:
    path = tmp_path / "costs.json"
    report = json.loads(toy_command("--tokens", 256, "--learn", 1, "--out", path, "--json"))
    rows = {row["kind"]: row for row in report["learned"]}
    assert {"advance", "fetch", "copy"} <= set(rows)
    learned = Learned.load(
        beside(path), Measured.load(path, ModelShape.of(decoder().config, 4)), machine=this_machine()
    )
    assert [vars(row) for row in learned.accuracy()] == report["learned"]
    table = toy_command("--tokens", 64, "--learn", 1)
    assert "learned from what ran" in table and "undisturbed" in table


def test_measure_learns_only_when_told(toy_command, tmp_path) -> None:
    path = tmp_path / "costs.json"
    assert "learned" not in toy_command("--tokens", 16, "--out", path)
    assert path.exists() and not beside(path).exists()
