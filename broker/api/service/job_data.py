"""What a job keeps beside its hours: deleting it, and what is refused because it was."""

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
    """Needs only the store: the retention controller follows with the objects."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def delete_data(self, caller: Caller, wanted: JobId, kinds: Collection[StoredKind]) -> Job:
        """From now on it is gone for everybody; its objects follow within minutes, and what they cost ends then.

        Raises NotFound, InUse while the job, or one that starts from its checkpoints, is not at rest.
        """
        named = ", ".join(sorted(kinds))
        event = Event(
            job_id=wanted,
            kind="job.data_deleted",
            message=f"deleted by {caller.owner}: {named}",
            data={"kinds": sorted(kinds)},
        )
        job = await self._store.as_tenant(caller.tenant).delete_data(wanted, kinds, event)
        if job is None:
            raise NotFound(f"no job {wanted}; `gpubroker ls` lists yours")
        return job


def check_kept(job: Job, kind: StoredKind) -> None:
    """Raises Deleted."""
    if (when := job.deleted.get(kind)) is not None:
        raise Deleted(f"the {kind} of job {job.id} were deleted on {when:%Y-%m-%d %H:%M} UTC")


def check_data(job: Job) -> None:
    """Raises Deleted where the job's own copy of its input is gone, so that it cannot run again."""
    if (when := job.deleted.get("data")) is not None:
        raise Deleted(f"the data of job {job.id} was deleted on {when:%Y-%m-%d %H:%M} UTC; submit its spec again")


def check_time(spec: JobSpec, now: datetime, lead_s: float) -> None:
    """Raises InvalidInput for a spec that leaves no time to do anything but drain."""
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
