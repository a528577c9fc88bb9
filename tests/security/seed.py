"""Two teams with a row in every table that the API can read. Seed new tables here; otherwise test_rls.py fails."""

from dataclasses import replace
from decimal import Decimal

import asyncpg

from broker.domain.job import AttemptState, Job
from broker.domain.notifications import Channel, SlackUser
from broker.domain.policy import Policy
from broker.domain.tenancy import OPERATOR, Tenant
from broker.ports import Charge, Token, Upload
from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import START, make_event, running

RED, BLUE = "red", "blue"


async def seed(dsn: str) -> None:
    """Write rows of the teams red and blue, which differ in their jobs' ids only."""
    store = await PostgresStore.connect(dsn)
    try:
        operator = store.as_tenant(OPERATOR)
        for number, team in enumerate((RED, BLUE)):
            await operator.put_team(team, "")
            await _channel(store, team)
            job = await _job(store, team)
            await _rest(store, team, number)
            await _raw(dsn, team, job)
    finally:
        await store.close()


async def _job(store: PostgresStore, team: str) -> Job:
    attempt, job = await running(store, AttemptState.TRAINING, team=team, labels={"stage": "test"})
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(1), event=make_event(job))
    assert await store.charge([charge]) == [True]
    return job


async def _channel(store: PostgresStore, team: str) -> None:
    channel = Channel(id=f"channel-{team}", kind="webhook", name="hook", team=team, created_at=START)
    assert await store.as_tenant(Tenant(team=team, owner="ann")).add_channel(channel)


async def _rest(store: PostgresStore, team: str, number: int) -> None:
    rows = store.as_tenant(Tenant(team=team, owner="ann"))
    await rows.put_secret("ann", "KEY", b"sealed")
    await rows.put_upload("ann", Upload(sha256="ab", bytes=1, name="d.csv", summary=None))
    token = Token(id=f"token{number}", team=team, owner="ann", scopes=("read",), created_at=START)
    await rows.put_token(token, f"{number}" * 64)
    await rows.put_policy(Policy(name="limit", team=team, max_jobs=5))
    link = SlackUser(team=team, workspace="T1", user="U1", owner="ann", scopes=("read",), linked_by="ann")
    await rows.put_slack_user(replace(link, name=team))


async def _raw(dsn: str, team: str, job: Job) -> None:
    """Write rows that only the daemon writes, which no call of the API creates."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("INSERT INTO drops (channel_id, reason, n) VALUES ($1, 'old', 1)", f"channel-{team}")
        await connection.execute(
            "INSERT INTO price_changes (attempt_id, since, usd_per_hour) "
            "SELECT id, clock_timestamp(), 1 FROM attempts WHERE job_id = $1",
            job.id,
        )
    finally:
        await connection.close()
