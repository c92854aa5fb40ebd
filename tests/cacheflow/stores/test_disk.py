"""The folder: what survives, who shares it, what interrupted writers leave, and how it is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from cacheflow.stores import DiskStore, Read, ReadResult, StoreError, aligned_buffer, disk_folder, disk_io
from cacheflow.stores.base import ERROR, MISSING, TIMEOUT
from cacheflow.stores.disk_format import file_nbytes
from tests.cacheflow.stores.support import PAGED, ROOT, TOY, holds, key, payload, read_whole

PRELUDE = """
import os, random, sys
from cacheflow.stores import DiskStore, StoreError
from cacheflow.stores.disk_format import file_nbytes
from tests.cacheflow.stores.support import PAGED, TOY, key, payload, read_whole
folder = sys.argv[1]
"""


def start(program: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A fresh interpreter that runs `program`."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program), str(folder), *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??/*") if path.is_file())


def test_chunks_survive_the_process(tmp_path: Path) -> None:
    finish(start("DiskStore(folder).write(key(1), TOY, payload(TOY, 1))", tmp_path / "new" / "folder"))
    store = DiskStore(tmp_path / "new" / "folder")
    assert store.lookup([key(1)])[0] is not None
    assert read_whole(store, key(1), TOY) == (ReadResult(True, None, TOY.nbytes), payload(TOY, 1).tobytes())


def test_two_stores_see_what_the_other_does(tmp_path: Path) -> None:
    one, other = DiskStore(tmp_path), DiskStore(tmp_path)
    one.write(key(1), TOY, payload(TOY, 1))
    assert holds(other, key(1))
    other.delete([key(1)])
    assert read_whole(one, key(1), TOY)[0].reason == MISSING
    assert not holds(one, key(1))
    other.write(key(1), TOY, payload(TOY, 2))
    assert read_whole(one, key(1), TOY)[1] == payload(TOY, 2).tobytes()


def test_a_header_remembered_of_a_file_since_replaced(tmp_path: Path) -> None:
    """An inode number is given again: same name, inode and size, other bytes. Read right, not called corrupt."""
    store, other = DiskStore(tmp_path / "store"), DiskStore(tmp_path / "other")
    for where, seed in ((store, 1), (other, 2)):
        where.write(key(1), TOY, payload(TOY, seed))
    assert holds(store, key(1))
    files(tmp_path / "store")[0].write_bytes(files(tmp_path / "other")[0].read_bytes())
    result, data = read_whole(store, key(1), TOY)
    assert result.ok and data == payload(TOY, 2).tobytes()
    assert store.statistics().read_failures == {}


def test_a_read_under_way_outlives_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)
    store.write(key(1), PAGED, payload(PAGED, 1))
    fetch = disk_io.ChunkFile.fetch

    def remove_first(*arguments: Any) -> Any:
        for path in files(tmp_path):
            path.unlink()
        return fetch(*arguments)

    monkeypatch.setattr(disk_io.ChunkFile, "fetch", remove_first)
    result, data = read_whole(store, key(1), PAGED)
    assert result.ok and data == payload(PAGED, 1).tobytes()
    assert read_whole(store, key(1), PAGED)[0].reason == MISSING


def test_several_processes_on_one_folder(tmp_path: Path) -> None:
    """Writers, readers and evictors at once: no wrong byte, never more bytes than the capacity."""
    program = """
        objects, seed = int(sys.argv[2]), int(sys.argv[3])
        store = DiskStore(folder, objects * file_nbytes(key(0), TOY))
        chance, reads = random.Random(seed), 0
        for step in range(150):
            number = chance.randrange(12)
            written = store.write(key(number), TOY, payload(TOY, number))
            assert written.reason in (None, "exists"), written
            result, data = read_whole(store, key(chance.randrange(12)), TOY)
            assert result.ok or result.reason == "missing", result
            number = chance.randrange(12)
            found = store.lookup([key(number)])[0]
            result, data = read_whole(store, key(number), TOY, aligned=True)
            assert not result.ok or data == payload(TOY, number).tobytes()
            assert result.ok or result.reason == "missing", result
            reads += result.ok
            if found:
                store.release([key(number)])
        print(reads)
    """
    processes = [start(program, tmp_path, "6", str(seed)) for seed in range(3)]
    store, used = DiskStore(tmp_path), []
    while any(process.poll() is None for process in processes):
        used.append(store.used_bytes)
        time.sleep(0.002)
    assert all(int(finish(process)) > 0 for process in processes)
    assert max(used) == 6 * file_nbytes(key(0), TOY)
    assert all(store.verify(entry.key).ok for entry in store.entries())


def test_killed_writers_leave_whole_chunks_or_nothing(tmp_path: Path) -> None:
    program = """
        print("ready", flush=True)
        store, number = DiskStore(folder), int(sys.argv[2])
        while True:
            store.write(key(number), PAGED, payload(PAGED, number))
            number += 1
    """
    chance = random.Random(0)
    for attempt in range(6):
        process = start(program, tmp_path, str(1000 * attempt))
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 + chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    store = DiskStore(tmp_path)
    assert [path for path in files(tmp_path) if path.suffix != ".kv"] == [], "leftovers are cleaned"
    entries = list(store.entries())
    assert entries and all(store.verify(entry.key).ok for entry in entries)
    for entry in entries:
        assert read_whole(store, entry.key, PAGED)[1] == payload(PAGED, int(entry.key, 16)).tobytes()


@pytest.mark.parametrize("moment", ["pwrite", "replace", "utime"])
def test_a_write_interrupted_at_any_point_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Killed at that very moment; its half-written file is removed by whoever opens the store next, not before."""
    process = start(
        f"""
        store = DiskStore(folder)
        def stop(*arguments, **named):
            print("stopped", flush=True)
            sys.stdin.read()
        os.{moment} = stop
        store.write(key(1), TOY, payload(TOY, 1))
        """,
        tmp_path,
    )
    assert process.stdout is not None and process.stdout.readline() == "stopped\n"
    monkeypatch.setattr(disk_folder, "_LOCK_SECONDS", 0.1)  # `replace` stops it with the folder's lock in hand
    DiskStore(tmp_path).close()
    assert [path.suffix for path in files(tmp_path)] == [".tmp"], "a live writer's file is not touched"
    process.kill()
    process.communicate()
    store = DiskStore(tmp_path)
    assert files(tmp_path) == []
    assert store.write(key(1), TOY, payload(TOY, 1)).reason is None


