"""Checkpoints of the supported families, made once per session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.models.checkpoints import Checkpoint, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Gives the checkpoint of a family with a rope: `checkpoint(family, rope="default")`."""
    made: dict[tuple[str, str], Checkpoint] = {}

    def give(family: str, rope: str = "default") -> Checkpoint:
        if (family, rope) not in made:
            made[family, rope] = make_checkpoint(family, rope, tmp_path_factory.mktemp(f"{family}-{rope}"))
        return made[family, rope]

    return give
