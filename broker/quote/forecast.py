"""Forecasts the P50 of a running job's end and total spending from its own measurements.

The step time is wall time over the whole watched period, so it includes saves and evaluations. On spot machines the
time that preemptions are expected to cost is added as in the quote: work / (1 - rate x loss). The loss is half a
checkpoint interval, a save in progress and another set-up.

The first `PROBE_STEPS` steps of an attempt re-quote its job: from then on the forecast has a 90 % interval.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Decimal
from math import exp, sqrt

from broker.billing.accrual import HOUR, accrued, machine_s, traffic, traffic_cost
from broker.billing.prices import price_now
from broker.billing.time_limits import time_left_s
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Forecast, ForecastInterval, Job, Traffic
from broker.domain.money import format_usd, usd
from broker.estimator.planning.corrections import Z95
from broker.estimator.preemption_rate import History, certainty, losses_per_hour, preemptions_per_s
from broker.estimator.speed.calibration import CPU_PRIOR, GPU_PRIOR
from broker.quote.engine import CENT
from trainer.contract.save_interval import interval_s

MIN_STEPS, MIN_S = 2, 20.0
"""Minimum of measured steps and seconds for a forecast."""
BACK, BACK_S = Decimal("0.95"), 0.95
"""A warning ends once at most this share of the limit is expected to be used."""
MARGIN = Decimal("1.1")
"""Factor on the rest of the spending, for the proposed cap: the forecast is a median."""
MAX_LEFT_S = 10 * 365 * 86_400.0
PROBE_STEPS = 20
"""Steps of an attempt after which its job is re-quoted."""


@dataclass(frozen=True, kw_only=True)
class StepRateWindow:
    """Measured steps of one start of a trainer, by the watcher's monotonic clock: first and latest observed step."""

    boot: str
    since_s: float
    since_step: int
    at_s: float
    step: int

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None: too few steps were observed."""
        steps, lasted = self.step - self.since_step, self.at_s - self.since_s
        return lasted / steps if steps >= MIN_STEPS and lasted >= MIN_S else None


def next_window(watched: StepRateWindow | None, attempt: Attempt, at_s: float) -> StepRateWindow | None:
    """Return `watched` updated by the latest heartbeat.

    Set-up time is excluded: the window begins with the first observed end of a step.
    """
    beat = attempt.beat
    if beat is None or beat.step <= (beat.resumed_from or 0):
        return None
    if watched is None or watched.boot != beat.boot or beat.step < watched.step:
        return StepRateWindow(boot=beat.boot, since_s=at_s, since_step=beat.step, at_s=at_s, step=beat.step)
    if beat.step == watched.step:
        return watched
    return StepRateWindow(
        boot=watched.boot, since_s=watched.since_s, since_step=watched.since_step, at_s=at_s, step=beat.step
    )


def forecast(
    attempt: Attempt, job: Job, caps: Caps, step_s: float | None, now: datetime, history: History
) -> Forecast | None:
    """Return a forecast; None: no step was measured, or the program reports no number of steps.

    `history`: preemptions of our own spot machines, as in the quote. An existing warning (`over_cap`, `late`) ends only
    at a margin below its limit, so that users are notified once per crossing.
    """
    beat = attempt.beat
    if beat is None or step_s is None or beat.total_steps <= 0:
        return None
    work_s, before = max(0, beat.total_steps - beat.step) * step_s, job.forecast
    left_s = min(MAX_LEFT_S, work_s * _disturbed(attempt, job, history))
    spent = _spent(attempt, job, caps, left_s, now, history)
    is_measured = beat.step - (beat.resumed_from or 0) >= PROBE_STEPS or measured_attempt(before) == attempt.number
    return Forecast(
        usd=spent,
        finish_at=now + timedelta(seconds=left_s),
        step_s=step_s,
        made_at=now,
        over_cap=spent > job.cap_usd * (BACK if before and before.over_cap else 1),
        late=_is_late(left_s, _running(attempt, job, now), now, was_late=before is not None and before.late),
        interval=_interval(attempt, job, caps, work_s, now, history) if is_measured else None,
    )


def measured_attempt(expected: Forecast | None) -> int:
    """Return the number of the attempt whose measured steps re-quoted the job; 0: none did."""
    return expected.interval.attempt if expected and expected.interval else 0


def _interval(
    attempt: Attempt, job: Job, caps: Caps, work_s: float, now: datetime, history: History
) -> ForecastInterval:
    """Return the 90 % interval of the job's end and spending.

    A machine's speed varies as repeated runs of one group do (`Prior.run`). The low end has no preemption; the high end
    adds deviations of the preempted time as a quote's P90 does (`MachineCost.p90`).
    """
    offer = attempt.line.offer
    spread = exp(Z95 * (GPU_PRIOR if offer.gpus and not offer.emulated_on else CPU_PRIOR).run)
    rate, lost_s = _preemptions(attempt, job, history)
    calm = max(0.1, 1 - rate * lost_s)
    slow_s = work_s * spread / calm
    losses = rate * slow_s
    deviation_s = lost_s * sqrt(losses + (losses / calm) ** 2 / certainty(offer, history))
    low_s, high_s = (min(MAX_LEFT_S, left_s) for left_s in (work_s / spread, slow_s + Z95 * deviation_s))
    return ForecastInterval(
        attempt=attempt.number,
        usd_low=_spent(attempt, job, caps, low_s, now, history),
        usd_high=_spent(attempt, job, caps, high_s, now, history),
        finish_earliest=now + timedelta(seconds=low_s),
        finish_latest=now + timedelta(seconds=high_s),
    )


def _preemptions(attempt: Attempt, job: Job, history: History) -> tuple[float, float]:
    """Return (preemptions a second, seconds that each costs).

    The time of another set-up is taken from this attempt's set-up.
    """
    first, sent = attempt.first_beat_at, attempt.create_sent_at
    setup_s = max(0.0, (first - sent).total_seconds()) if first and sent else 0.0
    rate = preemptions_per_s(attempt.line.offer, history) * attempt.line.nodes
    return rate, _every_s(attempt, job, history) / 2 + _save_s(attempt) + setup_s


def _disturbed(attempt: Attempt, job: Job, history: History) -> float:
    """Return the factor, at most ten, by which expected preemptions extend the remaining time."""
    rate, lost_s = _preemptions(attempt, job, history)
    return 1 / max(0.1, 1 - rate * lost_s)


def _save_s(attempt: Attempt) -> float:
    """Return the seconds of the last save; 0: none yet."""
    saved = attempt.beat.checkpoint if attempt.beat else None
    return saved.save_s if saved else 0.0


def _every_s(attempt: Attempt, job: Job, history: History) -> float:
    """Return seconds between the starts of two saves, as the trainer chooses them from their duration."""
    cost_s, max_s, line = _save_s(attempt), job.spec.checkpoint.max_loss_s, attempt.line
    if not cost_s:
        return max_s
    return max(cost_s, interval_s(cost_s, losses_per_hour(line.offer, history, line.nodes), max_s))


def _spent(attempt: Attempt, job: Job, caps: Caps, left_s: float, now: datetime, history: History) -> Decimal:
    """Return the job's expected spending: other attempts, this one, and the rest at the present price."""
    so_far = max(attempt.charged_usd - attempt.traffic_usd, accrued(attempt, now))
    rest = price_now(attempt) * attempt.line.nodes * Decimal(repr(round(left_s + caps.teardown_s, 3))) / HOUR
    moved, saved = traffic(attempt, now), attempt.beat.checkpoint if attempt.beat else None
    saves = int(left_s / _every_s(attempt, job, history)) + 1
    sent = Traffic(sent=moved.sent + saves * (saved.bytes if saved else 0), received=moved.received)
    return usd(job.spent_usd - attempt.charged_usd + so_far + rest + traffic_cost(attempt.line.offer, sent))


