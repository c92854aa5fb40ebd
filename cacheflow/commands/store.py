"""cacheflow store: what a store holds, whether it is intact, and removing from it."""

from __future__ import annotations

import argparse
import os
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheflow.commands import _common as common

if TYPE_CHECKING:
    from cacheflow.stores import Entry, Store

KEY_SHOWN = 12  # hex digits of a key in tables: enough to tell a million apart

EXAMPLES = """\
examples:
  cacheflow store ls /var/kv
  cacheflow store verify /var/kv                    reads every byte; exit status 1 if anything is damaged
  cacheflow store rm /var/kv 3f9a1c 77b0            by key, or the first digits of it
  cacheflow store rm /var/kv --damaged              what verify finds
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "store",
        help="list, check and remove what a store holds",
        description="List, check and remove the chunks of KV that a store holds.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, text in (
        ("ls", ls, "list the chunks, the latest used first"),
        ("verify", verify, "check every byte; exit status 1 if a chunk is damaged"),
        ("rm", rm, "remove chunks"),
    ):
        action = actions.add_parser(
            name, help=text, description=f"{text}.".capitalize(), formatter_class=RawDescriptionHelpFormatter
        )
        action.set_defaults(run=run)
        action.add_argument("store", metavar="STORE", help="a folder, or disk:FOLDER; e.g. /var/kv")
        if name != "ls":
            action.add_argument(
                "keys", metavar="KEY", nargs="*", help="a chunk's key, or its first digits, e.g. 3f9a1c"
            )
        if name == "rm":
            action.add_argument("--damaged", action="store_true", help="those that verify finds damaged")
            action.add_argument("--all", action="store_true", help="every chunk")
        action.add_argument("--json", action="store_true", help="print JSON, sizes in bytes, and nothing else")


def ls(args: argparse.Namespace) -> int:
    with closing(_open(args.store)) as store:
        entries = sorted(store.entries(), key=lambda entry: -entry.last_use)
    total = sum(entry.nbytes for entry in entries)
    if args.json:
        common.print_json({"store": args.store, "nbytes": total, "entries": [_entry(entry) for entry in entries]})
        return 0
    if entries:
        headers = ["key", "tokens", "layers", "heads", "parts", "size", "last use", "state"]
        print(common.table(map(_row, entries), headers, right=(1, 5)), end="\n\n")
    print(f"{_chunks(len(entries))}, {_size(total)}")
    return 0


def verify(args: argparse.Namespace) -> int:
    with closing(_open(args.store)) as store:
        keys = _keys(store, args.keys) if args.keys else [entry.key for entry in store.entries()]
        bad = _damaged(store, keys)
    if args.json:
        damaged = [{"key": key, "reason": reason} for key, reason in bad.items()]
        common.print_json({"store": args.store, "checked": len(keys), "damaged": damaged})
    else:
        for key, reason in bad.items():
            print(f"{key}  {reason}")
        print(f"{_chunks(len(keys))} checked, {len(bad)} damaged")
    return 1 if bad else 0


def rm(args: argparse.Namespace) -> int:
    if bool(args.keys) + args.damaged + args.all != 1:
        raise ValueError("rm needs to know what to remove; give keys, or --damaged, or --all")
    with closing(_open(args.store)) as store:
        entries = {entry.key: entry.nbytes for entry in store.entries()}
        chosen = _keys(store, args.keys) if args.keys else list(entries)
        if args.damaged:
            chosen = list(_damaged(store, chosen))
        removed = store.delete(chosen)
    freed = sum(entries.get(key, 0) for key in chosen)
    if args.json:
        common.print_json({"store": args.store, "removed": removed, "nbytes": freed, "keys": chosen})
    else:
        print(f"removed {_chunks(removed)}, {_size(freed)}")
    return 0


def _open(name: str) -> Store:
    from cacheflow.stores import open_store

    if name.startswith("memory:"):
        raise ValueError(f"{name!r} lives in the process that opened it and is empty here; name a folder")
    folder = name.removeprefix("disk:")
    if not os.path.isdir(folder):  # opening would make one
        raise ValueError(f"there is no folder {folder!r}; name the folder that chunks were saved to")
    if not any(Path(folder).glob("cacheflow-store.*")):
        raise ValueError(f"folder {folder!r} holds no store; name the folder that chunks were saved to")
    return open_store(name)


def _keys(store: Store, given: Sequence[str]) -> list[str]:
    known = [entry.key for entry in store.entries()]
    chosen = []
    for start in given:
        matches = [key for key in known if key.startswith(start.lower())]
        if len(matches) != 1:
            found = "no chunk" if not matches else f"{len(matches)} chunks"
            raise ValueError(f"{found} with a key that begins with {start!r}; see cacheflow store ls for the keys")
        chosen += matches
    return list(dict.fromkeys(chosen))


def _damaged(store: Store, keys: Sequence[str]) -> dict[str, str]:
    results = {key: store.verify(key) for key in common.progress(keys, "verifying", unit="chunk")}
    return {key: result.reason or "damaged" for key, result in results.items() if not result.ok}


def _entry(entry: Entry) -> dict[str, Any]:
    layout = entry.layout
    about: dict[str, Any] = {
        "key": entry.key,
        "nbytes": entry.nbytes,
        "last_use": entry.last_use,
        "reason": entry.reason,
    }
    if layout is not None:
        about["tokens"] = layout.tokens
        about["layers"] = [layout.all_layers.start, layout.all_layers.stop]
        about["kv_heads"] = [layout.all_kv_heads.start, layout.all_kv_heads.stop]
        about["parts"] = [{"name": part.name, "dtype": part.dtype, "width": part.width} for part in layout.parts]
    return about


def _row(entry: Entry) -> list[str]:
    used = datetime.fromtimestamp(entry.last_use).strftime("%Y-%m-%d %H:%M:%S")
    layout = entry.layout
    if layout is None:
        return [entry.key[:KEY_SHOWN], "", "", "", "", _size(entry.nbytes), used, entry.reason or "damaged"]
    parts = " ".join(f"{part.name}:{part.dtype}x{part.width}" for part in layout.parts)
    spans = [_span(layout.all_layers), _span(layout.all_kv_heads)]
    return [entry.key[:KEY_SHOWN], str(layout.tokens), *spans, parts, _size(entry.nbytes), used, "ok"]


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _chunks(count: int) -> str:
    return f"{count} chunk{'' if count == 1 else 's'}"


def _size(nbytes: float) -> str:
    units: Iterable[str] = ("B", "KiB", "MiB", "GiB")
    for unit in units:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
