"""What an attempt costs, and when its job must drain so that the cap and its time hold.

Everything is cumulative: what is owed is what has accrued less what was charged, so it does not matter how often or in
which order billing runs, and every amount is rounded once, up.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from broker.decide.prices import billed_since, ceiling, latest_price, spans
from broker.domain.instance import Caps
from broker.domain.job import Attempt, AttemptState, Handle, Job, Reason, Signal, Traffic
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB, Offer, QuoteLine

HOUR = Decimal(3600)
SECOND = timedelta(seconds=1)
REFUSALS = frozenset({Reason.NO_CAPACITY, Reason.REJECTED, Reason.IMAGE})
"""What a create is answered by a cloud that makes nothing."""
LEAST_DRAIN_S = 30.0
"""The request has to be noticed and a step to be ended, however quick the last save was."""
LINK_BYTES_PER_S = 12_500_000_000
"""100 Gbit/s: a machine that says it sent more than its network carries is not believed."""


@dataclass(frozen=True, kw_only=True)
class Tempo:
    """How quick the house itself is, in seconds; a cap is held by all of it."""

    tick_s: float
    """From the line that billing watches to the beginning of a drain, at the latest."""
    drain_s: float
    """What a drain may take at the most."""
    hands_s: float
    """From the end of a drain to a proven absence, less the cloud's own time: to be noticed, destroyed, and left out of
    two listings."""

    @property
    def lead_s(self) -> float:
        """A machine with less time than this is drained as soon as it is bought; the cloud's own time comes on top."""
        return self.tick_s + self.drain_s + self.hands_s


def nothing_stands(attempt: Attempt) -> bool:
    """No machine of it is known: neither the cloud's answer to its create nor any listing has shown one."""
    return not attempt.handles and attempt.running_at is None and attempt.booted_at is None


def refused(attempt: Attempt) -> bool:
    """Its cloud has answered that nothing was created, or was not asked, and no listing says otherwise."""
    not_asked = attempt.reason is Reason.USER_ERROR and attempt.final is None
    return (attempt.reason in REFUSALS or not_asked) and nothing_stands(attempt)


def _stood_until(attempt: Attempt, until: datetime) -> datetime:
    """A create that was refused costs nothing; what was charged of one before it, whose outcome is unknown, stays."""
    return min(until, attempt.charged_to or attempt.created_at) if refused(attempt) else until


def accrued(attempt: Attempt, until: datetime) -> Decimal:
    """Dollars for machines from the start of billing to `until`, in the provider's quantum rounded up; in every state
    alike. A quantum in which the price changed costs the highest of it."""
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


def _cost(offer: Offer, nodes: int, lasted: timedelta, price: Decimal) -> Decimal:
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


def _save_bytes(line: QuoteLine) -> int:
    """Of one checkpoint while none is made: weights and the optimizer's state; 0: nothing is known (a script)."""
    return 0 if line.memory is None else line.memory.weights + line.memory.optimizer


def _saves(every_s: float, during_s: float) -> int:
    """Checkpoints that a trainer may still send when it is drained so much later: one under way, those whose time
    comes, and the last."""
    return 2 + int(during_s / every_s)


def _drained(attempt: Attempt, job: Job, until: datetime, during_s: float) -> Traffic:
    """Traffic by the end of a drain; nothing was made that could be saved before the first beat, or is waited for
    when no time is left."""
    moved, beat = traffic(attempt, until), attempt.beat
    if beat is None or not during_s:
        return moved
    one = beat.checkpoint.bytes if beat.checkpoint else _save_bytes(attempt.line)
    saves = _saves(job.spec.checkpoint.least_s, during_s) * one
    return replace(moved, sent=moved.sent + saves + attempt.line.rows_bytes)


# --------------------------------------------------------------------------------------------------------------- owing


def owed(attempt: Attempt, until: datetime) -> Decimal:
    """What is still to be charged for machines up to `until`; never negative, also when a clock went backwards."""
    return max(ZERO, accrued(attempt, until) - (attempt.charged_usd - attempt.traffic_usd))


