"""A database of an earlier version, brought up to date and restored, by a role that is no superuser."""

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import asyncpg
import pytest

from broker.domain.ids import JobId
from broker.domain.job import AttemptState, JobState, Reason, Signal
from broker.domain.money import LedgerCategory, LedgerKind
from broker.domain.tenancy import Tenant
from broker.ports import Lane
from broker.store.embedded.server import EmbeddedPostgres, find_bindir
from broker.store.migrate import MIGRATIONS, MigrationError, migrate
from broker.store.postgres.store import PostgresStore

ROWS = Path(__file__).with_name("rows_0002.sql")
NEAR_CAP = JobId("jobnearcap000")
OPERATOR = Tenant(team="default", owner="ann", token_id="tok1", operator=True)


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[EmbeddedPostgres]:
    """One of its own, since roles belong to a whole server."""
    folder = Path(tempfile.mkdtemp(prefix="gb-"))
    try:
        async with await EmbeddedPostgres.start(folder, durable=False) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def admin(server: EmbeddedPostgres) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """The server's superuser, with two roles that may not do much and an empty database of each."""
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("CREATE ROLE maker LOGIN CREATEROLE; CREATE ROLE plain LOGIN")
    for role in ("maker", "plain"):
        await connection.execute(f"CREATE DATABASE {role} OWNER {role}")
    yield connection
    for role in ("maker", "plain"):
        await connection.execute(f"DROP DATABASE {role} WITH (FORCE)")
    await connection.execute("DROP ROLE IF EXISTS gpubroker_api")
    await connection.execute("DROP ROLE maker, plain")
    await connection.close()


@pytest.fixture
async def dsn(server: EmbeddedPostgres, admin: object) -> str:
    """An empty database, whose owner may make roles."""
    return as_role(server, "maker")


def as_role(server: EmbeddedPostgres, role: str) -> str:
    return server.dsn.replace("//gpubroker@/gpubroker?", f"//{role}@/{role}?")


@pytest.fixture
async def upgraded(dsn: str, tmp_path: Path) -> AsyncIterator[PostgresStore]:
    for name in ("0001_first.sql", "0002_rented.sql"):
        shutil.copy(MIGRATIONS / name, tmp_path)
    assert len(await migrate(dsn, tmp_path)) == 2
    connection = await asyncpg.connect(dsn)
    await connection.execute(ROWS.read_text())
    await connection.close()
    left = await migrate(dsn)
    assert left == sorted(path.name for path in MIGRATIONS.glob("*.sql"))[2:]
    store = await PostgresStore.connect(dsn)
    yield store
    await store.close()


async def test_every_job_keeps_its_state_and_its_money(upgraded: PostgresStore) -> None:
    found = {}
    for name in ("jobsucceeded0", NEAR_CAP, "jobrecovering", "jobtraining00", "jobqueued0000"):
        job = await upgraded.job(JobId(name))
        assert job is not None
        assert job.team == "default"
        found[name] = (job.state, job.spent_usd, job.cap_usd)
    assert found == {
        "jobsucceeded0": (JobState.SUCCEEDED, Decimal("1.25"), Decimal(10)),
        NEAR_CAP: (JobState.ACTIVE, Decimal("9.10"), Decimal(10)),
        "jobrecovering": (JobState.RECOVERING, Decimal("0.333333"), Decimal(10)),
        "jobtraining00": (JobState.ACTIVE, Decimal(0), Decimal(10)),
        "jobqueued0000": (JobState.QUEUED, Decimal(0), Decimal("0.50")),
    }


async def test_a_spec_that_people_wrote_is_read(upgraded: PostgresStore) -> None:
    job = await upgraded.job(JobId("jobqueued0000"))
    assert job is not None
    assert job.spec.train is not None
    assert (job.spec.train.max_steps, job.spec.priority, job.spec.deadline) == (45, 0, None)


async def test_a_live_attempt_that_is_near_its_cap_is_still_to_be_drained(upgraded: PostgresStore) -> None:
    (attempt,) = await upgraded.attempts(NEAR_CAP)
    assert (attempt.state, attempt.signal, attempt.charged_usd) == (
        AttemptState.TRAINING,
        Signal.CAP,
        Decimal("9.10"),
    )
    assert attempt.beat is not None
    assert attempt.beat.step == 17
    assert [handle.id for handle in attempt.handles] == ["i-1"]
    (leased,) = await upgraded.claim_attempts(Lane.INTERRUPTION, owner="new", lease_s=60, limit=9)
    assert leased.attempt.id == attempt.id


