"""`ports.TenantStore` in memory: what the API asks, as one tenant.

A concern of its own is a `Part` in memory_<concern>.py, added to the bases of `MemoryTenant`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Event, Job
from broker.domain.money import LedgerEntry
from broker.ports import JobFilter, Upload
from broker.store.rules import fences
from broker.store.rules import job_data as cost_rules
from tests.support.memory_store.channels import MemoryTenantChannels
from tests.support.memory_store.job_data import MemoryTenantJobData
from tests.support.memory_store.offer_history import MemoryTenantOfferHistory
from tests.support.memory_store.policies import MemoryTenantPolicies
from tests.support.memory_store.slack_users import MemorySlackUsers
from tests.support.memory_store.spending import MemorySpending
from tests.support.memory_store.state import MemoryPart, MemoryRow, shown
from tests.support.memory_store.teams import MemoryTeams


class MemoryTenant(
    MemoryTeams,
    MemoryTenantChannels,
    MemoryTenantPolicies,
    MemoryTenantJobData,
    MemoryTenantOfferHistory,
    MemorySlackUsers,
    MemorySpending,
    MemoryPart,
):
    """Store of one tenant, made by `MemoryStore.as_tenant`; the store itself has no tenant."""

    async def submit(self, job: Job, *, key: str | None, body_sha256: str, events: Sequence[Event]) -> tuple[Job, bool]:
        state, own = self._state, (job.team, job.owner, key or "")
        if not self._sees(job.team):
            raise fences.refused(f"job {job.id}", "team")
        if key is not None and (made := state.keys.get(own)) is not None:
            if made[0] != body_sha256:
                raise fences.key_conflict(key)
            return shown(state.jobs[made[1]]), False
        broken = fences.broken_job_rule(job) or ("jobs_team" if job.team not in state.teams else None)
        if rule := broken or ("jobs_pkey" if job.id in state.jobs else None):
            raise fences.refused(f"job {job.id}", rule)
        if job.spec.origin is not None and (origin := state.jobs.get(job.spec.origin)) is not None:
            cost_rules.check_origin(origin.value)
        now = state.clock.now()
        row = MemoryRow(value=replace(job, created_at=now, epoch=0, due_at=None), due_at=now, stored_due_at=now)
        state.jobs[job.id] = row
        state.by_state[job.state][job.id] = None
        if key is not None:
            state.keys[own] = (body_sha256, job.id)
        state.write_events(events)
        state.write_audit(fences.submitted(self._tenant, job))
        state.hints.hint("jobs")
        return shown(row), True

    async def job(self, job_id: JobId) -> Job | None:
        row = self._visible(job_id)
        return shown(row) if row else None

    async def jobs(self, where: JobFilter) -> Sequence[Job]:
        seen = (row for row in self._state.jobs.values() if self._sees(row.value.team))
        found = [shown(row) for row in seen if _matches(row.value, where)]
        return sorted(found, key=lambda job: (job.created_at, job.id), reverse=True)[: where.limit]

    async def attempts(self, job_id: JobId) -> Sequence[Attempt]:
        if self._visible(job_id) is None:
            return []
        return sorted((self._state.attempts[i].value for i in self._state.of_job[job_id]), key=lambda a: a.number)

    async def request_stop(self, job_id: JobId, event: Event) -> Job | None:
        state, row = self._state, self._visible(job_id)
        if row is None or row.value.stop_requested or row.value.state in RESTING_JOB_STATES:
            return shown(row) if row else None
        state.write_audit(fences.stopped(self._tenant, row.value))
        row.value, row.due_at = replace(row.value, stop_requested=True), state.clock.now()
        for attempt_id in state.of_job[job_id]:
            if state.attempts[attempt_id].value.live:
                state.signal(state.attempts[attempt_id])
        state.write_events([event])
        state.hints.hint("jobs")
        return shown(row)

    async def events(self, job_id: JobId, *, after: int, limit: int) -> Sequence[Event]:
        if self._visible(job_id) is None:
            return []
        return self._state.events_of[job_id][max(after, 0) :][:limit]

    async def ledger(self, job_id: JobId) -> Sequence[LedgerEntry]:
        return [] if self._visible(job_id) is None else list(self._state.ledger[job_id])

    async def decision(self, attempt_id: AttemptId) -> bytes | None:
        row = self._state.attempts.get(attempt_id)
        return None if row is None or self._visible(row.value.job_id) is None else self._state.decisions.get(attempt_id)

    async def wait(self, topic: str, timeout_s: float) -> bool:
        return await self._state.hints.wait(topic, timeout_s)

    async def put_secret(self, owner: str, name: str, sealed: bytes) -> None:
        self._state.secrets[self._own_team(f"secret {name}"), owner, name] = sealed
        self._state.write_audit(self._tenant.audit_entry("secret.set", name))

    async def secrets(self, owner: str, names: Sequence[str] | None = None) -> Mapping[str, bytes]:
        own = self._tenant.team, owner
        found = {name: sealed for (*who, name), sealed in self._state.secrets.items() if tuple(who) == own}
        return found if names is None else {name: sealed for name, sealed in found.items() if name in names}

    async def delete_secret(self, owner: str, name: str) -> bool:
        if self._state.secrets.pop((self._tenant.team, owner, name), None) is None:
            return False
        self._state.write_audit(self._tenant.audit_entry("secret.delete", name))
        return True

    async def put_upload(self, owner: str, upload: Upload) -> None:
        kept = replace(upload, name=fences.clean(upload.name))
        own = self._own_team(f"upload {upload.sha256}"), owner, upload.sha256
        self._state.uploads[own], self._state.uploaded_at[own] = kept, self._state.clock.now()
        self._state.write_audit(fences.uploaded(self._tenant, upload))

    async def upload(self, owner: str, sha256: str) -> Upload | None:
        return self._state.uploads.get((self._tenant.team, owner, sha256))

    def _own_team(self, what: str) -> str:
        """Return the tenant's team. Raises StoreError for the daemon itself, which is in no team."""
        if self._tenant.team not in self._state.teams:
            raise fences.refused(what, "team")
        return self._tenant.team


def _matches(job: Job, where: JobFilter) -> bool:
    return (
        (where.team is None or job.team == where.team)
        and (where.owner is None or job.owner == where.owner)
        and (not where.states or job.state in where.states)
        and where.labels.items() <= job.spec.labels.items()
        and (where.since is None or job.created_at >= where.since)
        and (where.until is None or job.created_at < where.until)
        and (where.before is None or (job.created_at, job.id) < where.before)
    )
