"""What an attempt costs, and when its job must drain so that the cap and its time hold.

Everything is cumulative: what is owed is what has accrued less what was charged, so it does not matter how often or in
which order billing runs, and every amount is rounded once, up.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from broker.billing.prices import billed_since, latest_price, spans
from broker.domain.instance import Caps
from broker.domain.job import Attempt, AttemptState, Handle, Reason, Traffic
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB, Offer

HOUR = Decimal(3600)
SECOND = timedelta(seconds=1)
REFUSALS = frozenset({Reason.NO_CAPACITY, Reason.REJECTED, Reason.IMAGE})
"""What a create is answered by a cloud that makes nothing."""
LINK_BYTES_PER_S = 12_500_000_000
"""100 Gbit/s: a machine that says it sent more than its network carries is not believed."""


def no_machine_known(attempt: Attempt) -> bool:
    """No machine of it is known: neither the cloud's answer to its create nor any listing has shown one."""
    return not attempt.handles and attempt.running_at is None and attempt.booted_at is None


def refused(attempt: Attempt) -> bool:
    """Its cloud has answered that nothing was created, or was not asked, and no listing says otherwise."""
    not_asked = attempt.reason is Reason.USER_ERROR and attempt.final is None
    return (attempt.reason in REFUSALS or not_asked) and no_machine_known(attempt)


def _stood_until(attempt: Attempt, until: datetime) -> datetime:
    """A create that was refused costs nothing; what was charged of one before it, whose outcome is unknown, stays."""
    return min(until, attempt.charged_to or attempt.created_at) if refused(attempt) else until


def accrued(attempt: Attempt, until: datetime) -> Decimal:
    """Dollars for machines from the start of billing to `until`, in the provider's quantum rounded up; in every state
    alike. A quantum in which the price changed costs the highest of it.
    """
    since, until = billed_since(attempt), _stood_until(attempt, until)
    if since is None or until <= since:
        return ZERO
    offer = attempt.line.offer
    least = timedelta(seconds=offer.billing_minimum_s if attempt.handles else 0)
    quantum = timedelta(seconds=offer.billing_quantum_s)
    total = top = ZERO
    counted = 0
    for rate, begins, ends in spans(attempt, since, max(until - since, least)):
        first, last = begins // quantum, -(-ends // quantum)
        if first < counted and rate > top:
            total, top = total + rate - top, rate
        if last > counted:
            total, top, counted = total + rate * (last - counted), rate, last
    return usd(total * offer.billing_quantum_s / HOUR)


def machine_s(attempt: Attempt, until: datetime) -> float:
    """Seconds for which its machines stood; several nodes stand side by side and count once."""
    since = billed_since(attempt)
    return 0.0 if since is None else max(0.0, (_stood_until(attempt, until) - since).total_seconds())


def runs_since(attempt: Attempt, not_yet: datetime | None, caps: Caps) -> datetime:
    """`running_at` of an attempt with a machine that is no longer starting: never later than the cloud's own start.

    `not_yet`: when the last listing began that showed its machines starting or not at all; None: nobody looked.
    """
    sent = attempt.create_sent_at or attempt.created_at
    return sent if not_yet is None else max(sent, not_yet - timedelta(seconds=caps.list_lag_s))


def machine_cost(offer: Offer, nodes: int, lasted: timedelta, price: Decimal) -> Decimal:
    """Of all machines, in whole quanta, rounded up."""
    whole = -(-lasted // timedelta(seconds=offer.billing_quantum_s))
    return usd(price * nodes * (whole * offer.billing_quantum_s) / HOUR)


# ---------------------------------------------------------------------------------------------------------- the traffic


def traffic(attempt: Attempt, until: datetime) -> Traffic:
    """Bytes between node 0 and the blob store up to its latest word; the others' logs are not counted."""
    sent, received = attempt.earlier_traffic.sent, attempt.earlier_traffic.received
    beat, final = attempt.beat, attempt.final
    same = beat is not None and final is not None and beat.boot == final.boot
    if beat is not None and not same:
        sent, received = sent + beat.sent_bytes, received + beat.received_bytes
    if final is not None:
        sent += max(final.sent_bytes, beat.sent_bytes if same and beat else 0)
        received += max(final.received_bytes, beat.received_bytes if same and beat else 0)
    most = int(machine_s(attempt, until) * LINK_BYTES_PER_S)
    return Traffic(sent=min(sent, most), received=min(received, most))


def counted(attempt: Attempt, following: Attempt) -> Attempt:
    """`following` with what a former start of the agent counted: its successor begins at 0."""
    before, after = attempt.beat, following.beat
    if before is None or after is None or before.boot == after.boot:
        return following
    known = attempt.earlier_traffic
    total = Traffic(sent=known.sent + before.sent_bytes, received=known.received + before.received_bytes)
    return replace(following, earlier_traffic=total)


def traffic_cost(offer: Offer, moved: Traffic) -> Decimal:
    """Dollars at the offer's prices; nothing where the cloud does not say any."""
    facts = offer.facts
    out = (facts and facts.egress_usd_per_gib) or ZERO
    into = (facts and facts.ingress_usd_per_gib) or ZERO
    return usd((out * moved.sent + into * moved.received) / GIB)


# --------------------------------------------------------------------------------------------------------------- owing


def uncharged_usd(attempt: Attempt, until: datetime) -> Decimal:
    """What is still to be charged for machines up to `until`; never negative, also when a clock went backwards."""
    return max(ZERO, accrued(attempt, until) - (attempt.charged_usd - attempt.traffic_usd))


def uncharged_after_end_usd(
    attempt: Attempt, machine: Handle, born: datetime | None, until: datetime, *, standing: int = 1
) -> Decimal:
    """What is still to be charged for machines of an attempt that has ended, from their birth to `until`; never
    negative. `born` None: no cloud says when, so it was as soon as the attempt's charges end. `standing`: how many
    there are; fewer than were bought count as if all stood.
    """
    more = max(0, standing - attempt.line.nodes)
    now = replace(latest_price(attempt), since=attempt.charged_to or attempt.created_at, extra_machines=more)
    attempt = replace(attempt, prices=(*(p for p in attempt.prices if p.since < now.since), now))
    born = born or (attempt.ended_at if refused(attempt) else None)
    if born is None or attempt.charged_to is None:
        return uncharged_usd(attempt, until)
    late = replace(attempt, create_sent_at=born, running_at=born, handles=(machine,))
    charged = accrued(late, attempt.charged_to)  # of this birth; nothing where it came later
    return max(ZERO, accrued(late, until) - charged)


def traffic_owed(attempt: Attempt, until: datetime) -> Decimal:
    """What is still to be charged for traffic; never negative, also when a machine takes a number back."""
    return max(ZERO, traffic_cost(attempt.line.offer, traffic(attempt, until)) - attempt.traffic_usd)


def billed_until(attempt: Attempt, now: datetime, behind_s: float, *, shown: bool = True) -> datetime:
    """Up to when an attempt is charged now. What is being destroyed is charged `behind_s` late, as long as a proof of
    its absence takes: nothing is charged that the proof then takes back. Nor is a create that has not answered, while
    nothing stands that is `shown`: it may be refused, and else the next charge makes up for it.
    """
    if attempt.absent_at is not None:
        return min(now, attempt.absent_at)
    if attempt.state is AttemptState.LAUNCHING and no_machine_known(attempt) and not shown:
        return attempt.charged_to or attempt.create_sent_at or now
    return now - timedelta(seconds=behind_s) if attempt.state is AttemptState.TERMINATING else now


# ------------------------------------------------------------------------------------------------------------ the time
