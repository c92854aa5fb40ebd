"""The engine: what a user calls to save, restore and generate."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cacheflow.costs.base import Costs
from cacheflow.costs.learned import Learned, this_machine
from cacheflow.costs.measure import measure
from cacheflow.costs.measured import Measured
from cacheflow.devices import open_device
from cacheflow.executor import Executor
from cacheflow.interference import measure_interference
from cacheflow.keys import model_fingerprint
from cacheflow.lookup import Locator
from cacheflow.pages import HiddenPool, PagePool
from cacheflow.policies import Policy, find
from cacheflow.request import Request
from cacheflow.restoration import Restoration
from cacheflow.results import Generated, Restored, Saved
from cacheflow.saving import save
from cacheflow.sessions import DIRECT, Sessions
from cacheflow.stores import open_store
from cacheflow.stores.base import Store
from cacheflow.stores.layout import Layout, PartSpec
from cacheflow.streams import Stream
from cacheflow.timeline import Timeline
from kernels import backend as find_backend
from kernels import ranges
from kernels.batch import Part, RaggedBatch
from models.decoder import Decoder
from models.weights import weights_digest


class _Accepted(NamedTuple):
    """A prompt that can work. tokens: [n] int64. deadline: see Request."""

    id: str
    tokens: torch.Tensor
    deadline: float


class Engine:
    """Restores prompts whose KV is in a store, by recompute and load at once, and generates from them, greedily.

    model: a Decoder, or the folder of a Hugging Face checkpoint. store: a Store, or what `open_store` takes.
    policy: name, or "module:Class".
    device, dtype, backend: for a model given as a folder, since a Decoder has its own: "cpu", "cuda" or "cuda:N", None:
        "cpu"; of weights and KV, None: float32; the kernels, a name of `kernels.BACKENDS`, None: "triton" on a GPU and
        "reference" on a CPU.
    chunk_tokens: tokens of a stored object, whole pages. page_size: tokens of a page. cache_tokens: KV that fits the
        page pool, all prompts together. token_budget: most tokens of one compute op. hidden_tokens: most tokens whose
        hidden states are kept between ops; None: as many as the page pool has.
    costs: seconds of ops; None: measured by `warmup`. learn: whether to refine them by what ops take, and to plan with
        that; None: unless costs are given that are not Learned, which are then taken at their word. timeout: seconds
        that look-ups, and loads beyond what they should take, may last before the store counts as failed. namespace:
        keeps stored KV of tenants apart.
    adapter: digest of the adapter that the model's weights include. streams: see Executor.

    Calls come from one thread at a time; `abort` may come from any.
    """

    def __init__(
        self,
        model: Decoder | str | Path,
        store: Store | str,
        *,
        policy: str = "pipelined",
        device: str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
        chunk_tokens: int = 512,
        page_size: int = 16,
        cache_tokens: int = 16384,
        token_budget: int = 8192,
        hidden_tokens: int | None = None,
        costs: Costs | None = None,
        learn: bool | None = None,
        timeout: float = 5.0,
        namespace: str = "",
        adapter: bytes | None = None,
        streams: Callable[[str], Stream] | None = None,
    ) -> None:
        if page_size < 1 or chunk_tokens % page_size or chunk_tokens < 1:
            raise ValueError(f"chunk_tokens {chunk_tokens} must be a whole number of pages of {page_size} tokens")
        for name, tokens in (("cache_tokens", cache_tokens), ("token_budget", token_budget)):
            if tokens < 1:
                raise ValueError(f"{name} {tokens} must be at least 1 token")
        find(policy)
        self.model = _model(model, device, dtype, backend)
        self._device = open_device(str(self.model.device))
        self.store = open_store(store) if isinstance(store, str) else store
        self.policy = policy
        self.costs = costs
        self.learn = (costs is None or isinstance(costs, Learned)) if learn is None else learn
        self._learned: Learned | None = None
        self.chunk_tokens = chunk_tokens
        self.page_size = page_size
        self.token_budget = token_budget
        config = self.model.config
        self.pages = PagePool(
            layers=config.num_layers,
            num_pages=-(-cache_tokens // page_size),
            page_size=page_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=self.model.dtype,
            device=self.model.device,
        )
        self.hidden_tokens = cache_tokens if hidden_tokens is None else hidden_tokens
        # Suffixes and repairs keep hidden states whatever the budget; every token of the pool may be such.
        self._sessions = Sessions(
            self.pages,
            HiddenPool(self.pages.num_pages * page_size, config.hidden_size, self.model.dtype, self.model.device),
        )
        self._timeout = timeout
        self._streams = streams
        self._key_options: dict[str, Any] = {
            "chunk_tokens": chunk_tokens,
            "page_size": page_size,
            "fingerprint": self._fingerprint(self.model.checkpoint_digest or weights_digest(self.model.weights)),
            "adapter": adapter,
            "namespace": namespace,
        }
        self._locator = Locator(self.store, self._layout, timeout)
        self._executor: Executor | None = None
        self._ids = itertools.count()
        self._aborts: set[str] = set()

    # What a user calls

    def warmup(self) -> None:
        """Whatever should not happen in a first TTFT: compile kernels, measure costs not given, start streams."""
        if self._executor is not None:
            return
        self.model.warmup(*self.pages.layers[0])
        if self.costs is None:
            self.measure()
        self._executor = Executor(
            self.model,
            self._sessions,
            self.store,
            self.known_costs,
            self._device,
            staging_bytes=self._staging_bytes,
            timeout=self._timeout,
            streams=self._streams,
        )
        if self.model.device.type == "cuda":  # its libraries begin with the first pass
            self._executor.call(partial(self._pass, [0], [Part(0, 1, [0])]))

    def measure(self, *, max_tokens: int = 2048, progress: Callable[[str], object] = lambda step: None) -> Measured:
        """Measure the costs anew, of compute with nothing queued on it, and plan with them, and what is learned over
        them, from now on. Some chunks are written to the store for that, and deleted; in a full one others make room.

        max_tokens: longest sequence measured; longer ones are extrapolated. progress: called before every step.
        """
        work = partial(measure, self.model, self.store, self.layout, max_tokens=max_tokens, progress=progress)
        # Where compute runs: its threads, and memory as its allocator has it.
        alone = work() if self._executor is None else self._executor.call(work)
        progress("loads beside compute")
        windowed = any(self.model.config.windows)
        found = measure_interference(
            partial(self._beside, alone), self.model.max_positions, self.store, self.layout, windowed
        )
        self.costs = costs = alone.with_interference(found)
        if self._executor is not None:
            self._executor.costs = costs
        return costs

    def _beside(self, costs: Costs, store: Store, cache_tokens: int) -> Engine:
        """An engine of the same model for something else, with pages and streams of its own."""
        return Engine(
            self.model,
            store,
            chunk_tokens=self.chunk_tokens,
            page_size=self.page_size,
            cache_tokens=cache_tokens,
            costs=costs,
            timeout=self._timeout,
        )

    @property
    def known_costs(self) -> Costs:
        """Undisturbed costs. Raises RuntimeError before `warmup`, where they were not given."""
        if self.costs is None:
            raise RuntimeError("the engine has no costs yet; call warmup() first")
        return self.costs.undisturbed if isinstance(self.costs, Learned) else self.costs

    @property
    def learned(self) -> Learned:
        """The costs as what ran has refined them: what the engine plans with if it learns. Raises as `known_costs`."""
        if isinstance(self.costs, Learned):
            return self.costs
        if self._learned is None or self._learned.undisturbed is not self.known_costs:
            self._learned = Learned(self.known_costs, machine=self.machine)
        return self._learned

    @property
    def machine(self) -> str:
        """Whose costs are learned: the GPU's name, or the CPUs'."""
        device = self.model.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else this_machine()

    def save(self, tokens: Sequence[int]) -> Saved:
        """Make the KV of a text available to later prompts that begin with it: whole chunks, and a tail of whole pages.

        Computes what the store does not have; what it has is restored, since computing the rest needs it.
        """
        [restored] = self.restore([tokens])
        try:
            return self._save([(restored, ())])
        finally:
            self.release(restored)

    def restore(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        policy: str | None = None,
        room: int = 0,
        ids: Sequence[str] | None = None,
        deadlines: Sequence[float | None] | None = None,
    ) -> list[Restored]:
        """Bring back the KV of prompts as far as the store has it, compute the rest, and give their first tokens.

        All prompts are one batch for the policy, and their pages stay taken until each is released. room: tokens that
        will be decoded behind each. ids: one per prompt, for `abort`. deadlines: one per prompt, seconds within which
        its first token is wanted, or None; the policy `pipelined` serves those first that can still make it.

        Raises ValueError for a prompt that cannot work, and RuntimeError, before anything is restored, for a batch that
        does not fit the pages that are free.
        """
        accepted = self._accept(prompts, room, ids, deadlines)
        needed, free = sum(self.pages.pages_for(len(one.tokens) + room) for one in accepted), self.pages.free_pages
        if needed > free:
            raise RuntimeError(
                f"a batch of {len(accepted)} needs {needed} pages of {self.page_size} tokens and {free} are free; "
                "restore fewer prompts at a time, release restored ones or raise cache_tokens"
            )
        return self._restore(accepted, room, policy)

    def release(self, restored: Restored) -> None:
        """Give a prompt's pages back."""
        restored.release(self.pages)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        stop_tokens: Sequence[int] = (),
        policy: str | None = None,
        save: bool = True,
        ids: Sequence[str] | None = None,
        deadlines: Sequence[float | None] | None = None,
    ) -> list[Generated]:
        """Restore prompts and continue them greedily, up to max_new_tokens each or a stop token, which is included.

        save: store the KV of new chunks, generated tokens included, so that the next turn restores the whole of it.
        ids, deadlines: as for `restore`.

        Where the prompts do not fit the free pages together they are served in parts, as many as fit at a time, in
        their order; a part is a batch of its own for the policy, and its times count from when it begins.

        Raises, before anything is generated, ValueError for a prompt that cannot work and RuntimeError for one whose
        pages are taken by unreleased ones.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {max_new_tokens} must be at least 1")
        room = max_new_tokens - 1
        generated: list[Generated] = []
        for part in self._parts(self._accept(prompts, room, ids, deadlines), room):
            batch = self._restore(part, room, policy)
            try:
                done = self._decode(batch, max_new_tokens, frozenset(stop_tokens))
                if save:
                    self._save([(g.restored, g.tokens[:-1]) for g in done])
            finally:
                for restored in batch:
                    self.release(restored)
            generated += done
        return generated

    def abort(self, id: str) -> None:
        """Stop restoring a prompt. Its pages are used again only when nothing in flight can touch them. Any thread."""
        self._aborts.add(id)
        if self._executor is not None:
            self._executor.wake()

    def invalidate(self) -> None:
        """The model's weights were changed in place: stored KV, which they did not make, is not met any more."""
        self._key_options["fingerprint"] = self._fingerprint(weights_digest(self.model.weights))

    def close(self) -> None:
        """End streams and threads. The store is the caller's."""
        self._locator.close()
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Restoring

    def make_policy(self, name: str | None = None, costs: Costs | None = None) -> Policy:
        """A policy with this engine's limits; to simulate with, for one. After `warmup`, or with costs given.

        costs: None: the undisturbed ones; `learned`: what the engine itself plans with.
        """
        return find(name or self.policy)(
            costs or self.known_costs,
            token_budget=self.token_budget,
            hidden_tokens=self.hidden_tokens,
            staging_cells=self.staging_cells,
        )

    def _planner(self, name: str | None) -> Policy:
        """A policy for what is about to run; what it takes is learned from."""
        if not self.learn:
            return self.make_policy(name, self.costs)
        learned = self.learned
        learned.refresh()  # a link's bandwidth may have been set
        policy = self.make_policy(name, learned)
        policy.observe = learned.observe
        return policy

    @property
    def layout(self) -> Layout:
        """Of a stored chunk."""
        return self._layout(self.chunk_tokens)

    @property
    def staging_cells(self) -> int:
        """(token, layer) pairs in a staging buffer: one chunk's."""
        return self.chunk_tokens * self.model.config.num_layers

    @property
    def _staging_bytes(self) -> int:
        """What any fetch of so many cells fits in.

        A column's object may hold one token more than it, the prompt's last, and lands at a multiple of DIRECT. Columns
        have pages of their own, and a whole page's tokens at least, but for that last one.
        """
        beyond = self.staging_cells // max(1, self.page_size - 1)  # cells; and columns, if all are as short as can be
        columns = min(beyond, self.pages.num_pages)
        return (self.staging_cells + beyond) * self._layout(1).layer_nbytes + columns * DIRECT

    def _fingerprint(self, digest: str) -> str:
        return model_fingerprint(digest, self.model.config.kv_fields(), _name(self.model.dtype))

    def _layout(self, tokens: int) -> Layout:
        config = self.model.config
        parts = tuple(PartSpec(name, _name(self.model.dtype), config.head_dim) for name in ("k", "v"))
        return Layout(layers=config.num_layers, kv_heads=config.kv_heads, tokens=tokens, parts=parts)

    def _accept(
        self,
        prompts: Sequence[Sequence[int]],
        room: int,
        ids: Sequence[str] | None,
        deadlines: Sequence[float | None] | None,
    ) -> list[_Accepted]:
        """Prompts under their ids, none of which is aborted yet."""
        self._aborts.clear()
        accepted = [self._check(prompt, room) for prompt in prompts]
        names = [f"r{next(self._ids)}" for _ in prompts] if ids is None else list(ids)
        if len(names) != len(accepted) or len(set(names)) < len(names):
            raise ValueError(f"ids {names} must be different, and as many as the {len(accepted)} prompts")
        due = [None] * len(accepted) if deadlines is None else list(deadlines)
        if len(due) != len(accepted) or any(seconds is not None and not seconds > 0 for seconds in due):
            raise ValueError(
                f"deadlines {due} must be seconds above 0 or None, one for each of {len(accepted)} prompts"
            )
        seconds = (math.inf if one is None else one for one in due)
        return list(map(_Accepted, names, accepted, seconds))

    def _parts(self, accepted: Sequence[_Accepted], room: int) -> list[list[_Accepted]]:
        """Neighbours that fit the free pages together, as many as do."""
        free, left = self.pages.free_pages, 0
        parts: list[list[_Accepted]] = []
        for one in accepted:
            pages = self.pages.pages_for(len(one.tokens) + room)
            if pages > free:
                raise RuntimeError(
                    f"{len(one.tokens)} tokens and {room} to come need {pages} pages of {self.page_size} tokens and "
                    f"{free} are free; release restored prompts or raise cache_tokens"
                )
            if pages > left:
                parts.append([])
                left = free
            parts[-1].append(one)
            left -= pages
        return parts

    def _restore(self, accepted: Sequence[_Accepted], room: int, policy: str | None) -> list[Restored]:
        """A batch that fits the free pages."""
        self.warmup()
        assert self._executor is not None
        self._executor.timeline = Timeline()
        chosen = self._planner(policy)
        restoration = Restoration(chosen, self._executor, self._locator, self.pages, self._aborts)
        try:
            with ranges.span("restore", chosen.name):  # what a profiler captures
                for one in accepted:
                    restoration.add(self._locate(one, room, self._executor.timeline))
                return restoration.run()
        except BaseException:  # KeyboardInterrupt too
            restoration.abandon()
            raise

    def _check(self, prompt: Sequence[int], room: int) -> torch.Tensor:
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ValueError(
                f"a prompt must be a sequence of at least one token id, not {ids.dtype} values of shape {ids.shape}"
            )
        low, high, vocab = int(ids.min()), int(ids.max()), self.model.config.vocab_size
        if low < 0 or high >= vocab:
            raise ValueError(f"token id {low if low < 0 else high} is not in the model's vocabulary of {vocab}")
        tokens = torch.from_numpy(ids.astype(np.int64))
        total, most = len(tokens) + room, self.model.max_positions
        if total > most:
            raise ValueError(f"{len(tokens)} tokens and {room} to come are more than the model's {most} positions")
        if self.pages.pages_for(total) > self.pages.num_pages:
            cache = self.pages.num_pages * self.page_size
            raise ValueError(f"{len(tokens)} tokens and {room} to come do not fit cache_tokens={cache}; raise it")
        return tokens

    def _locate(self, prompt: _Accepted, room: int, timeline: Timeline) -> Restored:
        id, tokens, deadline = prompt
        located = self._locator.locate(tokens.numpy(), **self._key_options)
        config = self.model.config
        request = Request(
            id,
            located.boundaries,
            tuple(chunk is not None for chunk in located.chunks),
            tuple(config.window(layer) for layer in range(config.num_layers)),
            deadline,
        )
        failures = Counter(located.failures)
        return Restored(id, tokens, request, located, located.seconds, room, failures, timeline, located.leased)

    # Generating and saving

    def _save(self, batch: Sequence[tuple[Restored, Sequence[int]]]) -> Saved:
        assert self._executor is not None
        return save(batch, self._executor, self._layout, self._key_options)

    def _decode(self, batch: list[Restored], max_new_tokens: int, stop: frozenset[int]) -> list[Generated]:
        """One token a step for every prompt that goes on."""
        assert self._executor is not None
        generated = [Generated([] if r.first_token is None else [r.first_token], r) for r in batch]
        for _ in range(max_new_tokens - 1):
            running = [g for g in generated if g.tokens and g.tokens[-1] not in stop]
            if not running:
                break
            for g, token in zip(running, self._executor.call(partial(self._step, running)), strict=True):
                g.tokens.append(token)
        return generated

    def _step(self, running: list[Generated]) -> list[int]:
        parts = []
        for g in running:
            assert g.restored.session is not None
            position = len(g.restored.tokens) + len(g.tokens) - 1
            parts.append(Part(position, position + 1, g.restored.session.pages))
        return self._pass([g.tokens[-1] for g in running], parts)

    def _pass(self, tokens: list[int], parts: list[Part]) -> list[int]:
        """One pass through all layers, and the token that follows each. Work of the compute stream."""
        hidden = self.model.embed(*self._device.put([torch.tensor(tokens)]))
        batch = RaggedBatch.build(parts, self.page_size, self.model.device)
        self.model.forward(range(self.model.config.num_layers), batch, hidden, self.pages.layers)
        return self.model.logits(hidden).argmax(dim=-1).tolist()


def _model(model: Decoder | str | Path, device: str | None, dtype: torch.dtype | None, backend: str | None) -> Decoder:
    if not isinstance(model, Decoder):
        where = open_device(device or "cpu").torch_device
        return Decoder.from_folder(model, dtype or torch.float32, where, find_backend(backend, where))
    its = {"device": str(model.device), "dtype": model.dtype, "backend": model.ops.NAME}
    for name, wanted in (("device", device), ("dtype", dtype), ("backend", backend)):
        if wanted not in (None, its[name]):
            raise ValueError(f"{name} {wanted!r} is not the Decoder's, {its[name]!r}; leave it out")
    return model


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
