"""What every store does, whatever it is made of."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise

import pytest

from broker.domain.errors import IdempotencyConflict, StoreError
from broker.domain.ids import Installation, JobId
from broker.domain.job import AttemptState, Handle, Job, JobState, LedgerEntry, LedgerKind, Reason, Signal
from broker.domain.offer import HostFacts
from broker.domain.tenancy import Tenant
from broker.ports import Change, Charge, JobFilter, Lane, Store, Token, Upload
from tests.conformance.conftest import House
from tests.conformance.samples import (
    HOUR,
    START,
    admission,
    claimed_job,
    in_state,
    make_attempt,
    make_event,
    make_job,
    running,
    submitted,
)
from trainer.contract.rendezvous import Beat, CheckpointRef, Final, Outcome

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


async def test_a_lease_expires_and_the_epoch_fences_the_zombie(house: House) -> None:
    store = house.store
    await submitted(store)
    zombie = await claimed_job(store, lease_s=30)
    assert not await store.claim_jobs([JobState.QUEUED], owner="b", lease_s=30, limit=9)
    await house.pass_time(31)
    heir = await claimed_job(store, lease_s=30)
    assert heir.epoch > zombie.epoch
    late = Change(job=(zombie, replace(zombie, reason="zombie")))
    assert await store.apply([late, Change(job=(heir, replace(heir, reason="heir")))]) == [False, True]
    found = await store.job(heir.id)
    assert found is not None
    assert found.reason == "heir"


async def test_an_expired_attempt_lease_fences_the_zombie(house: House) -> None:
    store = house.store
    attempt, _ = await running(store)
    (zombie,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=30, limit=9)
    await house.pass_time(31)
    (heir,) = await store.claim_attempts(Lane.LIVENESS, owner="b", lease_s=30, limit=9)
    assert heir.attempt.epoch > zombie.attempt.epoch
    gone = in_state(zombie.attempt, AttemptState.TERMINATING)
    assert await store.apply([Change(attempt=(zombie.attempt, gone))]) == [False]
    assert (await store.attempts(attempt.job_id))[0].state is AttemptState.TRAINING


async def test_a_row_is_due_again_after_its_time(house: House) -> None:
    store = house.store
    await submitted(store)
    job = await claimed_job(store)
    waiting = replace(job, state=JobState.RECOVERING, attempts=1)
    assert await store.apply([Change(job=(job, waiting), due_in_s=60)]) == [True]
    assert not await store.claim_jobs([JobState.RECOVERING], owner="a", lease_s=1, limit=9)
    await house.pass_time(61)
    (again,) = await store.claim_jobs([JobState.QUEUED, JobState.RECOVERING], owner="a", lease_s=1, limit=9)
    assert again.state is JobState.RECOVERING


async def test_a_released_row_is_due_after_the_time_given_and_only_its_holder_releases(house: House) -> None:
    store = house.store
    attempt, _ = await running(store)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=9)
    await store.release([], [attempt], due_in_s=0)  # as read before the claim: an older epoch
    assert not await store.claim_attempts(Lane.LIVENESS, owner="b", lease_s=HOUR, limit=9)
    await store.release([], [leased.attempt], due_in_s=20)
    assert not await store.claim_attempts(Lane.LIVENESS, owner="b", lease_s=HOUR, limit=9)
    await house.pass_time(21)
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
        (AttemptState.INTENDED, Lane.LAUNCH, Lane.LAUNCH),
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
    house: House, state: AttemptState, lane: Lane | None, lane_with_signal: Lane | None, signal: str
) -> None:
    store = house.store
    attempt, job = await running(store, state)
    if signal == "stop":
        await store.request_stop(job.id, make_event(job))
    if signal == "cap":
        due = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(0), signal=Signal.CAP)
        assert await store.charge([due]) == [True]
    claims = {each: await store.claim_attempts(each, owner="a", lease_s=HOUR, limit=9) for each in Lane}
    assert [each for each, leased in claims.items() if leased] == list(
        filter(None, [lane if signal == "none" else lane_with_signal])
    )
    for leased in (leased for claim in claims.values() for leased in claim):
        assert (leased.attempt.id, leased.job.id, leased.job.stop_requested) == (attempt.id, job.id, signal == "stop")


# --------------------------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize("state", [JobState.AWAITING_APPROVAL, JobState.QUEUED, JobState.RECOVERING])
async def test_a_stop_makes_a_waiting_job_due(house: House, state: JobState) -> None:
    store = house.store
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


async def test_a_stop_that_the_ending_of_an_attempt_did_not_see_makes_the_job_due(store: Store) -> None:
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


# ------------------------------------------------------------------------------------------------------------- changes


async def test_an_attempt_keeps_everything_that_its_controllers_write(store: Store) -> None:
    _, job = await running(store, AttemptState.BOOTING)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=9)
    checkpoint = CheckpointRef(manifest="checkpoints/x/manifest.json", step=20, save_s=1.5)
    to = replace(
        leased.attempt,
        state=AttemptState.TERMINATING,
        reason=Reason.COMPLETED,
        detail="done",
        launched_by="host/1",
        handles=(Handle(provider="simulated", id="i-1", name=leased.attempt.name, region="eu"),),
        running_at=START + timedelta(seconds=0.5),
        booted_at=START + timedelta(seconds=1),
        first_beat_at=START + timedelta(seconds=2),
        draining_since=START + timedelta(seconds=3),
        terminating_since=START + timedelta(seconds=4),
        destroy_failures=2,
        absent_at=START + timedelta(seconds=5),
        beat=Beat(attempt=leased.attempt.id, boot="b", seq=7, step=20, loss=2.25, checkpoint=checkpoint),
        final=Final(attempt=leased.attempt.id, outcome=Outcome.COMPLETED, step=45, checkpoint=checkpoint),
    )
    assert await store.apply([Change(attempt=(leased.attempt, to))]) == [True]
    assert await store.attempts(job.id) == [to]
    assert await store.attempts_by_id([to.id, make_attempt(make_job()).id]) == {to.id: to}
    (live,) = await store.live_attempts()
    assert live.attempt == to
    assert live.job.id == job.id


async def test_controllers_do_not_overwrite_billing_and_the_api(store: Store) -> None:
    attempt, job = await running(store)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=9)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(1), signal=Signal.CAP)
    await store.charge([charge])
    await store.raise_cap(job.id, Decimal(20), make_event(job))
    await store.request_stop(job.id, make_event(job))
    ended = in_state(leased.attempt, AttemptState.ENDED)
    to = replace(leased.job, state=JobState.RECOVERING, retries_used=1)
    assert await store.apply([Change(attempt=(leased.attempt, ended), job=(leased.job, to))]) == [True]
    found, (after,) = await store.job(job.id), await store.attempts(job.id)
    assert found is not None
    assert (found.spent_usd, found.cap_usd, found.stop_requested, found.retries_used) == (1, 20, True, 1)
    assert (after.charged_usd, after.charged_to, after.signal) == (1, START, Signal.CAP)


async def test_a_job_has_one_live_attempt(store: Store) -> None:
    await running(store)
    _, job = await running(store)
    other = await submitted(store)
    held = await claimed_job(store)
    second = Change(admit=make_attempt(job, 2), events=(make_event(job),))
    assert await store.apply([second, admission(held)]) == [False, True]
    assert [a.number for a in await store.attempts(job.id)] == [1]
    assert len(await store.events(job.id, after=0, limit=9)) == 1
    assert [a.number for a in await store.attempts(other.id)] == [1]


async def test_an_attempt_that_ends_makes_room_for_the_next(store: Store) -> None:
    _, job = await running(store, AttemptState.TERMINATING)
    (leased,) = await store.claim_attempts(Lane.TERMINATION, owner="a", lease_s=HOUR, limit=9)
    ended = in_state(leased.attempt, AttemptState.ENDED)
    to = replace(leased.job, attempts=2)
    change = Change(attempt=(leased.attempt, ended), job=(leased.job, to), admit=make_attempt(job, 2))
    assert await store.apply([change]) == [True]
    assert [(a.number, a.live) for a in await store.attempts(job.id)] == [(1, False), (2, True)]


async def test_a_change_happens_whole_or_not_at_all(store: Store) -> None:
    attempt, job = await running(store, AttemptState.TERMINATING)
    (leased,) = await store.claim_attempts(Lane.TERMINATION, owner="a", lease_s=HOUR, limit=9)
    good, _ = await running(store)
    (fine,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=9)
    ended = in_state(leased.attempt, AttemptState.ENDED)
    outdated = replace(leased.job, attempts=7)
    entry = LedgerEntry(job_id=job.id, attempt_id=attempt.id, kind=LedgerKind.RELEASE, usd=Decimal(1))
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=START, to=START, usd=Decimal(1))
    step = Change(attempt=(leased.attempt, ended), ledger=(entry,), events=(make_event(job),))
    changes = [
        replace(step, job=(outdated, replace(outdated, state=JobState.RECOVERING))),
        replace(step, charge=charge),
        Change(attempt=(fine.attempt, in_state(fine.attempt, AttemptState.DRAINING))),
    ]
    ledger, events = await store.ledger(job.id), await store.events(job.id, after=0, limit=99)
    assert await store.apply(changes) == [False, False, True]
    assert await store.attempts(job.id) == [leased.attempt]
    assert await store.job(job.id) == job
    assert (await store.ledger(job.id), await store.events(job.id, after=0, limit=99)) == (ledger, events)
    assert (await store.attempts(good.job_id))[0].state is AttemptState.DRAINING


async def test_a_row_that_breaks_a_rule_is_refused_aloud_and_the_others_are_written(store: Store) -> None:
    _, job = await running(store, AttemptState.INTENDED)
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="a", lease_s=HOUR, limit=9)
    await submitted(store)
    held = await claimed_job(store)
    broken = Change(attempt=(leased.attempt, replace(leased.attempt, state=AttemptState.LAUNCHING)))
    with pytest.raises(StoreError, match="attempts_create_sent"):
        await store.apply([broken, admission(held)])
    assert (await store.attempts(job.id))[0].state is AttemptState.INTENDED
    assert len(await store.attempts(held.id)) == 1


async def test_changes_of_one_row_in_a_batch_follow_each_other(store: Store) -> None:
    attempt, job = await running(store)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=9)
    draining = in_state(leased.attempt, AttemptState.DRAINING)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(1))
    changes = [
        Change(attempt=(leased.attempt, draining)),
        Change(attempt=(draining, in_state(draining, AttemptState.TERMINATING))),
        Change(attempt=(leased.attempt, in_state(leased.attempt, AttemptState.ENDED))),
        Change(charge=charge),
        Change(charge=charge),
    ]
    assert await store.apply(changes) == [True, True, False, True, False]
    (after,) = await store.attempts(job.id)
    assert (after.state, after.charged_usd) == (AttemptState.TERMINATING, 1)


async def test_nul_and_lone_surrogates_do_not_reach_the_rows(store: Store) -> None:
    _, job = await running(store)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=9)
    to = replace(in_state(leased.attempt, AttemptState.DRAINING), detail="a\0b\ud800")
    event = make_event(job, message="c\0d")
    assert await store.apply([Change(attempt=(leased.attempt, to), events=(event,))]) == [True]
    assert (await store.attempts(job.id))[0].detail == "a\ufffdb?"
    assert (await store.events(job.id, after=0, limit=9))[-1].message == "c\ufffdd"


# --------------------------------------------------------------------------------------------------------------- money


async def test_a_charge_is_made_once(store: Store) -> None:
    attempt, job = await running(store)
    first = Charge(
        attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal("0.1"), event=make_event(job, "spend.x")
    )
    later = replace(first, since=START, to=START + timedelta(hours=1), usd=Decimal("0.020001"), event=None)
    nothing = replace(later, since=later.to, to=later.to + timedelta(hours=1), usd=Decimal(0))
    assert await store.charge([first]) == [True]
    assert await store.charge([first, later]) == [False, True]
    assert await store.charge([nothing]) == [True]
    (after,) = await store.attempts(job.id)
    found = await store.job(job.id)
    assert found is not None
    assert (after.charged_usd, after.charged_to, found.spent_usd) == (
        Decimal("0.120001"),
        nothing.to,
        Decimal("0.120001"),
    )
    charges = [e.usd for e in await store.ledger(job.id) if e.kind is LedgerKind.CHARGE]
    assert charges == [Decimal("0.1"), Decimal("0.020001")]
    assert [e.kind for e in await store.events(job.id, after=1, limit=9)] == ["spend.x"]
    with pytest.raises(StoreError):
        await store.charge([replace(nothing, since=nothing.to, usd=Decimal(-1))])


async def test_racing_brokers_charge_once(store: Store) -> None:
    attempt, job = await running(store)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(1))
    answers = await asyncio.gather(*(store.charge([charge]) for _ in range(8)))
    assert sorted(ok for (ok,) in answers) == [False] * 7 + [True]
    found = await store.job(job.id)
    assert found is not None
    assert found.spent_usd == 1


async def test_the_cap_signal_is_never_taken_back(store: Store) -> None:
    attempt, job = await running(store)
    near = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(1), signal=Signal.CAP)
    await store.charge([near, replace(near, since=START, to=START + timedelta(hours=1), signal=None)])
    assert (await store.attempts(job.id))[0].signal is Signal.CAP


async def test_an_adjustment_counts_into_what_was_spent(store: Store) -> None:
    attempt, job = await running(store, AttemptState.ENDED)
    late = Charge(
        attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal("0.5"),
        kind=LedgerKind.ADJUSTMENT, note="seen after its end",
    )  # fmt: skip
    assert list(await store.charge([late, late])) == [True, False]
    found = await store.job(job.id)
    assert found is not None
    assert found.spent_usd == (await store.attempts(job.id))[0].charged_usd == Decimal("0.5")
    assert (await store.ledger(job.id))[-1] == LedgerEntry(
        job_id=job.id, attempt_id=attempt.id, kind=LedgerKind.ADJUSTMENT, usd=Decimal("0.5"), note="seen after its end"
    )


async def test_a_higher_cap_wakes_a_capped_job(store: Store) -> None:
    job = await submitted(store)
    held = await claimed_job(store)
    capped = replace(held, state=JobState.CAPPED, finished_at=START, reason="cap reached")
    await store.apply([Change(job=(held, capped))])
    for cap in (Decimal(9), Decimal(10)):
        same = await store.raise_cap(job.id, cap, make_event(job))
        assert same is not None
        assert (same.cap_usd, same.state) == (10, JobState.CAPPED)
    raised = await store.raise_cap(job.id, Decimal(11), make_event(job, "job.cap_raised"))
    assert raised is not None
    assert (raised.cap_usd, raised.state, raised.finished_at) == (11, JobState.QUEUED, None)
    assert [e.kind for e in await store.events(job.id, after=0, limit=9)] == ["job.cap_raised"]
    assert (await claimed_job(store)).id == job.id
    assert await store.raise_cap(JobId("b" * 13), Decimal(11), make_event(job)) is None


async def test_a_higher_cap_makes_a_queued_job_due(store: Store) -> None:
    job = await submitted(store)
    held = await claimed_job(store)
    await store.apply([Change(job=(held, replace(held, reason="nothing fits")), due_in_s=HOUR)])
    await store.raise_cap(job.id, Decimal(11), make_event(job))
    assert (await claimed_job(store)).id == job.id


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
    job = await submitted(store)
    topics = ("jobs", f"job/{job.id}", "job/other")
    waits = [asyncio.create_task(store.wait(topic, limit)) for topic, limit in zip(topics, (20, 20, 0), strict=True)]
    await asyncio.sleep(0)
    while not (waits[0].done() and waits[1].done()):
        await store.apply([Change(events=(make_event(job),))])
        await submitted(store)
        await asyncio.sleep(0)
    assert [await wait for wait in waits] == [True, True, False]


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


async def test_blocked_offers_come_back(house: House) -> None:
    store = house.store
    await store.block_offer("a", "sold out", for_s=30)
    await store.block_offer("b", "quota", for_s=30)
    await store.block_offer("b", "still no quota", for_s=90)
    assert await store.blocked_offers() == {"a": "sold out", "b": "still no quota"}
    await house.pass_time(31)
    assert await store.blocked_offers() == {"b": "still no quota"}


async def test_what_ended_at_a_host_is_found_by_its_reason(house: House) -> None:
    store = house.store
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
    await house.pass_time(2 * HOUR)
    assert await store.ended_at_host(key, [Reason.PREEMPTED], within_s=HOUR / 2, limit=9) == []


async def test_tokens_are_found_by_their_hash(store: Store) -> None:
    token = Token(id="t1", owner="ann", scopes=("jobs:read", "jobs:write"), created_at=START, note="laptop")
    await store.put_token(token, "ff" * 32)
    assert await store.token("ff" * 32) == token
    assert await store.token("00" * 32) is None
    assert await store.tokens() == [token]
    assert [await store.delete_token("t1"), await store.delete_token("t1")] == [True, False]
    assert await store.token("ff" * 32) is None


async def test_secrets_and_uploads_belong_to_their_owner(house: House) -> None:
    store = house.store.as_tenant(Tenant(team="default", owner="ann"))
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


async def test_a_database_belongs_to_one_installation(store: Store) -> None:
    answers = await asyncio.gather(*(store.installation(Installation(name)) for name in ("aaaa", "bbbb", "cccc")))
    assert len(set(answers)) == 1
    assert await store.installation(Installation("dddd")) == answers[0]
    await store.ping()
