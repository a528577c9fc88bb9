"""The emulated clouds for tests that need no machine."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.clouds.emulator import Clouds

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Time:
    """The clouds' own clock: stands still until it is told."""

    def __init__(self) -> None:
        self.now = START

    def pass_by(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def clouds(time: Time) -> AsyncIterator[Clouds]:
    """All three, without machines; the test fails when somebody calls what the real APIs do not have."""
    async with Clouds(now=lambda: time.now) as clouds:
        yield clouds
        assert clouds.violations == []
