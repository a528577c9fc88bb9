"""The database's time, carried on by the process's own monotonic clock; its wall clock counts for nothing."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from broker.billing.trusted_time import ClockAnchor
from broker.domain.errors import StoreUnavailable
from broker.domain.notifications import Notice
from broker.ports import Store
from broker.runtime.boot_clock import AnchorFile, boot_seconds
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
    """Database that answers in the middle of a round trip of `trip_s` seconds."""

    def __init__(self, host: Host) -> None:
        self.host, self.trip_s, self.ahead_s, self.asked, self.down = host, 0.0, 0.0, 0, False
        self.notices: list[Notice] = []
        self.repaired = 0

    def use_time(self, now: Callable[[], datetime]) -> None:
        self.books_now = now

    async def post(self, notice: Notice) -> bool:
        if self.down:
            raise StoreUnavailable("post: no answer")
        self.notices.append(notice)
        return True

    async def repair_due_times(self) -> None:
        self.repaired += 1

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


async def test_the_clock_does_not_start_without_a_quick_answer() -> None:
    clock, database = clock_of(Host())
    database.trip_s = 30
    with pytest.raises(StoreUnavailable, match="more than 1 s to report its time"):
        await clock.start()
    assert database.asked == TRIES


async def test_a_wrong_clock_is_reported_once_and_when_it_is_right_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "broker.runtime.clock")
    clock, database = clock_of(Host(4.0))
    await clock.start()
    for skew_s in (3601.0, 3601.0, -2.0):
        database.host.skew_s = skew_s
        await clock.step()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "this host's clock is 3601 s ahead of the database's" in caplog.text


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 86_400.0, -86_400.0])
async def test_a_step_of_the_database_moves_no_time(step_s: float) -> None:
    """One notice is posted, rows with wrong times become due, and the time continues when the clock is right again."""
    clock, database = clock_of(Host())
    await clock.start()
    database.ahead_s = step_s
    for _ in range(3):
        database.host.true_s += 20
        assert not await clock.is_right()
    assert clock.now() == at(60)
    assert clock.step_s == pytest.approx(step_s)
    assert [notice.kind for notice in database.notices] == ["clock.stepped"]
    assert database.repaired == 1
    database.ahead_s = 0
    for _ in range(2):
        database.host.true_s += 20
        assert await clock.is_right()
    assert clock.now() == at(100)
    assert clock.step_s == 0
    assert [notice.kind for notice in database.notices] == ["clock.stepped", "clock.restored"]
    assert database.repaired == 2


async def test_a_notice_that_could_not_be_posted_comes_later() -> None:
    clock, database = clock_of(Host())
    await clock.start()
    database.ahead_s = 3600

    async def fails(notice: Notice) -> bool:
        raise StoreUnavailable("post: no answer")

    posts, database.post = database.post, fails  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        await clock.step()
    database.post = posts  # type: ignore[method-assign]
    await clock.step()
    assert [notice.kind for notice in database.notices] == ["clock.stepped"]


async def test_a_suspended_host_is_no_step() -> None:
    """The monotonic clock stops while the host sleeps. Machines bill on, and the counted time includes the sleep."""
    host, asleep_s = Host(), 0.0
    database = Database(host)
    clock = DatabaseClock(cast(Store, database), host, counted=lambda: host.monotonic() + asleep_s)
    await clock.start()
    asleep_s = database.ahead_s = 7200.0
    assert clock.now() == at(7200)
    await clock.step()
    assert (clock.step_s, database.notices) == (0, [])
    assert boot_seconds() <= boot_seconds()


async def test_a_restart_during_a_step_believes_nothing_new(tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("first\n")
    host, file = Host(), AnchorFile(path=tmp_path / "clock.json", boot_id=boot)
    database = Database(host)
    await DatabaseClock(cast(Store, database), host, anchors=file).start()
    host.true_s, database.ahead_s = 100, 86_400
    restarted = DatabaseClock(cast(Store, database), host, anchors=file)
    await restarted.start()
    assert restarted.now() == at(100)
    assert restarted.step_s == pytest.approx(86_400)
    boot.write_text("second\n")  # what a host counts begins again with each boot
    booted = DatabaseClock(cast(Store, database), host, anchors=file)
    await booted.start()
    assert (booted.now(), booted.step_s) == (at(86_500), 0)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"boot": "b"}', '{"boot": "b", "wall": "2026-01-01T00:00", "counted_s": 1}']
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "boot_id").write_text("b")
    file = AnchorFile(path=tmp_path / "clock.json", boot_id=tmp_path / "boot_id")
    file.path.write_text(content)
    assert file.read() is None


def test_a_host_without_a_boot_id_keeps_no_file(tmp_path: Path) -> None:
    file = AnchorFile(path=tmp_path / "clock.json", boot_id=tmp_path / "absent")
    file.write(ClockAnchor(wall=START, counted_s=1.0))
    assert not file.path.exists()


def test_a_full_disk_stops_no_clock(tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text("b")
    (tmp_path / "file").write_text("")
    AnchorFile(path=tmp_path / "file" / "x", boot_id=tmp_path / "boot_id").write(ClockAnchor(wall=START, counted_s=1.0))