def _running(attempt: Attempt, job: Job, now: datetime) -> Job:
    """Return the job including the machine time of this attempt."""
    return replace(job, machine_s=job.machine_s + machine_s(attempt, now))


def _is_late(left_s: float, job: Job, now: datetime, *, was_late: bool) -> bool:
    limit_s = time_left_s(job, now)
    return limit_s is not None and left_s > limit_s * (BACK_S if was_late else 1.0)


def sufficient_cap_usd(expected: Forecast, job: Job, drain_usd: Decimal) -> Decimal:
    """Return a cap in whole cents under which the job is expected to finish.

    The cap includes a margin on the rest of the spending. It also includes `drain_usd`, without which the drain would
    begin earlier.
    """
    rest = max(Decimal(0), expected.usd - job.spent_usd)
    return (job.spent_usd + rest * MARGIN + drain_usd).quantize(CENT, rounding=ROUND_CEILING)


def overrun_message(expected: Forecast, job: Job, drain_usd: Decimal) -> str:
    """Return by how much the job will exceed its cap, and a sufficient cap, in one line."""
    excess, sufficient = format_usd(expected.usd - job.cap_usd), sufficient_cap_usd(expected, job, drain_usd)
    return (
        f"expected to cost {format_usd(expected.usd)} by its end at {_clock(expected.finish_at)} (P50), {excess} above "
        f"its cap of {format_usd(job.cap_usd)}; `gpubroker cap {job.id} {sufficient}` would suffice"
    )


def late_message(expected: Forecast, attempt: Attempt, job: Job, now: datetime) -> str:
    """Return by how much the job will miss its time limit, in one line."""
    left_s = time_left_s(_running(attempt, job, now), now) or 0.0
    over_s = max(0.0, (expected.finish_at - now).total_seconds() - left_s)
    limit = "its deadline" if job.spec.max_duration is None else "its deadline or max_duration"
    return f"expected to be done at {_clock(expected.finish_at)} (P50), {over_s / 60:.0f} min after {limit}"


def quoted_usd(attempt: Attempt, job: Job) -> Decimal | None:
    """Return the P50 of the attempt's quote plus the spending of the other attempts; None: it had no P50."""
    p50 = attempt.line.usd_p50
    return None if p50 is None else job.spent_usd - attempt.charged_usd + p50


def requote_message(expected: Forecast, interval: ForecastInterval, attempt: Attempt, job: Job) -> str:
    """Return the forecast by measured steps, its interval and the quote, in one line."""
    quoted = quoted_usd(attempt, job)
    earliest, latest = _clock(interval.finish_earliest), _clock(interval.finish_latest)
    return (
        f"{expected.step_s:.3g} s a step measured: {format_usd(expected.usd)} by {_clock(expected.finish_at)} (P50); "
        f"90 % interval {format_usd(interval.usd_low)} to {format_usd(interval.usd_high)}, {earliest} to {latest}"
    ) + ("" if quoted is None else f"; quoted {format_usd(quoted)} (P50)")


def _clock(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def differs(expected: Forecast | None, latest: Forecast | None) -> bool:
    """Return True if a forecast is worth storing.

    It is for over 1 % more or fewer dollars, over a minute, another warning, or an interval of another attempt.
    """
    if expected is None or latest is None:
        return expected is not latest
    if (expected.over_cap, expected.late) != (latest.over_cap, latest.late):
        return True
    if measured_attempt(expected) != measured_attempt(latest):
        return True
    moved_s = abs((expected.finish_at - latest.finish_at).total_seconds())
    return moved_s > 60 or abs(expected.usd - latest.usd) > latest.usd / 100
