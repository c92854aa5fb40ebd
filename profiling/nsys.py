"""Any cacheflow command under Nsight Systems, recorded while it restores, and what that says of overlap.

    python profiling/nsys.py --dry-run compare --batch 2
    python profiling/nsys.py restore --document README.md --question "What is this?" --store /tmp/kv --trace run.json
    python profiling/nsys.py --whole --output out/nsys/all compare --rounds 1

Recording is on while a range `restore` of the NVTX domain cacheflow is open, and each time gives a report of its own;
restorations that follow each other too fast for nsys share one. --whole records all of the command, warm-up included,
and is the way out where nsys finds no range. Options for this program come before the command.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import overlap

from cacheflow.commands import _common as common
from kernels.ranges import DOMAIN

CAPTURE = [
    "--capture-range=nvtx",
    f"--nvtx-capture={overlap.RESTORE}@{DOMAIN}",
    "--capture-range-end=repeat",
    # nsys compares with registered strings only, unless told otherwise; the nvtx package registers its own.
    "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
]


def profile_command(words: Sequence[str], output: Path, whole: bool = False) -> list[str]:
    """The command line that records `cacheflow WORDS`."""
    return [
        "nsys",
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        *([] if whole else CAPTURE),
        "--force-overwrite=true",
        f"--output={output}",
        sys.executable,
        "-m",
        "cacheflow",
        *words,
    ]


def export_command(report: Path) -> list[str]:
    """The command line that turns a report into SQLite."""
    target = report.with_suffix(".sqlite")
    return ["nsys", "export", "--type=sqlite", "--force-overwrite=true", f"--output={target}", str(report)]


def reports(output: Path) -> list[Path]:
    """OUTPUT.nsys-rep, or OUTPUT.1.nsys-rep and so on, in order."""
    name = re.compile(rf"{re.escape(output.name)}(?:\.(\d+))?\.nsys-rep")
    found = [(int(match[1] or 0), path) for path in output.parent.iterdir() if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def trace_of(words: Sequence[str]) -> Path | None:
    """The file that the command writes its timeline to, if it was asked to."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--trace":
            return Path(following)
        if word.startswith("--trace="):
            return Path(word.removeprefix("--trace="))
    return None


def run(words: Sequence[str], output: Path, whole: bool) -> list[overlap.Shares]:
    """Record, export and analyse. Raises ValueError where nsys is missing, fails or records nothing."""
    if shutil.which("nsys") is None:
        raise ValueError("nsys is not on the PATH; install Nsight Systems, or see its command line with --dry-run")
    output.parent.mkdir(parents=True, exist_ok=True)
    for stale in reports(output):
        stale.unlink()
    status = subprocess.run(profile_command(words, output, whole), check=False).returncode
    if status:
        raise ValueError(f"nsys, or the command under it, ended with status {status}")
    recorded = reports(output)
    if not recorded:
        raise ValueError(f"nsys met no range {overlap.RESTORE}@{DOMAIN} and recorded nothing; try --whole")
    for one in recorded:
        subprocess.run(export_command(one), check=True, stdout=subprocess.DEVNULL)
    return overlap.report([one.with_suffix(".sqlite") for one in recorded], trace_of(words))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for what the user can mend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/nsys/run"), help="without suffix; default %(default)s")
    parser.add_argument("--whole", action="store_true", help="record the whole command")
    parser.add_argument("--dry-run", action="store_true", help="print nsys' command lines")
    parser.add_argument("--json", action="store_true", help="print the overlap as JSON, behind what the command prints")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="of cacheflow, with its options")
    args = parser.parse_args(argv)
    if not args.words:
        parser.error("name a cacheflow command, restore or compare for example")
    if args.dry_run:
        print(shlex.join(profile_command(args.words, args.output, args.whole)))
        print(shlex.join(export_command(args.output.with_name(f"{args.output.name}.nsys-rep"))))
        return 0
    try:
        found = run(args.words, args.output, args.whole)
    except ValueError as error:
        print(f"nsys.py: {error}", file=sys.stderr)
        return overlap.USER_ERROR
    if args.json:
        common.print_json([asdict(one) for one in found])
    else:
        overlap.show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
