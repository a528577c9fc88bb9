"""Clicks and commands, signed as Slack signs them, against the real API over both stores."""

import hashlib
import hmac
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode

import pytest

from broker.domain.job import JobState
from broker.domain.notifications import JobSnapshot
from broker.domain.tenancy import Tenant
from broker.notify.slack.blocks import extended
from broker.ports import AuditFilter, Store
from broker.runtime.clock import SystemClock
from tests.conformance.samples import START, make_job
from tests.slack.incoming import FORM, SECRET, Desk, either_store, signed_desk
from tests.slack.server import WORKSPACE

__all__ = ["either_store", "signed_desk"]


# ---------------------------------------------------------------------------------------------------------- signatures


async def test_only_requests_signed_by_slack_are_accepted(desk: Desk) -> None:
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
    """A signed request cannot make the broker call another address either."""
    url = desk.there.response_url()
    for other in (url.replace("127.0.0.1", "localhost"), url.replace("http://", "https://"), "file:///etc/passwd"):
        form = {"command": "/gpubroker", "text": "help", "user_id": "U0ANN", "team_id": WORKSPACE,
                "channel_id": "C0JOBS", "response_url": other}  # fmt: skip
        await desk.post(urlencode(form).encode())
    assert desk.answers(url) == []


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


async def test_refusing_an_approval_cancels_the_job(desk: Desk) -> None:
    job = await desk.job(JobState.AWAITING_APPROVAL)
    await desk.link("manage")
    assert "is refused" in await desk.press(job, "refuse")
    assert (await desk.now(job)).stop_requested


async def test_cancelling_is_reported_once_and_shown(desk: Desk) -> None:
    job = await desk.job()
    await desk.link()
    url_of_first = len(desk.there.responses)
    assert "is stopping" in await desk.press(job, "cancel")
    assert (await desk.now(job)).stop_requested
    assert "is stopping" in await desk.press(job, "cancel")
    shown = [a for a in list(desk.there.responses.values())[url_of_first] if a["replace_original"]]
    assert "stopping" in str(shown[0]["blocks"])
    assert "gpubroker.cancel" not in str(shown[0]["blocks"])


async def test_a_stale_button_reports_the_current_state_and_is_removed(desk: Desk) -> None:
    job = await desk.job(JobState.SUCCEEDED)
    await desk.link("read", "submit", "manage")
    answer = await desk.press(replace(job, state=JobState.ACTIVE), "cancel")
    assert "is succeeded already" in answer
    shown = [a for answers in desk.there.responses.values() for a in answers if a["replace_original"]]
    assert "✅" in str(shown[-1]["blocks"])
    assert not any(b["type"] == "actions" for b in shown[-1]["blocks"])
    assert "awaits no approval" in await desk.press(replace(job, state=JobState.AWAITING_APPROVAL), "approve")


async def test_a_forged_button_does_nothing(desk: Desk) -> None:
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
    assert "continues as job" in first
    assert first.replace("continues", "already continues") == await desk.press(job, "retry")


# ------------------------------------------------------------------------------------------------------------- command


async def test_status_lists_what_runs_and_one_job(desk: Desk) -> None:
    await desk.link()
    job = await desk.job(reason="waits for <!channel> a spot")
    done = await desk.job(JobState.SUCCEEDED)
    answer = await desk.command("status")
    assert f"tune {job.id}: queued (waits for &lt;!channel&gt; a spot), $0.0000 of $10.00, ann" in answer
    assert done.id not in answer
    assert done.id in await desk.command(f"status {done.id}")
    assert done.id in await desk.command(f"status {done.id[:6]}")
    assert job.id in await desk.command("status tune")  # the live one of that name
    await desk.job()
    assert "means 2 jobs" in await desk.command("status tune")
    assert "no job zzz" in await desk.command("status zzz")


async def test_a_name_of_several_owners_cancels_no_job(desk: Desk) -> None:
    await desk.link()
    own, mate = await desk.job(JobState.FAILED), await desk.job(owner="bob")
    answer = await desk.command("cancel tune")
    assert "means 2 jobs" in answer
    assert own.id in answer
    assert mate.id in answer
    assert not (await desk.now(mate)).stop_requested
    assert own.id in await desk.command("status tune")


async def test_spend_and_help_and_cancel(desk: Desk) -> None:
    await desk.link()
    job = await desk.job()
    assert "$0.0000 since" in await desk.command("spend")
    assert "not fortune" in await desk.command("spend fortune")
    for text in ("", "help", "dance", "cancel"):
        assert "/gpubroker status" in await desk.command(text)
    assert "is stopping" in await desk.command(f"cancel {job.id}")
    assert (await desk.now(job)).stop_requested


async def test_an_internal_error_is_logged_and_reported(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret detail")

    await desk.link()
    monkeypatch.setattr(desk.api.service, "jobs", broken)
    answer = await desk.command("status")
    assert "its log has the details" in answer
    assert "secret detail" not in answer


async def test_a_click_renders_the_same_root_as_the_outbox(desk: Desk) -> None:
    job = await desk.job()
    url = desk.there.response_url()
    await desk.incoming._required_adapter.show(url, JobSnapshot(job=job))
    (shown,) = desk.answers(url)
    assert shown["replace_original"]
    assert "🕓" in str(shown["blocks"][0])
