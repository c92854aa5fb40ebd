"""scripts/figures.py and cacheflow.published: the numbers behind the figures, and that what is published says so."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow import bounds, plots, policies, published
from cacheflow.costs.roofline import DEVICES, GBPS, Roofline, device
from cacheflow.published import CHUNK, K, Published, Setting
from cacheflow.request import Request
from cacheflow.simulate import Simulation
from tests.cacheflow import test_oracles as oracles

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = [value for value in vars(published).values() if isinstance(value, Published)]
ALIKE = 1 - 1e-9  # of a bound: what rounding may take


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["figures"]


@pytest.fixture(scope="module")
def small():
    """Published figures compared at few settings."""
    cached = (published.busy, published.streams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "GRID", (("H100", 10, 6 * K), ("L40S", 40, 6 * K)))
        patch.setattr(published, "batch_gains", cache(partial(published.batch_gains.__wrapped__, seeds=1)))
        patch.setattr(published, "stream", partial(published.stream, count=12))
        for function in cached:
            function.cache_clear()
        yield
        for function in cached:
            function.cache_clear()


@pytest.fixture(scope="module")
def compared(small):
    return published.comparisons()


def independent(name, tokens, gbps, suffix=64, machine="H100"):
    """TTFT and lower bound without anything of cacheflow.published."""
    costs = Roofline(oracles.LLAMA, device(machine), bandwidth=gbps * GBPS)
    request = Request.of("a", prefix=tokens, suffix=suffix, chunk=512, layers=32)
    return Simulation(policies.find(name)(costs), [request]).ttft["a"], bounds.lower([request], costs)


class TestNumbers:
    @settings(max_examples=12, deadline=None)
    @given(
        tokens=st.integers(1, 16 * K),
        gbps=st.sampled_from([1, 7, 40, 160, 400]),
        suffix=st.sampled_from([1, 64, 1024]),
        machine=st.sampled_from(sorted(DEVICES)),
    )
    def test_a_sweep_is_what_the_simulator_says_and_not_below_the_bound(self, figures, tokens, gbps, suffix, machine):
        where = Setting(gbps=gbps, suffix=suffix, device=machine)
        found = figures.sweep({"here": (where, tokens), "there": (Setting(), 512)})
        assert found.at == ("here", "there")
        assert list(found.ttft) == list(policies.available())
        for name in found.ttft:
            expected = independent(name, tokens, gbps, suffix, machine)
            assert (found.ttft[name][0], found.bound[0]) == pytest.approx(expected)
            assert min(found.over_bound(name)) >= ALIKE

    def test_batches_keep_above_their_bounds_and_a_batch_of_one_is_its_own_last(self, figures):
        mean, last = figures.batches(Setting(gbps=40), (1, 2, 4), seeds=2)
        for name in mean.ttft:
            assert min(mean.over_bound(name) + last.over_bound(name)) >= ALIKE
            assert mean.ttft[name][0] == last.ttft[name][0]
            assert all(m < n for m, n in zip(mean.ttft[name][1:], last.ttft[name][1:], strict=True))
            assert sorted(last.ttft[name]) == last.ttft[name]
        prefixes = [
            pair for seed in range(2) for pair in (published.lengths(4, seed)[:2], published.lengths(4, seed)[2:])
        ]
        expected = fmean(fmean(Setting(gbps=40).ttft("token", *pair)) for pair in prefixes)
        assert mean.ttft["token"][1] == pytest.approx(expected)

    @given(count=st.integers(1, 60), seed=st.integers(0, 1000))
    def test_lengths_are_whole_chunks_and_the_same_again(self, count, seed):
        drawn = published.lengths(count, seed)
        assert drawn == published.lengths(count, seed) and len(drawn) == count
        assert all(n % CHUNK == 0 and CHUNK <= n <= 128 * K for n in drawn)

    def test_lengths_have_the_median_that_is_asked_for(self):
        drawn = sorted(published.lengths(4000, 0, median=8 * K))
        assert drawn[2000] == pytest.approx(8 * K, rel=0.05)

    def test_steps_lead_from_one_resource_to_pipelined(self, figures):
        where = Setting(gbps=40)
        steps, bound = figures.gains(where, [[8 * K]])
        singles = [independent(name, 8 * K, 40)[0] for name in ("recompute", "load")]
        assert steps[0].seconds == pytest.approx(min(singles)) and steps[0].policy == "load"
        assert steps[-1].seconds == pytest.approx(independent("pipelined", 8 * K, 40)[0])
        assert min(step.seconds for step in steps) >= bound * ALIKE > 0
        assert not any(step.alone for step in steps)

    def test_steps_of_a_batch_restore_one_after_another_before_they_plan_together(self, figures):
        where = Setting(gbps=40)
        steps, bound = figures.gains(where, [[16 * K, 2 * K], [4 * K, 4 * K]])
        long, short, same = (independent("pipelined", n * K, 40)[0] for n in (16, 2, 4))
        came, shortest = (step for step in steps if step.alone)
        assert came.seconds == pytest.approx(((2 * long + short) / 2 + 1.5 * same) / 2)
        assert shortest.seconds == pytest.approx(((2 * short + long) / 2 + 1.5 * same) / 2)
        assert shortest.last == came.last == pytest.approx((long + short + 2 * same) / 2)
        assert steps[-1].policy == "pipelined" and not steps[-1].alone
        assert min(step.seconds for step in steps) >= bound * ALIKE > 0


class TestCrossover:
    @pytest.mark.parametrize(
        ("ratio", "expected"),
        [
            ([1.1, 0.9, 0.8], 2**0.5),
            ([1.1, 0.9, 1.1, 0.9], 4 * 2**0.5),
            ([1.0, 0.9, 0.8], 1),
            ([1.2, 0.9, 1.1], float("inf")),
            ([1.1, 1.0, 0.9], 2),
        ],
        ids=["between", "last of several", "always", "never", "on a point"],
    )
    def test_from_where_on(self, ratio, expected):
        assert published.crossover(ratio, [2**i for i in range(len(ratio))]) == pytest.approx(expected)

    @given(ratio=st.lists(st.floats(0.5, 1.5), min_size=1, max_size=9))
    def test_it_is_behind_the_last_length_above_one(self, ratio):
        tokens = [K << i for i in range(len(ratio))]
        found = published.crossover(ratio, tokens)
        assert all(r <= 1 for n, r in zip(tokens, ratio, strict=True) if n > found)
        assert found == tokens[0] or any(r > 1 for n, r in zip(tokens, ratio, strict=True) if n <= found)

    def test_it_exists_and_comes_later_where_late_chunks_cost_less(self, monkeypatch):
        """What makes the token axis sooner is that attention makes late chunks dearer."""
        found = []
        for attention in (30e12, 131e12, 1000e12):
            monkeypatch.setitem(DEVICES, "some", replace(DEVICES["H100"], attention=attention))
            ratio = [published.axes_ratio(Setting(device="some"), n) for n in published.LENGTHS]
            found.append(published.crossover(ratio, published.LENGTHS))
        assert found[0] < found[1] < found[2] < published.LENGTHS[-1]

    def test_it_comes_later_chunk_by_chunk(self, figures):
        passes, chunks = (figures.crossing(10, published.LENGTHS, by_chunk=by_chunk) for by_chunk in (False, True))
        assert passes[-1] < 1 and passes[0] == pytest.approx(
            independent("token", K, 10)[0] / independent("layer", K, 10)[0]
        )
        first, second = (published.crossover(ratio, published.LENGTHS) for ratio in (passes, chunks))
        assert K < first < second < 128 * K


class TestPublished:
    @pytest.mark.parametrize("figure", EVERYTHING, ids=lambda figure: figure.what)
    def test_every_figure_has_its_source_and_says_that_it_is_published(self, figure):
        assert figure.label == f"published, {published.SHORT[figure.source]}"
        assert figure.values and figure.what and figure.setting and figure.unit in ("x", "s", "%", "tokens")

    def test_they_are_the_oracles(self):
        assert oracles.LONGALPACA == published.LONGALPACA_7B and Setting().shape == oracles.LLAMA
        assert {"A100-40G": published.CAKE_A100.values, "H100": published.CAKE_H100.values} == oracles.FIGURE_4
        assert oracles.CAKE_BANDWIDTH == published.CAKE_BANDWIDTH

    def test_streams_and_busy_know_one_resource_from_two(self, small):
        assert published.busy("recompute") == pytest.approx((100, 0))
        compute, link = published.busy("load")
        assert compute == 0 and link > 95
        assert all(80 < share <= 100 + 1e-9 for share in published.busy("pipelined"))
        assert published.sides_apart(Setting(), "load", 4 * K) == 1
        assert published.sides_apart(Setting(), "recompute", 4 * K) == 1
        assert published.sides_apart(Setting(), "staircase", 16 * K) < 0.1

    def test_a_stream_is_no_sooner_than_its_requests_alone(self):
        seen = published.stream(Setting(), load=0.3, count=6)
        alone = fmean(Setting().costs.head_seconds(1) + independent("token", n, 10)[1] for n in published.lengths(6, 0))
        assert set(seen) == {*published.RIVALS, "staircase", "pipelined"}
        assert all(mean >= 0.99 * alone and mean <= p99 for mean, _, p99 in seen.values())
        assert published.stream(Setting(), load=0.6, count=6)["load"][0] > seen["load"][0]

    def test_gains_over_the_best_rival_reach_from_the_least_to_the_most(self):
        streams = [{"a": (4, 4, 8), "b": (6, 3, 9), "we": (2, 2, 2)}, {"a": (9, 9, 9), "b": (8, 8, 6), "we": (2, 1, 3)}]
        assert published.stream_gains(streams, "we", ("a", "b")) == [(2, 4), (1.5, 8), (2, 4)]

    def test_everything_is_compared(self, compared):
        assert {id(each.published) for each in compared} == {id(figure) for figure in EVERYTHING}
        for each in compared:
            assert each.word, each
            assert len(each.ours) in (0, len(each.published.values))
            assert len(each.pipelined) in (0, len(each.published.values))
            assert bool(each.ours) == bool(each.setting)
        ours = {each.published.what: each.ours for each in compared if not each.reading}
        for figure, within in (
            (published.CAKE_A100, 0.03),
            (published.CAKE_H100, 0.03),
            (published.CAKE_LOAD, 1e-9),
            (published.CAKE_TABLE_4, 0.08),
        ):
            assert ours[figure.what] == pytest.approx(figure.values, rel=within)
        one, several = ours[published.V1_LENGTH.what]
        assert one == pytest.approx(independent("recompute", 6 * K, 10)[0] / independent("two-pointer", 6 * K, 10)[0])
        assert several > one


class TestPictures:
    @pytest.fixture
    def drawn(self, figures, compared, monkeypatch, tmp_path, capsys):
        """Everything that the command writes, from fewer numbers; the page and the figures as matplotlib has them."""
        made = []

        def new_figure(*size):
            made.append(plot(*size))
            made[-1].set_dpi(40)
            return made[-1]

        plot = plots.new_figure
        monkeypatch.setattr(plots, "new_figure", new_figure)
        monkeypatch.setattr(published, "comparisons", lambda: compared)
        monkeypatch.setattr(figures, "TOKENS", (512, 2048, 8192))
        monkeypatch.setattr(figures, "LINKS", (1, 20, 400))
        monkeypatch.setattr(figures, "CROSSING", (1024, 4096, 16384))
        monkeypatch.setattr(figures, "BATCHES", (1, 2))
        monkeypatch.setattr(figures, "SEEDS", 1)
        monkeypatch.setattr(figures, "EIGHTS", 1)
        assert figures.main(["--out", str(tmp_path / "pictures")]) == 0
        assert f"{len(figures.FIGURES)} figures" in capsys.readouterr().out
        return tmp_path / "pictures", made

    def test_the_page_shows_every_figure_and_says_what_is_published(self, figures, drawn):
        folder, made = drawn
        page = (folder / "index.html").read_text(encoding="utf-8")
        shown = re.findall(r'<img src="([^"]+)"', page)
        written = sorted(path.name for path in folder.iterdir() if path.name != "index.html")
        assert sorted(shown) == written and len(shown) == len(figures.FIGURES) == len(made)
        assert all((folder / name).stat().st_size > 4_000 for name in shown)
        assert page.count("<figcaption>") == len(shown)
        assert not re.search(r"<script|https?:|url\(", page)
        for figure in EVERYTHING:
            assert figure.what in page and figures._values(figure, figure.values) in page

        for each in made:
            texts = [text.get_text() for legend in each.legends for text in legend.get_texts()]
            for axes in each.axes:
                legend = axes.get_legend()
                texts += [text.get_text() for text in legend.get_texts()] if legend else []
            points = [line for axes in each.axes for line in axes.lines if line.get_marker() == "D"]
            hollow = [line for line in points if line.get_markerfacecolor() == "white"]
            assert bool(hollow) == any(text.startswith("published") for text in texts)

    def test_policies_keep_apart_and_look_the_same_everywhere(self):
        names = list(policies.available())
        assert len({plots.policy_colour(name) for name in names}) == len(names)
        lines = {name: plots.policy_line(name) for name in names}
        assert all(lines[name]["color"] == plots.policy_colour(name) for name in names)
        heaviest = max(lines, key=lambda name: lines[name]["linewidth"])
        assert heaviest == plots.EMPHASISED == "pipelined"
        assert plots.policy_colour("module:Class") not in {plots.policy_colour(name) for name in names}


def test_the_table_lists_what_is_published_beside_ours(figures, monkeypatch, capsys):
    compared = [
        published.Comparison(published.V1_LENGTH, (1.624, 2.5), (), "somewhere", "because.", "of the mean"),
        published.Comparison(published.V2_PLANNER, word="not simulated."),
    ]
    monkeypatch.setattr(published, "comparisons", lambda: compared)
    assert figures.main(["--table"]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if "of the mean" in line)
    assert re.search(r"v1 .*6K and 30K tokens; of the mean +1\.10, 1\.70 x +1\.62, 2\.50 x +-$", row)
    assert "0.019, 0.340 %" in text and "Ours: somewhere. because." in text and published.V1 in text


@pytest.mark.parametrize(
    ("figure", "values", "expected"),
    [
        (published.V1_CUT, (-20.83, 55.54), "-21, 56 %"),
        (published.CROSSOVER, (2288.85,), "2.24K"),
        (published.CAKE_A100, (0.0383, 0.1094), "38.3, 109.4 ms"),
        (published.V2_STAGES, (), "-"),
    ],
)
def test_values_have_their_units(figures, figure, values, expected):
    assert figures._values(figure, values) == expected
