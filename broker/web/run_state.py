"""Facts of a run as its page shows them: one line of state, money against the cap, and the receipt. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from broker.billing.spending import lost_share, on_demand_usd
from broker.domain.job import RESTING_JOB_STATES, Attempt, ForecastInterval, Job, JobState
from broker.domain.money import ZERO
from broker.reporting.progress import steps, steps_redone
from broker.web import formats


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run at one moment."""

    word: str
    shape: str
    is_over: bool
    step: int
    total_steps: int
    loss: float | None
    tokens_per_s: float | None
    finish_at: datetime | None
    """Expected end; None: not known."""
    usd_per_hour: Decimal | None
    """Price of all machines of the live attempt; None: there is none."""
    reserved_usd: Decimal
    forecast_usd: Decimal | None
    forecast_interval: ForecastInterval | None
    """90 % interval of the forecast; None: too few steps were measured."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Quoted and paid dollars of a run that has ended."""

    quoted_p50: Decimal | None
    quoted_p90: Decimal | None
    paid: Decimal
    compute: Decimal
    traffic: Decimal
    storage: Decimal | None
    lost: Decimal
    on_demand: Decimal | None
    steps: int
    steps_redone: int
    seconds: float
    attempts: int

    @property
    def difference(self) -> Decimal | None:
        """Paid less the quoted P50; None: nothing was quoted."""
        return None if self.quoted_p50 is None else self.paid - self.quoted_p50


def run_state(job: Job, attempts: Sequence[Attempt], now: datetime) -> RunState:
    """Return the state of a job from its latest attempt and heartbeat."""
    latest = attempts[-1] if attempts else None
    word, shape = formats.state(job, latest)
    beats = [a.beat for a in attempts if a.beat is not None]
    reached = [end for _, end in map(steps, attempts) if end is not None]
    live = latest if latest is not None and latest.live else None
    beat = live.beat if live is not None else None
    return RunState(
        word=word,
        shape=shape,
        is_over=job.state in RESTING_JOB_STATES,
        step=reached[-1] if reached else 0,
        total_steps=max((b.total_steps for b in beats), default=0),
        loss=beats[-1].loss if beats else None,
        tokens_per_s=beat.tokens_per_s if beat is not None else None,
        finish_at=_finish(job, live, now),
        usd_per_hour=None if live is None else live.line.offer.usd_per_hour * live.line.nodes,
        reserved_usd=sum((max(ZERO, a.reserved_usd - a.charged_usd) for a in attempts if a.live), ZERO),
        forecast_usd=job.forecast.usd if job.forecast is not None and job.state is JobState.ACTIVE else None,
        forecast_interval=job.forecast.interval if job.forecast and job.state is JobState.ACTIVE else None,
    )


def _finish(job: Job, live: Attempt | None, now: datetime) -> datetime | None:
    """Return the forecast's end, or the end at the speed of the latest heartbeat."""
    if job.state is JobState.ACTIVE and job.forecast is not None:
        return job.forecast.finish_at
    beat, train = live.beat if live is not None else None, job.spec.train
    if beat is None or train is None or beat.phase != "training" or not beat.rows_per_s:
        return None
    return now + timedelta(seconds=(beat.total_steps - beat.step) * train.global_batch_rows / beat.rows_per_s)


def receipt(job: Job, attempts: Sequence[Attempt]) -> Receipt | None:
    """Return the receipt of a job that has ended; None while it runs."""
    if job.state not in RESTING_JOB_STATES:
        return None
    first = attempts[0].line if attempts else None
    paid = [a for a in attempts if a.charged_usd]
    traffic = sum((a.traffic_usd for a in attempts), ZERO)
    on_demand = [on_demand_usd(a) for a in paid]
    prices = [usd for usd in on_demand if usd is not None]
    ended = job.finished_at or max((a.ended_at for a in attempts if a.ended_at), default=job.created_at)
    return Receipt(
        quoted_p50=first.usd_p50 if first is not None else None,
        quoted_p90=first.usd_p90 if first is not None else None,
        paid=job.spent_usd,
        compute=job.spent_usd - traffic,
        traffic=traffic,
        storage=None if job.stored is None else job.stored.charged_usd,
        lost=sum(((a.charged_usd - a.traffic_usd) * lost_share(a) for a in attempts), ZERO),
        on_demand=sum(prices, ZERO) if paid and len(prices) == len(on_demand) else None,
        steps=max((end for _, end in map(steps, attempts) if end is not None), default=0),
        steps_redone=steps_redone(attempts),
        seconds=(ended - job.created_at).total_seconds(),
        attempts=len(attempts),
    )
