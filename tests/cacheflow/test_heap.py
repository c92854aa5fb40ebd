"""The heap is told to keep what is freed. That it helps shows in the demo: faults depend on what else is freed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from cacheflow import cli, heap


@pytest.fixture
def told(monkeypatch):
    """What the C library is told, in place of telling it."""
    calls: list[tuple[int, int]] = []

    def mallopt(name: int, value: int) -> int:
        calls.append((name, value))
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    return calls


def test_neither_trimmed_nor_mapped_apart(told):
    assert heap.keep_freed_memory()
    settings = dict(told)  # by the numbers of malloc.h
    assert settings[-1] >= 1 << 30 and settings[-3] == 32 << 20 and settings[-2] > 0


def test_the_command_line_tells_it(told, capsys):
    assert cli.main(["--help"]) == 0
    assert told and capsys.readouterr().out


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not heap.keep_freed_memory()
