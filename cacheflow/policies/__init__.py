"""Policies: who fills which cell, from where, in which order. One file per policy, found by name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from cacheflow.policies.base import Policy


def available() -> dict[str, type[Policy]]:
    """Every policy of this package by name: one class with a `name` per module, discovered."""
    found = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, Policy) and "name" in vars(cls) and cls.name:
                found[cls.name] = cls
    return dict(sorted(found.items(), key=lambda item: item[1].rank))


def find(name: str) -> type[Policy]:
    """The policy class called `name`, or the class of "module:Class".

    Raises ValueError, with what would work, for a name that leads nowhere.
    """
    module_name, colon, class_name = name.partition(":")
    if colon:
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"policy {name!r} cannot be imported: {error}") from error
        if not (inspect.isclass(cls) and issubclass(cls, Policy)):
            raise ValueError(f"policy {name!r} is not a subclass of cacheflow.policies.Policy")
        return cls
    policies = available()
    if name not in policies:
        raise ValueError(f"policy {name!r} is unknown; choose one of {', '.join(policies)} or give module:Class")
    return policies[name]


__all__ = ["Policy", "available", "find"]
