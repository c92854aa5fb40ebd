"""The programs of profiling/ are no package: their folder comes before others, as when one of them is run."""

import sys
from pathlib import Path

from tests.kernels.conftest import interpreted

__all__ = ["interpreted"]

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))
