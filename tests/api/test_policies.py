"""Policies, budgets and approvals over HTTP, over both stores."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from broker.domain.job import AttemptState, JobState
from broker.ports import Change, Charge
from tests.api.harness import Running, spec
from tests.conformance.samples import claimed_job, running

MONTH = {"limit_usd": "100", "per": "month", "window": "rolling"}


def policy(**rules: Any) -> dict[str, Any]:
    return {"name": "limits", "team": "default", **rules}


async def test_a_policy_is_made_changed_listed_and_deleted(api: Running) -> None:
    mia, bob = await api.token("mia", "read", "manage"), await api.token("bob", "read", "submit")
    made = await api.call("PUT", "/v1/policies/limits", mia, 200, json=policy(max_gpus=4, budgets=[MONTH]))
    assert (made["version"], made["changed_by"], made["policy"]["max_gpus"]) == (1, "mia", 4)
    stale = await api.call("PUT", "/v1/policies/limits?replaces=2", mia, 409, json=policy(max_gpus=3))
    assert "the policy limits of team default is at version 1" in stale["detail"]
    await api.call("PUT", "/v1/policies/limits?replaces=1", mia, 200, json=policy(max_gpus=2))
    listed = await api.call("GET", "/v1/policies", bob, 200)
    assert [(one["version"], one["policy"]["max_gpus"]) for one in listed["items"]] == [(2, 2)]
    for method, path in (("PUT", "/v1/policies/limits"), ("POST", "/v1/policy-dry-run")):
        await api.call(method, path, bob, 403, json=policy(max_gpus=1))
    await api.call("DELETE", "/v1/policies/limits", bob, 403)
    await api.call("DELETE", "/v1/policies/limits", mia, 204)
    await api.call("DELETE", "/v1/policies/limits", mia, 404)
    history = await api.call("GET", "/v1/policies/limits/history", bob, 200)
    assert [(one["version"], one["policy"] is None) for one in history["items"]] == [(3, True), (2, False), (1, False)]
    await api.call("GET", "/v1/policies/other/history", bob, 404)


async def test_a_repeated_delete_leaves_the_policy_of_the_installation(api: Running) -> None:
    root = await api.token("root", "read", "admin")
    for team in (None, "default"):
        await api.call("PUT", "/v1/policies/limits", root, 200, json=policy(team=team, max_gpus=9))
    await api.call("DELETE", "/v1/policies/limits", root, 204)
    await api.call("DELETE", "/v1/policies/limits", root, 404)
    listed = await api.call("GET", "/v1/policies", root, 200)
    assert [one["policy"].get("team") for one in listed["items"]] == [None]


async def test_policy_errors_name_the_field(api: Running) -> None:
    mia = await api.token("mia", "read", "manage")

    async def refused(body: dict[str, Any], name: str = "limits") -> list[tuple[str, str]]:
        answer = await api.call("PUT", f"/v1/policies/{name}", mia, 422, json=body)
        return [(one["field"], one["message"]) for one in answer["errors"]]

    zone = await refused(policy(timezone="Europe/Berln", max_gpus=1))
    assert zone[0][0] == "timezone"
    assert "Europe/Berlin" in zone[0][1]
    assert (await refused(policy(budgets=[{**MONTH, "limit_usd": "NaN"}])))[0][0] == "budgets.0.limit_usd"
    assert (await refused(policy(budgets=[{**MONTH, "limit_usd": "-1"}])))[0][0] == "budgets.0.limit_usd"
    assert await refused(policy(max_gpus=1), "other") == [("name", "is limits, but the address says other")]
    assert (await refused(policy(team="web", max_gpus=1)))[0][0] == "team"
    assert (await refused(policy(team=None, max_gpus=1)))[0] == (
        "team", "this policy is more than one team's; yours is team: default",
    )  # fmt: skip
    root = await api.token("root", "admin")
    await api.call("PUT", "/v1/policies/limits", root, 200, json=policy(team=None, max_gpus=9))
    answer = await api.call("PUT", "/v1/policies/limits", root, 422, json=policy(team="nowhere", max_gpus=9))
    assert "no team nowhere" in answer["detail"]
    await api.call("DELETE", "/v1/policies/limits", root, 204)


async def test_budgets_say_what_is_spent_and_held(api: Running) -> None:
    store, ada = api.service.store, await api.token("ada", "read", "manage")
    shares = [{"at": "0.01", "action": "notify"}, {"at": "0.9", "action": "drain"}]
    day = {"limit_usd": "50", "per": "day", "thresholds": shares}
    rules = policy(max_gpus=4, max_jobs=3, approval_above_usd="40", timezone="Asia/Tokyo", budgets=[MONTH, day])
    await api.call("PUT", "/v1/policies/limits", ada, 200, json=rules)
    attempt, job = await running(store)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=datetime.now(UTC), usd=Decimal("2.5"))
    assert await store.charge([charge]) == [True]
    answer = await api.call("GET", "/v1/budgets", ada, 200)
    (one,) = answer["items"]
    assert (one["gpus"], one["max_gpus"], one["jobs"], one["max_jobs"]) == (1, 4, 1, 3)
    month, today = one["budgets"]
    assert [Decimal(month[key]) for key in ("charged_usd", "committed_usd")] == [Decimal("2.5"), Decimal("9.5")]
    assert month["until"] is None
    until = datetime.fromisoformat(today["until"])
    assert (until.hour, until.minute) == (15, 0)  # Tokyo's midnight
    assert [(t["action"], t["reached"]) for t in today["thresholds"]] == [("notify", True), ("drain", False)]
    other = await api.token("eve", "read", "manage", team="web")
    assert (await api.call("GET", "/v1/budgets", other, 200))["items"] == []


async def test_a_job_is_approved_or_refused_by_a_manager(api: Running) -> None:
    store = api.service.store
    ada, mia = await api.token("ada", "read", "submit"), await api.token("mia", "read", "manage")
    ref = (await api.upload(ada))["ref"]

    async def waiting() -> str:
        made = await api.call("POST", "/v1/jobs", ada, 202, json=spec(ref))
        job = await claimed_job(store)
        change = Change(job=(job, type(job)(**{**vars(job), "state": JobState.AWAITING_APPROVAL, "reason": "asks"})))
        assert await store.apply([change]) == [True]
        return str(made["id"])

    first, second = await waiting(), await waiting()
    await api.call("POST", f"/v1/jobs/{first}/approve", ada, 403, json={})
    approved = await api.call("POST", f"/v1/jobs/{first}/approve", mia, 200, json={"up_to_usd": "20"})
    assert (approved["state"], approved["reason"]) == ("queued", "")
    await api.call("POST", f"/v1/jobs/{first}/approve", mia, 422, json={"up_to_usd": "NaN"})
    await api.call("POST", f"/v1/jobs/{first}/refuse", mia, 409)
    refused = await api.call("POST", f"/v1/jobs/{second}/refuse", mia, 202)
    assert refused["stop_requested"]
    eve = await api.token("eve", "manage", team="web")
    for what in ("approve", "refuse"):
        await api.call("POST", f"/v1/jobs/{first}/{what}", eve, 404, json={})
    events = await api.call("GET", f"/v1/jobs/{first}/events?follow=0", ada, 200)
    assert [event["message"] for event in events["items"]][-1] == "approved up to $20.00 by mia"


async def test_a_cap_above_what_the_budget_leaves_is_a_conflict(api: Running) -> None:
    store, ada = api.service.store, await api.token("ada", "read", "submit", "manage")
    await api.call("PUT", "/v1/policies/limits", ada, 200, json=policy(budgets=[{**MONTH, "limit_usd": "12"}]))
    _, job = await running(store, AttemptState.TRAINING)
    await api.call("PATCH", f"/v1/jobs/{job.id}", ada, 200, json={"cap_usd": "12"})
    refused = await api.call("PATCH", f"/v1/jobs/{job.id}", ada, 409, json={"cap_usd": "13"})
    assert "waits for policy limits: the budget of $12.00 a rolling month" in refused["detail"]


async def test_a_dry_run_reports_the_launches_that_a_policy_would_have_held(api: Running) -> None:
    store, ada = api.service.store, await api.token("ada", "read", "manage")
    attempt, job = await running(store)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=datetime.now(UTC), usd=Decimal("2.5"))
    assert await store.charge([charge]) == [True]
    done = await api.call("POST", "/v1/policy-dry-run?days=90", ada, 200, json=policy(max_gpus=8))
    assert (done["launches"] in (0, 1), Decimal(done["usd_spent"]), Decimal(done["usd_not_spent"])) == (
        True,
        Decimal("2.5"),
        0,
    )
    assert await store.policies() == []
