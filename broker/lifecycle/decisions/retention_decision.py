"""Decides which data of a job expires, which objects are deleted, what storage costs, and when the next check is due.

Used by the retention controller. Rules: `broker.lifecycle.retention` and `broker.lifecycle.superseded_checkpoints`.
"""

from collections.abc import Collection, Set
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from broker.domain.job import Attempt, Event, Job, StoredData, StoredKind
from broker.domain.spec import Retention
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
)
from broker.lifecycle.superseded_checkpoints import superseded
from trainer.contract import object_keys


@dataclass(frozen=True, kw_only=True)
class RetentionFacts:
    """All facts on which one check of a job's stored data depends."""

    job: Job
    attempts: tuple[Attempt, ...]
    """All attempts of the job, in the order of their numbers."""
    retained: RetainedObjects
    now: datetime
    defaults: Retention
    """Retention of jobs without one of their own."""
    usd_per_gib_month: Decimal
    """Price of the blob store."""
    stored_s: float
    """Longest interval in seconds between two checks of a job that has not ended."""
    is_partial: bool = False
    """True if the job has more objects than `retained`: a listing reached its limit."""
    is_marked: bool = False
    """True once the expired kinds were marked in the database, as far as it accepted them; `job` is the row after."""
    has_dependent: bool | None = None
    """True if an unfinished job starts from this one; None: not gathered yet."""


@dataclass(frozen=True, kw_only=True)
class ExpiryDecision:
    """Kinds to mark as deleted before any object is deleted, so that no new job starts from this data.

    The database accepts the first mark that it does not refuse. It refuses checkpoints and artifacts while another job
    starts from them.
    """

    marks: tuple[tuple[StoredKind, ...], ...]


@dataclass(frozen=True, kw_only=True)
class DependentNeeded:
    """Answer of `decide_retention` if the deletion depends on whether an unfinished job starts from this one."""


@dataclass(frozen=True, kw_only=True)
class RetentionDecision:
    """Objects to delete, and the storage to charge afterwards."""

    deletions: tuple[tuple[str, ...], tuple[str, ...]]
    """Keys of manifests, and then of all other objects. The first batch is deleted before the second, so that no
    manifest names a missing file.
    """
    stored: StoredData
    """Storage after the deletion."""
    usd: Decimal
    """Dollars to charge now; 0: nothing."""
    due_in_s: float | None
    """Seconds until the next check; None: the job has no objects left, and will write no more."""
    held_back: str = ""
    """Reason why nothing of the job is deleted, for the log; empty: deletion is allowed."""


def decide_retention(facts: RetentionFacts) -> ExpiryDecision | DependentNeeded | RetentionDecision:
    """Return the next step of one check. `RetentionDecision` is the last step."""
    held_back = _held_back_message(facts)
    if held_back:
        return _decision(facts, (), held_back)
    if not facts.is_marked and (kinds := expired(facts.job, facts.defaults, facts.now)):
        return ExpiryDecision(marks=_marks(kinds))
    deleted = _deletable(facts)
    if deleted and facts.has_dependent is None:
        return DependentNeeded()
    if facts.has_dependent:
        deleted = tuple(key for key in deleted if key not in facts.retained.by_kind["checkpoints"])
    return _decision(facts, deleted)


def expiry_event(job: Job, kinds: tuple[StoredKind, ...]) -> Event:
    """Return the event that reports a mark."""
    message = f"deleted, as its retention says: {', '.join(kinds)}"
    return Event(job_id=job.id, attempt_id=None, kind="job.data_deleted", message=message, data={"kinds": [*kinds]})


@dataclass(frozen=True, kw_only=True)
class UploadsDecision:
    """Uploads to delete, and the uploads that are deleted if the next check finds no owner either."""

    deleted: tuple[str, ...]
    ownerless: Set[str]


def decide_uploads(stored: Set[str], owned: Collection[str], ownerless_before: Set[str]) -> UploadsDecision:
    """Return the decision about the uploads, by SHA-256.

    An upload is stored before its owner is recorded, so it is deleted only if two checks find no owner. `stored`:
    hashes in the blob store. `owned`: hashes that have an owner. `ownerless_before`: result of the previous check.
    """
    ownerless = stored - set(owned)
    return UploadsDecision(deleted=tuple(sorted(ownerless & ownerless_before)), ownerless=ownerless)


def _marks(kinds: tuple[StoredKind, ...]) -> tuple[tuple[StoredKind, ...], ...]:
    """Return the kinds to mark, first all of them, then those that no other job starts from."""
    free = tuple(kind for kind in kinds if kind not in RESUMED_FROM)
    return (kinds, free) if free else (kinds,)


def _deletable(facts: RetentionFacts) -> tuple[str, ...]:
    job, attempts, retained = facts.job, facts.attempts, facts.retained
    replaced = superseded(job, attempts, retained.by_kind["checkpoints"], facts.now)
    return (*leftovers(job, attempts, retained), *replaced)


def _decision(facts: RetentionFacts, deleted: tuple[str, ...], held_back: str = "") -> RetentionDecision:
    job, now = facts.job, facts.now
    sizes = {key: size for objects in facts.retained.by_kind.values() for key, size in objects.items()}
    left = facts.retained.bytes - sum(sizes[key] for key in deleted)
    stored = accrue(job.stored, left, facts.usd_per_gib_month, now)
    live_s = live_check_s(facts.attempts, now, max_s=facts.stored_s)
    manifests = tuple(object_keys.manifests(deleted))
    others = tuple(key for key in deleted if key not in set(manifests))
    # While deletion is held back, or of objects that are not listed yet, it stays due; so the next check comes soon.
    is_due = bool(held_back) or facts.is_partial
    return RetentionDecision(
        deletions=(manifests, others),
        stored=stored,
        usd=due_now(job.stored, stored),
        due_in_s=CHECK_ENDED_S if is_due else next_check_s(job, left, facts.defaults, now, live_s=live_s),
        held_back=held_back,
    )


def _held_back_message(facts: RetentionFacts) -> str:
    """Return why nothing of the job is deleted: the blob store has checkpoints of an attempt without a row.

    That attempt may still train and save.
    """
    job = facts.job
    unknown_attempts = attempts_without_row(job, facts.retained.by_kind["checkpoints"])
    if not unknown_attempts:
        return ""
    first = unknown_attempts[0]
    return (
        f"nothing of job {job.id} is deleted: the database does not know attempt {first}, so it may be a "
        "restored backup; once the machine of that attempt is gone, delete "
        f"{object_keys.checkpoints(job.id)}{first}/ in the blob store by hand"
    )
