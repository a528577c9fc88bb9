"""What goes in and out of the store: leases, changes, charges, filters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, Event, Job, JobState, LedgerEntry, LedgerKind, PriceChange, Signal
from broker.domain.money import ZERO
from broker.domain.observation import RunObservation
from broker.domain.tenancy import DEFAULT_TEAM


class Lane(StrEnum):
    """Which attempts a controller claims; the sets are disjoint, so that no two controllers fight over one.

    LAUNCH        intended, launching
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
    """An attempt under our lease, with its job as it was read in the same statement."""

    attempt: Attempt
    job: Job


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Billing's write: applies only if the attempt is still charged up to `since`."""

    attempt_id: AttemptId
    job_id: JobId
    since: datetime | None
    """The attempt's `charged_to` as read."""
    to: datetime
    usd: Decimal
    """For machines: to add to the attempt's `charged_usd` and the job's `spent_usd`; one ledger entry, none for 0."""
    traffic_usd: Decimal = ZERO
    """For traffic, likewise."""
    prices: Sequence[PriceChange] = ()
    """Recorded as well."""
    signal: Signal | None = None
    """Raised as well, unless there is one; it is never taken back for an attempt."""
    event: Event | None = None
    kind: LedgerKind = LedgerKind.CHARGE
    """`adjustment` for time after the attempt's end."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One atomic step. All of it happens or, when any fence fails, nothing.

    Fences: an attempt by (id, epoch, state) of `attempt[0]`; a job by (id, epoch, state) of `job[0]` when no attempt is
    written or admitted with it under an active job, else by (id, state, attempts).
    The controllers' columns of `attempt[1]` and `job[1]` are written, the API's and billing's are not. `launched_by` is
    only where the change changes it: `Store.launchers_through` may have cleared it meanwhile.
    The lease is given up; the row is due again after `due_in_s`.
    """

    attempt: tuple[Attempt, Attempt] | None = None
    job: tuple[Job, Job] | None = None
    admit: Attempt | None = None
    """A new attempt: inserted with its reservation in the same transaction."""
    decision: bytes | None = None
    """Of the admitted attempt: see `decide.decision`."""
    charge: Charge | None = None
    ledger: tuple[LedgerEntry, ...] = ()
    events: tuple[Event, ...] = ()
    observation: RunObservation | None = None
    """What the attempt showed; one for each at most."""
    due_in_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    team: str | None = None
    owner: str | None = None
    states: tuple[JobState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None
    before: tuple[datetime, JobId] | None = None
    """Page on: jobs older than this, newest first."""
    limit: int = 50


@dataclass(frozen=True, kw_only=True)
class AuditFilter:
    team: str | None = None
    actor: str | None = None
    action: str | None = None
    """Whole (`job.submit`), or the part before the dot (`job`)."""
    target: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    before: tuple[datetime, str] | None = None
    """Page on: entries older than this (at, id), newest first."""
    limit: int = 50


@dataclass(frozen=True, kw_only=True)
class Token:
    id: str
    team: str = DEFAULT_TEAM
    owner: str
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None = None
    """None: not before it is revoked."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A data set or code archive that was uploaded: content-addressed."""

    sha256: str
    bytes: int
    name: str
    summary: Mapping[str, Any] | None
    """The data check's one-pass summary; None for an archive."""
    gone_at: datetime | None = None
    """When its content was deleted, since nobody had sent it for long; jobs keep copies of their own."""
