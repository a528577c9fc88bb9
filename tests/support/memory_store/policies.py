"""Policies and their usage in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal

from broker.domain.errors import OverBudget
from broker.domain.ids import JobId
from broker.domain.job import (
    TERMINAL_JOB_STATES,
    Attempt,
    Event,
    Job,
    JobState,
    StoredKind,
)
from broker.domain.money import ZERO
from broker.domain.notifications import Notice
from broker.domain.policy import Policy, PolicyVersion, StoredPolicy
from broker.policy.budgets import Applied, Reached, extension
from broker.policy.dry_run import History, LedgerAttempt, StorageSpending
from broker.policy.windows import quarter
from broker.ports.policies import JobOwner
from broker.store.rules import fences
from broker.store.rules import policies as policy_rules
from tests.support.memory_store.policy_tables import SPENT, PolicyRow
from tests.support.memory_store.state import MemoryPart, shown


class MemoryTenantPolicies(MemoryPart):
    async def put_policy(self, policy: Policy, *, replaces: int | None = None) -> StoredPolicy:
        policy_rules.check(self._tenant, policy)
        tables = self._state.policies
        if policy.team is not None and policy.team not in self._state.teams:
            raise fences.refused(f"policy {policy.name}", "policies_team")
        key = policy.team, policy.name
        known = tables.rows.get(key)
        before = known.versions[-1].policy if known else None
        if before != policy:
            policy_rules.check_version(policy, len(known.versions) if known else 0, before is None, replaces)
        row = tables.rows.setdefault(key, PolicyRow(id=len(tables.rows) + 1))
        if before != policy:
            self._record(row, policy)
        kept = row.kept
        assert kept is not None
        return kept

    def _record(self, row: PolicyRow, policy: Policy | None) -> None:
        before = row.versions[-1].policy if row.versions else None
        now, version = self._state.clock.now(), len(row.versions) + 1
        row.versions.append(PolicyVersion(version=version, policy=policy, at=now, actor=self._tenant.owner))
        self._state.write_audit(policy_rules.changed(self._tenant, before, policy))

    async def delete_policy(self, team: str | None, name: str, version: int | None = None) -> bool:
        row = self._state.policies.rows.get((team, name)) if self._sees(team or "") else None
        if row is None or row.kept is None or version not in (None, row.kept.version):
            return False
        self._record(row, None)
        return True

    async def policies(self) -> Sequence[StoredPolicy]:
        kept = (row.kept for row in self._state.policies.rows.values())
        return [
            policy_row for policy_row in kept if policy_row is not None and self._sees(policy_row.policy.team or "")
        ]

    async def policy_history(self, team: str | None, name: str) -> Sequence[PolicyVersion]:
        row = self._state.policies.rows.get((team, name)) if self._sees(team or "") else None
        return list(reversed(row.versions)) if row else []

    async def budgets(self) -> tuple[datetime, Sequence[Applied]]:
        tables, now = self._state.policies, self._state.books_now()
        seen = [(key, policy) for key, policy in tables.live() if self._sees(policy.team or "")]
        return now, tables.applied(seen, self._state.running(), now)

    async def past(self, since: datetime) -> History:
        now, seen = self._state.books_now(), self._state.jobs
        own = {key: row.value for key, row in seen.items() if self._sees(row.value.team)}
        spent = [
            (quarter(at), entry)
            for at, entry in self._state.policies.booked
            if entry.kind in SPENT and entry.job_id in own
        ]
        attempts = [
            _past(own[attempt.job_id], attempt, [(at, e.usd) for at, e in spent if e.attempt_id == attempt.id])
            for attempt in (row.value for row in self._state.attempts.values())
            if attempt.job_id in own and (attempt.ended_at is None or attempt.ended_at >= since)
        ]
        stored: dict[tuple[datetime, str, str], Decimal] = {}
        for at, entry in spent:
            if entry.attempt_id is None and at >= quarter(since):
                key = at, own[entry.job_id].team, own[entry.job_id].owner
                stored[key] = stored.get(key, ZERO) + entry.usd
        others = [
            StorageSpending(team=team, owner=owner, at=at, usd=usd) for (at, team, owner), usd in sorted(stored.items())
        ]
        return History(now=now, attempts=sorted(attempts, key=lambda one: one.at), others=others)

    async def approve(
        self, job_id: JobId, up_to_usd: Decimal, event: Event, *, cap_usd: Decimal | None = None
    ) -> Job | None:
        row = self._visible(job_id)
        if row is None or row.value.state in TERMINAL_JOB_STATES or (row.value.approved_usd or 0) >= up_to_usd:
            return shown(row) if row else None
        if cap_usd not in (None, row.value.cap_usd):
            return shown(row)
        self._state.write_audit(fences.approved(self._tenant, row.value, up_to_usd))
        row.value = replace(row.value, approved_usd=up_to_usd)
        if row.value.state is JobState.AWAITING_APPROVAL:
            self._state.put_job(row, replace(row.value, state=JobState.QUEUED, reason=""))
            row.due_at = self._state.clock.now()
        self._state.write_events([event])
        self._state.hints.hint("jobs")
        return shown(row)

    async def raise_cap(self, job_id: JobId, cap_usd: Decimal, event: Event) -> Job | None:
        state, row = self._state, self._visible(job_id)
        if row is None or cap_usd <= row.value.cap_usd or fences.cannot_run_again(row.value):
            return shown(row) if row else None
        self._extend(row.value, cap_usd)
        state.write_audit(fences.cap_raised(self._tenant, row.value, cap_usd))
        row.value = replace(row.value, cap_usd=cap_usd)
        if row.value.state is JobState.CAPPED:
            # Data that the job makes from now on is not deleted.
            kept: dict[StoredKind, datetime] = {kind: at for kind, at in row.value.deleted.items() if kind == "data"}
            row.value = replace(row.value, deleted=kept)
            state.put_job(row, replace(row.value, state=JobState.QUEUED, reason="", finished_at=None))
        if row.value.state is JobState.QUEUED:  # what did not fit under the old cap may fit now
            row.due_at = state.clock.now()
        state.write_events([event])
        state.hints.hint("jobs")
        return shown(row)

    def _extend(self, job: Job, cap_usd: Decimal) -> None:
        """Extend the reservation of the running attempt. Raises OverBudget."""
        state = self._state
        held = (state.attempts[own] for own in state.of_job[job.id] if state.attempts[own].value.live)
        running = next(held, None)
        ask = extension(job, running.value if running else None, cap_usd)
        if ask is None or running is None:
            return
        refusal = state.policies.refusal(ask, (job.team, job.owner), state.running(), state.books_now())
        if refusal is not None:
            raise OverBudget(policy_rules.no_higher_cap(job, refusal))
        attempt = running.value
        running.value = replace(attempt, reserved_usd=attempt.reserved_usd + ask.reserve_usd)
        state.write_ledger([policy_rules.extended(attempt, ask.reserve_usd)])


class MemoryGlobalPolicies(MemoryPart):
    async def applied(self, whose: Sequence[JobOwner]) -> tuple[datetime, Mapping[JobOwner, Sequence[Applied]]]:
        tables, now = self._state.policies, self._state.books_now()
        wanted = [(key, policy) for key, policy in tables.live() if any(policy.covers(*one) for one in whose)]
        applied = tables.applied(wanted, self._state.running(), now)
        return now, {one: [a for a in applied if a.policy.covers(*one)] for one in whose}

    async def post_threshold(self, policy_id: int, reached: Reached, notice: Notice, *, since: datetime) -> bool:
        tables, now = self._state.policies, self._state.clock.now()
        key = policy_id, reached.budget.key, reached.threshold.at, reached.threshold.action
        before = tables.told.get(key)
        if policy_id not in {one for one, _ in tables.live()} or (before is not None and before >= since):
            return False
        tables.told[key] = now
        self._state.outbox.tell_notice(replace(notice, message=fences.clean(notice.message), at=now), now)
        return True


def _past(job: Job, attempt: Attempt, spent: Sequence[tuple[datetime, Decimal]]) -> LedgerAttempt:
    charges: dict[datetime, Decimal] = {}
    for at, usd in spent:
        charges[at] = charges.get(at, ZERO) + usd
    return LedgerAttempt(
        job_id=job.id,
        number=attempt.number,
        team=job.team,
        owner=job.owner,
        gpus=attempt.line.offer.gpus * attempt.line.nodes,
        cap_usd=job.cap_usd,
        reserved_usd=attempt.reserved_usd,
        at=attempt.created_at,
        ended_at=attempt.ended_at,
        charges=tuple(sorted(charges.items())),
    )
