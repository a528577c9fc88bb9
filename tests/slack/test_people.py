"""Rights of Slack users, their owners in the broker, and the life of their links: over both stores."""

from datetime import timedelta

from broker.api.handlers import jobs, policies, spending
from broker.api.service.slack_actions import BUTTONS, COMMANDS
from broker.domain.job import JobState
from broker.ports import Token
from tests.slack.incoming import Rig, either_store, secured, signed_desk
from tests.slack.server import WORKSPACE

__all__ = ["either_store", "signed_desk"]


async def test_an_unlinked_user_learns_how_to_be_linked(rig: Rig) -> None:
    job = await rig.job()
    answer = await rig.press(job, "cancel", user="U0BOB")
    assert "gpubroker slack link U0BOB --owner NAME" in answer
    assert not (await rig.now(job)).stop_requested


async def test_the_scopes_of_the_link_hold(rig: Rig) -> None:
    job = await rig.job(JobState.AWAITING_APPROVAL)
    await rig.link("read")
    queued = await rig.job()
    assert "lacks the scope 'submit'" in await rig.press(queued, "cancel")
    assert "lacks the scope 'submit'" in await rig.press(queued, "extend")
    await rig.link("submit")
    assert "lacks the scope 'manage'" in await rig.press(job, "approve")
    assert "lacks the scope 'read'" in await rig.command("status")
    assert not (await rig.now(queued)).stop_requested


async def test_each_action_needs_the_same_scope_as_over_http() -> None:
    scopes = {
        f"{op.method} {op.path}": op.scope for api in (jobs.api, policies.api, spending.api) for op in api.operations
    }
    job = "/v1/jobs/{job_id}"
    over_http = {
        "gpubroker.approve": f"POST {job}/approve", "gpubroker.refuse": f"POST {job}/refuse",
        "gpubroker.extend": f"PATCH {job}", "gpubroker.cancel": f"POST {job}/cancel",
        "gpubroker.retry": f"POST {job}/retry", "status": "GET /v1/jobs", "spend": "GET /v1/spend",
        "cancel": f"POST {job}/cancel",
    }  # fmt: skip
    assert {name: scope for name, (scope, _) in {**BUTTONS, **COMMANDS}.items()} == {
        name: scopes[asked] for name, asked in over_http.items()
    }


async def test_a_user_without_read_scope_sees_no_job(rig: Rig) -> None:
    """The refusal shows no job: not by a name of several jobs, by an unused name, or by the message that a click
    updates.
    """
    job, twin = await rig.job(), await rig.job()
    await rig.link("manage")
    for text in (f"cancel {job.id}", "cancel tune", "cancel nothing"):
        assert "lacks the scope 'submit'" in await rig.command(text)
    await rig.link("submit")
    for text in ("cancel tune", f"cancel {job.id[:6]}", "cancel nothing", f"status {job.id}"):
        answer = await rig.command(text)
        assert "lacks the scope 'read'" in answer
        assert twin.id not in answer
    assert "lacks the scope 'manage'" in await rig.press(job, "approve", value="a" * 13)
    assert "is stopping" in await rig.press(job, "cancel"), "with the id it may, as over HTTP"
    assert not any(a["replace_original"] for answers in rig.there.responses.values() for a in answers)


async def test_a_link_outlives_its_creator_but_not_its_owner(rig: Rig) -> None:
    store, now = rig.store, rig.api.service.clock.now()
    boss = await rig.api.token("boss", "read", "submit", "manage")
    made = {"user": "U0BOB", "owner": "bob", "scopes": ["read"]}
    await rig.api.call("POST", "/v1/slack/users", boss, 201, json=made)
    for known in await store.tokens():
        await store.delete_token(known.id)
    assert "nothing runs" in await rig.command("status", user="U0BOB"), "bob needs no token of his own"

    def token(name: str, ended_days_ago: float) -> Token:
        over = now - timedelta(days=ended_days_ago)
        return Token(id=name, team="default", owner="bob", scopes=("read",), created_at=now, expires_at=over)

    await store.put_token(token("old", 3), "old")
    await store.put_token(token("older", 9), "older")
    answer = await rig.command("status", user="U0BOB")
    assert f"the access of bob to gpubroker ended on {now - timedelta(days=3):%Y-%m-%d}" in answer
    await store.put_token(token("new", -1), "new")
    assert "nothing runs" in await rig.command("status", user="U0BOB")
    for name in ("old", "older", "new"):
        await store.delete_token(name)
    assert "not linked" in await rig.command("status", user="U0BOB"), "revoked is gone for good"


async def test_another_teams_app_acts_for_its_own_users_only(rig: Rig) -> None:
    """The operator of a team's Slack app has its secret, and could sign for any user of the workspace."""
    job = await rig.job()
    await rig.link("read", "submit", "admin")
    await rig.store.put_team("evil", "")
    other = "evil signing secret of their own"
    await rig.store.add_channel(secured(other, id="ch2", name="evil", team="evil"))
    rig.incoming._channels = (float("-inf"), ())
    assert "not linked" in await rig.command(f"cancel {job.id}", secret=other)
    await rig.link("read", "submit", "admin", team="evil", owner="mallory")
    assert "no job" in await rig.command(f"cancel {job.id}", secret=other)
    assert not (await rig.now(job)).stop_requested


async def test_a_user_in_two_teams_is_asked_which_one(rig: Rig) -> None:
    await rig.store.put_team("nlp", "")
    await rig.store.add_channel(secured(id="ch2", name="nlp", team="nlp", config={"channel": "C0NLP"}))
    rig.incoming._channels = (float("-inf"), ())
    await rig.link()
    await rig.link(team="nlp", owner="annie")
    mine = await rig.job()
    assert mine.id in await rig.command("status")
    await rig.store.delete_channel("ch1")
    await rig.store.add_channel(secured(id="ch3", name="else", team=None, config={"channel": "C0ELSE"}))
    rig.incoming._channels = (float("-inf"), ())
    assert "several teams" in await rig.command("status")


async def test_links_are_made_by_managers_and_checked_with_slack(rig: Rig) -> None:
    manager = await rig.api.token("boss", "read", "submit", "manage")
    made = await rig.api.call(
        "POST", "/v1/slack/users", manager, 201, json={"user": "U0BOB", "owner": "bob", "scopes": ["read"]}
    )
    assert (made["name"], made["workspace"], made["team"]) == ("bob", WORKSPACE, "default")
    await rig.api.call("POST", "/v1/slack/users", manager, 422, json={"user": "U0NOBODY", "owner": "bob"})
    await rig.api.call("POST", "/v1/slack/users", manager, 403,
                        json={"user": "U0BOB", "owner": "bob", "scopes": ["admin"]})  # fmt: skip
    await rig.api.call("POST", "/v1/slack/users", manager, 422, json={"user": "U0BOB", "owner": "bob", "team": "x"})
    assert "nothing runs" in await rig.command("status", user="U0BOB")
    listed = await rig.api.call("GET", "/v1/slack/users", manager, 200)
    assert [u["user"] for u in listed["items"]] == ["U0BOB"]
    await rig.api.call("GET", "/v1/slack/users", await rig.api.token("bob", "submit"), 403)
    await rig.api.call("DELETE", "/v1/slack/users/U0BOB", manager, 204)
    await rig.api.call("DELETE", "/v1/slack/users/U0BOB", manager, 404)
    assert "not linked" in await rig.command("status", user="U0BOB")
