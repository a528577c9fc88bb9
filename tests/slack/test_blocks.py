"""Slack accepts messages with any text of users, clouds and machines, and the text mentions or links no one."""

import re
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import broker
from broker.domain.job import Attempt, AttemptState, Event, Job, JobState, Reason
from broker.domain.notifications import JobSnapshot, Notice
from broker.notify.slack.blocks import SlackMessage, buttons, end_message, extended, root
from broker.notify.slack.replies import ENDS, SILENT, TITLES, loss_message, notice, reply
from broker.notify.slack.text import code, escape, line
from tests.conformance.samples import START, make_attempt, make_job
from tests.slack.blockkit import faults
from tests.slack.server import TEXT_MAX
from trainer.contract.documents import CheckpointRef, Final, Heartbeat, Outcome

NASTY = st.one_of(
    st.text(max_size=300),
    st.sampled_from(
        [
            "<!channel> <@U0ANN> <#C0JOBS>",
            "<https://evil.example|click here>",
            "&lt;!here&gt; & <!here>",
            "```\nrm -rf\n``` `x` *b* _i_ ~s~",
            "\u202eevil\u202c \x00\x1b[31m\ud800",
            "x" * 9000,
            "<" * 4000,
            "&" * 3001,
            " \n\t ",
        ]
    ),
)
KEYS = NASTY | st.sampled_from(["spent_usd", "usd", "usd_per_hour", "saved_on_demand_usd", "id", "name", "jobs"])
VALUES = NASTY | st.sampled_from(["12.5", "-3", "NaN", "1e999999", "Infinity"])
TABLES = st.dictionaries(KEYS, st.one_of(VALUES, st.lists(st.one_of(VALUES, st.dictionaries(KEYS, VALUES)))))
MONEY = st.decimals(min_value=0, max_value=2_000_000, places=6)


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for item in items for text in strings(item)]


def texts(value: Any) -> list[dict[str, Any]]:
    """Return all text objects."""
    if isinstance(value, dict):
        own = [value] if value.get("type") in ("mrkdwn", "plain_text") else []
        return own + [t for item in value.values() for t in texts(item)]
    return [t for item in value for t in texts(item)] if isinstance(value, list | tuple) else []


def check(message: SlackMessage) -> None:
    """Check that Slack would accept the message and that no interpreted text has a control sequence."""
    assert faults(list(message.blocks)) == []
    assert 0 < len(message.text) <= TEXT_MAX
    interpreted = [message.text, *(t["text"] for t in texts(message.blocks) if t["type"] == "mrkdwn")]
    for text in interpreted:
        assert not set("<>") & set(text), text
        assert re.search(r"&(?!amp;|lt;|gt;)", text) is None, text
    assert all(t["verbatim"] for t in texts(message.blocks) if t["type"] == "mrkdwn")
    for text in strings(message.blocks):
        text.encode()


