"""Writes of the team's pages change exactly what the page showed: policies, approvals, secrets, tokens."""

import re
import threading
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from broker.domain.ids import JobId
from broker.domain.job import Event, Job, JobState
from broker.ports import JobFilter
from broker.reporting.comparison import spec_differences
from broker.store.postgres.policies import PostgresTenantPolicies
from broker.web.pages import compare
from broker.web.pages.team import policies
from broker.web.pages.team.layout import checked
from tests.api.harness import Running
from tests.web.test_team import MANAGER, POLICY, editor, hidden, waiting
from tests.web.visitor import Visitor

ALL_TEAMS = "name: monthly\nbudgets:\n  - limit_usd: 90\n    per: month\n"


@pytest.fixture
async def boss(api: Running) -> AsyncIterator[Visitor]:
    """Yield a browser that is signed in with the scope `manage`."""
    async with Visitor(api) as visitor:
        await visitor.sign_in(await api.token("boss", *MANAGER))
        yield visitor


@pytest.fixture
async def root(api: Running) -> AsyncIterator[Visitor]:
    """Yield an operator's browser."""
    async with Visitor(api) as visitor:
        await visitor.sign_in(await api.token("root", *MANAGER, "admin"))
        yield visitor


async def test_a_policy_of_all_teams_is_opened_and_deleted_as_such(api: Running, root: Visitor) -> None:
    for text in (POLICY.format(usd=50), ALL_TEAMS):
        assert (await root.send("/ui/team/policies", yaml=text, do="apply")).status == 303
    page = (await root.get("/ui/team/policies")).text
    _, address = [link.replace("&amp;", "&") for link in re.findall(r'href="(/ui/team/policies\?[^"]+)"', page)]
    opened = (await root.get(address)).text
    assert "limit_usd: &#39;90&#39;" in opened
    delete = address.replace("policies?", "policies/delete?")
    asked = (await root.get(delete)).text
    assert "Delete the policy monthly of the installation?" in asked
    shown = hidden(asked, "version")
    changed = ALL_TEAMS.replace("90", "95")
    assert (await root.send("/ui/team/policies", yaml=changed, do="apply", **editor(opened))).status == 303
    for version in (shown, "", "x" * 50):
        stale = await root.send(delete, version=version)
        assert (stale.status, "not at version" in stale.text) == (409, True)
    assert len(await api.service.store.policies()) == 2
    version = hidden((await root.get(delete)).text, "version")
    assert (await root.send(delete, version=version)).status == 303
    assert (await root.send(delete, version=version)).status == 409
    (policy,) = await api.service.store.policies()
    assert policy.policy.team == "default"


async def test_an_editor_never_overwrites_a_newer_policy(api: Running, boss: Visitor, root: Visitor) -> None:
    """Two editors hold version 1. The second editor's apply is refused, and the page keeps the text."""
    made = await boss.send("/ui/team/policies", yaml=POLICY.format(usd=50), do="apply")
    opened = editor((await boss.get(made.location)).text)
    assert opened == {"edited_name": "monthly", "edited_team": "default", "edited_version": "1"}
    assert (await root.send("/ui/team/policies", yaml=POLICY.format(usd=60), do="apply", **opened)).status == 303
    for fields, seen in ((opened, "version 1 was edited"), ({}, "it was written as a new policy")):
        stale = await boss.send("/ui/team/policies", yaml=POLICY.format(usd=70), do="apply", **fields)
        assert (stale.status, stale.text.count('id="fault-yaml"')) == (409, 1)
        assert f"the policy monthly of team default is at version 2, but {seen}" in stale.text
        assert "limit_usd: 70" in stale.text
        assert fields == {} or editor(stale.text) == opened
    (policy,) = await api.service.store.policies()
    assert (policy.version, policy.policy.budgets[0].limit_usd) == (2, 60)


async def test_a_dry_run_keeps_the_version_that_was_opened(boss: Visitor) -> None:
    made = await boss.send("/ui/team/policies", yaml=POLICY.format(usd=50), do="apply")
    opened = editor((await boss.get(made.location)).text)
    tried = await boss.send("/ui/team/policies", yaml=POLICY.format(usd=60), do="dry-run", days="3", **opened)
    assert editor(tried.text) == opened
    other = POLICY.format(usd=60).replace("monthly", "other")
    assert (await boss.send("/ui/team/policies", yaml=other, do="apply", **opened)).status == 303  # a new policy


