from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheflow.pages import HiddenPool, PagePool, Rows

COUNT = 12


class RowsAgainstASet(RuleBasedStateMachine):
    """Rows against a set of the numbers that are free."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows(COUNT)
        self.free = set(range(COUNT))
        self.taken: list[list[int]] = []

    @rule(count=st.integers(0, COUNT + 1))
    def take(self, count: int) -> None:
        rows = self.rows.take(count)
        if count > len(self.free):
            assert rows is None
            return
        assert rows is not None and rows == sorted(set(rows)) and len(rows) == count and set(rows) <= self.free
        has_run = any(set(range(first, first + count)) <= self.free for first in range(COUNT))
        assert not count or (rows[-1] - rows[0] == count - 1) == has_run
        self.free -= set(rows)
        self.taken.append(rows)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        rows = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        keep = data.draw(st.integers(0, len(rows)))
        self.rows.give_back(reversed(rows[keep:]))
        self.free |= set(rows[keep:])
        if keep:
            self.taken.append(rows[:keep])

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(RuntimeError, match=f"row {row} was given back twice"):
            self.rows.give_back([row])

    @invariant()
    def counts(self) -> None:
        assert self.rows.free == len(self.free)


TestRows = RowsAgainstASet.TestCase
TestRows.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def pool(num_pages: int = 6, page_size: int = 4) -> PagePool:
    return PagePool(layers=2, num_pages=num_pages, page_size=page_size, kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_a_page_id_is_valid_at_every_layer_and_layers_are_views():
    pages = pool()
    assert pages.k.shape == pages.v.shape == (2, 6, 4, 2, 8)
    for layer, (k, v) in enumerate(pages.layers):
        k[5], v[5] = layer + 1, -layer - 1
    assert pages.k[:, 5, 0, 0, 0].tolist() == [1, 2] and pages.v[:, 5, 0, 0, 0].tolist() == [-1, -2]
    assert pages.k[:, :5].isnan().all()  # nobody clears what was there


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 1), (4, 1), (5, 2), (24, 6)])
def test_pages_for(tokens, count):
    assert pool().pages_for(tokens) == count
    assert len(pool().allocate(tokens)) == count


def test_a_pool_gives_what_it_has_and_takes_it_back():
    pages = pool()
    first, second = pages.allocate(9), pages.allocate(10)
    assert (first, second, pages.free_pages) == ([0, 1, 2], [3, 4, 5], 0)
    assert pages.allocate(1) is None
    pages.release(first)
    assert pages.free_pages == 3 and pages.allocate(13) is None
    pages.release(second[1:2])
    assert pages.allocate(16) == [0, 1, 2, 4]  # no four neighbours are left
    with pytest.raises(RuntimeError, match="twice"):
        pages.release([first[0], first[0]])


@given(st.integers(1, 5), st.permutations(range(6)), st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_slots_are_where_tokens_lie(page_size, pages, bounds):
    start, stop = sorted(min(bound, 6 * page_size) for bound in bounds)
    slots = pool(page_size=page_size).slots(pages, start, stop)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [pages[token // page_size] * page_size + token % page_size for token in range(start, stop)]


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_of_nothing_is_refused(num_pages, page_size):
    with pytest.raises(ValueError, match=f"at least one token, not {num_pages} of {page_size}"):
        pool(num_pages, page_size)


def test_a_full_hidden_pool_says_what_to_do():
    hidden = HiddenPool(5, 16, torch.float16)
    assert hidden.states.shape == (5, 16) and hidden.states.dtype == torch.float16
    rows = hidden.allocate(3)
    with pytest.raises(MemoryError, match="3 tokens do not fit the 2 free rows of 5; raise hidden_tokens"):
        hidden.allocate(3)
    hidden.release(rows)
    assert hidden.allocate(5).tolist() == [0, 1, 2, 3, 4]
