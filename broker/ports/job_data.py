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
    """A change to a live attempt by the guard or the budgets.

    It applies only if no other broker has notified users of the same.
    """

    attempt: Attempt
    """The attempt as read: its `idle`, its `signal` and its liveness are the fences."""
    job: Job
    """The job as read, with its forecast and the number of its attempt."""
    forecast: Forecast | None
    idle: IdleKind | None
    signal: Signal | None = None
    """Signal to raise with it; None: none."""
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StorageCharge:
    """Result of a check of a job's objects, which applies only if storage is still accrued up to `read`."""

    job_id: JobId
    read: StoredData | None
    to: StoredData
    usd: Decimal
    """Dollars to charge now, with one ledger entry; 0: no entry."""
    due_in_s: float | None
    """Seconds until the next check; None: nothing is left, and nothing will come."""


class TenantJobData(Protocol):
    """Part of `TenantStore`: deletion of stored data."""

    async def delete_data(self, job_id: JobId, kinds: Collection[StoredKind], event: Event) -> Job | None:
        """Mark stored data of a job as deleted; a controller deletes its objects later.

        The event is written when a kind is newly marked. Raises InUse, naming the job, while the job has not ended.
        The same applies while another job that has not ended starts from its checkpoints, if those or the artifacts
        are to be deleted.
        """
        ...


class GlobalJobData(TenantJobData, Protocol):
    """Part of `Store`, for the controllers."""

    async def note(self, notes: Sequence[Note]) -> Sequence[bool]:
        """Write each note atomically; True where its fences held."""
        ...

    async def claim_stored(self, *, lease_s: float, limit: int) -> Sequence[Job]:
        """Return jobs whose objects are due for a check, longest waiting first.

        They are hidden from other brokers for `lease_s` seconds.
        """
        ...

    async def heir(self, job_id: JobId) -> JobId | None:
        """Return an unfinished job of any team that starts from this job's checkpoints, or None."""
        ...

    async def charge_storage(self, charge: StorageCharge) -> bool:
        """Write a charge of category storage, which does not count towards the job's cap.

        Returns False when another broker wrote it first.
        """
        ...

    async def forget_uploads(self, *, older_than_s: float, limit: int) -> Sequence[str]:
        """Delete uploads last sent before `older_than_s`; return the hashes that no owner has any more."""
        ...

    async def known_uploads(self, hashes: Collection[str]) -> Collection[str]:
        """Return those of `hashes` that some owner has."""
        ...
