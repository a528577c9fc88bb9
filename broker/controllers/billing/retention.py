"""Retention controller: charges for stored data, and deletes expired data, old uploads and old offer history.

Steps for a job: gather `RetentionFacts` and call `decide_retention`. Mark expired kinds and decide again, delete
objects, write the charge. Steps each hour: delete uploads by `decide_uploads`, merge and delete old offer history.
Facts: the job, its attempts and objects. Whether another job starts from it is asked only before a deletion.
Decisions: `ExpiryDecision`, `RetentionDecision`, `UploadsDecision`.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.domain.errors import InUse
from broker.domain.ids import JobId
from broker.domain.job import Job
from broker.domain.market.offer_history import BUCKET_S, DAY_BUCKETS, KEEP_DAYS, bucket_of
from broker.lifecycle.decisions.retention_decision import (
    DependentNeeded,
    ExpiryDecision,
    RetentionDecision,
    RetentionFacts,
    decide_retention,
    decide_uploads,
    expiry_event,
)
from broker.lifecycle.retention import sort_objects
from broker.ports import BlobInfo, StorageCharge
from broker.ports.blobs import MAX_LISTED
from trainer.contract import object_keys

log = logging.getLogger(__name__)

EVERY_S = 60.0
UPLOADS_S = 3600.0
"""Seconds between two checks of the uploads and of the offer history."""
LEASE_S = 600.0
JOBS = 50
AT_ONCE = 16
"""Maximum number of concurrent deletions."""
UPLOADS = "uploads/"
DAY_S = 86_400.0
HOUR_BUCKETS = 3600 // BUCKET_S


class RetentionController:
    """Claims jobs whose objects are due for a check."""

    name = "retention"

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._uploads_at = float("-inf")
        self._ownerless: frozenset[str] = frozenset()
        self._held_back: set[JobId] = set()
        """Jobs for which the log says why nothing of them is deleted."""
        self.every_s = EVERY_S

    async def step(self) -> bool:
        context = self._context
        jobs = await context.store.claim_stored(lease_s=LEASE_S, limit=JOBS)
        if jobs:
            data = _by_job(await context.blobs.list(object_keys.JOB_DATA))
            await decide_batch(context, self.name, jobs, lambda job: self._check_job(job, data.get(job.id, {})))
        now = context.clock.monotonic()
        if now - self._uploads_at >= UPLOADS_S:
            self._uploads_at = now
            await self._check_uploads()
            await self._trim_offer_history()
        return len(jobs) == JOBS

    async def _check_job(self, job: Job, data: Mapping[str, int]) -> None:
        """Gather, decide and apply for one job. `data`: bytes of the job's copies of its data, by key."""
        facts = await self._gather(job, data)
        while not isinstance(decision := decide_retention(facts), RetentionDecision):
            facts = await self._proceed(facts, decision)
        await self._apply(facts.job, decision)

    async def _gather(self, job: Job, data: Mapping[str, int]) -> RetentionFacts:
        context = self._context
        now = context.clock.now()
        attempts = await context.store.attempts(job.id)
        prefixes = [object_keys.checkpoints(job.id), *(f"attempts/{attempt.id}/" for attempt in attempts)]
        listings = [await context.blobs.list(prefix, max_objects=MAX_LISTED) for prefix in prefixes]
        listed = [(blob.key, blob.bytes) for listing in listings for blob in listing]
        return RetentionFacts(
            job=job,
            attempts=tuple(attempts),
            retained=sort_objects(job, attempts, [*listed, *data.items()]),
            now=now,
            defaults=context.costs.retention,
            usd_per_gib_month=context.costs.storage_usd_per_gib_month,
            stored_s=context.intervals.stored_s,
            is_partial=any(len(listing) >= MAX_LISTED for listing in listings),
        )

    async def _proceed(self, facts: RetentionFacts, decision: ExpiryDecision | DependentNeeded) -> RetentionFacts:
        """Carry out a step before the last one, and return the facts with its result."""
        if isinstance(decision, ExpiryDecision):
            return replace(facts, job=await self._mark(facts.job, decision), is_marked=True)
        dependent = await self._context.store.unfinished_dependent(facts.job.id)
        return replace(facts, has_dependent=dependent is not None)

    async def _mark(self, job: Job, decision: ExpiryDecision) -> Job:
        """Mark kinds as deleted. Return the job after the first mark that the database accepts."""
        for kinds in decision.marks:
            try:
                return await self._context.store.delete_data(job.id, kinds, expiry_event(job, kinds)) or job
            except InUse:
                continue
        return job

    async def _apply(self, job: Job, decision: RetentionDecision) -> None:
        """Delete objects, and then write the charge for the rest."""
        if decision.held_back and job.id not in self._held_back:
            self._held_back.add(job.id)
            log.warning(decision.held_back)
        gate = asyncio.Semaphore(AT_ONCE)

        async def delete(key: str) -> None:
            async with gate:
                await self._context.blobs.delete(key)

        for batch in decision.deletions:
            await asyncio.gather(*map(delete, batch))
        charge = StorageCharge(
            job_id=job.id, read=job.stored, to=decision.stored, usd=decision.usd, due_in_s=decision.due_in_s
        )
        await self._context.store.charge_storage(charge)

    async def _check_uploads(self) -> None:
        """Delete uploads that are too old by a trusted clock, and uploads without an owner."""
        context, days = self._context, self._context.costs.uploads_days
        if days is not None and await context.is_clock_right():
            for sha256 in await context.store.forget_uploads(older_than_s=days * DAY_S, limit=1000):
                await context.blobs.delete(object_keys.upload(sha256))
        stored = {blob.key.removeprefix(UPLOADS) for blob in await context.blobs.list(UPLOADS)}
        decision = decide_uploads(stored, await context.store.known_uploads(stored), self._ownerless)
        for sha256 in decision.deleted:
            await context.blobs.delete(object_keys.upload(sha256))
        self._ownerless = frozenset(decision.ownerless)

    async def _trim_offer_history(self) -> None:
        """Merge the recorded buckets of past hours, and delete those that are too old by a clock that is trusted."""
        store, now = self._context.store, bucket_of(self._context.clock.now())
        if await self._context.is_clock_right():
            await store.merge_offer_history(before=now - HOUR_BUCKETS)
            await store.forget_offer_history(before=now - KEEP_DAYS * DAY_BUCKETS)


def _by_job(copies: Sequence[BlobInfo]) -> Mapping[JobId, Mapping[str, int]]:
    """Return the bytes of each copy of an upload by key, for each job."""
    by_job: defaultdict[JobId, dict[str, int]] = defaultdict(dict)
    for blob in copies:
        by_job[JobId(object_keys.job_of_data(blob.key))][blob.key] = blob.bytes
    return by_job
