"""A check of compiled loops for a race that Triton's pipeliner is known to leave in them on Hopper.

A buffer in shared memory that an asynchronous multiplication (wgmma) still reads must not be the one into which the
next tile is copied. Triton 3.6 and 3.7 allot one buffer too few where a load feeds such a multiplication and other
arithmetic besides (github.com/triton-lang/triton/issues/6691); nothing but wrong results tells.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_SLOT = re.compile(r"(%[\w#]+) = ttg\.memdesc_index (%[\w#]+)\[.*?: !ttg\.memdesc<(\d+)x")
_VIEW = re.compile(r"(%[\w#]+) = ttg\.memdesc_(?!index)\w+ (%[\w#]+)")
_COPY = re.compile(r"async(?:_tma)?_copy_global_to_local (.*)")
_MULTIPLICATION = re.compile(r"ttng\.warp_group_dot (%[\w#]+), (%[\w#]+),.*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")


@dataclass(frozen=True)
class _Step:
    """One line that matters. kind: copy, multiply, wait. buffers: those written or read. count: slots of the buffer
    copied to, or multiplications that may still run after a wait."""

    line: int
    kind: str
    buffers: tuple[str, ...] = ()
    count: int = 0


def find_races(ttgir: str) -> list[str]:
    """A sentence for each buffer of a loop that a copy writes while a multiplication reads it.

    ttgir: the code after pipelining. Round i of a loop multiplies from slot i and copies into slot i + d, both modulo
    the number of slots, where d copies were made before the loop.
    """
    lines = ttgir.splitlines()
    steps = list(_steps(lines))
    found = set()
    for begin, end in _loops(lines):
        ahead = Counter(step.buffers[0] for step in steps if step.kind == "copy" and step.line < begin)
        body = [step for step in steps if begin < step.line < end]
        running: list[tuple[int, tuple[str, ...]]] = []
        for number in range(3):  # no multiplication runs for longer than that
            for step in body:
                if step.kind == "multiply":
                    running.append((number, step.buffers))
                elif step.kind == "wait":
                    running = running[max(0, len(running) - step.count) :]
                else:
                    for since, buffers in running:
                        distance = ahead[step.buffers[0]] + number - since
                        if step.buffers[0] in buffers and distance % step.count == 0:
                            found.add(f"{step.buffers[0]} is overwritten while a multiplication reads it")
    return sorted(found)


def _steps(lines: list[str]) -> Iterator[_Step]:
    slots: dict[str, tuple[str, int]] = {}  # by the name of a view: the buffer and how many slots that has
    for number, line in enumerate(lines):
        if match := _SLOT.search(line):
            slots[match[1]] = (match[2], int(match[3]))
        elif match := _VIEW.search(line):
            if match[2] in slots:
                slots[match[1]] = slots[match[2]]
        elif match := _COPY.search(line):
            for buffer, count in (slots[name] for name in re.findall(r"%[\w#]+", match[1]) if name in slots):
                yield _Step(number, "copy", (buffer,), count)
        elif match := _MULTIPLICATION.search(line):
            yield _Step(number, "multiply", tuple(slots[name][0] for name in match.groups() if name in slots))
        elif match := _WAIT.search(line):
            yield _Step(number, "wait", count=int(match[1]))


def _loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line of every loop; the text is indented."""
    for begin, line in enumerate(lines):
        if re.search(r"\bscf\.(for|while)\b", line):
            indent = line[: len(line) - len(line.lstrip())]
            yield begin, next(i for i in range(begin + 1, len(lines)) if lines[i].startswith(indent + "}"))
