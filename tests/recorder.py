"""A recorder in place of the nvtx module."""

from __future__ import annotations

import sys
import threading

import pytest

from kernels import ranges


class Recorder:
    """Stands for the nvtx module and for its domain; keeps what was called, on which thread."""

    def __init__(self):
        self.calls = []
        self._opened = 0

    def get_domain(self, name):
        self.calls.append(("domain", name))
        return self

    def push_range(self, message=None, color=None, category=None, payload=None):
        assert color == ranges.COLORS.get(category)
        self.calls.append(("push", threading.get_ident(), message, category, payload))

    def pop_range(self):
        self.calls.append(("pop", threading.get_ident()))

    def start_range(self, message=None, color=None, category=None, payload=None):
        self._opened += 1
        self.calls.append(("start", self._opened, message, category, payload))
        return self._opened

    def end_range(self, opened):
        self.calls.append(("end", opened))

    def check_balanced(self):
        """Every push has its pop, after it and on the same thread; every start has its end."""
        depth = {}
        for call in self.calls:
            if call[0] in ("push", "pop"):
                depth[call[1]] = depth.get(call[1], 0) + (1 if call[0] == "push" else -1)
                assert depth[call[1]] >= 0
        assert not any(depth.values())
        started = [call[1] for call in self.calls if call[0] == "start"]
        assert sorted(started) == sorted(call[1] for call in self.calls if call[0] == "end")


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.delenv("CACHEFLOW_NVTX", raising=False)
    monkeypatch.setitem(sys.modules, "nvtx", recorder)
    ranges.domain.cache_clear()
    yield recorder
    ranges.domain.cache_clear()
