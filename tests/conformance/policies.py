"""Policies and admissions for the store's contract tests."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

from broker.domain.job import AttemptState, Job, JobState
from broker.domain.money import LedgerKind
from broker.domain.policy import Policy
from broker.domain.tenancy import Tenant
from broker.ports import Change, Charge, Lane, Store
from tests.conformance.samples import (
    HOUR,
    START,
    admission,
    claimed_job,
    in_state,
    submitted,
)

ANN = Tenant(team="default", owner="ann")
EVE = Tenant(team="web", owner="eve")


def policy(**rules: Any) -> Policy:
    return Policy.model_validate({"name": "limits", "team": "default", **rules})


def budget(limit: str, **more: Any) -> dict[str, Any]:
    return {"limit_usd": limit, "per": "month", "window": "rolling", **more}


async def admit(store: Store, **changes: Any) -> bool:
    """Submit a job, and return True if its attempt, which reserves $9.50, was admitted."""
    await submitted(store, **changes)
    job = await claimed_job(store)
    (held,) = await store.apply([admission(job)])
    if not held:  # out of the way of the next one
        await store.apply([Change(job=(job, replace(job, state=JobState.CAPPED)))])
    return held


async def standing(store: Store) -> Any:
    _, (one,) = await store.budgets()
    return one.usage


async def charge(store: Store, job: Job, usd: str, kind: LedgerKind = LedgerKind.CHARGE) -> None:
    (attempt,) = await store.attempts(job.id)
    since = attempt.charged_to
    to = (since or START) + timedelta(seconds=60)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=since, to=to, usd=Decimal(usd), kind=kind)
    assert await store.charge([charge]) == [True]


async def end(store: Store, job: Job) -> None:
    (leased,) = [
        attempt
        for lane in Lane
        for attempt in await store.claim_attempts(lane, owner="x", lease_s=HOUR, limit=99)
        if attempt.job.id == job.id
    ]
    ended = in_state(leased.attempt, AttemptState.ENDED)
    over = replace(leased.job, state=JobState.FAILED, finished_at=START)
    assert await store.apply([Change(attempt=(leased.attempt, ended), job=(leased.job, over))]) == [True]
