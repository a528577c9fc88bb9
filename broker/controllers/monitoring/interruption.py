"""Interruption: drains attempts for a stop, a limit or a preemption notice, and then ends them.

Steps: decide on attempts with a signal by `interrupt`. For draining attempts, ask the agent to save, gather
`DrainFacts`, and call `decide_drain`. Apply all changes at once.
Facts: signals, heartbeats, final report, listings, money and time left.
Decisions: start to drain or end, and for a drain: wait, FINAL, GONE or GRACE_OVER.
"""

from collections.abc import Sequence, Set

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import drain_events, interruption_event
from broker.controllers.observation.attempt_observer import AttemptObserver
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId
from broker.domain.job import Attempt, AttemptState, Event
from broker.lifecycle.decisions.interruption_decision import DrainFacts, InterruptionDecision, decide_drain, interrupt
from broker.lifecycle.liveness import AttemptObservation
from broker.ports import Change, Lane, Leased
from trainer.contract import object_keys
from trainer.contract.documents import Desired


class Interruption:
    """Claims attempts that are draining, and attempts with a signal that are booting or training."""

    name = "interruption"

    def __init__(self, context: ControllerContext, observer: AttemptObserver) -> None:
        self._context = context
        self._observer = observer
        self._claims = Claims(context, Lane.INTERRUPTION)
        self._requested: set[AttemptId] = set()
        self.every_s = context.intervals.poll_s

    async def step(self) -> bool:
        async with self._claims.leased(
            limit=self._context.intervals.claim, turns=self._context.no_wait_turns
        ) as leased:
            return bool(leased) and await self._work_on(leased)

    async def _work_on(self, leased: Sequence[Leased]) -> bool:
        context = self._context
        draining = [row for row in leased if row.attempt.state is AttemptState.DRAINING]
        unlisted = await self._observer.refresh(draining) if draining else set()

        async def decide(row: Leased) -> Change:
            if row.attempt.state is AttemptState.DRAINING:
                await self._request_drain(row.attempt)
                drain = decide_drain(await self._gather(row, unlisted))
                return _change(drain, drain_events(row.job, drain))
            decision = interrupt(row.attempt, row.job, context.clock.now())
            return _change(decision, (interruption_event(row.job, decision),))

        decided = await decide_batch(context, self.name, leased, decide)
        await context.store.apply([change for _, change in decided])
        return len(leased) == context.intervals.claim

    async def _gather(self, row: Leased, unlisted: set[str]) -> DrainFacts:
        """Return the facts about a draining attempt. `unlisted`: clouds that did not answer the latest refresh."""
        context, poll_s = self._context, min(1.0, self._context.intervals.look_s)
        try:
            attempt, observation = await self._observer.observe(row.attempt, unlisted)
        except BlobsUnavailable:
            attempt, observation = row.attempt, AttemptObservation(store_ok_s=None)
        return DrainFacts(
            job=row.job,
            before=row.attempt,
            attempt=attempt,
            observation=observation,
            caps=context.provider_of(row.attempt).caps,
            now=context.clock.now(),
            timeouts=context.timeouts,
            drain_budget=context.drain_budget,
            poll_s=poll_s,
            order_s=poll_s + context.limits.poll_s,
        )

    async def _request_drain(self, attempt: Attempt) -> None:
        """Write desired.json once in this process. The same write by another broker is harmless."""
        if attempt.id in self._requested:
            return
        reason = attempt.reason.value if attempt.reason else ""
        desired = Desired(want="drain", epoch=attempt.epoch, seq=1, reason=reason)
        try:
            await self._context.blobs.put(object_keys.desired(attempt.id), desired.model_dump_json().encode())
        except BlobsUnavailable:
            return  # repeated at the next poll; the drain's timeout keeps running
        self._requested.add(attempt.id)

    def keep(self, live: Set[AttemptId]) -> None:
        """Forget attempts that are not live."""
        self._requested &= live


def _change(decision: InterruptionDecision, events: tuple[Event, ...]) -> Change:
    return Change(attempt=(decision.before, decision.attempt), events=events, due_in_s=decision.due_in_s)
