"""Liveness: records the progress of booting and training attempts, and detects their end.

Steps: claim, gather `LivenessFacts` by `AttemptObserver`, decide by `decide_liveness`, apply all changes at once.
Facts: heartbeats, listings, the final report, the reason of a drain that a restored backup lacks.
Decisions: keep observing, report silence, FIRST_BEAT, FINAL, GONE, HUNG, MISMATCH, SETUP_FAILED, DEADLINE or NOTICE.
"""

from collections.abc import Sequence

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import liveness_events
from broker.controllers.observation.attempt_observer import AttemptObserver
from broker.controllers.observation.restored_attempts import drain_reason_sent
from broker.domain.errors import BlobsUnavailable
from broker.domain.job import Job
from broker.lifecycle.decisions.liveness_decision import LivenessDecision, LivenessFacts, decide_liveness
from broker.ports import Change, Lane, Leased


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
            return bool(leased) and await self._decide_all(leased)

    async def _decide_all(self, leased: Sequence[Leased]) -> bool:
        context = self._context
        unlisted = await self._observer.refresh(leased)
        decisions = await decide_batch(context, self.name, leased, lambda row: self._decide(row, unlisted))
        self.every_s = min([self.every_s, *(self._observer.poll_in_s(row.attempt.id) for row in leased)])
        await context.store.apply([_change(row.job, decision) for row, decision in decisions])
        return len(leased) == context.intervals.claim

    async def _decide(self, row: Leased, unlisted: set[str]) -> LivenessDecision:
        return decide_liveness(await self._gather(row, unlisted))

    async def _gather(self, row: Leased, unlisted: set[str]) -> LivenessFacts:
        """Return the facts about one attempt. `unlisted`: clouds that did not answer the latest refresh."""
        context, provider = self._context, row.attempt.line.offer.provider
        attempt, observation, drained_for = row.attempt, None, row.attempt.reason
        try:
            attempt, latest = await self._observer.observe(row.attempt, unlisted)
            if latest.final and drained_for is None:
                drained_for = await drain_reason_sent(context, attempt.id, latest.final)
            observation = latest
        except BlobsUnavailable:
            pass  # the listings show an end, but its reason is in the blob store, so the decision waits
        return LivenessFacts(
            job=row.job,
            before=row.attempt,
            attempt=attempt,
            observation=observation,
            now=context.clock.now(),
            timeouts=context.timeouts,
            boot_deadline_s=context.provider_of(row.attempt).caps.boot_deadline_s,
            drained_for=drained_for,
            unlisted=self._observer.trouble(provider) if provider in unlisted else None,
            poll_s=self._observer.poll_in_s(row.attempt.id),
            look_s=context.intervals.look_s,
        )


def _change(job: Job, decision: LivenessDecision) -> Change:
    return Change(
        attempt=(decision.before, decision.attempt),
        events=liveness_events(job, decision),
        due_in_s=decision.due_in_s,
    )
