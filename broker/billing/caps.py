"""The cap of a job: what an attempt may still spend, what it reserves, and when it must drain for it."""

from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from broker.billing.accrual import accrued, machine_cost, traffic, traffic_cost
from broker.billing.drain import DrainBudget, drain_lead_s, lead_s
from broker.billing.prices import ceiling, latest_price
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Job, Traffic
from broker.domain.money import ZERO
from broker.domain.offer import GIB, QuoteLine


def _save_bytes(line: QuoteLine) -> int:
    """Of one checkpoint while none is made: weights and the optimizer's state; 0: nothing is known (a script)."""
    return 0 if line.memory is None else line.memory.weights + line.memory.optimizer


def _saves(every_s: float, during_s: float) -> int:
    """Checkpoints that a trainer may still send when it is drained so much later: one under way, those whose time
    comes, and the last.
    """
    return 2 + int(during_s / every_s)


def _drained(attempt: Attempt, job: Job, until: datetime, during_s: float) -> Traffic:
    """Traffic by the end of a drain; nothing was made that could be saved before the first beat, or is waited for
    when no time is left.
    """
    moved, beat = traffic(attempt, until), attempt.beat
    if beat is None or not during_s:
        return moved
    one = beat.checkpoint.bytes if beat.checkpoint else _save_bytes(attempt.line)
    saves = _saves(job.spec.checkpoint.least_s, during_s) * one
    return replace(moved, sent=moved.sent + saves + attempt.line.rows_bytes)


def min_budget_usd(line: QuoteLine, caps: Caps, every_s: float, drain_budget: DrainBudget) -> Decimal:
    """A new attempt needs more than this under its cap: with less it would have to drain as soon as it is bought, or
    would pass its cap by what the cloud bills at the least. `every_s`: between two checkpoints.
    """
    offer = line.offer
    least_s = max(lead_s(offer, caps, drain_budget), offer.billing_minimum_s)
    price = ceiling(offer, offer.usd_per_hour)
    saves = _saves(every_s, drain_budget.detect_s + drain_budget.drain_s) * _save_bytes(line)
    moved = Traffic(sent=saves + line.rows_bytes)
    return machine_cost(offer, line.nodes, timedelta(seconds=least_s), price) + traffic_cost(offer, moved)


def cap_is_near(attempt: Attempt, job: Job, caps: Caps, now: datetime, drain_budget: DrainBudget) -> bool:
    """True when the job must drain now: spent + highest rate x `drain_lead_s` + last saves reaches the cap.

    Then spend <= cap holds while the cloud ends billing within `caps.teardown_s` of destroy. Where it takes t seconds
    longer, the overshoot is at most rate x t.
    """
    lead = timedelta(seconds=drain_lead_s(attempt, caps, drain_budget))
    others = job.spent_usd - attempt.charged_usd
    known = latest_price(attempt)
    highest = replace(known, since=now, usd_per_hour=ceiling(attempt.line.offer, known.usd_per_hour))
    worst = accrued(replace(attempt, prices=(*attempt.prices, highest)), now + lead)
    # What was charged before it was known to run later than the create is spent, and worked off.
    machines = max(attempt.charged_usd - attempt.traffic_usd, worst)
    during_s = drain_budget.detect_s + drain_budget.drain_s
    moved = max(attempt.traffic_usd, traffic_cost(attempt.line.offer, _drained(attempt, job, now, during_s)))
    return others + machines + moved >= limit(attempt, job)


def limit(attempt: Attempt, job: Job) -> Decimal:
    """What the job may have spent by the end of this attempt: its cap, and no more than was reserved for the attempt.
    Less was with `max_duration`; a cap that is raised reserves more only for an attempt that is not on its way out.
    """
    return min(job.cap_usd, job.spent_usd - attempt.charged_usd + attempt.reserved_usd)


def reservation(job: Job) -> Decimal:
    """What is left under the job's cap."""
    return max(ZERO, job.cap_usd - job.spent_usd)


def reserved(job: Job, line: QuoteLine, caps: Caps, drain_budget: DrainBudget) -> Decimal:
    """What an attempt reserves: all that is left under the cap, or less where `max_duration` allows less: the highest
    rate for the time that is left and a drain, and the traffic of a save at each interval. What a script sends is not
    known before.
    """
    left, most = reservation(job), job.spec.max_duration
    unknown = line.memory is None and traffic_cost(line.offer, Traffic(sent=GIB)) > 0
    if most is None or unknown:
        return left
    left_s = max(0.0, most - job.machine_s) + lead_s(line.offer, caps, drain_budget)
    price = ceiling(line.offer, line.offer.usd_per_hour)
    moved = Traffic(sent=_saves(job.spec.checkpoint.least_s, left_s) * _save_bytes(line) + line.rows_bytes)
    hours = machine_cost(line.offer, line.nodes, timedelta(seconds=left_s), price)
    return min(left, hours + traffic_cost(line.offer, moved))