async def test_ended_attempts_and_the_ledger_are_whole(upgraded: PostgresStore) -> None:
    (ended,) = await upgraded.attempts(JobId("jobrecovering"))
    assert (ended.state, ended.reason) == (AttemptState.ENDED, Reason.PREEMPTED)
    entries = await upgraded.ledger(JobId("jobsucceeded0"))
    assert [(e.kind, e.usd) for e in entries] == [
        (LedgerKind.RESERVATION, Decimal("9.5")),
        (LedgerKind.CHARGE, Decimal("1.25")),
        (LedgerKind.RELEASE, Decimal("8.25")),
    ]
    assert {e.category for e in entries} == {LedgerCategory.COMPUTE}


async def test_what_was_spent_counts_against_budgets(dsn: str, upgraded: PostgresStore) -> None:
    connection = await asyncpg.connect(dsn)
    spent = dict(await connection.fetch("SELECT owner, sum(usd) FROM usage GROUP BY owner"))
    await connection.close()
    assert spent == {"ann": Decimal("1.583333"), "bob": Decimal("9.10")}


async def test_the_api_sees_its_team_and_goes_on(upgraded: PostgresStore) -> None:
    tenant = upgraded.as_tenant(OPERATOR)
    assert [token.id for token in await tenant.tokens()] == ["tok1"]
    assert await tenant.secrets("ann") == {"HF_TOKEN": b"sealed"}
    upload = await tenant.upload("ann", "0" * 64)
    assert upload is not None
    assert upload.name == "data.jsonl"
    outsider = upgraded.as_tenant(Tenant(team="other", owner="eve", token_id="t", operator=False))
    assert await outsider.job(NEAR_CAP) is None
    (live, *others) = await upgraded.live_attempts()
    assert {live.job.id, *(one.job.id for one in others)} == {NEAR_CAP, "jobtraining00"}


async def run(program: str, *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        find_bindir() / program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


async def test_a_dump_by_the_superuser_is_restored_as_the_role(
    server: EmbeddedPostgres, admin: "asyncpg.Connection[asyncpg.Record]", dsn: str, upgraded: PostgresStore,
    tmp_path: Path,
) -> None:  # fmt: skip
    """As docs/guide/operating.md has it. (The role would need --enable-row-security: it is held too.)"""
    await run("pg_dump", "--format=custom", f"--file={tmp_path}/db.dump", server.dsn.replace("/gpubroker?", "/maker?"))
    await admin.execute("CREATE DATABASE restored OWNER maker")
    there = dsn.replace("/maker?", "/restored?")
    try:
        await run(
            "pg_restore", "--exit-on-error", f"--dbname={server.dsn.replace('/gpubroker?', '/restored?')}",
            f"{tmp_path}/db.dump",
        )  # fmt: skip
        assert await migrate(there) == []
        store = await PostgresStore.connect(there)
        try:
            assert await store.ledger(NEAR_CAP) == await upgraded.ledger(NEAR_CAP)
            assert await store.attempts(NEAR_CAP) == await upgraded.attempts(NEAR_CAP)
            assert await store.as_tenant(OPERATOR).job(NEAR_CAP) == await upgraded.job(NEAR_CAP)
        finally:
            await store.close()
    finally:
        await admin.execute("DROP DATABASE restored WITH (FORCE)")


@pytest.mark.parametrize("made", [False, True], ids=["no such role", "a role of somebody else"])
async def test_a_role_that_may_make_none_is_told_what_to_run_and_then_works(
    server: EmbeddedPostgres, admin: "asyncpg.Connection[asyncpg.Record]", made: bool
) -> None:
    if made:
        await admin.execute("CREATE ROLE gpubroker_api NOLOGIN")
    with pytest.raises(MigrationError, match=re.escape("ask an administrator to run: ")) as refused:
        await migrate(as_role(server, "plain"))
    said = str(refused.value)
    assert "\n" not in said
    (statements,) = re.findall(r"ask an administrator to run: (.*;);", said)
    for statement in statements.split(";")[made:-1]:  # the role is there already where it was made
        await admin.execute(statement)
    assert "0003_tenancy.sql" in await migrate(as_role(server, "plain"))
    store = await PostgresStore.connect(as_role(server, "plain"))
    await store.close()
