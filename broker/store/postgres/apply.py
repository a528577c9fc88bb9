"""Applies changes in batches: lock the rows, check the fences, write the changes that hold, in one transaction."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeAlias

import asyncpg

from broker.domain.errors import StoreError, StoreUnavailable
from broker.domain.ids import AttemptId, JobId
from broker.domain.job import AttemptState, Event, JobState
from broker.domain.money import ZERO, LedgerEntry
from broker.policy.budgets import admission
from broker.ports import Change, Charge
from broker.store.postgres import row_codec
from broker.store.postgres.budgets import AdmissionBudget
from broker.store.postgres.pool import QUERIES, BooksTime, Connection, Pool, RolledBack, columns
from broker.store.rules import fences

GROUP = 64
"""Maximum number of single changes that share a transaction."""
PAYLOAD_BYTES = 7500
"""Maximum bytes of a notification's payload; PostgreSQL refuses payloads of 8000 bytes and more."""


@dataclass(frozen=True, kw_only=True)
class _LockedJob:
    team: str
    owner: str
    cap_usd: Decimal
    approved_usd: Decimal | None
    epoch: int
    state: JobState
    attempts: int
    stop_requested: bool
    event_seq: int


@dataclass(frozen=True, kw_only=True)
class _LockedAttempt:
    epoch: int
    state: AttemptState
    charged_to: datetime | None


class AlreadyThere(StoreError):
    """Raised if a unique index refuses a row: a second live attempt, or a row that exists."""


Outcome: TypeAlias = bool | Exception
"""True if a change was applied, False if its fences refused it, or the error."""


class Applier:
    """Implementation of `Store.apply`.

    Calls with one change share a transaction with all such calls that arrive while an earlier transaction commits.
    An admission has its own transaction, because it may wait for a policy's lock.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: list[tuple[Change, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    async def apply(self, changes: Sequence[Change]) -> list[bool]:
        """Apply each change atomically. Errors are raised after the other changes were applied."""
        if len(changes) == 1 and changes[0].admit is None:
            return [await self._apply_grouped(changes[0])]
        outcomes = await self._apply_all(changes)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if errors:
            raise next((error for error in errors if isinstance(error, StoreUnavailable)), errors[0])
        return [outcome is True for outcome in outcomes]

    async def _apply_grouped(self, change: Change) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain(), name="apply")
        return await answer

    async def _drain(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:GROUP], self._waiting[GROUP:]
            waiting = [(change, answer) for change, answer in group if not answer.done()]  # the others' callers gave up
            try:
                _resolve(waiting, await self._apply_all([change for change, _ in waiting]))
            finally:
                for _, answer in group:
                    answer.cancel()  # this task was cancelled; otherwise a caller would wait for ever

    async def _apply_all(self, changes: Sequence[Change]) -> list[Outcome]:
        """Return the outcome of each change. After StoreUnavailable, the changes of later rounds are not tried."""
        outcomes: dict[int, Outcome] = {}
        for index, change in enumerate(changes):
            try:
                fences.check(change)
            except Exception as error:
                outcomes[index] = error
        sound = [index for index in range(len(changes)) if index not in outcomes]
        for batch in rounds([changes[i] for i in sound]):
            outcomes |= await self._round([(sound[i], changes[sound[i]]) for i in batch])
            if unavailable := _unavailable(outcomes):
                return [outcomes.get(index, unavailable) for index in range(len(changes))]
        return [outcomes[index] for index in range(len(changes))]

    async def _round(self, batch: list[tuple[int, Change]]) -> dict[int, Outcome]:
        """Apply all in one transaction; after an error, which wrote nothing, repeat with one for each change."""
        try:
            return dict(zip([index for index, _ in batch], await self._commit([c for _, c in batch]), strict=True))
        except StoreUnavailable as error:
            return dict.fromkeys((index for index, _ in batch), error)
        except Exception as error:
            if len(batch) == 1:
                return {batch[0][0]: False if isinstance(error, AlreadyThere) else error}
        outcomes: dict[int, Outcome] = {}
        for indexed in batch:
            outcomes |= await self._round([indexed])
            if unavailable := _unavailable(outcomes):
                return dict.fromkeys((index for index, _ in batch), unavailable) | outcomes
        return outcomes

    async def close(self) -> None:
        """Wait until running transactions have committed."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _commit(self, changes: Sequence[Change]) -> list[bool]:
        return await self._pool.retried(lambda: self._once(changes), RolledBack)

    async def _once(self, changes: Sequence[Change]) -> list[bool]:
        async with self._pool.transaction("apply") as connection:
            jobs, attempts = await _lock(connection, changes)
            books = self._pool.books
            allowed = await _allowed(
                connection, books, changes, [fences.all_hold(c, jobs, attempts) for c in changes], jobs
            )
            writes = _Writes(jobs, self._pool.books.now())
            for change in (change for change, ok in zip(changes, allowed, strict=True) if ok):
                writes.add(change)
            await writes.send(connection)
            return allowed


