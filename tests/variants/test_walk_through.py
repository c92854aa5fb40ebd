"""CONTRIBUTING's "Adding an attention variant", followed to the letter."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.interpreter import VARIABLE

ROOT = Path(__file__).parents[2]
USED = ("kernels", "tests/kernels", "tests/variants")


def section() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text.split("\n## Adding an attention variant\n")[1].split("\n## ")[0]


def test_the_walk_through(tmp_path):
    for folder in USED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ("pyproject.toml", *(f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py"))):
        shutil.copy(ROOT / path, tmp_path / path)

    *files, (_, commands) = re.findall(r"(?:`([\w/]+\.py)`:\n\n)?```\w*\n(.*?)```", section(), re.S)
    assert [Path(name).parent.as_posix() for name, _ in files] == ["kernels/variants", "tests/variants"]
    for name, text in files:
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(text)

    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    shown = []
    for command in commands.splitlines():
        program, *arguments = shlex.split(command)
        python = [sys.executable] if program == "python" else [sys.executable, "-m", program]
        done = subprocess.run(
            [*python, *arguments],
            cwd=tmp_path,
            env=environment | dict(PYTHONPATH=str(tmp_path)),
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        shown.append(done.stdout)
    assert len(shown) == 2 and " 10 passed" in shown[0]
    assert all(f"chunked_attention, {form}" in shown[1] for form in ("tile", "split"))
