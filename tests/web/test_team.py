"""The team's pages: tokens, secrets, channels, policies, approvals, audit."""

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from broker.domain.job import JobState
from broker.domain.tenancy import DEFAULT_TEAM, Scope, Tenant
from broker.ports import Change, JobFilter
from tests.api.harness import Running, spec
from tests.web.test_security import HOSTILE
from tests.web.visitor import Visitor

TABS = ("tokens", "secrets", "channels", "policies", "approvals", "audit")
MANAGER: tuple[Scope, ...] = ("read", "submit", "manage")


@pytest.fixture
async def boss(api: Running) -> AsyncIterator[Visitor]:
    """Yield a browser that is signed in with the scope `manage`."""
    async with Visitor(api) as visitor:
        await visitor.sign_in(await api.token("boss", *MANAGER))
        yield visitor


async def secrets_of(api: Running, owner: str) -> Mapping[str, bytes]:
    return await api.service.store.as_tenant(Tenant(team=DEFAULT_TEAM, owner=owner)).secrets(owner)


def hidden(text: str, name: str) -> str:
    """Return the value of a form's hidden field."""
    (value,) = set(re.findall(rf'name="{name}" value="([^"]*)"', text))
    return str(value)


def editor(text: str) -> dict[str, str]:
    """Return the hidden fields of the policy editor: the policy and the version that it was filled with."""
    return {name: hidden(text, name) for name in ("edited_name", "edited_team", "edited_version")}


def shown_secret(text: str) -> str:
    (secret,) = re.findall(r'class="secret" readonly value="([^"]+)"', text)
    return str(secret)


async def test_a_token_is_shown_once_ends_by_itself_and_is_revoked(api: Running, boss: Visitor) -> None:
    page = await boss.send("/ui/team/tokens", owner="ci", days="90", note="builds", **{"scope-read": "1"})
    assert page.status == 201
    text = shown_secret(page.text)
    (token,) = [t for t in await api.service.store.tokens() if t.owner == "ci"]
    assert (token.scopes, token.note) == (("read",), "builds")
    assert token.expires_at is not None
    assert abs(token.expires_at - api.service.clock.now() - timedelta(days=90)) < timedelta(minutes=5)
    assert text not in (listed := (await boss.get("/ui/team/tokens")).text)
    assert '<option value="90" selected>' in listed
    await api.call("GET", "/v1/me", me := {"Authorization": f"Bearer {text}"}, 200)
    asked = await boss.get(f"/ui/team/tokens/{token.id}/revoke")
    assert "refused at once" in asked.text
    assert (await boss.send(f"/ui/team/tokens/{token.id}/revoke")).location == "/ui/team/tokens"
    await api.call("GET", "/v1/me", me, 401)
    assert token.id not in (await boss.get("/ui/team/tokens")).text


async def test_no_token_is_offered_that_outlives_the_one_that_asks(api: Running) -> None:
    ends = api.service.clock.now() + timedelta(days=20)
    async with Visitor(api) as visitor:
        await visitor.sign_in(await api.token("short", *MANAGER, expires_at=ends))
        page = (await visitor.get("/ui/team/tokens")).text
        assert re.findall(r'<option value="(\d*)"', page) == ["7", ""]
        await visitor.send("/ui/team/tokens", owner="ci", days="", **{"scope-read": "1"})
        refused = await visitor.send("/ui/team/tokens", owner="ci", days="90", **{"scope-read": "1"})
    assert (refused.status, 'id="fault-expires_at"' in refused.text) == (422, True)
    (token,) = [t for t in await api.service.store.tokens() if t.owner == "ci"]
    assert token.expires_at == ends


async def test_a_refused_form_shows_the_apis_line_next_to_the_field(boss: Visitor) -> None:
    for fields, status, field in (
        ({"owner": "no name!", "scope-read": "1"}, 422, "owner"),
        ({"owner": "ci"}, 422, "scopes"),
        ({"owner": "ci", "scope-admin": "1"}, 403, "scopes"),
        ({"owner": "ci", "scope-read": "1", "team": "other"}, 422, "team"),
    ):
        answer = await boss.send("/ui/team/tokens", **fields)
        assert answer.status == status, fields
        if field != "team":  # only operators have this field
            assert f'id="fault-{field}"' in answer.text, fields
    assert 'value="no name!"' in (await boss.send("/ui/team/tokens", owner="no name!")).text


