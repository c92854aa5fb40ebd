"""Field case 25, with a recorder in place of the nvtx module."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernels import ranges
from tests.recorder import Recorder


def test_ranges_are_in_the_domain_and_carry_name_kind_and_payload(recorder):
    with ranges.span("compute", "compute", lambda: 512), ranges.span("attention"):
        pass
    assert recorder.calls[0] == ("domain", "cacheflow")
    assert [call[2:] for call in recorder.calls if call[0] == "push"] == [
        ("compute", "compute", 512),
        ("attention", None, None),
    ]
    recorder.check_balanced()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_ranges_are_closed_on_exceptions(recorder, error):
    with pytest.raises(error), ranges.span("outer"), ranges.span("inner"):
        raise error
    recorder.check_balanced()
    assert sum(call[0] == "pop" for call in recorder.calls) == 2


def test_every_thread_closes_its_own(recorder):
    barrier = threading.Barrier(4)

    def work(number):
        with ranges.span(f"thread {number}"):
            barrier.wait(10)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    recorder.check_balanced()
    assert len({call[1] for call in recorder.calls if call[0] == "push"}) == 4


def test_a_range_may_end_on_another_thread(recorder):
    opened = ranges.start("fetch", "fetch", lambda: 1 << 20)
    loader = threading.Thread(target=ranges.end, args=(opened,))
    loader.start()
    loader.join()
    assert ("start", 1, "fetch", "fetch", 1 << 20) in recorder.calls
    recorder.check_balanced()


def exercise():
    """All forms at once, with an exception."""
    opened = ranges.start("fetch", "fetch")
    try:
        with ranges.span("compute", "compute", lambda: 1):
            raise RuntimeError
    except RuntimeError:
        ranges.end(opened)


def test_without_nvtx_it_does_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)  # makes the import fail
    ranges.domain.cache_clear()
    assert ranges.domain() is None
    exercise()
    ranges.domain.cache_clear()


def test_the_environment_turns_it_off(recorder, monkeypatch):
    monkeypatch.setenv("CACHEFLOW_NVTX", "0")
    exercise()
    assert recorder.calls == []


def test_the_real_module_takes_the_same_calls():
    pytest.importorskip("nvtx")
    ranges.domain.cache_clear()
    exercise()


def test_importing_cacheflow_does_not_import_nvtx():
    code = "import sys, kernels.ranges, cacheflow.timeline; sys.exit('nvtx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def worker(results):
    """In a spawned process: a loader thread and work that fails."""
    recorder = sys.modules["nvtx"] = Recorder()
    loader = threading.Thread(target=exercise, name="loader")
    loader.start()
    exercise()
    loader.join()
    results.put((recorder.calls, threading.get_ident(), loader.ident))


def test_spawned_workers_and_their_loaders_are_seen():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=worker, args=(results,)) for _ in range(2)]
    for process in workers:
        process.start()
    for _ in workers:
        calls, main, loader = results.get(timeout=60)
        seen = Recorder()
        seen.calls = calls
        seen.check_balanced()
        assert {call[1] for call in calls if call[0] == "push"} == {main, loader}
    for process in workers:
        process.join(60)
        assert process.exitcode == 0
