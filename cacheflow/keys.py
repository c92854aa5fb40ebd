"""Chunk keys: what a chunk of KV depends on, boiled down to one SHA-256 per chunk.

The KV of a token depends on the model, the adapter and every token before it. So the key of chunk `i` is a link of a
hash chain: `key_i = H(key_{i-1}, token ids of chunk i)`, rooted in a hash of everything else. Two requests share a key
exactly when they share all of it, whatever process, machine or hash seed computed it. Digests are never shortened:
a truncated digest is a way to serve one prompt the KV of another.
"""

from __future__ import annotations

import hashlib
import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_VERSION = 1
"""Part of every fingerprint and key: raising it orphans all stored chunks."""

MAX_TOKEN_ID = 2**31 - 1
"""No vocabulary is larger; an id beyond it is a bug in the caller, not a token."""

_ROOT, _CHUNK, _TAIL, _MODEL = b"cacheflow.root", b"cacheflow.chunk", b"cacheflow.tail", b"cacheflow.model"


def model_fingerprint(checkpoint_digest: str, config: Mapping[str, Any], kv_dtype: str) -> str:
    """Digest of everything about a model that changes the KV it produces.

    Args:
        checkpoint_digest: digest of the checkpoint files in hex, at least 64 digits.
        config: the fields that change KV (RoPE with its scaling, norm eps, heads, ...): JSON values, nested as needed.
            Numbers count by value, so `10000` and `10000.0` are the same field.
        kv_dtype: dtype of the cached K and V, for example `bfloat16`.

    Returns:
        64 hex digits.

    Raises:
        ValueError, TypeError: a digest that is not hex or is shortened, or a field that has no canonical form.
    """
    digest = checkpoint_digest.lower()
    if len(digest) < 64 or set(digest) - set(string.hexdigits):
        raise ValueError(
            f"checkpoint_digest must be a full digest of at least 64 hex digits, got {checkpoint_digest!r}"
        )
    if not kv_dtype:
        raise ValueError("kv_dtype is empty; name the dtype of the cached K and V, for example 'bfloat16'")
    canonical = json.dumps(_canonical(config, "config"), sort_keys=True, separators=(",", ":"))
    return _digest(_MODEL, _u64(KEY_VERSION), digest.encode(), canonical.encode(), kv_dtype.encode())


def chunk_keys(
    tokens: Sequence[int] | NDArray[np.integer[Any]],
    chunk_tokens: int,
    page_size: int,
    fingerprint: str,
    adapter: bytes | None = None,
    namespace: str = "",
) -> Keys:
    """Keys of all whole chunks of `tokens`, and of any tail on request.

    Args:
        tokens: token ids, `[num_tokens]` of any integer type; the type does not enter the key.
        chunk_tokens: tokens of a chunk, a whole number of pages.
        page_size: tokens of a page.
        fingerprint: what `model_fingerprint` returned.
        adapter: full digest of the adapter's weights; None or empty without an adapter.
        namespace: keeps tenants apart; equal tokens in different namespaces share nothing.

    Raises:
        ValueError, TypeError: sizes that do not fit together, ids that are no token ids, a shortened fingerprint.
    """
    if page_size < 1 or chunk_tokens < 1 or chunk_tokens % page_size:
        raise ValueError(
            f"a chunk must be a whole number of pages, got chunk_tokens={chunk_tokens} and page_size={page_size}"
        )
    if len(fingerprint) != 64 or set(fingerprint) - set(string.hexdigits):
        raise ValueError(f"fingerprint must be the 64 hex digits of model_fingerprint(), got {fingerprint!r}")
    if adapter is not None and not isinstance(adapter, bytes):
        raise TypeError(f"adapter must be the bytes of a digest or None, got {type(adapter).__name__}")
    ids = _token_ids(tokens)
    root = _digest(
        _ROOT, _u64(KEY_VERSION), fingerprint.lower().encode(), adapter or b"", namespace.encode(), _u64(chunk_tokens)
    )
    chain = [root]
    for start in range(0, len(ids) - chunk_tokens + 1, chunk_tokens):
        chain.append(_link(_CHUNK, chain[-1], ids[start : start + chunk_tokens]))
    return Keys(tuple(chain[1:]), chunk_tokens, page_size, len(ids), root, ids)


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys of one token sequence; every key is a string of 64 hex digits.

    A tail is the incomplete last chunk of what somebody stored, cut to whole pages. A later, longer prompt meets it at
    the first chunk that is not there, which need not be its own last one: hence the `chunk` argument below.
    """

    chunks: tuple[str, ...]
    """Key of every whole chunk, in order."""
    chunk_tokens: int
    page_size: int
    num_tokens: int
    _root: str = field(repr=False)
    _ids: NDArray[np.int64] = field(repr=False)

    def tail(self, pages: int, chunk: int | None = None) -> str:
        """Key of the first `pages` pages of chunk `chunk` (default: the incomplete last one).

        Raises:
            ValueError: the chunk does not exist or has fewer such pages than asked for.
        """
        chunk, most = self._tail_pages(chunk)
        if not 1 <= pages <= most:
            raise ValueError(f"chunk {chunk} can have tails of 1 to {most} pages, got {pages}")
        start = chunk * self.chunk_tokens
        before = self.chunks[chunk - 1] if chunk else self._root
        return _link(_TAIL, before, self._ids[start : start + pages * self.page_size])

    def tails(self, chunk: int | None = None) -> tuple[str, ...]:
        """Keys of all possible tails of chunk `chunk` (default: the incomplete last one): entry `n - 1` has n pages."""
        chunk, most = self._tail_pages(chunk)
        return tuple(self.tail(pages, chunk) for pages in range(1, most + 1))

    def _tail_pages(self, chunk: int | None) -> tuple[int, int]:
        """The chunk meant and the pages of its longest tail: a chunk's full length is a chunk, not a tail."""
        chunk = len(self.chunks) if chunk is None else chunk
        if not 0 <= chunk <= len(self.chunks):
            raise ValueError(f"there is no chunk {chunk} in {self.num_tokens} tokens of {self.chunk_tokens} a chunk")
        there = min(self.num_tokens - chunk * self.chunk_tokens, self.chunk_tokens - 1)
        return chunk, there // self.page_size


def _token_ids(tokens: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    given = np.asarray(tokens)
    if given.ndim != 1:
        raise ValueError(f"tokens must be one sequence of ids, got {given.ndim} dimensions")
    if not given.size:
        return np.empty(0, dtype="<i8")
    if given.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers that fit 64 bits, got an array of {given.dtype}")
    low, high = int(given.min()), int(given.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise ValueError(f"token ids must lie in 0..{MAX_TOKEN_ID}, got {low if low < 0 else high}")
    # A private copy: tails are computed later, when the caller may have changed its array.
    return np.array(given, dtype="<i8", order="C")


def _link(kind: bytes, before: str, ids: NDArray[np.int64]) -> str:
    return _digest(kind, bytes.fromhex(before), ids.data.cast("B"))


def _digest(*fields: bytes | memoryview) -> str:
    """SHA-256 over fields, each behind its length, so that no two lists of fields give the same bytes."""
    digest = hashlib.sha256()
    for part in fields:
        digest.update(_u64(len(part)))
        digest.update(part)
    return digest.hexdigest()


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _canonical(value: Any, where: str) -> Any:
    """`value` as JSON has it, with one form per meaning; anything else has no canonical bytes and is refused."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; a fingerprint needs finite numbers")
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{where} has keys that are not strings")
        return {key: _canonical(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}; a fingerprint takes numbers, strings, lists and dicts")