async def test_a_secret_is_set_by_name_and_never_shown(api: Running, ada: Visitor) -> None:
    assert "Set <code>HF_TOKEN</code> above" in (await ada.get("/ui/team/secrets")).text
    value = "hf_very-secret value "
    assert (await ada.send("/ui/team/secrets", name="HF_TOKEN", value=value)).status == 303
    sealed = (await secrets_of(api, "ada"))["HF_TOKEN"]
    assert api.service.box.open(sealed) == value
    page = (await ada.get("/ui/team/secrets")).text
    assert "HF_TOKEN" in page
    refused = await ada.send("/ui/team/secrets", name="1 BAD", value=value)
    assert (refused.status, 'id="fault-name"' in refused.text) == (422, True)
    large = await ada.send("/ui/team/secrets", name="BIG", value=value * 4000)
    assert (large.status, 'id="fault-value"' in large.text) == (422, True)
    assert "very-secret" not in page + refused.text + large.text
    assert (await ada.send("/ui/team/secrets/HF_TOKEN/delete")).status == 303
    assert await secrets_of(api, "ada") == {}
    assert (await ada.send("/ui/team/secrets/HF_TOKEN/delete")).status == 404


async def test_a_channel_is_added_tested_stopped_and_removed(api: Running, boss: Visitor) -> None:
    url = "http://127.0.0.1:9/hook?key=very-secret"
    bad = await boss.send("/ui/team/channels", kind="webhook", name="ci", url="ftp://x", events="nothing!")
    assert bad.status == 422
    assert 'id="fault-events"' in bad.text
    made = await boss.send("/ui/team/channels", kind="webhook", name="ci", url=url, events="job.*, budget.*")
    assert made.status == 201
    secret = shown_secret(made.text)
    again = await boss.send("/ui/team/channels", kind="webhook", name="ci", url=url)
    assert (again.status, "there is a channel ci already" in again.text) == (409, True)
    ((path),) = set(re.findall(r'href="(/ui/team/channels/[a-z2-7]{13})"', (await boss.get("/ui/team/channels")).text))
    tested = await boss.send(f"{path}/test")
    assert "was not delivered" in tested.text
    version = hidden((await boss.get(path)).text, "version")
    rotated = shown_secret((await boss.send(f"{path}/rotate", version=version)).text)
    assert rotated != secret
    again = await boss.send(f"{path}/rotate", version=version)
    assert (again.status, "has a newer signing secret" in again.text) == (409, True)
    await boss.send(f"{path}/switch", enabled="0")
    page = (await boss.get(path)).text
    assert "disabled by boss" in page
    assert "job.*, budget.*" in page
    for text in (bad.text, again.text, tested.text, page):
        assert "very-secret" not in text
        assert secret not in text
    assert (await boss.send(f"{path}/remove")).status == 303
    assert (await boss.get(path)).status == 404


POLICY = "name: monthly\nteam: default\nbudgets:\n  - limit_usd: {usd}\n    per: month\n"


async def test_a_policy_is_tried_applied_changed_and_deleted(api: Running, boss: Visitor, ada: Visitor) -> None:
    tried = await boss.send("/ui/team/policies", yaml=POLICY.format(usd=50), do="dry-run", days="30")
    assert "It would have changed nothing." in tried.text
    assert "limit_usd: 50" in tried.text  # the form is kept
    assert await api.service.store.policies() == []
    page = await boss.get("/ui/team/policies")
    for usd in (50, 70):
        sent = await boss.send("/ui/team/policies", yaml=POLICY.format(usd=usd), do="apply", **editor(page.text))
        assert sent.status == 303
        page = await boss.get(sent.location)
    edited = page.text
    assert "$70.00 per month" in edited
    assert "limit_usd: '70'" in edited or "limit_usd: &#39;70&#39;" in edited
    assert edited.count("<td>stored</td>") == 2
    assert "Apply to every launch" not in (await ada.get(sent.location)).text
    assert (await ada.send("/ui/team/policies", yaml=POLICY.format(usd=9), do="apply")).status == 403
    assert (await boss.send("/ui/team/policies/delete?name=monthly&team=default", version="2")).status == 303
    assert await api.service.store.policies() == []


