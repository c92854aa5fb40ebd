"""What the engine hands out: restored prompts, generated tokens, and what was saved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from cacheflow.lookup import Located
from cacheflow.pages import PagePool
from cacheflow.request import Request
from cacheflow.sessions import Session
from cacheflow.timeline import Timeline


@dataclass(eq=False)
class Restored:
    """A prompt whose KV is in pages again and whose first token is known. Its pages stay taken until `release`.

    id: what `restore` was told, or one of the engine's own. tokens: the prompt, [n] int64.
    first_token: greedy, and the logits, [vocab], it was chosen from; None when it was aborted before.
    ttft: seconds from `restore` accepted, its keys looked up, to the first token's id on the host.
    lookup_seconds: spent on keys and look-up before that.
    failures: look-ups and loads that failed, by reason; what they were for was recomputed.
    request: the prompt as columns. session: its pages. timeline: of the whole `restore` call, all its prompts.
    leased: objects that the store keeps for it while it is on its way.
    """

    id: str
    tokens: torch.Tensor
    request: Request
    located: Located
    lookup_seconds: float
    room: int
    failures: Counter[str]
    timeline: Timeline
    leased: tuple[str, ...] = ()
    session: Session | None = None
    first_token: int | None = None
    logits: torch.Tensor | None = None
    ttft: float = float("nan")

    def release(self, pages: PagePool) -> None:
        """Give its pages back."""
        if self.session is not None:
            pages.release(self.session.pages)
            self.session = None


@dataclass(frozen=True)
class Generated:
    """tokens: ids that follow the prompt, fewer than asked for after a stop token or an abort. restored: the start."""

    tokens: list[int]
    restored: Restored


@dataclass(frozen=True)
class Saved:
    """What one call added to the store. chunks, bytes: objects and their payload. refused: objects not written, by
    reason."""

    chunks: int
    bytes: int
    refused: dict[str, int] = field(default_factory=dict)
