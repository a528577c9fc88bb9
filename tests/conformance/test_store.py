"""Contract of every store, over memory and PostgreSQL."""

import asyncio
from dataclasses import replace
from decimal import Decimal

import pytest

from broker.domain.errors import IdempotencyConflict, StoreError
from broker.domain.ids import JobId
from broker.domain.job import Attempt, AttemptState, Job, JobState, Signal
from broker.ports import Change, Charge, JobFilter, Lane, Store
from tests.conformance.conftest import TimedStore
from tests.conformance.samples import (
    HOUR,
    START,
    admission,
    claimed_job,
    in_state,
    make_event,
    make_job,
    running,
    submitted,
)


async def send(store: Store, signal: str, attempt: Attempt, job: Job) -> None:
    """Send a stop or a cap signal, or neither."""
    if signal == "stop":
        await store.request_stop(job.id, make_event(job))
    if signal == "cap":
        due = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(0), signal=Signal.CAP)
        assert await store.charge([due]) == [True]


# ---------------------------------------------------------------------------------------------------------- submitting


async def test_a_submitted_job_is_found_as_it_was_given(store: Store) -> None:
    given = make_job(labels={"team": "nlp"}, retry_of=JobId("a" * 13))
    job, fresh = await store.submit(given, key="k", body_sha256="1", events=[make_event(given, "job.submitted")])
    assert fresh
    assert replace(job, created_at=START, due_at=None) == given
    assert await store.job(given.id) == job
    assert [(e.seq, e.kind) for e in await store.events(given.id, after=0, limit=9)] == [(1, "job.submitted")]
    assert await store.job(JobId("b" * 13)) is None


async def test_a_key_makes_one_job_of_one_body(store: Store) -> None:
    first, _ = await store.submit(make_job(), key="k", body_sha256="1", events=[])
    again, fresh = await store.submit(make_job(), key="k", body_sha256="1", events=[])
    assert (again.id, fresh) == (first.id, False)
    with pytest.raises(IdempotencyConflict):
        await store.submit(make_job(), key="k", body_sha256="2", events=[])
    _, fresh = await store.submit(make_job(owner="bob"), key="k", body_sha256="2", events=[])
    assert fresh
    assert len(await store.jobs(JobFilter())) == 2


async def test_fifty_clients_with_one_key_get_one_job(store: Store) -> None:
    answers = await asyncio.gather(
        *(store.submit(make_job(), key="k", body_sha256="1", events=[]) for _ in range(50)),
    )
    assert len({job.id for job, _ in answers}) == 1
    assert [fresh for _, fresh in answers].count(True) == 1


async def test_each_of_many_clients_learns_its_own_outcome(store: Store) -> None:
    taken, _ = await store.submit(make_job(), key="taken", body_sha256="1", events=[])

    async def one(number: int) -> str:
        job = make_job()
        if number % 5 == 0:
            job = replace(job, cap_usd=Decimal(0))
        key, body = ("taken", "2") if number % 5 == 1 else ("taken", "1") if number % 5 == 2 else (f"k{number}", "1")
        try:
            made, fresh = await store.submit(job, key=key, body_sha256=body, events=[make_event(job)])
        except StoreError as error:
            return type(error).__name__
        assert made.id == (job.id if fresh else taken.id)
        assert not fresh or len(await store.events(job.id, after=0, limit=9)) == 1
        return "fresh" if fresh else "repeated"

    answers = await asyncio.gather(*(one(number) for number in range(50)))
    assert answers == ["StoreError", "IdempotencyConflict", "repeated", "fresh", "fresh"] * 10
    assert len(await store.jobs(JobFilter(limit=100))) == 21


async def test_one_job_id_is_one_job(store: Store) -> None:
    job = await submitted(store)
    with pytest.raises(StoreError):
        await store.submit(job, key=None, body_sha256="", events=[])


# -------------------------------------------------------------------------------------------------------------- leases


async def test_two_owners_never_hold_one_job(store: Store) -> None:
    ids = [job.id for job in await asyncio.gather(*(submitted(store) for _ in range(300)))]

    async def claim_all(owner: str) -> list[JobId]:
        held: list[JobId] = []
        while jobs := await store.claim_jobs([JobState.QUEUED], owner=owner, lease_s=HOUR, limit=3):
            held += [job.id for job in jobs]
        return held

    held = await asyncio.gather(*(claim_all(f"o{n}") for n in range(8)))
    left = await claim_all("rest")  # a claimer may leave early, with the rest locked by others
    assert sorted([*left, *(job_id for ids in held for job_id in ids)]) == sorted(ids)


