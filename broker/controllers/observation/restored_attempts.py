"""What the world has of a job's attempts that a restored database does not know: asked before a number is issued."""

import asyncio
from collections.abc import Sequence
from datetime import datetime

from pydantic import ValidationError

from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.heartbeats import read_final
from broker.controllers.observation.inventory import Inventory
from broker.domain.ids import AttemptId, InstanceName, JobId, attempt_id, instance_name
from broker.domain.job import Attempt, Job, Reason
from broker.lifecycle.backup_restore import drain_reason, possible_attempts, still_running_message, unproven_message
from trainer.contract import object_keys as keys
from trainer.contract.documents import Desired, Final, Outcome


class RestoredAttempts:
    """All of it may raise BlobsUnavailable: then nothing is known."""

    def __init__(self, context: ControllerContext, inventory: Inventory) -> None:
        self._context = context
        self._inventory = inventory
        self._since: dict[InstanceName, float] = {}
        """When such a name was seen first: an absence is proven by listings after it."""
        self._began: datetime | None = None
        """A backup holds no row that was made later: every broker stops before it is restored."""
        self._clear: set[JobId] = set()
        """Jobs of which no such attempt was found: there will be none."""

    async def start(self) -> None:
        """Lists every cloud once, so that what stands there is known before anything is bought."""
        await self._inventory.refresh_all(self._context.providers)

    async def attempt_numbers_used(self, job: Job, manifests: Sequence[str]) -> Sequence[int]:
        """Numbers after the job's last that were issued before. `manifests`: of checkpoints that it may go on from."""
        coming, blobs = possible_attempts(job), self._context.blobs
        traces = {key.split("/")[2] for key in manifests}
        names = {one: self._name(one) for one in coming}
        shown = {own for own, name in names.items() if own in traces or name in self._since or self._clouds_of(name)}
        following = next(iter(coming))
        older = job.id not in self._clear and self._may_be_older(job.created_at)
        if not (shown or older) and await blobs.get(keys.spec(following)) is None:
            return ()
        specs = await asyncio.gather(*(blobs.get(keys.spec(one)) for one in coming))
        found = [coming[one] for one, spec in zip(coming, specs, strict=True) if one in shown or spec is not None]
        if not found:
            self._clear.add(job.id)
        return found

    async def was_sent(self, attempt: Attempt) -> bool:
        """Whether a create of this attempt may have been sent, though its row says that none was."""
        if not self._may_be_older(attempt.created_at):
            return False
        return await self._context.blobs.get(keys.spec(attempt.id)) is not None

    async def was_superseded(self, job: Job, attempt: Attempt) -> bool:
        """Whether an attempt after this one, the last that the job knows of, was bought."""
        if not self._may_be_older(attempt.created_at):
            return False
        blobs = self._context.blobs
        specs = await asyncio.gather(*(blobs.get(keys.spec(one)) for one in possible_attempts(job)))
        return any(spec is not None for spec in specs)

    def begin(self) -> None:
        """This process works from now on; again and again."""
        self._began = self._began or self._context.clock.now()

    def _may_be_older(self, created_at: datetime) -> bool:
        return self._began is None or created_at < self._began

    async def blocking_machine(self, job: Job, numbers: Sequence[int]) -> str | None:
        """Why it must wait for machines of these attempts; None: they are proven to be absent, at every cloud."""
        now, names = self._context.clock.monotonic(), [self._name(attempt_id(job.id, number)) for number in numbers]
        since = {name: self._since.setdefault(name, now) for name in names}
        silent = await self._inventory.refresh_all(self._context.providers)
        for number, name in zip(numbers, names, strict=True):
            if clouds := self._clouds_of(name):
                final = await read_final(self._context, attempt_id(job.id, number))
                return still_running_message(number, f"{name} at {', '.join(clouds)}", final)
        for number, name in zip(numbers, names, strict=True):
            if silent or not all(
                self._inventory.absent_since(one, name, since[name]) for one in self._context.providers
            ):
                return unproven_message(number, silent)
        for name in names:
            del self._since[name]
        return None

    async def ended_for(self, attempt: AttemptId) -> Reason | None:
        """What ended its job, where its last word and what it was told say so."""
        final = await read_final(self._context, attempt)
        return None if final is None else await drain_reason_sent(self._context, attempt, final)

    def _name(self, attempt: AttemptId) -> InstanceName:
        return instance_name(self._context.installation, attempt)

    def _clouds_of(self, name: InstanceName) -> list[str]:
        return [provider for provider in self._context.providers if self._inventory.shows(provider, name)]


async def drain_reason_sent(context: ControllerContext, attempt: AttemptId, final: Final) -> Reason | None:
    """See `drained_for`. Raises BlobsUnavailable."""
    if final.outcome is not Outcome.DRAINED:
        return None
    data = await context.blobs.get(keys.desired(attempt))
    try:
        return None if data is None else drain_reason(Desired.model_validate_json(data))
    except ValidationError:
        return None