def owed_late(
    attempt: Attempt, machine: Handle, born: datetime | None, until: datetime, *, standing: int = 1
) -> Decimal:
    """What is still to be charged for machines of an attempt that has ended, from their birth to `until`; never
    negative. `born` None: no cloud says when, so it was as soon as the attempt's charges end. `standing`: how many
    there are; fewer than were bought count as if all stood."""
    more = max(0, standing - attempt.line.nodes)
    now = replace(latest_price(attempt), since=attempt.charged_to or attempt.created_at, surplus=more)
    attempt = replace(attempt, prices=(*(p for p in attempt.prices if p.since < now.since), now))
    born = born or (attempt.ended_at if refused(attempt) else None)
    if born is None or attempt.charged_to is None:
        return owed(attempt, until)
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
    if attempt.state is AttemptState.LAUNCHING and nothing_stands(attempt) and not shown:
        return attempt.charged_to or attempt.create_sent_at or now
    return now - timedelta(seconds=behind_s) if attempt.state is AttemptState.TERMINATING else now


def capped_drain_s(attempt: Attempt, drain_s: float) -> float:
    """Seconds that a drain for the cap may take: three times the last save where there is one, else `drain_s`."""
    saved = attempt.beat.checkpoint if attempt.beat else None
    return min(drain_s, max(LEAST_DRAIN_S, 3 * saved.save_s)) if saved else drain_s


def drain_lead_s(attempt: Attempt, caps: Caps, tempo: Tempo) -> float:
    """Seconds before the cap at which a drain must start: tick, drain, hands, teardown, list lag and a quantum."""
    return _lead_s(attempt.line.offer, caps, replace(tempo, drain_s=capped_drain_s(attempt, tempo.drain_s)))


def _lead_s(offer: Offer, caps: Caps, tempo: Tempo) -> float:
    return tempo.lead_s + caps.teardown_s + 2 * caps.list_lag_s + offer.billing_quantum_s


def least_usd(line: QuoteLine, caps: Caps, every_s: float, tempo: Tempo) -> Decimal:
    """A new attempt needs more than this under its cap: with less it would have to drain as soon as it is bought, or
    would pass its cap by what the cloud bills at the least. `every_s`: between two checkpoints."""
    offer = line.offer
    least_s = max(_lead_s(offer, caps, tempo), offer.billing_minimum_s)
    price = ceiling(offer, offer.usd_per_hour)
    saves = _saves(every_s, tempo.tick_s + tempo.drain_s) * _save_bytes(line)
    moved = Traffic(sent=saves + line.rows_bytes)
    return _cost(offer, line.nodes, timedelta(seconds=least_s), price) + traffic_cost(offer, moved)


def cap_is_near(attempt: Attempt, job: Job, caps: Caps, now: datetime, tempo: Tempo) -> bool:
    """True when the job must drain now: spent + highest rate x `drain_lead_s` + last saves reaches the cap.

    Then spend <= cap holds while the cloud ends billing within `caps.teardown_s` of destroy. Where it takes t seconds
    longer, the overshoot is at most rate x t.
    """
    lead = timedelta(seconds=drain_lead_s(attempt, caps, tempo))
    others = job.spent_usd - attempt.charged_usd
    known = latest_price(attempt)
    highest = replace(known, since=now, usd_per_hour=ceiling(attempt.line.offer, known.usd_per_hour))
    worst = accrued(replace(attempt, prices=(*attempt.prices, highest)), now + lead)
    # What was charged before it was known to run later than the create is spent, and worked off.
    machines = max(attempt.charged_usd - attempt.traffic_usd, worst)
    during_s = tempo.tick_s + tempo.drain_s
    moved = max(attempt.traffic_usd, traffic_cost(attempt.line.offer, _drained(attempt, job, now, during_s)))
    return others + machines + moved >= limit(attempt, job)


def limit(attempt: Attempt, job: Job) -> Decimal:
    """What the job may have spent by the end of this attempt: its cap, and no more than was reserved for the attempt.
    Less was with `max_duration`; a cap that is raised reserves more only for an attempt that is not on its way out."""
    return min(job.cap_usd, job.spent_usd - attempt.charged_usd + attempt.reserved_usd)


# ------------------------------------------------------------------------------------------------------------ the time