async def test_a_wrong_policy_is_refused_with_the_apis_lines(boss: Visitor) -> None:
    for text, part in (
        ("name: x\nteam: default\nmax_gpu: 3\n", "max_gpu"),
        ("name: [", "not YAML"),
        ("name: x\nmax_gpus: 3\n", "yours is team: default"),
    ):
        answer = await boss.send("/ui/team/policies", yaml=text, do="apply")
        assert (answer.status, 'id="fault-yaml"' in answer.text) == (422, True), text
        assert part in answer.text
    days = await boss.send("/ui/team/policies", yaml=POLICY.format(usd=5), do="dry-run", days="900")
    assert (days.status, 'id="fault-days"' in days.text) == (422, True)


async def waiting(api: Running) -> str:
    """Return a job that awaits approval."""
    boss, ada = await api.token("boss", *MANAGER), await api.token("ada")
    policy = {"name": "approval", "team": "default", "approval_above_usd": "2"}
    await api.call("PUT", "/v1/policies/approval", boss, 200, json=policy)
    job = await api.call("POST", "/v1/jobs", ada, 202, json=spec((await api.upload(ada))["ref"]))
    (queued,) = await api.service.store.jobs(JobFilter())
    held = replace(queued, state=JobState.AWAITING_APPROVAL, reason="the cap of $5.00 is above $2.00")
    assert await api.service.store.apply([Change(job=(queued, held))]) == [True]
    return str(job["id"])


async def test_a_job_is_approved_only_at_the_cap_that_was_shown(api: Running, boss: Visitor, ada: Visitor) -> None:
    assert "No job awaits approval" in (await ada.get("/ui/team/approvals")).text
    job = await waiting(api)
    assert "the scope <code>manage</code> can approve" in (await ada.get("/ui/team/approvals")).text
    page = (await boss.get("/ui/team/approvals")).text
    assert "the cap of $5.00 is above $2.00" in page
    (shown,) = re.findall(r'name="shown_cap" value="([^"]*)"', page)
    stale = await boss.send(f"/ui/team/approvals/{job}/approve", shown_cap="4")
    assert (stale.status, "the cap is $5.0000, not $4.0000" in stale.text) == (409, True)
    low = await boss.send(f"/ui/team/approvals/{job}/approve", shown_cap=shown, up_to_usd="1")
    assert (low.status, "$1.0000 is below the cap of $5.0000" in low.text) == (422, True)
    wrong = await boss.send(f"/ui/team/approvals/{job}/approve", shown_cap=shown, up_to_usd="much")
    assert (wrong.status, f'id="fault-{job}"' in wrong.text) == (422, True)
    assert (await boss.send(f"/ui/team/approvals/{job}/approve", shown_cap=shown, up_to_usd="7")).status == 303
    (row,) = await api.service.store.jobs(JobFilter())
    assert (row.state, row.approved_usd) == (JobState.QUEUED, Decimal(7))


async def test_a_refused_job_is_cancelled(api: Running, boss: Visitor) -> None:
    job = await waiting(api)
    assert "Refuse and cancel" in (await boss.get(f"/ui/team/approvals/{job}/refuse")).text
    assert (await boss.send(f"/ui/team/approvals/{job}/refuse")).status == 303
    (row,) = await api.service.store.jobs(JobFilter())
    assert row.stop_requested


async def test_the_audit_shows_who_did_what_with_filters_and_pages(api: Running, boss: Visitor) -> None:
    await waiting(api)
    await boss.send("/ui/team/secrets", name="HF_TOKEN", value="very-secret")
    page = (await boss.get("/ui/team/audit")).text
    for action in ("job.submit", "policy.", "secret."):
        assert action in page, action
    assert "very-secret" not in page
    assert "job.submit</td>" in page
    assert "job.submit</td>" not in (await boss.get("/ui/team/audit?action=policy")).text
    assert "No entry matches" in (await boss.get("/ui/team/audit?actor=eve")).text
    wrong = await boss.get("/ui/team/audit?since=yesterday")
    assert (wrong.status, 'id="fault-since"' in wrong.text) == (422, True)
    assert (await boss.get("/ui/team/audit?cursor=x")).status == 422


