"""Decides what a live attempt is charged now, and whether its cap or its time limit ends it.

Used by the metering controller, which gathers `ChargeFacts` and writes the decisions under the fence of `charged_to`.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

from broker.billing.accrual import billed_until, traffic_owed, uncharged_usd
from broker.billing.drain import DrainBudget
from broker.billing.time_limits import out_of_time_message
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Event, Job, PriceChange, Signal
from broker.domain.money import ZERO, format_usd
from broker.lifecycle.signals import due_signal

PROOF_S = 15.0
"""Seconds that a proof of absence takes in addition to the lag of listings."""


@dataclass(frozen=True, kw_only=True)
class ChargeFacts:
    """All facts on which the charge of one live attempt depends. Its create was sent."""

    job: Job
    attempt: Attempt
    caps: Caps
    drain_budget: DrainBudget
    now: datetime
    prices: tuple[PriceChange, ...] = ()
    """Price changes that the listings show and the attempt does not record yet."""
    is_listed: bool = True
    """True if the latest listing shows a machine of the attempt."""
    missing_at: datetime | None = None
    """Time of the second consecutive listing without the machines of a booted attempt. For an attempt that has not
    booted, the latest possible end of its machines. None: it may still have machines.
    """
    self_stopped_by: datetime | None = None
    """Latest possible end of machines that are missing and may have run without any broker; None: no such end."""

    @property
    def possible_end(self) -> datetime:
        """Latest time at which a machine of the attempt may still have run, `now` at most."""
        return min(self.now, self.self_stopped_by or self.now)


@dataclass(frozen=True, kw_only=True)
class ChargeDecision:
    """A charge of one attempt, with the signal that ends the attempt."""

    job: Job
    attempt: Attempt
    """The attempt as it was read."""
    to: datetime
    """Time up to which the attempt is charged after the write."""
    usd: Decimal
    """Dollars for machines since the last charge."""
    traffic_usd: Decimal
    prices: tuple[PriceChange, ...]
    signal: Signal | None
    """Signal to raise; None: the attempt may continue, or has a signal."""
    now: datetime


def decide_charge(facts: ChargeFacts) -> ChargeDecision | None:
    """Return what is owed since the last charge, with a signal if the attempt must end; None: nothing is new."""
    attempt, job, now = facts.attempt, facts.job, facts.now
    priced = replace(attempt, prices=(*attempt.prices, *facts.prices)) if facts.prices else attempt
    until = charged_until(facts)
    due_usd, traffic = uncharged_usd(priced, until), traffic_owed(priced, now)
    signal = due_signal(priced, job, facts.caps, facts.possible_end, facts.drain_budget)
    if due_usd == traffic == ZERO and signal is None and not facts.prices:
        return None
    return ChargeDecision(
        job=job,
        attempt=attempt,
        to=max(until, attempt.charged_to or until),
        usd=due_usd,
        traffic_usd=traffic,
        prices=facts.prices,
        signal=signal,
        now=now,
    )


def charged_until(facts: ChargeFacts) -> datetime:
    """Return the time up to which an attempt is charged now.

    Charges are final. So a machine that listings omit is not charged further before its absence is proven. If the
    machine exists after all, the next charge includes the time between. A machine that vanished while no broker ran is
    charged only when its attempt ends, because its possible lifetime counts from the previous charge.
    """
    attempt, now = facts.attempt, facts.now
    if facts.possible_end < now:
        return attempt.charged_to or attempt.create_sent_at or now
    until = billed_until(attempt, now, facts.caps.list_lag_s + PROOF_S, is_listed=facts.is_listed)
    return min(until, facts.missing_at or until)


def charge_event(decision: ChargeDecision) -> Event | None:
    """Return the event that reports the signal of a decision; None: it raises none."""
    job, attempt = decision.job, decision.attempt
    if decision.signal is None:
        return None
    if decision.signal is Signal.CAP:
        spent = job.spent_usd + decision.usd + decision.traffic_usd
        message = f"{format_usd(spent)} of {format_usd(job.cap_usd)} spent: checkpoint and stop"
        return Event(job_id=job.id, attempt_id=attempt.id, kind="job.cap_near", message=message)
    message = out_of_time_message(job, decision.now)
    return Event(job_id=job.id, attempt_id=attempt.id, kind="job.out_of_time", message=message)