def _resolve(group: Sequence[tuple[Change, "asyncio.Future[bool]"]], outcomes: Sequence[Outcome]) -> None:
    for (_, answer), outcome in zip(group, outcomes, strict=True):
        if answer.done():  # the caller was cancelled
            continue
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


def _unavailable(outcomes: Mapping[int, Outcome]) -> StoreUnavailable | None:
    return next((outcome for outcome in outcomes.values() if isinstance(outcome, StoreUnavailable)), None)


def rounds(changes: Sequence[Change]) -> list[list[int]]:
    """Split indices into batches that write no row twice; changes of the same row keep their order."""
    last: dict[str, int] = {}
    batches: list[list[int]] = []
    for index, change in enumerate(changes):
        touched = {*fences.jobs_written(change), *fences.attempts_written(change)}
        number = 1 + max((last.get(row, -1) for row in touched), default=-1)
        last.update(dict.fromkeys(touched, number))
        if number == len(batches):
            batches.append([])
        batches[number].append(index)
    return batches


async def _lock(
    connection: Connection, changes: Sequence[Change]
) -> tuple[dict[JobId, _LockedJob], dict[AttemptId, _LockedAttempt]]:
    job_ids = sorted(set().union(*(fences.jobs_written(change) for change in changes)))
    attempt_ids = sorted(set().union(*(fences.attempts_written(change) for change in changes)))
    jobs, attempts = {}, {}
    for row in await connection.fetch(QUERIES["lock_jobs"], job_ids) if job_ids else ():
        jobs[JobId(row["id"])] = _LockedJob(
            team=row["team"],
            owner=row["owner"],
            cap_usd=row["cap_usd"],
            approved_usd=row["approved_usd"],
            epoch=row["epoch"],
            state=JobState(row["state"]),
            attempts=row["attempts"],
            stop_requested=row["stop_requested"],
            event_seq=row["event_seq"],
        )
    for row in await connection.fetch(QUERIES["lock_attempts"], attempt_ids) if attempt_ids else ():
        attempts[AttemptId(row["id"])] = _LockedAttempt(
            epoch=row["epoch"], state=AttemptState(row["state"]), charged_to=row["charged_to"]
        )
    return jobs, attempts


async def _allowed(
    connection: Connection,
    books: BooksTime,
    changes: Sequence[Change],
    allowed: list[bool],
    jobs: dict[JobId, _LockedJob],
) -> list[bool]:
    """Return `allowed` without the admissions that a policy refuses.

    Each admission is judged together with those before it, under the policies' locks. So admissions of several
    processes never exceed a limit together.
    """
    admits = {index: c.admit for index, c in enumerate(changes) if c.admit is not None and allowed[index]}
    if not admits:
        return allowed
    admission_budget = await AdmissionBudget.locked(
        connection, {(jobs[a.job_id].team, jobs[a.job_id].owner) for a in admits.values()}, books
    )
    for index, attempt in admits.items():
        job = jobs[attempt.job_id]
        ask = admission(attempt, job.cap_usd, job.approved_usd)
        allowed[index] = admission_budget.admit(ask, (job.team, job.owner)) is None
    return allowed


@dataclass
class _JobWrite:
    """A row of `write_jobs`."""

    state: tuple[Any, ...] = (None,) * 9
    """The controllers' columns, see `row_codec.written_job`."""
    usd: Decimal = ZERO
    events: int = 0

    @property
    def row(self) -> tuple[Any, ...]:
        return (*self.state, self.usd, self.events)


