"""The benchmarks' figures against figures by hand, and that no wrong result gets a row."""

from __future__ import annotations

import json
from types import SimpleNamespace

import bench
import bench_attention
import bench_recompute
import bench_transfer
import pytest
import torch

from kernels import triton_ops

MODULES = (bench_attention, bench_recompute, bench_transfer)
CHECKS = {module: module.tasks for module in MODULES}


def run(module, *words) -> int:
    return bench.main(module.__doc__, module.tasks, words)


def plan(module, capsys, *words) -> dict[tuple[str, str], dict]:
    """The dry run's tasks by model and shape."""
    assert run(module, "--dry-run", "--json", *words) == 0
    report = json.loads(capsys.readouterr().out)
    tasks = {(task["model"], task["shape"]): task for task in report["tasks"]}
    assert len(tasks) == len(report["tasks"])
    return tasks


def test_work_of_attention(capsys):
    tasks = plan(bench_attention, capsys, "--peaks", "H100")
    llama = "llama-3.1-8b, qwen3-8b"  # 32 query heads and 8 KV heads of 128 elements
    chunk = tasks[llama, "512 behind 4K"]
    # 512 queries see 4096 keys each, and of their own 1 + 2 + ... + 512; 2 multiplications and 2 additions an element.
    assert chunk["flops"] == (512 * 4096 + 131_328) * 4 * 32 * 128 == 36_511_416_320
    # Q and the output, and K and V of 4608 tokens.
    assert chunk["bytes"] == 2 * 4_194_304 + 2 * 4608 * 2048 == 27_262_976
    assert (chunk["bound_by"], chunk["floor_us"]) == ("compute", pytest.approx(36.917, abs=1e-3))
    share = tasks["llama-3.1-70b TP8", "512 behind 4K"]  # 8 query heads, 1 KV head
    assert share["flops"] == chunk["flops"] // 4 and share["bytes"] == 2 * 1_048_576 + 2 * 4608 * 256
    int8 = tasks[llama, "64 behind 4K, staged int8"]
    # 128 bytes and a scale of 4 for each row of the prefix, two bytes an element for the suffix.
    assert int8["bytes"] == 2 * 524_288 + 2 * 64 * 2048 + 2 * 4096 * 8 * 132 == 9_961_472
    one = tasks[llama, "1 behind 64K"]
    assert (one["bound_by"], one["floor_us"]) == ("memory", pytest.approx(2 * (8192 + 65_537 * 2048) / 3.35e6))


def test_work_of_recompute(capsys):
    tasks = plan(bench_recompute, capsys, "--quick", "--peaks", "A100-40G")
    kv = tasks["llama-3.1-8b", "512 tokens, kv"]
    assert kv["flops"] == 2 * 512 * 2048 * 4096
    # Hidden states, weights, K and V in bf16, and two rotary tables of 64 columns in float32.
    assert kv["bytes"] == 2 * (512 * 4096 + 2048 * 4096 + 512 * 2048) + 512 * 2 * 64 * 4 == 23_330_816
    assert kv["floor_us"] == pytest.approx(8589.934592 / 312)
    assert tasks["llama-3.1-8b", "512 tokens, q"]["flops"] == 2 * kv["flops"]


def test_work_of_transfer(capsys):
    tasks = plan(bench_transfer, capsys)
    plain = tasks["llama-3.1-8b", "512 tokens of 32 layers to pages"]
    assert plain["bytes"] == 2 * 33_554_432 and plain["flops"] == plain["link_bytes"] == 0
    host = tasks["llama-3.1-8b", "512 tokens of 32 layers pinned host to pages, int8"]
    assert (host["bytes"], host["link_bytes"]) == (33_554_432, 32 * 8 * 512 * 132)
    assert (host["bound_by"], host["floor_us"]) == ("link", pytest.approx(17_301_504 / 64e3))