async def test_enter_in_the_days_of_a_dry_run_applies_nothing(boss: Visitor) -> None:
    page = (await boss.get("/ui/team/policies")).text
    form = page[page.index('action="/ui/team/policies"') :]
    assert re.findall(r'name="do" value="([^"]+)"', form)[0] == "dry-run"  # what Enter presses


async def test_an_approval_counts_only_for_the_cap_that_was_shown(
    api: Running, boss: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await waiting(api)
    approve = PostgresTenantPolicies.approve

    async def raised_before(
        self: PostgresTenantPolicies, job_id: JobId, up_to_usd: Decimal, event: Event, **options: Any
    ) -> Job | None:
        raised = Event(job_id=job_id, kind="job.cap_raised", message="cap raised")
        await self.raise_cap(job_id, Decimal(9), raised)
        return await approve(self, job_id, up_to_usd, event, **options)

    monkeypatch.setattr(PostgresTenantPolicies, "approve", raised_before)
    answer = await boss.send(f"/ui/team/approvals/{job}/approve", shown_cap="5.00")
    assert (answer.status, "the cap is $9.0000, not $5.0000" in answer.text) == (409, True)
    (row,) = await api.service.store.jobs(JobFilter())
    assert (row.state, row.approved_usd) == (JobState.AWAITING_APPROVAL, None)


async def test_an_approval_below_the_cap_is_refused_by_the_api_too(api: Running) -> None:
    job, boss = await waiting(api), await api.token("boss", *MANAGER)
    refused = await api.call("POST", f"/v1/jobs/{job}/approve", boss, 422, json={"up_to_usd": "1"})
    assert "$1.0000 is below the cap of $5.0000" in str(refused)
    (row,) = await api.service.store.jobs(JobFilter())
    assert row.state is JobState.AWAITING_APPROVAL


async def test_a_refusal_shows_the_spending_and_needs_a_waiting_job(api: Running, boss: Visitor) -> None:
    job = await waiting(api)
    assert "nothing was spent" in (await boss.get(f"/ui/team/approvals/{job}/refuse")).text
    await boss.send(f"/ui/team/approvals/{job}/approve", shown_cap="5.00")
    assert (await boss.get(f"/ui/team/approvals/{job}/refuse")).status == 409


async def test_a_form_sent_twice_creates_one_token(api: Running, boss: Visitor) -> None:
    key = hidden((await boss.get("/ui/team/tokens")).text, "key")
    fields = {"owner": "ci", "days": "30", "scope-read": "1", "key": key}
    first, second = [await boss.send("/ui/team/tokens", **fields) for _ in range(2)]
    assert (first.status, second.status, "created already" in second.text) == (201, 409, True)
    assert len([token for token in await api.service.store.tokens() if token.owner == "ci"]) == 1


@pytest.mark.parametrize("name", ["%00", "a%20b", "x" * 500])
async def test_a_text_that_is_no_name_of_a_secret_is_not_found(boss: Visitor, name: str) -> None:
    assert (await boss.get(f"/ui/team/secrets/{name}/delete")).status == 404
    assert (await boss.send(f"/ui/team/secrets/{name}/delete")).status == 404


async def test_the_theme_of_an_answer_to_a_write_leads_to_a_page(api: Running, boss: Visitor) -> None:
    job = await waiting(api)
    for path, page in (
        (f"/ui/team/approvals/{job}/approve", "/ui/team/approvals"),
        ("/ui/team/tokens", "/ui/team/tokens"),
        (f"/ui/jobs/{job}/cap", f"/ui/jobs/{job}"),
    ):
        assert hidden((await boss.send(path, cap_usd="x")).text, "next") == page
        assert (await boss.get(page)).status == 200


async def test_policies_and_specs_are_read_outside_the_event_loop(
    api: Running, boss: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def recorded(wanted: Callable[..., Any], *given: Any) -> Any:
        threads.append(threading.current_thread())
        return wanted(*given)

    monkeypatch.setattr(policies, "checked", partial(recorded, checked))
    monkeypatch.setattr(compare, "spec_differences", partial(recorded, spec_differences))
    assert (await boss.send("/ui/team/policies", yaml=POLICY.format(usd=5), do="apply")).status == 303
    assert (await boss.get(f"/ui/compare?jobs={await waiting(api)}")).status == 200
    assert len(threads) == 2
    assert threading.main_thread() not in threads
