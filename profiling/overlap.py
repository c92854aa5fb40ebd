"""How busy compute and loading were in a profile of Nsight Systems, in the shares that `cacheflow.timeline` gives.

    nsys export --type sqlite --output run.sqlite run.nsys-rep
    python profiling/overlap.py run.sqlite
    python profiling/overlap.py run.sqlite --trace restore.json --json

Of every restoration, a range `restore` of the domain cacheflow whose category is the policy, there are two rows. *ops*:
an op lasts from the start of the first kernel or copy that its range launched to the end of the last; one that launched
nothing, as a fetch, while its range was open. These are `Summary`'s shares, but for their end: the first token, unless
the timeline of the run (`cacheflow restore --trace`) tells when the prefix was back. *GPU*: only while a kernel or a
copy ran; there, overlap is compute with any copying.

A kernel or copy belongs to the innermost op that the thread which launched it was in. One outside of all ops counts as
what it is: compute, unless it is a copy or a kernel of `kernels.transfer`; storing, if it goes to the host.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheflow.commands import _common as common
from cacheflow.op import COMPUTE, COPY, FETCH, SAVE
from cacheflow.timeline import STREAMS
from kernels.ranges import DOMAIN

RESTORE = "restore"
WHOLE = "whole report"
USER_ERROR = 2
STORE = "store"  # the stream of ops of kind "save"
_STREAM_OF = {COMPUTE: COMPUTE, FETCH: FETCH, COPY: COPY, SAVE: STORE}
OPS, GPU, TIMELINE = "ops", "GPU", "timeline"
# NVTX_EVENTS.eventType
_CATEGORY, _PUSHED, _STARTED, _DOMAIN = 33, 59, 60, 75
_TO_HOST = 2  # CUPTI_ACTIVITY_KIND_MEMCPY.copyKind
_TRANSFERS = {"pages_from_staging_kernel": COPY, "staging_from_pages_kernel": STORE}
_THREAD_BITS = 24  # of a globalTid, below the process

Interval = tuple[int, int]


@dataclass(frozen=True)
class Shares:
    """A restoration, or one way to look at it.

    seconds: how long it took. busy: by kind of op, the share of that time. overlap: the share in which compute and
    fetch were both busy; of the source "GPU", compute and any copying.
    """

    policy: str
    source: str
    seconds: float
    busy: Mapping[str, float]
    overlap: float


@dataclass(frozen=True, eq=False)
class _Range:
    """An NVTX range on the host. nested: pushed and popped by one thread. kind: the stream of an op, or None. policy:
    of a restoration, or None."""

    start: int
    end: int
    thread: int
    nested: bool
    name: str
    kind: str | None
    policy: str | None


@dataclass(frozen=True)
class _Activity:
    """A kernel or a copy on the GPU; times in ns. launched: when and by which thread, as far as that is known."""

    start: int
    end: int
    kind: str
    launched: int
    thread: int | None


def analyse(export: str | Path, seconds: float | None = None) -> list[Shares]:
    """The restorations of one SQLite export, in order, two entries each; none where nothing ran.

    seconds: that the last one took, where that is known better. Raises ValueError for what is no such export.
    """
    path = Path(export)
    if not path.is_file():
        raise ValueError(f"{path} is not there; make it with `nsys export --type sqlite`")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            ranges, activities = _ranges(db), _activities(db)
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is no SQLite export of Nsight Systems ({error})") from error
    owners = _owners(ranges, activities)
    windows = [one for one in ranges if one.name == RESTORE]
    found: list[Shares] = []
    for number, window in enumerate(windows or [None]):
        length = seconds if number == max(len(windows), 1) - 1 else None
        found += _restoration(window, ranges, activities, owners, length)
    return found


def _restoration(
    window: _Range | None,
    ranges: Sequence[_Range],
    activities: Sequence[_Activity],
    owners: Sequence[_Range | None],
    seconds: float | None,
) -> list[Shares]:
    """What began on the host within the window, or everything."""

    def inside(time: int, thread: int | None) -> bool:
        same = window is None or thread is None or thread >> _THREAD_BITS == window.thread >> _THREAD_BITS
        return window is None or (same and window.start <= time <= window.end)

    ops = [one for one in ranges if one.kind is not None and inside(one.start, one.thread)]
    launched: dict[_Range, list[_Activity]] = {op: [] for op in ops}
    spans: list[tuple[str, Interval]] = []
    ran: list[tuple[str, Interval]] = []
    for activity, owner in zip(activities, owners, strict=True):
        if inside(activity.launched, activity.thread):
            kind = activity.kind if owner is None or owner.kind is None else owner.kind
            ran.append((kind, (activity.start, activity.end)))
            if owner in launched:
                launched[owner].append(activity)
            else:
                spans.append(ran[-1])
    for op, started in launched.items():
        assert op.kind is not None
        times = [time for activity in started for time in (activity.start, activity.end)]
        spans.append((op.kind, (min(times, default=op.start), max(times, default=op.end))))
    if not spans:
        return []
    policy = WHOLE if window is None else window.policy or RESTORE
    start = min(start for _, (start, _) in spans)
    filled = [end for kind, (_, end) in spans if kind in (COMPUTE, COPY)]
    end = max(filled, default=start) if seconds is None else start + round(seconds * 1e9)
    return [_shares(policy, OPS, spans, start, end), _shares(policy, GPU, ran, start, end)]


def _shares(policy: str, source: str, spans: Iterable[tuple[str, Interval]], start: int, end: int) -> Shares:
    inside: dict[str, list[Interval]] = {kind: [] for kind in STREAMS}
    for kind, (first, last) in spans:
        if first < end and last > start:
            inside[kind].append((max(first, start), min(last, end)))
    others = (FETCH,) if source != GPU else tuple(kind for kind in STREAMS if kind != COMPUTE)
    loading = [interval for kind in others for interval in inside[kind]]
    both = _covered(inside[COMPUTE]) + _covered(loading) - _covered([*inside[COMPUTE], *loading])
    whole = end - start
    return Shares(
        policy=policy,
        source=source,
        seconds=whole / 1e9,
        busy={kind: _covered(intervals) / whole if whole > 0 else 0.0 for kind, intervals in inside.items()},
        overlap=both / whole if whole > 0 else 0.0,
    )


def _covered(intervals: Iterable[Interval]) -> int:
    """Nanoseconds in any of them."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def _owners(ranges: Sequence[_Range], activities: Sequence[_Activity]) -> list[_Range | None]:
    """For every activity the innermost op that its thread was in when it launched it."""
    owners: list[_Range | None] = [None] * len(activities)
    ops = [one for one in reversed(ranges) if one.nested and one.kind is not None]  # the last one starts first
    open_ranges: dict[int, list[_Range]] = {}
    for index in sorted(range(len(activities)), key=lambda index: activities[index].launched):
        activity = activities[index]
        while ops and ops[-1].start <= activity.launched:
            opened = ops.pop()
            open_ranges.setdefault(opened.thread, []).append(opened)
        if activity.thread in open_ranges:
            still = [one for one in open_ranges[activity.thread] if one.end >= activity.launched]
            open_ranges[activity.thread] = still
            owners[index] = still[-1] if still else None
    return owners


