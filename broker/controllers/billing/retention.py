"""Retention controller: charges for stored data, and deletes expired data, old uploads and old offer history.

Steps for a job: list its objects, decide by `broker.lifecycle.retention` what is due, delete, charge for the rest.
Facts: the job, its attempts, its objects, a job that starts from it, attempts that a restored backup lacks.
Decisions: which kinds of data expire, which objects are deleted, what is charged, and when the job is due again.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.domain.errors import InUse
from broker.domain.ids import JobId
from broker.domain.job import Attempt, Job, StoredKind
from broker.domain.market.offer_history import BUCKET_S, DAY_BUCKETS, KEEP_DAYS, bucket_of
from broker.lifecycle.backup_restore import attempts_without_row
from broker.lifecycle.retention import (
    CHECK_ENDED_S,
    RESUMED_FROM,
    RetainedObjects,
    accrue,
    due_now,
    expired,
    leftovers,
    live_check_s,
    next_check_s,
    sort_objects,
)
from broker.lifecycle.superseded_checkpoints import superseded
from broker.ports import StorageCharge
from trainer.contract import object_keys

log = logging.getLogger(__name__)

EVERY_S = 60.0
UPLOADS_S = 3600.0
"""Seconds between two checks of the uploads. An upload without an owner in two checks is deleted."""
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
        self._ownerless: set[str] = set()
        self._spared: set[JobId] = set()
        """Jobs for which the warning about unknown attempts was logged."""
        self.every_s = EVERY_S

    async def step(self) -> bool:
        context = self._context
        jobs = await context.store.claim_stored(lease_s=LEASE_S, limit=JOBS)
        if jobs:
            data = {blob.key: blob.bytes for blob in await context.blobs.list(object_keys.JOB_DATA)}
            await decide_batch(context, self.name, jobs, lambda job: self._check_job(job, data))
        now = context.clock.monotonic()
        if now - self._uploads_at >= UPLOADS_S:
            self._uploads_at = now
            await self._uploads()
            await self._offer_history()
        return len(jobs) == JOBS

    async def _check_job(self, job: Job, data: Mapping[str, int]) -> None:
        context = self._context
        now, defaults = context.clock.now(), context.costs.retention
        attempts = await context.store.attempts(job.id)
        retained = await self._retained_objects(job, attempts, data)
        deleted: tuple[str, ...] = ()
        is_held_back = self._has_unknown_attempts(job, retained)
        if not is_held_back:
            job = await self._expire(job, expired(job, defaults, now))
            deleted = (
                *leftovers(job, attempts, retained),
                *superseded(job, attempts, retained.by_kind["checkpoints"], now),
            )
        if deleted and await context.store.unfinished_dependent(job.id) is not None:  # another job starts from them
            deleted = tuple(key for key in deleted if key not in retained.by_kind["checkpoints"])
        await self._delete(deleted)
        sizes = {key: size for objects in retained.by_kind.values() for key, size in objects.items()}
        left = retained.bytes - sum(sizes[key] for key in deleted)
        live_s = live_check_s(attempts, now, most_s=context.intervals.stored_s)
        again_s = next_check_s(job, left, defaults, now, live_s=live_s)
        stored = accrue(job.stored, left, context.costs.storage_usd_per_gib_month, now)
        charge = StorageCharge(
            job_id=job.id,
            read=job.stored,
            to=stored,
            usd=due_now(job.stored, stored),
            due_in_s=CHECK_ENDED_S if is_held_back else again_s,  # the deletion stays due
        )
        await context.store.charge_storage(charge)

    def _has_unknown_attempts(self, job: Job, retained: RetainedObjects) -> bool:
        """Return True if the blob store has checkpoints of an attempt that the database does not know.

        That attempt may still train and save, so nothing of its job is deleted.
        """
        unknown_attempts = attempts_without_row(job, retained.by_kind["checkpoints"])
        if unknown_attempts and job.id not in self._spared:
            self._spared.add(job.id)
            log.warning(
                "nothing of job %s is deleted: the database does not know attempt %s, so it is older than those "
                "(a backup?); once its machine is gone delete %s%s/ in the blob store by hand",
                job.id, unknown_attempts[0], object_keys.checkpoints(job.id), unknown_attempts[0],
            )  # fmt: skip
        return bool(unknown_attempts)

    async def _retained_objects(
        self, job: Job, attempts: Sequence[Attempt], data: Mapping[str, int]
    ) -> RetainedObjects:
        prefixes = [object_keys.checkpoints(job.id), *(f"attempts/{attempt.id}/" for attempt in attempts)]
        listed = [blob for prefix in prefixes for blob in await self._context.blobs.list(prefix)]
        prefix = object_keys.job_data(job.id, "")
        copies = [(key, size) for key, size in data.items() if key.startswith(prefix)]
        return sort_objects(job, attempts, [*((blob.key, blob.bytes) for blob in listed), *copies])

    async def _expire(self, job: Job, kinds: Sequence[StoredKind]) -> Job:
        """Mark the kinds that are due as deleted. Checkpoints wait while another job starts from them."""
        if not kinds:
            return job
        free = [kind for kind in kinds if kind not in RESUMED_FROM]
        for part in (kinds, free):
            message = f"deleted, as its retention says: {', '.join(part)}"
            report = event(job, "job.data_deleted", message, data={"kinds": [*part]})
            try:
                return (await self._context.store.delete_data(job.id, part, report) if part else None) or job
            except InUse:
                continue
        return job

    async def _delete(self, deleted: Sequence[str]) -> None:
        """Delete objects, manifests first, so that no manifest names a missing file."""
        manifests = [*object_keys.manifests(deleted)]
        gate = asyncio.Semaphore(AT_ONCE)

        async def delete(key: str) -> None:
            async with gate:
                await self._context.blobs.delete(key)

        for part in (manifests, deleted[len(manifests) :]):
            await asyncio.gather(*map(delete, part))

    async def _uploads(self) -> None:
        store, days = self._context.store, self._context.costs.uploads_days
        if days is not None and await self._context.is_clock_right():
            for sha256 in await store.forget_uploads(older_than_s=days * DAY_S, limit=1000):
                await self._context.blobs.delete(object_keys.upload(sha256))
        stored = {blob.key.removeprefix(UPLOADS) for blob in await self._context.blobs.list(UPLOADS)}
        ownerless = stored - set(await store.known_uploads(stored))
        for sha256 in ownerless & self._ownerless:
            await self._context.blobs.delete(object_keys.upload(sha256))
        self._ownerless = ownerless

    async def _offer_history(self) -> None:
        """Merge the recorded buckets of past hours, and delete those that are too old by a clock that is trusted."""
        store, now = self._context.store, bucket_of(self._context.clock.now())
        if await self._context.is_clock_right():
            await store.merge_offer_history(before=now - HOUR_BUCKETS)
            await store.forget_offer_history(before=now - KEEP_DAYS * DAY_BUCKETS)
