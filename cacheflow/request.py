"""Request: what a policy may know of one prompt whose prefix lies, in whole or in part, in a store."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Request:
    """One prompt, cut into columns.

    id: unique among the requests a policy holds at the same time.
    boundaries: ascending token positions, 0 first and the prompt's length last; column i is
        [boundaries[i], boundaries[i + 1]). Prefix columns are chunks (the last may be a tail); suffix columns end at
        chunk boundaries.
    stored: for every prefix column, whether the store has it. False is a hole. Columns past len(stored) are the
        suffix, always computed.
    windows: for every layer the sliding window in tokens (a token sees itself and window - 1 tokens before it), or
        None where it sees everything before it.
    deadline: seconds from its arrival within which its first token is wanted; infinite: none.
    """

    id: str
    boundaries: tuple[int, ...]
    stored: tuple[bool, ...]
    windows: tuple[int | None, ...]
    deadline: float = float("inf")

    def __post_init__(self) -> None:
        b = self.boundaries
        if len(b) < 2 or b[0] != 0 or any(x >= y for x, y in pairwise(b)):
            raise ValueError(f"request {self.id}: boundaries must ascend from 0 and hold at least one token, not {b}")
        if len(self.stored) > len(b) - 2:
            raise ValueError(
                f"request {self.id}: {len(self.stored)} stored columns leave none of {len(b) - 1} to compute; "
                "the last token is always computed, so keep it out of the prefix"
            )
        if not self.deadline > 0:
            raise ValueError(
                f"request {self.id}: deadline {self.deadline} must be above 0 seconds; leave it out for none"
            )
        if not self.windows or any(w is not None and w < 1 for w in self.windows):
            raise ValueError(
                f"request {self.id}: windows needs an entry per layer, None or at least 1, not {self.windows}"
            )

    @classmethod
    def of(
        cls,
        id: str,
        *,
        prefix: int,
        suffix: int,
        chunk: int,
        layers: int,
        window: int | None = None,
        holes: Sequence[int] = (),
    ) -> Request:
        """A request of prefix + suffix tokens in chunks of `chunk`; chunks whose index is in `holes` are not stored.

        Raises ValueError when a length does not make sense.
        """
        if chunk < 1 or prefix < 0 or suffix < 1 or layers < 1:
            raise ValueError(
                f"request {id}: chunk {chunk}, suffix {suffix} and layers {layers} must be at least 1, "
                f"prefix {prefix} at least 0"
            )
        cuts = [*range(0, prefix, chunk), prefix] if prefix else [0]
        columns = len(cuts) - 1
        cut = (prefix // chunk + 1) * chunk
        while cut < prefix + suffix:
            cuts.append(cut)
            cut += chunk
        cuts.append(prefix + suffix)
        absent = set(holes)
        if not absent <= set(range(columns)):
            raise ValueError(f"request {id}: holes {sorted(absent)} must be chunk indices below {columns}")
        return cls(id, tuple(cuts), tuple(i not in absent for i in range(columns)), (window,) * layers)

    @property
    def tokens(self) -> int:
        return self.boundaries[-1]

    @property
    def prefix(self) -> int:
        """Tokens before the suffix, holes included."""
        return self.boundaries[len(self.stored)]

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def columns(self) -> int:
        return len(self.boundaries) - 1

    def width(self, column: int) -> int:
        return self.boundaries[column + 1] - self.boundaries[column]

    def column_at(self, token: int) -> int:
        """The column that holds `token`."""
        return bisect_right(self.boundaries, token) - 1

    def first_attended(self, column: int, layer: int) -> int:
        """The first column that the tokens of `column` which advance at `layer` attend to.

        At the last layer that is the last token alone, everywhere else all of them.
        """
        window = self.windows[layer]
        if window is None:
            return 0
        token = self.boundaries[column + 1] - 1 if layer == self.layers - 1 else self.boundaries[column]
        return self.column_at(max(0, token - window + 1))