def _ranges(db: sqlite3.Connection) -> list[_Range]:
    """Those of our domain by start; those of all domains where the profile, begun later, does not name ours."""
    columns = ("start", "end", "eventType", "text", "textId", "globalTid", "domainId", "category")
    events = _rows(db, "NVTX_EVENTS", columns)
    strings = dict(_rows(db, "StringIds", ("id", "value")))
    domains, categories = set(), {}
    for _, _, event, text, text_id, _, domain, category in events:
        name = text if text is not None else strings.get(text_id)
        if event == _DOMAIN and name == DOMAIN:
            domains.add(domain)
        elif event == _CATEGORY:
            categories[domain, category] = name
    found = []
    for start, end, event, text, text_id, thread, domain, category in events:
        if event in (_PUSHED, _STARTED) and end is not None and (domain in domains or not domains):
            name = text if text is not None else strings.get(text_id, "")
            label = categories.get((domain, category))
            kind = _STREAM_OF.get(label or name.partition(" ")[0])
            policy = label if name == RESTORE else None
            found.append(_Range(start, end, thread, event == _PUSHED, name, kind, policy))
    return sorted(found, key=lambda one: (one.start, -one.end))


def _activities(db: sqlite3.Connection) -> list[_Activity]:
    launches = {
        (thread >> _THREAD_BITS, correlation): (start, thread)
        for start, thread, correlation in _rows(
            db, "CUPTI_ACTIVITY_KIND_RUNTIME", ("start", "globalTid", "correlationId")
        )
    }
    strings = dict(_rows(db, "StringIds", ("id", "value")))
    columns = ("start", "end", "globalPid", "correlationId")
    found = [
        (*row, _TRANSFERS.get(strings.get(name, ""), COMPUTE))
        for *row, name in _rows(db, "CUPTI_ACTIVITY_KIND_KERNEL", (*columns, "shortName"))
    ]
    found += [
        (*row, STORE if kind == _TO_HOST else COPY)
        for *row, kind in _rows(db, "CUPTI_ACTIVITY_KIND_MEMCPY", (*columns, "copyKind"))
    ]
    return [
        _Activity(start, end, kind, *launches.get(((process or 0) >> _THREAD_BITS, correlation), (start, None)))
        for start, end, process, correlation, kind in found
    ]


