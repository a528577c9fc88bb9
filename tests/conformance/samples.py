"""Jobs and attempts for the store's tests."""

import asyncio
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from broker.domain.ids import Installation, attempt_id, instance_name, job_id
from broker.domain.job import Attempt, AttemptState, Event, Job, JobState, Reason
from broker.domain.money import LedgerEntry, LedgerKind
from broker.domain.offer import Offer, OfferVerdict, QuoteLine
from broker.domain.spec import JobSpec
from broker.domain.workload import MemoryNeed, ModelShape, Workload
from broker.ports import Change, Lane, Store

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = 3600.0


class ManualClock:
    """A clock that advances only when a test moves it. Its sleep is the loop's, for time-outs."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return (self.time - START).total_seconds()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def make_job(**changes: Any) -> Job:
    labels, priority = changes.pop("labels", {}), changes.pop("priority", 0)
    spec = JobSpec.model_validate(
        {"name": "tune", "cap_usd": "10", "script": {"code": "folder", "command": ["python", "x.py"]},
         "labels": labels, "priority": priority}
    )  # fmt: skip
    shape = ModelShape(
        name="m", family="llama", layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocabulary=32,
        tied_embeddings=True, parameters=1000, known=True,
    )  # fmt: skip
    values: dict[str, Any] = {
        "id": job_id(os.urandom(9)),
        "owner": "ann",
        "spec": spec,
        "workload": Workload(shape=shape, method="lora", steps=45),
        "created_at": START,
        "cap_usd": Decimal(10),
    }
    return Job(**values | changes)


def make_line() -> QuoteLine:
    offer = Offer(
        id="sim/alpha/eu/l40s/spot", provider="simulated", cloud="alpha", region="eu", instance_type="l40s",
        accelerator="l40s", gpus=1, gpu_memory_bytes=48 << 30, vcpus=8, ram_bytes=64 << 30, disk_bytes=100 << 30,
        spot=True, usd_per_hour=Decimal("0.731234"), seen_at=START,
    )  # fmt: skip
    need = MemoryNeed(
        weights=1, gradients=2, optimizer=3, activations=4, logits=5, context=6, margin=0.1, source="form"
    )
    return QuoteLine(
        offer=offer, verdict=OfferVerdict.KEPT, reason="fits", memory=need, hours_p50=0.5, usd_p50=Decimal("0.4")
    )


def make_attempt(job: Job, number: int = 1, **changes: Any) -> Attempt:
    own = attempt_id(job.id, number)
    values: dict[str, Any] = {
        "id": own,
        "job_id": job.id,
        "number": number,
        "name": instance_name(Installation("abcd"), own),
        "line": make_line(),
        "created_at": START,
        "reserved_usd": Decimal("9.5"),
        "resume_from": ("checkpoints/a/manifest.json",),
    }
    return Attempt(**values | changes)


def in_state(attempt: Attempt, state: AttemptState) -> Attempt:
    """Return `attempt` with the fields that the state requires."""
    sent = None if state is AttemptState.PLANNED else START
    leaving = state in (AttemptState.DRAINING, AttemptState.TERMINATING, AttemptState.ENDED)
    return replace(
        attempt,
        state=state,
        create_sent_at=sent,
        reason=Reason.PREEMPTED if leaving else None,
        ended_at=START + timedelta(hours=1) if state is AttemptState.ENDED else None,
    )


def make_event(job: Job, kind: str = "job.note", **changes: Any) -> Event:
    return replace(Event(job_id=job.id, kind=kind, message="something happened"), **changes)


async def submitted(store: Store, **changes: Any) -> Job:
    """Return a job as the store has it."""
    job, fresh = await store.submit(make_job(**changes), key=None, body_sha256="", events=[])
    assert fresh
    return job


async def claimed_job(store: Store, *, lease_s: float = HOUR) -> Job:
    (job,) = await store.claim_jobs([JobState.QUEUED], owner="placement", lease_s=lease_s, limit=1)
    return job


def admission(job: Job, number: int = 1) -> Change:
    """Return placement's change that admits an attempt of a claimed job."""
    attempt = make_attempt(job, number)
    entry = LedgerEntry(
        job_id=job.id, attempt_id=attempt.id, kind=LedgerKind.RESERVATION, usd=attempt.reserved_usd, note="quote"
    )
    to = replace(job, state=JobState.ACTIVE, attempts=number, reason="")
    told = (make_event(job, "attempt.planned"),)
    return Change(job=(job, to), admit=attempt, decision=b"why", ledger=(entry,), events=told)


async def running(store: Store, state: AttemptState = AttemptState.TRAINING, **changes: Any) -> tuple[Attempt, Job]:
    """Return a new active job and its attempt in `state`, due and not leased. The store must hold no other due jobs."""
    await submitted(store, **changes)
    job = await claimed_job(store)
    assert await store.apply([admission(job)]) == [True]
    if state is not AttemptState.PLANNED:
        (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="launch", lease_s=HOUR, limit=1)
        assert await store.apply([Change(attempt=(leased.attempt, in_state(leased.attempt, state)))]) == [True]
    (attempt,) = await store.attempts(job.id)
    active = await store.job(job.id)
    assert active is not None
    return attempt, active
