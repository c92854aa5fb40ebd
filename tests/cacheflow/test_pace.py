"""How fast compute and the link are found to be, by what ops took."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.costs.base import ModelShape
from cacheflow.costs.learned import Learned
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.op import FETCH, Op, Part
from cacheflow.policies.pace import ASKED, RECENT, LinkPace, Pace
from models.config import ModelConfig

LLAMA = ModelShape.of(ModelConfig.preset("llama-3.1-8b"), 2)
ROW = 8192  # tokens


def costs(gbps: float = 40) -> Roofline:
    return Roofline(LLAMA, device("H100"), bandwidth=gbps * GBPS, fetch_seconds=10e-6)


def row(layer: int = 0, tokens: int = ROW) -> Op:
    return Op(FETCH, range(layer, layer + 1), (Part("a", 0, tokens),))


def test_large_ops_count_and_of_those_the_median():
    pace = Pace()
    assert pace.known == 1
    pace.ended(9.0, 1.0)
    assert pace.known == 1, "one may be an outlier"
    pace.ended(3.0, 1.0)
    assert pace.known == 3
    for _ in range(RECENT - 2):
        pace.ended(0.9, 0.1)  # small ones lose more
    assert pace.known == 3
    pace.ended(3.0, 1.0)
    pace.ended(1.0, 1.0)
    pace.ended(1.0, 1.0)
    assert pace.known == 1


def test_a_larger_op_does_not_undo_what_others_have_shown():
    pace = Pace()
    for _ in range(10):
        pace.ended(3.0, 1.0)
    pace.ended(30.0, 10.0)
    assert pace.known == 3


@given(
    ran=st.lists(
        st.tuples(st.floats(0.1, 10), st.sampled_from([10, 1000, 5000, ROW]), st.sampled_from([0, 4000, ROW]))
    ),
    asked=st.sets(st.integers(0, 20)),
)
def test_what_is_known_does_not_depend_on_who_has_asked(ran, asked):
    both = [LinkPace(costs(), []) for _ in range(2)]
    for i, (slower, tokens, large) in enumerate(ran):
        estimate = costs().seconds(row(tokens=tokens))
        for pace in both:
            pace.row = large
            pace.ended(slower * estimate, estimate)
        if i in asked:
            assert both[0].known > 0
    assert both[0].known == both[1].known


@pytest.mark.parametrize("slower", [0.5, 1.0, 4.0])
def test_a_fetch_that_was_queued_before_costs_learned_is_measured_by_what_they_have_learned(slower):
    """Two are in flight: of the second, the estimate as of when it was queued is of no use any more."""
    learned = Learned(costs())
    queued = [(row(layer), learned.seconds(row(layer))) for layer in range(2)]
    pace, now = LinkPace(learned, queued), 0.0
    pace.row = ROW
    for layer in range(2, 10):
        op, _ = queued[0]
        seconds = slower * costs().seconds(op)
        told = pace.at(now) * learned.load_seconds(1) / costs().load_seconds(1)
        pace.at(now + 0.99 * seconds)
        if layer >= 4:  # two have ended
            assert told == pytest.approx(slower, rel=1e-2)
            assert pace.at(now + 0.99 * seconds) == pytest.approx(pace.at(now), rel=1e-2)
        now += seconds
        del queued[0]
        pace.ended(seconds, learned.seconds(op))
        learned.observe(op, seconds)
        queued.append((row(layer), learned.seconds(row(layer))))


def test_the_fetch_that_runs_is_held_against_what_it_is_estimated_to_take_now():
    known = costs()
    pace = LinkPace(known, [(row(), known.seconds(row()))])
    pace.row = ROW
    known.bandwidth /= 4  # as costs that learn do
    estimate = known.seconds(row())
    pace.ended(1.6 * estimate, estimate)
    pace.ended(1.2 * estimate, estimate)
    before = pace.at(0.0)
    assert before == pytest.approx(1.2, rel=1e-2)
    assert pace.at(0.99 * estimate) == before
    assert pace.at(1.4 * estimate) == pytest.approx(1.4, rel=1e-2)


@pytest.mark.parametrize(("slower", "late"), [(1.2, False), (1.3, True)])
def test_noise_is_not_late(slower, late):
    """Loads in another order take more fetches."""
    pace, estimate = LinkPace(costs(), []), costs().seconds(row())
    for times in (1.0, 1.0, slower):
        pace.row = ROW
        pace.ended(times * estimate, estimate)
    assert pace.late == late


def test_the_fetch_that_runs_is_seen_to_be_late_with_one_that_was_before():
    queued = [(row(), costs().seconds(row()))]
    pace, estimate = LinkPace(costs(), queued), costs().seconds(row())
    pace.row = ROW
    assert pace.at(1.0) == 1 and pace.busy(1.0) == estimate
    assert pace.at(1.0 + 4 * estimate) == 1
    pace.ended(4 * estimate, estimate)
    assert pace.late and pace.known == 1
    assert pace.at(1.0 + estimate) == 1
    assert pace.at(1.0 + 4 * estimate) == pytest.approx(4, rel=1e-2)
    queued.clear()
    assert pace.at(100.0) == 1 and pace.busy(100.0) == 0


def test_a_small_fetch_that_takes_too_long_says_nothing():
    queued = [(row(tokens=ROW // 8), costs().seconds(row(tokens=ROW // 8)))]
    pace, estimate = LinkPace(costs(), queued), costs().seconds(row())
    pace.row = ROW
    pace.ended(2 * estimate, estimate)
    assert pace.at(0.0) == pace.at(10.0) == 1


def test_what_a_small_fetch_loses_does_not_grow_with_size():
    pace, small = LinkPace(costs(), []), costs().seconds(row(tokens=ROW // 2))
    pace.row = ROW
    for _ in range(ASKED):
        pace.ended(2 * small, small)
    assert pace.known == pytest.approx(1.5, rel=1e-2)
    pace.row = ROW // 2  # rows of the request that goes first now are no larger
    assert pace.known == pytest.approx(2.0, rel=1e-2)


def test_an_infinitely_fast_link_is_as_estimated():
    queued = [(row(), 10e-6)]
    pace = LinkPace(costs(math.inf), queued)
    assert pace.at(0.0) == 1
    assert pace.at(1.0) == 1, "the fetch takes longer than estimated"
    pace.ended(1.0, 10e-6)
    assert pace.known == 1 and not pace.late and pace.seconds(100) == 0


def test_a_link_that_becomes_infinitely_fast_is_as_estimated():
    known = costs()
    pace, estimate = LinkPace(known, []), known.seconds(row())
    for _ in range(ASKED):
        pace.ended(2 * estimate, estimate)
    assert pace.known == pytest.approx(2, rel=1e-2)
    pace.ended(2 * estimate, estimate)
    known.bandwidth = math.inf
    assert pace.known == 1 and not pace.late
