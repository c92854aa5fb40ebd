"""What a benchmark's numbers belong to: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def about(*packages: str) -> dict[str, str]:
    """CPU, system, versions of Python and of the packages named, and the commit of the checkout, "+" if it was changed
    since."""
    models = (
        line.split(":")[1].strip() for line in text("/proc/cpuinfo").splitlines() if line.startswith("model name")
    )
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    return {
        "cpu": f"{os.cpu_count()} x {next(models, platform.processor())}",
        "system": platform.platform(),
        "versions": ", ".join(versions),
        "commit": commit(),
    }


def commit() -> str:
    """The checkout's commit."""
    head, changed = (_git(*words) for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "-uno")))
    return (head + "+" * bool(changed)) or "not a commit"


def text(path: str) -> str:
    """A file's text, or nothing where there is no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
