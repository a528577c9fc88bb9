"""The life cycles of attempts and jobs as data: every (state, event) is a rule, stale, or impossible.

docs/design/lifecycle.md is generated from these tables (`python -m broker.cli.docs_reference docs`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from broker.domain.job import AttemptState as A
from broker.domain.job import JobState as J
from broker.domain.job import Reason


class AttemptEvent(StrEnum):
    LEASE_TAKEN = "lease taken"
    QUOTE_EXPIRED = "quote expired"
    STOP = "user stop"
    CAP = "cap near"
    OUT_OF_TIME = "out of time"
    BUDGET = "budget used up"
    MOVE = "moves to a cheaper offer"
    IDLE = "idle"
    IDLE_NOW = "idle, end at once"
    CREATED = "create answered, or machine listed"
    UNSENT = "first create not sent"
    OUTCOME_UNKNOWN = "create's outcome unknown"
    NO_CAPACITY = "no capacity"
    REJECTED = "create rejected"
    MISMATCH = "wrong machine"
    DEADLINE = "boot deadline passed"
    SETUP_FAILED = "machine will never start its agent"
    FIRST_BEAT = "first heartbeat"
    NOTICE = "preemption notice"
    FINAL = "final.json written"
    GONE = "listed as gone or stopped"
    HUNG = "silent or stuck while listed as running"
    GRACE_OVER = "drain time over"
    DESTROY_ERROR = "destroy failed"
    ABSENT = "launcher dead, absent in two listings"


class Effect(StrEnum):
    """Actions of the controller for a transition, in addition to writing the row."""

    CREATE = "commit create_sent_at, then create(name)"
    RECORD_HANDLES = "store handles"
    CANCEL = "cancel(name)"
    DRAIN = "desired = drain"
    DESTROY = "destroy"
    BACK_OFF = "back off"
    SETTLE = "final charge, release reservation, advance the job"
    RELEASE = "release reservation, advance the job"
    NOTIFY = "notify"


class TransitionVerdict(StrEnum):
    STALE = "stale"
    """Recorded without a change: late heartbeats, late replies and double stops are normal."""
    IMPOSSIBLE = "impossible"
    """An event that cannot happen here; a controller that requests it has a bug."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Transition of an attempt.

    `reason`: the end reason of the rule; None keeps the attempt's, or takes that of the event.
    """

    next: A
    effects: tuple[Effect, ...] = ()
    reason: Reason | None = None


class ImpossibleEvent(ValueError):
    """A controller requested a transition that the tables call impossible."""


E = AttemptEvent


def _terminate(reason: Reason | None = None, *effects: Effect) -> Rule:
    return Rule(next=A.TERMINATING, effects=(Effect.DESTROY, *effects), reason=reason)


def _abandon(reason: Reason) -> Rule:
    """Return the rule for an abandoned launch: `cancel` stops its launcher."""
    return _terminate(reason, Effect.CANCEL)


_DRAIN = (Effect.DRAIN, Effect.NOTIFY)

ATTEMPT_RULES: Mapping[tuple[A, E], Rule] = {
    (A.PLANNED, E.LEASE_TAKEN): Rule(next=A.LAUNCHING, effects=(Effect.CREATE,)),
    (A.PLANNED, E.STOP): Rule(next=A.ENDED, effects=(Effect.RELEASE,), reason=Reason.STOPPED),
    (A.PLANNED, E.QUOTE_EXPIRED): Rule(next=A.ENDED, effects=(Effect.RELEASE,), reason=Reason.QUOTE_EXPIRED),
    (A.PLANNED, E.CAP): Rule(next=A.ENDED, effects=(Effect.RELEASE,), reason=Reason.CAPPED),
    (A.PLANNED, E.OUT_OF_TIME): Rule(next=A.ENDED, effects=(Effect.RELEASE,), reason=Reason.OUT_OF_TIME),
    (A.PLANNED, E.BUDGET): Rule(next=A.ENDED, effects=(Effect.RELEASE,), reason=Reason.BUDGET),
    (A.LAUNCHING, E.CREATED): Rule(next=A.BOOTING, effects=(Effect.RECORD_HANDLES,)),
    (A.LAUNCHING, E.UNSENT): Rule(next=A.PLANNED),
    (A.LAUNCHING, E.OUTCOME_UNKNOWN): Rule(next=A.LAUNCHING),
    (A.LAUNCHING, E.NO_CAPACITY): _terminate(Reason.NO_CAPACITY),
    (A.LAUNCHING, E.REJECTED): _terminate(Reason.REJECTED),
    (A.LAUNCHING, E.ABSENT): Rule(next=A.LAUNCHING, effects=(Effect.CREATE,)),
    (A.LAUNCHING, E.STOP): _abandon(Reason.STOPPED),
    (A.LAUNCHING, E.CAP): _abandon(Reason.CAPPED),
    (A.LAUNCHING, E.OUT_OF_TIME): _abandon(Reason.OUT_OF_TIME),
    (A.LAUNCHING, E.BUDGET): _abandon(Reason.BUDGET),
    (A.LAUNCHING, E.MISMATCH): _abandon(Reason.MISMATCH),
    (A.LAUNCHING, E.DEADLINE): _abandon(Reason.INFRASTRUCTURE),
    (A.LAUNCHING, E.SETUP_FAILED): _abandon(Reason.INFRASTRUCTURE),
    (A.LAUNCHING, E.GONE): _abandon(Reason.PREEMPTED),
    (A.LAUNCHING, E.FINAL): _terminate(),
    (A.BOOTING, E.STOP): _terminate(Reason.STOPPED),
    (A.BOOTING, E.CAP): _terminate(Reason.CAPPED),
    (A.BOOTING, E.OUT_OF_TIME): _terminate(Reason.OUT_OF_TIME),
    (A.BOOTING, E.BUDGET): _terminate(Reason.BUDGET),
    (A.BOOTING, E.MISMATCH): _terminate(Reason.MISMATCH),
    (A.BOOTING, E.DEADLINE): _terminate(Reason.INFRASTRUCTURE),
    (A.BOOTING, E.SETUP_FAILED): _terminate(Reason.INFRASTRUCTURE),
    (A.BOOTING, E.GONE): _terminate(Reason.PREEMPTED),
    (A.BOOTING, E.NOTICE): _terminate(Reason.PREEMPTED),
    (A.BOOTING, E.FIRST_BEAT): Rule(next=A.TRAINING, effects=(Effect.NOTIFY,)),
    (A.BOOTING, E.FINAL): _terminate(),
    (A.TRAINING, E.STOP): Rule(next=A.DRAINING, effects=_DRAIN, reason=Reason.STOPPED),
    (A.TRAINING, E.CAP): Rule(next=A.DRAINING, effects=_DRAIN, reason=Reason.CAPPED),
    (A.TRAINING, E.OUT_OF_TIME): Rule(next=A.DRAINING, effects=_DRAIN, reason=Reason.OUT_OF_TIME),
    (A.TRAINING, E.BUDGET): Rule(next=A.DRAINING, effects=_DRAIN, reason=Reason.BUDGET),
    (A.TRAINING, E.MOVE): Rule(next=A.DRAINING, effects=_DRAIN, reason=Reason.MOVED),
    (A.TRAINING, E.IDLE): Rule(next=A.DRAINING, effects=_DRAIN, reason=Reason.IDLE),
    (A.TRAINING, E.IDLE_NOW): _terminate(Reason.IDLE),
    (A.TRAINING, E.NOTICE): Rule(next=A.DRAINING, effects=_DRAIN, reason=Reason.PREEMPTED),
    (A.TRAINING, E.FINAL): _terminate(),
    (A.TRAINING, E.GONE): _terminate(Reason.PREEMPTED),
    (A.TRAINING, E.HUNG): _terminate(Reason.HUNG),
    (A.DRAINING, E.FINAL): _terminate(),
    (A.DRAINING, E.GONE): _terminate(),
    (A.DRAINING, E.GRACE_OVER): _terminate(),
    (A.TERMINATING, E.DESTROY_ERROR): Rule(next=A.TERMINATING, effects=(Effect.BACK_OFF, Effect.NOTIFY)),
    (A.TERMINATING, E.ABSENT): Rule(next=A.ENDED, effects=(Effect.SETTLE,)),
}

_LATE = frozenset(E) - {E.LEASE_TAKEN, E.ABSENT}
_ANSWERS = frozenset({E.CREATED, E.UNSENT, E.OUTCOME_UNKNOWN, E.NO_CAPACITY, E.REJECTED, E.SETUP_FAILED})
"""Results of a launch, which may arrive after a poll has found the machine."""

ATTEMPT_STALE: Mapping[A, frozenset[E]] = {
    A.PLANNED: frozenset(),
    # A heartbeat can overtake the reply of the create; the listing will show the machine.
    A.LAUNCHING: frozenset({E.LEASE_TAKEN, E.QUOTE_EXPIRED, E.FIRST_BEAT, E.NOTICE, E.HUNG}),
    A.BOOTING: (_ANSWERS - {E.SETUP_FAILED}) | {E.LEASE_TAKEN, E.HUNG},
    A.TRAINING: _ANSWERS | {E.LEASE_TAKEN, E.FIRST_BEAT, E.DEADLINE, E.MISMATCH},
    A.DRAINING: _LATE - {E.FINAL, E.GONE, E.GRACE_OVER, E.QUOTE_EXPIRED, E.DESTROY_ERROR},
    A.TERMINATING: _LATE - {E.DESTROY_ERROR, E.QUOTE_EXPIRED},
    A.ENDED: _LATE | {E.ABSENT},
}


def attempt_rule(state: A, event: E) -> Rule | TransitionVerdict:
    """Return the rule for an event in a state; defined for all pairs."""
    rule = ATTEMPT_RULES.get((state, event))
    if rule is not None:
        return rule
    return TransitionVerdict.STALE if event in ATTEMPT_STALE[state] else TransitionVerdict.IMPOSSIBLE


class JobEvent(StrEnum):
    NEEDS_APPROVAL = "a policy requires approval"
    APPROVED = "approved, or no longer needed"
    ATTEMPT_PLANNED = "attempt planned"
    CANNOT_FINISH = "cap below the cheapest finish"
    OUT_OF_TIME = "out of time"
    COMPLETED = "attempt ended: completed"
    CAPPED = "attempt ended: capped"
    STOPPED = "attempt ended: stopped"
    RETRY = "attempt ended: may be retried"
    FAILED = "attempt ended: user error, data, idle, out of time, or retries used up"
    BACK_OFF_OVER = "back-off over"
    CAP_RAISED = "cap raised"
    STOP = "user stop"


JOB_RULES: Mapping[tuple[J, JobEvent], J] = {
    (J.AWAITING_APPROVAL, JobEvent.APPROVED): J.QUEUED,
    (J.AWAITING_APPROVAL, JobEvent.STOP): J.CANCELLED,
    (J.AWAITING_APPROVAL, JobEvent.OUT_OF_TIME): J.FAILED,
    (J.QUEUED, JobEvent.NEEDS_APPROVAL): J.AWAITING_APPROVAL,
    (J.QUEUED, JobEvent.ATTEMPT_PLANNED): J.ACTIVE,
    (J.QUEUED, JobEvent.CANNOT_FINISH): J.CAPPED,
    (J.QUEUED, JobEvent.OUT_OF_TIME): J.FAILED,
    (J.QUEUED, JobEvent.STOP): J.CANCELLED,
    (J.ACTIVE, JobEvent.COMPLETED): J.SUCCEEDED,
    (J.ACTIVE, JobEvent.CAPPED): J.CAPPED,
    (J.ACTIVE, JobEvent.STOPPED): J.CANCELLED,
    (J.ACTIVE, JobEvent.RETRY): J.RECOVERING,
    (J.ACTIVE, JobEvent.FAILED): J.FAILED,
    (J.RECOVERING, JobEvent.BACK_OFF_OVER): J.QUEUED,
    (J.RECOVERING, JobEvent.STOP): J.CANCELLED,
    (J.CAPPED, JobEvent.CAP_RAISED): J.QUEUED,
}

_RESTING_STALE = frozenset({JobEvent.STOP, JobEvent.CAP_RAISED, JobEvent.APPROVED, JobEvent.BACK_OFF_OVER})

JOB_STALE: Mapping[J, frozenset[JobEvent]] = {
    J.AWAITING_APPROVAL: frozenset({JobEvent.CAP_RAISED}),
    J.QUEUED: frozenset({JobEvent.APPROVED, JobEvent.CAP_RAISED, JobEvent.BACK_OFF_OVER}),
    # A stop of an active job is a signal to its attempt; the job follows when the attempt has ended.
    J.ACTIVE: frozenset({JobEvent.STOP, JobEvent.APPROVED, JobEvent.CAP_RAISED, JobEvent.BACK_OFF_OVER}),
    J.RECOVERING: frozenset({JobEvent.APPROVED, JobEvent.CAP_RAISED}),
    J.SUCCEEDED: _RESTING_STALE,
    J.CAPPED: _RESTING_STALE - {JobEvent.CAP_RAISED},
    J.CANCELLED: _RESTING_STALE,
    J.FAILED: _RESTING_STALE,
}


def job_rule(state: J, event: JobEvent) -> J | TransitionVerdict:
    """Return the next state of a job; defined for all pairs."""
    following = JOB_RULES.get((state, event))
    if following is not None:
        return following
    return TransitionVerdict.STALE if event in JOB_STALE[state] else TransitionVerdict.IMPOSSIBLE


def next_job_state(state: J, event: JobEvent) -> J:
    """Return the next state; unchanged for a stale event. Raises ImpossibleEvent."""
    following = job_rule(state, event)
    if following is TransitionVerdict.IMPOSSIBLE:
        raise ImpossibleEvent(f"job {state.value}: {event.value}")
    return following if isinstance(following, J) else state


def markdown_tables() -> str:
    """Return the tables as Markdown."""
    lines = ["| attempt state | event | next | effects |", "|---|---|---|---|"]
    for (state, event), rule in ATTEMPT_RULES.items():
        target = rule.next.value + (f" ({rule.reason.value})" if rule.reason else "")
        effects = "; ".join(e.value for e in rule.effects)
        lines.append(f"| {state.value} | {event.value} | {target} | {effects} |")
    lines += ["", "| attempt state | stale (recorded, no change) |", "|---|---|"]
    some = ((state, stale) for state, stale in ATTEMPT_STALE.items() if stale)
    lines += [f"| {s.value} | {'; '.join(sorted(e.value for e in stale))} |" for s, stale in some]
    lines += ["", "| job state | event | next |", "|---|---|---|"]
    lines += [f"| {s.value} | {e.value} | {n.value} |" for (s, e), n in JOB_RULES.items()]
    lines += ["", "| job state | stale |", "|---|---|"]
    lines += [f"| {s.value} | {'; '.join(sorted(e.value for e in stale))} |" for s, stale in JOB_STALE.items()]
    return "\n".join([*lines, "", "Every other pair is impossible: a controller that requests it has a bug.", ""])
