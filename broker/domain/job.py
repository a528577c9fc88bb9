"""Jobs and attempts: rows of the store, states of the two lifecycles in `decide.lifecycle`."""

from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from broker.domain.ids import AttemptId, InstanceName, JobId
from broker.domain.money import ZERO
from broker.domain.offer import QuoteLine, Workload
from broker.domain.spec import JobSpec
from trainer.contract.rendezvous import Beat, Final


class JobState(StrEnum):
    AWAITING_APPROVAL = "awaiting_approval"
    QUEUED = "queued"
    ACTIVE = "active"
    RECOVERING = "recovering"
    SUCCEEDED = "succeeded"
    CAPPED = "capped"
    CANCELLED = "cancelled"
    FAILED = "failed"


class AttemptState(StrEnum):
    INTENDED = "intended"
    LAUNCHING = "launching"
    BOOTING = "booting"
    TRAINING = "training"
    DRAINING = "draining"
    TERMINATING = "terminating"
    ENDED = "ended"


class Reason(StrEnum):
    """Why an attempt is draining, terminating or ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    CAPPED = "capped"
    USER_ERROR = "user_error"
    DATA = "data"
    OOM = "oom"
    PREEMPTED = "preempted"
    LOST = "lost"
    NO_CAPACITY = "no_capacity"
    REJECTED = "rejected"
    MISMATCH = "mismatch"
    QUOTE_EXPIRED = "quote_expired"
    HUNG = "hung"
    DEADMAN = "deadman"
    INFRASTRUCTURE = "infrastructure"


TERMINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED})
"""No edge leads out of these; `capped` is left when the cap is raised."""
RESTING_JOB_STATES = TERMINAL_JOB_STATES | {JobState.CAPPED}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A person's job. Columns are grouped by their only writer; see `ports.Store`."""

    id: JobId
    owner: str
    spec: JobSpec
    workload: Workload
    created_at: datetime
    # written by the controllers, fenced by `epoch` (queued, recovering) or by the current attempt's epoch (active)
    state: JobState = JobState.QUEUED
    reason: str = ""
    """One line for people: why it waits, or how it ended."""
    attempts: int = 0
    """Attempts so far; the current one has this number."""
    retries_used: int = 0
    oom_changes: int = 0
    due_at: datetime | None = None
    """Not looked at before (back-off)."""
    finished_at: datetime | None = None
    # written by billing
    spent_usd: Decimal = ZERO
    """Charges so far; reservations excluded."""
    # written by the API
    cap_usd: Decimal
    stop_requested: bool = False
    retry_of: JobId | None = None
    # the lease
    epoch: int = 0


@dataclass(frozen=True, kw_only=True)
class Handle:
    """One machine as its provider names it."""

    provider: str
    id: str
    name: InstanceName
    region: str = ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One purchase for a job, from the intent to the confirmed absence."""

    id: AttemptId
    job_id: JobId
    number: int
    name: InstanceName
    line: QuoteLine
    """The offer that was chosen, with its estimate."""
    created_at: datetime
    reserved_usd: Decimal
    resume_from: tuple[str, ...] = ()
    """Manifest keys, newest first."""
    # written by the controllers under the lease
    state: AttemptState = AttemptState.INTENDED
    reason: Reason | None = None
    detail: str = ""
    create_sent_at: datetime | None = None
    launched_by: str = ""
    """Identity of the launcher, so that its death can be proven: see `Provider.launcher`. Empty: create answered."""
    handles: tuple[Handle, ...] = ()
    running_at: datetime | None = None
    """When its machines began to run, or earlier; None: no listing has shown it yet."""
    booted_at: datetime | None = None
    first_beat_at: datetime | None = None
    draining_since: datetime | None = None
    terminating_since: datetime | None = None
    destroy_failures: int = 0
    absent_at: datetime | None = None
    """When a listing that no longer showed it had answered: proven absent, and charged up to here."""
    ended_at: datetime | None = None
    beat: Beat | None = None
    """The latest beat of node 0."""
    final: Final | None = None
    # written by billing
    charged_usd: Decimal = ZERO
    charged_to: datetime | None = None
    """Charges cover the time from the start of billing to here."""
    cap_near: bool = False
    """Set by billing: drain now, or the cap is passed."""
    # the lease
    epoch: int = 0

    @property
    def live(self) -> bool:
        return self.state is not AttemptState.ENDED


class LedgerKind(StrEnum):
    RESERVATION = "reservation"
    CHARGE = "charge"
    RELEASE = "release"
    ADJUSTMENT = "adjustment"


class LedgerCategory(StrEnum):
    """What the money is for."""

    COMPUTE = "compute"
    EGRESS = "egress"
    STORAGE = "storage"


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """Append-only. A release is negative in effect: it gives back what is left of the reservation."""

    job_id: JobId
    attempt_id: AttemptId
    kind: LedgerKind
    usd: Decimal
    note: str = ""
    category: LedgerCategory = LedgerCategory.COMPUTE


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that people or programs may want to hear about; `seq` counts within the job, without gaps."""

    job_id: JobId
    kind: str
    """Dotted, e.g. `attempt.preempted`."""
    message: str
    attempt_id: AttemptId | None = None
    data: dict[str, Any] = field(default_factory=dict)
    seq: int = 0
    at: datetime | None = None