@st.composite
def attempts(draw: st.DrawFn, job: Job, number: int) -> Attempt:
    step, total = draw(st.integers(0, 10**9)), draw(st.integers(0, 10**9))
    beat = Heartbeat(
        attempt="a", boot="b", seq=1, step=step, total_steps=total, phase=draw(st.sampled_from(["training", "saving"])),
        resumed_from=draw(st.none() | st.integers(0, 100)), loss=draw(st.none() | st.floats(0, 1e9)),
        tokens_per_s=draw(st.none() | st.floats(0, 1e9)), rows_per_s=draw(st.none() | st.floats(0, 1e6)),
        message=draw(NASTY).encode(errors="replace").decode(),
    )  # fmt: skip
    state = draw(st.sampled_from(AttemptState))
    offer = replace(make_attempt(job).line.offer, cloud=draw(NASTY), region=draw(NASTY), accelerator=draw(NASTY))
    return replace(
        make_attempt(job, number),
        line=replace(make_attempt(job).line, offer=offer),
        state=state,
        reason=draw(st.none() | st.sampled_from(Reason)),
        detail=draw(NASTY),
        beat=draw(st.none() | st.just(beat)),
        create_sent_at=START,
        first_beat_at=START + timedelta(minutes=3),
        ended_at=START + timedelta(hours=1) if state is AttemptState.ENDED else None,
        charged_usd=draw(MONEY),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> JobSnapshot:
    state = draw(st.sampled_from(JobState))
    job = make_job()
    named = job.spec.model_copy(update={"name": draw(NASTY)})
    job = replace(
        job, spec=named, state=state, reason=draw(NASTY), owner=draw(NASTY), team=draw(NASTY), spent_usd=draw(MONEY),
        cap_usd=draw(MONEY), stop_requested=draw(st.booleans()),
        finished_at=draw(st.none() | st.just(START + timedelta(hours=2))),
    )  # fmt: skip
    runs = tuple(draw(attempts(job, n)) for n in range(1, draw(st.integers(0, 4)) + 1))
    return JobSnapshot(job=job, attempts=runs)


@settings(max_examples=150, deadline=None)
@given(snapshot=snapshots())
def test_any_job_is_shown_and_says_nothing_to_slack(snapshot: JobSnapshot) -> None:
    check(root(snapshot))
    check(end_message(snapshot, tuple((n, float(n)) for n in range(100))))
    assert root(snapshot).digest == root(replace(snapshot)).digest


@settings(max_examples=150, deadline=None)
@given(snapshot=snapshots(), kind=st.one_of(NASTY, st.sampled_from(["attempt.planned", "attempt.training"])),
       text=NASTY, folded=st.integers(0, 9), offer=NASTY)  # fmt: skip
def test_any_event_is_delivered(snapshot: JobSnapshot, kind: str, text: str, folded: int, offer: str) -> None:
    of = snapshot.attempts[-1].id if snapshot.attempts else None
    data = {"offers": [{"offer": offer, "usd_p50": text}, text]}
    event = Event(job_id=snapshot.job.id, kind=kind, message=text, attempt_id=of, data=data, seq=3)
    message = reply(event, snapshot, folded)
    if message is not None:
        check(message)


@settings(deadline=None)
@given(kind=NASTY, text=NASTY, team=st.none() | NASTY, data=TABLES)
def test_any_notice_is_delivered(kind: str, text: str, team: str | None, data: dict[str, Any]) -> None:
    check(notice(Notice(id="n", kind=kind, message=text, team=team, data=data)))


@given(text=st.text(), limit=st.integers(5, 60))
def test_escaping_keeps_the_text_and_the_limit(text: str, limit: int) -> None:
    shown = escape(text, limit)
    assert len(shown) <= limit
    back = shown.removesuffix("…").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert text.startswith(back)


@given(text=NASTY)
def test_code_is_never_left(text: str) -> None:
    shown = code(text, 100)
    assert shown.count("`") == 2
    assert "\n" not in shown
    assert len(shown) <= 100
    assert "\n" not in line(text)


@given(cap=st.decimals(min_value=Decimal("0.000001"), max_value=1_000_000, places=6))
def test_the_button_offers_a_quarter_more(cap: Decimal) -> None:
    assert cap * Decimal("1.25") <= extended(cap) < cap * Decimal("1.25") + Decimal("0.01")


def test_each_state_has_its_buttons_and_each_asks_first() -> None:
    offered = {
        state: [b["action_id"].removeprefix("gpubroker.") for b in buttons(make_job(state=state))] for state in JobState
    }
    assert offered == {
        JobState.AWAITING_APPROVAL: ["approve", "refuse"],
        JobState.QUEUED: ["extend", "cancel"],
        JobState.ACTIVE: ["extend", "cancel"],
        JobState.RECOVERING: ["extend", "cancel"],
        JobState.CAPPED: ["extend", "retry"],
        JobState.FAILED: ["retry"],
        JobState.CANCELLED: ["retry"],
        JobState.SUCCEEDED: [],
    }
    (extend, _) = buttons(make_job(state=JobState.ACTIVE, cap_usd=Decimal("5.00")))
    assert extend["text"]["text"] == "Cap to $6.2500"
    assert "from $5.0000 to $6.2500" in extend["confirm"]["text"]["text"]
    assert all("confirm" in b for state in JobState for b in buttons(make_job(state=state)))


def test_the_root_says_where_how_far_and_how_much() -> None:
    job = make_job(state=JobState.ACTIVE, spent_usd=Decimal("2.5"))
    beat = Heartbeat(
        attempt="a", boot="b", seq=1, step=18, total_steps=45, phase="training", loss=3.835, tokens_per_s=126.0
    )
    run = replace(make_attempt(job), state=AttemptState.TRAINING, beat=beat)
    text = "\n".join(strings(root(JobSnapshot(job=job, attempts=(run,))).blocks))
    for fact in ("attempt 1 training", "alpha eu · l40s 48 GiB · spot · $0.7312/h", "step 18/45", "loss 3.835", "40%",
                 "$2.5000 of $10.00", f"gpubroker watch {job.id}"):  # fmt: skip
        assert fact in text


def test_a_resume_says_what_was_lost() -> None:
    """20 steps in 10 minutes, the last 5 of them after the checkpoint: a quarter of the training."""
    job = make_job()
    saved = CheckpointRef(manifest="m", step=15)
    gone = replace(
        make_attempt(job), state=AttemptState.ENDED, reason=Reason.PREEMPTED, create_sent_at=START,
        first_beat_at=START, terminating_since=START + timedelta(minutes=10),
        absent_at=START + timedelta(minutes=10), ended_at=START + timedelta(minutes=10), charged_usd=Decimal("0.40"),
        beat=Heartbeat(attempt="a", boot="b", seq=1, step=20, total_steps=45, checkpoint=saved),
    )  # fmt: skip
    now = replace(make_attempt(job, 2), state=AttemptState.TRAINING, first_beat_at=START + timedelta(minutes=13))
    assert loss_message(gone, now) == "lost with attempt 1: 2 min 30 s, $0.1000; 3 min 00 s without a machine"
    event = Event(job_id=job.id, kind="attempt.training", message="up", attempt_id=now.id, seq=9)
    message = reply(event, JobSnapshot(job=job, attempts=(gone, now)), 0)
    assert message is not None
    assert "2 min 30 s, $0.1000" in "\n".join(strings(message.blocks))


def test_a_digest_is_read_at_a_glance() -> None:
    data = {
        "since": "2026-03-01T00:00:00+00:00", "spent_usd": "12.34", "lost_usd": "0.5", "saved_on_demand_usd": "-1",
        "users": [{"user": "default/ann", "usd": "12.34"}],
        "running": [{"id": "abc", "name": "tune", "gpu": "1 x l40s", "usd_per_hour": "0.73", "spent_usd": "1.2"}],
        "usd_per_hour": "0.73",
    }  # fmt: skip
    digest = Notice(id="d", kind="digest.daily", message="nlp, 2026-03-01: $12.34 spent", team="nlp", data=data)
    text = "\n".join(strings(notice(digest).blocks))
    rows = ("default/ann · $12.34", "tune · 1 x l40s · $0.7300 an hour · $1.2000 spent", "team nlp")
    sums = ("*Spent*\n$12.34", "*Lost work in it*\n$0.5000", "*An hour, now*\n$0.7300")
    for fact in ("Yesterday's spending", *rows, *sums):
        assert fact in text
    assert "abc" not in text


def test_the_final_message_summarises_the_job() -> None:
    job = make_job(
        state=JobState.SUCCEEDED, reason="completed", spent_usd=Decimal("0.5"), finished_at=START + timedelta(hours=1)
    )
    final = Final(attempt="a", outcome=Outcome.COMPLETED, step=45, heldout_loss_before=4.425, heldout_loss_after=3.932)
    run = replace(make_attempt(job), state=AttemptState.ENDED, reason=Reason.COMPLETED, final=final)
    text = "\n".join(strings(end_message(JobSnapshot(job=job, attempts=(run,)), ((1, 4.0), (45, 3.0))).blocks))
    for fact in ("succeeded", "1 attempt, 0 preempted; 45 steps", "1 h 00 min", "$0.5000 spent of $10.00",
                 "held-out loss 4.425 → 3.932", "█▁", "gpubroker artifacts"):  # fmt: skip
        assert fact in text


def test_every_kind_of_event_has_its_words() -> None:
    packages = [Path(broker.__file__).parent / package for package in ("controllers", "quote", "api")]
    sources = "".join(file.read_text() for package in packages for file in package.rglob("*.py"))
    written = set(re.findall(r'"((?:job|attempt)\.[a-z_]+)"', sources))
    assert written > {"job.submitted", "attempt.planned"}
    assert written - set(TITLES) - SILENT - ENDS == set()
