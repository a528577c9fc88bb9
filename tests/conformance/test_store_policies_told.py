"""Reports of a store on policies: approvals, thresholds, the queue and the history."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

from broker.domain.job import JobState
from broker.domain.notifications import Notice
from broker.policy.budgets import Reached, reached
from broker.policy.windows import QUARTER, quarter
from broker.ports import AuditFilter, Change, Store
from tests.conformance.conftest import TimedStore
from tests.conformance.policies import ANN, EVE, budget, charge, end, policy
from tests.conformance.samples import (
    HOUR,
    START,
    admission,
    claimed_job,
    make_event,
    running,
    submitted,
)

# ------------------------------------------------------------------------------------------------------------ approval


async def test_an_approval_frees_the_job_and_is_remembered(store: Store) -> None:
    await store.put_policy(policy(approval_above_usd="5"))
    await submitted(store)
    job = await claimed_job(store)
    assert await store.apply([admission(job)]) == [False]
    waiting = replace(job, state=JobState.AWAITING_APPROVAL, reason="waits for approval")
    assert await store.apply([Change(job=(job, waiting), due_in_s=HOUR)]) == [True]
    assert await store.claim_jobs([JobState.QUEUED], owner="p", lease_s=HOUR, limit=9) == []
    approved = await store.as_tenant(ANN).approve(job.id, Decimal(10), make_event(job, "job.approved"))
    assert approved is not None
    assert (approved.state, approved.reason, approved.approved_usd) == (JobState.QUEUED, "", 10)
    again = await claimed_job(store)
    assert await store.apply([admission(again)]) == [True]
    (entry,) = await store.audit(AuditFilter(action="job.approve"))
    assert (entry.actor, entry.target, entry.usd) == ("ann", job.id, 10)
    assert [e.kind for e in await store.events(job.id, after=0, limit=9)] == ["job.approved", "attempt.planned"]


async def test_an_approval_of_another_cap_leaves_the_job_unchanged(store: Store) -> None:
    job = await submitted(store)
    other = await store.approve(job.id, Decimal(20), make_event(job), cap_usd=job.cap_usd + 1)
    assert (other is not None, other and other.approved_usd) == (True, None)
    same = await store.approve(job.id, Decimal(20), make_event(job), cap_usd=job.cap_usd)
    assert same is not None
    assert same.approved_usd == 20
    assert len(await store.events(job.id, after=0, limit=9)) == 1


async def test_an_approval_is_never_lowered_and_ignored_for_a_finished_job(store: Store) -> None:
    job = await submitted(store)
    await store.approve(job.id, Decimal(20), make_event(job))
    same = await store.approve(job.id, Decimal(15), make_event(job))
    assert same is not None
    assert same.approved_usd == 20
    assert len(await store.events(job.id, after=0, limit=9)) == 1
    held = await claimed_job(store)
    await store.apply([Change(job=(held, replace(held, state=JobState.FAILED, finished_at=START)))])
    over = await store.approve(job.id, Decimal(30), make_event(job))
    assert over is not None
    assert over.approved_usd == 20


# ---------------------------------------------------------------------------------------------------------- thresholds


async def crossed(store: Store) -> tuple[int, Reached]:
    _, (one,) = await store.budgets()
    return one.id, next(reached(one.policy, one.usage))


async def test_a_threshold_is_reported_once_a_window_by_the_first_broker(store: Store) -> None:
    share = [{"at": "0.1", "action": "notify"}]
    await store.put_policy(policy(budgets=[budget("20", thresholds=share)]))
    _, job = await running(store)
    await charge(store, job, "3")
    key, found = await crossed(store)
    now, _ = await store.budgets()

    def tell(number: int, since: Any) -> Any:
        notice = Notice(id=f"budget-{number}", kind="budget.threshold", message="10 %", team="default")
        return store.post_threshold(key, found, notice, since=since)

    since = now - timedelta(days=1)
    assert sorted(await asyncio.gather(*(tell(n, since) for n in range(4)))) == [False, False, False, True]
    later = now + timedelta(days=1)
    assert await tell(9, later)
    await store.put_policy(policy(budgets=[budget("25", thresholds=share)]))
    _, anew = await crossed(store)  # of another limit
    assert await store.post_threshold(
        key, anew, Notice(id="anew", kind="budget.threshold", message="10 %", team="default"), since=since
    )
    await store.delete_policy("default", "limits")


# -------------------------------------------------------------------------------------------------------------- queue


async def test_the_queue_is_ordered_by_priority_and_then_by_age(timed_store: TimedStore) -> None:
    store, made = timed_store.store, []
    for priority in (0, 5, -5, 5, 0):
        job = await submitted(store, priority=priority)
        made.append((-priority, len(made), job.id))
        await timed_store.pass_time(1)
    first = await store.claim_jobs([JobState.QUEUED], owner="p", lease_s=HOUR, limit=3)
    rest = await store.claim_jobs([JobState.QUEUED], owner="p", lease_s=HOUR, limit=3)
    assert [job.id for job in (*first, *rest)] == [own for _, _, own in sorted(made)]


# ---------------------------------------------------------------------------------------------------------- the past


async def test_the_past_is_reported_by_attempt_and_quarter_hour(store: Store) -> None:
    await store.put_team("web", "")
    attempt, job = await running(store)
    await charge(store, job, "1")
    await charge(store, job, "2.5")
    _, other = await running(store, team="web", owner="eve")
    now, _ = await store.budgets()
    past_jobs = await store.past(now - timedelta(days=30))
    found = {one.job_id: one for one in past_jobs.attempts}
    assert found.keys() == {job.id, other.id}
    one = found[job.id]
    assert (one.number, one.team, one.owner, one.gpus, one.reserved_usd) == (
        1,
        "default",
        "ann",
        1,
        attempt.reserved_usd,
    )
    assert sum(usd for _, usd in one.charges) == Decimal("3.5")
    assert all(at == quarter(at) and now - QUARTER < at + QUARTER for at, _ in one.charges)
    assert [one.job_id for one in (await store.as_tenant(EVE).past(now - timedelta(days=30))).attempts] == [other.id]
    await end(store, job)
    assert [one.job_id for one in (await store.past(START + timedelta(days=9))).attempts] == [other.id]
