"""Outcome of a test that this host cannot run."""

import os
from typing import NoReturn

import pytest

REQUIRED = "GPUBROKER_CLOUDS_REQUIRED"
"""Environment variable that the provider gate sets: such a test then fails instead of being skipped."""


def cannot(why: Exception) -> NoReturn:
    """Skip the test, or fail it where the requirement is mandatory. `why`: what this host lacks, such as namespaces."""
    if os.environ.get(REQUIRED):
        raise AssertionError(f"{REQUIRED} is set, and this host cannot run the test: {why}") from why
    pytest.skip(str(why))
