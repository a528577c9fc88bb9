"""Use cases of stored data: deleting a job's data, and checks that depend on it."""

from collections.abc import Collection
from datetime import datetime

from broker.api.core.auth import Caller
from broker.api.core.problems import Deleted, NotFound
from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import JobId
from broker.domain.job import Event, Job, StoredKind
from broker.domain.spec import JobSpec
from broker.ports import Store


class JobDataService:
    """Use cases of stored data. The retention controller deletes the objects later."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def delete_data(self, caller: Caller, job_id: JobId, kinds: Collection[StoredKind]) -> Job:
        """Mark a job's data as deleted. The data is unreadable at once; its objects and their cost end within minutes.

        Raises NotFound; InUse unless the job, and every job that starts from its checkpoints, has ended.
        """
        named = ", ".join(sorted(kinds))
        event = Event(
            job_id=job_id,
            kind="job.data_deleted",
            message=f"deleted by {caller.owner}: {named}",
            data={"kinds": sorted(kinds)},
        )
        job = await self._store.as_tenant(caller.tenant).delete_data(job_id, kinds, event)
        if job is None:
            raise NotFound(f"no job {job_id}; `gpubroker ls` lists yours")
        return job


def check_kept(job: Job, kind: StoredKind) -> None:
    """Raise Deleted if data of this kind was deleted."""
    if (when := job.deleted.get(kind)) is not None:
        raise Deleted(f"the {kind} of job {job.id} were deleted on {when:%Y-%m-%d %H:%M} UTC")


def check_data(job: Job) -> None:
    """Raise Deleted if the job's own copy of its input was deleted, so that it cannot run again."""
    if (when := job.deleted.get("data")) is not None:
        raise Deleted(f"the data of job {job.id} was deleted on {when:%Y-%m-%d %H:%M} UTC; submit its spec again")


def check_time(spec: JobSpec, now: datetime, lead_s: float) -> None:
    """Raise InvalidInput if the deadline or `max_duration` leaves no more than `lead_s`, the time of a drain."""
    faults = []
    if spec.deadline is not None and (left_s := (spec.deadline - now).total_seconds()) <= lead_s:
        when = "is past" if left_s <= 0 else f"is in {left_s:.0f} s"
        message = f"{when}, and {lead_s:.0f} s are needed to checkpoint and stop; take a later one"
        faults.append(Problem(field="deadline", message=message))
    if spec.max_duration is not None and spec.max_duration <= lead_s:
        message = f"{spec.max_duration} s, and {lead_s:.0f} s are needed to checkpoint and stop; take more"
        faults.append(Problem(field="max_duration", message=message))
    if faults:
        raise InvalidInput(*faults)