async def test_two_owners_never_hold_one_attempt(store: Store) -> None:
    ids = {(await running(store))[0].id for _ in range(12)}
    claims = await asyncio.gather(
        *(store.claim_attempts(Lane.LIVENESS, owner=f"o{n}", lease_s=HOUR, limit=4) for n in range(6))
    )
    held = [leased.attempt.id for claim in claims for leased in claim]
    assert len(held) == len(set(held))
    rest = await store.claim_attempts(Lane.LIVENESS, owner="rest", lease_s=HOUR, limit=99)
    assert {*held, *(leased.attempt.id for leased in rest)} == ids


async def test_a_broker_claims_only_attempts_of_its_own_clouds(store: Store) -> None:
    """Brokers on one database may have different clouds; a broker without a cloud does not claim that cloud's
    attempts.
    """
    attempt, _ = await running(store)
    own = attempt.line.offer.provider
    for turns in ({}, {"elsewhere": 0.0}):
        assert not await store.claim_attempts(Lane.LIVENESS, owner="o", lease_s=HOUR, limit=9, turns=turns)
    (leased,) = await store.claim_attempts(
        Lane.LIVENESS, owner="o", lease_s=HOUR, limit=9, turns={"elsewhere": 0.0, own: 0.0}
    )
    assert leased.attempt.id == attempt.id


async def test_a_broker_cut_off_from_a_cloud_leaves_its_rows_to_others_first(timed_store: TimedStore) -> None:
    attempt, _ = await running(timed_store.store)
    own = attempt.line.offer.provider
    await timed_store.pass_time(500)

    async def claims(later_s: float) -> int:
        claimed_attempts = await timed_store.store.claim_attempts(
            Lane.LIVENESS, owner="o", lease_s=HOUR, limit=9, turns={own: later_s}
        )
        return len(claimed_attempts)

    assert await claims(800.0) == 0
    await timed_store.pass_time(500)
    assert await claims(800.0) == 1


@pytest.mark.parametrize("signal", ["stop", "cap"])
async def test_a_broker_cut_off_from_a_cloud_still_acts_on_a_signal_at_once(store: Store, signal: str) -> None:
    """A launch can be aborted without the cloud, so stops and caps do not wait for other brokers."""
    attempt, job = await running(store, AttemptState.LAUNCHING)
    await send(store, signal, attempt, job)
    own = attempt.line.offer.provider
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="o", lease_s=HOUR, limit=9, turns={own: HOUR})
    assert leased.attempt.id == attempt.id


async def test_a_lease_expires_and_the_epoch_fences_the_zombie(timed_store: TimedStore) -> None:
    store = timed_store.store
    await submitted(store)
    zombie = await claimed_job(store, lease_s=300)
    assert not await store.claim_jobs([JobState.QUEUED], owner="b", lease_s=300, limit=9)
    await timed_store.pass_time(301)
    heir = await claimed_job(store, lease_s=300)
    assert heir.epoch > zombie.epoch
    late = Change(job=(zombie, replace(zombie, reason="zombie")))
    assert await store.apply([late, Change(job=(heir, replace(heir, reason="heir")))]) == [False, True]
    job = await store.job(heir.id)
    assert job is not None
    assert job.reason == "heir"


async def test_an_expired_attempt_lease_fences_the_zombie(timed_store: TimedStore) -> None:
    store = timed_store.store
    attempt, _ = await running(store)
    (zombie,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=300, limit=9)
    await timed_store.pass_time(301)
    (heir,) = await store.claim_attempts(Lane.LIVENESS, owner="b", lease_s=300, limit=9)
    assert heir.attempt.epoch > zombie.attempt.epoch
    gone = in_state(zombie.attempt, AttemptState.TERMINATING)
    assert await store.apply([Change(attempt=(zombie.attempt, gone))]) == [False]
    assert (await store.attempts(attempt.job_id))[0].state is AttemptState.TRAINING


async def test_an_owner_without_an_answer_releases_all_rows_it_may_hold(store: Store) -> None:
    """The leases of all other owners stay."""
    lost, other = [(await running(store))[0] for _ in range(2)]
    (mine,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=1)
    (theirs,) = await store.claim_attempts(Lane.LIVENESS, owner="b", lease_s=HOUR, limit=1)
    assert {mine.attempt.id, theirs.attempt.id} == {lost.id, other.id}
    await store.end_leases(owner="nobody")
    assert not await store.claim_attempts(Lane.LIVENESS, owner="c", lease_s=HOUR, limit=9)
    await store.end_leases(owner="a")
    heir = replace(mine.attempt, detail="read under the lease that was given back")
    unchanged = replace(theirs.attempt, detail="still leased")
    changes = [Change(attempt=(mine.attempt, heir)), Change(attempt=(theirs.attempt, unchanged), due_in_s=HOUR)]
    assert await store.apply(changes) == [False, True]
    (again,) = await store.claim_attempts(Lane.LIVENESS, owner="c", lease_s=HOUR, limit=9)
    assert again.attempt.id == mine.attempt.id
    await store.end_leases(owner="a")  # it is another one's now
    assert not await store.claim_attempts(Lane.LIVENESS, owner="d", lease_s=HOUR, limit=9)


