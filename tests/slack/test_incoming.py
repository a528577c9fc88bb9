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
from tests.slack.incoming import FORM, SECRET, Rig, either_store, signed_desk
from tests.slack.server import WORKSPACE

__all__ = ["either_store", "signed_desk"]


# ---------------------------------------------------------------------------------------------------------- signatures


async def test_only_requests_signed_by_slack_are_accepted(rig: Rig) -> None:
    job = await rig.job()
    await rig.link()
    body = urlencode({"command": "/gpubroker", "text": f"cancel {job.id}", "user_id": "U0ANN", "team_id": WORKSPACE,
                      "channel_id": "C0JOBS", "response_url": rig.there.response_url()}).encode()  # fmt: skip
    await rig.post(body, secret="another secret of 32 characters..", status=401)
    await rig.post(body, age_s=301, status=401)
    await rig.post(body, age_s=-301, status=401)
    await rig.post(body, status=401, headers={"X-Slack-Signature": "v0=" + "0" * 64})
    for bad in ("", "v0=é", "nonsense"):
        await rig.post(body, status=401, headers={"X-Slack-Signature": bad})
    for bad in ("", "soon", "1e9", "-1", "9" * 4000):
        await rig.post(body, status=401, headers={"X-Slack-Request-Timestamp": bad})
    await rig.post(b"\xff\xfe", status=401, secret="another secret of 32 characters..")
    assert not (await rig.now(job)).stop_requested


async def test_a_byte_that_changed_on_the_way_is_noticed(rig: Rig) -> None:
    at = f"{SystemClock().now().timestamp():.0f}"
    mac = hmac.new(SECRET.encode(), f"v0:{at}:text=status".encode(), hashlib.sha256).hexdigest()
    headers = {"X-Slack-Request-Timestamp": at, "X-Slack-Signature": f"v0={mac}", **FORM}
    await rig.api.call("POST", "/v1/slack", headers, 401, data=b"text=cancel")


async def test_a_request_counts_once_among_all_brokers(rig: Rig, store: Store) -> None:
    at = f"{SystemClock().now().timestamp():.0f}"
    body = b"ssl_check=1&token=x"
    mac = hmac.new(SECRET.encode(), f"v0:{at}:".encode() + body, hashlib.sha256).hexdigest()
    headers = {"X-Slack-Request-Timestamp": at, "X-Slack-Signature": f"v0={mac}", **FORM}
    await rig.api.call("POST", "/v1/slack", headers, 200, data=body)
    again = await rig.api.call("POST", "/v1/slack", headers, 409, data=body)
    assert "answered before" in again["detail"]


async def test_nonsense_with_a_good_signature_is_refused(rig: Rig) -> None:
    for body in (b"payload=%7B", b"payload=[]", b"payload=1", b"payload=" + b"[" * 5000, b"%ff=%ff&payload=", b"x"):
        assert "Slack" in (await rig.post(body, status=422))["detail"]
    for payload in ({"type": "block_actions", "actions": [1]}, {"type": "block_actions", "actions": [{}], "user": 3},
                    {"command": "/gpubroker"}):  # fmt: skip
        await rig.post(urlencode({"payload": json.dumps(payload)}).encode(), status=422)
    await rig.post(urlencode({"payload": '{"type": "view_submission"}'}).encode())
    await rig.api.call("POST", "/v1/slack", {"Content-Type": "application/json"}, 415, data=b"{}")


async def test_answers_go_to_slack_only(rig: Rig) -> None:
    """A signed request cannot make the broker call another address either."""
    url = rig.there.response_url()
    for other in (url.replace("127.0.0.1", "localhost"), url.replace("http://", "https://"), "file:///etc/passwd"):
        form = {"command": "/gpubroker", "text": "help", "user_id": "U0ANN", "team_id": WORKSPACE,
                "channel_id": "C0JOBS", "response_url": other}  # fmt: skip
        await rig.post(urlencode(form).encode())
    assert rig.answers(url) == []


# ------------------------------------------------------------------------------------------------------------- buttons


async def test_extending_raises_the_cap_that_was_shown(rig: Rig) -> None:
    job = await rig.job(cap_usd=Decimal("10"))
    await rig.link()
    assert "$12.50 now" in await rig.press(job, "extend")
    assert (await rig.now(job)).cap_usd == extended(job.cap_usd)
    assert "is $12.50 by now; nothing was changed" in await rig.press(job, "extend")
    assert (await rig.now(job)).cap_usd == Decimal("12.5")
    (entry,) = await rig.store.as_tenant(Tenant(team="default", owner="x")).audit(AuditFilter(action="job.raise_cap"))
    assert (entry.actor, entry.token_id) == ("ann", f"slack:{WORKSPACE}/U0ANN")


async def test_approving_is_of_what_was_shown(rig: Rig) -> None:
    job = await rig.job(JobState.AWAITING_APPROVAL)
    await rig.link("read", "submit", "manage")
    assert "by now; nothing was changed" in await rig.press(replace(job, cap_usd=Decimal(3)), "approve")
    assert (await rig.now(job)).state is JobState.AWAITING_APPROVAL
    assert "approved up to $10.00" in await rig.press(job, "approve")
    assert (await rig.now(job)).state is JobState.QUEUED
    assert "awaits no approval" in await rig.press(job, "approve")


