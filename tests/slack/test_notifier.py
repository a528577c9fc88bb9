"""One thread per job, over real HTTP: nothing twice, nothing lost, no flood, with any behaviour of Slack or the
notifier.
"""

import builtins
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from broker.domain.errors import ChannelRefused, NotDelivered, NotifyError, RetryAfter, Undeliverable
from broker.domain.job import AttemptState, Job, JobState, Reason
from broker.domain.notifications import NOTICES, Delivery, JobSnapshot, Notice
from broker.runtime.secret_box import SecretsError
from tests.conformance.samples import START, make_attempt, make_job
from tests.slack.conftest import BOX, Rig, channel
from trainer.contract.documents import Heartbeat


def active(job: Job, step: int = 0, **changes: Any) -> JobSnapshot:
    beat = Heartbeat(attempt="a", boot="b", seq=1, step=step, total_steps=45, phase="training")
    run = replace(make_attempt(job), state=AttemptState.TRAINING, beat=beat)
    return JobSnapshot(job=replace(job, state=JobState.ACTIVE, **changes), attempts=(run,))


def refresh(job: Job) -> Delivery:
    return Delivery(stream=job.id)


async def test_a_job_is_one_thread_whose_root_is_updated_in_place(rig: Rig) -> None:
    job = make_job()
    await rig.tell(rig.event(job, "job.submitted"), JobSnapshot(job=job))
    await rig.tell(rig.event(job, "attempt.planned", "alpha l40s spot"), active(job))
    await rig.tell(rig.event(job, "attempt.training", "attempt 1 is up"), active(job))
    await rig.tell(rig.event(job, "attempt.preempted", "at step 17"), active(job, step=17))
    assert [text.split(".")[0] for text in rig.thread()] == ["tune: Bought", "tune: Running", "tune: Preempted"]
    assert "step 17/45" in str(rig.slack.messages()[0]["blocks"])
    assert rig.slack.count("conversations.replies") == 0, "one process that has just posted need not look"


async def test_a_refresh_updates_what_changed_and_nothing_else(rig: Rig) -> None:
    job = make_job()
    await rig.tell(refresh(job), active(job))
    assert rig.slack.messages() == [], "a refresh opens no thread"
    await rig.tell(rig.event(job, "job.submitted"), active(job, step=1))
    await rig.tell(refresh(job), active(job, step=2))
    await rig.tell(refresh(job), active(job, step=2))
    assert rig.slack.count("chat.update") == 1
    assert "step 2/45" in str(rig.slack.messages()[0]["blocks"])


@pytest.mark.parametrize("method", ["chat.postMessage", "files.completeUploadExternal"])
@pytest.mark.parametrize("kind", ["job.submitted", "attempt.preempted", "job.failed"])
async def test_a_lost_answer_posts_nothing_twice(rig: Rig, method: str, kind: str) -> None:
    """Carried out, and the answer lost: at each of the posts that a delivery makes."""
    rig.curve = tuple((n, 4.0 - n / 10) for n in range(20))
    job = make_job()
    delivery = rig.event(job, kind)
    for _ in range(3):
        rig.slack.lose = {method}
        try:
            await rig.tell(delivery, active(job))
        except NotDelivered as e:
            rig.states[job.id] = e.state
    rig.slack.lose = set()
    await rig.tell(delivery, active(job))
    files = [m for m in rig.slack.channels["C0JOBS"].messages.values() if "files" in m]
    texts = [text for text in rig.thread() if text]
    assert len(texts) == (kind != "job.submitted")
    assert len(files) == (kind == "job.failed")


async def test_a_crash_before_the_record_posts_nothing_twice(rig: Rig) -> None:
    job = make_job()
    delivery = rig.event(job, "attempt.planned")
    await rig.deliver(delivery, active(job))
    rig.notifier = rig.another()
    await rig.tell(delivery, active(job))
    later = rig.event(job, "attempt.preempted")
    await rig.deliver(later, active(job))
    rig.notifier = rig.another()
    await rig.tell(later, active(job))
    assert [text.split(".")[0] for text in rig.thread()] == ["tune: Bought", "tune: Preempted"]


