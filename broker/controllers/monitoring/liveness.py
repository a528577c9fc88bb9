"""Booting and training attempts: progress, the first beat, and death, which only the cloud can declare."""

from collections.abc import Sequence, Set
from dataclasses import replace

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event, kept, moved, news
from broker.controllers.observation.attempt_observer import AttemptObserver
from broker.controllers.observation.restored_attempts import drain_reason_sent
from broker.domain.errors import BlobsUnavailable
from broker.domain.job import Attempt, AttemptState, Event, Reason
from broker.lifecycle.liveness import AttemptObservation, fault_message, judge, mismatch_message
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import reason_of, setup_reason, step
from broker.ports import Change, Lane, Leased

UNHEARD = "nothing is heard of it"


class LivenessController:
    """Claims attempts that are booting or training, without a signal."""

    name = "liveness"

    def __init__(self, context: ControllerContext, looker: AttemptObserver) -> None:
        self._context = context
        self._looker = looker
        self._claims = Claims(context, Lane.LIVENESS)
        self.every_s = context.rhythm.poll_s

    async def step(self) -> bool:
        async with self._claims.leased(limit=self._context.rhythm.claim, turns=self._looker.turns) as leased:
            self.every_s = self._context.rhythm.poll_s
            if not leased:
                await self._looker.beats.go_on()
            return bool(leased) and await self._look(leased)

    async def _look(self, leased: Sequence[Leased]) -> bool:
        context = self._context
        unlisted = await self._looker.refresh(leased)
        judged = await decide_batch(context, self.name, leased, lambda one: self._judge(one, unlisted))
        self.every_s = min([self.every_s, *(self._looker.again_s(one.attempt.id) for one in leased)])
        await context.store.apply([change for _, change in judged])
        return len(leased) == context.rhythm.claim

    async def _judge(self, one: Leased, unlisted: set[str]) -> Change:
        context = self._context
        try:
            attempt, seen = await self._looker.observe(one.attempt, unlisted)
            drained_for = attempt.reason
            if seen.final and drained_for is None:
                drained_for = await drain_reason_sent(context, attempt.id, seen.final)
        except BlobsUnavailable:  # the cloud shows an end, and whether it is the job's own the blob store alone tells
            return Change(attempt=(one.attempt, one.attempt), due_in_s=context.rhythm.look_s)
        deadline = context.provider_of(attempt).caps.boot_deadline_s
        told = judge(attempt, seen, context.clock.now(), context.patience, deadline)
        if told is None:
            attempt, unheard = self._unheard(one, attempt, seen, unlisted)
            heard = (*news(one.job, one.attempt, attempt), *unheard)
            return Change(attempt=(one.attempt, attempt), events=heard, due_in_s=self._looker.again_s(attempt.id))
        return self._move(one, attempt, seen, told, drained_for)

    def _unheard(
        self, one: Leased, attempt: Attempt, seen: AttemptObservation, unlisted: Set[str]
    ) -> tuple[Attempt, tuple[Event, ...]]:
        """People are told once where neither it nor its cloud says anything: unknown is not dead, and bills."""
        provider = attempt.line.offer.provider
        silent = seen.store_ok and (seen.beat_age_s or 0.0) >= self._context.patience.silence_s
        known = one.attempt.detail.startswith(UNHEARD)
        if not silent or provider not in unlisted:
            return (replace(attempt, detail="") if known else attempt), ()
        if known:
            return attempt, ()
        said = f"{UNHEARD}: it does not beat, and {provider} cannot be listed: {self._looker.trouble(provider)}"
        told = event(one.job, "attempt.silent", f"attempt {attempt.number}: {said}; it is charged", attempt=attempt)
        return replace(attempt, detail=said), (told,)

    def _move(
        self, one: Leased, attempt: Attempt, seen: AttemptObservation, told: AttemptEvent, drained_for: Reason | None
    ) -> Change:
        """`drained_for`: also where an older database does not know of the drain."""
        reason = reason_of(seen.final, drained_for) if seen.final else None
        if told is AttemptEvent.SETUP_FAILED:
            reason = setup_reason(seen.seen)
        now = step(attempt, told, self._context.clock.now(), reason=reason).attempt
        if told is AttemptEvent.MISMATCH:
            now = replace(now, detail=mismatch_message(attempt.line.offer, seen.seen) or "")
        elif told is AttemptEvent.SETUP_FAILED:
            now = replace(now, detail=fault_message(seen.seen) or told.value)
        elif told is not AttemptEvent.FIRST_BEAT:
            now = replace(now, detail=seen.final.message if seen.final else told.value)
        if not now.handles:
            now = replace(now, handles=tuple(o.handle for o in seen.seen))
        due = self._context.rhythm.look_s if now.state is AttemptState.TRAINING else 0.0
        told_of = (*news(one.job, one.attempt, now), moved(one.job, now), *kept(one.job, now))
        return Change(attempt=(one.attempt, now), events=told_of, due_in_s=due)