def _rows(db: sqlite3.Connection, table: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """A table's rows: none where it is absent, for nsys makes only those that it fills; None for absent columns."""
    present = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
    if not present:
        return []
    selected = ", ".join(f'"{column}"' if column in present else "NULL" for column in columns)
    return list(db.execute(f"SELECT {selected} FROM {table}"))


def of_trace(path: str | Path) -> Shares:
    """The same of a timeline that `cacheflow restore --trace` wrote, until the last op that filled a prefix cell.

    Raises ValueError for another file.
    """
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        ops = [event for event in events if event["ph"] == "X"]
        spans = [(event["cat"], (round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3))) for event in ops]
        filled = [
            end
            for event, (kind, (_, end)) in zip(ops, spans, strict=True)
            if kind in (COMPUTE, COPY) and "chunk" in event["name"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of `cacheflow restore --trace` ({error})") from error
    start = min((start for _, (start, _) in spans), default=0)
    return _shares(TIMELINE, TIMELINE, spans, start, max(filled, default=start))


def report(exports: Sequence[str | Path], trace: str | Path | None = None) -> list[Shares]:
    """The restorations of several exports of one run, and the timeline of the last one if its trace is given."""
    timeline = None if trace is None else of_trace(trace)
    found: list[Shares] = []
    for number, export in enumerate(exports, start=1):
        last = timeline is not None and number == len(exports)
        found += analyse(export, timeline.seconds if timeline is not None and last else None)
    if not found:
        raise ValueError("the profile holds no kernel, no copy and no op; was it taken on a GPU, and of a restoration?")
    return [*found, *([] if timeline is None else [timeline])]


def show(found: Sequence[Shares]) -> None:
    """A table: a row for each policy and source, medians over its restorations."""
    groups: dict[tuple[str, str], list[Shares]] = {}
    for one in found:
        groups.setdefault((one.policy, one.source), []).append(one)
    shown = [
        (
            policy,
            source,
            len(group),
            f"{statistics.median(one.seconds for one in group) * 1e3:.2f}",
            *(f"{statistics.median(one.busy[kind] for one in group):.0%}" for kind in STREAMS),
            f"{statistics.median(one.overlap for one in group):.0%}",
        )
        for (policy, source), group in groups.items()
    ]
    headers = ["policy", "from", "runs", "ms", *(f"busy\n{kind}" for kind in STREAMS), "overlap"]
    print(common.table(shown, headers, right=range(2, len(headers))))
    print("\nops: from the first to the last kernel or copy of an op. GPU: while one ran. medians over runs.")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for what the user can mend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path, metavar="EXPORT.sqlite", help="of one run, in order")
    parser.add_argument(
        "--trace", type=Path, metavar="TRACE.json", help="of the last restoration, by cacheflow restore"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds, and nothing else")
    args = parser.parse_args(argv)
    try:
        found = report(args.exports, args.trace)
    except ValueError as error:
        print(f"overlap.py: {error}", file=sys.stderr)
        return USER_ERROR
    if args.json:
        common.print_json([asdict(one) for one in found])
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
