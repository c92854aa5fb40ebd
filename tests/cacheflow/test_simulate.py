"""Virtual time: when ops start and end, and what a simulation reports."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from cacheflow import policies
from cacheflow.op import COMPUTE, COPY, FETCH, Op, Part
from cacheflow.request import Request
from cacheflow.simulate import Simulation, VirtualBackend
from tests.cacheflow import strategies
from tests.cacheflow.strategies import Affine

REQUEST = Request.of("a", prefix=32, suffix=3, chunk=8, layers=4)


def costs(**options: Any) -> Affine:
    return Affine(REQUEST.windows, **{"bandwidth": 16.0, **options})


class TestBackend:
    def test_one_op_at_a_time_on_every_stream(self) -> None:
        backend = VirtualBackend(costs())
        for start in (0, 8, 16):
            backend.submit(Op(FETCH, range(4), (Part("a", start, start + 8),)))
        ends = [next(iter(backend.wait())) for _ in range(3)]
        assert [(c.start, c.end) for c in ends] == [(0.0, 16.0), (16.0, 32.0), (32.0, 48.0)]  # 8 x 4 cells of 8 bytes
        assert backend.now() == 48.0 and not list(backend.wait())

    def test_latency_hides_behind_other_transfers(self) -> None:
        backend = VirtualBackend(costs(latency=5.0))
        for start in (0, 8):
            backend.submit(Op(FETCH, range(4), (Part("a", start, start + 8),)))
        assert [next(iter(backend.wait())).start for _ in range(2)] == [5.0, 21.0]
        backend.submit(Op(FETCH, range(4), (Part("a", 16, 24),)))
        assert next(iter(backend.wait())).start == 42.0  # asked for when the link was idle

    def test_compute_waits_for_copies_of_its_own_request(self) -> None:
        backend = VirtualBackend(costs(copy_seconds=7.0))
        backend.submit(Op(COPY, range(4), (Part("a", 0, 8),)))
        backend.submit(Op(COMPUTE, range(1), (Part("b", 0, 8),)))
        backend.submit(Op(COMPUTE, range(1), (Part("a", 8, 16),)))
        started = {c.op.parts[0]: c.start for _ in range(3) for c in backend.wait()}
        assert started == {Part("a", 0, 8): 0.0, Part("b", 0, 8): 0.0, Part("a", 8, 16): pytest.approx(8 + 0.4 + 0.36)}
        backend = VirtualBackend(costs(copy_seconds=70.0))
        backend.submit(Op(COPY, range(4), (Part("a", 0, 8),)))
        backend.submit(Op(COMPUTE, range(1), (Part("a", 8, 16),)))
        assert [c.start for _ in range(2) for c in backend.wait()] == [0.0, 70.0]

    def test_failures_come_with_the_fetch(self) -> None:
        lost = ((Part("a", 8, 16), "late"),)
        backend = VirtualBackend(costs(), fail=lambda op: lost)
        backend.submit(Op(FETCH, range(1), (Part("a", 0, 24),)))
        assert [c.failures for c in backend.wait()] == [lost]


class TestSimulation:
    def test_reports_ttft_timeline_and_failures(self) -> None:
        lost = Part("a", 24, 32)
        simulation = Simulation(
            policies.find("load")(costs()),
            [REQUEST],
            fail=lambda op: tuple((part, "bad") for part in op.parts if part == lost),
        )
        spans = simulation.timeline.spans
        assert simulation.ttft == {"a": max(span.end for span in spans)}
        assert simulation.failures == {("a", "bad"): 1}
        assert sum(span.bytes for span in spans if span.op.kind == COPY) == 24 * 4 * 8
        assert [span.bytes for span in spans if span.op.kind == COMPUTE] == [0, 0]

    def test_true_costs_may_differ_from_estimates(self) -> None:
        request = [REQUEST]
        right = Simulation(policies.find("token")(costs()), request).ttft["a"]
        wrong = Simulation(policies.find("token")(costs(bandwidth=1e6)), request, costs=costs()).ttft["a"]
        slow = Simulation(policies.find("token")(costs()), request, costs=costs(bandwidth=1.0)).ttft["a"]
        assert right < wrong and right < slow

    @settings(max_examples=50, deadline=None)
    @given(batch=strategies.batches(), make=strategies.makers())
    def test_is_deterministic(self, batch: list[Request], make: Any) -> None:
        model = Affine(batch[0].windows, bandwidth=5.0, latency=0.1, loss=0.2)
        runs = [Simulation(make(model), batch) for _ in range(2)]
        assert runs[0].ttft == runs[1].ttft
        assert runs[0].timeline.spans == runs[1].timeline.spans

    def test_timeline_is_in_order_of_ends(self) -> None:
        spans = Simulation(policies.find("two-pointer")(costs()), [REQUEST]).timeline.spans
        assert all(a.end <= b.end for a, b in pairwise(spans))
        assert {span.stream for span in spans} == {COMPUTE, FETCH, COPY}
