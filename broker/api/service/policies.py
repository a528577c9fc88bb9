"""Use cases of policies, budgets and approvals."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial

from broker.api.core.auth import Caller
from broker.api.core.problems import Conflict, NotFound
from broker.billing.caps import min_budget_usd, reserved
from broker.billing.drain import DrainBudget
from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import JobId
from broker.domain.instance import Caps
from broker.domain.job import TERMINAL_JOB_STATES, Event, Job, JobState
from broker.domain.money import format_usd
from broker.domain.offer import Quote, QuoteLine
from broker.domain.policy import Policy, PolicyVersion, StoredPolicy
from broker.policy.budgets import Applied, Refusal
from broker.policy.dry_run import DryRun, dry_run
from broker.policy.windows import ROLLING
from broker.ports import Clock, Store
from broker.quote.placement import foresee
from broker.runtime.cpu_threads import CpuThreads

LONGEST_WINDOW = max([*ROLLING.values(), timedelta(days=31)])
"""Longest budget window. A dry run reads this much history before its start, because earlier charges still count."""


class Policies:
    """Use cases of policies. A team manages its own policies; operators manage all policies."""

    def __init__(self, store: Store, clock: Clock, threads: CpuThreads) -> None:
        self._store = store
        self._clock = clock
        self._threads = threads

    async def policies(self, caller: Caller) -> Sequence[StoredPolicy]:
        return await self._store.as_tenant(caller.tenant).policies()

    async def apply(self, caller: Caller, name: str, policy: Policy, replaces: int | None = None) -> StoredPolicy:
        """Store a policy, or a new version of it. Raises InvalidInput, StaleVersion.

        `replaces`: the version that the caller has seen; 0: no policy of this name exists; None: any.
        """
        if policy.name != name:
            raise InvalidInput(Problem(field="name", message=f"is {policy.name}, but the address says {name}"))
        await self._own(caller, policy)
        return await self._store.as_tenant(caller.tenant).put_policy(policy, replaces=replaces)

    async def _own(self, caller: Caller, policy: Policy) -> None:
        if not caller.admin and policy.team != caller.team:
            scope = f"team {policy.team}'s" if policy.team else "more than one team's"
            message = f"this policy is {scope}; yours is team: {caller.team}"
            raise InvalidInput(Problem(field="team", message=message))
        if policy.team is not None and all(
            team.name != policy.team for team in await self._store.as_tenant(caller.tenant).teams()
        ):
            raise InvalidInput(Problem(field="team", message=_no_team_message(policy.team)))

    async def delete(self, caller: Caller, name: str, team: str | None) -> None:
        """Delete the policy with this name. Raises NotFound.

        `team` None: the caller's team, then the installation. A policy of the team that was deleted still counts, so
        that a repeat after a lost answer leaves the installation's policy.
        """
        rows = self._store.as_tenant(caller.tenant)
        for candidate in _candidates(caller, team):
            if not await rows.policy_history(candidate, name):
                continue
            if await rows.delete_policy(candidate, name):
                return
            what = f"the policy {name} of team {candidate}" if candidate else f"the installation's policy {name}"
            raise NotFound(f"{what} is deleted already; the web page Policies deletes policies of other scopes")
        raise NotFound(f"no policy {name}; `gpubroker policy ls` lists them")

    async def delete_version(self, caller: Caller, name: str, team: str | None, version: int) -> None:
        """Delete the policy of exactly this team (None: of the installation) at this version.

        Raises NotFound, Conflict.
        """
        current = (await self.exact_history(caller, name, team))[0]
        if current.version == version and current.policy is None:
            raise NotFound(f"no policy {name}; `gpubroker policy ls` lists them")
        rows = self._store.as_tenant(caller.tenant)
        if current.version != version or not await rows.delete_policy(team, name, version):
            owner = f"team {team}" if team else "the installation"
            raise Conflict(f"not deleted: the policy {name} of {owner} is not at version {version}; open it again")

    async def exact_history(self, caller: Caller, name: str, team: str | None) -> Sequence[PolicyVersion]:
        """Return all versions of the policy of exactly this team (None: of the installation). Raises NotFound."""
        if versions := await self._store.as_tenant(caller.tenant).policy_history(team, name):
            return versions
        raise NotFound(f"no policy named {name}; `gpubroker policy ls` lists them")

    async def history(self, caller: Caller, name: str, team: str | None) -> Sequence[PolicyVersion]:
        """Return all versions of a policy, newest first. `team` as in `delete`. Raises NotFound."""
        rows = self._store.as_tenant(caller.tenant)
        for candidate in _candidates(caller, team):
            if versions := await rows.policy_history(candidate, name):
                return versions
        raise NotFound(f"no policy named {name}; `gpubroker policy ls` lists them")

    async def dry_run(self, caller: Caller, policy: Policy, days: int) -> DryRun:
        """Return the effects that a policy would have had in the last `days`. Raises InvalidInput, Busy."""
        await self._own(caller, policy)
        now = self._clock.now()
        since = now - timedelta(days=days)
        history = await self._store.as_tenant(caller.tenant).past(since - LONGEST_WINDOW)
        return await self._threads.of_team(caller.team)(partial(dry_run, policy, since, history))

    async def budgets(self, caller: Caller) -> tuple[datetime, Sequence[Applied]]:
        """Return every visible policy with the spent and reserved dollars of its jobs."""
        return await self._store.as_tenant(caller.tenant).budgets()

    async def foresee(
        self, job: Job, ranking: Quote, caps: Mapping[str, Caps], drain_budget: DrainBudget
    ) -> Refusal | None:
        """Return the effect of the job's policies if it were submitted now. Nothing is written."""
        owner, every_s = (job.team, job.owner), job.spec.checkpoint.min_interval_s
        now, applied = await self._store.applied([owner])

        def least(line: QuoteLine) -> Decimal:
            return min_budget_usd(line, caps[line.offer.provider], every_s, drain_budget)

        def reserve(line: QuoteLine) -> Decimal:
            return reserved(job, line, caps[line.offer.provider], drain_budget)

        return foresee(ranking, job.cap_usd, applied[owner], now, min_budget=least, reserve=reserve)

    # -------------------------------------------------------------------------------------------------------- approval

    async def approve(
        self, caller: Caller, job_id: JobId, up_to_usd: Decimal | None, shown_cap_usd: Decimal | None = None
    ) -> Job:
        """Approve the job's cap, or a higher one in advance. Raises NotFound, Conflict, InvalidInput.

        `shown_cap_usd`: the cap that the caller saw; with another cap nothing is approved. None: the present cap.
        """
        job = await self._job(caller, job_id)
        if job.state in TERMINAL_JOB_STATES:
            raise Conflict(f"job {job_id} is {job.state}; there is nothing to approve")
        cap_usd = job.cap_usd if shown_cap_usd is None else shown_cap_usd
        _check_same_cap(job, cap_usd)
        usd = cap_usd if up_to_usd is None else up_to_usd
        if usd < cap_usd:
            message = f"{format_usd(usd)} is below the cap of {format_usd(cap_usd)}; approve the cap, or refuse the job"
            raise InvalidInput(Problem(field="up_to_usd", message=message))
        message = f"approved up to {format_usd(usd)} by {caller.owner}"
        event = Event(job_id=job.id, kind="job.approved", message=message, data={"usd": str(usd), "by": caller.owner})
        rows = self._store.as_tenant(caller.tenant)
        approved = await rows.approve(job.id, usd, event, cap_usd=cap_usd) or job
        _check_same_cap(approved, cap_usd)
        return approved

    async def refuse(self, caller: Caller, job_id: JobId) -> Job:
        """Cancel a job that awaits approval. Raises NotFound, Conflict."""
        job = await self._job(caller, job_id)
        if job.state in TERMINAL_JOB_STATES:
            raise Conflict(f"job {job_id} is {job.state}; there is nothing to refuse")
        if job.stop_requested:
            return job
        if job.state is not JobState.AWAITING_APPROVAL:
            raise Conflict(f"job {job_id} is {job.state} and awaits no approval; cancel it instead")
        event = Event(
            job_id=job.id, kind="job.refused", message=f"refused by {caller.owner}", data={"by": caller.owner}
        )
        return await self._store.as_tenant(caller.tenant).request_stop(job.id, event) or job

    async def _job(self, caller: Caller, job_id: JobId) -> Job:
        job = await self._store.as_tenant(caller.tenant).job(job_id)
        if job is None:
            raise NotFound(f"no job {job_id}; `gpubroker ls` lists yours")
        return job


def _check_same_cap(job: Job, cap_usd: Decimal) -> None:
    """Raise Conflict if the cap is not the one that is approved."""
    if job.cap_usd != cap_usd:
        raise Conflict(
            f"not approved: the cap is {format_usd(job.cap_usd)}, not {format_usd(cap_usd)}; check it and approve again"
        )


def _no_team_message(team: str) -> str:
    return f"no team {team}; create it with `gpubroker team new {team}`, or name one of `gpubroker team ls`"


def _candidates(caller: Caller, team: str | None) -> Sequence[str | None]:
    """Return the teams whose policies a name may mean, in order; None: the installation."""
    return (team,) if team is not None else (caller.team, None)
