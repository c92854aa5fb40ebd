"""alibi against its formula, and the paper's slopes."""

from __future__ import annotations

import pytest
import torch

from kernels.variants.alibi import alibi, slopes
from tests.variants.check import HEADS, check_variant


def test_alibi(ops):
    given = torch.linspace(0.5, -0.1, HEADS)
    check_variant(
        ops, alibi(given), score=lambda scores, head, query, keys: scores - given[head].item() * (query - keys)
    )


@pytest.mark.parametrize(
    "heads,expected",
    [(4, [1 / 4, 1 / 16, 1 / 64, 1 / 256]), (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]), (1, [1 / 256])],
)
def test_slopes(heads, expected):
    assert slopes(heads).tolist() == expected