@pytest.mark.parametrize("module", MODULES)
def test_without_a_gpu(module, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for words in ([], ["--check"], ["--quick", "--json"]):
        assert run(module, *words) == 2
        out, err = capsys.readouterr()
        assert not out and err.endswith(
            "there is no GPU here; --dry-run prints shapes, bytes, FLOPs and floors without one\n"
        )
    assert run(module, "--dry-run", "--peaks", "TPU") == 2
    assert "the peaks of 'TPU' are not known; name one of A100-40G" in capsys.readouterr().err
    assert run(module, "--dry-run") == 0 and "floors of H100" in capsys.readouterr().out


@pytest.mark.parametrize(
    "there,name",
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A100 80GB PCIe", "A100-80G"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_the_gpu_here_is_known_by_its_name(monkeypatch, there, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: there)
    assert bench.peaks_of(None) == (name, bench.PEAKS[name])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    with pytest.raises(ValueError, match="the peaks of 'NVIDIA GeForce RTX 4090' are not known"):
        bench.peaks_of(None)


def checked(module, capsys) -> tuple[int, list[dict], list[dict]]:
    """Exit status, rows and failures of the checks alone."""
    status = run(module, "--check", "--json")
    report = json.loads(capsys.readouterr().out)
    return status, report["rows"], report["failures"]


@pytest.mark.parametrize("module", MODULES)
def test_every_side_passes(interpreted, module, capsys):
    status, rows, failures = checked(module, capsys)
    assert (status, failures) == (0, [])
    for task in module.tasks(bench.TINY):
        sides = [row["side"] for row in rows if row["what"] == task.what]
        assert len(sides) > 1 and sides[0].startswith("ours")
    assert all(row["times"] is row["speedup"] is None for row in rows)
    assert run(module, "--check") == 0 and "FAILED" not in capsys.readouterr().out


def last_query(out):
    out[-1] *= 1.02
    return out


def one_nan(out):
    """In a row that is not compared, if there is one."""
    rows = set(range(len(out))) - set(bench.sample(len(out)))
    out[min(rows, default=0), 0, 0] = float("nan")
    return out


@pytest.mark.parametrize("break_it", [last_query, one_nan])
def test_wrong_attention_fails(interpreted, monkeypatch, capsys, break_it):
    right = triton_ops.attention
    monkeypatch.setattr(triton_ops, "attention", lambda *args, **how: (break_it(right(*args, **how)[0]), None))
    status, rows, failures = checked(bench_attention, capsys)
    assert status == 1 and {row["side"].split()[0] for row in rows} == {"torch"}
    assert len(failures) == len(bench_attention.PAGED[bench.TINY]) + 3 * len(bench_attention.STORED)
    assert run(bench_attention, "--check") == 1
    assert "FAILED tiny, 24 behind 40, ours: error " in capsys.readouterr().out


@pytest.mark.parametrize("form,broken", [("kv", "v_pages"), ("q", "q"), ("qkv", "k_pages")])
def test_wrong_recompute_fails(interpreted, monkeypatch, capsys, form, broken):
    right = triton_ops.recompute

    def wrong(hidden, **how):
        q = right(hidden, **how)
        if how["form"] == form:
            (q if broken == "q" else how[broken].flatten(0, 1))[0] *= 1.05
        return q

    monkeypatch.setattr(triton_ops, "recompute", wrong)
    status, rows, failures = checked(bench_recompute, capsys)
    assert status == 1 and [(one["what"], one["side"]) for one in failures] == [(f"40 tokens, {form}", "ours")]
    assert len(rows) == 5


def a_cell_of_nobody(right, staging, pages, slots, scales):
    right(staging, pages, slots, scales)
    free = next(slot for slot in range(pages.shape[1] * pages.shape[2]) if slot not in slots.tolist())
    pages[0].flatten(0, 1)[free] = 0


def one_token_less(right, staging, pages, slots, scales):
    right(staging, pages, slots.where(slots != slots[7], -1), scales)


@pytest.mark.parametrize("wrong", [a_cell_of_nobody, one_token_less])
def test_wrong_transfer_fails(interpreted, monkeypatch, capsys, wrong):
    right = triton_ops.pages_from_staging
    monkeypatch.setattr(triton_ops, "pages_from_staging", lambda *args: wrong(right, *args, *(None,) * (4 - len(args))))
    monkeypatch.setattr(triton_ops, "staging_from_pages", lambda pages, slots, staging: staging.fill_(1.0))
    status, rows, failures = checked(bench_transfer, capsys)
    shapes = bench_transfer.shapes(bench.TINY_MODEL, bench.TINY)
    assert (status, len(failures), len(rows)) == (1, len(shapes), 2 * len(shapes))
    assert {one["side"] for one in failures} == {"ours"} and all("error nan" in one["reason"] for one in failures)


def test_a_rival_that_raises_is_a_failure(capsys):
    def broken():
        raise RuntimeError("no kernel\nfor this shape")

    side = bench.Side("rival", broken, lambda out: 0.0, 1.0)
    task = bench.Task("m", "shape", 1, 1, lambda setting: [side])
    assert bench.check(task, side) == bench.Failure("m", "shape", "rival", "RuntimeError: no kernel for this shape")


def test_ours_is_compared_with_the_fastest_rival_that_passed(monkeypatch):
    def side(name, error=0.0, rival=True):
        return bench.Side(name, lambda: torch.zeros(1), lambda out: error, 0.5, rival)

    sides = [side("ours", rival=False), side("slow"), side("fast"), side("wrong", 1.0), side("copy", rival=False)]
    medians = iter([10.0, 40.0, 20.0, 1.0])
    monkeypatch.setattr(bench, "measure", lambda run, quick: bench.Times(next(medians), 9.0, 11.0, 5.0))
    task = bench.Task("m", "shape", flops=2_000_000, nbytes=3_000_000, make=lambda setting: sides)
    found = list(bench.rows(task, SimpleNamespace(), bench.Peaks(1e12, 1e12, 1e9), quick=True, timed=True))
    failure, ours, slow, fast, copy = found
    assert isinstance(failure, bench.Failure) and failure.side == "wrong"
    assert ours.speedup == 2.0 and slow.speedup is fast.speedup is copy.speedup is None
    assert ours.tflops == pytest.approx(0.2) and ours.gbps == pytest.approx(300) and ours.floor == pytest.approx(3)