async def test_a_message_posted_by_another_process_is_not_repeated(rig: Rig) -> None:
    """The notifier's cached knowledge expires before another process's lease can end."""
    job = make_job()
    await rig.tell(rig.event(job, "attempt.planned"), active(job))
    other, delivery = rig.another(), rig.event(job, "attempt.preempted")
    await other.deliver(rig.channel, delivery, active(job), rig.states[job.id])
    rig.clock.time += timedelta(seconds=60)
    await rig.tell(delivery, active(job))
    assert len(rig.thread()) == 2


async def test_two_channels_of_one_conversation_have_their_own_threads(rig: Rig) -> None:
    job = make_job()
    await rig.tell(rig.event(job, "job.submitted"), JobSnapshot(job=job))
    other = channel(id="ch2", name="other")
    await rig.notifier.deliver(other, rig.event(job, "job.submitted"), JobSnapshot(job=job), None)
    assert len(rig.slack.messages()) == 2


async def test_an_hour_without_slack_loses_nothing_and_floods_nothing(rig: Rig) -> None:
    job = make_job()
    await rig.tell(rig.event(job, "job.submitted"), active(job, step=1))
    waiting = [rig.event(job, kind, f"number {n}") for n, kind in enumerate(["attempt.preempted", "job.cap_near"] * 6)]
    for down in ("500", "reset"):
        rig.slack.down = down
        for _ in range(20):
            with pytest.raises(NotDelivered):
                await rig.tell(waiting[0], active(job, step=40))
    rig.slack.down = ""
    rig.slack.limits.enforced = True
    for delivery in waiting:
        await rig.tell(delivery, active(job, step=44))
    assert [text.rsplit(" ", 1)[-1] for text in rig.thread()] == [str(n) for n in range(12)]
    assert rig.slack.count("chat.update") == 1, "only the latest state"
    assert "step 44/45" in str(rig.slack.messages()[0]["blocks"])


async def test_posts_are_paced_so_that_slack_need_not_say_so(rig: Rig) -> None:
    """The loopback Slack enforces its limits by the same clock as we wait by."""
    rig.slack.limits.enforced = True
    job = make_job()
    for n in range(30):
        await rig.tell(rig.event(job, "attempt.preempted", str(n)), active(job))
    assert len(rig.thread()) == 30
    assert 26 <= rig.clock.monotonic() <= 40


async def test_a_pause_that_slack_asks_for_is_the_channels(rig: Rig) -> None:
    job = make_job()
    rig.slack.limits.enforced = True
    for _ in range(4):
        rig.slack.limits.retry_after("chat.postMessage", "C0JOBS")
    with pytest.raises(RetryAfter) as caught:
        await rig.tell(rig.event(job, "job.submitted"), JobSnapshot(job=job))
    assert caught.value.after_s == 1
    assert rig.slack.messages() == []


async def test_a_pause_in_the_middle_keeps_what_was_done(rig: Rig) -> None:
    job = make_job()
    rig.slack.refuse = {"chat.update": "ratelimited"}
    await rig.tell(rig.event(job, "job.submitted"), active(job, step=1))
    delivery = rig.event(job, "attempt.preempted")
    with pytest.raises(RetryAfter) as caught:
        await rig.tell(delivery, active(job, step=2))
    rig.states[job.id] = caught.value.state
    rig.slack.refuse = {}
    await rig.tell(delivery, active(job, step=2))
    assert len(rig.thread()) == 1
    assert "step 2/45" in str(rig.slack.messages()[0]["blocks"])


async def test_refreshes_leave_room_for_what_happened(rig: Rig) -> None:
    jobs = [make_job() for _ in range(60)]
    for job in jobs:
        await rig.tell(rig.event(job, "job.submitted"), active(job))
    rig.clock.time += timedelta(minutes=5)
    rig.slack.limits.enforced = True
    for job in jobs:
        await rig.tell(refresh(job), active(job, step=9))
    assert 25 <= rig.slack.count("chat.update") <= 31
    await rig.tell(rig.event(jobs[-1], "attempt.preempted"), active(jobs[-1], step=9))
    assert "step 9/45" in str(rig.slack.messages()[-1]["blocks"])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("invalid_auth", ChannelRefused), ("token_revoked", ChannelRefused), ("is_archived", ChannelRefused),
        ("missing_scope", ChannelRefused), ("channel_not_found", ChannelRefused), ("ratelimited", RetryAfter),
        ("msg_too_long", Undeliverable), ("invalid_blocks", Undeliverable), ("fatal_error", NotDelivered),
        ("internal_error", NotDelivered), ("an_error_of_tomorrow", NotDelivered),
    ],
)  # fmt: skip
async def test_each_refusal_has_its_consequence(rig: Rig, error: str, kind: type[NotifyError]) -> None:
    rig.slack.refuse = {"chat.postMessage": error}
    job = make_job()
    with pytest.raises(kind) as caught:
        await rig.tell(rig.event(job, "job.submitted"), JobSnapshot(job=job))
    assert "xoxb" not in str(caught.value)


