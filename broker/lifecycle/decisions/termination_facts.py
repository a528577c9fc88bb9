"""Facts on which the end of an attempt depends, and the decision about it. See `termination_decision`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from broker.domain.instance import Observed
from broker.domain.job import Attempt, Handle, Job, PriceChange, Reason
from broker.domain.money import ZERO, LedgerEntry
from broker.domain.offer import Trust
from broker.domain.workload import RunObservation
from broker.lifecycle.observation.proof import AbsenceProof
from trainer.contract.documents import Final


@dataclass(frozen=True, kw_only=True)
class TerminationSettings:
    """Properties of the installation on which every end depends."""

    look_s: float = 2.0
    """Seconds between two polls of an attempt."""
    destroy_alert: int = 30
    """Number of failed destroys after which users are notified."""
    sold_out_s: float = 120.0
    """Seconds for which the host of a refused image is avoided."""


@dataclass(frozen=True, kw_only=True)
class EndReport:
    """Documents in which the agent and the broker explain the end."""

    final: Final | None
    """Final report; None: there is none."""
    drain_reason: Reason | None
    """Reason of the drain request that ended the attempt and its job; None: the job continues."""


@dataclass(frozen=True, kw_only=True)
class TerminationFacts:
    """All facts on which the end of one terminating attempt depends."""

    job: Job
    attempt: Attempt
    now: datetime
    settings: TerminationSettings = field(default_factory=TerminationSettings)
    is_listed: bool = True
    """True if the cloud answered the latest listing."""
    error: str = ""
    """Error of the cloud's latest listing; empty: it answered."""
    exists: bool = False
    """True if the cloud answered, and lists a machine of the attempt that is not gone."""
    machines: tuple[Observed, ...] = ()
    """Machines of the attempt in the latest listing, which may be old; gone ones included."""
    is_launcher_dead: bool = True
    """True if nothing can create a machine of the attempt any more."""
    absence: AbsenceProof = field(default_factory=AbsenceProof)
    """Absence since the launcher is dead; no level holds if it may be alive or the cloud did not answer."""
    last_possible_end: datetime | None = None
    """Time until which machines that never booted may have billed; None: unknown, or they booted."""
    self_stopped_by: datetime | None = None
    """Latest end of a machine that vanished while no broker ran; None: unbounded."""
    host_trust: Trust = "secure"
    prices: tuple[PriceChange, ...] = ()
    """Price changes that are not charged yet. Read with `report`."""
    report: EndReport | None = None
    """None: not read yet."""
    is_report_unreadable: bool = False
    """True if the blob store did not answer when `report` was read."""
    earlier_attempts: Sequence[Attempt] | None = None
    """Other attempts of the job, in the order of their numbers; None: not read yet."""
    host_record: Sequence[Attempt] | None = None
    """Attempts that ended badly at the same host; None: not read yet."""


class MissingEndFacts(StrEnum):
    """Facts that are read only where a decision depends on them."""

    REPORT = "final report"
    EARLIER_ATTEMPTS = "earlier attempts"
    HOST_RECORD = "record of the host"


@dataclass(frozen=True, kw_only=True)
class EndFactsNeeded:
    """The decision depends on facts that were not read yet."""

    missing: MissingEndFacts
    facts: TerminationFacts


class TerminationStep(StrEnum):
    """Decisions about a terminating attempt."""

    KEEP = "keep"
    """Keep the machine of a failed job for inspection."""
    DESTROY = "destroy"
    """Destroy the machines. `after_destroy` decides what is written."""
    WAIT = "wait"
    """End the charges, and wait for the blob store, which has the final report."""
    CLOSE = "close"
    """End the attempt: last charge, release of the reservation, next state of the job."""


class TerminationReport(StrEnum):
    """Events that report a decision."""

    NONE = "none"
    FAILED = "destroy failed"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class LastCharge:
    """All that is owed at the end of an attempt."""

    until: datetime
    usd: Decimal
    """Dollars for machines."""
    traffic_usd: Decimal
    prices: tuple[PriceChange, ...]
    """Price changes to record with the charge."""


@dataclass(frozen=True, kw_only=True)
class OfferBlock:
    """An offer or host that is not bought for a while."""

    key: str
    reason: str
    for_s: float


@dataclass(frozen=True, kw_only=True)
class TerminationDecision:
    """The next state of a terminating attempt, and what is done and written with it."""

    step: TerminationStep
    before: Attempt
    attempt: Attempt
    """The attempt after the decision."""
    job: Job
    job_after: Job | None = None
    """The job after the end of its attempt; None: the job is not written."""
    due_in_s: float = 0.0
    destroys: tuple[Handle, ...] = ()
    """Machines to destroy before the decision is written."""
    stops_launcher: bool = False
    """True if the launcher must be asked to stop."""
    blocks: tuple[OfferBlock, ...] = ()
    """Blocks that are written first, so that the job is not quoted without them."""
    charge: LastCharge | None = None
    """Final charge; None: the attempt has not ended, so at most its extra machines are recorded."""
    spent_usd: Decimal = ZERO
    """Dollars of the attempt, with `charge`."""
    ledger: tuple[LedgerEntry, ...] = ()
    observation: RunObservation | None = None
    """Observation of the run, from which estimates are corrected."""
    report: TerminationReport = TerminationReport.NONE
