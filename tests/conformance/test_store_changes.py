"""Store contract: the effects of one change on rows and money, in memory and PostgreSQL."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from broker.domain.errors import StoreError
from broker.domain.ids import JobId
from broker.domain.job import AttemptState, Handle, JobState, Reason, Signal
from broker.domain.money import LedgerEntry, LedgerKind
from broker.ports import Change, Charge, Lane, Store
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
from trainer.contract.documents import CheckpointRef, Final, Heartbeat, Outcome

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
        beat=Heartbeat(attempt=leased.attempt.id, boot="b", seq=7, step=20, loss=2.25, checkpoint=checkpoint),
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


async def test_launching_broker_reports_completion_while_another_leases_the_row(store: Store) -> None:
    """The launching broker reports that its launcher has ended, while another broker holds the lease."""
    await running(store, AttemptState.LAUNCHING)
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="a", lease_s=HOUR, limit=9)
    sent = replace(in_state(leased.attempt, AttemptState.TERMINATING), launched_by="a")
    assert await store.apply([Change(attempt=(leased.attempt, sent))]) == [True]
    (read,) = await store.unproven_launches()
    assert (read.id, read.launched_by) == (sent.id, "a")
    (attempt,) = await store.claim_attempts(Lane.TERMINATION, owner="b", lease_s=HOUR, limit=9)
    await store.mark_launchers_finished([replace(read, launched_by="another")])
    assert len(await store.unproven_launches()) == 1
    await store.mark_launchers_finished([read])
    assert await store.unproven_launches() == []
    # The other broker's lease still holds, and its write does not reset the completion.
    assert await store.apply([Change(attempt=(attempt.attempt, replace(attempt.attempt, destroy_failures=3)))]) == [
        True
    ]
    (after,) = await store.attempts(read.job_id)
    assert (after.launched_by, after.destroy_failures) == ("", 3)


async def test_no_launcher_completes_while_its_create_may_repeat(store: Store) -> None:
    await running(store, AttemptState.LAUNCHING)
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="a", lease_s=HOUR, limit=9)
    sent = replace(leased.attempt, launched_by="a")
    assert await store.apply([Change(attempt=(leased.attempt, sent))]) == [True]
    assert await store.unproven_launches() == []
    await store.mark_launchers_finished([sent])
    assert [attempt.launched_by for attempt in await store.attempts(sent.job_id)] == ["a"]


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


async def test_an_ended_attempt_allows_the_next_attempt(store: Store) -> None:
    _, job = await running(store, AttemptState.TERMINATING)
    (leased,) = await store.claim_attempts(Lane.TERMINATION, owner="a", lease_s=HOUR, limit=9)
    ended = in_state(leased.attempt, AttemptState.ENDED)
    to = replace(leased.job, attempts=2)
    change = Change(attempt=(leased.attempt, ended), job=(leased.job, to), admit=make_attempt(job, 2))
    assert await store.apply([change]) == [True]
    assert [(a.number, a.live) for a in await store.attempts(job.id)] == [(1, False), (2, True)]


async def test_a_change_is_atomic(store: Store) -> None:
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


async def test_row_that_breaks_a_rule_is_refused_and_the_others_are_written(store: Store) -> None:
    """A row that breaks a rule is refused with an error, and the others are written."""
    _, job = await running(store, AttemptState.PLANNED)
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="a", lease_s=HOUR, limit=9)
    await submitted(store)
    held = await claimed_job(store)
    broken = Change(attempt=(leased.attempt, replace(leased.attempt, state=AttemptState.LAUNCHING)))
    with pytest.raises(StoreError, match="attempts_create_sent"):
        await store.apply([broken, admission(held)])
    assert (await store.attempts(job.id))[0].state is AttemptState.PLANNED
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
    stored_job = await store.job(job.id)
    assert stored_job is not None
    assert (after.charged_usd, after.charged_to, stored_job.spent_usd) == (
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
    stored_job = await store.job(job.id)
    assert stored_job is not None
    assert stored_job.spent_usd == 1


async def test_the_cap_signal_is_never_taken_back(store: Store) -> None:
    attempt, job = await running(store)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(1), signal=Signal.CAP)
    await store.charge([charge, replace(charge, since=START, to=START + timedelta(hours=1), signal=None)])
    assert (await store.attempts(job.id))[0].signal is Signal.CAP


async def test_an_adjustment_counts_into_what_was_spent(store: Store) -> None:
    attempt, job = await running(store, AttemptState.ENDED)
    late = Charge(
        attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal("0.5"),
        kind=LedgerKind.ADJUSTMENT, note="seen after its end",
    )  # fmt: skip
    assert list(await store.charge([late, late])) == [True, False]
    stored_job = await store.job(job.id)
    assert stored_job is not None
    assert stored_job.spent_usd == (await store.attempts(job.id))[0].charged_usd == Decimal("0.5")
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
