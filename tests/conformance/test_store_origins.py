"""Races between a start from another job's checkpoints and their deletion: exactly one of the two succeeds."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from broker.domain.errors import InUse, OriginDeleted
from broker.domain.job import Job, JobState, StoredKind
from broker.domain.tenancy import DEFAULT_TEAM, Tenant
from broker.ports import Store
from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import START, make_event, make_job, submitted
from tests.conformance.test_store_policies_postgres import blocked

ANN = Tenant(team=DEFAULT_TEAM, owner="ann")


async def rested(store: Store, state: JobState = JobState.FAILED) -> Job:
    return await submitted(store, state=state, finished_at=START)


def heir_of(origin: Job, **changes: Any) -> Job:
    job = make_job(**changes)
    return replace(job, spec=job.spec.model_copy(update={"init_from": f"job/{origin.id}"}))


async def test_a_checkpoint_is_either_deleted_or_used_as_an_origin(store: Store) -> None:
    cases: list[tuple[JobState, StoredKind, StoredKind]] = [
        (JobState.SUCCEEDED, "artifacts", "checkpoints"),
        (JobState.FAILED, "checkpoints", "artifacts"),
    ]
    for state, kind, other in cases:
        origin, mine = await rested(store, state), store.as_tenant(ANN)
        event = make_event(origin, "job.data_deleted")
        await mine.delete_data(origin.id, ["logs", "data", other], event)
        heir = heir_of(origin)
        await mine.submit(heir, key=heir.id, body_sha256="b", events=[make_event(heir)])
        with pytest.raises(InUse, match=heir.id):
            await mine.delete_data(origin.id, [kind], event)
        assert (await store.unfinished_dependent(origin.id), await store.unfinished_dependent(heir.id)) == (
            heir.id,
            None,
        )
        gone = await rested(store, state)
        await mine.delete_data(gone.id, [kind], make_event(gone))
        late, other_job = heir_of(gone), make_job()
        done = await asyncio.gather(
            mine.submit(late, key=None, body_sha256="b", events=[make_event(late)]),
            mine.submit(other_job, key=None, body_sha256="b", events=[make_event(other_job)]),
            mine.submit(heir, key=heir.id, body_sha256="b", events=[]),
            return_exceptions=True,
        )
        assert isinstance(done[0], OriginDeleted)
        assert f"job {gone.id} had its checkpoints deleted on 20" in str(done[0])
        assert await store.job(late.id) is None
        assert [made for made in done[1:] if isinstance(made, BaseException)] == [], "those next to it are made"


async def test_a_checkpoint_that_another_teams_job_starts_from_is_not_deleted(store: Store) -> None:
    await store.put_team("others", "")
    origin = await rested(store)
    heir = heir_of(origin, team="others")
    await store.submit(heir, key=None, body_sha256="b", events=[make_event(heir)])
    with pytest.raises(InUse, match="an operator's job starts from") as refused:
        await store.as_tenant(ANN).delete_data(origin.id, ["checkpoints"], make_event(origin))
    assert heir.id not in str(refused.value)


# ------------------------------------------------------------------------------------- two brokers on one database


@pytest.fixture
async def brokers(postgres_dsn: str) -> AsyncIterator[tuple[PostgresStore, PostgresStore]]:
    """Yield two brokers' stores, each with its own connections."""
    made = await PostgresStore.connect(postgres_dsn), await PostgresStore.connect(postgres_dsn)
    yield made
    for store in made:
        await store.close()


async def test_a_submit_that_comes_during_the_deletion_waits_and_is_refused(
    brokers: tuple[PostgresStore, PostgresStore], raw: Any
) -> None:
    one, other = brokers
    origin = await rested(one)
    heir = heir_of(origin)
    async with raw.transaction():
        await raw.execute("LOCK TABLE audit IN SHARE MODE")  # the deletion stops when all but its audit is written
        deletes = asyncio.create_task(one.as_tenant(ANN).delete_data(origin.id, ["checkpoints"], make_event(origin)))
        await blocked(raw, deletes)
        submits = asyncio.create_task(other.as_tenant(ANN).submit(heir, key=None, body_sha256="b", events=[]))
        await blocked(raw, submits, by=2)
    assert "checkpoints" in (await deletes or origin).deleted
    with pytest.raises(OriginDeleted):
        await submits
    assert await one.job(heir.id) is None


async def test_a_deletion_that_comes_during_the_submit_waits_and_is_refused(
    brokers: tuple[PostgresStore, PostgresStore], raw: Any
) -> None:
    one, other = brokers
    origin = await rested(one)
    heir = heir_of(origin)
    async with raw.transaction():
        await raw.execute("LOCK TABLE audit IN SHARE MODE")  # the submit stops when all but its audit is written
        submits = asyncio.create_task(other.as_tenant(ANN).submit(heir, key=None, body_sha256="b", events=[]))
        await blocked(raw, submits)
        deletes = asyncio.create_task(one.as_tenant(ANN).delete_data(origin.id, ["checkpoints"], make_event(origin)))
        await blocked(raw, deletes, by=2)
    assert (await submits)[1]
    with pytest.raises(InUse, match=heir.id):
        await deletes
    stored = await one.job(origin.id)
    assert stored is not None
    assert not stored.deleted
