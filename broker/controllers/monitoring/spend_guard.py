"""Spend guard: reports forecasts past the cap or the deadline, and idle machines; signals idle attempts to end.

Facts: heartbeats, step rate, policies, spot preemptions of own runs. Decisions: see `broker.quote.forecast` and
`broker.lifecycle.idle`.
"""

from decimal import Decimal

from broker.billing.caps import min_budget_usd
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.domain.ids import AttemptId
from broker.domain.job import AttemptState, Event, Forecast
from broker.domain.spec import IdleAction, IdlePolicy, idle_policy
from broker.estimator.planning.corrections import NO_CORRECTIONS, LearnedCorrections
from broker.lifecycle import idle
from broker.lifecycle.idle import Idle, judge_idle
from broker.ports import Leased, Note
from broker.quote import forecast

CONSEQUENCES: dict[IdleAction, str] = {
    "notify": "it bills on; end it with `gpubroker cancel {job}`",
    "drain": "checkpoint and end",
    "end": "it is ended",
}


class Guard:
    """Reads without a lease. A note is applied only if no broker has reported the same meanwhile."""

    name = "guard"

    def __init__(self, context: ControllerContext, learned: LearnedCorrections = lambda: NO_CORRECTIONS) -> None:
        """`learned`: corrections from own runs, of which forecasts use the preemptions."""
        self._context, self._learned = context, learned
        self._paces: dict[AttemptId, forecast.StepRateWindow | None] = {}
        self._watched: dict[AttemptId, idle.IdleWatch] = {}
        self.every_s = context.intervals.billing_s

    async def step(self) -> bool:
        store = self._context.store
        live, providers = await store.live_attempts(), self._context.providers
        training = [
            row
            for row in live
            if row.attempt.state is AttemptState.TRAINING and row.attempt.line.offer.provider in providers
        ]
        known = {row.attempt.id for row in training}
        self._paces = {attempt: pace for attempt, pace in self._paces.items() if attempt in known}
        self._watched = {attempt: watched for attempt, watched in self._watched.items() if attempt in known}
        if not training:
            return False
        _, applied = await store.applied(sorted({(row.job.team, row.job.owner) for row in training}))
        notes = []
        for row in training:
            # The narrowest policy with an idle rule: a user's, then a team's, then the installation's.
            policies = [entry.policy for entry in applied.get((row.job.team, row.job.owner), ())]
            idle_policies = [policy for policy in policies if policy.idle is not None]
            narrowest = max(
                idle_policies, key=lambda policy: (policy.user is not None, policy.team is not None), default=None
            )
            note = self._note(row, idle_policy(row.job.spec.idle, narrowest.idle if narrowest else None))
            if note is not None:
                notes.append(note)
        if notes:
            await store.note(notes)
        return False

    def _note(self, row: Leased, policy: IdlePolicy) -> Note | None:
        """Return the new forecast and idleness of an attempt; None: nothing is new."""
        attempt, job, now = row.attempt, row.job, self._context.clock.now()
        if attempt.beat is None or attempt.signal is not None:
            return None
        at_s = self._context.clock.monotonic()
        pace = self._paces[attempt.id] = forecast.watch(self._paces.get(attempt.id), attempt, at_s)
        caps = self._context.provider_of(attempt).caps
        step_s, spots = pace.step_s if pace else None, self._learned().spots
        predicted = forecast.forecast(attempt, job, caps, step_s, now, spots) or job.forecast
        watched = self._watched[attempt.id] = idle.watch(self._watched.get(attempt.id), attempt.beat, at_s, policy)
        idle_state = judge_idle(watched, policy)
        kind = idle_state.kind if idle_state else None
        if not forecast.differs(predicted, job.forecast) and kind == attempt.idle:
            return None
        new_idle = idle_state if kind != attempt.idle else None
        return Note(
            attempt=attempt,
            job=job,
            forecast=predicted,
            idle=kind,
            signal=idle.idle_signal(new_idle) if new_idle else None,
            events=(*self._overrun_events(row, predicted), *_idle_events(row, new_idle)),
        )

    def _overrun_events(self, row: Leased, predicted: Forecast | None) -> list[Event]:
        """Return events for a forecast that has just passed the cap or the deadline."""
        attempt, job, known = row.attempt, row.job, row.job.forecast
        reports: list[Event] = []
        if predicted is None:
            return reports
        if predicted.over_cap and not (known and known.over_cap):
            drain_usd = self._drain_usd(row)
            data = {
                "usd": str(predicted.usd),
                "over_usd": str(predicted.usd - job.cap_usd),
                "cap_usd": str(job.cap_usd),
                "would_do_usd": str(forecast.sufficient_cap_usd(predicted, job, drain_usd)),
                "finish_at": predicted.finish_at.isoformat(),
            }
            message = forecast.overrun_message(predicted, job, drain_usd)
            reports.append(event(job, "job.overrun_forecast", message, attempt=attempt, data=data))
        if predicted.late and not (known and known.late):
            message = forecast.late_message(predicted, attempt, job, self._context.clock.now())
            data = {"finish_at": predicted.finish_at.isoformat()}
            reports.append(event(job, "job.late_forecast", message, attempt=attempt, data=data))
        return reports

    def _drain_usd(self, row: Leased) -> Decimal:
        caps, every_s = self._context.provider_of(row.attempt).caps, row.job.spec.checkpoint.min_interval_s
        return min_budget_usd(row.attempt.line, caps, every_s, self._context.drain_budget)


def _idle_events(row: Leased, idle_state: Idle | None) -> list[Event]:
    if idle_state is None:
        return []
    consequence = CONSEQUENCES[idle_state.action].format(job=row.job.id)
    data = {"kind": idle_state.kind, "action": idle_state.action}
    return [event(row.job, "job.idle", f"{idle_state.message}; {consequence}", attempt=row.attempt, data=data)]
