"""Handlers: policies, budgets and approvals."""

from broker.api.http.context import SERVICE
from broker.api.http.openapi import Api, Call
from broker.api.schemas import policies as wire
from broker.api.schemas.jobs import JobView
from broker.api.schemas.queries import ApplyPolicyQuery, DryRunQuery, JobRef, PolicyTeamQuery
from broker.api.service import views
from broker.domain.policy import Policy
from broker.domain.spec import Name

api = Api()


@api.op("GET", "/v1/policies", scope="read")
async def list_policies(call: Call) -> wire.PolicyList:
    """List your team's policies; for admins all."""
    policies = await call.request.app[SERVICE].policies.policies(call.caller)
    return wire.PolicyList(items=tuple(wire.PolicyView.model_validate(policy) for policy in policies))


@api.op("PUT", "/v1/policies/{name}", scope="manage", errors=(409,))
async def apply_policy(call: Call, name: Name, query: ApplyPolicyQuery, body: Policy) -> wire.PolicyView:
    """Store a policy, or a new version of it. Every launch from now on obeys it."""
    policies = call.request.app[SERVICE].policies
    return wire.PolicyView.model_validate(await policies.apply(call.caller, name, body, query.replaces))


@api.op("DELETE", "/v1/policies/{name}", scope="manage", status=204, errors=(404,))
async def delete_policy(call: Call, name: Name, query: PolicyTeamQuery) -> None:
    """Delete a policy; its history stays."""
    await call.request.app[SERVICE].policies.delete(call.caller, name, query.team)


@api.op("GET", "/v1/policies/{name}/history", scope="read", errors=(404,))
async def get_policy_history(call: Call, name: Name, query: PolicyTeamQuery) -> wire.PolicyHistory:
    """List every version of a policy with its author, newest first."""
    versions = await call.request.app[SERVICE].policies.history(call.caller, name, query.team)
    return wire.PolicyHistory(items=tuple(wire.PolicyVersionView.model_validate(version) for version in versions))


@api.op("POST", "/v1/policy-dry-run", scope="manage")
async def dry_run_policy(call: Call, query: DryRunQuery, body: Policy) -> wire.DryRunView:
    """Simulate the effects of a policy on the recorded past; nothing is changed."""
    result = await call.request.app[SERVICE].policies.dry_run(call.caller, body, query.days)
    return wire.DryRunView.model_validate(result)


@api.op("GET", "/v1/budgets", scope="read")
async def list_budgets(call: Call) -> wire.BudgetList:
    """List every policy of your team (for admins all) with its spent and reserved dollars."""
    return views.budget_list(*await call.request.app[SERVICE].policies.budgets(call.caller))


@api.op("POST", "/v1/jobs/{job_id}/approve", scope="manage", errors=(404, 409))
async def approve_job(call: Call, job_id: JobRef, body: wire.Approval) -> JobView:
    """Approve a job's cap. The approval lasts as long as the cap is no higher. A job that awaits approval is queued."""
    return views.job(await call.request.app[SERVICE].policies.approve(call.caller, job_id, body.up_to_usd))


@api.op("POST", "/v1/jobs/{job_id}/refuse", scope="manage", status=202, errors=(404, 409))
async def refuse_job(call: Call, job_id: JobRef) -> JobView:
    """Refuse a job that awaits approval; the job is cancelled."""
    return views.job(await call.request.app[SERVICE].policies.refuse(call.caller, job_id))
