"""Op: one piece of work, the whole vocabulary between policies, the loop and its back ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["compute", "fetch", "copy", "save"]
COMPUTE: Kind = "compute"
FETCH: Kind = "fetch"
COPY: Kind = "copy"
SAVE: Kind = "save"


class Part(NamedTuple):
    """A token range of one request inside an op.

    A compute op takes every token of the part from the hidden state at the entry of the band's first layer upwards.

    project: fill the part's cells at every layer of the band. False: they are filled already, from whatever source,
        and the op only advances over them.
    advance: advance through the band's last layer too. False: at that layer the cells are only projected (KV-only).
        At the model's last layer no hidden state but that of the part's last token is of use, so only that token is
        advanced there.

    Both flags are meaningless, and True, in fetch and copy ops.
    """

    request: str
    start: int
    stop: int
    project: bool = True
    advance: bool = True

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Op:
    """A band of layers and the token ranges it is for; one launch, one scatter list.

    kind: "compute" (project and advance), "fetch" (store -> staging, may fail), "copy" (staging -> pages, cannot fail),
        "save" (pages -> store; in timelines only, no policy hands one out).
    layers: the band, a range with step 1.
    parts: what it works on. Several parts of one request are allowed: all projections of a layer come before any
        attention of that layer, so parts see each other's keys.
    """

    kind: Kind
    layers: range
    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        return sum([part.stop - part.start for part in self.parts])

    @property
    def requests(self) -> tuple[str, ...]:
        if len(self.parts) == 1:
            return (self.parts[0].request,)
        return tuple(dict.fromkeys([part.request for part in self.parts]))

    def of(self, kind: Kind) -> Op:
        """The same cells under another kind: a landed fetch becomes a copy."""
        return Op(kind, self.layers, self.parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)
