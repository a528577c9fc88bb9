"""Inputs and outputs of the store: leases, changes, charges, filters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, Event, Job, JobState, PriceChange, Signal
from broker.domain.money import ZERO, LedgerEntry, LedgerKind
from broker.domain.tenancy import DEFAULT_TEAM
from broker.domain.workload import RunObservation


class Lane(StrEnum):
    """Disjoint sets of attempts, one for each controller, so that no two controllers claim the same attempt.

    LAUNCH        planned, launching
    LIVENESS      booting, training, without a signal (the job's stop_requested, the attempt's signal)
    INTERRUPTION  draining; and booting, training with a signal
    TERMINATION   terminating
    """

    LAUNCH = "launch"
    LIVENESS = "liveness"
    INTERRUPTION = "interruption"
    TERMINATION = "termination"


@dataclass(frozen=True, kw_only=True)
class Leased:
    """An attempt under this broker's lease, with its job as read in the same statement."""

    attempt: Attempt
    job: Job


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One charge, written only if the attempt's `charged_to` still equals `since`."""

    attempt_id: AttemptId
    job_id: JobId
    since: datetime | None
    """The attempt's `charged_to` as read."""
    to: datetime
    usd: Decimal
    """Dollars for machines, added to the attempt's `charged_usd` and the job's `spent_usd` with one ledger entry; 0: no
    entry.
    """
    traffic_usd: Decimal = ZERO
    """Dollars for traffic, added in the same way."""
    prices: Sequence[PriceChange] = ()
    """Price changes to record with the charge."""
    signal: Signal | None = None
    """Signal to raise with the charge, unless the attempt has one; it is never cleared."""
    event: Event | None = None
    kind: LedgerKind = LedgerKind.CHARGE
    """`adjustment` for time after the attempt's end."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One atomic step: all of it is written or, when any fence fails, nothing.

    An attempt is fenced by (id, epoch, state) of `attempt[0]`. A job is fenced by (id, epoch, state) of `job[0]`. An
    active job that is written with an attempt is fenced by (id, state, attempts) instead: its attempt has the lease.

    Only the controllers' columns of `attempt[1]` and `job[1]` are written, not those of the API and of billing.
    `launched_by` is written only if the change sets it, because `Store.mark_launchers_finished` may have cleared it.

    The lease is released; the row is due again after `due_in_s`.
    """

    attempt: tuple[Attempt, Attempt] | None = None
    job: tuple[Job, Job] | None = None
    admit: Attempt | None = None
    """A new attempt, inserted with its reservation in the same transaction."""
    decision: bytes | None = None
    """Decision record of the admitted attempt: see `quote.decision_record`."""
    charge: Charge | None = None
    ledger: tuple[LedgerEntry, ...] = ()
    events: tuple[Event, ...] = ()
    observation: RunObservation | None = None
    """Measurement of the attempt, stored at most once."""
    due_in_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    """Conditions on listed jobs; None or empty: any."""

    team: str | None = None
    owner: str | None = None
    states: tuple[JobState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None
    before: tuple[datetime, JobId] | None = None
    """Position of the next page: only jobs older than this, newest first."""
    limit: int = 50


@dataclass(frozen=True, kw_only=True)
class AuditFilter:
    """Conditions on listed audit entries; None: any."""

    team: str | None = None
    actor: str | None = None
    action: str | None = None
    """Whole action (`job.submit`), or the part before the dot (`job`)."""
    target: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    before: tuple[datetime, str] | None = None
    """Position of the next page: only entries older than this (at, id), newest first."""
    limit: int = 50


@dataclass(frozen=True, kw_only=True)
class Token:
    """An API token without its secret."""

    id: str
    team: str = DEFAULT_TEAM
    owner: str
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None = None
    """None: it is valid until it is revoked."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """An uploaded data set or code archive, addressed by its content."""

    sha256: str
    bytes: int
    name: str
    summary: Mapping[str, Any] | None
    """Summary of the data check; None for an archive."""
    gone_at: datetime | None = None
    """Time when its content was deleted because no user had sent it for long; jobs have copies of their own. None:
    stored.
    """
