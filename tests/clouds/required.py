"""What becomes of a test where this host cannot run machines."""

import os
from typing import NoReturn

import pytest

REQUIRED = "GPUBROKER_CLOUDS_REQUIRED"
"""Set, as the gate does: such a host fails the test."""


def cannot(why: Exception) -> NoReturn:
    """Skips with the reason, or fails with it."""
    if os.environ.get(REQUIRED):
        raise AssertionError(f"{REQUIRED} is set, and this host cannot run machines: {why}") from why
    pytest.skip(str(why))
