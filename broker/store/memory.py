"""The store without a database: the same behaviour on one event loop, its clock injected. For simulation and tests.

No method awaits between reading and writing, so each is a transaction. Nothing survives the process.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Generic, TypeVar

from broker.domain.errors import StoreError
from broker.domain.ids import AttemptId, Installation, JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, AttemptState, Event, Job, JobState, LedgerEntry, Reason
from broker.ports import Change, Charge, Clock, JobFilter, Lane, Leased, Token, Upload
from broker.store import fences
from broker.store.hints import Hints

RowT = TypeVar("RowT", Job, Attempt)


@dataclass
class _Row(Generic[RowT]):
    """A row with the columns that only the store knows. While leased, `due_at` is the lease's end, until a signal."""

    value: RowT
    due_at: datetime
    lease_until: datetime | None = None
    signal: bool = False
    """Of an attempt: its job is asked to stop, or its cap is near."""

    def claimable(self, now: datetime) -> bool:
        return self.due_at <= now and (self.lease_until is None or self.lease_until <= now)

    def lease(self, until: datetime) -> RowT:
        self.value = replace(self.value, epoch=self.value.epoch + 1)
        self.lease_until = self.due_at = until
        return self.value

    def free(self, now: datetime, due_in_s: float) -> None:
        """Ends the lease; what was signalled during it makes the row due at once."""
        signalled = self.lease_until is not None and self.due_at < self.lease_until
        self.due_at = now if signalled else now + timedelta(seconds=due_in_s)
        self.lease_until = None


