"""Interruption: drains attempts for a stop, a limit or a preemption notice, and then ends them.

Steps: an attempt with a signal starts to drain, and its agent is asked to save. The drain ends with the final report,
with the end of the machine, or when its time is over.
Facts: signals, heartbeats, final report, listings, money and time left. Decisions: wait, FINAL, GONE or GRACE_OVER.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from broker.billing.time_limits import out_of_time_message
from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import agent_events, event, inspection_events
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
    """Claims attempts that are draining, and attempts with a signal that are booting or training."""

    name = "interruption"

    def __init__(self, context: ControllerContext, observer: AttemptObserver) -> None:
        self._context = context
        self._observer = observer
        self._claims = Claims(context, Lane.INTERRUPTION)
        self._requested: set[AttemptId] = set()
        self.every_s = context.intervals.poll_s

    async def step(self) -> bool:
        async with self._claims.leased(limit=self._context.intervals.claim, turns=self._context.at_once) as leased:
            return bool(leased) and await self._work_on(leased)

    async def _work_on(self, leased: Sequence[Leased]) -> bool:
        context = self._context
        draining = [row for row in leased if row.attempt.state is AttemptState.DRAINING]
        unlisted = await self._observer.refresh(draining) if draining else set()

        async def decide(row: Leased) -> Change:
            if row.attempt.state is AttemptState.DRAINING:
                return await self._wait(row, unlisted)
            return self._interrupt(row)

        decided = await decide_batch(context, self.name, leased, decide)
        await context.store.apply([change for _, change in decided])
        return len(leased) == context.intervals.claim

    def _interrupt(self, row: Leased) -> Change:
        now = self._context.clock.now()
        signal = required_end(row.attempt, row.job)
        assert signal is not None
        moved = step(row.attempt, signal, now).attempt
        message = out_of_time_message(row.job, now) if signal is AttemptEvent.OUT_OF_TIME else signal.value
        report = event(
            row.job,
            f"attempt.{moved.state.value}",
            f"attempt {moved.number} is {moved.state.value}: {message}",
            attempt=moved,
        )
        return Change(attempt=(row.attempt, replace(moved, detail=message)), events=(report,))

    async def _wait(self, row: Leased, unlisted: set[str]) -> Change:
        context = self._context
        await self._request_drain(row.attempt)
        try:
            attempt, observation = await self._observer.observe(row.attempt, unlisted)
        except BlobsUnavailable:
            attempt, observation = row.attempt, AttemptObservation(store_ok_s=None)
        outcome = judge(attempt, observation, context.clock.now(), context.timeouts, float("inf"))
        if outcome not in (AttemptEvent.FINAL, AttemptEvent.GONE):
            outcome = AttemptEvent.GRACE_OVER if self._grace_over(attempt, row.job) else None
        if outcome is None:
            reports = agent_events(row.job, row.attempt, attempt)
            return Change(attempt=(row.attempt, attempt), events=reports, due_in_s=self._look_s)
        reason = reason_of(observation.final, attempt.reason) if observation.final else None
        moved = step(attempt, outcome, context.clock.now(), reason=reason).attempt
        return Change(
            attempt=(row.attempt, moved),
            events=(*agent_events(row.job, row.attempt, moved), *inspection_events(row.job, moved)),
        )

    @property
    def _look_s(self) -> float:
        return min(1.0, self._context.intervals.look_s)

    def _grace_over(self, attempt: Attempt, job: Job) -> bool:
        context = self._context
        caps, now = context.provider_of(attempt).caps, context.clock.now()
        heard_s = self._look_s + context.limits.poll_s
        return is_drain_over(attempt, job, caps, now, context.drain_budget, poll_s=self._look_s, order_s=heard_s)

    async def _request_drain(self, attempt: Attempt) -> None:
        """Write desired.json once in this process. The same write by another broker is harmless."""
        if attempt.id in self._requested:
            return
        reason = attempt.reason.value if attempt.reason else ""
        desired = Desired(want="drain", epoch=attempt.epoch, seq=1, reason=reason)
        try:
            await self._context.blobs.put(keys.desired(attempt.id), desired.model_dump_json().encode())
        except BlobsUnavailable:
            return  # repeated at the next poll; the time of the drain runs on
        self._requested.add(attempt.id)

    def keep(self, live: Set[AttemptId]) -> None:
        """Forget attempts that are not live."""
        self._requested &= live
