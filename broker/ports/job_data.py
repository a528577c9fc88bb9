"""What the store is asked of a job's costs beside its hours: forecasts, idle machines, what is kept and deleted."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

from broker.domain.ids import JobId
from broker.domain.job import Attempt, Event, Forecast, Job, Signal, StoredData, StoredKind
from broker.domain.spec import IdleKind


@dataclass(frozen=True, kw_only=True)
class Note:
    """The guard's or the budgets' write about a live attempt: applies only if nobody told people the same meanwhile."""

    attempt: Attempt
    """As read: its `idle`, its `signal` and its being alive are the fences."""
    job: Job
    """As read: what its forecast said, and the number of its attempt."""
    forecast: Forecast | None
    idle: IdleKind | None
    signal: Signal | None = None
    """Raised with it."""
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StorageCharge:
    """What a look at a job's objects amounts to: applies only if it is still accrued up to `read`."""

    job_id: JobId
    read: StoredData | None
    to: StoredData
    usd: Decimal
    """To be charged now; one ledger entry, none when it is 0."""
    due_in_s: float | None
    """Until the next look; None: nothing is left, and nothing will come."""


class TenantJobData(Protocol):
    async def delete_data(self, job_id: JobId, kinds: Collection[StoredKind], event: Event) -> Job | None:
        """Marks what a job keeps as deleted, once; its objects follow. The event is written when something is new.

        Raises InUse, naming the job, while the job is not at rest, or while another one that is not starts from its
        checkpoints and those (or the artifacts) are to go.
        """
        ...


class GlobalJobData(TenantJobData, Protocol):
    """For the controllers."""

    async def note(self, notes: Sequence[Note]) -> Sequence[bool]:
        """Each atomically; True where its fences held."""
        ...

    async def claim_stored(self, *, lease_s: float, limit: int) -> Sequence[Job]:
        """Jobs whose objects are due to be looked at, longest waiting first, hidden from others for `lease_s`."""
        ...

    async def heir(self, job_id: JobId) -> JobId | None:
        """A job, of whichever team, that starts from this one's checkpoints and has not come to its end."""
        ...

    async def charge_storage(self, charge: StorageCharge) -> bool:
        """Written to the ledger in the category storage, beside the job's cap. False: another broker was first."""
        ...

    async def forget_uploads(self, *, older_than_s: float, limit: int) -> Sequence[str]:
        """Removes uploads that were last sent so long ago; the hashes that no owner has any more."""
        ...

    async def known_uploads(self, hashes: Collection[str]) -> Collection[str]:
        """Those that somebody has."""
        ...
