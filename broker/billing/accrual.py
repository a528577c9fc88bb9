"""Costs of an attempt: machine time and traffic.

All amounts are cumulative: the amount owed is the amount accrued minus the amount charged. How often and in which order
billing runs therefore does not matter, and every amount is rounded up once.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from broker.billing.prices import billed_since, latest_price, spans
from broker.domain.instance import Caps
from broker.domain.job import Attempt, AttemptState, Handle, PriceChange, Reason, Traffic
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB, Offer

HOUR = Decimal(3600)
SECOND = timedelta(seconds=1)
REFUSALS = frozenset({Reason.NO_CAPACITY, Reason.REJECTED, Reason.IMAGE})
"""End reasons of a create that a cloud refused without creating anything."""
LINK_BYTES_PER_S = 12_500_000_000
"""100 Gbit/s. A machine that reports more than its network can carry is not believed."""


def no_machine_known(attempt: Attempt) -> bool:
    """Return True if neither the create response nor any listing has shown a machine of this attempt."""
    return not attempt.handles and attempt.running_at is None and attempt.booted_at is None


def refused(attempt: Attempt) -> bool:
    """Return True if the cloud refused the create or was not asked, and no listing shows a machine."""
    not_asked = attempt.reason is Reason.USER_ERROR and attempt.final is None
    return (attempt.reason in REFUSALS or not_asked) and no_machine_known(attempt)


def _billable_until(attempt: Attempt, until: datetime) -> datetime:
    """Return the end of billable time. A refused create adds none, but earlier charges of an unknown outcome remain."""
    return min(until, attempt.charged_to or attempt.created_at) if refused(attempt) else until


def accrued(attempt: Attempt, until: datetime, expected: tuple[PriceChange, ...] = ()) -> Decimal:
    """Return dollars for machines from the start of billing to `until`, in whole quanta of the provider.

    The rule is the same in every state. A quantum in which the price changed costs its highest price. `expected`: price
    changes that count in addition to the attempt's own.
    """
    since, until = billed_since(attempt), _billable_until(attempt, until)
    if since is None or until <= since:
        return ZERO
    offer = attempt.line.offer
    minimum = timedelta(seconds=offer.billing_minimum_s if attempt.handles else 0)
    quantum = timedelta(seconds=offer.billing_quantum_s)
    total = top = ZERO
    counted = 0
    for rate, begins, ends in spans(attempt, since, max(until - since, minimum), expected):
        first, last = begins // quantum, -(-ends // quantum)
        if first < counted and rate > top:
            total, top = total + rate - top, rate
        if last > counted:
            total, top, counted = total + rate * (last - counted), rate, last
    return usd(total * offer.billing_quantum_s / HOUR)


def machine_s(attempt: Attempt, until: datetime) -> float:
    """Return seconds for which the attempt's machines existed; several nodes count once."""
    since = billed_since(attempt)
    return 0.0 if since is None else max(0.0, (_billable_until(attempt, until) - since).total_seconds())


def runs_since(attempt: Attempt, not_yet: datetime | None, caps: Caps) -> datetime:
    """Return `running_at` of an attempt whose machine has left the state starting, never later than the cloud's start.

    `not_yet`: start of the last listing that showed its machines starting or absent; None: there was no listing.
    """
    sent = attempt.create_sent_at or attempt.created_at
    return sent if not_yet is None else max(sent, not_yet - timedelta(seconds=caps.list_lag_s))


