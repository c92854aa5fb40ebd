"""The published policies: the baselines are sane, the hybrids beat both ends, two-pointer follows the paper."""

from __future__ import annotations

from typing import Any

import pytest

from cacheflow import bounds, policies
from cacheflow.costs.base import ModelShape
from cacheflow.costs.roofline import GBPS, Roofline, device
from cacheflow.op import COMPUTE, FETCH, Op, Part
from cacheflow.plane import EMPTY, Plane
from cacheflow.policies.two_pointer import TwoPointer
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from tests.cacheflow.strategies import Affine

LLAMA = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, windows=(None,) * 32)


class TestBaselines:
    @staticmethod
    def costs(device_name: str = "H100", gbps: float = 10) -> Roofline:
        return Roofline(LLAMA, device(device_name), bandwidth=gbps * GBPS, latency=1e-3, fetch_seconds=1e-4)

    @staticmethod
    def request(tokens: int) -> Request:
        return Request.of("a", prefix=tokens - 37, suffix=64, chunk=512, layers=32)

    @pytest.mark.parametrize("device_name", ["A100-40G", "H100"])
    @pytest.mark.parametrize("gbps", [10, 40, 80])
    def test_hybrids_beat_both_ends(self, device_name: str, gbps: float) -> None:
        costs = self.costs(device_name, gbps)
        for tokens in (4096, 8192, 32768, 131072):
            request = self.request(tokens)
            ttft = {name: Simulation(cls(costs), [request]).ttft["a"] for name, cls in policies.available().items()}
            best = min(ttft["recompute"], ttft["load"])
            assert ttft["layerwise-load"] <= ttft["load"]
            for name in ("token", "layer", "two-pointer"):
                assert bounds.lower([request], costs) <= ttft[name] <= 1.02 * best, (tokens, name)

    @pytest.mark.parametrize("name", ["load", "token", "layer", "two-pointer"])
    def test_restoration_comes_first_the_suffix_after(self, name: str) -> None:
        request = self.request(32768)
        spans = Simulation(policies.find(name)(self.costs()), [request]).timeline.spans
        suffix = [s for s in spans if s.op.kind == COMPUTE and s.op.parts[0].start >= request.prefix]
        assert len(suffix) == 1 and suffix[0].op.layers == range(32)
        assert suffix[0].start >= max(s.end for s in spans if s is not suffix[0])

    def test_recompute_is_one_pass_per_token_budget(self) -> None:
        policy = policies.find("recompute")(self.costs(), token_budget=8192)
        simulation = Simulation(policy, [self.request(32768)])
        ops = [span.op for span in simulation.timeline.spans]
        assert all(op.kind == COMPUTE and op.layers == range(32) for op in ops)
        assert len(ops) == 5  # 32795 tokens, the suffix in the last pass

    def test_load_is_bytes_over_bandwidth_and_the_suffix(self) -> None:
        costs, request = self.costs(), self.request(32768)
        simulation = Simulation(policies.find("load")(costs), [request])
        fetches = [span for span in simulation.timeline.spans if span.op.kind == FETCH]
        suffix = costs.seconds(Op(COMPUTE, range(32), (Part("a", request.prefix, request.tokens),)))
        link = costs.latency + 64 * costs.fetch_seconds + request.prefix * 32 * 4096 / costs.bandwidth
        last_copy = costs.seconds(fetches[-1].op.of("copy"))
        assert simulation.ttft["a"] == pytest.approx(link + last_copy + suffix)

    def test_layerwise_load_hides_the_suffix(self) -> None:
        costs, request = self.costs(), self.request(32768)
        simulation = Simulation(policies.find("layerwise-load")(costs), [request])
        spans = simulation.timeline.spans
        last_fetch = max(span.end for span in spans if span.op.kind == FETCH)
        assert [s.op.layers for s in spans if s.op.kind == FETCH] == [range(i, i + 1) for i in range(32)]
        after = [s.op.layers for s in spans if s.op.kind == COMPUTE and s.end > last_fetch]
        assert after == [range(31, 32)]

    @pytest.mark.parametrize("name", sorted(policies.available()))
    def test_estimates_stay_linear_in_columns(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A decision may not look at columns times layers: at 128K tokens that would cost more than it gains."""
        costs, request = self.costs(), self.request(131072)
        policy, calls, most = policies.find(name)(costs), 0, 0
        seconds, next_op = costs.seconds, policy.next

        def counted(op: Op) -> float:
            nonlocal calls
            calls += 1
            return seconds(op)

        def decision(resource: str, now: float) -> Op | None:
            nonlocal most
            before = calls
            op = next_op(resource, now)
            most = max(most, calls - before)
            return op

        monkeypatch.setattr(costs, "seconds", counted)
        monkeypatch.setattr(policy, "next", decision)
        Simulation(policy, [request])
        assert most <= 2 * request.columns + 10
        assert calls <= 10 * (request.columns + request.layers) * 3


class TestTwoPointer:
    def costs(self, layers: int = 4, **link: Any) -> Affine:
        return Affine((None,) * layers, **{"bandwidth": 2.0, **link})

    def requests(self, *prefixes: int) -> list[Request]:
        return [Request.of("abcd"[i], prefix=p, suffix=1, chunk=8, layers=4) for i, p in enumerate(prefixes)]

    @pytest.mark.parametrize(("crossover", "axis"), [(64, "token"), (65, "layer")])
    def test_axis_by_crossover_length(self, crossover: int, axis: str) -> None:
        policy = TwoPointer(self.costs(), crossover=crossover)
        (request,) = self.requests(64)
        policy.add(Plane(request))
        op = policy.next("compute", 0.0)
        assert op is not None
        assert op.layers == (range(4) if axis == "token" else range(1))
        assert (op.tokens < 64) == (axis == "token")

    def test_axis_by_costs(self) -> None:
        """Late chunks of a long prefix cost more, which favours the token axis; short ones pay for every op."""
        costs = Roofline(LLAMA, device("H100"), bandwidth=40 * GBPS)
        axes = []
        for tokens in (2048, 131072):
            policy = TwoPointer(costs)
            policy.add(Plane(Request.of("a", prefix=tokens, suffix=64, chunk=512, layers=32)))
            op = policy.next("compute", 0.0)
            assert op is not None
            axes.append("layer" if len(op.layers) == 1 else "token")
        assert axes == ["layer", "token"]

    def test_token_axis_where_hidden_states_do_not_fit(self) -> None:
        policy = TwoPointer(self.costs(), crossover=10**9, hidden_tokens=63)
        policy.add(Plane(self.requests(64)[0]))
        op = policy.next("compute", 0.0)
        assert op is not None and op.layers == range(4)

    def test_link_serves_whom_most_is_left_to_recompute(self) -> None:
        policy = TwoPointer(self.costs(pair=1.0), crossover=0)
        planes = [Plane(request) for request in self.requests(32, 64, 48)]
        for plane in planes:
            policy.add(plane)
        for now in range(20):
            left = {plane.request.id: _recompute(plane) for plane in policy.active()}
            op = policy.next("link", float(now))
            if op is None:
                break
            assert left[op.requests[0]] == max(left.values())
            policy.finished(op, 1.0)
            policy.finished(op.of("copy"), 1.0)

    def test_compute_goes_round(self) -> None:
        policy = TwoPointer(self.costs(), crossover=0)
        for request in self.requests(32, 64, 48):
            policy.add(Plane(request))
        served = []
        for now in range(6):
            op = policy.next("compute", float(now))
            assert op is not None
            served.append(op.requests[0])
            policy.finished(op, 1.0)
        assert served == ["a", "b", "c", "a", "b", "c"]

    def test_pointers_meet_without_waste(self) -> None:
        """Both sides work until the prefix is back, and end together but for 1 % of it."""
        costs = TestBaselines.costs(gbps=10)
        request = TestBaselines.request(32768)
        for crossover in (0, 10**9):
            spans = Simulation(TwoPointer(costs, crossover=crossover), [request]).timeline.spans
            compute = [s for s in spans if s.op.kind == COMPUTE and s.op.parts[0].start < request.prefix]
            fetch = [s for s in spans if s.op.kind == FETCH]
            assert compute[-1].end == pytest.approx(fetch[-1].end, rel=0.01)
            for side in (compute, fetch):
                assert sum(s.seconds for s in side) >= 0.99 * (side[-1].end - side[0].start)


def _recompute(plane: Plane) -> float:
    """Pairs that are left: with a dominant pair cost the seconds of whole columns rank like it."""
    b = plane.request.boundaries
    columns = (c for c in range(plane.prefix_columns) if any(row[c] == EMPTY for row in plane.state))
    return sum(b[c + 1] * (b[c + 1] + 1) - b[c] * (b[c] + 1) for c in columns)
