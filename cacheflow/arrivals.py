"""Prompts that arrive over time: traces in Mooncake's format, synthetic conversations, Poisson arrivals."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from cacheflow.request import Request

CHUNK = 512  # tokens of a chunk, by which Mooncake's traces hash prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that arrives at a time.

    id: unique. at: seconds. tokens: its length.
    hashes: one for every CHUNK tokens, the last may stand for fewer: equal hashes are equal content, with all before.
    """

    id: str
    at: float
    tokens: int
    hashes: tuple[int, ...]

    def chunk_tokens(self, index: int) -> int:
        """Tokens of a chunk: CHUNK, but for the last."""
        return min(CHUNK, self.tokens - index * CHUNK)

    def request(self, found: Sequence[bool], windows: tuple[int | None, ...]) -> Request:
        """What there is to restore when a store has the chunks that are `found`, holes included.

        The prefix ends with the last chunk found, and before the prompt's last token.
        """
        prefix = len(found)
        while prefix and (not found[prefix - 1] or self.tokens - 1 <= (prefix - 1) * CHUNK):
            prefix -= 1
        cuts = [min(i * CHUNK, self.tokens - 1) for i in range(prefix + 1)]
        cuts += range((cuts[-1] // CHUNK + 1) * CHUNK, self.tokens, CHUNK)
        return Request(self.id, (*cuts, self.tokens), tuple(found[:prefix]), windows)


def load_trace(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """A trace in Mooncake's format: a JSON object a line with timestamp (ms), input_length (tokens) and hash_ids.

    limit: how many requests to take from its beginning. Source: kvcache-ai/Mooncake, FAST25-release.
    Raises ValueError, naming the line, for what is no such trace: above all ceil(input_length / 512) hash_ids are asked
    for, and timestamps that do not fall.
    """
    prompts: list[Prompt] = []
    try:
        with Path(path).open() as lines:
            for number, line in enumerate(lines, 1):
                if len(prompts) == limit:
                    break
                prompts.append(_prompt(f"{path}, line {number}", str(number - 1), line))
                if len(prompts) > 1 and prompts[-1].at < prompts[-2].at:
                    raise ValueError(
                        f"{path}, line {number}: timestamp {prompts[-1].at * 1e3:g} is before the line above's; "
                        "sort the trace by timestamp"
                    )
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the trace {path}: {error}; give a file of JSON lines") from None
    if not prompts:
        raise ValueError(f"the trace {path} is empty; give a file of JSON lines")
    return prompts


def _prompt(where: str, id: str, line: str) -> Prompt:
    try:
        record = json.loads(line)
        at, tokens, hashes = record["timestamp"], record["input_length"], record["hash_ids"]
        whole = all(type(number) is int for number in (tokens, *hashes))
        if not (whole and tokens > 0 and type(at) in (int, float) and math.isfinite(at) and at >= 0):
            raise ValueError(f"timestamp {at}, input_length {tokens}")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{where}: this is no request ({error}); write an object with timestamp (ms), input_length (tokens) and "
            "hash_ids (whole numbers)"
        ) from None
    chunks = -(-tokens // CHUNK)
    if len(hashes) != chunks:
        raise ValueError(
            f"{where}: input_length {tokens} makes {chunks} chunks of {CHUNK} tokens, but hash_ids has {len(hashes)}; "
            "give one for each"
        )
    if len(set(hashes)) != len(hashes):
        raise ValueError(f"{where}: a hash id comes twice; give ids of content with all that is before it")
    return Prompt(id, at / 1e3, tokens, tuple(hashes))


def conversations(
    number: int, *, seed: int = 0, median: int = 12 * 1024, sigma: float = 0.8, again: float = 0.5, turn: int = 512
) -> list[Prompt]:
    """Synthetic prompts, all at time 0.

    A prompt goes on with one of the last 64 conversations with probability `again`, else it begins one. What is new of
    it is log-normal: of `median` tokens and `sigma` where a conversation begins, of `turn` tokens where it goes on; one
    that would grow beyond 128K tokens ends.
    """
    random, fresh = np.random.default_rng(seed), count()
    prompts: list[Prompt] = []
    recent: list[Prompt] = []
    for i in range(number):
        begins, pick = random.random() >= again or not recent, random.random()
        before = Prompt("", 0.0, 0, ()) if begins else recent[int(pick * len(recent))]
        new = math.ceil(random.lognormal(math.log(median if begins else turn), sigma))
        tokens = min(before.tokens + new, 128 * 1024)
        kept = before.hashes[: before.tokens // CHUNK]
        hashes = (*kept, *(next(fresh) for _ in range(-(-tokens // CHUNK) - len(kept))))
        prompts.append(Prompt(str(i), 0.0, tokens, hashes))
        if not begins:
            recent.remove(before)
        if tokens < 128 * 1024:
            recent = [*recent[-63:], prompts[-1]]
    return prompts


def poisson(prompts: Sequence[Prompt], rate: float, seed: int = 0) -> list[Prompt]:
    """The prompts in their order, arriving as a Poisson process of `rate` per second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(prompts))
    return [replace(prompt, at=float(at)) for prompt, at in zip(prompts, np.cumsum(gaps), strict=True)]


def scaled(prompts: Sequence[Prompt], factor: float) -> list[Prompt]:
    """All arrival times multiplied by a factor: 2 halves the rate."""
    return [replace(prompt, at=prompt.at * factor) for prompt in prompts]


def rate(prompts: Sequence[Prompt]) -> float:
    """Arrivals per second from the first to the last; infinite when all come at once."""
    if any(a.at > b.at for a, b in pairwise(prompts)):
        raise ValueError("prompts must be in the order of their arrival; sort them by `at`")
    span = prompts[-1].at - prompts[0].at if prompts else 0.0
    return (len(prompts) - 1) / span if span else math.inf
