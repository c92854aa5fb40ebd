"""How close the stores come to the hardware: disk against a plain read of the same bytes, memory against memcpy.

    python profiling/bench_stores.py
    python profiling/bench_stores.py --folder /mnt/nvme --mib 2048 --json

Every row is a number of pairs, store and baseline in turn and in alternating order, so that a disk or a neighbour that
slows down meets both. The ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import about, text
from numpy.typing import NDArray

from cacheflow.stores import DiskStore, Layout, MemoryStore, PartSpec, Read, Store, aligned_buffer

MIB = 1 << 20
BLOCKS = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)


@dataclass(frozen=True)
class Row:
    """One comparison; speeds are decimal GB/s as (p20, median, p80). `target` is the least ratio to be met."""

    what: str
    baseline: str
    store: tuple[float, float, float]
    plain: tuple[float, float, float]
    ratio: float
    target: float | None


class Bench:
    """Stores filled with the same chunks, the destination of all reads, and the two sides of each row."""

    def __init__(self, folder: Path, layout: Layout, chunks: int, rounds: int) -> None:
        self.folder, self.layout, self.rounds = folder, layout, rounds
        self.keys = [f"{number:064x}" for number in range(chunks)]
        self.nbytes = chunks * layout.nbytes
        self.memory = aligned_buffer(self.nbytes)
        random = np.random.default_rng(0)
        self.payloads = [aligned_buffer(layout.nbytes) for _ in self.keys]
        for payload in self.payloads:
            payload[:] = np.frombuffer(random.bytes(layout.nbytes), dtype=np.uint8)
        disk = DiskStore(folder, fsync=True)
        for key, payload in zip(self.keys, self.payloads, strict=True):
            if disk.write(key, layout, payload).reason is not None:
                raise SystemExit(f"{folder} has no room for {self.nbytes // MIB} MiB; name another --folder")
        disk.close()
        self.paths = [folder / key[:2] / f"{key}.kv" for key in self.keys]
        self.block = max(BLOCKS, key=lambda block: 1 / min(self._plain(block, direct=True) for _ in range(3)))

    def whole(self) -> list[list[Read]]:
        """Every chunk at once, in order."""
        parts = self.memory.reshape(len(self.keys), -1)
        return [[Read.whole(key, self.layout, part) for key, part in zip(self.keys, parts, strict=True)]]

    def layer_by_layer(self) -> list[list[Read]]:
        """One call per layer, over all chunks."""
        layout = self.layout
        parts = self.memory.reshape(layout.layers, len(self.keys), -1)
        return [
            [
                Read(
                    key=key,
                    layout=layout,
                    layers=range(layer, layer + 1),
                    parts=layout.all_parts,
                    kv_heads=layout.all_kv_heads,
                    destination=parts[layer, number],
                )
                for number, key in enumerate(self.keys)
            ]
            for layer in layout.all_layers
        ]

    def disk(self, what: str, calls: list[list[Read]], cold: bool, target: float | None) -> Row:
        """A DiskStore opened anew for each round, so that its headers are read too."""

        def store() -> float:
            opened = DiskStore(self.folder)
            self._cache(cold)
            seconds = self._read(opened, calls)
            opened.close()
            return seconds

        def plain() -> float:
            self._cache(cold)
            return self._plain(self.block, direct=cold)

        how = f"{'O_DIRECT, cold' if cold else 'page cache'}, {self.block // MIB} MiB"
        return self._row(what, f"sequential read ({how})", store, plain, target)

    def in_memory(self, what: str, calls: list[list[Read]], target: float | None) -> Row:
        store = MemoryStore(self.nbytes)
        for key, payload in zip(self.keys, self.payloads, strict=True):
            store.write(key, self.layout, payload)
        by_key = dict(zip(self.keys, self.payloads, strict=True))
        copies: list[tuple[Any, NDArray[np.uint8]]] = []
        for read in (read for call in calls for read in call):
            [(offset, nbytes)] = self.layout.ranges(read.layers, read.parts, read.kv_heads)
            copies.append((read.destination, by_key[read.key][offset : offset + nbytes]))

        def plain() -> float:
            start = time.perf_counter()
            for destination, source in copies:
                np.copyto(destination, source)
            return time.perf_counter() - start

        return self._row(what, "memcpy of the same pieces", lambda: self._read(store, calls), plain, target)

    def _row(
        self, what: str, baseline: str, store: Callable[[], float], plain: Callable[[], float], target: float | None
    ) -> Row:
        taken: dict[str, list[float]] = {"store": [], "plain": []}
        sides = [("store", store), ("plain", plain)]
        for number in range(self.rounds + 1):
            for side, run in sides if number % 2 else reversed(sides):
                seconds = run()
                if number:  # the first round warms up and is not counted
                    taken[side].append(seconds)
        speeds = {side: self._percentiles(seconds) for side, seconds in taken.items()}
        ratio = statistics.median(taken["plain"]) / statistics.median(taken["store"])
        return Row(what, baseline, speeds["store"], speeds["plain"], ratio, target)

    def _percentiles(self, seconds: list[float]) -> tuple[float, float, float]:
        p20, p50, p80 = np.percentile(seconds, [80, 50, 20])
        return self.nbytes / p20 / 1e9, self.nbytes / p50 / 1e9, self.nbytes / p80 / 1e9

    def _read(self, store: Store, calls: list[list[Read]]) -> float:
        start = time.perf_counter()
        found = store.lookup(self.keys)
        results = [result for reads in calls for result in store.read(reads)]
        seconds = time.perf_counter() - start
        store.release(self.keys)
        if None in found or not all(result.ok for result in results):
            raise SystemExit("a read failed, so there is nothing to measure; run the tests")
        last = calls[-1][-1]
        [(offset, nbytes)] = self.layout.ranges(last.layers, last.parts, last.kv_heads)
        if bytes(last.destination) != self.payloads[-1][offset : offset + nbytes].tobytes():
            raise SystemExit("a read gave wrong bytes, so there is nothing to measure; run the tests")
        return seconds

    def _plain(self, block: int, direct: bool) -> float:
        view, at = self.memory.data, 0
        start = time.perf_counter()
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            offset = os.fstat(fd).st_size - self.layout.nbytes
            end = at + self.layout.nbytes
            while at < end:
                moved = os.preadv(fd, [view[at : min(at + block, end)]], offset)
                at, offset = at + moved, offset + moved
            os.close(fd)
        return time.perf_counter() - start

    def _cache(self, cold: bool) -> None:
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY)
            if cold:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(fd, 16 * MIB):
                    pass
            os.close(fd)


def disk_of(folder: Path) -> str:
    """The device that a folder is on, and its file system."""
    mounts = [line.split()[:3] for line in text("/proc/mounts").splitlines()]
    over = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device = max(over, key=lambda mount: len(mount[1]), default=["?", "?", "?"])
    return f"{device[0]} ({device[2]})"


def _print(facts: dict[str, str], layout: Layout, chunks: int, rounds: int, rows: list[Row]) -> None:
    for name, value in facts.items():
        print(f"{name:9}{value}")
    print(f"data     {chunks} chunks of {layout.nbytes // MIB} MiB, {rounds} pairs a row; GB/s, median (p20-p80)\n")
    print(f"{'store':32}{'GB/s':>19}  {'baseline':44}{'GB/s':>19}  ratio  target")
    for row in rows:
        store, plain = (f"{p50:.2f} ({p20:.2f}-{p80:.2f})" for p20, p50, p80 in (row.store, row.plain))
        target = "" if row.target is None else f"{row.target:.2f} {'met' if row.ratio >= row.target else 'MISSED'}"
        print(f"{row.what:32}{store:>19}  {row.baseline:44}{plain:>19}  {row.ratio:5.2f}  {target}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Chunks have the shape of an 8B model's: 32 layers, 8 KV heads, 512 tokens, K and V of 128 bfloat16.\n"
        "Needs Linux (O_DIRECT) and about three times --mib of memory. Run it on an idle machine.",
    )
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; a temporary folder is made in it and removed"
    )
    parser.add_argument("--mib", type=int, default=512, help="MiB on disk, a multiple of 64 up to 2048 (default: 512)")
    parser.add_argument("--rounds", type=int, default=9, help="pairs per row (default: 9)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    layout = Layout(
        layers=32, kv_heads=8, tokens=512, parts=(PartSpec("k", "bfloat16", 128), PartSpec("v", "bfloat16", 128))
    )
    if options.mib * MIB % layout.nbytes or not 0 < options.mib <= 2048:
        parser.error(f"--mib must be a multiple of {layout.nbytes // MIB} up to 2048, got {options.mib}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder {options.folder} does not exist; make it first")
    folder = Path(tempfile.mkdtemp(prefix="cacheflow-bench-", dir=options.folder))
    chunks = options.mib * MIB // layout.nbytes
    try:
        bench = Bench(folder, layout, chunks, options.rounds)
        rows = [
            bench.disk("disk, whole chunks", bench.whole(), cold=True, target=0.9),
            bench.disk("disk, layer by layer", bench.layer_by_layer(), cold=True, target=None),
            bench.disk("disk, whole chunks, cached", bench.whole(), cold=False, target=None),
            bench.in_memory("memory, whole chunks", bench.whole(), target=0.9),
            bench.in_memory("memory, layer by layer", bench.layer_by_layer(), target=0.9),
        ]
    finally:
        shutil.rmtree(folder)
    facts = {**about("numpy", "xxhash"), "disk": disk_of(folder.parent)}
    if options.json:
        print(
            json.dumps(
                {**facts, "layout": asdict(layout), "chunks": chunks, "rows": [asdict(r) for r in rows]}, indent=1
            )
        )
    else:
        _print(facts, layout, chunks, options.rounds, rows)


if __name__ == "__main__":
    main()
