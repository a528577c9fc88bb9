"""Stop, cap and notice: ask for a checkpoint, wait for the last word or the end of the grace, then let go."""

from collections.abc import Sequence, Set
from dataclasses import replace

from broker.billing.time_limits import out_of_time_message
from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event, kept, news
from broker.controllers.observation.attempt_observer import AttemptObserver
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId
from broker.domain.job import Attempt, AttemptState, Job
from broker.lifecycle.liveness import AttemptObservation, judge
from broker.lifecycle.signals import is_drain_over, required_end
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import reason_of, step
from broker.ports import Change, Lane, Leased
from trainer.contract import object_keys as keys
from trainer.contract.documents import Desired


class Interruption:
    """Claims attempts that are draining, and booting or training ones with a signal."""

    name = "interruption"

    def __init__(self, context: ControllerContext, looker: AttemptObserver) -> None:
        self._context = context
        self._looker = looker
        self._claims = Claims(context, Lane.INTERRUPTION)
        self._asked: set[AttemptId] = set()
        self.every_s = context.rhythm.poll_s

    async def step(self) -> bool:
        async with self._claims.leased(limit=self._context.rhythm.claim, turns=self._context.at_once) as leased:
            return bool(leased) and await self._go_on(leased)

    async def _go_on(self, leased: Sequence[Leased]) -> bool:
        context = self._context
        draining = [one for one in leased if one.attempt.state is AttemptState.DRAINING]
        unlisted = await self._looker.refresh(draining) if draining else set()

        async def decide(one: Leased) -> Change:
            if one.attempt.state is AttemptState.DRAINING:
                return await self._wait(one, unlisted)
            return self._interrupt(one)

        decided = await decide_batch(context, self.name, leased, decide)
        await context.store.apply([change for _, change in decided])
        return len(leased) == context.rhythm.claim

    def _interrupt(self, one: Leased) -> Change:
        now = self._context.clock.now()
        why = required_end(one.attempt, one.job)
        assert why is not None
        moved = step(one.attempt, why, now).attempt
        words = out_of_time_message(one.job, now) if why is AttemptEvent.OUT_OF_TIME else why.value
        told = event(
            one.job,
            f"attempt.{moved.state.value}",
            f"attempt {moved.number} is {moved.state.value}: {words}",
            attempt=moved,
        )
        return Change(attempt=(one.attempt, replace(moved, detail=words)), events=(told,))

    async def _wait(self, one: Leased, unlisted: set[str]) -> Change:
        context = self._context
        await self._ask(one.attempt)
        try:
            attempt, seen = await self._looker.observe(one.attempt, unlisted)
        except BlobsUnavailable:
            attempt, seen = one.attempt, AttemptObservation(store_ok_s=None)
        told = judge(attempt, seen, context.clock.now(), context.patience, float("inf"))
        if told not in (AttemptEvent.FINAL, AttemptEvent.GONE):
            told = AttemptEvent.GRACE_OVER if self._grace_over(attempt, one.job) else None
        if told is None:
            heard = news(one.job, one.attempt, attempt)
            return Change(attempt=(one.attempt, attempt), events=heard, due_in_s=self._look_s)
        reason = reason_of(seen.final, attempt.reason) if seen.final else None
        moved = step(attempt, told, context.clock.now(), reason=reason).attempt
        return Change(attempt=(one.attempt, moved), events=(*news(one.job, one.attempt, moved), *kept(one.job, moved)))

    @property
    def _look_s(self) -> float:
        return min(1.0, self._context.rhythm.look_s)

    def _grace_over(self, attempt: Attempt, job: Job) -> bool:
        context = self._context
        caps, now = context.provider_of(attempt).caps, context.clock.now()
        heard_s = self._look_s + context.limits.poll_s
        return is_drain_over(attempt, job, caps, now, context.tempo, poll_s=self._look_s, order_s=heard_s)

    async def _ask(self, attempt: Attempt) -> None:
        """Writes desired.json once a process; another broker's write of the same is harmless."""
        if attempt.id in self._asked:
            return
        reason = attempt.reason.value if attempt.reason else ""
        wish = Desired(want="drain", epoch=attempt.epoch, seq=1, reason=reason)
        try:
            await self._context.blobs.put(keys.desired(attempt.id), wish.model_dump_json().encode())
        except BlobsUnavailable:
            return  # asked again at the next look; the grace goes on
        self._asked.add(attempt.id)

    def keep(self, live: Set[AttemptId]) -> None:
        """Forgets all others."""
        self._asked &= live
