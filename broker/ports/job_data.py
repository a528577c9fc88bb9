"""Store operations on forecasts, idle flags and stored data (size, charges, deletion)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

from broker.domain.ids import JobId
from broker.domain.job import Attempt, Event, Forecast, Job, Signal, StoredData, StoredKind
from broker.domain.spec import IdleKind


@dataclass(frozen=True, kw_only=True)
class Note:
    """A change to a live attempt by the guard, the budgets or the review of attempts.

    The change applies only if no other broker has reported the same warning to users.
    """

    attempt: Attempt
    """The attempt as read: its `idle`, its `signal` and its liveness are the fences."""
    job: Job
    """The job as read, with its forecast and the number of its attempt."""
    forecast: Forecast | None
    idle: IdleKind | None
    signal: Signal | None = None
    """Signal to raise with the change; None: no signal."""
    reason: str | None = None
    """Text that the job shows until its attempt has ended; None: unchanged."""
    events: tuple[Event, ...] = ()
    stays: str | None = None
    """Reason to stay that the note reports, fenced by the reason as read; None: unchanged."""


@dataclass(frozen=True, kw_only=True)
class StorageCharge:
    """Result of a check of a job's objects, which applies only if storage is still accrued up to `read`."""

    job_id: JobId
    read: StoredData | None
    to: StoredData
    usd: Decimal
    """Dollars to charge now, with one ledger entry; 0: no entry."""
    due_in_s: float | None
    """Seconds until the next check; None: the job has no objects left, and will write no more."""


class TenantJobData(Protocol):
    """Part of `TenantStore`: deletion of stored data."""

    async def delete_data(self, job_id: JobId, kinds: Collection[StoredKind], event: Event) -> Job | None:
        """Mark stored data of a job as deleted; a controller deletes its objects later.

        The event is written if a kind is newly marked. Raises InUse, whose message names the job, if this job has not
        ended. Checkpoints and artifacts also raise InUse while a job that starts from them has not ended.
        """
        ...


class GlobalJobData(TenantJobData, Protocol):
    """Part of `Store`, for the controllers."""

    async def note(self, notes: Sequence[Note]) -> Sequence[bool]:
        """Write each note atomically. Return for each whether its fences held."""
        ...

    async def claim_stored(self, *, lease_s: float, limit: int) -> Sequence[Job]:
        """Return jobs whose objects are due for a check, longest waiting first.

        They are hidden from other brokers for `lease_s` seconds.
        """
        ...

    async def unfinished_dependent(self, job_id: JobId) -> JobId | None:
        """Return an unfinished job of any team that starts from this job's checkpoints, or None."""
        ...

    async def charge_storage(self, charge: StorageCharge) -> bool:
        """Write a charge of category storage, which does not count towards the job's cap.

        Returns False when another broker wrote it first.
        """
        ...

    async def forget_uploads(self, *, older_than_s: float, limit: int) -> Sequence[str]:
        """Delete uploads last sent more than `older_than_s` ago; return the hashes that no owner has any more."""
        ...

    async def known_uploads(self, hashes: Collection[str]) -> Collection[str]:
        """Return those of `hashes` that some owner has."""
        ...
