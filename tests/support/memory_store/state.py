"""Rows of the memory store, and the writes that several of its parts share."""

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

from broker.domain.ids import AttemptId, Installation, JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Event, Job, JobState, Signal
from broker.domain.market.offer_history import MarketGroup, OfferSample
from broker.domain.money import LedgerEntry
from broker.domain.notifications import SlackUser
from broker.domain.tenancy import DEFAULT_TEAM, AuditEntry, Team, Tenant
from broker.domain.workload import RunObservation
from broker.ports import Clock, Lane, Token, Upload
from broker.store.hints import Hints
from broker.store.rules import fences
from tests.support.memory_store.outbox_tables import OutboxTables
from tests.support.memory_store.policy_tables import PolicyTables

RowT = TypeVar("RowT", Job, Attempt)
DataT = TypeVar("DataT")


def with_columns(row: DataT, **columns: object) -> DataT:
    """Copy a row with changed fields. `dataclasses.replace` is slower: it asks for each of thirty fields by name."""
    new = object.__new__(type(row))
    vars(new).update(vars(row), **columns)
    return new


@dataclass
class MemoryRow(Generic[RowT]):
    """A row with the columns that only the store knows. While leased, `due_at` is the lease's end, until a signal."""

    value: RowT
    due_at: datetime
    lease_until: datetime | None = None
    lease_owner: str | None = None
    signal: bool = False
    """True for an attempt whose job is asked to stop, or that has a signal of its own."""
    reviewed: tuple[datetime, str] = (datetime.min.replace(tzinfo=UTC), "")
    """Time and owner of the latest claim for a review."""
    stored_due_at: datetime | None = None
    """Time of the next check of a job's objects; None: never again."""

    def claimable(self, now: datetime) -> bool:
        return self.due_at <= now and (self.lease_until is None or self.lease_until <= now)

    def lease(self, owner: str, until: datetime) -> RowT:
        self.value = with_columns(self.value, epoch=self.value.epoch + 1)
        self.lease_until = self.due_at = until
        self.lease_owner = owner
        return self.value

    def free(self, now: datetime, due_in_s: float) -> None:
        """End the lease; what was signalled during it makes the row due at once."""
        signalled = self.lease_until is not None and self.due_at < self.lease_until
        self.due_at = now if signalled else now + timedelta(seconds=due_in_s)
        self.lease_until = self.lease_owner = None


class MarketTables:
    """History of offers."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], OfferSample] = {}
        self.merged: set[tuple[str, int]] = set()
        self.refusals: dict[MarketGroup, set[int]] = defaultdict(set)


class State:
    """All rows of all teams."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.trusted_now: Callable[[], datetime] | None = None
        self.hints = Hints()
        self.jobs: dict[JobId, MemoryRow[Job]] = {}
        self.attempts: dict[AttemptId, MemoryRow[Attempt]] = {}
        self.by_state: dict[JobState, dict[JobId, None]] = {state: {} for state in JobState}
        self.by_lane: dict[Lane | None, dict[AttemptId, None]] = {lane: {} for lane in (*Lane, None)}
        self.of_job: dict[JobId, list[AttemptId]] = defaultdict(list)
        self.events_of: dict[JobId, list[Event]] = defaultdict(list)
        self.ledger: dict[JobId, list[LedgerEntry]] = defaultdict(list)
        self.outbox = OutboxTables(clock.now())
        self.policies = PolicyTables()
        self.market = MarketTables()
        self.keys: dict[tuple[str, str, str], tuple[str, JobId]] = {}
        self.observations: list[RunObservation] = []
        self.decisions: dict[AttemptId, bytes] = {}
        self.blocked: dict[str, tuple[str, datetime]] = {}
        default = Team(name=DEFAULT_TEAM, created_at=clock.now(), note="made with the installation")
        self.teams: dict[str, Team] = {DEFAULT_TEAM: default}
        self.tokens: dict[str, Token] = {}
        self.ended_sessions: set[str] = set()
        self.secrets: dict[tuple[str, str, str], bytes] = {}
        self.uploads: dict[tuple[str, str, str], Upload] = {}
        self.uploaded_at: dict[tuple[str, str, str], datetime] = {}
        self.slack_users: dict[tuple[str, str, str], SlackUser] = {}
        self.audit: list[AuditEntry] = []
        self.installation: Installation | None = None
        self.blob_store: str | None = None
        self.master_key: str | None = None

    def put_job(self, row: MemoryRow[Job], to: Job) -> None:
        """Write the controllers' columns."""
        old = row.value
        row.value = with_columns(
            to,
            due_at=None,
            spent_usd=old.spent_usd,
            forecast=old.forecast,
            stored=old.stored,
            deleted=old.deleted,
            cap_usd=old.cap_usd,
            approved_usd=old.approved_usd,
            stop_requested=old.stop_requested,
            epoch=old.epoch,
            reason=fences.clean(to.reason),
        )
        if to.state in RESTING_JOB_STATES:
            row.stored_due_at = self.clock.now()
        self.by_state[old.state].pop(old.id)
        self.by_state[to.state][to.id] = None

    def signal(self, row: MemoryRow[Attempt], why: Signal | None = None) -> None:
        """Write signal `why` unless the attempt has a signal; None: request a stop of its job."""
        if why is not None and row.value.signal is not None:
            return
        self.by_lane[fences.lane_of(row.value.state, row.signal)].pop(row.value.id)
        row.value = replace(row.value, signal=why or row.value.signal)
        row.signal, row.due_at = True, self.clock.now()
        self.by_lane[fences.lane_of(row.value.state, True)][row.value.id] = None

    def running(self) -> list[tuple[Job, Attempt]]:
        """Return live attempts with their jobs."""
        live = (self.attempts[own].value for lane in Lane for own in self.by_lane[lane])
        return [(self.jobs[attempt.job_id].value, attempt) for attempt in live]

    def books_now(self) -> datetime:
        """Return the time of new ledger entries and of budgets' windows."""
        return (self.trusted_now or self.clock.now)()

    def write_ledger(self, entries: Iterable[LedgerEntry]) -> None:
        for entry in entries:
            self.ledger[entry.job_id].append(entry)
            self.policies.book(entry, self.jobs[entry.job_id].value, self.books_now())

    def write_events(self, events: Sequence[Event]) -> None:
        for event in events:
            log = self.events_of[event.job_id]
            kept = replace(event, seq=len(log) + 1, at=self.clock.now(), message=fences.clean(event.message))
            log.append(kept)
            self.outbox.tell_event(kept, self.jobs[kept.job_id].value.team, self.clock.now())
            self.hints.hint(f"job/{event.job_id}")

    def write_audit(self, entry: AuditEntry) -> None:
        own = uuid.UUID(int=len(self.audit))
        kept = replace(entry, id=str(own), at=self.clock.now(), target=fences.clean(entry.target))
        self.audit.append(kept)


class MemoryPart:
    """Base of each part of the memory store: the rows as `tenant` sees them."""

    def __init__(self, state: State, tenant: Tenant) -> None:
        self._state = state
        self._tenant = tenant

    def _sees(self, team: str) -> bool:
        return self._tenant.operator or self._tenant.team == team

    def _visible(self, job_id: JobId) -> MemoryRow[Job] | None:
        """Return the row of a job that the tenant sees."""
        row = self._state.jobs.get(job_id)
        return row if row is not None and self._sees(row.value.team) else None


def shown(row: MemoryRow[Job]) -> Job:
    return replace(row.value, due_at=row.due_at if row.lease_until is None else None)
