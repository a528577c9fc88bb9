"""Functions of channels that only PostgreSQL has, and that run with the daemon's rights."""

import asyncpg

from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import make_event, submitted


async def test_the_fan_out_is_not_led_astray_by_a_temporary_table(postgres_dsn: str) -> None:
    """The fan-out runs with the daemon's rights for every writer of events, so it must read the real channels."""
    store = await PostgresStore.connect(postgres_dsn)
    job = await submitted(store)
    connection = await asyncpg.connect(postgres_dsn)
    async with connection.transaction():
        await connection.execute("SET LOCAL ROLE gpubroker_api")
        await connection.execute("SELECT set_config('gpubroker.team', 'default', true)")
        await connection.execute("CREATE TEMP TABLE channels (id text, team text, enabled boolean, events text[])")
        await connection.execute("CREATE TEMP TABLE deliveries (channel_id text, stream text, seq bigint)")
        await connection.execute(
            "INSERT INTO events (job_id, seq, kind, message, data) VALUES ($1, 1, 'k', 'm', '{}')", job.id
        )
    await connection.close()
    (stream,) = await store.claim_streams(["log"], busy=[], owner="o", lease_s=9, limit=9, depth=9)
    assert [pending.delivery.kind for pending in stream.pending] == ["k"]
    await store.close()


async def test_a_team_cannot_write_what_only_the_outbox_writes(postgres_dsn: str) -> None:
    store = await PostgresStore.connect(postgres_dsn)
    job = await submitted(store)
    await store.request_stop(job.id, make_event(job))
    connection = await asyncpg.connect(postgres_dsn)
    refused = []
    for statement in (
        "INSERT INTO deliveries (channel_id, stream, seq) VALUES ('log', 'x', 1)",
        "UPDATE streams SET waiting = 0",
        "SELECT state FROM streams",
        "INSERT INTO notices (id, kind, message, data) VALUES ('n', 'k', 'm', '{}')",
        "SELECT * FROM notices",
        "DELETE FROM drops",
        "SELECT * FROM seen",
        "UPDATE channels SET team = 'other'",
    ):
        try:
            async with connection.transaction():
                await connection.execute("SET LOCAL ROLE gpubroker_api")
                await connection.execute("SELECT set_config('gpubroker.team', 'default', true)")
                await connection.execute(statement)
        except asyncpg.InsufficientPrivilegeError:
            refused.append(statement)
    assert len(refused) == 8
    await connection.close()
    await store.close()
