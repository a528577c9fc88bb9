"""Contract of every store for events, lists and ownership, over memory and PostgreSQL."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise

from broker.domain.ids import Installation, JobId
from broker.domain.job import AttemptState, Job, JobState, PriceChange, Reason
from broker.domain.offer import HostFacts
from broker.domain.tenancy import Tenant
from broker.ports import Change, Charge, JobFilter, Lane, Store, Token, Upload
from tests.conformance.conftest import TimedStore
from tests.conformance.samples import (
    HOUR,
    START,
    admission,
    claimed_job,
    in_state,
    make_event,
    running,
    submitted,
)

# -------------------------------------------------------------------------------------------------------------- events


async def test_events_are_numbered_without_gaps_by_concurrent_writers(store: Store) -> None:
    _, job = await running(store)

    async def note(number: int) -> None:
        held = number % 3 > 0
        stale = replace(job, epoch=-1) if not held else None
        change = Change(events=(make_event(job, f"note.{number}"),) * 2)
        if stale is not None:
            change = replace(change, job=(replace(stale, state=JobState.QUEUED), stale))
        assert await store.apply([change]) == [held]

    await asyncio.gather(*(note(number) for number in range(30)))
    events = await store.events(job.id, after=0, limit=999)
    assert [event.seq for event in events] == list(range(1, 42))
    assert all(a.at is not None and b.at is not None and a.at <= b.at for a, b in pairwise(events))
    assert await store.events(job.id, after=39, limit=1) == events[39:40]


async def test_a_hint_ends_a_wait(store: Store) -> None:
    assert not await store.wait("jobs", 0)
    first = asyncio.create_task(store.wait("jobs", HOUR))
    while not first.done():  # PostgreSQL's listener connects with the first wait
        await submitted(store)
        await asyncio.sleep(0)
    assert await first
    job = await submitted(store)
    waits = [asyncio.create_task(store.wait(topic, HOUR)) for topic in ("jobs", f"job/{job.id}")]
    await asyncio.sleep(0)
    await store.apply([Change(events=(make_event(job),))])
    await submitted(store)
    assert await asyncio.gather(*waits) == [True, True]
    assert not await store.wait("job/other", 0)


# ------------------------------------------------------------------------------------------------------------- reading


async def test_lists_are_filtered_and_paged_newest_first(store: Store) -> None:
    made: list[Job] = []
    for n in range(6):
        made.append(await submitted(store, owner="ann" if n % 2 == 0 else "bob", labels={"n": str(n % 3), "x": "y"}))
    newest = sorted(made, key=lambda job: (job.created_at, job.id), reverse=True)

    async def ids(where: JobFilter) -> list[JobId]:
        return [job.id for job in await store.jobs(where)]

    assert await ids(JobFilter()) == [job.id for job in newest]
    assert await ids(JobFilter(owner="bob")) == [job.id for job in newest if job.owner == "bob"]
    assert set(await ids(JobFilter(labels={"n": "1", "x": "y"}))) == {made[1].id, made[4].id}
    assert await ids(JobFilter(labels={"n": "9"})) == []
    assert await ids(JobFilter(states=(JobState.ACTIVE, JobState.FAILED))) == []
    first = await store.jobs(JobFilter(limit=4))
    rest = await store.jobs(JobFilter(before=(first[-1].created_at, first[-1].id), limit=4))
    assert [job.id for job in (*first, *rest)] == [job.id for job in newest]
    limit = newest[0].created_at + timedelta(microseconds=1)
    assert await ids(JobFilter(since=limit)) == []
    assert len(await ids(JobFilter(until=limit))) == 6
    held = await store.claim_jobs([JobState.QUEUED], owner="a", lease_s=HOUR, limit=99)
    failed = replace(held[0], state=JobState.FAILED, finished_at=START)
    await store.apply([Change(job=(held[0], failed))])
    assert await ids(JobFilter(states=(JobState.ACTIVE, JobState.FAILED))) == [held[0].id]


async def test_counts_name_every_state(store: Store) -> None:
    await running(store, AttemptState.ENDED)
    await running(store)
    await submitted(store)
    counts = await store.counts()
    assert counts["jobs"] == {**dict.fromkeys(JobState, 0), "active": 2, "queued": 1}
    assert counts["attempts"] == {**dict.fromkeys(AttemptState, 0), "training": 1, "ended": 1}
    assert len(await store.live_attempts()) == 1


async def test_live_attempts_show_every_later_write(store: Store) -> None:
    attempt, job = await running(store)
    await running(store, AttemptState.PLANNED)
    assert {row.attempt.state for row in await store.live_attempts()} == {AttemptState.TRAINING, AttemptState.PLANNED}
    price = PriceChange(since=START, usd_per_hour=Decimal(2))
    charge = Charge(
        attempt_id=attempt.id, job_id=job.id, since=None, to=START + timedelta(hours=1), usd=Decimal(1), prices=(price,)
    )
    assert await store.charge([charge]) == [True]
    (charged,) = [row for row in await store.live_attempts() if row.attempt.id == attempt.id]
    assert (charged.attempt.charged_usd, charged.attempt.prices, charged.job.spent_usd) == (1, (price,), 1)
    assert await store.request_stop(job.id, make_event(job, "job.stop")) is not None
    (stopped,) = [row for row in await store.live_attempts() if row.attempt.id == attempt.id]
    assert stopped.job.stop_requested
    (leased,) = await store.claim_attempts(Lane.INTERRUPTION, owner="a", lease_s=HOUR, limit=1)
    epochs = {row.attempt.id: row.attempt.epoch for row in await store.live_attempts()}
    assert epochs[attempt.id] == leased.attempt.epoch
    ended = in_state(leased.attempt, AttemptState.ENDED)
    assert await store.apply([Change(attempt=(leased.attempt, ended))]) == [True]
    assert [row.attempt.state for row in await store.live_attempts()] == [AttemptState.PLANNED]


async def test_planned_attempts_are_not_sent(store: Store) -> None:
    """Billing, the spend guard and the grants have nothing to do for them, however many wait."""
    sent, job = await running(store)
    await running(store, AttemptState.ENDED)
    planned, _ = await running(store, AttemptState.PLANNED)
    assert {row.attempt.id for row in await store.live_attempts()} == {sent.id, planned.id}
    (row,) = await store.sent_attempts()
    assert (row.attempt, row.job.id) == (sent, job.id)
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="a", lease_s=HOUR, limit=1)
    launching = in_state(leased.attempt, AttemptState.LAUNCHING)
    assert await store.apply([Change(attempt=(leased.attempt, launching))]) == [True]
    assert {row.attempt.id for row in await store.sent_attempts()} == {sent.id, planned.id}
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=1)
    assert await store.apply([Change(attempt=(leased.attempt, in_state(sent, AttemptState.ENDED)))]) == [True]
    assert [row.attempt.id for row in await store.sent_attempts()] == [planned.id]


async def test_blocked_offers_come_back(timed_store: TimedStore) -> None:
    store = timed_store.store
    await store.block_offer("a", "sold out", for_s=300)
    await store.block_offer("b", "quota", for_s=300)
    await store.block_offer("b", "still no quota", for_s=900)
    assert await store.blocked_offers() == {"a": "sold out", "b": "still no quota"}
    await timed_store.pass_time(301)
    assert await store.blocked_offers() == {"b": "still no quota"}


async def test_attempts_ended_at_a_host_are_found_by_reason(timed_store: TimedStore) -> None:
    store = timed_store.store
    ended = [(await running(store, AttemptState.ENDED))[0] for _ in range(3)]
    line, facts = ended[0].line, HostFacts(host="7")
    there = replace(line, offer=replace(line.offer, facts=facts))
    await submitted(store)
    bought = admission(await claimed_job(store))
    assert bought.admit is not None
    await store.apply([replace(bought, admit=replace(bought.admit, line=there))])
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="a", lease_s=HOUR, limit=9)
    await store.apply([Change(attempt=(leased.attempt, in_state(leased.attempt, AttemptState.ENDED)))])
    await running(store)
    key, always = line.offer.host_key, 1e10
    ids = sorted(one.id for one in ended)
    assert [a.id for a in await store.ended_at_host(key, [Reason.PREEMPTED], within_s=always, limit=9)] == ids
    assert [a.id for a in await store.ended_at_host(key, [Reason.PREEMPTED], within_s=always, limit=2)] == ids[:2]
    assert await store.ended_at_host(key, [Reason.HUNG], within_s=always, limit=9) == []
    (elsewhere,) = await store.ended_at_host("host:alpha/7", [Reason.PREEMPTED], within_s=always, limit=9)
    assert elsewhere.id == leased.attempt.id
    await timed_store.pass_time(2 * HOUR)
    assert await store.ended_at_host(key, [Reason.PREEMPTED], within_s=HOUR / 2, limit=9) == []


async def test_tokens_are_found_by_their_hash(store: Store) -> None:
    token = Token(id="t1", owner="ann", scopes=("jobs:read", "jobs:write"), created_at=START, note="laptop")
    assert await store.put_token(token, "ff" * 32)
    assert not await store.put_token(token, "ee" * 32)
    assert await store.token("ff" * 32) == token
    assert await store.token("00" * 32) is None
    assert await store.tokens() == [token]
    assert [await store.delete_token("t1"), await store.delete_token("t1")] == [True, False]
    assert await store.token("ff" * 32) is None


async def test_secrets_and_uploads_belong_to_their_owner(timed_store: TimedStore) -> None:
    store = timed_store.store.as_tenant(Tenant(team="default", owner="ann"))
    await store.put_secret("ann", "HF_TOKEN", b"one")
    await store.put_secret("ann", "HF_TOKEN", b"two")
    await store.put_secret("ann", "WANDB", b"\0\xff")
    assert await store.secrets("ann") == {"HF_TOKEN": b"two", "WANDB": b"\0\xff"}
    assert await store.secrets("ann", ["WANDB", "NONE"]) == {"WANDB": b"\0\xff"}
    assert await store.secrets("ann", []) == {}
    assert await store.secrets("bob") == {}
    assert [await store.delete_secret("bob", "WANDB"), await store.delete_secret("ann", "WANDB")] == [False, True]
    upload = Upload(sha256="ab", bytes=5, name="d.csv", summary={"rows": 938, "columns": ["word"]})
    await store.put_upload("ann", upload)
    await store.put_upload("ann", upload)
    await store.put_upload("ann", Upload(sha256="cd", bytes=5, name="code.tar", summary=None))
    assert await store.upload("ann", "ab") == upload
    assert await store.upload("bob", "ab") is None
    sizes = [await timed_store.store.upload_bytes(team, "ann", "ab") for team in ("default", "others")]
    assert sizes == [5, None]


async def test_a_database_belongs_to_one_installation(store: Store) -> None:
    answers = await asyncio.gather(*(store.installation(Installation(name)) for name in ("aaaa", "bbbb", "cccc")))
    assert len(set(answers)) == 1
    assert await store.installation(Installation("dddd")) == answers[0]


async def test_a_database_has_one_master_key_until_another_is_adopted(store: Store) -> None:
    await store.installation(Installation("aaaa"))
    assert await store.master_key(None) is None
    answers = await asyncio.gather(*(store.master_key(mark) for mark in ("one", "two", "three")))
    assert len({*answers, await store.master_key(None)}) == 1
    await store.adopt_master_key("four")
    assert await store.master_key("five") == "four"


async def test_a_database_has_one_blob_store_until_another_is_adopted(store: Store) -> None:
    await store.installation(Installation("aaaa"))
    answers = await asyncio.gather(*(store.blob_store(mark) for mark in ("one", "two", "three")))
    assert len(set(answers)) == 1
    await store.adopt_blob_store("four")
    assert await store.blob_store("five") == "four"


async def test_a_ping_returns_the_databases_clock(store: Store) -> None:
    """A ping also works before the database belongs to an installation."""
    before = await store.ping()
    _, job = await running(store)
    after = await store.ping()
    assert before <= job.created_at <= after
    assert after.utcoffset() == timedelta(0)
    await store.installation(Installation("aaaa"))
    assert await store.ping() >= after
