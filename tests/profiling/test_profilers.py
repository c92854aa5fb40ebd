"""The command lines of nsys and ncu, and that what they would profile is there."""

from __future__ import annotations

import inspect
import shlex
import shutil
import stat
import sys

import bench
import ncu
import nsys
import pytest

from cacheflow.engine import Engine
from kernels import ranges
from tests.kernels.conftest import count_launches
from tests.profiling.export import Export

# In place of nsys: two reports whose export is a file beside them.
FAKE = """#!/bin/sh
for word; do case $word in --output=*) output=${word#--output=};; esac; done
case $1 in
profile) for n in $REPORTS; do : > $output.$n.nsys-rep; done; exit $STATUS;;
export) cp $EXPORT $output;;
esac
"""


@pytest.fixture
def fake_nsys(tmp_path, monkeypatch):
    """A program of that name that records as many reports as REPORTS names."""
    export = Export()
    export.range("restore", 0, 100, "token")
    export.kernel(10, 30, launched=5)
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("EXPORT", str(export.write(tmp_path / "made.sqlite")))
    monkeypatch.setenv("REPORTS", "10 2 1")
    monkeypatch.setenv("STATUS", "0")
    return tmp_path / "out" / "run"


def nothing_on_path(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_nsys_records_restorations(capsys):
    assert nsys.main(["--dry-run", "restore", "--store", "/tmp/my kv", "--json"]) == 0
    profile, export = (shlex.split(line) for line in capsys.readouterr().out.splitlines())
    assert profile[:2] == ["nsys", "profile"] and profile[-4:] == ["restore", "--store", "/tmp/my kv", "--json"]
    assert profile[-7:-4] == [sys.executable, "-m", "cacheflow"]
    assert {
        "--trace=cuda,nvtx",
        "--capture-range=nvtx",
        "--nvtx-capture=restore@cacheflow",
        "--capture-range-end=repeat",
        "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
        "--output=out/nsys/run",
    } <= set(profile)
    assert export == shlex.split(
        "nsys export --type=sqlite --force-overwrite=true --output=out/nsys/run.sqlite out/nsys/run.nsys-rep"
    )
    assert nsys.main(["--dry-run", "--whole", "compare"]) == 0
    assert "capture" not in capsys.readouterr().out


def test_nsys_and_the_engine_mean_the_same_range():
    assert f'ranges.span("{nsys.overlap.RESTORE}"' in inspect.getsource(Engine)
    assert f"--nvtx-capture=restore@{ranges.DOMAIN}" in nsys.CAPTURE


def test_nsys_missing(capsys, monkeypatch):
    nothing_on_path(monkeypatch)
    assert nsys.main(["compare"]) == 2
    assert capsys.readouterr().err == (
        "nsys.py: nsys is not on the PATH; install Nsight Systems, or see its command line with --dry-run\n"
    )
    with pytest.raises(SystemExit) as stopped:
        nsys.main([])
    assert stopped.value.code == 2 and "name a cacheflow command" in capsys.readouterr().err


def test_nsys_exports_every_report_in_order(fake_nsys, capsys):
    fake_nsys.parent.mkdir()
    stale = fake_nsys.with_name("run.77.nsys-rep")
    stale.touch()
    assert nsys.main(["--output", str(fake_nsys), "compare"]) == 0
    assert not stale.exists()
    assert [path.name for path in nsys.reports(fake_nsys)] == [f"run.{n}.nsys-rep" for n in (1, 2, 10)]
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("token"))
    assert row[:3] == ["token", "ops", "3"]


@pytest.mark.parametrize(
    "variable,value,message",
    [
        ("REPORTS", "", "nsys met no range restore@cacheflow and recorded nothing; try --whole"),
        ("STATUS", "3", "nsys, or the command under it, ended with status 3"),
    ],
)
def test_nsys_fails_in_a_sentence(fake_nsys, monkeypatch, capsys, variable, value, message):
    monkeypatch.setenv(variable, value)
    assert nsys.main(["--output", str(fake_nsys), "compare"]) == 2
    assert capsys.readouterr().err == f"nsys.py: {message}\n"


@pytest.mark.parametrize(
    "words,path",
    [(["restore", "--trace", "a.json"], "a.json"), (["restore", "--trace=b.json"], "b.json"), (["compare"], None)],
)
def test_the_trace_that_the_command_writes(words, path):
    found = nsys.trace_of(words)
    assert (None if found is None else str(found)) == path


def test_ncu_profiles_one_launch(capsys):
    assert ncu.main(["attention-split", "--model", "llama-3.1-70b-tp8", "--context", "64K", "--dry-run"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert {"--kernel-name=attention_kernel", "--launch-count=1", "--profile-from-start=off"} <= set(words)
    assert "--export=out/ncu/attention-split" in words
    program = words[words.index(sys.executable) + 2 :]
    assert program == [
        "attention-split",
        "--model=llama-3.1-70b-tp8",
        "--tokens=1",
        "--context=65536",
        "--profiled",
    ]


def test_ncu_missing(capsys, monkeypatch):
    nothing_on_path(monkeypatch)
    assert ncu.main(["norm"]) == 2
    assert capsys.readouterr().err == (
        "ncu.py: ncu is not on the PATH; install Nsight Compute, or see its command line with --dry-run\n"
    )


@pytest.mark.parametrize("kernel", ncu.KERNELS)
def test_ncu_finds_the_kernel_by_its_name(interpreted, monkeypatch, kernel):
    tokens = 1 if kernel == ncu.SPLIT else 24
    run = ncu.call(kernel, bench.TINY_MODEL, tokens, 40, bench.TINY_SETTING)
    ran = count_launches(monkeypatch)
    run()
    assert [launch.kernel.fn.__name__ for launch in ran] == [ncu.KERNELS[kernel]]


def test_ncu_refuses_the_other_form(interpreted):
    with pytest.raises(ValueError, match="1 tokens behind 40 run in the split form; give --tokens for attention-tile"):
        ncu.call(ncu.TILE, bench.TINY_MODEL, 1, 40, bench.TINY_SETTING)
