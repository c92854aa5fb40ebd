"""sliding_window against its formula, and bounds that fit it to the token."""

from __future__ import annotations

import pytest

from kernels.variants.sliding_window import sliding_window
from tests.variants.check import check_variant


@pytest.mark.parametrize("window", [1, 16, 17, 40, 1000])
def test_sliding_window(ops, window):
    check_variant(ops, sliding_window(window), visible=lambda head, query, key: query - key < window)


def test_a_window_is_the_variant(ops):
    check_variant(ops, None, window=9)


@pytest.mark.parametrize("window,first,last", [(1, 5, 5), (4, 10, 12), (4, 1, 2), (100, 3, 60)])
def test_bounds(window, first, last):
    begin, full_begin, full_end, end = sliding_window(window).key_bounds(first, last)
    seen = {query: {key for key in range(query + 1) if query - key < window} for query in range(first, last + 1)}
    assert set(range(begin, end)) == set.union(*seen.values())
    assert set(range(full_begin, min(full_end, first + 1))) == set.intersection(*seen.values())


def test_less_than_a_token_is_refused():
    with pytest.raises(ValueError, match="window is 0; it must be at least 1 token, or None for all"):
        sliding_window(0)
