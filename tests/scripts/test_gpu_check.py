"""scripts/gpu_check.py as far as a CPU goes: its steps' parts, and what it says without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cacheflow.toy import config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


def test_without_a_gpu_it_says_so(gpu_check, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "PyTorch sees no GPU here" in capsys.readouterr().err


def test_the_files_it_runs_are_there(gpu_check):
    assert all((ROOT / path).exists() for path in gpu_check.TESTS)
    assert all((ROOT / "profiling" / f"{name}.py").is_file() for name in gpu_check.BENCHMARKS)


def test_the_restoration_is_judged(gpu_check, tmp_path):
    options = dict(device="cpu", dtype=torch.float32, config=config(), prefix=96, suffix=5, chunk=16)
    results = gpu_check.run_restoration(tmp_path, **options, tolerance=1e-4)
    assert [result.what for result in results][:3] == ["warm-up", "recompute", "load"]
    assert all(result.ok for result in results)
    assert (tmp_path / "token-lanes.png").is_file() and (tmp_path / "token.perfetto.json").is_file()
    strict = gpu_check.run_restoration(tmp_path, **options, tolerance=-1.0)
    assert not any(result.ok for result in strict[1:])


def process(monkeypatch, gpu_check, returncode=0, stdout="", stderr=""):
    made = subprocess.CompletedProcess([], returncode, stdout, stderr)
    monkeypatch.setattr(gpu_check, "_process", lambda command, timeout, **environment: (made, 1.5))


def test_a_benchmark_with_failed_checks_fails(gpu_check, monkeypatch):
    rows = '{"rows": [{"speedup": 1.5}, {"speedup": null}], "failures": [{}]}'
    process(monkeypatch, gpu_check, 1, rows)
    result = gpu_check.run_benchmark("bench_attention")
    assert not result.ok and result.says == "2 rows, 1 failed checks; best rival over ours 1.50 to 1.50"
    process(monkeypatch, gpu_check, 2, "", "no GPU")
    result = gpu_check.run_benchmark("bench_attention")
    assert not result.ok and result.says == "no GPU"


def test_tests_that_fail_or_hang_are_told(gpu_check, monkeypatch):
    process(monkeypatch, gpu_check, 1, "FAILED tests/a.py::b - assert\n1 failed, 3 passed in 2 s\n")
    results = gpu_check.run_tests()
    assert len(results) == len(gpu_check.TESTS)
    assert not any(result.ok for result in results) and results[0].says == "1 failed, 3 passed in 2 s"
    monkeypatch.setattr(gpu_check, "_process", lambda command, timeout, **environment: (None, timeout))
    assert {result.says for result in gpu_check.run_tests()} == {f"more than {gpu_check.TESTS_TIMEOUT:.0f} s"}
