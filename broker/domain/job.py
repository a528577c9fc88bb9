"""Jobs and attempts: rows of the store; `lifecycle.state_machine` defines the transitions of both states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from broker.domain.ids import AttemptId, InstanceName, JobId
from broker.domain.money import ZERO
from broker.domain.tenancy import DEFAULT_TEAM

if TYPE_CHECKING:  # a client needs the states only, and the spec takes long to import
    from broker.domain.offer import QuoteLine
    from broker.domain.spec import IdleKind, JobSpec
    from broker.domain.workload import Workload
    from trainer.contract.documents import Final, Heartbeat


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
    PLANNED = "planned"
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
    """The registry refuses the trainer's image."""
    OUT_OF_TIME = "out_of_time"
    """The job's deadline has passed, or its `max_duration` is used up."""
    IDLE = "idle"
    BUDGET = "budget"
    """A policy's budget drains the attempt; the job waits in the queue until the budget allows it again."""
    MOVED = "moved"
    """The job continues on a cheaper offer."""


class Signal(StrEnum):
    """Why a live attempt must end, other than a stop by a user.

    Written once, by the controller that watches money or progress.
    """

    CAP = "cap"
    OUT_OF_TIME = "out_of_time"
    IDLE = "idle"
    """A checkpoint is saved first."""
    IDLE_NOW = "idle_now"
    HUNG = "hung"
    BUDGET = "budget"
    """A checkpoint is saved first."""
    MOVE = "move"
    """A checkpoint is saved first; the job then continues on a cheaper offer."""


TERMINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED})
"""States without an outgoing edge. A job leaves `capped` when its cap is raised."""
RESTING_JOB_STATES = TERMINAL_JOB_STATES | {JobState.CAPPED}


@dataclass(frozen=True, kw_only=True)
class ForecastInterval:
    """90 % interval of a forecast, from the first steps that an attempt's machine was measured for."""

    attempt: int
    """Number of the measured attempt."""
    usd_low: Decimal
    usd_high: Decimal
    """Dollars spent on machines at the end."""
    finish_earliest: datetime
    finish_latest: datetime


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """P50 of a job's end at the current speed and price."""

    usd: Decimal
    """Expected dollars spent on machines at the end."""
    finish_at: datetime
    step_s: float
    """Measured seconds of a step, including saves."""
    made_at: datetime
    over_cap: bool = False
    """True after users were notified that the cap does not suffice. It becomes False once the cap suffices with some
    margin.
    """
    late: bool = False
    """True after the same notification about the deadline or `max_duration`."""
    interval: ForecastInterval | None = None
    """None: no attempt was measured for enough steps. It is stored with the event that re-quotes the job."""


@dataclass(frozen=True, kw_only=True)
class PlanAdjustment:
    """Changes of a job's plan after the job ran out of memory; the method and the global batch stay as requested."""

    failed_plans: tuple[str, ...]
    """The plans that ran out of memory, in words, oldest first."""
    micro_batch: int = 0
    """Largest micro-batch allowed; 0: the job is a script, which has no plan."""
    gradient_checkpointing: bool = False
    memory_factor: float = 1.0
    oom_device_bytes: int = 0
    oom_shards: int = 1
    oom_micro_batch: int = 0
    oom_host_bytes: int = 0
    """`memory_factor` and the fields `oom_…` have the meaning of the same fields of `Workload`."""


StoredKind = Literal["artifacts", "checkpoints", "logs", "data"]