@dataclass
class _Writes:
    """The rows of one transaction, statement by statement."""

    locked: dict[JobId, _LockedJob]
    booked_at: datetime | None
    """Trusted time of the ledger's entries; None: the database's clock gives it."""
    jobs: defaultdict[JobId, _JobWrite] = field(default_factory=lambda: defaultdict(_JobWrite))
    attempts: list[tuple[Any, ...]] = field(default_factory=list)
    admitted: list[tuple[Any, ...]] = field(default_factory=list)
    charges: list[tuple[Any, ...]] = field(default_factory=list)
    prices: list[tuple[Any, ...]] = field(default_factory=list)
    ledger: list[tuple[Any, ...]] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    observations: list[tuple[Any, ...]] = field(default_factory=list)
    decisions: list[tuple[Any, ...]] = field(default_factory=list)
    topics: dict[str, None] = field(default_factory=dict)

    def add(self, change: Change) -> None:
        """Add the rows of a change whose fences hold."""
        if change.attempt is not None:
            self.attempts.append(row_codec.written_attempt(*change.attempt, change.due_in_s))
        if change.job is not None:
            read, to = change.job
            unseen_stop = self.locked[read.id].stop_requested and not read.stop_requested
            self.jobs[read.id].state = row_codec.written_job(to, 0.0 if unseen_stop else change.due_in_s)
        if change.admit is not None:
            self.admitted.append(row_codec.admitted(change.admit, self.locked[change.admit.job_id].stop_requested))
            if change.decision is not None:
                self.decisions.append((change.admit.id, change.decision))
        if change.charge is not None:
            self._add_charge(change.charge)
        self._book(change.ledger)
        if change.observation is not None:
            self.observations.append(row_codec.written_observation(change.observation))
        self.add_events(change.events)
        if change.charge is not None and change.charge.event is not None:
            self.add_events([change.charge.event])
        if fences.wakes(change):
            self.topics["jobs"] = None

    def _add_charge(self, charge: Charge) -> None:
        signal = charge.signal and charge.signal.value
        self.charges.append((charge.attempt_id, charge.usd, charge.traffic_usd, charge.to, signal))
        self.jobs[charge.job_id].usd += charge.usd + charge.traffic_usd
        self._book(fences.entries_of(charge))
        self.prices += [
            (charge.attempt_id, price.since, price.usd_per_hour, price.extra_machines) for price in charge.prices
        ]

    def _book(self, entries: Sequence[LedgerEntry]) -> None:
        self.ledger += [row_codec.written_entry(entry, self.booked_at) for entry in entries]

    def add_events(self, events: Sequence[Event]) -> None:
        """Number the events from the job's counter on; the job's row is locked."""
        for event in events:
            row = self.jobs[event.job_id]
            row.events += 1
            self.events.append(row_codec.written_event(event, self.locked[event.job_id].event_seq + row.events))
            self.topics[f"job/{event.job_id}"] = None

    async def send(self, connection: Connection) -> None:
        """Execute the statements. Ends of attempts precede admissions, because a job has at most one live attempt."""
        jobs = [(job_id, *write.row) for job_id, write in self.jobs.items()]
        batches = (
            ("write_jobs", jobs),
            ("write_attempts", self.attempts),
            ("admit_attempts", self.admitted),
            ("write_charges", self.charges),
            ("write_prices", self.prices),
            ("write_ledger", self.ledger),
            ("write_observations", self.observations),
            ("write_decisions", self.decisions),
        )
        try:
            for name, batch in batches:
                if batch:
                    await connection.execute(QUERIES[name], *columns(batch))
        except asyncpg.UniqueViolationError as error:
            raise AlreadyThere(f"apply: {error}") from error
        await send_events(connection, self.events)
        await notify(connection, self.topics)


async def send_events(connection: Connection, events: Sequence[tuple[Any, ...]]) -> None:
    """Write rows of `write_events`; the database passes the events on to the channels."""
    if events:
        await connection.execute(QUERIES["write_events"], *columns(events))


async def notify(connection: Connection, topics: dict[str, None]) -> None:
    """Send one notification with all topics, separated by spaces; several if one is too small for them."""
    payloads, line = [], ""
    for topic in topics:
        if len(line) + len(topic) >= PAYLOAD_BYTES:
            payloads.append(line)
            line = ""
        line = f"{line} {topic}" if line else topic
    if line:
        await connection.execute(QUERIES["notify"], [*payloads, line])
