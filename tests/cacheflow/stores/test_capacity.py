"""Capacity, leases and eviction against a model: an ordered dict, least recently used first."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cacheflow.stores import DiskStore, Layout, MemoryStore, Store
from cacheflow.stores.base import EXISTS, FULL, TOO_LARGE
from cacheflow.stores.disk_format import file_nbytes
from tests.cacheflow.stores.support import TOY, key, payload, read_whole

KEYS = st.integers(0, 6)
SIZES = st.sampled_from([1, 2, 4, 9])
UNIT = replace(TOY, layers=1, tokens=32)


def layout_of(size: int) -> Layout:
    return replace(UNIT, layers=size)


class StoreMachine(RuleBasedStateMachine):
    """Objects of 1, 2, 4 and 9 layers; 9 never fits."""

    store: Store
    capacity: int

    def __init__(self) -> None:
        super().__init__()
        self.model: OrderedDict[int, int] = OrderedDict()  # number -> layers
        self.leases: Counter[int] = Counter()

    def nbytes(self, size: int) -> int:
        raise NotImplementedError

    def used(self) -> int:
        return sum(self.nbytes(size) for size in self.model.values())

    @rule(number=KEYS, size=SIZES)
    def write(self, number: int, size: int) -> None:
        result = self.store.write(key(number), layout_of(size), payload(layout_of(size), number))
        if number in self.model:
            assert (result.ok, result.reason) == (True, EXISTS)
            return
        if self.nbytes(size) > self.capacity:
            assert (result.ok, result.reason) == (False, TOO_LARGE)
            return
        leased = sum(self.nbytes(there) for other, there in self.model.items() if self.leases[other])
        if leased + self.nbytes(size) > self.capacity:
            assert (result.ok, result.reason) == (False, FULL)
            return
        while self.used() + self.nbytes(size) > self.capacity:
            del self.model[next(other for other in self.model if not self.leases[other])]
        self.model[number] = size
        assert (result.ok, result.reason) == (True, None)

    @rule(numbers=st.lists(KEYS, max_size=4))
    def lookup(self, numbers: list[int]) -> None:
        found = self.store.lookup([key(number) for number in numbers])
        for number, info in zip(numbers, found, strict=True):
            assert (info.layout.layers if info else None) == self.model.get(number)
            if info:
                self.model.move_to_end(number)
                self.leases[number] += 1

    @rule(number=KEYS)
    def release(self, number: int) -> None:
        self.store.release([key(number)])
        if self.leases[number]:
            self.leases[number] -= 1
            if number in self.model:
                self.model.move_to_end(number)

    @rule(number=KEYS, aligned=st.booleans())
    def read(self, number: int, aligned: bool) -> None:
        layout = layout_of(self.model.get(number, 1))
        result, data = read_whole(self.store, key(number), layout, aligned)
        assert result.ok == (number in self.model)
        if result.ok:
            assert data == payload(layout, number).tobytes()
            self.model.move_to_end(number)

    @rule(number=KEYS)
    def read_with_another_layout(self, number: int) -> None:
        assert not read_whole(self.store, key(number), layout_of(3))[0].ok
        self.model.pop(number, None)

    @rule(number=KEYS)
    def delete(self, number: int) -> None:
        assert self.store.delete([key(number)]) == (self.model.pop(number, None) is not None)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        there = {entry.key: entry for entry in self.store.entries()}
        assert set(there) == {key(number) for number in self.model}
        assert sum(entry.nbytes for entry in there.values()) == self.used() <= self.capacity


class MemoryMachine(StoreMachine):
    def __init__(self) -> None:
        super().__init__()
        self.capacity = self.nbytes(5)
        self.store = MemoryStore(self.capacity)

    def nbytes(self, size: int) -> int:
        return layout_of(size).nbytes

    @invariant()
    def counts_what_it_holds(self) -> None:
        assert isinstance(self.store, MemoryStore)
        assert self.store.used_bytes == self.used()


class DiskMachine(StoreMachine):
    """As memory, and the folder may be opened anew or changed by somebody else at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.capacity = self.nbytes(5) + 100
        self.store = DiskStore(self.folder, self.capacity)

    def nbytes(self, size: int) -> int:
        return file_nbytes(key(0), layout_of(size))

    @rule()
    def open_anew(self) -> None:
        self.store.close()
        self.store = DiskStore(self.folder, self.capacity)
        self.leases.clear()

    @rule(number=KEYS)
    def somebody_removes(self, number: int) -> None:
        for path in Path(self.folder).glob(f"*/{key(number)}.kv"):
            path.unlink()
        self.model.pop(number, None)

    @rule(number=KEYS, size=SIZES)
    def somebody_writes(self, number: int, size: int) -> None:
        if number not in self.model and self.used() + self.nbytes(size) <= self.capacity:
            other = DiskStore(self.folder)
            other.write(key(number), layout_of(size), payload(layout_of(size), number))
            other.close()
            self.model[number] = size

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


MachineSettings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestMemoryCapacity = MemoryMachine.TestCase
TestMemoryCapacity.settings = MachineSettings
TestDiskCapacity = DiskMachine.TestCase
TestDiskCapacity.settings = MachineSettings