async def test_rows_leased_under_a_clock_that_was_ahead_are_freed(store: Store) -> None:
    """A clock that is set back leaves leases far in the future. These are freed and fenced; short leases stay."""
    await running(store)
    (far,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=24 * HOUR, limit=1)
    await running(store)
    (attempt,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=30, limit=1)
    await submitted(store)
    assert await store.claim_jobs([JobState.QUEUED], owner="a", lease_s=24 * HOUR, limit=1)
    await store.repair_due_times()
    (again,) = await store.claim_attempts(Lane.LIVENESS, owner="b", lease_s=30, limit=9)
    assert again.attempt.id == far.attempt.id
    assert len(await store.claim_jobs([JobState.QUEUED], owner="b", lease_s=30, limit=9)) == 1
    written = [replace(leased.attempt, detail="written under the lease") for leased in (far, attempt)]
    changes = [Change(attempt=(leased.attempt, to)) for leased, to in zip((far, attempt), written, strict=True)]
    assert await store.apply(changes) == [False, True]


async def test_a_lease_is_released_though_a_signal_moved_the_row_to_another_lane(store: Store) -> None:
    attempt, job = await running(store)
    assert await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=1)
    await send(store, "stop", attempt, job)
    assert not await store.claim_attempts(Lane.INTERRUPTION, owner="b", lease_s=HOUR, limit=1)
    await store.end_leases(owner="a")
    assert await store.claim_attempts(Lane.INTERRUPTION, owner="b", lease_s=HOUR, limit=1)


async def test_a_row_is_due_again_after_its_time(timed_store: TimedStore) -> None:
    store = timed_store.store
    await submitted(store)
    job = await claimed_job(store)
    waiting = replace(job, state=JobState.RECOVERING, attempts=1)
    assert await store.apply([Change(job=(job, waiting), due_in_s=600)]) == [True]
    assert not await store.claim_jobs([JobState.RECOVERING], owner="a", lease_s=HOUR, limit=9)
    await timed_store.pass_time(601)
    (again,) = await store.claim_jobs([JobState.QUEUED, JobState.RECOVERING], owner="a", lease_s=HOUR, limit=9)
    assert again.state is JobState.RECOVERING


async def test_released_row_is_due_later_and_only_its_holder_releases_it(timed_store: TimedStore) -> None:
    """A released row is due after the time given and only its holder releases."""
    store = timed_store.store
    attempt, _ = await running(store)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=9)
    await store.release([], [attempt], due_in_s=0)  # as read before the claim: an older epoch
    assert not await store.claim_attempts(Lane.LIVENESS, owner="b", lease_s=HOUR, limit=9)
    await store.release([], [leased.attempt], due_in_s=200)
    assert not await store.claim_attempts(Lane.LIVENESS, owner="b", lease_s=HOUR, limit=9)
    await timed_store.pass_time(201)
    assert await store.claim_attempts(Lane.LIVENESS, owner="b", lease_s=HOUR, limit=9)

    job = await submitted(store)
    held = await claimed_job(store)
    await store.release([job], [], due_in_s=0)
    assert not await store.claim_jobs([JobState.QUEUED], owner="b", lease_s=HOUR, limit=9)
    await store.release([held], [], due_in_s=0)
    assert (await claimed_job(store)).id == job.id


@pytest.mark.parametrize(
    ("state", "lane", "lane_with_signal"),
    [
        (AttemptState.PLANNED, Lane.LAUNCH, Lane.LAUNCH),
        (AttemptState.LAUNCHING, Lane.LAUNCH, Lane.LAUNCH),
        (AttemptState.BOOTING, Lane.LIVENESS, Lane.INTERRUPTION),
        (AttemptState.TRAINING, Lane.LIVENESS, Lane.INTERRUPTION),
        (AttemptState.DRAINING, Lane.INTERRUPTION, Lane.INTERRUPTION),
        (AttemptState.TERMINATING, Lane.TERMINATION, Lane.TERMINATION),
        (AttemptState.ENDED, None, None),
    ],
)
@pytest.mark.parametrize("signal", ["none", "stop", "cap"])
async def test_an_attempt_is_in_one_lane(
    timed_store: TimedStore, state: AttemptState, lane: Lane | None, lane_with_signal: Lane | None, signal: str
) -> None:
    store = timed_store.store
    attempt, job = await running(store, state)
    await send(store, signal, attempt, job)
    claims = {each: await store.claim_attempts(each, owner="a", lease_s=HOUR, limit=9) for each in Lane}
    assert [each for each, leased in claims.items() if leased] == list(
        filter(None, [lane if signal == "none" else lane_with_signal])
    )
    for leased in (leased for claim in claims.values() for leased in claim):
        assert (leased.attempt.id, leased.job.id, leased.job.stop_requested) == (attempt.id, job.id, signal == "stop")


