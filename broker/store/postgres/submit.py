"""Commits submissions in groups: all that arrive while one transaction commits share the next transaction."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from broker.domain.errors import StoreError, StoreUnavailable
from broker.domain.job import Event, Job
from broker.domain.tenancy import Tenant
from broker.store.postgres import row_codec
from broker.store.postgres.apply import notify
from broker.store.postgres.base import write_audit
from broker.store.postgres.pool import QUERIES, Connection, Pool, RolledBack, columns, enter
from broker.store.rules import fences, job_data

GROUP = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class _Submission:
    tenant: Tenant
    job: Job
    key: str | None
    body_sha256: str
    row: tuple[Any, ...]
    events: Sequence[tuple[Any, ...]]
    answer: "asyncio.Future[tuple[Job, bool]]"

    @property
    def team(self) -> str:
        """Team whose rights the write uses: an operator submits for any team, other users only for their own."""
        return self.job.team if self.tenant.operator else self.tenant.team


_Answers = dict[_Submission, tuple[Job, bool] | StoreError]


class Submitter:
    """Implementation of `Store.submit`. Each caller receives its own outcome after the commit."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: list[_Submission] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(
        self, tenant: Tenant, job: Job, *, key: str | None, body_sha256: str, events: Sequence[Event]
    ) -> tuple[Job, bool]:
        """Submit a job; it is durable when this returns. Raises IdempotencyConflict, StoreUnavailable, StoreError."""
        if rule := fences.broken_job_rule(job):
            raise fences.refused(f"job {job.id}", rule)
        answer: asyncio.Future[tuple[Job, bool]] = asyncio.get_running_loop().create_future()
        submission = _Submission(
            tenant=tenant,
            job=job,
            key=key,
            body_sha256=body_sha256,
            row=row_codec.submitted(job, key, body_sha256, len(events)),
            events=[row_codec.written_event(event, seq) for seq, event in enumerate(events, start=1)],
            answer=answer,
        )
        self._waiting.append(submission)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain(), name="submit")
        return await answer

    async def _drain(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:GROUP], self._waiting[GROUP:]
            try:
                for submission, outcome in (await self._commit(group)).items():
                    if submission.answer.done():  # the caller was cancelled
                        continue
                    if isinstance(outcome, StoreError):
                        submission.answer.set_exception(outcome)
                    else:
                        submission.answer.set_result(outcome)
            finally:
                for submission in group:
                    submission.answer.cancel()  # otherwise a caller would wait for ever after an error here

    async def _commit(self, group: list[_Submission]) -> _Answers:
        """Commit the group and return all outcomes. If the group is refused, each submission is committed alone."""
        try:
            return await self._pool.retried(lambda: self._once(group), RolledBack)
        except StoreUnavailable as error:
            return dict.fromkeys(group, error)
        except StoreError as error:
            if len(group) == 1:
                return {group[0]: error}
        answers: _Answers = {}
        for submission in group:
            answers |= await self._commit([submission])
        return answers

    async def _once(self, group: list[_Submission]) -> _Answers:
        """Write all in one transaction, team by team in sorted order, so that two brokers do not deadlock."""
        teams: defaultdict[str, list[_Submission]] = defaultdict(list)
        for submission in group:
            teams[submission.team].append(submission)
        answers: _Answers = {}
        async with self._pool.transaction("submit") as connection:
            origins = await _lock_origins(connection, group)
            for team, own in sorted(teams.items()):
                await enter(connection, team, operator=False)
                answers |= await self._of_team(connection, own)
            for submission, outcome in answers.items():
                if isinstance(outcome, tuple) and outcome[1] and (origin := submission.job.spec.origin) is not None:
                    job_data.check_origin(origins.get(origin))
        return answers

    async def _of_team(self, connection: Connection, group: list[_Submission]) -> _Answers:
        new = await connection.fetch(QUERIES["submit"], *columns(submission.row for submission in group))
        inserted = {row["id"]: row for row in new}
        by_id = {submission.job.id: submission for submission in reversed(group)}
        fresh = [by_id[job_id] for job_id in inserted]
        await _report(connection, fresh)
        repeated = [
            submission
            for submission in group
            if by_id[submission.job.id] is not submission or submission.job.id not in inserted
        ]
        keys = [(submission.job.team, submission.job.owner, submission.key) for submission in repeated]
        records = await connection.fetch(QUERIES["jobs_by_key"], *columns(keys)) if keys else []
        earlier = {(row["owner"], row["idempotency_key"]): row for row in records}
        answers: _Answers = {}
        for submission in fresh:
            row = inserted[submission.job.id]
            answers[submission] = (
                replace(submission.job, created_at=row["created_at"], due_at=row["due_at"], epoch=0),
                True,
            )
        for submission in repeated:
            row = earlier[submission.job.owner, submission.key]
            same = row["body_sha256"] == submission.body_sha256
            answers[submission] = (row_codec.job(row), False) if same else fences.key_conflict(submission.key or "")
        return answers

    async def close(self) -> None:
        """Wait until running transactions have committed."""
        if self._task is not None:
            await asyncio.wait({self._task})


async def _report(connection: Connection, fresh: Sequence[_Submission]) -> None:
    """Write the events and audit entries of new jobs, and notify the controllers."""
    if not fresh:
        return
    events = [event for submission in fresh for event in submission.events]
    entries = [fences.submitted(submission.tenant, submission.job) for submission in fresh]
    if events:
        await connection.execute(QUERIES["submitted"], *columns(events), *columns(map(row_codec.audited, entries)))
    else:
        await write_audit(connection, entries)
        await notify(connection, {"jobs": None})


async def _lock_origins(connection: Connection, group: Sequence[_Submission]) -> Mapping[str, Job]:
    """Return the origins of these jobs by id, locked, so that a deletion of their checkpoints waits.

    The origin of an operator's job may belong to another team.
    """
    origins = {submission.job.spec.origin for submission in group if submission.job.spec.origin is not None}
    if not origins:
        return {}
    await enter(connection, "", operator=True)
    return {row["id"]: row_codec.job(row) for row in await connection.fetch(QUERIES["lock_origins"], sorted(origins))}