def test_reservations_of_dead_writers_do_not_count(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 2 * file_nbytes(key(0), TOY))
    (tmp_path / "ab").mkdir()
    leftover = tmp_path / "ab" / f".{'ab' * 32}.{'0' * 16}.tmp"
    leftover.write_bytes(bytes(file_nbytes(key(0), TOY)))
    for number in range(2):
        store.write(key(number), TOY, payload(TOY, number))
    assert [holds(store, key(number)) for number in range(2)] == [True, True]
    assert not leftover.exists()


def test_capacity_counts_what_others_wrote(tmp_path: Path) -> None:
    free, limited = DiskStore(tmp_path), DiskStore(tmp_path, 3 * file_nbytes(key(0), TOY))
    for number in range(5):
        free.write(key(number), TOY, payload(TOY, number))
    assert limited.used_bytes == 5 * file_nbytes(key(0), TOY)
    free.lookup([key(0)])  # used lately, as every process can see
    limited.write(key(9), TOY, payload(TOY, 9))
    assert [holds(free, key(number)) for number in (0, 1, 2, 3, 4, 9)] == [True, False, False, False, True, True]


@pytest.mark.parametrize("fault", ["pwrite", "replace", "truncate"])
def test_a_disk_that_fails_refuses_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    store = DiskStore(tmp_path)

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fault, full)
        result = store.write(key(1), TOY, payload(TOY, 1))
    assert (result.ok, result.reason, result.nbytes) == (False, ERROR, 0)
    assert files(tmp_path) == []
    assert store.write(key(1), TOY, payload(TOY, 1)).reason is None