async def test_a_deleted_root_message_is_posted_again(rig: Rig) -> None:
    job = make_job()
    await rig.tell(rig.event(job, "job.submitted"), active(job))
    rig.slack.channels["C0JOBS"].messages.clear()
    await rig.tell(rig.event(job, "attempt.preempted"), active(job, step=3))
    assert len(rig.slack.messages()) == 1
    assert len(rig.thread()) == 1


async def test_the_end_has_a_summary_and_the_plot(rig: Rig) -> None:
    rig.curve = tuple((n, 4.0 - n / 10) for n in range(20))
    job = make_job(state=JobState.SUCCEEDED, finished_at=START + timedelta(hours=1), spent_usd=Decimal(1))
    run = replace(make_attempt(job), state=AttemptState.ENDED, reason=Reason.COMPLETED)
    await rig.tell(rig.event(job, "job.succeeded"), JobSnapshot(job=job, attempts=(run,)))
    (root,) = rig.slack.messages()
    summary, picture = rig.slack.messages(thread=root["ts"])
    assert "$1.0000 spent of $10.00" in str(summary["blocks"])
    (file,) = picture["files"]
    assert rig.slack.files[file["id"]]["bytes"].startswith(b"\x89PNG")
    assert "✅" in str(root["blocks"])
    assert not any("elements" in b for b in root["blocks"] if b["type"] == "actions")


async def test_without_matplotlib_the_curve_is_text(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    rig.curve = tuple((n, 4.0 - n / 10) for n in range(20))
    job = make_job(state=JobState.FAILED, reason="oom")
    await rig.tell(rig.event(job, "job.failed"), JobSnapshot(job=job))
    (root,) = rig.slack.messages()
    (summary,) = rig.slack.messages(thread=root["ts"])
    assert "█" in str(summary["blocks"])
    assert "files" not in summary


async def test_a_notice_is_reported_once(rig: Rig) -> None:
    delivery = Delivery(
        stream=NOTICES,
        notice=Notice(
            id="digest-daily-1", kind="digest.daily", message="$12.00 spent", team="nlp", at=START,
            data={"by_user": [{"user": "<!here>", "usd": "12.00"}]},
        ),
    )  # fmt: skip
    await rig.deliver(delivery, None)
    rig.notifier = rig.another()
    await rig.deliver(delivery, None)
    (message,) = rig.slack.messages()
    assert message["text"] == "Yesterday's spending: $12.00 spent"
    assert "&lt;!here&gt; · $12.00" in str(message["blocks"])


async def test_a_new_token_is_used_at_once(rig: Rig) -> None:
    job = make_job()
    rig.channel = channel(token="xoxb-old")
    with pytest.raises(ChannelRefused):
        await rig.tell(rig.event(job, "job.submitted"), JobSnapshot(job=job))
    rig.channel = channel()
    await rig.tell(rig.event(job, "job.submitted"), JobSnapshot(job=job))
    assert len(rig.slack.messages()) == 1


async def test_another_master_key_is_reported(rig: Rig) -> None:
    rig.channel = replace(rig.channel, sealed=BOX.seal("{}")[:-4] + b"AAA=")
    with pytest.raises(SecretsError, match="master key"):
        await rig.tell(rig.event(make_job(), "job.submitted"), JobSnapshot(job=make_job()))


async def test_notifier_needs_no_scope_beyond_the_manifest(rigs: Callable[..., Any]) -> None:
    async with rigs(scopes=frozenset({"chat:write"})) as rig:
        job = make_job()
        with pytest.raises(ChannelRefused, match=r"missing_scope.*manifest"):
            await rig.tell(rig.event(job, "job.submitted"), JobSnapshot(job=job))
