"""One batch on its way through the loop: its pages, aborts, and giving everything back."""

from __future__ import annotations

from collections.abc import Set

from cacheflow.executor import Executor
from cacheflow.lookup import Locator
from cacheflow.loop import Loop
from cacheflow.pages import PagePool
from cacheflow.plane import Plane
from cacheflow.policies import Policy
from cacheflow.results import Restored
from cacheflow.sessions import Session


class Restoration:
    """Restores the prompts that are added, as one batch for the policy.

    aborts: ids of prompts that are not wanted any more; other threads add to it.
    """

    def __init__(self, policy: Policy, executor: Executor, locator: Locator, pages: PagePool, aborts: Set[str]) -> None:
        self.executor = executor
        self.locator = locator
        self.pages = pages
        self.aborts = aborts
        self.loop = Loop(policy, executor, on_done=self._done, on_drained=self._drained)
        self._batch: dict[str, Restored] = {}
        self._accepted = 0.0

    def add(self, restored: Restored) -> None:
        """A prompt that has been looked up."""
        self._batch[restored.id] = restored

    def run(self) -> list[Restored]:
        """Let the loop run until all are done. Returns them as added; the page pool must have room for all."""
        self._accepted = self.executor.now()
        for restored in self._batch.values():
            self._admit(restored)
        while not self.loop.idle:
            self._cancel()
            self.loop.step()
        for (request, reason), count in self.loop.failures.items():
            self._batch[request].failures[reason] += count
        return list(self._batch.values())

    def abandon(self) -> None:
        """After an error or an interrupt: let what is in flight end, then give everything back."""
        self.executor.drain()
        for restored in self._batch.values():
            if restored.id in self.executor.sessions:
                self.executor.sessions.remove(restored.id)
            self._release_leases(restored)
            restored.release(self.pages)

    def _cancel(self) -> None:
        planes = self.loop.policy.planes
        for id in [id for id, plane in planes.items() if id in self.aborts and not plane.done]:
            self.loop.policy.cancel(id)

    def _admit(self, restored: Restored) -> None:
        pages = self.pages.allocate(len(restored.tokens) + restored.room)
        assert pages is not None
        plane = Plane(restored.request)
        slots = self.pages.slots(pages, 0, len(pages) * self.pages.page_size)
        restored.session = Session(plane, restored.tokens, pages, restored.located.chunks, slots)
        self.executor.sessions.add(restored.session)
        self.loop.policy.add(plane)

    def _done(self, plane: Plane, now: float) -> None:
        if plane.cancelled:  # while its last op was in flight
            return
        restored = self._batch[plane.request.id]
        assert restored.session is not None
        restored.ttft = now - self._accepted
        assert restored.session.sampled is not None
        restored.first_token, restored.logits = int(restored.session.sampled), restored.session.logits

    def _drained(self, plane: Plane) -> None:
        restored = self._batch[plane.request.id]
        self.executor.sessions.remove(restored.id)
        self.executor.forget(restored.id)
        self._release_leases(restored)
        if plane.cancelled:
            restored.release(self.pages)

    def _release_leases(self, restored: Restored) -> None:
        leased, restored.leased = restored.leased, ()
        self.locator.release(leased)
