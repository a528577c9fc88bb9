"""Clicks and commands, signed as Slack signs them, against the real API over both stores."""

import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode

import pytest

from broker.api.slack import SLACK
from broker.api.usecases.slack import Slack as Incoming
from broker.clock import SystemClock
from broker.domain.channel import Channel, Snapshot
from broker.domain.job import RESTING_JOB_STATES, Job, JobState
from broker.domain.slack import SlackUser
from broker.domain.tenancy import Scope, Tenant
from broker.notify.slack import SlackNotifier
from broker.notify.slack_app import SlackApp
from broker.notify.slack_blocks import buttons, extended
from broker.ports import AuditFilter, Store
from broker.store.memory import MemoryStore
from broker.store.postgres import PostgresStore
from tests.api.harness import Running, memory_blobs, serving
from tests.conformance.samples import START, make_job
from tests.slack.conftest import BOX, channel
from tests.slack.server import BOT_TOKEN, WORKSPACE, Slack, slack

SECRET = "8f742231b10e8888abcd99yyyzzz85a5"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def secured(secret: str = SECRET, **changes: Any) -> Channel:
    sealed = BOX.seal(json.dumps({"bot_token": BOT_TOKEN, "signing_secret": secret, "app_token": "xapp-test-app"}))
    return channel(**{"sealed": sealed, **changes})


@dataclass
class Desk:
    there: Slack
    api: Running
    store: Store
    incoming: Incoming

    async def post(
        self,
        body: bytes,
        *,
        secret: str = SECRET,
        age_s: float = 0,
        status: int = 200,
        headers: Mapping[str, str] = FORM,
    ) -> dict[str, Any]:
        at = f"{SystemClock().now().timestamp() - age_s:.0f}"
        mac = hmac.new(secret.encode(), f"v0:{at}:".encode() + body, hashlib.sha256).hexdigest()
        signed = {"X-Slack-Request-Timestamp": at, "X-Slack-Signature": f"v0={mac}", **FORM, **headers}
        answer = await self.api.call("POST", "/v1/slack", signed, status, data=body)
        await self.incoming.close()
        return answer

    async def press(self, job: Job, action: str, *, value: str | None = None, user: str = "U0ANN", **how: Any) -> str:
        """What the person is told."""
        offered = {b["action_id"]: b["value"] for b in buttons(job)}
        url = self.there.response_url()
        payload = {
            "type": "block_actions", "user": {"id": user, "team_id": WORKSPACE}, "team": {"id": WORKSPACE},
            "channel": {"id": "C0JOBS"}, "response_url": url,
            "actions": [
                {"type": "button", "action_id": f"gpubroker.{action}",
                 "value": offered[f"gpubroker.{action}"] if value is None else value}
            ],
        }  # fmt: skip
        await self.post(urlencode({"payload": json.dumps(payload)}).encode(), **how)
        return self.said(url)

    async def command(self, text: str, *, user: str = "U0ANN", **how: Any) -> str:
        url = self.there.response_url()
        form = {
            "command": "/gpubroker", "text": text, "user_id": user, "team_id": WORKSPACE, "channel_id": "C0JOBS",
            "response_url": url,
        }  # fmt: skip
        await self.post(urlencode(form).encode(), **how)
        return self.said(url)

    def answers(self, url: str) -> list[dict[str, Any]]:
        return self.there.responses[url.rsplit("/", 1)[-1]]

    def said(self, url: str) -> str:
        own = [a for a in self.answers(url) if not a["replace_original"]]
        return "\n".join(a["blocks"][0]["text"]["text"] for a in own)

    async def job(self, state: JobState = JobState.QUEUED, **changes: Any) -> Job:
        ended = {"finished_at": START} if state in RESTING_JOB_STATES else {}
        made = make_job(state=state, **ended, **changes)
        job, _ = await self.store.submit(made, key=None, body_sha256="", events=[])
        return job

    async def link(self, *scopes: Scope, user: str = "U0ANN", team: str = "default", owner: str = "ann") -> None:
        await self.store.put_slack_user(
            SlackUser(team=team, workspace=WORKSPACE, user=user, owner=owner, scopes=scopes or ("read", "submit"))
        )

    async def now(self, job: Job) -> Job:
        found = await self.store.job(job.id)
        assert found is not None
        return found


@asynccontextmanager
async def desk_on(store: Store) -> AsyncIterator[Desk]:
    async with slack() as there, serving(store, memory_blobs()) as api:
        api_url = f"{there.url}/api/"
        clock = SystemClock()
        notifier = SlackNotifier(BOX, clock, _no_curve, api_url=api_url)
        incoming = Incoming(api.service, SlackApp(notifier, BOX, clock, api_url=api_url))
        api.app._state[SLACK] = incoming  # the harness serves without Slack
        await store.add_channel(secured())
        yield Desk(there, api, store, incoming)
        await notifier.close()


