"""The database's time, carried on by the process's own monotonic clock; its wall clock counts for nothing."""

import asyncio
import logging
from datetime import datetime, timedelta
from typing import cast

import pytest

from broker.domain.errors import StoreUnavailable
from broker.ports import Store
from broker.runtime.clock import READ_S, TRIES, DatabaseClock
from tests.conformance.samples import START


class Host:
    """A host's clocks: `wall` is ahead of the truth by `skew_s`, and the monotonic one counts from its boot."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.true_s, self.skew_s = 0.0, skew_s

    def now(self) -> datetime:
        return START + timedelta(seconds=self.true_s + self.skew_s)

    def monotonic(self) -> float:
        return 7000.0 + self.true_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Database:
    """Answers in the middle of a trip that takes `trip_s` of its caller's time."""

    def __init__(self, host: Host) -> None:
        self.host, self.trip_s, self.ahead_s, self.asked, self.down = host, 0.0, 0.0, 0, False

    async def ping(self) -> datetime:
        if self.down:
            raise StoreUnavailable("ping: no answer")
        self.asked += 1
        self.host.true_s += self.trip_s / 2
        read = START + timedelta(seconds=self.host.true_s + self.ahead_s)
        self.host.true_s += self.trip_s / 2
        return read


def clock_of(host: Host) -> tuple[DatabaseClock, Database]:
    database = Database(host)
    return DatabaseClock(cast(Store, database), host), database


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.mark.parametrize("skew_s", [0.0, 3600.0, -86_400.0])
async def test_the_wall_clock_of_a_host_moves_nothing(skew_s: float) -> None:
    clock, database = clock_of(Host(skew_s))
    database.trip_s = 0.5
    await clock.start()
    assert clock.now() == at(0.5)
    database.host.true_s += 100
    database.host.skew_s += 50  # an operator sets the clock while the daemon runs
    assert clock.now() == at(100.5)
    await clock.step()
    assert clock.now() == at(101)
    assert clock.skew_s == pytest.approx(skew_s + 50)


async def test_an_outage_of_the_database_does_not_stop_the_time() -> None:
    clock, database = clock_of(Host())
    await clock.start()
    database.down = True
    database.host.true_s += 40 * READ_S
    with pytest.raises(StoreUnavailable):
        await clock.step()
    assert clock.now() == at(40 * READ_S)


async def test_an_answer_that_took_long_is_not_believed() -> None:
    """A slow answer is ignored: its time is from before the delay. A process that was paused gets such an answer."""
    clock, database = clock_of(Host())
    await clock.start()
    database.trip_s = 400
    await clock.step()
    assert clock.now() == at(400)
    database.ahead_s = 9  # as after a failover to another server: the next quick answer counts
    database.trip_s = 0
    await clock.step()
    assert clock.now() == at(409)


async def test_without_a_quick_answer_it_does_not_start() -> None:
    clock, database = clock_of(Host())
    database.trip_s = 30
    with pytest.raises(StoreUnavailable, match="more than 1 s to report its time"):
        await clock.start()
    assert database.asked == TRIES


async def test_a_wrong_clock_is_told_of_once_and_when_it_is_right_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "broker.runtime.clock")
    clock, database = clock_of(Host(4.0))
    await clock.start()
    for skew_s in (3601.0, 3601.0, -2.0):
        database.host.skew_s = skew_s
        await clock.step()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "this host's clock is 3601 s ahead of the database's" in caplog.text
