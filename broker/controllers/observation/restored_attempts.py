"""Attempts of a job that a restored backup does not contain, found in the blob store and in listings.

Used by placement before an attempt number is issued, and by launch before a create is sent.
Steps: gather `RestoredFacts`, call `decide_restored`, gather the facts that it asks for, remember the result.
Facts: checkpoints, specs, listings of all clouds, the final report and the drain request of the last such attempt.
Decisions: `RestoredDecision`; see `broker.lifecycle.decisions.restored_decision`.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import assert_never

from pydantic import ValidationError

from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.heartbeats import read_final
from broker.controllers.observation.inventory import Inventory
from broker.domain.errors import BlobsUnavailable, BlobTooLarge
from broker.domain.ids import AttemptId, InstanceName, JobId, instance_name
from broker.domain.job import Attempt, Job, Reason
from broker.lifecycle.backup_restore import drain_reason, possible_attempts
from broker.lifecycle.decisions.restored_decision import (
    DrainRecord,
    MissingRestoredFacts,
    RestoredDecision,
    RestoredFacts,
    RestoredFactsNeeded,
    RestoredMachine,
    RestoredMachines,
    decide_restored,
)
from broker.ports import Blobs
from trainer.contract import object_keys
from trainer.contract.documents import Desired, Final, Outcome

FOLDERS_S = 5.0
"""Timeout of the listing of all attempts, in seconds. After it, each possible attempt is read."""
MAX_FOLDERS = 200_000
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

    def begin(self) -> None:
        """Record the start of this process. Later calls change nothing."""
        self._began = self._began or self._context.clock.now()

    async def decide(self, job: Job, manifests: Sequence[str]) -> RestoredDecision:
        """Gather and decide for one job. `manifests`: checkpoints that the job can resume from."""
        facts = self._gather(job, manifests)
        while isinstance(decision := decide_restored(facts), RestoredFactsNeeded):
            facts = await self._gather_more(facts, decision)
        if facts.may_be_older and not decision.numbers:
            self._clear.add(job.id)
        if decision.blocked is None and facts.machines is not None:
            for machine in facts.machines.machines:
                self._since.pop(machine.name, None)
        return decision

    def _gather(self, job: Job, manifests: Sequence[str]) -> RestoredFacts:
        """Return the facts that need no request."""
        saved = {key.split("/")[2] for key in manifests}
        names = {attempt: self._name(attempt) for attempt in possible_attempts(job)}
        traces = {a for a, name in names.items() if a in saved or name in self._since or self._clouds_of(name)}
        may_be_older = job.id not in self._clear and self._may_be_older(job.created_at)
        return RestoredFacts(job=job, may_be_older=may_be_older, traces=traces)

    async def _gather_more(self, facts: RestoredFacts, needed: RestoredFactsNeeded) -> RestoredFacts:
        match needed.missing:
            case MissingRestoredFacts.SPECS:
                with_spec = await self._having_specs(needed.attempts)
                specs = {attempt: attempt in with_spec for attempt in needed.attempts}
                return replace(facts, specs={**facts.specs, **specs})
            case MissingRestoredFacts.MACHINES:
                return replace(facts, machines=await self._machines(needed.attempts))
            case MissingRestoredFacts.END:
                return replace(facts, end=await self._end_record(next(iter(needed.attempts))))
            case _:
                assert_never(needed.missing)

    async def _machines(self, attempts: Mapping[AttemptId, int]) -> RestoredMachines:
        """List all clouds, and return what they show of these attempts. The proof of absence begins with this call."""
        now, clouds = self._context.clock.monotonic(), self._context.providers
        since = {attempt: self._since.setdefault(self._name(attempt), now) for attempt in attempts}
        silent = await self._inventory.refresh_all(clouds)
        machines, final_is_read = [], False
        for attempt, number in attempts.items():
            name, final = self._name(attempt), None
            listed_at = tuple(self._clouds_of(name))
            if listed_at and not final_is_read:
                final, final_is_read = await read_final(self._context, attempt), True
            is_absent = all(self._inventory.absence(cloud, name, since[attempt]).proven for cloud in clouds)
            machines.append(
                RestoredMachine(number=number, name=name, clouds=listed_at, is_absent=is_absent, final=final)
            )
        return RestoredMachines(machines=machines, silent=silent)

    async def _end_record(self, attempt: AttemptId) -> DrainRecord:
        final = await read_final(self._context, attempt)
        return DrainRecord(reason=None if final is None else await drain_reason_sent(self._context, attempt, final))

    async def was_sent(self, attempt: Attempt) -> bool:
        """Return True if a create of this attempt may have been sent, although its row says that none was."""
        if not self._may_be_older(attempt.created_at):
            return False
        return await self._is_written(attempt.id)

    async def was_superseded(self, job: Job, attempt: Attempt) -> bool:
        """Return True if a later attempt was bought, although `attempt` is the last of the job in the database."""
        if not self._may_be_older(attempt.created_at):
            return False
        return bool(await self._having_specs(possible_attempts(job)))

    async def _having_specs(self, candidates: Iterable[AttemptId]) -> set[AttemptId]:
        """Return the candidates whose spec exists.

        The first candidate is read. The others are read only if they had an object when this process began, because
        no broker that ran before a restore writes later.
        """
        first, *others = candidates
        if not others:
            return {first} if await self._is_written(first) else set()
        folders = await self._folders.listed() if self._began is not None else None
        likely = [first, *(attempt for attempt in others if folders is None or attempt in folders)]
        are_written = await asyncio.gather(*map(self._is_written, likely))
        return {attempt for attempt, has_spec in zip(likely, are_written, strict=True) if has_spec}

    def _may_be_older(self, created_at: datetime) -> bool:
        return self._began is None or created_at < self._began

    def _name(self, attempt: AttemptId) -> InstanceName:
        return instance_name(self._context.installation, attempt)

    def _clouds_of(self, name: InstanceName) -> list[str]:
        return [provider for provider in self._context.providers if self._inventory.is_listed(provider, name)]

    async def _is_written(self, attempt: AttemptId) -> bool:
        """Return True if the attempt's spec exists. The spec is not read, because its host may have replaced it."""
        return await self._context.blobs.get_range(object_keys.spec(attempt), 0, 1) is not None


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
                    self._ids = ids if len(ids) <= MAX_FOLDERS else None
            return self._ids


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
