"""Jobs and attempts: rows of the store, states of the two lifecycles in `decide.lifecycle`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Literal

from broker.domain.ids import AttemptId, InstanceName, JobId
from broker.domain.money import ZERO
from broker.domain.offer import QuoteLine
from broker.domain.spec import IdleKind, JobSpec
from broker.domain.tenancy import DEFAULT_TEAM
from broker.domain.workload import Workload
from trainer.contract.documents import Beat, Final


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
    IMAGE = "image"
    """The trainer's image cannot be pulled, says its registry."""
    OUT_OF_TIME = "out_of_time"
    """Past the job's deadline, or its `max_duration` is used up."""
    IDLE = "idle"
    BUDGET = "budget"
    """A policy's budget drains; the job waits in the queue until the budget allows it again."""


class Signal(StrEnum):
    """Why a live attempt is to end, beside a stop by people. Written once, by whoever watches its money or its work."""

    CAP = "cap"
    OUT_OF_TIME = "out_of_time"
    IDLE = "idle"
    """Checkpoint first."""
    IDLE_NOW = "idle_now"
    HUNG = "hung"
    BUDGET = "budget"
    """Checkpoint first."""


TERMINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED})
"""No edge leads out of these; `capped` is left when the cap is raised."""
RESTING_JOB_STATES = TERMINAL_JOB_STATES | {JobState.CAPPED}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """P50 of a job's end at the present pace and price."""

    usd: Decimal
    """What it will have spent on machines by then."""
    finish_at: datetime
    step_s: float
    """Measured seconds of a step, with saves."""
    made_at: datetime
    over_cap: bool = False
    """People were told that the cap does not suffice; taken back once it does with some room."""
    late: bool = False
    """The same of its deadline and its `max_duration`."""


@dataclass(frozen=True, kw_only=True)
class PlanAdjustment:
    """How a job's plan was changed since its memory ran out. Its method and its global batch stay as they were asked
    for.
    """

    failed_plans: tuple[str, ...]
    """The plans that ran out, in words, oldest first."""
    micro_batch: int = 0
    """The largest one; 0: a script, whose plan is its own."""
    gradient_checkpointing: bool = False
    memory_factor: float = 1.0
    oom_device_bytes: int = 0
    oom_shards: int = 1
    oom_micro_batch: int = 0
    oom_host_bytes: int = 0
    """These five as in `Workload`."""


StoredKind = Literal["artifacts", "checkpoints", "logs", "data"]


@dataclass(frozen=True, kw_only=True)
class StoredData:
    """What a job keeps in the blob store."""

    bytes: int
    """When it was last looked at."""
    accrued_usd: Decimal
    """Exact, so that it is rounded once whenever it is charged."""
    charged_usd: Decimal
    to: datetime
    """Accrued up to here."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A person's job. Columns are grouped by their only writer; see `ports.Store`."""

    id: JobId
    team: str = DEFAULT_TEAM
    """Whose members see it."""
    owner: str
    """Who submitted it: whose secrets and uploads it uses."""
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
    remedy: PlanAdjustment | None = None
    machine_s: float = 0.0
    """Seconds for which machines of its ended attempts stood; several nodes count once."""
    due_at: datetime | None = None
    """Not looked at before (back-off)."""
    finished_at: datetime | None = None
    # written by billing
    spent_usd: Decimal = ZERO
    """Charges for machines so far, which the cap limits; reservations and storage excluded."""
    # written by the guard
    forecast: Forecast | None = None
    """Of its live attempt; None: nothing is known."""
    # written by the retention controller, and `deleted` by the API
    stored: StoredData | None = None
    """None: nobody has looked yet."""
    deleted: Mapping[StoredKind, datetime] = field(default_factory=dict)
    """What was deleted, and when; it may take a while until the last object is gone."""
    # written by the API
    cap_usd: Decimal
    approved_usd: Decimal | None = None
    """The highest cap that somebody has approved, where a policy asks for approval."""
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
class PriceChange:
    """From `since` on each machine of an attempt costs so much."""

    since: datetime
    usd_per_hour: Decimal
    surplus: int = 0
    """Machines that stand under its name beside those that were bought, and bill as much each."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes between a machine and the blob store, as its agent counts them."""

    sent: int = 0
    received: int = 0


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
    """Identity of the launcher, so that its death can be proven: see `Provider.launcher`. Empty: create answered, or
    was not sent."""
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
    earlier_traffic: Traffic = Traffic()
    """Of former starts of its agent, whose counters begin anew with each."""
    final: Final | None = None
    # written by billing
    charged_usd: Decimal = ZERO
    """Compute and traffic."""
    traffic_usd: Decimal = ZERO
    """The part of `charged_usd` that is for traffic."""
    charged_to: datetime | None = None
    """Charges cover the time from the start of billing to here."""
    prices: tuple[PriceChange, ...] = ()
    """Since the purchase, in any order."""
    signal: Signal | None = None
    """Set by billing, the guard or a budget, and never taken back: it is to end."""
    # written by the guard
    idle: IdleKind | None = None
    """What people were told of; None: it works."""
    # the lease
    epoch: int = 0

    @property
    def ran_out_of_host(self) -> bool:
        """True when it was the memory of a machine with GPUs that ran out, not that of the GPUs."""
        offer = self.line.offer
        return offer.gpus > 0 and not offer.emulated_on and self.final is not None and self.final.ran_out == "host"

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
    attempt_id: AttemptId | None
    """None: storage, which outlives attempts."""
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
