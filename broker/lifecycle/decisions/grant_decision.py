"""Decides when the credentials of an attempt are renewed, and when a failing renewal is reported.

Used by the grants controller. All state of a grant is in `grant.json`, and its `seq` is the time of issue in
milliseconds. So any broker takes the same decision without a lease.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from broker.domain.job import Attempt, AttemptState, Event, Job
from trainer.contract.documents import Grant

RENEWED_STATES = frozenset({AttemptState.LAUNCHING, AttemptState.BOOTING, AttemptState.TRAINING, AttemptState.DRAINING})
"""States in which grants are renewed. A machine that is being destroyed gets no more credentials."""
NEVER = datetime.max.replace(tzinfo=UTC)
REPORT_AFTER = 3
"""Number of failures in a row after which an event reports them."""
RETRY_S = 60.0
"""Longest pause between two attempts to renew, in seconds."""


@dataclass(frozen=True, kw_only=True)
class GrantFacts:
    """All facts on which the renewal of one attempt's grant depends."""

    attempt: Attempt
    grant: Grant | None
    """The grant in the blob store; None: there is none."""
    now: datetime


@dataclass(frozen=True, kw_only=True)
class GrantDecision:
    """Renew now, or check again at `check_at`."""

    renews: Grant | None = None
    """The grant to replace now; None: nothing is due."""
    check_at: datetime = NEVER
    """Time of the next check. After a renewal it follows from the new grant."""


@dataclass(frozen=True, kw_only=True)
class FailureDecision:
    """Consequence of a renewal that failed. The agent trains on; its checkpoints wait."""

    check_at: datetime
    event: Event | None
    """Reports the failures, once; None: they are too few, or were reported."""


def decide_grant(facts: GrantFacts) -> GrantDecision:
    """Return whether a grant is renewed now, or when it is checked again."""
    if facts.grant is None:
        # A grant is written before create is called, and only if something expires or is secret.
        is_early = facts.attempt.state is AttemptState.LAUNCHING
        return GrantDecision(check_at=facts.now if is_early else NEVER)
    due_at = renew_at(facts.grant)
    return GrantDecision(check_at=due_at) if due_at > facts.now else GrantDecision(renews=facts.grant, check_at=due_at)


def renew_at(grant: Grant | None) -> datetime:
    """Return the time half-way between issue and expiry; NEVER if nothing expires."""
    if grant is None or grant.expires_at is None:
        return NEVER
    issued = datetime.fromtimestamp(grant.seq / 1000, UTC)
    return issued + (grant.expires_at - issued) / 2


def after_failure(
    job: Job, attempt: Attempt, cause: str, *, failures: int, now: datetime, every_s: float
) -> FailureDecision:
    """Return the time of the next attempt to renew, after growing pauses, and the event that reports the failures.

    `failures`: failures in a row, this one included. `every_s`: the first pause.
    """
    pause_s = min(RETRY_S, every_s * 2.0 ** min(failures - 1, 10))
    check_at = now + timedelta(seconds=pause_s)
    if failures != REPORT_AFTER:
        return FailureDecision(check_at=check_at, event=None)
    message = f"attempt {attempt.number}: its access to the blob store cannot be renewed: {cause}"
    event = Event(job_id=job.id, attempt_id=attempt.id, kind="attempt.grant_failing", message=message)
    return FailureDecision(check_at=check_at, event=event)
