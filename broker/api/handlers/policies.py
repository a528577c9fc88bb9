"""Handlers: policies, budgets and approvals."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from pydantic import Field

from broker.api.http.context import SERVICE, JobRef
from broker.api.http.openapi import Api, Call
from broker.api.schemas import core as models
from broker.api.schemas import policies as wire
from broker.api.service import views
from broker.domain.policy import Policy
from broker.domain.spec import Name
from broker.policy.budgets import Applied, reached
from broker.policy.windows import window_end, window_start
from trainer.contract.base import Config

api = Api()


class WhoseQuery(Config):
    team: Name | None = None
    """Of this team; absent: of your own team, else, for admins, the one of every team."""


class DryRunQuery(Config):
    days: Annotated[int, Field(ge=1, le=90)] = 30
    """So much of the past."""


@api.op("GET", "/v1/policies", scope="read")
async def list_policies(call: Call) -> wire.PolicyList:
    """Your team's policies; for admins all."""
    found = await call.request.app[SERVICE].policies.policies(call.caller)
    return wire.PolicyList(items=tuple(wire.PolicyView.model_validate(one) for one in found))


@api.op("PUT", "/v1/policies/{name}", scope="manage")
async def apply_policy(call: Call, name: Name, body: Policy) -> wire.PolicyView:
    """Make a policy, or a new version of it; from now on every launch obeys it."""
    return wire.PolicyView.model_validate(await call.request.app[SERVICE].policies.apply(call.caller, name, body))


@api.op("DELETE", "/v1/policies/{name}", scope="manage", status=204, errors=(404,))
async def delete_policy(call: Call, name: Name, query: WhoseQuery) -> None:
    """Delete a policy; its history stays."""
    await call.request.app[SERVICE].policies.delete(call.caller, name, query.team)


@api.op("GET", "/v1/policies/{name}/history", scope="read", errors=(404,))
async def get_policy_history(call: Call, name: Name, query: WhoseQuery) -> wire.PolicyHistory:
    """Every version of a policy, newest first, and who made it."""
    found = await call.request.app[SERVICE].policies.history(call.caller, name, query.team)
    return wire.PolicyHistory(items=tuple(wire.PolicyVersionView.model_validate(one) for one in found))


@api.op("POST", "/v1/policy-dry-run", scope="manage")
async def dry_run_policy(call: Call, query: DryRunQuery, body: Policy) -> wire.DryRunView:
    """What a policy would have done to what the ledger says has happened; nothing is changed."""
    done = await call.request.app[SERVICE].policies.dry_run(call.caller, body, query.days)
    return wire.DryRunView.model_validate(done)


@api.op("GET", "/v1/budgets", scope="read")
async def list_budgets(call: Call) -> wire.BudgetList:
    """Every policy of your team (for admins all) with what is spent and held now."""
    return budget_list(*await call.request.app[SERVICE].policies.budgets(call.caller))


@api.op("POST", "/v1/jobs/{job_id}/approve", scope="manage", errors=(404, 409))
async def approve_job(call: Call, job_id: JobRef, body: wire.Approval) -> models.JobView:
    """Approve a job's cap, once for as long as the cap is no higher; a job that awaits it is queued."""
    return views.job(await call.request.app[SERVICE].policies.approve(call.caller, job_id, body.up_to_usd))


@api.op("POST", "/v1/jobs/{job_id}/refuse", scope="manage", status=202, errors=(404, 409))
async def refuse_job(call: Call, job_id: JobRef) -> models.JobView:
    """Refuse a job that awaits approval: it is cancelled."""
    return views.job(await call.request.app[SERVICE].policies.refuse(call.caller, job_id))


def budget_list(now: datetime, found: Sequence[Applied]) -> wire.BudgetList:
    """What `Policies.budgets` found, over the wire."""
    return wire.BudgetList(at=now, items=tuple(_standing(one, now) for one in found))


def _standing(one: Applied, now: datetime) -> wire.StandingView:
    policy, standing = one.policy, one.standing
    return wire.StandingView(
        name=policy.name,
        team=policy.team,
        user=policy.user,
        timezone=policy.timezone,
        budgets=_budgets(one, now),
        outstanding_usd=standing.outstanding_usd,
        gpus=standing.gpus,
        max_gpus=policy.max_gpus,
        jobs=standing.jobs,
        max_jobs=policy.max_jobs,
        approval_above_usd=policy.approval_above_usd,
    )


def _budgets(one: Applied, now: datetime) -> tuple[wire.BudgetView, ...]:
    policy, standing = one.policy, one.standing
    crossed = {(found.budget.key, found.threshold) for found in reached(policy, standing)}
    return tuple(
        wire.BudgetView(
            limit_usd=budget.limit_usd,
            per=budget.per,
            window=budget.window,
            charged_usd=charged,
            committed_usd=charged + standing.outstanding_usd,
            since=window_start(budget, policy.zone, now),
            until=window_end(budget, policy.zone, now),
            thresholds=tuple(
                wire.ThresholdView(at=one.at, action=one.action, reached=(budget.key, one) in crossed)
                for one in budget.thresholds
            ),
        )
        for budget, charged in zip(policy.budgets, standing.charged, strict=True)
    )
