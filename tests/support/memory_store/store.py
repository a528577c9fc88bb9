"""The store without a database: the same behaviour on one event loop, its clock injected. For simulation and tests.

No method awaits between reading and writing, so each is a transaction. Nothing survives the process.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from broker.domain.errors import StoreError
from broker.domain.ids import AttemptId, Installation, JobId
from broker.domain.job import Attempt, AttemptState, Job, JobState, Reason
from broker.domain.tenancy import OPERATOR, Tenant
from broker.domain.workload import RunObservation, SpotHours
from broker.estimator.preemption_rate import Place, place_of_offer
from broker.policy.budgets import admission
from broker.ports import Change, Charge, Clock, Lane, Leased, Token
from broker.store.rules import fences
from tests.support.memory_store.channels import MemoryChannels
from tests.support.memory_store.job_data import MemoryGlobalJobData
from tests.support.memory_store.offer_history import MemoryOfferHistory
from tests.support.memory_store.policies import MemoryGlobalPolicies
from tests.support.memory_store.state import MemoryRow, RowT, State, with_columns
from tests.support.memory_store.tenant import MemoryTenant

MICRO_S = timedelta(microseconds=1)


class MemoryStore(MemoryTenant, MemoryChannels, MemoryGlobalPolicies, MemoryGlobalJobData, MemoryOfferHistory):
    """`ports.Store` in memory."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(State(clock), OPERATOR)

    def use_time(self, now: Callable[[], datetime]) -> None:
        self._state.trusted_now = now

    def as_tenant(self, tenant: Tenant) -> MemoryTenant:
        return MemoryTenant(self._state, tenant)

    # --- controllers

    async def claim_jobs(self, states: Sequence[JobState], *, owner: str, lease_s: float, limit: int) -> Sequence[Job]:
        now = self._state.clock.now()
        asked = [self._state.jobs[i] for state in dict.fromkeys(states) for i in self._state.by_state[state]]
        others = [
            self._state.jobs[i]
            for state in fences.WAITING_JOB_STATES - set(states)
            for i in self._state.by_state[state]
        ]
        rows = [*asked, *(row for row in others if row.value.stop_requested)]
        due = sorted((row for row in rows if row.claimable(now)), key=lambda row: fences.place_in_queue(row.value))
        return [row.lease(owner, now + timedelta(seconds=lease_s)) for row in due[:limit]]

    async def claim_attempts(
        self, lane: Lane, *, owner: str, lease_s: float, limit: int, turns: Mapping[str, float] | None = None
    ) -> Sequence[Leased]:
        now = self._state.clock.now()
        lined = (self._state.attempts[i] for i in self._state.by_lane[lane])
        rows = _due((row for row in lined if turns is None or _has_come(turns, row, now)), now, limit)
        leased = [row.lease(owner, now + timedelta(seconds=lease_s)) for row in rows]
        return [Leased(attempt=attempt, job=self._state.jobs[attempt.job_id].value) for attempt in leased]

    async def claim_reviews(
        self, *, owner: str, providers: Sequence[str], older_s: float, own_older_s: float, limit: int
    ) -> Sequence[Leased]:
        now, due = self._state.clock.now(), []
        for row in (self._state.attempts[i] for i in self._state.by_lane[Lane.LIVENESS]):
            (at, by), attempt = row.reviewed, row.value
            limit_s = min(older_s, own_older_s) if by == owner else older_s
            is_old = (now - at).total_seconds() > limit_s
            if is_old and attempt.state is AttemptState.TRAINING and attempt.line.offer.provider in providers:
                due.append(row)
        claimed = sorted(due, key=lambda row: row.reviewed[0])[:limit]
        for row in claimed:
            row.reviewed = now, owner
        return [Leased(attempt=row.value, job=self._state.jobs[row.value.job_id].value) for row in claimed]

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
        if not self._holds(change) or not self._room(change) or not self._allowed(change.admit):
            return False
        now = self._state.clock.now()
        if change.attempt is not None:
            read, written = change.attempt
            row = self._state.attempts[written.id]
            if written.launched_by == read.launched_by != row.value.launched_by:
                written = replace(written, launched_by=row.value.launched_by)
            self._put_attempt(row, written)
            row.free(now, change.due_in_s)
        if change.job is not None:
            was, to = change.job
            job_row = self._state.jobs[was.id]
            unseen_stop = job_row.value.stop_requested and not was.stop_requested
            self._state.put_job(job_row, to)
            job_row.free(now, 0.0 if unseen_stop else change.due_in_s)
        if change.admit is not None:
            self._admit(change.admit, now)
            if change.decision is not None:
                self._state.decisions[change.admit.id] = change.decision
        if change.charge is not None:
            self._charge(change.charge)
        self._state.write_ledger(change.ledger)
        self._state.write_events(change.events)
        if change.observation is not None:
            self._state.observations.append(change.observation)
        if fences.wakes(change):
            self._state.hints.hint("jobs")
        return True

    def _holds(self, change: Change) -> bool:
        jobs = {i: self._state.jobs[i].value for i in fences.jobs_written(change) if i in self._state.jobs}
        attempts = {
            i: self._state.attempts[i].value for i in fences.attempts_written(change) if i in self._state.attempts
        }
        return fences.all_hold(change, jobs, attempts)

    def _room(self, change: Change) -> bool:
        """Return False if the attempt already exists, or if the job would have a second live attempt."""
        new, to = change.admit, change.attempt[1] if change.attempt else None
        appears = new or to
        if appears is None:
            return True
        others = [self._state.attempts[i].value for i in self._state.of_job[appears.job_id]]
        if new is not None and any(a.number == new.number or a.id == new.id for a in others):
            return False
        after = [to if to and a.id == to.id else a for a in others]
        return sum(a.live for a in [*after, new] if a is not None) <= 1

    def _allowed(self, attempt: Attempt | None) -> bool:
        """Return False if a policy refuses the admission."""
        if attempt is None:
            return True
        state, job = self._state, self._state.jobs[attempt.job_id].value
        ask = admission(attempt, job.cap_usd, job.approved_usd)
        return state.policies.refusal(ask, (job.team, job.owner), state.running(), state.books_now()) is None

    def _admit(self, attempt: Attempt, now: datetime) -> None:
        stop = self._state.jobs[attempt.job_id].value.stop_requested
        row = MemoryRow(value=attempt, due_at=now, signal=stop or attempt.signal is not None)
        self._state.attempts[attempt.id] = row
        self._state.of_job[attempt.job_id].append(attempt.id)
        self._state.by_lane[fences.lane_of(attempt.state, row.signal)][attempt.id] = None

    def _put_attempt(self, row: MemoryRow[Attempt], to: Attempt) -> None:
        """Write the controllers' columns."""
        old = row.value
        self._state.by_lane[fences.lane_of(old.state, row.signal)].pop(old.id)
        row.value = with_columns(
            to,
            reserved_usd=old.reserved_usd,
            charged_usd=old.charged_usd,
            charged_to=old.charged_to,
            traffic_usd=old.traffic_usd,
            prices=old.prices,
            signal=old.signal,
            idle=old.idle,
            stays=old.stays,
            epoch=old.epoch,
            detail=fences.clean(to.detail),
        )
        self._state.by_lane[fences.lane_of(to.state, row.signal)][to.id] = None

    async def release(self, jobs: Sequence[Job], attempts: Sequence[Attempt], *, due_in_s: float) -> None:
        now = self._state.clock.now()
        for job in jobs:
            row = self._state.jobs.get(job.id)
            if row is not None and row.value.epoch == job.epoch:
                row.free(now, due_in_s)
        for attempt in attempts:
            held = self._state.attempts.get(attempt.id)
            if held is not None and held.value.epoch == attempt.epoch:
                held.free(now, due_in_s)

    async def end_leases(self, *, owner: str) -> None:
        now = self._state.clock.now()
        for row in (self._state.attempts[i] for lane in Lane for i in self._state.by_lane[lane]):
            if row.lease_owner == owner:
                row.value = with_columns(row.value, epoch=row.value.epoch + 1)
                row.free(now, 0.0)

    async def repair_due_times(self) -> None:
        late = self._state.clock.now() + timedelta(minutes=2)
        live = [self._state.attempts[i] for lane in Lane for i in self._state.by_lane[lane]]
        open_jobs = [row for row in self._state.jobs.values() if row.value.finished_at is None]
        for attempt in live:
            self._free_late(attempt, late)
        for job in open_jobs:
            self._free_late(job, late)

    def _free_late(self, row: MemoryRow[RowT], late: datetime) -> None:
        if row.due_at > late or (row.lease_until or late) > late:
            row.value = with_columns(row.value, epoch=row.value.epoch + 1)
            row.free(self._state.clock.now(), 0.0)

    async def live_attempts(self) -> Sequence[Leased]:
        live = [self._state.attempts[i].value for lane in Lane for i in self._state.by_lane[lane]]
        return [Leased(attempt=attempt, job=self._state.jobs[attempt.job_id].value) for attempt in live]

    async def sent_attempts(self) -> Sequence[Leased]:
        return [row for row in await self.live_attempts() if row.attempt.create_sent_at is not None]

    async def attempts_by_id(self, ids: Sequence[AttemptId]) -> Mapping[AttemptId, Attempt]:
        return {i: self._state.attempts[i].value for i in ids if i in self._state.attempts}

    async def unproven_launches(self) -> Sequence[Attempt]:
        leaving = (self._state.attempts[i].value for i in self._state.by_lane[Lane.TERMINATION])
        return [attempt for attempt in leaving if attempt.launched_by]

    async def mark_launchers_finished(self, attempts: Sequence[Attempt]) -> None:
        for read in attempts:
            row = self._state.attempts[read.id]
            if row.value.state is AttemptState.TERMINATING and row.value.launched_by == read.launched_by:
                row.value = replace(row.value, launched_by="")

    async def charge(self, charges: Sequence[Charge]) -> Sequence[bool]:
        return await self.apply([Change(charge=charge) for charge in charges])

    def _charge(self, charge: Charge) -> None:
        row = self._state.attempts[charge.attempt_id]
        attempt = row.value
        total = charge.usd + charge.traffic_usd
        row.value = with_columns(
            attempt,
            charged_usd=attempt.charged_usd + total,
            traffic_usd=attempt.traffic_usd + charge.traffic_usd,
            # Every charge moves its fence, also one that covers no time.
            charged_to=charge.to if attempt.charged_to is None else max(charge.to, attempt.charged_to + MICRO_S),
            prices=(*attempt.prices, *charge.prices),
        )
        self._spend(charge.job_id, total)
        self._state.write_ledger(fences.entries_of(charge))
        if charge.signal is not None:
            self._state.signal(row, charge.signal)
        if charge.event is not None:
            self._state.write_events([charge.event])

    def _spend(self, job_id: JobId, usd: Decimal) -> None:
        row = self._state.jobs[job_id]
        row.value = with_columns(row.value, spent_usd=row.value.spent_usd + usd)

    async def ended_at_host(
        self, host: str, reasons: Sequence[Reason], *, within_s: float, limit: int
    ) -> Sequence[Attempt]:
        now = self._state.clock.now()
        ended = [
            (now - a.ended_at, a.id, a)
            for i in self._state.by_lane[None]
            if (a := self._state.attempts[i].value).ended_at
        ]
        found = [
            (age, attempt_id, attempt)
            for age, attempt_id, attempt in ended
            if age.total_seconds() < within_s and attempt.line.offer.host_key == host and attempt.reason in reasons
        ]
        return [attempt for _, _, attempt in sorted(found, key=lambda one: one[:2])[:limit]]

    async def upload_bytes(self, team: str, owner: str, sha256: str) -> int | None:
        upload = self._state.uploads.get((team, owner, sha256))
        return None if upload is None else upload.bytes

    async def observations(self, *, max_per_pair: int) -> Sequence[RunObservation]:
        seen: Counter[tuple[str, str, str]] = Counter()
        latest: list[RunObservation] = []
        for observation in reversed(self._state.observations):
            shape = observation.workload.shape
            cell = (observation.hardware, observation.workload.method, shape.family if shape else "")
            seen[cell] += 1
            if seen[cell] <= max_per_pair:
                latest.append(observation)
        return latest[::-1]

    async def spot_hours(self, *, within_s: float) -> Sequence[SpotHours]:
        now = self._state.clock.now()
        found: dict[Place, tuple[float, int]] = {}
        for one in (row.value for row in self._state.attempts.values()):
            sent, offer = one.create_sent_at, one.line.offer
            if offer.spot and sent is not None and (now - sent).total_seconds() < within_s:
                hours, preemptions = found.get(place_of_offer(offer), (0.0, 0))
                stood = ((one.terminating_since or one.ended_at or now) - sent).total_seconds() / 3600
                preempted = preemptions + (one.reason is Reason.PREEMPTED)
                found[place_of_offer(offer)] = hours + stood * one.line.nodes, preempted
        return [
            SpotHours(
                provider=provider, cloud=cloud, region=region, accelerator=gpu, hours=hours, preemptions=preemptions
            )
            for (provider, cloud, region, gpu), (hours, preemptions) in sorted(found.items())
        ]

    async def block_offer(self, key: str, reason: str, *, for_s: float) -> None:
        self._state.blocked[key] = (fences.clean(reason), self._state.clock.now() + timedelta(seconds=for_s))

    async def blocked_offers(self) -> Mapping[str, str]:
        now = self._state.clock.now()
        self._state.blocked = {offer: entry for offer, entry in self._state.blocked.items() if entry[1] > now}
        return {offer: reason for offer, (reason, _) in self._state.blocked.items()}

    async def counts(self) -> Mapping[str, Mapping[str, int]]:
        attempts = dict.fromkeys((state.value for state in AttemptState), 0)
        for row in self._state.attempts.values():
            attempts[row.value.state.value] += 1
        return {"jobs": {state.value: len(ids) for state, ids in self._state.by_state.items()}, "attempts": attempts}

    # --- the installation

    async def installation(self, proposed: Installation) -> Installation:
        self._state.installation = self._state.installation or proposed
        return self._state.installation

    async def blob_store(self, proposed: str) -> str:
        self._state.blob_store = self._state.blob_store or proposed
        return self._state.blob_store

    async def adopt_blob_store(self, mark: str) -> None:
        self._state.blob_store = mark

    async def master_key(self, proposed: str | None) -> str | None:
        self._state.master_key = self._state.master_key or proposed
        return self._state.master_key

    async def adopt_master_key(self, mark: str) -> None:
        self._state.master_key = mark

    async def token(self, secret_sha256: str) -> Token | None:
        return self._state.tokens.get(secret_sha256)

    async def end_session(self, session_id: str, *, for_s: float) -> None:
        self._state.ended_sessions.add(session_id)

    async def is_session_ended(self, session_id: str) -> bool:
        return session_id in self._state.ended_sessions

    async def ping(self) -> datetime:
        return self._state.clock.now()

    async def check_pages(self) -> None:
        return None

    async def close(self) -> None:
        return None


def _has_come(turns: Mapping[str, float], row: MemoryRow[Attempt], now: datetime) -> bool:
    later_s = turns.get(row.value.line.offer.provider)
    return later_s is not None and (row.signal or row.due_at + timedelta(seconds=later_s) <= now)


def _due(rows: Iterable[MemoryRow[RowT]], now: datetime, limit: int) -> list[MemoryRow[RowT]]:
    return sorted((row for row in rows if row.claimable(now)), key=lambda row: row.due_at)[:limit]