def test_writing_gives_up_on_a_process_that_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)
    monkeypatch.setattr(disk_folder, "_LOCK_SECONDS", 0.05)
    with (tmp_path / "cacheflow-store.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert store.write(key(1), TOY, payload(TOY, 1)).reason == TIMEOUT
        assert not holds(store, key(1)), "look-ups do not wait for it"
    assert store.write(key(1), TOY, payload(TOY, 1)).reason is None


def test_synced_writes_are_whole_too(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, fsync=True)
    store.write(key(1), TOY, payload(TOY, 1))
    assert read_whole(store, key(1), TOY)[1] == payload(TOY, 1).tobytes()


@pytest.mark.parametrize("resident", [True, False], ids=["in the page cache", "not in the page cache"])
@pytest.mark.parametrize("direct", [True, False], ids=["O_DIRECT", "no O_DIRECT"])
@pytest.mark.parametrize("layout", [TOY, PAGED], ids=["small", "whole pages"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_every_way_to_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any, aligned: bool, direct: bool, resident: bool
) -> None:
    monkeypatch.setattr(disk_io, "_resident", lambda *arguments: resident)
    monkeypatch.setattr(disk_io, "SLICE_BYTES", 10_000)
    if not direct:
        monkeypatch.setattr(disk_io, "_O_DIRECT", 0)
    store = DiskStore(tmp_path, readers=2)
    store.write(key(1), layout, payload(layout, 1))
    for _ in range(2):
        result, data = read_whole(store, key(1), layout, aligned)
        assert result == ReadResult(True, None, layout.nbytes)
        assert data == payload(layout, 1).tobytes()


def test_direct_reads_that_the_device_refuses_go_the_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems open with O_DIRECT and then refuse to read, some give less than was asked for."""
    store = DiskStore(tmp_path)
    store.write(key(1), PAGED, payload(PAGED, 1))
    monkeypatch.setattr(disk_io, "_resident", lambda *arguments: False)
    preadv = os.preadv
    answers: list[Any] = [OSError(errno.EINVAL, "Invalid argument"), 4096 + 512, 1]

    def odd(fd: int, buffers: list[memoryview], offset: int) -> int:
        if answers:
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return preadv(store_fd(fd), [buffers[0][:answer]], offset)
        return preadv(fd, buffers, offset)

    def store_fd(fd: int) -> int:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)

    monkeypatch.setattr(os, "preadv", odd)
    for _ in range(2):
        result, data = read_whole(store, key(1), PAGED, aligned=True)
        assert result.ok and data == payload(PAGED, 1).tobytes()
    assert answers == []


def test_running_out_of_descriptors_is_not_held_against_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path)
    store.write(key(1), TOY, payload(TOY, 1))

    def none_left(*arguments: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        assert read_whole(store, key(1), TOY)[0] == ReadResult(False, ERROR, 0)
    assert read_whole(store, key(1), TOY)[0].ok


@pytest.mark.parametrize("reads", [1, 200])
def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    store = DiskStore(tmp_path)
    for number in range(reads):
        store.write(key(number), TOY, payload(TOY, number))
    fds = Path("/proc/self/fd")
    before, most = len(list(fds.iterdir())), 0
    fetch = disk_io.ChunkFile.fetch

    def count(*arguments: Any) -> Any:
        nonlocal most
        most = max(most, len(list(fds.iterdir())))
        return fetch(*arguments)

    monkeypatch.setattr(disk_io.ChunkFile, "fetch", count)
    memory = aligned_buffer(reads * TOY.nbytes).reshape(reads, -1)
    assert all(result.ok for result in store.read([Read.whole(key(n), TOY, memory[n]) for n in range(reads)]))
    assert most <= before + 2 * (2 * 16 + 1) + 16, "at most two a job, and this test's own"
    assert len(list(fds.iterdir())) == before


def test_an_exception_waits_for_reads_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may still write into the caller's memory once `read` has returned, in whatever way."""
    store = DiskStore(tmp_path)
    for number in range(2):
        store.write(key(number), TOY, payload(TOY, number))
    fetch, done = disk_io.ChunkFile.fetch, []

    def late(*arguments: Any) -> Any:
        time.sleep(0.1)
        done.append(fetch(*arguments))
        return done[-1]

    monkeypatch.setattr(disk_io.ChunkFile, "fetch", late)

    def interrupted(self: Any, name: str) -> Any:
        if name == key(1):
            raise KeyboardInterrupt
        return opened(self, name)

    opened = type(store._files).open
    monkeypatch.setattr(type(store._files), "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.read([Read.whole(key(number), TOY, bytearray(TOY.nbytes)) for number in range(2)])
    assert len(done) == 1


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(StoreError, match=r"is not a CacheFlow store and holds other files \('thesis.tex'\); name an"):
        DiskStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"cannot be used as a store: .*; name a folder that can be written to"):
            DiskStore(path)


@pytest.mark.parametrize("marker", ['{"format":"cacheflow-store","version":2}', "", "[" * 5000, "\x00"])
def test_another_versions_folder_is_refused(tmp_path: Path, marker: str) -> None:
    (tmp_path / "cacheflow-store.json").write_text(marker)
    with pytest.raises(StoreError, match="is a store of another version"):
        DiskStore(tmp_path)


@pytest.mark.parametrize("capacity", [0, -1])
def test_no_capacity_is_refused(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(StoreError, match="at least one byte"):
        DiskStore(tmp_path, capacity)


AS_NOBODY = """
if os.geteuid() == 0:  # root may read and write everything, so the test would test nothing
    os.chmod(os.path.dirname(folder), 0o755)
    os.chmod(folder, 0o777)
    for parent in list(__import__("pathlib").Path(folder).parents)[1:-2]:
        os.chmod(parent, 0o755)
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
"""


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    DiskStore(folder).close()
    for program in ("", "os.unlink(os.path.join(folder, 'cacheflow-store.json'))\n"):
        output = finish(
            start(
                program
                + textwrap.dedent(AS_NOBODY).replace("0o777", "0o555")
                + "try:\n    DiskStore(folder)\nexcept StoreError as error:\n    print(error)",
                folder,
            )
        )
        assert (
            output == f"{folder} cannot be used as a store: Permission denied; name a folder that can be written to\n"
        )


def test_a_file_that_may_not_be_read_is_tried_once(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    DiskStore(folder).write(key(1), TOY, payload(TOY, 1))
    files(folder)[0].chmod(0)
    program = (
        AS_NOBODY
        + """
store = DiskStore(folder)
print(store.lookup([key(1)]), store.lookup([key(1)]))
print(read_whole(store, key(1), TOY)[0])
print(store.statistics().read_failures)
print([entry.reason for entry in store.entries()], store.verify(key(1)).reason)
if os.getuid() == 0:
    os.seteuid(0)
os.chmod(os.path.join(folder, "00", key(1) + ".kv"), 0o644)
print(store.lookup([key(1)])[0] is not None)
"""
    )
    assert finish(start(program, folder)).splitlines() == [
        "[None] [None]",
        "ReadResult(ok=False, reason='unreadable', nbytes=0)",
        "{'unreadable': 2}",
        "['unreadable'] unreadable",
        "True",
    ]