class MemoryStore:
    """`ports.Store` in memory. `outbox`: keep events for a notifier."""

    def __init__(self, clock: Clock, *, outbox: bool = True) -> None:
        self._clock = clock
        self._outbox_on = outbox
        self._hints = Hints(clock.sleep)
        self._jobs: dict[JobId, _Row[Job]] = {}
        self._attempts: dict[AttemptId, _Row[Attempt]] = {}
        self._by_state: dict[JobState, dict[JobId, None]] = {state: {} for state in JobState}
        self._by_lane: dict[Lane | None, dict[AttemptId, None]] = {lane: {} for lane in (*Lane, None)}
        self._of_job: dict[JobId, list[AttemptId]] = defaultdict(list)
        self._events: dict[JobId, list[Event]] = defaultdict(list)
        self._ledger: dict[JobId, list[LedgerEntry]] = defaultdict(list)
        self._outbox: dict[tuple[JobId, int], tuple[Event, datetime]] = {}
        self._keys: dict[tuple[str, str], tuple[str, JobId]] = {}
        self._blocked: dict[str, tuple[str, datetime]] = {}
        self._tokens: dict[str, Token] = {}
        self._secrets: dict[tuple[str, str], bytes] = {}
        self._uploads: dict[tuple[str, str], Upload] = {}
        self._installation: Installation | None = None

    # --- controllers

    async def claim_jobs(self, states: Sequence[JobState], *, owner: str, lease_s: float, limit: int) -> Sequence[Job]:
        now = self._clock.now()
        asked = [self._jobs[i] for state in dict.fromkeys(states) for i in self._by_state[state]]
        others = [self._jobs[i] for state in fences.WAITING_JOB_STATES - set(states) for i in self._by_state[state]]
        rows = [*asked, *(row for row in others if row.value.stop_requested)]
        return [row.lease(now + timedelta(seconds=lease_s)) for row in _due(rows, now, limit)]

    async def claim_attempts(self, lane: Lane, *, owner: str, lease_s: float, limit: int) -> Sequence[Leased]:
        now = self._clock.now()
        rows = _due((self._attempts[i] for i in self._by_lane[lane]), now, limit)
        leased = [row.lease(now + timedelta(seconds=lease_s)) for row in rows]
        return [Leased(attempt=attempt, job=self._jobs[attempt.job_id].value) for attempt in leased]

    async def apply(self, changes: Sequence[Change]) -> Sequence[bool]:
        held, problems = [], []
        for change in changes:
            try:
                held.append(self._apply(change))
            except StoreError as error:
                problems.append(error)
        if problems:
            raise problems[0]
        return held

    def _apply(self, change: Change) -> bool:
        fences.check(change)
        if not self._holds(change) or not self._room(change):
            return False
        now = self._clock.now()
        if change.attempt is not None:
            written = change.attempt[1]
            row = self._attempts[written.id]
            self._put_attempt(row, written)
            row.free(now, change.due_in_s)
        if change.job is not None:
            read, to = change.job
            job_row = self._jobs[read.id]
            unseen_stop = job_row.value.stop_requested and not read.stop_requested
            self._put_job(job_row, to)
            job_row.free(now, 0.0 if unseen_stop else change.due_in_s)
        if change.admit is not None:
            self._admit(change.admit, now)
        if change.charge is not None:
            self._charge(change.charge)
        for entry in change.ledger:
            self._ledger[entry.job_id].append(entry)
        self._write_events(change.events)
        if fences.wakes(change):
            self._hints.hint("jobs")
        return True

    def _holds(self, change: Change) -> bool:
        jobs = {i: self._jobs[i].value for i in fences.jobs_written(change) if i in self._jobs}
        attempts = {i: self._attempts[i].value for i in fences.attempts_written(change) if i in self._attempts}
        return fences.holds(change, jobs, attempts)

    def _room(self, change: Change) -> bool:
        """False when the admitted attempt exists already, or the job would have a second live one."""
        new, to = change.admit, change.attempt[1] if change.attempt else None
        appears = new or to
        if appears is None:
            return True
        others = [self._attempts[i].value for i in self._of_job[appears.job_id]]
        if new is not None and any(a.number == new.number or a.id == new.id for a in others):
            return False
        after = [to if to and a.id == to.id else a for a in others]
        return sum(a.live for a in [*after, new] if a is not None) <= 1

    def _admit(self, attempt: Attempt, now: datetime) -> None:
        stop = self._jobs[attempt.job_id].value.stop_requested
        row = _Row(value=attempt, due_at=now, signal=stop or attempt.cap_near)
        self._attempts[attempt.id] = row
        self._of_job[attempt.job_id].append(attempt.id)
        self._by_lane[fences.lane_of(attempt.state, row.signal)][attempt.id] = None

    def _put_job(self, row: _Row[Job], to: Job) -> None:
        """Writes the controllers' columns."""
        old = row.value
        row.value = replace(
            to,
            due_at=None,
            spent_usd=old.spent_usd,
            cap_usd=old.cap_usd,
            stop_requested=old.stop_requested,
            epoch=old.epoch,
            reason=fences.clean(to.reason),
        )
        self._by_state[old.state].pop(old.id)
        self._by_state[to.state][to.id] = None

    def _put_attempt(self, row: _Row[Attempt], to: Attempt) -> None:
        """Writes the controllers' columns."""
        old = row.value
        self._by_lane[fences.lane_of(old.state, row.signal)].pop(old.id)
        row.value = replace(
            to,
            charged_usd=old.charged_usd,
            charged_to=old.charged_to,
            cap_near=old.cap_near,
            epoch=old.epoch,
            detail=fences.clean(to.detail),
        )
        self._by_lane[fences.lane_of(to.state, row.signal)][to.id] = None

    def _signal(self, row: _Row[Attempt], now: datetime) -> None:
        self._by_lane[fences.lane_of(row.value.state, row.signal)].pop(row.value.id)
        row.signal, row.due_at = True, now
        self._by_lane[fences.lane_of(row.value.state, True)][row.value.id] = None

    async def release(self, jobs: Sequence[Job], attempts: Sequence[Attempt], *, due_in_s: float) -> None:
        now = self._clock.now()
        for job in jobs:
            row = self._jobs.get(job.id)
            if row is not None and row.value.epoch == job.epoch:
                row.free(now, due_in_s)
        for attempt in attempts:
            held = self._attempts.get(attempt.id)
            if held is not None and held.value.epoch == attempt.epoch:
                held.free(now, due_in_s)

    async def live_attempts(self) -> Sequence[Leased]:
        live = [self._attempts[i].value for lane in Lane for i in self._by_lane[lane]]
        return [Leased(attempt=attempt, job=self._jobs[attempt.job_id].value) for attempt in live]

    async def attempts_by_id(self, ids: Sequence[AttemptId]) -> Mapping[AttemptId, Attempt]:
        return {i: self._attempts[i].value for i in ids if i in self._attempts}

    async def charge(self, charges: Sequence[Charge]) -> Sequence[bool]:
        return await self.apply([Change(charge=charge) for charge in charges])

    def _charge(self, charge: Charge) -> None:
        row = self._attempts[charge.attempt_id]
        attempt = row.value
        row.value = replace(attempt, charged_usd=attempt.charged_usd + charge.usd, charged_to=charge.to)
        self._spend(charge.job_id, charge.usd)
        if charge.usd:
            self._ledger[charge.job_id].append(fences.entry_of(charge))
        if charge.cap_near and not attempt.cap_near:
            row.value = replace(row.value, cap_near=True)
            self._signal(row, self._clock.now())
        if charge.event is not None:
            self._write_events([charge.event])

    def _spend(self, job_id: JobId, usd: Decimal) -> None:
        row = self._jobs[job_id]
        row.value = replace(row.value, spent_usd=row.value.spent_usd + usd)

    async def ended_at_host(
        self, host: str, reasons: Sequence[Reason], *, within_s: float, limit: int
    ) -> Sequence[Attempt]:
        now = self._clock.now()
        ended = [(now - a.ended_at, a.id, a) for i in self._by_lane[None] if (a := self._attempts[i].value).ended_at]
        found = [
            (age, attempt_id, attempt)
            for age, attempt_id, attempt in ended
            if age.total_seconds() < within_s and attempt.line.offer.host_key == host and attempt.reason in reasons
        ]
        return [attempt for _, _, attempt in sorted(found, key=lambda one: one[:2])[:limit]]

    async def block_offer(self, key: str, reason: str, *, for_s: float) -> None:
        self._blocked[key] = (fences.clean(reason), self._clock.now() + timedelta(seconds=for_s))

    async def blocked_offers(self) -> Mapping[str, str]:
        now = self._clock.now()
        self._blocked = {offer: entry for offer, entry in self._blocked.items() if entry[1] > now}
        return {offer: reason for offer, (reason, _) in self._blocked.items()}

    # --- events

    def _write_events(self, events: Sequence[Event]) -> None:
        for event in events:
            log = self._events[event.job_id]
            kept = replace(event, seq=len(log) + 1, at=self._clock.now(), message=fences.clean(event.message))
            log.append(kept)
            if self._outbox_on:
                self._outbox[kept.job_id, kept.seq] = (kept, self._clock.now())
            self._hints.hint(f"job/{event.job_id}")

    async def claim_outbox(self, *, owner: str, lease_s: float, limit: int) -> Sequence[Event]:
        now, until = self._clock.now(), self._clock.now() + timedelta(seconds=lease_s)
        due = [key for key, (_, hidden_until) in self._outbox.items() if hidden_until <= now][:limit]
        for key in due:
            self._outbox[key] = (self._outbox[key][0], until)
        return [self._outbox[key][0] for key in due]

    async def delivered(self, events: Sequence[Event]) -> None:
        for event in events:
            self._outbox.pop((event.job_id, event.seq), None)

    async def events(self, job_id: JobId, *, after: int, limit: int) -> Sequence[Event]:
        return self._events.get(job_id, [])[max(after, 0) :][:limit]

    # --- the API's use cases

    async def submit(self, job: Job, *, key: str | None, body_sha256: str, events: Sequence[Event]) -> tuple[Job, bool]:
        if key is not None and (made := self._keys.get((job.owner, key))) is not None:
            if made[0] != body_sha256:
                raise fences.key_conflict(key)
            return self._shown(self._jobs[made[1]]), False
        if rule := fences.broken_job_rule(job) or ("jobs_pkey" if job.id in self._jobs else None):
            raise fences.refused(f"job {job.id}", rule)
        now = self._clock.now()
        row = _Row(value=replace(job, created_at=now, epoch=0, due_at=None), due_at=now)
        self._jobs[job.id] = row
        self._by_state[job.state][job.id] = None
        if key is not None:
            self._keys[job.owner, key] = (body_sha256, job.id)
        self._write_events(events)
        self._hints.hint("jobs")
        return self._shown(row), True

    def _shown(self, row: _Row[Job]) -> Job:
        return replace(row.value, due_at=row.due_at if row.lease_until is None else None)

    async def job(self, job_id: JobId) -> Job | None:
        row = self._jobs.get(job_id)
        return self._shown(row) if row else None

    async def jobs(self, where: JobFilter) -> Sequence[Job]:
        found = [self._shown(row) for row in self._jobs.values() if _matches(row.value, where)]
        return sorted(found, key=lambda job: (job.created_at, job.id), reverse=True)[: where.limit]

    async def attempts(self, job_id: JobId) -> Sequence[Attempt]:
        return sorted((self._attempts[i].value for i in self._of_job.get(job_id, ())), key=lambda a: a.number)

    async def request_stop(self, job_id: JobId, event: Event) -> Job | None:
        row = self._jobs.get(job_id)
        if row is None or row.value.stop_requested or row.value.state in RESTING_JOB_STATES:
            return self._shown(row) if row else None
        now = self._clock.now()
        row.value, row.due_at = replace(row.value, stop_requested=True), now
        for attempt_id in self._of_job[job_id]:
            if self._attempts[attempt_id].value.live:
                self._signal(self._attempts[attempt_id], now)
        self._write_events([event])
        self._hints.hint("jobs")
        return self._shown(row)

    async def raise_cap(self, job_id: JobId, cap_usd: Decimal, event: Event) -> Job | None:
        row = self._jobs.get(job_id)
        if row is None or cap_usd <= row.value.cap_usd:
            return self._shown(row) if row else None
        row.value = replace(row.value, cap_usd=cap_usd)
        if row.value.state is JobState.CAPPED:
            self._put_job(row, replace(row.value, state=JobState.QUEUED, reason="", finished_at=None))
        if row.value.state is JobState.QUEUED:  # what did not fit under the old cap may fit now
            row.due_at = self._clock.now()
        self._write_events([event])
        self._hints.hint("jobs")
        return self._shown(row)

    async def ledger(self, job_id: JobId) -> Sequence[LedgerEntry]:
        return list(self._ledger.get(job_id, ()))

    async def counts(self) -> Mapping[str, Mapping[str, int]]:
        attempts = dict.fromkeys((state.value for state in AttemptState), 0)
        for row in self._attempts.values():
            attempts[row.value.state.value] += 1
        return {"jobs": {state.value: len(ids) for state, ids in self._by_state.items()}, "attempts": attempts}

    async def wait(self, topic: str, timeout_s: float) -> bool:
        return await self._hints.wait(topic, timeout_s)

    async def put_token(self, token: Token, secret_sha256: str) -> None:
        self._tokens[secret_sha256] = token

    async def token(self, secret_sha256: str) -> Token | None:
        return self._tokens.get(secret_sha256)

    async def tokens(self) -> Sequence[Token]:
        return sorted(self._tokens.values(), key=lambda token: (token.created_at, token.id))

    async def delete_token(self, token_id: str) -> bool:
        kept = {secret: token for secret, token in self._tokens.items() if token.id != token_id}
        gone, self._tokens = len(kept) < len(self._tokens), kept
        return gone

    async def put_secret(self, owner: str, name: str, sealed: bytes) -> None:
        self._secrets[owner, name] = sealed

    async def secrets(self, owner: str, names: Sequence[str] | None = None) -> Mapping[str, bytes]:
        own = {name: sealed for (who, name), sealed in self._secrets.items() if who == owner}
        return own if names is None else {name: sealed for name, sealed in own.items() if name in names}

    async def delete_secret(self, owner: str, name: str) -> bool:
        return self._secrets.pop((owner, name), None) is not None

    async def put_upload(self, owner: str, upload: Upload) -> None:
        self._uploads[owner, upload.sha256] = upload

    async def upload(self, owner: str, sha256: str) -> Upload | None:
        return self._uploads.get((owner, sha256))

    # --- the house

    async def installation(self, proposed: Installation) -> Installation:
        self._installation = self._installation or proposed
        return self._installation

    async def ping(self) -> None:
        return None

    async def close(self) -> None:
        return None


def _due(rows: Iterable[_Row[RowT]], now: datetime, limit: int) -> list[_Row[RowT]]:
    return sorted((row for row in rows if row.claimable(now)), key=lambda row: row.due_at)[:limit]


def _matches(job: Job, where: JobFilter) -> bool:
    return (
        (where.owner is None or job.owner == where.owner)
        and (not where.states or job.state in where.states)
        and where.labels.items() <= job.spec.labels.items()
        and (where.since is None or job.created_at >= where.since)
        and (where.until is None or job.created_at < where.until)
        and (where.before is None or (job.created_at, job.id) < where.before)
    )
