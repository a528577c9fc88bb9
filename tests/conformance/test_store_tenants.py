"""Rows of a team are invisible to another team, in every query of the store."""

import asyncio
from dataclasses import replace
from decimal import Decimal

import pytest

from broker.domain.errors import IdempotencyConflict, InUse, StoreError
from broker.domain.ids import JobId
from broker.domain.job import AttemptState
from broker.domain.tenancy import Tenant
from broker.ports import AuditFilter, JobFilter, Store, TenantStore, Token, Upload
from tests.conformance.samples import START, make_event, make_job, running, submitted

ANN = Tenant(team="red", owner="ann", token_id="t-ann")
BOB = Tenant(team="blue", owner="ann", token_id="t-bob")
"""Tenant with the same owner name in another team, so that the name alone is not a key."""
ROOT = Tenant(team="default", owner="root", operator=True)
UPLOAD = Upload(sha256="ab", bytes=5, name="d.csv", summary={"rows": 938})


@pytest.fixture
async def red(store: Store) -> TenantStore:
    for team in ("red", "blue"):
        await store.put_team(team, "")
    return store.as_tenant(ANN)


@pytest.fixture
def blue(store: Store, red: TenantStore) -> TenantStore:
    return store.as_tenant(BOB)


@pytest.fixture
def root(store: Store, red: TenantStore) -> TenantStore:
    return store.as_tenant(ROOT)


def token(name: str, **changes: object) -> Token:
    token = Token(id=name, team="red", owner="ann", scopes=("read",), created_at=START)
    return replace(token, **changes)  # type: ignore[arg-type]


async def test_a_job_and_its_rows_are_visible_to_its_team_only(
    store: Store, red: TenantStore, blue: TenantStore
) -> None:
    _, job = await running(store, AttemptState.TRAINING, team="red")
    for tenant, sees in ((red, True), (blue, False)):
        assert (await tenant.job(job.id) is not None) is sees
        assert (len(await tenant.jobs(JobFilter())) > 0) is sees
        assert (len(await tenant.jobs(JobFilter(team="red", owner="ann"))) > 0) is sees
        assert (len(await tenant.attempts(job.id)) > 0) is sees
        assert (len(await tenant.events(job.id, after=0, limit=9)) > 0) is sees
        assert (len(await tenant.ledger(job.id)) > 0) is sees


async def test_an_operator_sees_every_team_or_a_chosen_one(root: TenantStore, store: Store) -> None:
    jobs = [await submitted(store, team=team) for team in ("red", "blue")]
    assert {job.id for job in await root.jobs(JobFilter())} == {job.id for job in jobs}
    assert [job.team for job in await root.jobs(JobFilter(team="blue"))] == ["blue"]
    assert [team.name for team in await root.teams()] == ["blue", "default", "red"]


async def test_another_team_s_job_is_neither_stopped_nor_raised(
    store: Store, red: TenantStore, blue: TenantStore
) -> None:
    job = await submitted(store, team="red")
    before = len(await store.audit(AuditFilter()))
    assert await blue.request_stop(job.id, make_event(job)) is None
    assert await blue.raise_cap(job.id, Decimal(99), make_event(job)) is None
    assert await blue.request_stop(JobId("a" * 13), make_event(job)) is None
    stored = await red.job(job.id)
    assert stored is not None
    assert (stored.stop_requested, stored.cap_usd) == (False, Decimal(10))
    assert list(await red.events(job.id, after=0, limit=9)) == []
    assert len(await store.audit(AuditFilter())) == before


async def test_no_token_submits_for_another_team(red: TenantStore, root: TenantStore, store: Store) -> None:
    forged = make_job(team="blue")
    with pytest.raises(StoreError):
        await red.submit(forged, key="k", body_sha256="", events=[])
    with pytest.raises(StoreError):
        await root.submit(make_job(team="green"), key=None, body_sha256="", events=[])
    assert await store.job(forged.id) is None
    made, fresh = await root.submit(make_job(team="blue"), key="k", body_sha256="", events=[])
    assert (made.team, fresh) == ("blue", True)


async def test_an_idempotency_key_belongs_to_one_user_of_one_team(red: TenantStore, blue: TenantStore) -> None:
    one, other = make_job(team="red"), make_job(team="blue")
    answers = await asyncio.gather(
        red.submit(one, key="k", body_sha256="1", events=[]), blue.submit(other, key="k", body_sha256="2", events=[])
    )
    assert [(job.id, fresh) for job, fresh in answers] == [(one.id, True), (other.id, True)]
    again, fresh = await blue.submit(make_job(team="blue"), key="k", body_sha256="2", events=[])
    assert (again.id, fresh) == (other.id, False)
    with pytest.raises(IdempotencyConflict):
        await red.submit(make_job(team="red"), key="k", body_sha256="2", events=[])


async def test_secrets_and_uploads_belong_to_one_user_of_one_team(
    red: TenantStore, blue: TenantStore, root: TenantStore, store: Store
) -> None:
    await red.put_secret("ann", "KEY", b"red")
    await blue.put_secret("ann", "KEY", b"blue")
    await red.put_upload("ann", UPLOAD)
    assert [await one.secrets("ann") for one in (red, blue, root)] == [{"KEY": b"red"}, {"KEY": b"blue"}, {}]
    assert [await one.upload("ann", "ab") for one in (red, blue, root)] == [UPLOAD, None, None]
    assert [await root.delete_secret("ann", "KEY"), await blue.delete_secret("ann", "KEY")] == [False, True]
    assert await red.secrets("ann") == {"KEY": b"red"}
    with pytest.raises(StoreError):  # the installation is in no team
        await store.put_secret("ann", "KEY", b"x")