async def _no_curve(job: Job) -> tuple[tuple[int, float], ...]:
    return ()


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest, postgres_dsn: str) -> AsyncIterator[Store]:
    if request.param == "memory":
        made: Store = MemoryStore(SystemClock())
    else:
        made = await PostgresStore.connect(postgres_dsn)
    yield made
    await made.close()


@pytest.fixture
async def desk(store: Store) -> AsyncIterator[Desk]:
    async with desk_on(store) as made:
        yield made


# ---------------------------------------------------------------------------------------------------------- signatures


async def test_only_slack_is_heard(desk: Desk) -> None:
    job = await desk.job()
    await desk.link()
    body = urlencode({"command": "/gpubroker", "text": f"cancel {job.id}", "user_id": "U0ANN", "team_id": WORKSPACE,
                      "channel_id": "C0JOBS", "response_url": desk.there.response_url()}).encode()  # fmt: skip
    await desk.post(body, secret="another secret of 32 characters..", status=401)
    await desk.post(body, age_s=301, status=401)
    await desk.post(body, age_s=-301, status=401)
    await desk.post(body, status=401, headers={"X-Slack-Signature": "v0=" + "0" * 64})
    for bad in ("", "v0=é", "nonsense"):
        await desk.post(body, status=401, headers={"X-Slack-Signature": bad})
    for bad in ("", "soon", "1e9", "-1"):
        await desk.post(body, status=401, headers={"X-Slack-Request-Timestamp": bad})
    await desk.post(b"\xff\xfe", status=401, secret="another secret of 32 characters..")
    assert not (await desk.now(job)).stop_requested


async def test_a_byte_that_changed_on_the_way_is_noticed(desk: Desk) -> None:
    at = f"{SystemClock().now().timestamp():.0f}"
    mac = hmac.new(SECRET.encode(), f"v0:{at}:text=status".encode(), hashlib.sha256).hexdigest()
    headers = {"X-Slack-Request-Timestamp": at, "X-Slack-Signature": f"v0={mac}", **FORM}
    await desk.api.call("POST", "/v1/slack", headers, 401, data=b"text=cancel")


async def test_a_request_counts_once_among_all_brokers(desk: Desk, store: Store) -> None:
    at = f"{SystemClock().now().timestamp():.0f}"
    body = b"ssl_check=1&token=x"
    mac = hmac.new(SECRET.encode(), f"v0:{at}:".encode() + body, hashlib.sha256).hexdigest()
    headers = {"X-Slack-Request-Timestamp": at, "X-Slack-Signature": f"v0={mac}", **FORM}
    await desk.api.call("POST", "/v1/slack", headers, 200, data=body)
    again = await desk.api.call("POST", "/v1/slack", headers, 409, data=body)
    assert "answered before" in again["detail"]


async def test_nonsense_with_a_good_signature_is_refused(desk: Desk) -> None:
    for body in (b"payload=%7B", b"payload=[]", b"payload=1", b"payload=" + b"[" * 5000, b"%ff=%ff&payload=", b"x"):
        assert "Slack" in (await desk.post(body, status=422))["detail"]
    for payload in ({"type": "block_actions", "actions": [1]}, {"type": "block_actions", "actions": [{}], "user": 3},
                    {"command": "/gpubroker"}):  # fmt: skip
        await desk.post(urlencode({"payload": json.dumps(payload)}).encode(), status=422)
    await desk.post(urlencode({"payload": '{"type": "view_submission"}'}).encode())
    await desk.api.call("POST", "/v1/slack", {"Content-Type": "application/json"}, 415, data=b"{}")


async def test_answers_go_to_slack_only(desk: Desk) -> None:
    """Even a signed request cannot make the broker call another address."""
    url = desk.there.response_url()
    for other in (url.replace("127.0.0.1", "localhost"), url.replace("http://", "https://"), "file:///etc/passwd"):
        form = {"command": "/gpubroker", "text": "help", "user_id": "U0ANN", "team_id": WORKSPACE,
                "channel_id": "C0JOBS", "response_url": other}  # fmt: skip
        await desk.post(urlencode(form).encode())
    assert desk.answers(url) == []


# ------------------------------------------------------------------------------------------------------------- people


async def test_a_stranger_is_told_how_to_be_linked(desk: Desk) -> None:
    job = await desk.job()
    said = await desk.press(job, "cancel", user="U0BOB")
    assert "gpubroker slack link U0BOB --owner NAME" in said
    assert not (await desk.now(job)).stop_requested


