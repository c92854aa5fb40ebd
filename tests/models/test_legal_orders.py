"""Any legal order of loads and computes over the plane ends in the logits of one pass."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

from kernels.batch import Part, RaggedBatch
from models.decoder import Decoder
from tests.models.checkpoints import new_pages, one_pass, random_tokens
from tests.tolerances import FLOAT32_LOGITS, relative_norm

PAGE = 4


class Plane:
    """A prompt cut into columns; the last is the suffix. Does one random legal move after another on the decoder."""

    def __init__(self, decoder: Decoder, tokens: torch.Tensor, cuts: list[int], seed: int) -> None:
        self.random = random.Random(seed)
        self.decoder, self.layers = decoder, decoder.config.num_layers
        self.cold, self.cold_pages, self.cold_ids = one_pass(decoder, tokens)
        count = -(-len(tokens) // PAGE)
        self.ids = self.random.sample(range(count + 4), count)
        self.pages = new_pages(decoder, count + 4)
        self.columns = list(pairwise(cuts))
        self.hidden = [decoder.embed(tokens[start:stop]) for start, stop in self.columns]
        self.height = [0] * len(self.columns)
        self.source: list[list[str | None]] = [[None] * self.layers for _ in self.columns]
        self.last: torch.Tensor | None = None
        self.moves: Counter[str] = Counter()

    def cells(self, column: int, layer: int, cold: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(*self.columns[column])
        ids = torch.tensor(self.cold_ids if cold else self.ids)[tokens // PAGE]
        k, v = (self.cold_pages if cold else self.pages)[layer]
        return k[ids, tokens % PAGE], v[ids, tokens % PAGE]

    def load(self) -> None:
        column, layer = self.random.randrange(len(self.columns) - 1), self.random.randrange(self.layers)
        if self.source[column][layer] is not None:
            return
        tokens = torch.arange(*self.columns[column])
        ids = torch.tensor(self.ids)[tokens // PAGE]
        for page, cells in zip(self.pages[layer], self.cells(column, layer, cold=True), strict=True):
            page[ids, tokens % PAGE] = cells
        self.source[column][layer] = "loaded"
        self.moves["load"] += 1

    def compute(self) -> None:
        base = self.random.randrange(self.layers)
        top = self.random.randint(base + 1, self.layers)
        band = range(base, top)
        chosen = []
        for column in range(len(self.columns)):
            filled = {self.source[column][layer] is not None for layer in band}
            if self.height[column] == base and len(filled) == 1 and self.random.random() < 0.8:
                length = self.columns[column][1] - self.columns[column][0]
                counts = [0, length] + ([1] if column == len(self.columns) - 1 and top == self.layers else [])
                chosen.append((column, not filled.pop(), self.random.choice(counts)))
        if not self.legal(band, chosen):
            return
        parts = [
            Part(*self.columns[column], self.ids, project=project, advance=advance)
            for column, project, advance in chosen
        ]
        hidden = torch.cat([self.hidden[column] for column, _, _ in chosen])
        self.decoder.forward(band, RaggedBatch.build(parts, PAGE), hidden, self.pages)
        lengths = [stop - start for start, stop in (self.columns[column] for column, _, _ in chosen)]
        for (column, project, advance), rows in zip(chosen, hidden.split(lengths), strict=True):
            self.hidden[column] = rows.clone()
            self.height[column] = top if advance == len(rows) else top - 1
            for layer in band if project else ():
                self.source[column][layer] = "computed"
            last_only = advance == 1 and len(rows) > 1
            if column == len(self.columns) - 1 and top == self.layers and advance:
                self.last = self.decoder.logits(rows[-1:])
            self.moves["kv-only" if advance == 0 and project else "last-only" if last_only else "whole"] += 1
            self.moves["advance-only"] += not project and advance > 0
        self.moves["several parts"] += len(chosen) > 1
        self.moves["mixed projection"] += len({project for _, project, _ in chosen}) > 1

    def legal(self, band: range, chosen: list[tuple[int, bool, int]]) -> bool:
        """Whoever is advanced through a layer finds all earlier cells of that layer filled, or written by this op."""
        writing = {column for column, project, _ in chosen if project}
        for column, project, advance in chosen:
            if not project and not advance and len(band) == 1:
                return False
            for layer in band if advance else band[:-1]:
                if any(self.source[c][layer] is None and c not in writing for c in range(column + 1)):
                    return False
        return bool(chosen)

    def run(self) -> None:
        for _ in range(2000):
            if self.last is not None:
                return
            self.load() if self.random.random() < 0.25 else self.compute()
        raise AssertionError(f"no end in sight: heights {self.height}")

    def check(self) -> None:
        assert self.last is not None
        assert relative_norm(self.last[0], self.cold[-1]) <= FLOAT32_LOGITS
        for column, sources in enumerate(self.source):
            for layer, source in enumerate(sources):
                for cells, cold in zip(self.cells(column, layer), self.cells(column, layer, cold=True), strict=True):
                    if source == "loaded":
                        assert torch.equal(cells, cold)
                    elif source == "computed":
                        assert relative_norm(cells, cold) <= FLOAT32_LOGITS
                    else:
                        assert cells.isnan().all()


@pytest.mark.parametrize("family", ["llama", "llama-bias", "mistral-window", "qwen2-window", "qwen3"])
def test_random_legal_orders(checkpoint, family):
    decoder = checkpoint(family).decoder()
    moves: Counter[str] = Counter()
    for seed in range(12):
        cuts = [0, 8, 16, 21, 32, 37]  # not all on a page border
        plane = Plane(decoder, random_tokens(37, seed), cuts, seed)
        plane.run()
        plane.check()
        moves += plane.moves
    kinds = {"load", "kv-only", "last-only", "whole", "advance-only", "several parts", "mixed projection"}
    assert set(moves) == kinds  # the orders drawn did contain every kind of move
