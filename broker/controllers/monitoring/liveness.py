"""Liveness: records the progress of booting and training attempts, and detects their end.

Steps: claim, observe by `AttemptObserver`, judge by `broker.lifecycle.liveness.judge`, apply. Decisions: keep
observing, FIRST_BEAT, FINAL, GONE, HUNG, MISMATCH, SETUP_FAILED, DEADLINE or NOTICE.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import agent_events, event, inspection_events, transition_event
from broker.controllers.observation.attempt_observer import AttemptObserver
from broker.controllers.observation.restored_attempts import drain_reason_sent
from broker.domain.errors import BlobsUnavailable
from broker.domain.job import Attempt, AttemptState, Event, Reason
from broker.lifecycle.liveness import AttemptObservation, fault_message, judge, mismatch_message
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import reason_of, setup_reason, step
from broker.ports import Change, Lane, Leased

SILENT = "it sends no heartbeat"


class LivenessController:
    """Claims attempts that are booting or training, without a signal."""

    name = "liveness"

    def __init__(self, context: ControllerContext, observer: AttemptObserver) -> None:
        self._context = context
        self._observer = observer
        self._claims = Claims(context, Lane.LIVENESS)
        self.every_s = context.intervals.poll_s

    async def step(self) -> bool:
        async with self._claims.leased(limit=self._context.intervals.claim, turns=self._observer.turns) as leased:
            self.every_s = self._context.intervals.poll_s
            if not leased:
                await self._observer.beats.refresh_if_overdue()
            return bool(leased) and await self._look(leased)

    async def _look(self, leased: Sequence[Leased]) -> bool:
        context = self._context
        unlisted = await self._observer.refresh(leased)
        decisions = await decide_batch(context, self.name, leased, lambda row: self._judge(row, unlisted))
        self.every_s = min([self.every_s, *(self._observer.poll_in_s(row.attempt.id) for row in leased)])
        await context.store.apply([change for _, change in decisions])
        return len(leased) == context.intervals.claim

    async def _judge(self, row: Leased, unlisted: set[str]) -> Change:
        context = self._context
        try:
            attempt, observation = await self._observer.observe(row.attempt, unlisted)
            drained_for = attempt.reason
            if observation.final and drained_for is None:
                drained_for = await drain_reason_sent(context, attempt.id, observation.final)
        except BlobsUnavailable:  # the listings show an end, and only the blob store holds its reason
            return Change(attempt=(row.attempt, row.attempt), due_in_s=context.intervals.look_s)
        deadline = context.provider_of(attempt).caps.boot_deadline_s
        outcome = judge(attempt, observation, context.clock.now(), context.timeouts, deadline)
        if outcome is None:
            attempt, silent = self._silent(row, attempt, observation, unlisted)
            reports = (*agent_events(row.job, row.attempt, attempt), *silent)
            return Change(attempt=(row.attempt, attempt), events=reports, due_in_s=self._observer.poll_in_s(attempt.id))
        return self._move(row, attempt, observation, outcome, drained_for)

    def _silent(
        self, row: Leased, attempt: Attempt, observation: AttemptObservation, unlisted: Set[str]
    ) -> tuple[Attempt, tuple[Event, ...]]:
        """Report once that neither the agent nor its cloud answers. Unknown is not dead, so the attempt is charged."""
        provider = attempt.line.offer.provider
        is_silent = observation.store_ok and (observation.beat_age_s or 0.0) >= self._context.timeouts.silence_s
        is_reported = row.attempt.detail.startswith(SILENT)
        if not is_silent or provider not in unlisted:
            return (replace(attempt, detail="") if is_reported else attempt), ()
        if is_reported:
            return attempt, ()
        detail = f"{SILENT}, and {provider} cannot be listed: {self._observer.trouble(provider)}"
        report = event(row.job, "attempt.silent", f"attempt {attempt.number}: {detail}; it is charged", attempt=attempt)
        return replace(attempt, detail=detail), (report,)

    def _move(
        self,
        row: Leased,
        attempt: Attempt,
        observation: AttemptObservation,
        outcome: AttemptEvent,
        drained_for: Reason | None,
    ) -> Change:
        """Return the change for an event. `drained_for`: reason of a drain, even if a backup lacks it."""
        reason = reason_of(observation.final, drained_for) if observation.final else None
        if outcome is AttemptEvent.SETUP_FAILED:
            reason = setup_reason(observation.seen)
        following = step(attempt, outcome, self._context.clock.now(), reason=reason).attempt
        if outcome is AttemptEvent.MISMATCH:
            following = replace(following, detail=mismatch_message(attempt.line.offer, observation.seen) or "")
        elif outcome is AttemptEvent.SETUP_FAILED:
            following = replace(following, detail=fault_message(observation.seen) or outcome.value)
        elif outcome is not AttemptEvent.FIRST_BEAT:
            following = replace(following, detail=observation.final.message if observation.final else outcome.value)
        if not following.handles:
            following = replace(following, handles=tuple(o.handle for o in observation.seen))
        due = self._context.intervals.look_s if following.state is AttemptState.TRAINING else 0.0
        reports = (
            *agent_events(row.job, row.attempt, following),
            transition_event(row.job, following),
            *inspection_events(row.job, following),
        )
        return Change(attempt=(row.attempt, following), events=reports, due_in_s=due)