@dataclass(frozen=True, kw_only=True)
class StoredData:
    """Data that a job keeps in the blob store."""

    bytes: int
    """Total size at the latest check."""
    accrued_usd: Decimal
    """Exact dollars accrued so far; only a charge rounds them."""
    charged_usd: Decimal
    to: datetime
    """Time up to which storage is accrued."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A user's job. Each group of columns has a single writer; see `ports.Store`."""

    id: JobId
    team: str = DEFAULT_TEAM
    """The team whose members see the job."""
    owner: str
    """The user who submitted the job; the job uses this user's secrets and uploads."""
    spec: "JobSpec"
    workload: "Workload"
    created_at: datetime
    # written by the controllers, fenced by `epoch` (queued, recovering) or by the current attempt's epoch (active)
    state: JobState = JobState.QUEUED
    reason: str = ""
    """Why the job waits, or how it ended, in one line."""
    attempts: int = 0
    """Number of attempts so far, which is the number of the current one."""
    retries_used: int = 0
    preemptions_without_progress: int = 0
    """Preempted attempts in a row that saved no new checkpoint."""
    remedy: PlanAdjustment | None = None
    machine_s: float = 0.0
    """Seconds for which machines of its ended attempts existed; several nodes count once."""
    due_at: datetime | None = None
    """Earliest time of the next check (back-off); None: now."""
    finished_at: datetime | None = None
    # written by billing
    spent_usd: Decimal = ZERO
    """Charges for machines so far, which the cap limits; reservations and storage are excluded."""
    # written by the guard
    forecast: Forecast | None = None
    """Forecast of the live attempt; None: there is none yet."""
    # written by the retention controller, and `deleted` by the API
    stored: StoredData | None = None
    """Stored data at the latest check; None: not checked yet."""
    deleted: Mapping[StoredKind, datetime] = field(default_factory=dict)
    """Kinds of data that were deleted, with the time. Removal of the last object may take longer."""
    # written by the API
    cap_usd: Decimal
    approved_usd: Decimal | None = None
    """The highest cap that was approved, where a policy requires approval; None: none was."""
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
    """Hourly price of each machine of an attempt from `since` on."""

    since: datetime
    usd_per_hour: Decimal
    extra_machines: int = 0
    """Extra machines under the attempt's name, in addition to those bought, which bill the same price each."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes between a machine and the blob store, as its agent counts them."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One purchase for a job, from the plan to the proven absence of its machines."""

    id: AttemptId
    job_id: JobId
    number: int
    name: InstanceName
    line: "QuoteLine"
    """The chosen offer with its estimate."""
    created_at: datetime
    reserved_usd: Decimal
    resume_from: tuple[str, ...] = ()
    """Keys of manifests to resume from, newest first."""
    # written by the controllers under the lease
    state: AttemptState = AttemptState.PLANNED
    reason: Reason | None = None
    detail: str = ""
    create_sent_at: datetime | None = None
    launched_by: str = ""
    """Identity of the launcher, so that its death can be proven: see `Provider.launcher`. Empty: create has answered,
    or was not sent.
    """
    handles: tuple[Handle, ...] = ()
    running_at: datetime | None = None
    """Lower bound of the time at which its machines began to run, from the listings. None: no listing has shown them
    running yet.
    """
    booted_at: datetime | None = None
    first_beat_at: datetime | None = None
    draining_since: datetime | None = None
    terminating_since: datetime | None = None
    destroy_failures: int = 0
    absent_at: datetime | None = None
    """Time of a listing that no longer showed the machines: absence is proven, and charges reach up to here. None: not
    proven.
    """
    ended_at: datetime | None = None
    beat: "Heartbeat | None" = None
    """The latest heartbeat of node 0; None: none yet."""
    earlier_traffic: Traffic = Traffic()
    """Traffic of earlier starts of its agent, since each start counts from zero."""
    final: "Final | None" = None
    # written by billing
    charged_usd: Decimal = ZERO
    """Dollars charged for compute and traffic."""
    traffic_usd: Decimal = ZERO
    """The part of `charged_usd` that is for traffic."""
    charged_to: datetime | None = None
    """End of the time that charges cover, from the start of billing; None: nothing is charged yet."""
    prices: tuple[PriceChange, ...] = ()
    """Price changes since the purchase, in any order."""
    signal: Signal | None = None
    """Why the attempt must end: set once by billing, the guard or a budget, and never cleared. None: it may run."""
    # written by the guard
    idle: "IdleKind | None" = None
    """Kind of idleness that users were notified about; None: the machine works."""
    # written by the review of attempts
    stays: str = ""
    """Latest reason to stay that users were notified about; empty: none."""
    # the lease
    epoch: int = 0

    @property
    def ran_out_of_host(self) -> bool:
        """True when the memory of a machine with GPUs ran out, not that of its GPUs."""
        offer = self.line.offer
        return offer.gpus > 0 and not offer.emulated_on and self.final is not None and self.final.ran_out == "host"

    @property
    def live(self) -> bool:
        return self.state is not AttemptState.ENDED


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of a job, for users and programs.

    `seq` counts within the job, without gaps.
    """

    job_id: JobId
    kind: str
    """Dotted, e.g. `attempt.preempted`."""
    message: str
    attempt_id: AttemptId | None = None
    data: dict[str, Any] = field(default_factory=dict)
    seq: int = 0
    at: datetime | None = None


class OwnedJob(Protocol):
    """Job as the store or the API has it, with the fields that decide which job a name means."""

    @property
    def team(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def state(self) -> JobState: ...


AnyJob = TypeVar("AnyJob", bound=OwnedJob)


def jobs_meant(named: Sequence[AnyJob], team: str, owner: str, *, writes: bool) -> Sequence[AnyJob]:
    """Return the jobs that a name may mean for an owner; several: it is ambiguous. `named`: newest first.

    The live job, otherwise the newest, is meant among the owner's own jobs only. A command that writes never prefers
    the owner's job to another owner's. A job of another owner is meant only if no other job has the name.
    """
    own = [job for job in named if (job.team, job.owner) == (team, owner)]
    if not own or (writes and len(own) < len(named)):
        return named
    return [job for job in own if job.state not in RESTING_JOB_STATES] or own[:1]