async def test_the_scopes_of_the_link_hold(desk: Desk) -> None:
    job = await desk.job(JobState.AWAITING_APPROVAL)
    await desk.link("read")
    queued = await desk.job()
    assert "lacks the scope 'submit'" in await desk.press(queued, "cancel")
    assert "lacks the scope 'submit'" in await desk.press(queued, "extend")
    await desk.link("submit")
    assert "lacks the scope 'manage'" in await desk.press(job, "approve")
    assert "lacks the scope 'read'" in await desk.command("status")
    assert not (await desk.now(queued)).stop_requested


async def test_another_teams_app_speaks_for_its_own_people_only(desk: Desk) -> None:
    """Whoever runs a team's Slack app knows its secret, and could sign for anybody of the workspace."""
    job = await desk.job()
    await desk.link("read", "submit", "admin")
    await desk.store.put_team("evil", "")
    other = "evil signing secret of their own"
    await desk.store.add_channel(secured(other, id="ch2", name="evil", team="evil"))
    desk.incoming._known = (float("-inf"), ())
    assert "not linked" in await desk.command(f"cancel {job.id}", secret=other)
    await desk.link("read", "submit", "admin", team="evil", owner="mallory")
    assert "no job" in await desk.command(f"cancel {job.id}", secret=other)
    assert not (await desk.now(job)).stop_requested


async def test_one_in_two_teams_is_asked_which(desk: Desk) -> None:
    await desk.store.put_team("nlp", "")
    await desk.store.add_channel(secured(id="ch2", name="nlp", team="nlp", config={"channel": "C0NLP"}))
    desk.incoming._known = (float("-inf"), ())
    await desk.link()
    await desk.link(team="nlp", owner="annie")
    mine = await desk.job()
    assert mine.id in await desk.command("status")
    await desk.store.delete_channel("ch1")
    await desk.store.add_channel(secured(id="ch3", name="else", team=None, config={"channel": "C0ELSE"}))
    desk.incoming._known = (float("-inf"), ())
    assert "several teams" in await desk.command("status")


async def test_links_are_made_by_whoever_manages_and_checked_with_slack(desk: Desk) -> None:
    manager = await desk.api.token("boss", "read", "submit", "manage")
    made = await desk.api.call(
        "POST", "/v1/slack/users", manager, 201, json={"user": "U0BOB", "owner": "bob", "scopes": ["read"]}
    )
    assert (made["name"], made["workspace"], made["team"]) == ("bob", WORKSPACE, "default")
    await desk.api.call("POST", "/v1/slack/users", manager, 422, json={"user": "U0NOBODY", "owner": "bob"})
    await desk.api.call("POST", "/v1/slack/users", manager, 403,
                        json={"user": "U0BOB", "owner": "bob", "scopes": ["admin"]})  # fmt: skip
    await desk.api.call("POST", "/v1/slack/users", manager, 422, json={"user": "U0BOB", "owner": "bob", "team": "x"})
    assert "nothing runs" in await desk.command("status", user="U0BOB")
    listed = await desk.api.call("GET", "/v1/slack/users", manager, 200)
    assert [u["user"] for u in listed["items"]] == ["U0BOB"]
    await desk.api.call("GET", "/v1/slack/users", await desk.api.token("bob", "submit"), 403)
    await desk.api.call("DELETE", "/v1/slack/users/U0BOB", manager, 204)
    await desk.api.call("DELETE", "/v1/slack/users/U0BOB", manager, 404)
    assert "not linked" in await desk.command("status", user="U0BOB")


# ------------------------------------------------------------------------------------------------------------- buttons


async def test_extending_raises_the_cap_that_was_shown(desk: Desk) -> None:
    job = await desk.job(cap_usd=Decimal("10"))
    await desk.link()
    assert "$12.50 now" in await desk.press(job, "extend")
    assert (await desk.now(job)).cap_usd == extended(job.cap_usd)
    assert "is $12.50 by now; nothing was changed" in await desk.press(job, "extend")
    assert (await desk.now(job)).cap_usd == Decimal("12.5")
    (entry,) = await desk.store.as_tenant(Tenant(team="default", owner="x")).audit(AuditFilter(action="job.raise_cap"))
    assert (entry.actor, entry.token_id) == ("ann", f"slack:{WORKSPACE}/U0ANN")


async def test_approving_is_of_what_was_shown(desk: Desk) -> None:
    job = await desk.job(JobState.AWAITING_APPROVAL)
    await desk.link("read", "submit", "manage")
    assert "by now; nothing was changed" in await desk.press(replace(job, cap_usd=Decimal(3)), "approve")
    assert (await desk.now(job)).state is JobState.AWAITING_APPROVAL
    assert "approved up to $10.00" in await desk.press(job, "approve")
    assert (await desk.now(job)).state is JobState.QUEUED
    assert "awaits no approval" in await desk.press(job, "approve")