async def test_tokens_belong_to_one_team(red: TenantStore, blue: TenantStore, root: TenantStore, store: Store) -> None:
    await red.put_token(token("t1"), "11" * 32)
    await root.put_token(token("t2", team="blue", expires_at=START), "22" * 32)
    for tenant, foreign in ((red, "blue"), (root, "green")):
        with pytest.raises(StoreError):
            await tenant.put_token(token("t3", team=foreign), "33" * 32)
    assert [[t.id for t in await one.tokens()] for one in (red, blue, root)] == [["t1"], ["t2"], ["t1", "t2"]]
    assert await store.token("22" * 32) == token("t2", team="blue", expires_at=START)
    assert [await red.delete_token("t2"), await blue.delete_token("t2")] == [False, True]


async def test_teams_are_made_and_removed_by_operators(red: TenantStore, root: TenantStore, store: Store) -> None:
    with pytest.raises(StoreError):
        await red.put_team("green", "")
    made = await root.put_team("green", "gr\0een")
    assert made is not None
    assert (made.name, made.note) == ("green", "gr\ufffdeen")
    assert await root.put_team("green", "") is None
    green = store.as_tenant(Tenant(team="green", owner="ann"))
    assert list(await green.teams()) == [made]
    await green.put_secret("ann", "KEY", b"x")
    await green.put_upload("ann", UPLOAD)
    await green.put_token(token("t1", team="green"), "11" * 32)
    assert [await red.delete_team("green"), await root.delete_team("green")] == [False, True]
    assert await root.delete_team("green") is False
    assert await store.token("11" * 32) is None
    await root.put_team("green", "")
    assert (await green.secrets("ann"), await green.upload("ann", "ab")) == ({}, None)
    await submitted(store, team="green")
    with pytest.raises(InUse, match="team green has jobs"):
        await root.delete_team("green")


async def test_an_audit_entry_describes_only_its_own_write(red: TenantStore, store: Store) -> None:
    job = make_job(team="red")
    await red.submit(job, key="k", body_sha256="1", events=[])
    await red.submit(job, key="k", body_sha256="1", events=[])
    await red.raise_cap(job.id, Decimal("12.50"), make_event(job))
    await red.raise_cap(job.id, Decimal(12), make_event(job))
    await red.request_stop(job.id, make_event(job))
    await red.request_stop(job.id, make_event(job))
    retry = make_job(team="red", retry_of=job.id)
    await red.submit(retry, key=None, body_sha256="", events=[])
    entries = await red.audit(AuditFilter(actor="ann"))
    audited = [(e.action, e.target, e.usd) for e in reversed(entries)]
    assert audited == [
        ("job.submit", job.id, Decimal(10)),
        ("job.raise_cap", job.id, Decimal("2.50")),
        ("job.stop", job.id, None),
        ("job.retry", retry.id, Decimal(10)),
    ]
    assert {(e.team, e.token_id) for e in entries} == {("red", "t-ann")}
    assert len({e.id for e in entries}) == 4
    raised = entries[2]
    assert raised.before is not None
    assert raised.after is not None
    assert [Decimal(side["cap_usd"]) for side in (raised.before, raised.after)] == [Decimal(10), Decimal("12.50")]
    await store.request_stop(retry.id, make_event(retry))
    assert [(e.actor, e.team) for e in await red.audit(AuditFilter(limit=1))] == [("gpubroker", "red")]


async def test_the_audit_is_filtered_and_paged(red: TenantStore, blue: TenantStore, root: TenantStore) -> None:
    for name in ("A", "B", "C"):
        await red.put_secret("ann", name, b"x")
    await blue.put_secret("ann", "D", b"x")
    await red.delete_secret("ann", "A")

    async def targets(of: TenantStore, **where: object) -> list[str]:
        found = await of.audit(replace(AuditFilter(action="secret"), **where))  # type: ignore[arg-type]
        return [entry.target for entry in found]

    assert await targets(red) == ["A", "C", "B", "A"]
    assert await targets(blue) == ["D"]
    assert await targets(blue, team="red") == []
    assert await targets(root, team="red", action="secret.set") == ["C", "B", "A"]
    assert await targets(red, action="secre") == []
    assert await targets(red, target="B") == ["B"]
    assert await targets(red, actor="eve") == []
    first = await red.audit(AuditFilter(action="secret", limit=2))
    assert first[1].at is not None
    assert await targets(red, before=(first[1].at, first[1].id)) == ["B", "A"]
    assert await targets(red, until=START) == []
    assert await targets(red, since=START) == ["A", "C", "B", "A"]


async def test_a_signed_out_session_is_remembered(store: Store) -> None:
    assert not await store.is_session_ended("abc")
    for _ in range(2):
        await store.end_session("abc", for_s=60.0)
    assert await store.is_session_ended("abc")
    assert not await store.is_session_ended("abcd")
