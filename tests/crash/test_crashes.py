"""Sample of `python -m tests.crash`: kills of real processes lose or double no job and leave no machine or debt."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg
import psutil
import pytest

from broker.domain.ids import Installation, InstanceName
from tests.crash.daemon_rig import DaemonRig, overlapping
from tests.crash.gate import Gate, Moment, Point
from tests.crash.loopback_cloud import Listed, LoopbackCloud, SoldMachine
from tests.crash.proxy import PostgresProxy
from tests.crash.scenes import (
    Totals,
    commit,
    cut_at_random,
    enumerate_points,
    fought,
    kill_at,
    killed_at_random,
    postgres_killed,
    sampled,
)
from tests.crash.services import SharedServices, nursery_of, open_services
from tests.crash.waits import Within

TESTS = 10
"""Number of points in the sample, each with its own test."""


@pytest.fixture(scope="module")
async def services() -> AsyncIterator[SharedServices]:
    async with open_services(seed=int(commit(), 16), preempts=0.1) as services:
        yield services


@pytest.fixture(scope="module")
async def points(services: SharedServices) -> list[Point]:
    found = await enumerate_points(services)
    return sampled(found, commit(), len(found) // TESTS)


def whole(totals: Totals) -> bool:
    assert totals.broken == []
    return totals.jobs > 0


@pytest.mark.parametrize("number", range(TESTS))
async def test_a_daemon_killed_at_an_effect_or_commit(
    services: SharedServices, points: list[Point], number: int
) -> None:
    totals = Totals()
    await kill_at(services, points[number], totals)
    assert whole(totals), points[number]


@pytest.mark.parametrize("seed", range(6))
async def test_a_daemon_killed_at_any_time(services: SharedServices, seed: int) -> None:
    totals = Totals()
    await killed_at_random(services, 5, seed, totals)
    assert whole(totals)


@pytest.mark.parametrize("seed", range(5))
async def test_a_broker_frozen_past_its_leases_while_another_continues(services: SharedServices, seed: int) -> None:
    totals = Totals()
    await fought(services, 2, seed, totals)
    assert whole(totals)


async def test_broken_database_connections_lose_nothing(services: SharedServices) -> None:
    totals = Totals()
    await cut_at_random(services, 5, 0, totals)
    assert whole(totals)


async def test_a_killed_postgres_loses_nothing(services: SharedServices) -> None:
    totals = Totals()
    await postgres_killed(services, 5, 0, totals)
    assert whole(totals)


# ---------------------------------------------------------------------------------------------------- the instruments


@pytest.mark.parametrize(("moment", "rows"), [("before", 0), ("after", 1)])
async def test_a_commit_is_interrupted_at_the_given_point(services: SharedServices, moment: Moment, rows: int) -> None:
    """`before`: the server has not received the commit. `after`: the commit is done, but the client got no answer."""
    name = f"proxied_{moment}"
    ended: list[str] = []
    gate = Gate(end=lambda: ended.append(name), kill_at=Point(name="commit:insert into t", number=1, moment=moment))
    proxy = PostgresProxy(gate, services.socket)
    await services.administer(f"CREATE DATABASE {name} OWNER gpubroker")
    async with AsyncExitStack() as stack:
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        direct = await asyncpg.connect(services.dsn(name))
        stack.push_async_callback(direct.close)
        await direct.execute("CREATE TABLE t (x int)")
        client = await asyncpg.connect(f"postgresql://gpubroker@127.0.0.1:{proxy.port}/{name}?sslmode=disable")
        stack.callback(client.terminate)
        with pytest.raises((asyncpg.PostgresConnectionError, OSError)):
            async with client.transaction():
                await client.execute("INSERT INTO t VALUES ($1)", 1)
        assert ended == [name]
        assert len(await direct.fetch("SELECT x FROM t")) == rows


async def test_the_points_of_a_life_are_its_effects_and_commits(services: SharedServices) -> None:
    names = {str(point) for point in await enumerate_points(services)}
    for what in ("commit:apply(launching)#1", "cloud:create#1", "cloud:destroy#1", "blob:put spec.json#1"):
        assert {f"before {what}", f"after {what}"} <= names


async def test_interrupted_start_leaves_no_process_and_frees_its_number() -> None:
    """A cancelled fork leaves neither a process nor an unread PID to the next order."""
    async with nursery_of("tests.crash.forks") as nursery:
        first = asyncio.create_task(nursery.fork(seconds=600))
        await asyncio.sleep(0)  # it has asked
        first.cancel()
        second = await nursery.fork(seconds=600)
        left = [child for child in psutil.Process(nursery.process.pid).children() if child.pid != second]
        await asyncio.to_thread(psutil.wait_procs, left, 600)
        assert [child.pid for child in psutil.Process(nursery.process.pid).children()] == [second]


async def test_a_timeout_names_the_pending_step() -> None:
    with pytest.raises(TimeoutError, match="not within 0 s: the end\nsomebody sits here"):
        async with Within(0, "the end", lambda: "somebody sits here"):
            await asyncio.Event().wait()


async def test_overlapping_machines_of_one_job_are_reported(services: SharedServices) -> None:
    """Simultaneous machines of one job are reported, successive ones are not."""
    first = SoldMachine(id="a", name=None, attempt="one", born=0.0, destroyed=2.0)  # type: ignore[arg-type]
    second = SoldMachine(id="b", name=None, attempt="two", born=1.5)  # type: ignore[arg-type]
    assert overlapping([first, second], {"one": "job", "two": "job"}) == ["a and b of job job"]
    assert overlapping([first, second], {"one": "job", "two": "other"}) == []


async def test_a_machine_without_an_owner_is_reported(services: SharedServices) -> None:
    async with DaemonRig(services) as rig:
        name = f"gb-{rig.installation}-aaaaaaaaaaaaa"
        services.cloud.sold[name] = SoldMachine(id=name, name=name, attempt="none", born=0.0)  # type: ignore[arg-type]
        verdict = await rig.audited()
        services.cloud.sold.pop(name)
    assert [verdict.orphans, len(verdict.underbilled)] == [[f"{name} is of no attempt"], 1]


async def test_charges_beyond_the_proof_of_absence_are_reported(services: SharedServices) -> None:
    """The ledger gets an additional charge of a quarter."""
    async with DaemonRig(services) as rig:
        rig.daemon.start()
        await rig.submit()
        verdict = await rig.settle()
        await rig.ask(
            "INSERT INTO ledger (job_id, attempt_id, kind, usd, note) SELECT job_id, attempt_id, 'charge', "
            "sum(usd) / 4, '' FROM ledger WHERE kind = 'charge' GROUP BY 1, 2"
        )
        raised = await rig.audited()
    assert verdict.broken == []
    assert len(raised.overbilled) == len(raised.broken) >= 1


def test_a_machine_is_due_until_one_process_could_know_that_it_is_gone() -> None:
    """Listings that still show the machine do not count, nor do two listings of different processes."""
    installation, name = Installation("aaaaaaaa"), InstanceName("gb-aaaaaaaa-bbbbbbbbbbbbb")
    cloud = LoopbackCloud({}, "")
    cloud.sold["a"] = SoldMachine(id="a", name=name, attempt="one", born=0.0, destroyed=2.0)
    listings = [(1.0, "x", ""), (2.1, "x", ""), (2.2, "x", "a"), (2.3, "x", ""), (2.4, "y", ""), (2.5, "x", "")]
    cloud.listings[installation] = [
        Listed(at=at, caller=caller, running=frozenset(running)) for at, caller, running in listings
    ]
    assert cloud.proven_absent_at(installation, "one") == 2.5
    cloud.listings[installation].pop()
    assert cloud.proven_absent_at(installation, "one") is None
