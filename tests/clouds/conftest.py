"""The emulated clouds for tests that need no machine."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from providers.skypilot.plugin.call_turns import CallTurns
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
def untimed_vast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SkyPilot's client of Vast call at once, and write no time slots into the home."""
    monkeypatch.setattr(CallTurns, "wait", lambda turns: None)
    monkeypatch.setattr(CallTurns, "postpone", lambda turns, seconds: None)


@pytest.fixture
async def clouds(time: Time) -> AsyncIterator[Clouds]:
    """Yield all three clouds, without machines; the test fails if a call differs from the real APIs."""
    async with Clouds(now=lambda: time.now) as clouds:
        yield clouds
        assert clouds.violations == []
