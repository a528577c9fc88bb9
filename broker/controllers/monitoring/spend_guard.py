"""Spend guard: reports forecasts past the cap or the deadline, and idle machines; signals idle attempts to end.

Steps: read training attempts and the policies of their owners. Gather `GuardFacts` for each, call `decide_guard` if its
heartbeat is new, and write all that is new as notes.
Facts: heartbeats, step rate, policies, spot preemptions of own runs.
Decisions: a new forecast, events of a forecast past a limit or of an idle machine, signal IDLE, IDLE_NOW or HUNG.
"""

from collections.abc import Sequence
from typing import TypeAlias

from broker.controllers.base.context import ControllerContext
from broker.domain.ids import AttemptId
from broker.domain.job import AttemptState
from broker.domain.policy import Policy
from broker.estimator.planning.corrections import NO_CORRECTIONS, LearnedCorrections
from broker.lifecycle.idle import IdleWatch
from broker.ports import Leased, Note
from broker.quote.forecast import StepRateWindow
from broker.quote.guard_decision import GuardFacts, decide_guard

_Judged: TypeAlias = tuple[object, ...]
"""Facts of a decision that reported nothing: see `_judged`."""


class Guard:
    """Reads without a lease. A note is applied only if no broker has reported the same meanwhile."""

    name = "guard"

    def __init__(self, context: ControllerContext, learned: LearnedCorrections = lambda: NO_CORRECTIONS) -> None:
        """`learned`: corrections from own runs. Forecasts use only their preemption rates."""
        self._context, self._learned = context, learned
        self._step_rates: dict[AttemptId, StepRateWindow | None] = {}
        self._idle_watches: dict[AttemptId, IdleWatch] = {}
        self._judged: dict[AttemptId, _Judged] = {}
        self.every_s = context.intervals.billing_s

    async def step(self) -> bool:
        store, providers = self._context.store, self._context.providers
        training = [
            row
            for row in await store.sent_attempts()
            if row.attempt.state is AttemptState.TRAINING and row.attempt.line.offer.provider in providers
        ]
        self._retain({row.attempt.id for row in training})
        if not training:
            return False
        _, applied = await store.applied(sorted({(row.job.team, row.job.owner) for row in training}))
        notes = []
        for row in training:
            policies = [entry.policy for entry in applied.get((row.job.team, row.job.owner), ())]
            if (note := self._note(row, policies)) is not None:
                notes.append(note)
        if notes:
            await store.note(notes)
        return False

    def _note(self, row: Leased, policies: Sequence[Policy]) -> Note | None:
        """Return what is new about an attempt; None: nothing is new, it has no heartbeat yet, or it has a signal."""
        attempt, job = row.attempt, row.job
        if attempt.signal is not None or (facts := self._gather(row, policies)) is None:
            return None
        judged = _judged(facts)
        if self._judged.get(attempt.id) == judged:
            return None
        decision = decide_guard(facts)
        self._step_rates[attempt.id], self._idle_watches[attempt.id] = decision.step_rate, decision.idle_watch
        if not decision.is_new:
            self._judged[attempt.id] = judged
            return None
        return Note(
            attempt=attempt,
            job=job,
            forecast=decision.forecast,
            idle=decision.idle,
            signal=decision.signal,
            events=decision.events,
        )

    def _gather(self, row: Leased, policies: Sequence[Policy]) -> GuardFacts | None:
        """Return the facts about an attempt; None: it has no heartbeat."""
        attempt, context = row.attempt, self._context
        if attempt.beat is None:
            return None
        return GuardFacts(
            job=row.job,
            attempt=attempt,
            beat=attempt.beat,
            caps=context.provider_of(attempt).caps,
            drain_budget=context.drain_budget,
            policies=policies,
            spots=self._learned().spots,
            now=context.clock.now(),
            at_s=context.clock.monotonic(),
            step_rate=self._step_rates.get(attempt.id),
            idle_watch=self._idle_watches.get(attempt.id),
        )

    def _retain(self, training: set[AttemptId]) -> None:
        """Forget attempts that do not train."""
        self._step_rates = {attempt: rate for attempt, rate in self._step_rates.items() if attempt in training}
        self._idle_watches = {attempt: watch for attempt, watch in self._idle_watches.items() if attempt in training}
        self._judged = {attempt: judged for attempt, judged in self._judged.items() if attempt in training}


def _judged(facts: GuardFacts) -> _Judged:
    """Return the facts on which a decision depends, without the time: a forecast is made once for each heartbeat."""
    beat, attempt, job = facts.beat, facts.attempt, facts.job
    return beat.boot, beat.seq, attempt.idle, attempt.prices, job.cap_usd, job.forecast, facts.policies, facts.spots
