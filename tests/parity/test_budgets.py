"""Budgets and approvals through either transport."""

from decimal import Decimal

import pytest

from broker.api.schemas.policies import HoldView, StandingView
from broker.domain.policy import Policy
from broker.domain.tenancy import DEFAULT_TEAM, Tenant
from broker.policy.budgets import Hold
from tests.parity.servers import KINDS, ApiServers
from tests.parity.test_jobs import good
from tests.parity.transport import Refused

POLICY = {
    "name": "limit", "team": DEFAULT_TEAM, "timezone": "Europe/Berlin", "max_gpus": 8, "approval_above_usd": "4.00",
    "budgets": [
        {"limit_usd": "100", "per": "month", "thresholds": [{"at": "0.8", "action": "require_approval"}]},
        {"limit_usd": "20", "per": "day", "window": "rolling"},
    ],
}  # fmt: skip


async def test_budgets_are_equal_over_both_apis(both: ApiServers) -> None:
    rows = both.api.service.store.as_tenant(Tenant(team=DEFAULT_TEAM, owner="ada"))
    await rows.put_policy(Policy.model_validate(POLICY))
    by_http, by_grpc = [(await (await both.transport(kind=kind)).budgets()).items for kind in KINDS]
    assert [_still(one) for one in by_http] == [_still(one) for one in by_grpc]
    (standing,) = by_grpc
    assert (standing.name, standing.user, standing.max_gpus, standing.max_jobs) == ("limit", None, 8, None)
    month, day = standing.budgets
    assert (month.limit_usd, month.per, month.window) == (Decimal(100), "month", "calendar")
    assert [(t.at, t.action, t.reached) for t in month.thresholds] == [(Decimal("0.8"), "require_approval", False)]
    assert (day.window, day.until, day.committed_usd) == ("rolling", None, Decimal(0))


def _still(standing: StandingView) -> str:
    """Return the standing as JSON, without the moments of rolling windows."""
    return standing.model_dump_json(exclude={"budgets": {"__all__": {"since"}}})


async def test_a_quote_states_over_both_apis_what_policies_would_do(both: ApiServers) -> None:
    ada, store = await both.transport(), both.api.service.store
    given = await good(ada)
    transports = [await both.transport(kind=kind) for kind in KINDS]
    assert [(await transport.quote(given)).held for transport in transports] == [None, None]
    await store.put_policy(Policy.model_validate({**POLICY, "approval_above_usd": None, "max_jobs": 0}))
    await store.put_policy(Policy.model_validate({"name": "bobs", "user": "bob", "approval_above_usd": "1"}))
    await store.put_team("web", "")
    await store.put_policy(Policy.model_validate({"name": "webs", "team": "web", "approval_above_usd": "1"}))
    waits = HoldView(hold=Hold.WAIT, policy="limit", reason="waits for policy limit: max_jobs is 0, 0 hold machines")
    assert [(await transport.quote(given)).held for transport in transports] == [waits, waits], (
        "of her team and herself alone"
    )
    await store.put_policy(Policy.model_validate(POLICY))
    asks = HoldView(
        hold=Hold.APPROVAL,
        policy="limit",
        reason="waits for approval: policy limit requires it above a cap of $4.0000",
    )
    assert [(await transport.quote(given)).held for transport in transports] == [asks, asks]
    del given["cap_usd"]  # the proposed one is some cents
    assert [(await transport.quote(given)).held for transport in transports] == [None, None]
    given["resources"] = {"regions": ["nowhere"]}  # none is proposed
    assert [(await transport.quote(given)).held for transport in transports] == [None, None]


async def test_a_job_is_approved_only_with_the_scope_manage(servers: ApiServers) -> None:
    ada, boss = await servers.transport(), await servers.transport("boss", "read", "manage")
    job, _ = await ada.submit(await good(ada))
    with pytest.raises(Refused) as refused:
        await ada.approve(job.id)
    assert refused.value.kind == "forbidden"
    assert (await boss.approve(job.id, "60")).id == job.id
    with pytest.raises(Refused) as refused:
        await boss.approve(job.id, "-1")
    assert set(refused.value.fields) == {"up_to_usd"}
    with pytest.raises(Refused) as refused:
        await boss.refuse(job.id)
    assert refused.value.kind == "conflict"
    events = [e async for e in ada.events(job.id, follow=False)]
    assert [getattr(e, "kind", "") for e in events] == ["job.submitted", "job.approved"]
