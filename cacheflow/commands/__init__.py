"""The commands, one module each: `add_parser(commands)` declares it and sets `run`, which returns the exit status.

Modules import at their top only what is quick to import, for `--help` imports all of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def modules() -> list[ModuleType]:
    """Every command's module, by name; modules whose names begin with an underscore are shared means."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    return [importlib.import_module(f"{__name__}.{name}") for name in names]
