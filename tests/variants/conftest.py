"""The backends, as for the kernels' tests; and what a variant's test needs of them."""

from tests.kernels.conftest import interpreted, ops

__all__ = ["interpreted", "ops"]
