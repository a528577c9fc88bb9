"""Calls for policies, budgets and approvals."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from broker.api.schemas.job_list import JobView
from broker.client.transport.http import Calls, LazySchemas, plain

if TYPE_CHECKING:
    from broker.api.schemas import policies as wire
else:
    wire = LazySchemas("policies")


class PolicyCalls(Calls):
    async def policies(self) -> wire.PolicyList:
        return await self._call("GET", "/v1/policies", wire.PolicyList)

    async def apply_policy(self, policy: Mapping[str, Any], *, replaces: int | None = None) -> wire.PolicyView:
        """Store a version of a policy; raise ApiError unless it is at the version `replaces` (None: any)."""
        path, params = _policy(str(policy.get("name"))), plain({"replaces": replaces})
        return await self._call("PUT", path, wire.PolicyView, json=policy, params=params)

    async def delete_policy(self, name: str, *, team: str | None = None) -> None:
        await self._http.read("DELETE", _policy(name), params=plain({"team": team}))

    async def policy_history(self, name: str, *, team: str | None = None) -> wire.PolicyHistory:
        """List all versions of a policy, newest first."""
        params = plain({"team": team})
        return await self._call("GET", f"{_policy(name)}/history", wire.PolicyHistory, params=params)

    async def dry_run_policy(self, policy: Mapping[str, Any], *, days: int = 30) -> wire.DryRunView:
        """Return the effects that a policy would have had in the last `days`."""
        params = plain({"days": days})
        return await self._call("POST", "/v1/policy-dry-run", wire.DryRunView, json=policy, params=params)

    async def budgets(self) -> wire.BudgetList:
        """List policies with their spent and reserved dollars."""
        return await self._call("GET", "/v1/budgets", wire.BudgetList)

    async def approve(self, job: str, *, up_to_usd: Decimal | None = None) -> JobView:
        """Approve the job's cap, or a higher one in advance."""
        body = {"up_to_usd": None if up_to_usd is None else str(up_to_usd)}
        return await self._call("POST", f"/v1/jobs/{quote(job, safe='')}/approve", JobView, json=body)

    async def refuse(self, job: str) -> JobView:
        """Cancel a job that awaits approval."""
        return await self._call("POST", f"/v1/jobs/{quote(job, safe='')}/refuse", JobView)


def _policy(name: str) -> str:
    return f"/v1/policies/{quote(name, safe='')}"