async def test_refusing_ends_it(desk: Desk) -> None:
    job = await desk.job(JobState.AWAITING_APPROVAL)
    await desk.link("manage")
    assert "is refused" in await desk.press(job, "refuse")
    assert (await desk.now(job)).stop_requested


async def test_cancelling_is_said_once_and_shown(desk: Desk) -> None:
    job = await desk.job()
    await desk.link()
    url_of_first = len(desk.there.responses)
    assert "is stopping" in await desk.press(job, "cancel")
    assert (await desk.now(job)).stop_requested
    assert "is stopping" in await desk.press(job, "cancel")
    shown = [a for a in list(desk.there.responses.values())[url_of_first] if a["replace_original"]]
    assert "stopping" in str(shown[0]["blocks"])
    assert "gpubroker.cancel" not in str(shown[0]["blocks"])


async def test_a_stale_button_tells_what_is_true_and_goes_away(desk: Desk) -> None:
    job = await desk.job(JobState.SUCCEEDED)
    await desk.link("read", "submit", "manage")
    said = await desk.press(replace(job, state=JobState.ACTIVE), "cancel")
    assert "is succeeded already" in said
    shown = [a for answers in desk.there.responses.values() for a in answers if a["replace_original"]]
    assert "✅" in str(shown[-1]["blocks"])
    assert not any(b["type"] == "actions" for b in shown[-1]["blocks"])
    assert "awaits no approval" in await desk.press(replace(job, state=JobState.AWAITING_APPROVAL), "approve")


async def test_a_button_of_nobodys_making_does_nothing(desk: Desk) -> None:
    job = await desk.job()
    await desk.link()
    assert "another version" in await desk.press(job, "drop_tables", value=job.id)
    assert "names no job" in await desk.press(job, "cancel", value="../../x")
    for caps in ("", ":", "10:NaN", "10:Infinity", "NaN:1e9", "x:y"):
        assert "names no caps" in await desk.press(job, "extend", value=f"{job.id}:{caps}")
    assert "above" in await desk.press(job, "extend", value=f"{job.id}:10:1")


async def test_retry_makes_one_new_job(desk: Desk) -> None:
    tokens = await desk.api.token("ann")
    ref = (await desk.api.upload(tokens))["ref"]
    failed = make_job(state=JobState.FAILED, finished_at=START)
    script = failed.spec.script
    assert script is not None
    spec = failed.spec.model_copy(update={"script": script.model_copy(update={"code": ref})})
    job, _ = await desk.store.submit(replace(failed, spec=spec), key=None, body_sha256="", events=[])
    sha = ref.removeprefix("upload:")
    await desk.api.service.blobs.put(f"data/{job.id}.{sha}", b"tar")
    await desk.link()
    first = await desk.press(job, "retry")
    assert "goes on as job" in first
    assert first.replace("goes on", "went on") == await desk.press(job, "retry")


# ------------------------------------------------------------------------------------------------------------- command


async def test_status_lists_what_runs_and_one_job(desk: Desk) -> None:
    await desk.link()
    job = await desk.job(reason="waits for <!channel> a spot")
    done = await desk.job(JobState.SUCCEEDED)
    said = await desk.command("status")
    assert f"tune {job.id}: queued (waits for &lt;!channel&gt; a spot), $0.0000 of $10.00, ann" in said
    assert done.id not in said
    assert done.id in await desk.command(f"status {done.id}")
    assert done.id in await desk.command(f"status {done.id[:6]}")
    assert "means 2 jobs" in await desk.command("status tune")
    assert "no job zzz" in await desk.command("status zzz")


async def test_spend_and_help_and_cancel(desk: Desk) -> None:
    await desk.link()
    job = await desk.job()
    assert "$0.0000 since" in await desk.command("spend")
    assert "not fortune" in await desk.command("spend fortune")
    for text in ("", "help", "dance", "cancel"):
        assert "/gpubroker status" in await desk.command(text)
    assert "is stopping" in await desk.command(f"cancel {job.id}")
    assert (await desk.now(job)).stop_requested


async def test_a_fault_of_ours_is_logged_and_said(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret detail")

    await desk.link()
    monkeypatch.setattr(desk.api.service, "jobs", broken)
    said = await desk.command("status")
    assert "its log has the details" in said
    assert "secret detail" not in said


async def test_a_root_that_was_clicked_on_shows_the_same_as_the_outbox_would(desk: Desk) -> None:
    job = await desk.job()
    url = desk.there.response_url()
    await desk.incoming._asked.show(url, Snapshot(job=job))
    (shown,) = desk.answers(url)
    assert shown["replace_original"]
    assert "🕓" in str(shown["blocks"][0])
