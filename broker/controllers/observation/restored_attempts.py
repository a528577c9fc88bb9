"""Attempts of a job that a restored backup does not contain, found in the blob store and in listings.

Used by placement before an attempt number is issued, and by launch before a create is sent. Rules:
`broker.lifecycle.backup_restore`.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from datetime import datetime

from pydantic import ValidationError

from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.heartbeats import read_final
from broker.controllers.observation.inventory import Inventory
from broker.domain.errors import BlobsUnavailable, BlobTooLarge
from broker.domain.ids import AttemptId, InstanceName, JobId, attempt_id, instance_name
from broker.domain.job import Attempt, Job, Reason
from broker.lifecycle.backup_restore import drain_reason, possible_attempts, still_running_message, unproven_message
from broker.ports import Blobs
from trainer.contract import object_keys
from trainer.contract.documents import Desired, Final, Outcome

FOLDERS_S = 5.0
"""Timeout of the listing of all attempts, in seconds. After it, each possible attempt is read."""
MOST_FOLDERS = 200_000
"""Largest number of listed attempts that is kept in memory, about 20 MB."""


class RestoredAttempts:
    """Finds attempts bought after the backup. Methods raise BlobsUnavailable if the blob store does not answer."""

    def __init__(self, context: ControllerContext, inventory: Inventory) -> None:
        self._context = context
        self._inventory = inventory
        self._since: dict[InstanceName, float] = {}
        """Monotonic time of the first check, by name of an attempt without a row. Later listings prove its absence."""
        self._began: datetime | None = None
        """Start of this process. A backup holds no later row, since every broker stops before a restore."""
        self._folders = _AttemptFolders(context.blobs)
        self._clear: set[JobId] = set()
        """Jobs without attempts bought after the backup. No further attempt of this kind can appear."""

    async def start(self) -> None:
        """List every cloud once, so that existing machines are known before anything is bought."""
        await self._inventory.refresh_all(self._context.providers)

    async def attempt_numbers_used(self, job: Job, manifests: Sequence[str]) -> Sequence[int]:
        """Return the numbers after the job's last number that were already used.

        `manifests`: checkpoints that the job can resume from.
        """
        candidates, blobs = possible_attempts(job), self._context.blobs
        traces = {key.split("/")[2] for key in manifests}
        names = {attempt: self._name(attempt) for attempt in candidates}
        shown = {
            attempt
            for attempt, name in names.items()
            if attempt in traces or name in self._since or self._clouds_of(name)
        }
        following = next(iter(candidates))
        may_be_older = job.id not in self._clear and self._may_be_older(job.created_at)
        if not (shown or may_be_older) and not await _is_written(blobs, following):
            return ()
        written = await self._written(candidates)
        used = [candidates[attempt] for attempt in candidates if attempt in shown or attempt in written]
        if not used:
            self._clear.add(job.id)
        return used

    async def was_sent(self, attempt: Attempt) -> bool:
        """Return True if a create of this attempt may have been sent, although its row says that none was."""
        if not self._may_be_older(attempt.created_at):
            return False
        return await _is_written(self._context.blobs, attempt.id)

    async def was_superseded(self, job: Job, attempt: Attempt) -> bool:
        """Return True if a later attempt was bought, although `attempt` is the last of the job in the database."""
        if not self._may_be_older(attempt.created_at):
            return False
        return bool(await self._written(possible_attempts(job)))

    def begin(self) -> None:
        """Record the start of this process. Later calls change nothing."""
        self._began = self._began or self._context.clock.now()

    async def _written(self, candidates: Iterable[AttemptId]) -> set[AttemptId]:
        """Return the candidates whose spec exists.

        The first candidate is read. The others are read only if they had an object when this process began, because
        no broker that ran before a restore writes later.
        """
        folders = await self._folders.listed() if self._began is not None else None
        first, *others = candidates
        likely = [first, *(attempt for attempt in others if folders is None or attempt in folders)]
        written = await asyncio.gather(*(_is_written(self._context.blobs, attempt) for attempt in likely))
        return {attempt for attempt, has_spec in zip(likely, written, strict=True) if has_spec}

    def _may_be_older(self, created_at: datetime) -> bool:
        return self._began is None or created_at < self._began

    async def blocking_machine(self, job: Job, numbers: Sequence[int]) -> str | None:
        """Return why the job must wait for machines of these attempts; None: their absence is proven at every cloud."""
        now, names = self._context.clock.monotonic(), [self._name(attempt_id(job.id, number)) for number in numbers]
        since = {name: self._since.setdefault(name, now) for name in names}
        silent = await self._inventory.refresh_all(self._context.providers)
        for number, name in zip(numbers, names, strict=True):
            if clouds := self._clouds_of(name):
                final = await read_final(self._context, attempt_id(job.id, number))
                return still_running_message(number, f"{name} at {', '.join(clouds)}", final)
        for number, name in zip(numbers, names, strict=True):
            if silent or not all(
                self._inventory.absence(cloud, name, since[name]).proven for cloud in self._context.providers
            ):
                return unproven_message(number, silent)
        for name in names:
            del self._since[name]
        return None

    async def ended_for(self, attempt: AttemptId) -> Reason | None:
        """Return the reason for which an attempt ended its job, by its final report and drain request; None: no end."""
        final = await read_final(self._context, attempt)
        return None if final is None else await drain_reason_sent(self._context, attempt, final)

    def _name(self, attempt: AttemptId) -> InstanceName:
        return instance_name(self._context.installation, attempt)

    def _clouds_of(self, name: InstanceName) -> list[str]:
        return [provider for provider in self._context.providers if self._inventory.is_listed(provider, name)]


class _AttemptFolders:
    """Ids of all attempts that had an object in the blob store when this process began.

    One listing replaces a read for each possible attempt of each job that is older than the process.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._lock = asyncio.Lock()
        self._is_known = False
        self._ids: frozenset[str] | None = None

    async def listed(self) -> frozenset[str] | None:
        """Return the ids; None: they could not be listed in time, or are too many to keep."""
        async with self._lock:
            if not self._is_known:
                self._is_known = True
                with contextlib.suppress(BlobsUnavailable, TimeoutError):
                    async with asyncio.timeout(FOLDERS_S):
                        ids = await self._blobs.folders(object_keys.ATTEMPTS)
                    self._ids = ids if len(ids) <= MOST_FOLDERS else None
            return self._ids


async def _is_written(blobs: Blobs, attempt: AttemptId) -> bool:
    """Return True if the attempt's spec exists. The spec is not read, because its host may have replaced it."""
    return await blobs.get_range(object_keys.spec(attempt), 0, 1) is not None


async def drain_reason_sent(context: ControllerContext, attempt: AttemptId, final: Final) -> Reason | None:
    """Return the reason of the drain request that ended an attempt and its job; None: the job continues.

    Raises BlobsUnavailable.
    """
    if final.outcome is not Outcome.DRAINED:
        return None
    try:
        data = await context.blobs.get(object_keys.desired(attempt))
        return None if data is None else drain_reason(Desired.model_validate_json(data))
    except (ValidationError, BlobTooLarge):
        return None