# --------------------------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize("state", [JobState.AWAITING_APPROVAL, JobState.QUEUED, JobState.RECOVERING])
async def test_a_stop_makes_a_waiting_job_due(timed_store: TimedStore, state: JobState) -> None:
    store = timed_store.store
    job = await submitted(store)
    held = await claimed_job(store)
    await store.apply([Change(job=(held, replace(held, state=state)), due_in_s=HOUR)])
    assert not await store.claim_jobs(list(JobState), owner="a", lease_s=HOUR, limit=9)
    stopped = await store.request_stop(job.id, make_event(job, "job.stop_requested"))
    assert stopped is not None
    assert stopped.stop_requested
    (due,) = await store.claim_jobs([JobState.QUEUED], owner="a", lease_s=HOUR, limit=9)
    assert (due.id, due.state, due.stop_requested) == (job.id, state, True)


async def test_a_stop_during_a_lease_makes_the_row_due_when_it_is_given_back(store: Store) -> None:
    await submitted(store)
    held = await claimed_job(store)
    await store.request_stop(held.id, make_event(held))
    assert not await store.claim_jobs([JobState.QUEUED], owner="b", lease_s=HOUR, limit=9)
    await store.apply([Change(job=(held, replace(held, reason="nothing fits")), due_in_s=HOUR)])
    assert (await claimed_job(store)).stop_requested

    attempt, job = await running(store)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=9)
    await store.request_stop(job.id, make_event(job))
    assert not await store.claim_attempts(Lane.INTERRUPTION, owner="b", lease_s=HOUR, limit=9)
    await store.release([], [leased.attempt], due_in_s=HOUR)
    (due,) = await store.claim_attempts(Lane.INTERRUPTION, owner="b", lease_s=HOUR, limit=9)
    assert due.attempt.id == attempt.id


async def test_stop_missed_by_the_ending_attempt_makes_the_job_due(store: Store) -> None:
    """The stop arrives between the read and the write of the attempt's end."""
    _, job = await running(store, AttemptState.TERMINATING)
    (leased,) = await store.claim_attempts(Lane.TERMINATION, owner="a", lease_s=HOUR, limit=9)
    await store.request_stop(job.id, make_event(job))
    ended = in_state(leased.attempt, AttemptState.ENDED)
    to = replace(leased.job, state=JobState.RECOVERING)
    assert await store.apply([Change(attempt=(leased.attempt, ended), job=(leased.job, to), due_in_s=HOUR)]) == [True]
    (due,) = await store.claim_jobs([JobState.RECOVERING], owner="a", lease_s=HOUR, limit=9)
    assert due.stop_requested


async def test_an_admission_carries_an_unseen_stop(store: Store) -> None:
    await submitted(store)
    held = await claimed_job(store)
    await store.request_stop(held.id, make_event(held))
    assert await store.apply([admission(held)]) == [True]
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="a", lease_s=HOUR, limit=9)
    booting = in_state(leased.attempt, AttemptState.BOOTING)
    await store.apply([Change(attempt=(leased.attempt, booting))])
    assert await store.claim_attempts(Lane.INTERRUPTION, owner="a", lease_s=HOUR, limit=9)


async def test_a_stop_is_recorded_once_and_never_after_the_end(store: Store) -> None:
    job = await submitted(store)
    for _ in range(2):
        await store.request_stop(job.id, make_event(job, "job.stop_requested"))
    assert [e.kind for e in await store.events(job.id, after=0, limit=9)] == ["job.stop_requested"]
    held = await claimed_job(store)
    done = replace(held, state=JobState.CANCELLED, finished_at=START)
    assert await store.apply([Change(job=(held, done))]) == [True]

    other = await submitted(store)
    held = await claimed_job(store)
    await store.apply([Change(job=(held, replace(held, state=JobState.FAILED, finished_at=START)))])
    late = await store.request_stop(other.id, make_event(other))
    assert late is not None
    assert not late.stop_requested
    assert not await store.events(other.id, after=0, limit=9)
    assert await store.request_stop(JobId("b" * 13), make_event(job)) is None
