"""The emulated clouds for tests that need no machine."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.clouds.emulator import Clouds

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Time:
    """The clouds' own clock; it advances only by `pass_by`."""

    def __init__(self) -> None:
        self.now = START

    def pass_by(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def clouds(time: Time) -> AsyncIterator[Clouds]:
    """Yield all three clouds, without machines; the test fails if a call differs from the real APIs."""
    async with Clouds(now=lambda: time.now) as clouds:
        yield clouds
        assert clouds.violations == []