def time_left_s(job: Job, now: datetime) -> float | None:
    """Seconds for which new machines of the job may stand; None: as long as the money lasts."""
    left = []
    if job.spec.deadline is not None:
        left.append((job.spec.deadline - now).total_seconds())
    if job.spec.max_duration is not None:
        left.append(job.spec.max_duration - job.machine_s)
    return min(left, default=None)


def time_is_up(attempt: Attempt, job: Job, caps: Caps, now: datetime, tempo: Tempo) -> bool:
    """True when the job must drain now to be over at its deadline, and before its `max_duration` is used up."""
    if job.spec.deadline is None and job.spec.max_duration is None:
        return False
    lead_s = drain_lead_s(attempt, caps, tempo)
    running = replace(job, machine_s=job.machine_s + machine_s(attempt, now))
    left_s = time_left_s(running, now)
    return left_s is not None and left_s <= lead_s


def due_signal(attempt: Attempt, job: Job, caps: Caps, now: datetime, tempo: Tempo) -> Signal | None:
    """Why a live attempt must end now, for its money or its time; None: it may go on, or was told already."""
    if attempt.signal is not None:
        return None
    if cap_is_near(attempt, job, caps, now, tempo):
        return Signal.CAP
    return Signal.OUT_OF_TIME if time_is_up(attempt, job, caps, now, tempo) else None


def grace_over(
    attempt: Attempt, job: Job, caps: Caps, now: datetime, tempo: Tempo, *, look_s: float, heard_s: float
) -> bool:
    """True when a drain is not waited for any longer: it has had its time, or waiting `look_s` more would pass the cap
    or the job's time. That holds whatever the drain is for: one that a stop or a budget began has no lead of its own.

    `heard_s`: within this the agent has heard of it, and begins to count; where money or time is up it gets no more.
    """
    told_by_cap = attempt.reason in (Reason.CAPPED, Reason.OUT_OF_TIME)
    most_s = capped_drain_s(attempt, tempo.drain_s) if told_by_cap else tempo.drain_s + heard_s
    if (now - (attempt.draining_since or now)).total_seconds() > most_s:
        return True
    later, after = now + timedelta(seconds=look_s), replace(tempo, tick_s=0, drain_s=0)
    return any(over(attempt, job, caps, later, after) for over in (cap_is_near, time_is_up))


def out_of_time(job: Job, now: datetime, *, needed_s: float = 0.0) -> str | None:
    """Why nothing can be bought any more for want of time, in one line; None: there is enough.

    `needed_s`: less than this is no time: a machine would be drained as soon as it is bought.
    """
    left_s = time_left_s(job, now)
    if left_s is None or left_s > needed_s:
        return None
    return told_out_of_time(job, now)


def told_out_of_time(job: Job, now: datetime) -> str:
    """Which of its limits of time a job has reached, and how it goes on, in one line."""
    deadline, most = job.spec.deadline, job.spec.max_duration
    what = f"its max_duration of {most} s"
    if deadline is not None and (most is None or deadline - now <= (most - job.machine_s) * SECOND):
        what = f"its deadline {deadline.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return f"out of time: {what} is reached; its checkpoint is kept, `gpubroker retry {job.id}` goes on from it"


def reservation(job: Job) -> Decimal:
    """What is left under the job's cap."""
    return max(ZERO, job.cap_usd - job.spent_usd)


def reserved(job: Job, line: QuoteLine, caps: Caps, tempo: Tempo) -> Decimal:
    """What an attempt reserves: all that is left under the cap, or less where `max_duration` allows less: the highest
    rate for the time that is left and a drain, and the traffic of a save at each interval. What a script sends is not
    known before."""
    left, most = reservation(job), job.spec.max_duration
    unknown = line.memory is None and traffic_cost(line.offer, Traffic(sent=GIB)) > 0
    if most is None or unknown:
        return left
    lead_s = _lead_s(line.offer, caps, tempo)
    left_s = max(0.0, most - job.machine_s) + lead_s
    price = ceiling(line.offer, line.offer.usd_per_hour)
    moved = Traffic(sent=_saves(job.spec.checkpoint.least_s, left_s) * _save_bytes(line) + line.rows_bytes)
    hours = _cost(line.offer, line.nodes, timedelta(seconds=left_s), price)
    return min(left, hours + traffic_cost(line.offer, moved))