async def test_things_of_another_team_do_not_exist(api: Running, boss: Visitor) -> None:
    theirs = await api.token("bob", *MANAGER, team="other")
    job = await api.call("POST", "/v1/jobs", theirs, 202, json=spec((await api.upload(theirs))["ref"]))
    hook = {"kind": "webhook", "name": "hook", "secrets": {"url": "http://127.0.0.1:9/"}}
    channel = (await api.call("POST", "/v1/channels", theirs, 201, json=hook))["id"]
    rule = {"name": "rule", "team": "other", "max_gpus": 1}
    await api.call("PUT", "/v1/policies/rule", theirs, 200, json=rule)
    await api.call("PUT", "/v1/secrets/THEIRS", theirs, 204, json={"value": "x"})
    (token,) = [t.id for t in await api.service.store.tokens() if t.owner == "bob"]
    for path, writes in (
        (f"/ui/team/tokens/{token}", ["revoke"]),
        ("/ui/team/secrets/THEIRS", ["delete"]),
        (f"/ui/team/channels/{channel}", ["", "test", "switch", "rotate", "remove"]),
        (f"/ui/team/approvals/{job['id']}", ["approve", "refuse"]),
    ):
        for write in writes:
            address = f"{path}/{write}".rstrip("/")
            if write in ("", "revoke", "delete", "remove", "refuse"):
                assert (await boss.get(address)).status == 404, address
            if write:
                assert (await boss.send(address, shown_cap="5.00")).status == 404, address
    for query in ("name=rule&team=other", "name=rule", "name=%00", "name=rule&team=%00"):
        assert (await boss.get(f"/ui/team/policies?{query}")).status == 404, query
        assert (await boss.send(f"/ui/team/policies/delete?{query}")).status == 404, query
    for tab in TABS:
        text = (await boss.get(f"/ui/team/{tab}")).text
        for name in (str(job["id"]), channel, token, "rule", "THEIRS", "bob"):
            assert name not in text, (tab, name)


async def test_tabs_need_the_scopes_of_the_api(api: Running, ada: Visitor) -> None:
    assert (await ada.get("/ui/team")).location == "/ui/team/secrets"
    for tab in ("tokens", "channels", "audit"):
        answer = await ada.get(f"/ui/team/{tab}")
        assert (answer.status, "lacks the scope" in answer.text) == (403, True), tab
    text = (await ada.get("/ui/team/secrets")).text
    assert re.findall(r'href="/ui/team/(\w+)"', text) == ["secrets", "policies", "approvals"]
    async with Visitor(api) as reader:
        await reader.sign_in(await api.token("eve", "read"))
        assert "Set the secret" not in (await reader.get("/ui/team/secrets")).text
        assert (await reader.send("/ui/team/secrets", name="A", value="b")).status == 403


async def test_a_write_from_another_site_is_refused(api: Running, boss: Visitor) -> None:
    job = await waiting(api)
    evil = {"Sec-Fetch-Site": "cross-site"}
    for path in ("tokens", "secrets", "channels", "policies", f"approvals/{job}/approve"):
        assert (await boss.post(f"/ui/team/{path}", evil, owner="x", name="X", value="x")).status == 403, path


async def test_hostile_texts_are_escaped(api: Running, boss: Visitor) -> None:
    await boss.send("/ui/team/tokens", owner="ci", note=HOSTILE, **{"scope-read": "1"})
    await boss.send("/ui/team/channels", kind="webhook", name="ci", url="http://127.0.0.1:9/", events=HOSTILE)
    texts = [(await boss.get(f"/ui/team/{tab}")).text for tab in TABS]
    texts += [(await boss.send("/ui/team/policies", yaml=f"name: '{HOSTILE}'", do="apply")).text]
    texts += [(await boss.send("/ui/team/tokens", owner=HOSTILE, note=HOSTILE)).text]
    for text in texts:
        assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in texts[0]
