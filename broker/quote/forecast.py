"""When a running job will be done, and what it will have spent by then: P50 from what is measured of it.

The pace is wall time a step over the whole of what was watched, so saves and evaluations are in it. On spot machines
the time that preemptions will cost is added as the quote does it: work / (1 - rate x loss), with a loss of half a
checkpoint interval, a save that was under way and another set-up.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Decimal

from broker.billing.accrual import HOUR, accrued, machine_s, traffic, traffic_cost
from broker.billing.prices import price_now
from broker.billing.time_limits import time_left_s
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Forecast, Job, Traffic
from broker.domain.money import show, usd
from broker.estimator.preemption_rate import History, losses_per_hour, preemptions_per_s
from broker.quote.engine import CENT
from trainer.contract.save_interval import interval_s

LEAST_STEPS, LEAST_S = 2, 20.0
"""Evidence without which nothing is said."""
BACK, BACK_S = Decimal("0.95"), 0.95
"""A warning is taken back once no more than this share of the limit is expected to be used."""
MARGIN = Decimal("1.1")
"""On what is still to be spent, for the cap that is proposed: the forecast is a median."""
MOST_S = 10 * 365 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class StepRateWindow:
    """Of one start of a trainer, by the watcher's monotonic clock: its first step that was seen, and its latest."""

    boot: str
    since_s: float
    since_step: int
    at_s: float
    step: int

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None while too little was seen."""
        steps, lasted = self.step - self.since_step, self.at_s - self.since_s
        return lasted / steps if steps >= LEAST_STEPS and lasted >= LEAST_S else None


def watch(known: StepRateWindow | None, attempt: Attempt, at_s: float) -> StepRateWindow | None:
    """`known` with the attempt's latest beat. Set-up is no pace: it begins with the first step that is seen to end."""
    beat = attempt.beat
    if beat is None or beat.step <= (beat.resumed_from or 0):
        return None
    if known is None or known.boot != beat.boot or beat.step < known.step:
        return StepRateWindow(boot=beat.boot, since_s=at_s, since_step=beat.step, at_s=at_s, step=beat.step)
    if beat.step == known.step:
        return known
    return StepRateWindow(
        boot=known.boot, since_s=known.since_s, since_step=known.since_step, at_s=at_s, step=beat.step
    )


def forecast(
    attempt: Attempt, job: Job, caps: Caps, step_s: float | None, now: datetime, history: History
) -> Forecast | None:
    """None while nothing is known: no step was measured, or the program does not say how many there are. `history`: of
    own spot machines, as the quote has it.

    `over_cap` and `late` follow the last forecast's with some room, so that people are told once per crossing.
    """
    beat = attempt.beat
    if beat is None or step_s is None or beat.total_steps <= 0:
        return None
    left_s = min(MOST_S, max(0, beat.total_steps - beat.step) * step_s * _disturbed(attempt, job, history))
    spent, before = _spent(attempt, job, caps, left_s, now, history), job.forecast
    return Forecast(
        usd=spent,
        finish_at=now + timedelta(seconds=left_s),
        step_s=step_s,
        made_at=now,
        over_cap=spent > job.cap_usd * (BACK if before and before.over_cap else 1),
        late=_late(left_s, _running(attempt, job, now), now, told=before is not None and before.late),
    )


def _disturbed(attempt: Attempt, job: Job, history: History) -> float:
    """How much longer the rest takes for preemptions to come, by what the set-up took this time; ten times at most."""
    first, sent = attempt.first_beat_at, attempt.create_sent_at
    setup_s = max(0.0, (first - sent).total_seconds()) if first and sent else 0.0
    rate = preemptions_per_s(attempt.line.offer, history) * attempt.line.nodes
    lost_s = _every_s(attempt, job, history) / 2 + _save_s(attempt) + setup_s
    return 1 / max(0.1, 1 - rate * lost_s)


def _save_s(attempt: Attempt) -> float:
    """What the last save took; 0 before the first."""
    saved = attempt.beat.checkpoint if attempt.beat else None
    return saved.save_s if saved else 0.0


def _every_s(attempt: Attempt, job: Job, history: History) -> float:
    """Seconds between the beginnings of two saves, as the trainer chooses them from what they take."""
    cost_s, most_s, line = _save_s(attempt), job.spec.checkpoint.max_loss_s, attempt.line
    if not cost_s:
        return most_s
    return max(cost_s, interval_s(cost_s, losses_per_hour(line.offer, history, line.nodes), most_s))


def _spent(attempt: Attempt, job: Job, caps: Caps, left_s: float, now: datetime, history: History) -> Decimal:
    """By the job: other attempts, this one up to now, and the rest at the present price with its saves."""
    so_far = max(attempt.charged_usd - attempt.traffic_usd, accrued(attempt, now))
    rest = price_now(attempt) * attempt.line.nodes * Decimal(repr(round(left_s + caps.teardown_s, 3))) / HOUR
    moved, saved = traffic(attempt, now), attempt.beat.checkpoint if attempt.beat else None
    saves = int(left_s / _every_s(attempt, job, history)) + 1
    sent = Traffic(sent=moved.sent + saves * (saved.bytes if saved else 0), received=moved.received)
    return usd(job.spent_usd - attempt.charged_usd + so_far + rest + traffic_cost(attempt.line.offer, sent))


def _running(attempt: Attempt, job: Job, now: datetime) -> Job:
    """With the time of this attempt."""
    return replace(job, machine_s=job.machine_s + machine_s(attempt, now))


def _late(left_s: float, job: Job, now: datetime, *, told: bool) -> bool:
    limit_s = time_left_s(job, now)
    return limit_s is not None and left_s > limit_s * (BACK_S if told else 1.0)


def sufficient_cap_usd(made: Forecast, job: Job, room: Decimal) -> Decimal:
    """A cap in whole cents under which the job is expected to finish: with a margin on what is still to be spent, and
    `room` for the drain that would otherwise begin before.
    """
    rest = max(Decimal(0), made.usd - job.spent_usd)
    return (job.spent_usd + rest * MARGIN + room).quantize(CENT, rounding=ROUND_CEILING)


def overrun_message(made: Forecast, job: Job, room: Decimal) -> str:
    """For people: by how much it will pass its cap, and what would do."""
    over, does = show(made.usd - job.cap_usd), sufficient_cap_usd(made, job, room)
    return (
        f"expected to cost {show(made.usd)} by its end at {_clock(made.finish_at)} (P50), {over} above its cap of "
        f"{show(job.cap_usd)}; `gpubroker cap {job.id} {does}` would do"
    )


def late_message(made: Forecast, attempt: Attempt, job: Job, now: datetime) -> str:
    """For people: by how much it will miss its time."""
    left_s = time_left_s(_running(attempt, job, now), now) or 0.0
    over_s = max(0.0, (made.finish_at - now).total_seconds() - left_s)
    what = "its deadline" if job.spec.max_duration is None else "its deadline or max_duration"
    return f"expected to be done at {_clock(made.finish_at)} (P50), {over_s / 60:.0f} min after {what}"


def _clock(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def differs(made: Forecast | None, known: Forecast | None) -> bool:
    """Worth writing down: a cent in a hundred, a minute, or what people are told of."""
    if made is None or known is None:
        return made is not known
    if (made.over_cap, made.late) != (known.over_cap, known.late):
        return True
    moved_s = abs((made.finish_at - known.finish_at).total_seconds())
    return moved_s > 60 or abs(made.usd - known.usd) > known.usd / 100
