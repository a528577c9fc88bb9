"""Watches what running jobs do with their money: a forecast past the cap or the deadline, machines that do nothing."""

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

FOLLOWS: dict[IdleAction, str] = {
    "notify": "it bills on; end it with `gpubroker cancel {job}`",
    "drain": "checkpoint and end",
    "end": "it is ended",
}


class Guard:
    """Reads without a lease; a note applies only if nobody told people the same meanwhile."""

    name = "guard"

    def __init__(self, context: ControllerContext, learned: LearnedCorrections = lambda: NO_CORRECTIONS) -> None:
        """`learned`: what own runs have shown, of which forecasts take the preemptions."""
        self._context, self._learned = context, learned
        self._paces: dict[AttemptId, forecast.StepRateWindow | None] = {}
        self._watched: dict[AttemptId, idle.IdleWatch] = {}
        self.every_s = context.rhythm.billing_s

    async def step(self) -> bool:
        store = self._context.store
        live, own = await store.live_attempts(), self._context.providers
        training = [
            one for one in live if one.attempt.state is AttemptState.TRAINING and one.attempt.line.offer.provider in own
        ]
        known = {one.attempt.id for one in training}
        self._paces = {one: pace for one, pace in self._paces.items() if one in known}
        self._watched = {one: watched for one, watched in self._watched.items() if one in known}
        if not training:
            return False
        _, applied = await store.applied(sorted({(one.job.team, one.job.owner) for one in training}))
        notes = []
        for one in training:
            # The narrowest policy that says something: a user's before a team's before the installation's.
            policies = [kept.policy for kept in applied.get((one.job.team, one.job.owner), ())]
            said = [p for p in policies if p.idle is not None]
            narrow = max(said, key=lambda p: (p.user is not None, p.team is not None), default=None)
            note = self._note(one, idle_policy(one.job.spec.idle, narrow.idle if narrow else None))
            if note is not None:
                notes.append(note)
        if notes:
            await store.note(notes)
        return False

    def _note(self, one: Leased, policy: IdlePolicy) -> Note | None:
        """None while there is nothing new."""
        attempt, job, now = one.attempt, one.job, self._context.clock.now()
        if attempt.beat is None or attempt.signal is not None:
            return None
        at_s = self._context.clock.monotonic()
        pace = self._paces[attempt.id] = forecast.watch(self._paces.get(attempt.id), attempt, at_s)
        caps = self._context.provider_of(attempt).caps
        step_s, spots = pace.step_s if pace else None, self._learned().spots
        made = forecast.forecast(attempt, job, caps, step_s, now, spots) or job.forecast
        watched = self._watched[attempt.id] = idle.watch(self._watched.get(attempt.id), attempt.beat, at_s, policy)
        found = judge_idle(watched, policy)
        kind = found.kind if found else None
        if not forecast.differs(made, job.forecast) and kind == attempt.idle:
            return None
        stands = found if kind != attempt.idle else None
        return Note(
            attempt=attempt,
            job=job,
            forecast=made,
            idle=kind,
            signal=idle.idle_signal(stands) if stands else None,
            events=(*self._overruns(one, made), *_idles(one, stands)),
        )

    def _overruns(self, one: Leased, made: Forecast | None) -> list[Event]:
        """Told when it comes to pass, not while it stays so."""
        attempt, job, known = one.attempt, one.job, one.job.forecast
        told: list[Event] = []
        if made is None:
            return told
        if made.over_cap and not (known and known.over_cap):
            room = self._room(one)
            data = {
                "usd": str(made.usd),
                "over_usd": str(made.usd - job.cap_usd),
                "cap_usd": str(job.cap_usd),
                "would_do_usd": str(forecast.sufficient_cap_usd(made, job, room)),
                "finish_at": made.finish_at.isoformat(),
            }
            message = forecast.overrun_message(made, job, room)
            told.append(event(job, "job.overrun_forecast", message, attempt=attempt, data=data))
        if made.late and not (known and known.late):
            message = forecast.late_message(made, attempt, job, self._context.clock.now())
            data = {"finish_at": made.finish_at.isoformat()}
            told.append(event(job, "job.late_forecast", message, attempt=attempt, data=data))
        return told

    def _room(self, one: Leased) -> Decimal:
        caps, every_s = self._context.provider_of(one.attempt).caps, one.job.spec.checkpoint.least_s
        return min_budget_usd(one.attempt.line, caps, every_s, self._context.tempo)


def _idles(one: Leased, found: Idle | None) -> list[Event]:
    if found is None:
        return []
    follows = FOLLOWS[found.action].format(job=one.job.id)
    data = {"kind": found.kind, "action": found.action}
    return [event(one.job, "job.idle", f"{found.message}; {follows}", attempt=one.attempt, data=data)]
