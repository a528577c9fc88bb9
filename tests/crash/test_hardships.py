"""Sample of interruptions other than kills at a passage: no job is lost or doubled, no machine left over or unpaid."""

from collections.abc import AsyncIterator

import pytest

from tests.crash.gate import Moment, Point
from tests.crash.hardships import (
    born_late,
    ended_at,
    filled,
    frozen_at,
    home_effects,
    killed_at_file,
    killed_in_migration,
    migrations,
)
from tests.crash.scenes import Totals, commit
from tests.crash.services import SharedServices, open_services


@pytest.fixture(scope="module")
async def services() -> AsyncIterator[SharedServices]:
    async with open_services(seed=int(commit(), 16)) as services:
        yield services


async def test_a_daemon_killed_while_its_home_is_made(services: SharedServices) -> None:
    """Kill the daemon before the master key has its name; `python -m tests.crash --ci` covers the other effects."""
    effects, totals = await home_effects(services), Totals()
    (link,) = (number for number, effect in enumerate(effects) if effect == "os.link master.key")
    await killed_at_file(services, link, totals)
    assert (totals.broken, totals.jobs) == ([], 1)
    for effect in ("os.rename installation", "os.rename client.json"):
        assert effect in effects


async def test_daemon_killed_between_migrations_still_knows_a_new_database(services: SharedServices) -> None:
    totals, points = Totals(), await migrations(services)
    await killed_in_migration(services, points[1], totals)
    assert points[1] == Point(name="commit:insert into schema_migrations", number=1, moment="after")
    assert (totals.broken, totals.kills) == ([], 1)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_daemon_asked_to_end_in_the_middle_of_a_create(services: SharedServices, moment: Moment) -> None:
    totals = Totals()
    await ended_at(services, Point(name="cloud:create", number=1, moment=moment), totals)
    assert (totals.broken, totals.kills) == ([], 1)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_broker_frozen_in_the_middle_of_a_create(services: SharedServices, moment: Moment) -> None:
    """The create, or its answer, arrives when another broker leases the row."""
    totals = Totals()
    await frozen_at(services, Point(name="cloud:create", number=1, moment=moment), totals)
    assert (totals.broken, totals.kills) == ([], 1)


async def test_a_home_on_a_full_disk(services: SharedServices) -> None:
    totals = Totals()
    await filled(services, 2, 0, totals)
    assert (totals.broken, totals.kills) == ([], 1)


async def test_machine_arriving_after_its_attempts_end_is_destroyed_and_paid(services: SharedServices) -> None:
    """The daemon is killed again as soon as the cloud has destroyed the late machine."""
    totals = Totals()
    await born_late(services, "after", totals)
    assert (totals.broken, totals.kills) == ([], 2)
