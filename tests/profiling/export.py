"""SQLite files as Nsight Systems exports them, as far as their columns are of use."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

PROCESS = 7
DOMAIN = 3

_TABLES = {
    "StringIds": "id, value",
    "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid, domainId, category",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, streamId, globalPid, correlationId, shortName",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, streamId, globalPid, correlationId, copyKind, bytes",
}


def thread(number: int, process: int = PROCESS) -> int:
    """A globalTid."""
    return process << 24 | number


@dataclass
class Export:
    """Rows to be written. Times in nanoseconds."""

    rows: dict[str, list[tuple]] = field(default_factory=lambda: {table: [] for table in _TABLES})
    strings: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.domain("cacheflow", DOMAIN)

    def domain(self, name: str, number: int) -> None:
        self.rows["NVTX_EVENTS"].append((0, None, 75, name, None, thread(1), number, None))

    def range(
        self,
        name: str,
        start: int,
        end: int,
        category: str | None = None,
        *,
        by: int = 1,
        domain: int = DOMAIN,
        event: int = 59,
        registered: bool = True,
    ) -> None:
        """59: pushed and popped; 60: started and ended."""
        number = None
        if category is not None:
            number = self._string(category)
            self.rows["NVTX_EVENTS"].append((0, None, 33, category, None, thread(by), domain, number))
        text = (None, self._string(name)) if registered else (name, None)
        self.rows["NVTX_EVENTS"].append((start, end, event, *text, thread(by), domain, number))

    def op(self, kind: str, start: int, end: int, *, by: int = 1, **how) -> None:
        self.range(kind, start, end, kind, by=by, **how)

    def kernel(self, start: int, end: int, *, launched: int, by: int = 1, name: str = "gemm", process=PROCESS) -> None:
        correlation = self._launch(launched, thread(by, process))
        row = (start, end, 7, thread(0, process), correlation, self._string(name))
        self.rows["CUPTI_ACTIVITY_KIND_KERNEL"].append(row)

    def memcpy(self, start: int, end: int, *, launched: int, by: int = 1, kind: int = 1) -> None:
        row = (start, end, 8, thread(0), self._launch(launched, thread(by)), kind, 1 << 20)
        self.rows["CUPTI_ACTIVITY_KIND_MEMCPY"].append(row)

    def write(self, path: Path, without: tuple[str, ...] = ()) -> Path:
        self.rows["StringIds"] = [(number, value) for value, number in self.strings.items()]
        db = sqlite3.connect(path)
        for table, columns in _TABLES.items():
            if table not in without:
                db.execute(f"CREATE TABLE {table} ({columns})")
                marks = ", ".join("?" * len(columns.split(",")))
                db.executemany(f"INSERT INTO {table} VALUES ({marks})", self.rows[table])
        db.commit()
        db.close()
        return path

    def _string(self, value: str) -> int:
        return self.strings.setdefault(value, len(self.strings) + 1)

    def _launch(self, time: int, by: int) -> int:
        """Numbers are those of a process: two processes have the same."""
        runtime = self.rows["CUPTI_ACTIVITY_KIND_RUNTIME"]
        correlation = sum(row[2] >> 24 == by >> 24 for row in runtime) + 1
        runtime.append((time, time + 1, by, correlation))
        return correlation
