"""Data that a job keeps in the blob store: its cost, and the parts that are due for deletion.

Only data of ended jobs is deleted by these rules; `superseded_checkpoints.py` has the rules for running jobs. A
deletion is recorded before it begins, so that no new job starts from this data. Manifests are deleted first, because a
checkpoint without a manifest counts as absent.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import get_args

from broker.domain.ids import JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Job, JobState, StoredData, StoredKind
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB
from broker.domain.spec import Retention
from broker.lifecycle.recovery import furthest_first
from trainer.contract import object_keys as keys
from trainer.contract.save_interval import milestones

KINDS: tuple[StoredKind, ...] = get_args(StoredKind)
RESUMED_FROM: frozenset[StoredKind] = frozenset({"artifacts", "checkpoints"})
"""Kinds of data that another job which starts from this one needs."""
MONTH_S = 730 * 3600
CHECK_ENDED_S = 6 * 3600.0
"""Seconds between two checks of the objects of a job that has ended."""
QUEUED_CHECK_S = 900.0
"""Maximum seconds between two checks of a job without an attempt."""
MIN_CHECK_S = 60.0
"""Shortest interval in seconds between two checks of a job that has not ended."""


@dataclass(frozen=True, kw_only=True)
class RetainedObjects:
    """A job's objects by kind: key -> bytes."""

    by_kind: Mapping[StoredKind, Mapping[str, int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(sum(objects.values()) for objects in self.by_kind.values())


def sort_objects(job: Job, attempts: Sequence[Attempt], objects: Iterable[tuple[str, int]]) -> RetainedObjects:
    """Sort a job's objects by kind.

    `objects`: (key, bytes) below the job's checkpoints and its attempts, and its copy of the data. A finished job's
    last checkpoint holds its results. All other objects of an attempt (spec, final report, sealed credentials) are kept
    and deleted with its logs.
    """
    by_kind: dict[StoredKind, dict[str, int]] = {kind: {} for kind in KINDS}
    results = _results(job, attempts)
    for key, size in objects:
        if key.startswith(keys.checkpoints(job.id)):
            kind: StoredKind = "artifacts" if results and key.startswith(results) else "checkpoints"
        else:
            kind = "data" if key.startswith(keys.JOB_DATA) else "logs"
        by_kind[kind][key] = size
    return RetainedObjects(by_kind=by_kind)


def _results(job: Job, attempts: Sequence[Attempt]) -> str | None:
    """Return the folder of the results; None: there are none.

    A machine reports the folder, so a folder outside the machine's own attempt is not accepted.
    """
    last = attempts[-1].final if attempts else None
    if job.state is not JobState.SUCCEEDED or last is None or last.checkpoint is None:
        return None
    folder_of_attempt = f"{keys.checkpoints(job.id)}{attempts[-1].id}/"
    folder = last.checkpoint.manifest.removesuffix(keys.MANIFEST)
    return folder if folder.startswith(folder_of_attempt) and folder != folder_of_attempt else None


def last_checkpoint(job: Job) -> StoredKind:
    """Return the kind of the job's furthest checkpoint: results, if the job has succeeded."""
    return "artifacts" if job.state is JobState.SUCCEEDED else "checkpoints"


def origin_deleted_message(origin: JobId, when: datetime) -> str:
    """Return why no job can start from this one."""
    return f"job {origin} had its checkpoints deleted on {when:%Y-%m-%d}"


def retention_time(job: Job, defaults: Retention, kind: StoredKind) -> timedelta | None:
    """Return the time after the job's end for which a kind is kept; None: for ever."""
    job_days: float | None = getattr(job.spec.retention, f"{kind}_days")
    days: float | None = getattr(defaults, f"{kind}_days") if job_days is None else job_days
    return None if days is None else timedelta(days=days)


def expired(job: Job, defaults: Retention, now: datetime) -> tuple[StoredKind, ...]:
    """Return the kinds that are due to be marked as deleted."""
    return tuple(kind for kind in KINDS if (at := _deletion_time(job, defaults, kind)) is not None and at <= now)


def _deletion_time(job: Job, defaults: Retention, kind: StoredKind) -> datetime | None:
    """Return the time when a kind is due for deletion; None: never, not yet known, or deleted already."""
    after = retention_time(job, defaults, kind)
    if job.state not in RESTING_JOB_STATES or job.finished_at is None or kind in job.deleted or after is None:
        return None
    return job.finished_at + after


def leftovers(job: Job, attempts: Sequence[Attempt], retained: RetainedObjects) -> tuple[str, ...]:
    """Return the keys to delete, in this order.

    The keys are those of kinds that are marked as deleted, and those of checkpoints other than milestones and the
    furthest `checkpoint.keep`. Empty if the job has not ended.
    """
    if job.state not in RESTING_JOB_STATES:
        return ()
    to_delete = [key for kind in KINDS if kind in job.deleted for key in retained.by_kind.get(kind, ())]
    if "checkpoints" not in job.deleted:
        to_delete += _superfluous(job, attempts, retained.by_kind.get("checkpoints", ()))
    return manifests_first(to_delete)


def manifests_first(to_delete: Iterable[str]) -> tuple[str, ...]:
    """Return the keys in the order of deletion."""
    return tuple(sorted(to_delete, key=lambda key: (not keys.is_manifest(key), key)))


def latest_token_caches(attempts: Sequence[Attempt], objects: Iterable[str]) -> set[str]:
    """Return the manifests of the token caches that a later attempt reads: for each identity, the latest attempt's.

    There may be several caches of one identity, because an attempt that cannot download a cache uploads another copy.
    """
    number = {str(attempt.id): attempt.number for attempt in attempts}
    manifests = sorted(keys.token_cache_manifests(objects), key=lambda key: number.get(key.split("/")[2], 0))
    return {*{keys.token_cache_identity(key): key for key in manifests}.values()}


def _superfluous(job: Job, attempts: Sequence[Attempt], checkpoints: Iterable[str]) -> list[str]:
    """Return the keys of checkpoints that are no longer needed.

    The furthest committed checkpoints and the milestones stay. The latest token cache stays while the job may still
    continue. Uncommitted checkpoints are useless.
    """
    all_keys, config = list(checkpoints), job.spec.checkpoint
    needed = {*furthest_first(all_keys)[: config.keep], *milestones(all_keys, config.keep_every)}
    if job.state is not JobState.SUCCEEDED:
        needed |= latest_token_caches(attempts, all_keys)
    folders = tuple(manifest.removesuffix(keys.MANIFEST) for manifest in needed)
    return [key for key in all_keys if not key.startswith(folders)] if folders else all_keys


# --- charges


def accrue(stored: StoredData | None, kept_bytes: int, usd_per_gib_month: Decimal, now: datetime) -> StoredData:
    """Return `stored` with its cost accrued up to `now`, for the larger of the former and the present size.

    The sum is exact and never falls. It is rounded when it is charged, so that each amount is rounded once.
    """
    if stored is None:
        return StoredData(bytes=kept_bytes, accrued_usd=ZERO, charged_usd=ZERO, to=now)
    lasted = max(ZERO, Decimal(repr((now - stored.to).total_seconds())))
    more = usd_per_gib_month * max(stored.bytes, kept_bytes) / GIB * lasted / MONTH_S
    total = stored.accrued_usd + more
    return StoredData(bytes=kept_bytes, accrued_usd=total, charged_usd=usd(total), to=max(now, stored.to))


def due_now(before: StoredData | None, after: StoredData) -> Decimal:
    """Return the dollars that are accrued and not yet charged."""
    return after.charged_usd - (before.charged_usd if before else ZERO)


def month_usd(stored_bytes: int, usd_per_gib_month: Decimal) -> Decimal:
    """Return the price of storing `stored_bytes` for a month, rounded up."""
    return usd(usd_per_gib_month * stored_bytes / GIB)


def live_check_s(attempts: Sequence[Attempt], now: datetime, *, max_s: float) -> float:
    """Return seconds between two checks of a job that has not ended: a quarter of its latest attempt's age.

    A young attempt adds data fast compared with the recorded size. `max_s`: longest interval.
    """
    if not attempts:
        return min(max_s, QUEUED_CHECK_S)
    age_s = (now - attempts[-1].created_at).total_seconds()
    return min(max_s, max(MIN_CHECK_S, age_s / 4))


def next_check_s(job: Job, left_bytes: int, defaults: Retention, now: datetime, *, live_s: float) -> float | None:
    """Return seconds until the next check; None: no data is left and none will be added.

    `live_s`: interval while the job has not ended.
    """
    if job.state not in RESTING_JOB_STATES:
        return live_s
    if not left_bytes and job.deleted.keys() >= set(KINDS):
        return None
    ends = (at for kind in KINDS if (at := _deletion_time(job, defaults, kind)) is not None)
    return max(0.0, min([CHECK_ENDED_S, *((at - now).total_seconds() for at in ends)]))