async def test_refusing_an_approval_cancels_the_job(rig: Rig) -> None:
    job = await rig.job(JobState.AWAITING_APPROVAL)
    await rig.link("manage")
    assert "is refused" in await rig.press(job, "refuse")
    assert (await rig.now(job)).stop_requested


async def test_cancelling_is_reported_once_and_shown(rig: Rig) -> None:
    job = await rig.job()
    await rig.link()
    url_of_first = len(rig.there.responses)
    assert "is stopping" in await rig.press(job, "cancel")
    assert (await rig.now(job)).stop_requested
    assert "is stopping" in await rig.press(job, "cancel")
    shown = [a for a in list(rig.there.responses.values())[url_of_first] if a["replace_original"]]
    assert "stopping" in str(shown[0]["blocks"])
    assert "gpubroker.cancel" not in str(shown[0]["blocks"])


async def test_a_stale_button_reports_the_current_state_and_is_removed(rig: Rig) -> None:
    job = await rig.job(JobState.SUCCEEDED)
    await rig.link("read", "submit", "manage")
    answer = await rig.press(replace(job, state=JobState.ACTIVE), "cancel")
    assert "is succeeded already" in answer
    shown = [a for answers in rig.there.responses.values() for a in answers if a["replace_original"]]
    assert "✅" in str(shown[-1]["blocks"])
    assert not any(b["type"] == "actions" for b in shown[-1]["blocks"])
    assert "awaits no approval" in await rig.press(replace(job, state=JobState.AWAITING_APPROVAL), "approve")


async def test_a_forged_button_does_nothing(rig: Rig) -> None:
    job = await rig.job()
    await rig.link()
    assert "another version" in await rig.press(job, "drop_tables", value=job.id)
    assert "names no job" in await rig.press(job, "cancel", value="../../x")
    for caps in ("", ":", "10:NaN", "10:Infinity", "NaN:1e9", "x:y"):
        assert "names no caps" in await rig.press(job, "extend", value=f"{job.id}:{caps}")
    assert "above" in await rig.press(job, "extend", value=f"{job.id}:10:1")


async def test_retry_makes_one_new_job(rig: Rig) -> None:
    tokens = await rig.api.token("ann")
    ref = (await rig.api.upload(tokens))["ref"]
    failed = make_job(state=JobState.FAILED, finished_at=START)
    script = failed.spec.script
    assert script is not None
    spec = failed.spec.model_copy(update={"script": script.model_copy(update={"code": ref})})
    job, _ = await rig.store.submit(replace(failed, spec=spec), key=None, body_sha256="", events=[])
    sha = ref.removeprefix("upload:")
    await rig.api.service.blobs.put(f"data/{job.id}.{sha}", b"tar")
    await rig.link()
    first = await rig.press(job, "retry")
    assert "continues as job" in first
    assert first.replace("continues", "already continues") == await rig.press(job, "retry")


# ------------------------------------------------------------------------------------------------------------- command


async def test_status_lists_what_runs_and_one_job(rig: Rig) -> None:
    await rig.link()
    job = await rig.job(reason="waits for <!channel> a spot")
    done = await rig.job(JobState.SUCCEEDED)
    answer = await rig.command("status")
    assert f"tune {job.id}: queued (waits for &lt;!channel&gt; a spot), $0.0000 of $10.00, ann" in answer
    assert done.id not in answer
    assert done.id in await rig.command(f"status {done.id}")
    assert done.id in await rig.command(f"status {done.id[:6]}")
    assert job.id in await rig.command("status tune")  # the live one of that name
    await rig.job()
    assert "means 2 jobs" in await rig.command("status tune")
    assert "no job zzz" in await rig.command("status zzz")


async def test_a_name_of_several_owners_cancels_no_job(rig: Rig) -> None:
    await rig.link()
    own, mate = await rig.job(JobState.FAILED), await rig.job(owner="bob")
    answer = await rig.command("cancel tune")
    assert "means 2 jobs" in answer
    assert own.id in answer
    assert mate.id in answer
    assert not (await rig.now(mate)).stop_requested
    assert own.id in await rig.command("status tune")


async def test_spend_and_help_and_cancel(rig: Rig) -> None:
    await rig.link()
    job = await rig.job()
    assert "$0.0000 since" in await rig.command("spend")
    assert "not fortune" in await rig.command("spend fortune")
    for text in ("", "help", "dance", "cancel"):
        assert "/gpubroker status" in await rig.command(text)
    assert "is stopping" in await rig.command(f"cancel {job.id}")
    assert (await rig.now(job)).stop_requested


async def test_an_internal_error_is_logged_and_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret detail")

    await rig.link()
    monkeypatch.setattr(rig.api.service, "jobs", broken)
    answer = await rig.command("status")
    assert "its log has the details" in answer
    assert "secret detail" not in answer


async def test_a_click_renders_the_same_root_as_the_outbox(rig: Rig) -> None:
    job = await rig.job()
    url = rig.there.response_url()
    await rig.incoming._required_adapter.update_message(url, JobSnapshot(job=job))
    (answer,) = rig.answers(url)
    assert answer["replace_original"]
    assert "🕓" in str(answer["blocks"][0])
