"""The cap of a job: the budget of an attempt, its reservation, and the moment when it must drain.

Formulas, with `ceiling` as the highest price that an hour may reach before the next check:

- `drain = min(drain_s, max(30 s, 3 x last save))`, and `drain_s` before the first save
- `lead = detect_s + drain + teardown_proof_s + caps.teardown_s + 2 x caps.list_lag_s + quantum`
- `saves = 2 + floor((detect_s + drain_s) / least checkpoint interval)`
- `limit = min(cap, spent by other attempts + reserved)`
- `machines = max(charged for machines, accrued at now + lead with ceiling from now on)`
- `traffic = max(charged for traffic, cost of traffic so far + saves x checkpoint + token cache)`
- drain now if `spent by other attempts + machines + traffic >= limit`
- minimum of a new attempt: `cost of machines for max(lead, billing minimum) + traffic of saves and token cache`
- `reserved = cap - spent`, and with `max_duration` no more than
  `cost of machines for (max_duration - machine time so far + lead) + traffic of one save an interval`
"""

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
    """Return the expected bytes of a checkpoint: weights and optimizer state; 0: unknown (a script)."""
    return 0 if line.memory is None else line.memory.weights + line.memory.optimizer


def _saves(every_s: float, during_s: float) -> int:
    """Return how many checkpoints a trainer may still upload in a drain that ends `during_s` later.

    One save is under way, one follows at each interval, and one is the last.
    """
    return 2 + int(during_s / every_s)


def _drained(attempt: Attempt, job: Job, until: datetime, during_s: float) -> Traffic:
    """Return the traffic at the end of a drain.

    Before the first heartbeat, or without time for a drain, the trainer saves nothing.
    """
    moved, beat = traffic(attempt, until), attempt.beat
    if beat is None or not during_s:
        return moved
    checkpoint_bytes = beat.checkpoint.bytes if beat.checkpoint else _save_bytes(attempt.line)
    saves = _saves(job.spec.checkpoint.min_interval_s, during_s) * checkpoint_bytes
    return replace(moved, sent=moved.sent + saves + attempt.line.rows_bytes)


def min_budget_usd(line: QuoteLine, caps: Caps, every_s: float, drain_budget: DrainBudget) -> Decimal:
    """Return the least dollars with which a new attempt may start.

    With less, the attempt would drain immediately, or exceed the cap by the cloud's minimum bill. `every_s`: seconds
    between two checkpoints.
    """
    offer = line.offer
    least_s = max(lead_s(offer, caps, drain_budget), offer.billing_minimum_s)
    price = ceiling(offer, offer.usd_per_hour)
    saves = _saves(every_s, drain_budget.detect_s + drain_budget.drain_s) * _save_bytes(line)
    moved = Traffic(sent=saves + line.rows_bytes)
    return machine_cost(offer, line.nodes, timedelta(seconds=least_s), price) + traffic_cost(offer, moved)


def cap_is_near(attempt: Attempt, job: Job, caps: Caps, now: datetime, drain_budget: DrainBudget) -> bool:
    """Return True if the job must drain now.

    Spending then stays within the cap if the cloud ends billing within `caps.teardown_s` of destroy. If the cloud takes
    t seconds longer, the excess is at most rate x t.
    """
    lead = timedelta(seconds=drain_lead_s(attempt, caps, drain_budget))
    others = job.spent_usd - attempt.charged_usd
    known = latest_price(attempt)
    highest = replace(known, since=now, usd_per_hour=ceiling(attempt.line.offer, known.usd_per_hour))
    worst = accrued(attempt, now + lead, (highest,))
    # Charges before `running_at` was known began at the create, so they may exceed the accrual. They count as spent.
    machines = max(attempt.charged_usd - attempt.traffic_usd, worst)
    during_s = drain_budget.detect_s + drain_budget.drain_s
    moved = max(attempt.traffic_usd, traffic_cost(attempt.line.offer, _drained(attempt, job, now, during_s)))
    return others + machines + moved >= limit(attempt, job)


def limit(attempt: Attempt, job: Job) -> Decimal:
    """Return the most that the job may have spent by the end of this attempt.

    A raised cap increases the reservation only of an attempt that is not ending.
    """
    return min(job.cap_usd, job.spent_usd - attempt.charged_usd + attempt.reserved_usd)


def reservation(job: Job) -> Decimal:
    """Return what is left under the job's cap."""
    return max(ZERO, job.cap_usd - job.spent_usd)


def reserved(job: Job, line: QuoteLine, caps: Caps, drain_budget: DrainBudget) -> Decimal:
    """Return the dollars that an attempt reserves.

    The traffic of a script is unknown in advance, so it reserves all that is left if traffic costs money.
    """
    left, max_duration = reservation(job), job.spec.max_duration
    unknown = line.memory is None and traffic_cost(line.offer, Traffic(sent=GIB)) > 0
    if max_duration is None or unknown:
        return left
    left_s = max(0.0, max_duration - job.machine_s) + lead_s(line.offer, caps, drain_budget)
    price = ceiling(line.offer, line.offer.usd_per_hour)
    moved = Traffic(sent=_saves(job.spec.checkpoint.min_interval_s, left_s) * _save_bytes(line) + line.rows_bytes)
    hours = machine_cost(line.offer, line.nodes, timedelta(seconds=left_s), price)
    return min(left, hours + traffic_cost(line.offer, moved))
