"""Memory and PostgreSQL answer alike under random operations."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import asyncpg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.domain.errors import OverBudget, StoreError
from broker.domain.ids import job_id
from broker.domain.job import Attempt, AttemptState, Job, JobState, Signal
from broker.domain.policy import Policy
from broker.ports import Change, Charge, JobFilter, Lane, Leased, Store
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.postgres.store import PostgresStore
from tests.conformance.conftest import TimedStore, memory_timed_store, shift_time
from tests.conformance.samples import HOUR, START, admission, in_state, make_event, make_job

EMPTY = (
    "SET session_replication_role = replica; TRUNCATE jobs, job_labels, attempts, price_changes, ledger, events, "
    "streams, deliveries, audit, policies, policy_versions, policy_told, usage, observations, decisions"
)
ATTEMPT_STATES = [state for state in AttemptState if state is not AttemptState.PLANNED]
JOB_STATES = [JobState.QUEUED, JobState.RECOVERING, JobState.CAPPED, JobState.FAILED]

LIMITS: list[dict[str, Any]] = [
    {"max_jobs": 1}, {"max_gpus": 2}, {"approval_above_usd": 5},
    *({"budgets": [{"limit_usd": limit, "per": "month", "window": "rolling"}]} for limit in ("9.52", "19", "30")),
]  # fmt: skip
number = st.integers(0, 2)
moves = st.lists(st.tuples(number, st.sampled_from(ATTEMPT_STATES)), max_size=3)
after = st.sampled_from([0.0, HOUR])
operation = st.one_of(
    st.tuples(st.just("submit"), number, st.sampled_from([None, "k1", "k2"]), st.sampled_from(["1", "2"])),
    st.tuples(st.just("claim_jobs"), after),
    st.tuples(st.just("claim_attempts"), st.sampled_from(list(Lane)), after),
    st.tuples(st.just("admit"), number),
    st.tuples(st.just("move_job"), number, st.sampled_from(JOB_STATES), after),
    st.tuples(
        st.just("move_attempts"), st.lists(st.tuples(number, st.sampled_from(ATTEMPT_STATES)), max_size=3), after
    ),
    st.tuples(st.just("end"), number, st.sampled_from(JOB_STATES), after),
    st.tuples(st.just("charge"), number, st.booleans(), st.booleans()),
    st.tuples(st.just("release"), after),
    st.tuples(st.just("stop"), number),
    st.tuples(st.just("raise_cap"), number, st.sampled_from([9, 11, 12])),
    st.tuples(st.just("pass_time"), st.just(2 * HOUR)),
    st.tuples(st.just("limit"), st.sampled_from(LIMITS)),
    st.tuples(st.just("unlimit")),
    st.tuples(st.just("approve"), number, st.sampled_from([5, 20])),
)


OPENING: list[tuple[Any, ...]] = [
    *(("submit", which, None, "1") for which in range(3)),
    ("claim_jobs", HOUR),
    ("admit", 0),
    ("admit", 1),
    ("claim_attempts", Lane.LAUNCH, HOUR),
    ("move_attempts", [(0, AttemptState.TRAINING)], 0.0),
]
"""Operations that create two live attempts and a waiting job, on which the random operations act."""


class Player:
    """Player of operations on one store that remembers claimed rows, like a broker."""

    def __init__(self, timed_store: TimedStore) -> None:
        self.timed_store = timed_store
        self.store: Store = timed_store.store
        self.jobs: dict[str, Job] = {}
        self.attempts: dict[str, Leased] = {}

    async def play(self, name: str, *arguments: Any) -> Any:
        act: Callable[..., Awaitable[Any]] = getattr(self, name)
        try:
            return await act(*arguments)
        except (StoreError, OverBudget) as error:
            return type(error).__name__

    def _job(self, which: int) -> Job:
        own = job_id(bytes([which]) * 9)
        return self.jobs.get(own) or make_job(id=own)

    def _attempt(self, which: int) -> Leased | None:
        held = sorted(self.attempts.values(), key=lambda leased: leased.attempt.id)
        return held[which % len(held)] if held else None

    async def submit(self, which: int, key: str | None, body: str) -> Any:
        job = make_job(id=job_id(bytes([which]) * 9))
        made, fresh = await self.store.submit(job, key=key, body_sha256=body, events=[make_event(job)])
        return plain(made), fresh

    async def claim_jobs(self, lease_s: float) -> Any:
        claimed = await self.store.claim_jobs(
            [JobState.QUEUED, JobState.RECOVERING], owner="o", lease_s=lease_s, limit=9
        )
        self.jobs |= {job.id: job for job in claimed}
        return by_id(claimed)

    async def claim_attempts(self, lane: Lane, lease_s: float) -> Any:
        claimed = await self.store.claim_attempts(lane, owner="o", lease_s=lease_s, limit=9)
        self.attempts |= {leased.attempt.id: leased for leased in claimed}
        return by_id([leased.attempt for leased in claimed]), by_id([leased.job for leased in claimed])

    async def admit(self, which: int) -> Any:
        job = self._job(which)
        return await self._apply(admission(job, job.attempts + 1))

    async def _apply(self, *changes: Change) -> Any:
        """Write, and remember the written rows, like a broker that keeps the lease."""
        held = await self.store.apply(changes)
        for change in (change for change, ok in zip(changes, held, strict=True) if ok):
            if change.job:
                self.jobs[change.job[1].id] = change.job[1]
            if change.attempt:
                leased = self.attempts[change.attempt[1].id]
                self.attempts[leased.attempt.id] = replace(leased, attempt=change.attempt[1])
        return held

    async def move_job(self, which: int, state: JobState, due_in_s: float) -> Any:
        job = self._job(which)
        finished = None if state in (JobState.QUEUED, JobState.RECOVERING) else START
        to = replace(job, state=state, finished_at=finished)
        return await self._apply(Change(job=(job, to), due_in_s=due_in_s))

    async def move_attempts(self, moves: list[tuple[int, AttemptState]], due_in_s: float) -> Any:
        changes = []
        for which, state in moves:
            if leased := self._attempt(which):
                to, event = in_state(leased.attempt, state), make_event(leased.job, f"attempt.{state}")
                changes.append(Change(attempt=(leased.attempt, to), events=(event,), due_in_s=due_in_s))
        return await self._apply(*changes)

    async def end(self, which: int, state: JobState, due_in_s: float) -> Any:
        if (leased := self._attempt(which)) is None:
            return None
        ended = in_state(leased.attempt, AttemptState.ENDED)
        finished = None if state in (JobState.QUEUED, JobState.RECOVERING) else START
        to = replace(leased.job, state=state, retries_used=1, preemptions_without_progress=2, finished_at=finished)
        return await self._apply(Change(attempt=(leased.attempt, ended), job=(leased.job, to), due_in_s=due_in_s))

    async def charge(self, which: int, near: bool, fresh: bool) -> Any:
        if (leased := self._attempt(which)) is None:
            return None
        own, job = leased.attempt.id, leased.job.id
        read = (await self.store.attempts_by_id([own])).get(own) if fresh else leased.attempt
        since = read.charged_to if read else None
        to = (since or START) + timedelta(seconds=60)
        why = Signal.CAP if near else None
        charge = Charge(attempt_id=own, job_id=job, since=since, to=to, usd=Decimal("0.01"), signal=why)
        return await self.store.charge([charge])

    async def release(self, due_in_s: float) -> Any:
        attempts = [leased.attempt for leased in self.attempts.values()]
        await self.store.release(list(self.jobs.values()), attempts, due_in_s=due_in_s)

    async def stop(self, which: int) -> Any:
        job = self._job(which)
        return plain(await self.store.request_stop(job.id, make_event(job, "job.stop_requested")))

    async def raise_cap(self, which: int, cap: int) -> Any:
        job = self._job(which)
        return plain(await self.store.raise_cap(job.id, Decimal(cap), make_event(job, "job.cap_raised")))

    async def limit(self, rules: dict[str, Any]) -> Any:
        stored = await self.store.put_policy(Policy.model_validate({"name": "limits", "team": "default", **rules}))
        return stored.version

    async def unlimit(self) -> Any:
        return await self.store.delete_policy("default", "limits")

    async def approve(self, which: int, usd: int) -> Any:
        job = self._job(which)
        return plain(await self.store.approve(job.id, Decimal(usd), make_event(job, "job.approved")))

    async def pass_time(self, seconds: float) -> Any:
        await self.timed_store.pass_time(seconds)

    async def everything(self) -> Any:
        jobs = await self.store.jobs(JobFilter(limit=99))
        return (
            [
                (
                    plain(job),
                    await self.store.attempts(job.id),
                    await self.store.ledger(job.id),
                    [replace(event, at=None) for event in await self.store.events(job.id, after=0, limit=99)],
                )
                for job in sorted(jobs, key=lambda job: job.id)
            ],
            await self.store.counts(),
            [(budget.policy, budget.usage) for budget in (await self.store.budgets())[1]],
        )


def plain(row: Any) -> Any:
    """Return a row without the times that each database sets by its own clock."""
    return replace(row, created_at=START, due_at=None) if isinstance(row, Job) else row


def by_id(found: Any) -> list[Job | Attempt]:
    return sorted((plain(row) for row in found), key=lambda row: row.id)


async def test_memory_and_postgres_give_the_same_answers(postgres_server: EmbeddedPostgres, postgres_dsn: str) -> None:
    store = await PostgresStore.connect(postgres_dsn)
    connection = await asyncpg.connect(
        postgres_server.admin_dsn.replace("/gpubroker?", urlsplit(postgres_dsn).path + "?")
    )

    async def compare(operations: list[tuple[Any, ...]]) -> None:
        await connection.execute(EMPTY)
        database = TimedStore(store=store, pass_time=lambda seconds: shift_time(postgres_dsn, seconds))
        twins = Player(memory_timed_store()), Player(database)
        for step in [*OPENING, *operations]:
            memory, postgres = [await player.play(*step) for player in twins]
            assert memory == postgres, step
        assert await twins[0].everything() == await twins[1].everything()

    loop = asyncio.get_running_loop()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(operation, min_size=5, max_size=40))
    def play(operations: list[tuple[Any, ...]]) -> None:
        asyncio.run_coroutine_threadsafe(compare(operations), loop).result()

    try:
        await asyncio.to_thread(play)
    finally:
        await connection.close()
        await store.close()
