"""The decoder against Transformers, and its own bands, shares and forms against one pass."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import kernels.reference
from kernels.batch import Part, RaggedBatch
from models.decoder import Decoder
from tests.models.checkpoints import FAMILIES, ROPES, new_pages, one_pass, random_tokens
from tests.tolerances import FLOAT32_LOGITS, LOW_PRECISION_MULTIPLE, relative_norm

TOKENS = random_tokens(70)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(checkpoint, family):
    source = checkpoint(family)
    logits, _, _ = one_pass(source.decoder(), TOKENS)
    expected = source.logits(TOKENS)
    assert logits.shape == expected.shape
    assert relative_norm(logits, expected) <= FLOAT32_LOGITS
    assert relative_norm(logits[-1], expected[-1]) <= FLOAT32_LOGITS


@pytest.mark.parametrize("rope", [name for name in ROPES if name != "default"])
def test_rope_types_equal_transformers_beyond_the_original_length(checkpoint, rope):
    source = checkpoint("llama", rope)
    logits, _, _ = one_pass(source.decoder(), TOKENS)
    assert relative_norm(logits, source.logits(TOKENS)) <= FLOAT32_LOGITS
    assert relative_norm(logits, checkpoint("llama").logits(TOKENS)) > 100 * FLOAT32_LOGITS  # the type matters


@pytest.mark.parametrize("family", ["llama-bias", "qwen3"])
def test_float64_equals_transformers_in_float64(checkpoint, family):
    source = checkpoint(family)
    exact, _, _ = one_pass(source.decoder(torch.float64), TOKENS)
    # Transformers rounds angles and norms to float32, whatever the model is in.
    assert relative_norm(exact, source.logits(TOKENS, torch.float64)) <= 1e-2 * FLOAT32_LOGITS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_low_precision_is_as_good_as_transformers(checkpoint, family, dtype):
    source = checkpoint(family)
    exact, _, _ = one_pass(source.decoder(torch.float64), TOKENS)
    ours, _, _ = one_pass(source.decoder(dtype), TOKENS)
    theirs = source.logits(TOKENS, dtype)
    assert ours.dtype == theirs.dtype == dtype
    assert relative_norm(ours, exact) <= LOW_PRECISION_MULTIPLE * relative_norm(theirs, exact)


def spying(decoder: Decoder, seen: list[tuple[str, int]]) -> Decoder:
    """The same decoder, noting form and number of tokens of every recompute."""

    def recompute(hidden: torch.Tensor, **how):
        seen.append((how["form"], hidden.shape[0]))
        return kernels.reference.recompute(hidden, **how)

    ops = SimpleNamespace(**{**vars(kernels.reference), "recompute": recompute})
    return Decoder(decoder.config, decoder.weights, ops=ops)


@pytest.mark.parametrize(
    "parts,seen",
    [
        ([dict()], [("qkv", 8), ("qkv", 8)]),
        ([dict(advance=0)], [("qkv", 8), ("kv", 8)]),
        ([dict(advance=1)], [("qkv", 8), ("kv", 8), ("q", 1)]),
        ([dict(project=False)], [("q", 8), ("q", 8)]),
        ([dict(project=False, advance=1)], [("q", 8), ("q", 1)]),
        ([dict(project=False, advance=0)], [("q", 8)]),
        ([dict(advance=0), dict()], [("qkv", 16), ("kv", 16), ("q", 8)]),
        ([dict(project=False), dict()], [("kv", 8), ("q", 16)] * 2),
        ([dict(project=False, advance=0), dict()], [("kv", 8), ("q", 16), ("qkv", 8)]),
    ],
    ids=str,
)
def test_nothing_is_computed_that_nobody_needs(checkpoint, parts, seen):
    decoder = checkpoint("llama").decoder()
    tokens = TOKENS[: 8 * len(parts)]
    _, pages, ids = one_pass(decoder, tokens)  # fills every cell, so that any part may be advanced over
    batch = RaggedBatch.build([Part(8 * i, 8 * i + 8, ids, **part) for i, part in enumerate(parts)], page_size=4)
    noted: list[tuple[str, int]] = []
    spying(decoder, noted).forward(range(0, 2), batch, decoder.embed(tokens), pages)
    assert noted == seen


@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_rows_that_are_not_advanced_stay_at_the_entry_of_the_last_layer(checkpoint, family):
    decoder = checkpoint(family).decoder()
    tokens = TOKENS[:20]
    hidden = [decoder.embed(tokens) for _ in range(3)]
    parts = [(0, 9, 2), (9, 14, 0), (14, 20, 3)]
    bands = [(range(0, 2), (9, 5, 6)), (range(0, 3), (9, 5, 6)), (range(0, 3), (2, 0, 3))]
    pages = [new_pages(decoder, 5) for _ in range(3)]
    for (layers, advance), rows, own in zip(bands, hidden, pages, strict=True):
        packed = [
            Part(start, stop, range(5), advance=count) for (start, stop, _), count in zip(parts, advance, strict=True)
        ]
        decoder.forward(layers, RaggedBatch.build(packed, page_size=4), rows, own)
    entry, exit_, mixed = hidden
    advanced = torch.zeros(20, dtype=torch.bool)
    advanced[[7, 8, 17, 18, 19]] = True
    assert relative_norm(mixed[advanced], exit_[advanced]) <= FLOAT32_LOGITS
    torch.testing.assert_close(mixed[~advanced], entry[~advanced], rtol=0, atol=0)
    assert relative_norm(mixed[advanced], entry[advanced]) > 100 * FLOAT32_LOGITS
    for full, partly in zip(pages[1][:3], pages[2][:3], strict=True):  # every token was projected at every layer
        for cells, expected in zip(partly, full, strict=True):
            assert relative_norm(cells, expected) <= FLOAT32_LOGITS


def test_forward_works_in_other_threads_and_leaves_no_gradients(checkpoint):
    decoder = checkpoint("llama-bias").decoder()
    for weight in (decoder.weights.layers[0].o_weight, decoder.weights.embedding, decoder.weights.lm_head):
        weight.requires_grad_(True)
    assert not decoder.embed(TOKENS).requires_grad
    expected = [one_pass(decoder, random_tokens(40, seed))[0] for seed in range(4)]
    results: dict[int, torch.Tensor] = {}

    def run(seed: int) -> None:
        assert torch.is_grad_enabled()
        results[seed] = one_pass(decoder, random_tokens(40, seed))[0]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert not results[seed].requires_grad
        torch.testing.assert_close(results[seed], expected[seed], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(layers=range(0)), "is no band of layers"),
        (dict(layers=range(3, 5)), r"range\(3, 5\) is no band of layers; give one within range\(4\)"),
        (dict(layers=range(0, 4, 2)), "is no band of layers"),
        (dict(layers=range(-1, 2)), "is no band of layers"),
        (dict(hidden=(3, 64)), r"hidden is \[3, 64\] torch.float32; this batch needs \[4, 64\]"),
        (dict(dtype=torch.float64), "torch.float64; this batch needs"),
        (dict(start=254), "258 tokens exceeds the 256 positions"),
    ],
    ids=str,
)
def test_bad_input_is_refused(checkpoint, change, message):
    decoder = checkpoint("llama").decoder()
    start = change.get("start", 0)
    batch = RaggedBatch.build([Part(start, start + 4, range(70))], page_size=4)
    hidden = torch.zeros(change.get("hidden", (4, 64)), dtype=change.get("dtype", torch.float32))
    with pytest.raises(ValueError, match=message):
        decoder.forward(change.get("layers", range(4)), batch, hidden, new_pages(decoder, 70))


def test_more_positions_on_request(checkpoint):
    decoder = checkpoint("llama").decoder(max_positions=300)
    batch = RaggedBatch.build([Part(0, 290, range(73))], page_size=4)
    tokens = random_tokens(290)
    hidden = decoder.embed(tokens)
    decoder.forward(range(4), batch, hidden, new_pages(decoder, 73))
    assert relative_norm(decoder.logits(hidden), checkpoint("llama").logits(tokens)) <= FLOAT32_LOGITS


@pytest.mark.parametrize("token", [-1, 97])
def test_token_outside_the_vocabulary_is_refused(checkpoint, token):
    with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 97"):
        checkpoint("llama").decoder().embed(torch.tensor([3, token]))


def test_embed_takes_int32_and_nothing(checkpoint):
    decoder = checkpoint("llama").decoder()
    assert torch.equal(decoder.embed(TOKENS.to(torch.int32)), decoder.embed(TOKENS))
    assert decoder.embed(TOKENS[:0]).shape == (0, 64)
