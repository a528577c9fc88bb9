"""Caps and charges that change between a broker's read and its write: every store refuses to spend money twice."""

from dataclasses import replace
from decimal import Decimal

from broker.domain.job import AttemptState, JobState
from broker.domain.money import ZERO, LedgerKind
from broker.ports import Change, Charge, Lane, Store
from tests.conformance.samples import HOUR, START, admission, claimed_job, in_state, make_event, running, submitted


async def test_a_charge_that_covers_no_time_is_made_once(store: Store) -> None:
    """Two writers have read the same attempt: billing and the last charge, or two brokers."""
    attempt, job = await running(store)
    hour = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=START, usd=Decimal(1))
    traffic = replace(hour, since=START, usd=ZERO, traffic_usd=Decimal("0.25"))
    assert await store.charge([hour]) == [True]
    assert [await store.charge([traffic]), await store.charge([traffic])] == [[True], [False]]
    (after,) = await store.attempts(job.id)
    assert after.charged_usd == Decimal("1.25")
    spent = [entry.usd for entry in await store.ledger(job.id) if entry.kind is LedgerKind.CHARGE]
    assert sum(spent, ZERO) == Decimal("1.25")
    assert after.charged_to is not None
    assert await store.charge([replace(traffic, since=after.charged_to)]) == [True]


async def test_nothing_is_admitted_by_a_cap_that_was_raised_meanwhile(store: Store) -> None:
    """The attempt would reserve the old cap and spend up to the new one."""
    await submitted(store)
    job = await claimed_job(store)
    await store.raise_cap(job.id, Decimal(100), make_event(job))
    assert await store.apply([admission(job)]) == [False]
    await store.release([job], [], due_in_s=HOUR)
    again = await claimed_job(store)
    assert again.cap_usd == 100
    assert await store.apply([admission(again)]) == [True]


async def test_a_queued_job_whose_cap_was_raised_meanwhile_is_not_capped(store: Store) -> None:
    await submitted(store)
    job = await claimed_job(store)
    await store.raise_cap(job.id, Decimal(100), make_event(job))
    capped = replace(job, state=JobState.CAPPED, finished_at=START)
    assert await store.apply([Change(job=(job, capped))]) == [False]
    await store.release([job], [], due_in_s=HOUR)
    assert (await claimed_job(store)).state is JobState.QUEUED


async def test_a_job_whose_cap_was_raised_while_it_was_settled_is_not_capped(store: Store) -> None:
    _, job = await running(store, AttemptState.TERMINATING)
    (leased,) = await store.claim_attempts(Lane.TERMINATION, owner="t", lease_s=HOUR, limit=1)
    await store.raise_cap(job.id, Decimal(100), make_event(job))
    ended = in_state(leased.attempt, AttemptState.ENDED)
    capped = replace(leased.job, state=JobState.CAPPED, finished_at=START)
    assert await store.apply([Change(attempt=(leased.attempt, ended), job=(leased.job, capped))]) == [False]
    now = await store.job(job.id)
    assert now is not None
    goes_on = replace(now, state=JobState.RECOVERING)
    assert await store.apply([Change(attempt=(leased.attempt, ended), job=(now, goes_on))]) == [True]


async def test_data_made_after_a_raised_cap_is_not_marked_deleted(store: Store) -> None:
    """Earlier checkpoints and logs of the job were deleted."""
    await submitted(store)
    job = await claimed_job(store)
    await store.apply([Change(job=(job, replace(job, state=JobState.CAPPED, finished_at=START)))])
    marked = await store.delete_data(job.id, ["artifacts", "checkpoints", "logs"], make_event(job))
    assert marked is not None
    assert set(marked.deleted) == {"artifacts", "checkpoints", "logs"}
    raised = await store.raise_cap(job.id, Decimal(100), make_event(job))
    assert raised is not None
    assert (raised.state, raised.deleted) == (JobState.QUEUED, {})
