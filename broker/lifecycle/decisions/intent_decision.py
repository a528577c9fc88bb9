"""Decides whether the create of a planned attempt is sent. Used by the launch controller.

Nothing was created for a planned attempt, so its end costs nothing and releases its reservation.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from broker.billing.time_limits import out_of_time_message
from broker.domain.job import Attempt, Event, Job, Reason
from broker.domain.money import LedgerEntry, LedgerKind
from broker.domain.offer import Offer
from broker.lifecycle.decisions import launch_decision
from broker.lifecycle.launch import outdated
from broker.lifecycle.signals import required_end
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import after_attempt, due_in_s, step

_SUPERSEDED = (
    AttemptEvent.QUOTE_EXPIRED,
    "another attempt was bought after the backup that the database comes from",
)


@dataclass(frozen=True, kw_only=True)
class IntentFacts:
    """All facts on which the create of one planned attempt depends."""

    job: Job
    attempt: Attempt
    now: datetime
    launcher_id: str
    """Identity of this process as a launcher of the attempt's provider."""
    quote_ttl_s: float
    """Seconds after which a quote is too old to be bought."""
    price_rise: Decimal
    """Share by which the price may have risen since the quote."""
    latest: Offer | None
    """The quoted offer as it is now; None: it is no longer offered."""
    offers_at: datetime | None
    """Time at which the provider's newest offer was read; None: it has no offers."""
    forbidden: str = ""
    """Reason why the installation does not run this job; empty: it does."""
    was_sent: bool = False
    """True if the blob store shows that a create was sent, although a restored backup returned the attempt as planned.
    """
    is_superseded: bool = False
    """True if a later attempt was bought after the backup that the database comes from."""
    unreadable: str = ""
    """Error of the blob store when it was read; empty: no error."""


class IntentOutcome(StrEnum):
    """Decisions about a planned attempt."""

    WAIT = "wait"
    """Decision while the blob store cannot be read, so that it is unknown whether the create was sent."""
    SEND = "send"
    """Send the create once the decision is written."""
    LOOK_UP = "look up"
    """The create was sent already: look for its machines."""
    END = "end"
    """End the attempt; nothing was created."""


@dataclass(frozen=True, kw_only=True)
class IntentDecision:
    """The next state of a planned attempt, and the rows that are written with it."""

    outcome: IntentOutcome
    before: Attempt
    attempt: Attempt
    """The attempt after the decision."""
    job: Job
    """The job after the decision."""
    ledger: tuple[LedgerEntry, ...] = ()
    due_in_s: float = field(default_factory=lambda: launch_decision.CREATE_POLL_S)


def decide_intent(facts: IntentFacts) -> IntentDecision:
    """Return the decision on a planned attempt: send the create, look it up, wait, or end the attempt.

    The create is looked up if it was sent before a restored backup returned the attempt as planned.
    """
    attempt, job = facts.attempt, facts.job
    if facts.unreadable:
        unknown = f"the blob store cannot be read, so it is unknown whether its create was sent: {facts.unreadable}"
        waiting = replace(attempt, detail=unknown)
        return IntentDecision(outcome=IntentOutcome.WAIT, before=attempt, attempt=waiting, job=job)
    end = None
    if not facts.was_sent:
        end = end_before_create(facts) or (_SUPERSEDED if facts.is_superseded else None)
    if end is not None:
        return _end_intent(facts, *end)
    # No row holds the time of the create. Charges begin at the planning time, because no create is sent earlier.
    sent_at = attempt.created_at if facts.was_sent else facts.now
    sent = step(attempt, AttemptEvent.LEASE_TAKEN, sent_at).attempt
    sent = replace(sent, launched_by=facts.launcher_id, detail="")
    outcome = IntentOutcome.LOOK_UP if facts.was_sent else IntentOutcome.SEND
    return IntentDecision(outcome=outcome, before=attempt, attempt=sent, job=job)


def end_before_create(facts: IntentFacts) -> tuple[AttemptEvent, str] | None:
    """Return why the create is not sent, as an event and a message; None: it is sent."""
    attempt, job, now = facts.attempt, facts.job, facts.now
    if (signal := required_end(attempt, job)) is not None:
        return signal, out_of_time_message(job, now) if signal is AttemptEvent.OUT_OF_TIME else signal.value
    if facts.forbidden:
        return AttemptEvent.QUOTE_EXPIRED, facts.forbidden
    age_s = (now - attempt.created_at).total_seconds()
    if age_s > facts.quote_ttl_s:
        return AttemptEvent.QUOTE_EXPIRED, f"its quote is {age_s:.0f} s old; {attempt.detail}".rstrip("; ")
    market_change = outdated(attempt.line.offer, facts.latest, facts.offers_at, facts.price_rise)
    return None if market_change is None else (AttemptEvent.QUOTE_EXPIRED, market_change)


def intent_events(decision: IntentDecision) -> tuple[Event, ...]:
    """Return the event of an attempt that ended before its launch."""
    if decision.outcome is not IntentOutcome.END:
        return ()
    attempt = decision.attempt
    message = f"attempt {attempt.number} ended before launch: {attempt.detail}"
    return (Event(job_id=attempt.job_id, attempt_id=attempt.id, kind="attempt.ended", message=message),)


def _end_intent(facts: IntentFacts, event: AttemptEvent, message: str) -> IntentDecision:
    """End an attempt for which nothing was created."""
    attempt, now = facts.attempt, facts.now
    ended = replace(step(attempt, event, now).attempt, detail=message)
    job = after_attempt(facts.job, ended, ended.reason or Reason.STOPPED, message, now)
    release = LedgerEntry(
        job_id=job.id, attempt_id=ended.id, kind=LedgerKind.RELEASE, usd=attempt.reserved_usd, note=event.value
    )
    return IntentDecision(
        outcome=IntentOutcome.END,
        before=attempt,
        attempt=ended,
        job=job,
        ledger=(release,),
        due_in_s=due_in_s(job, now),
    )