def machine_cost(offer: Offer, nodes: int, lasted: timedelta, price: Decimal) -> Decimal:
    """Return the cost of all machines in whole quanta, rounded up."""
    quanta = -(-lasted // timedelta(seconds=offer.billing_quantum_s))
    return usd(price * nodes * (quanta * offer.billing_quantum_s) / HOUR)


# --- traffic


def traffic(attempt: Attempt, until: datetime) -> Traffic:
    """Return bytes between node 0 and the blob store by its latest report; logs of other nodes are not counted."""
    sent, received = attempt.earlier_traffic.sent, attempt.earlier_traffic.received
    beat, final = attempt.beat, attempt.final
    same = beat is not None and final is not None and beat.boot == final.boot
    if beat is not None and not same:
        sent, received = sent + beat.sent_bytes, received + beat.received_bytes
    if final is not None:
        sent += max(final.sent_bytes, beat.sent_bytes if same and beat else 0)
        received += max(final.received_bytes, beat.received_bytes if same and beat else 0)
    max_bytes = int(machine_s(attempt, until) * LINK_BYTES_PER_S)
    return Traffic(sent=min(sent, max_bytes), received=min(received, max_bytes))


def counted(attempt: Attempt, following: Attempt) -> Attempt:
    """Return `following` plus the traffic before the agent's restart, because a restarted agent counts from zero."""
    before, after = attempt.beat, following.beat
    if before is None or after is None or before.boot == after.boot:
        return following
    earlier = attempt.earlier_traffic
    total = Traffic(sent=earlier.sent + before.sent_bytes, received=earlier.received + before.received_bytes)
    return replace(following, earlier_traffic=total)


def traffic_cost(offer: Offer, moved: Traffic) -> Decimal:
    """Return dollars at the offer's prices; a price that the cloud does not list counts as zero."""
    facts = offer.facts
    out = (facts and facts.egress_usd_per_gib) or ZERO
    into = (facts and facts.ingress_usd_per_gib) or ZERO
    return usd((out * moved.sent + into * moved.received) / GIB)


# --- amounts owed


def uncharged_usd(attempt: Attempt, until: datetime) -> Decimal:
    """Return dollars not yet charged for machines up to `until`; never negative, even if a clock went backwards."""
    return max(ZERO, accrued(attempt, until) - (attempt.charged_usd - attempt.traffic_usd))


def uncharged_after_end_usd(
    attempt: Attempt, machine: Handle, born: datetime | None, until: datetime, *, standing: int = 1
) -> Decimal:
    """Return dollars not yet charged for machines of an ended attempt up to `until`; never negative.

    `born` None: no cloud reports the creation, so billing starts at the end of the attempt's charges. `standing`:
    number of existing machines; any number below the number bought counts as the number bought.
    """
    extra = max(0, standing - attempt.line.nodes)
    now = replace(latest_price(attempt), since=attempt.charged_to or attempt.created_at, extra_machines=extra)
    attempt = replace(attempt, prices=(*(p for p in attempt.prices if p.since < now.since), now))
    born = born or (attempt.ended_at if refused(attempt) else None)
    if born is None or attempt.charged_to is None:
        return uncharged_usd(attempt, until)
    delayed = replace(attempt, create_sent_at=born, running_at=born, handles=(machine,))
    # The charges up to `charged_to` for this creation time; zero if the machine was created later.
    charged = accrued(delayed, attempt.charged_to)
    return max(ZERO, accrued(delayed, until) - charged)


def traffic_owed(attempt: Attempt, until: datetime) -> Decimal:
    """Return dollars not yet charged for traffic; never negative, even if a machine reports less than before."""
    return max(ZERO, traffic_cost(attempt.line.offer, traffic(attempt, until)) - attempt.traffic_usd)


def billed_until(attempt: Attempt, now: datetime, behind_s: float, *, is_listed: bool = True) -> datetime:
    """Return the time up to which an attempt is charged now.

    A machine being destroyed is charged `behind_s` late, which is the time that a proof of absence takes. The proof
    then never reduces a charge. An unanswered create is not charged before its machine is listed (`is_listed`),
    because the create may be refused. The next charge then covers the time until now.
    """
    if attempt.absent_at is not None:
        return min(now, attempt.absent_at)
    if attempt.state is AttemptState.LAUNCHING and no_machine_known(attempt) and not is_listed:
        return attempt.charged_to or attempt.create_sent_at or now
    return now - timedelta(seconds=behind_s) if attempt.state is AttemptState.TERMINATING else now
