"""Slack replies in a job's thread, and messages outside of threads, as Block Kit.

Pure functions of events and notices.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from broker.billing.spending import billed_hours, lost_share
from broker.domain.formatting import duration
from broker.domain.job import Attempt, Event
from broker.domain.money import format_usd, usd
from broker.domain.notifications import JobSnapshot, Notice
from broker.notify.slack.blocks import SlackMessage, message
from broker.notify.slack.text import HEADER_MAX, Json, context, line, mrkdwn, plain, section

SILENT = frozenset(
    {
        "job.submitted",
        "attempt.booting",
        "attempt.draining",
        "attempt.stays",
        "attempt.completed",
        "training.interval",
        "training.best",
    }
)
"""Events without a reply, because the root message or the summary shows them, or users do not need them."""
ENDS = frozenset({"job.succeeded", "job.failed", "job.capped", "job.cancelled"})
"""Events that are reported as a summary."""
MESSAGE = 2400
ROWS = 20
MONEY_MAX = Decimal(10) ** 12

TITLES: Mapping[str, tuple[str, str]] = {
    "attempt.planned": ("🧾", "Bought"),
    "attempt.refused": ("🚫", "Not bought"),
    "attempt.training": ("🚀", "Running"),
    "attempt.preempted": ("⚡", "Preempted"),
    "attempt.moves": ("🔀", "Moves to spot"),
    "attempt.lost": ("⚡", "Lost"),
    "attempt.hung": ("🧊", "Hung"),
    "attempt.oom": ("💥", "Out of memory"),
    "attempt.silent": ("🔇", "A machine sends no heartbeat"),
    "attempt.launcher_lost": ("🪦", "A launcher is lost"),
    "attempt.machine_kept": ("🔧", "Machine kept: it bills"),
    "attempt.destroy_failed": ("🚨", "A machine cannot be destroyed"),
    "attempt.grant_failing": ("🚨", "Credentials cannot be renewed"),
    "attempt.ended": ("⏏️", "Ended"),
    "job.budget_drain": ("🚧", "Stopped for a budget"),
    "job.data_deleted": ("🗑️", "Data deleted"),
    "job.idle": ("💤", "Idle"),
    "job.restored": ("🗄️", "Resumed after a restored backup"),
    "job.requoted": ("⏱️", "Measured: a new forecast"),
    "job.replanned": ("📐", "Memory ran out: another plan"),
    "job.late_forecast": ("📈", "It will be later than its deadline"),
    "job.out_of_time": ("⌛", "Out of time"),
    "job.waiting": ("🕓", "Waiting"),
    "job.cap_near": ("⏳", "The cap is near"),
    "job.cap_raised": ("⬆️", "Cap raised"),
    "job.overrun_forecast": ("📈", "It will cost more than its cap"),
    "job.awaiting_approval": ("✋", "Waits for approval"),
    "job.approval_waived": ("👍", "Needs no approval any more"),
    "job.approved": ("👍", "Approved"),
    "job.refused": ("👎", "Refused"),
    "job.stop_requested": ("⏹️", "Stopping"),
    "training.diverged": ("💥", "Diverged"),
    "training.early_stop": ("🏁", "It learns no more"),
    "training.no_samples": ("📝", "No samples"),
    "training.not_published": ("📭", "Not published"),
    "training.published": ("📬", "Published"),
    "training.rolled_back": ("⏪", "Went back"),
    "training.save_failed": ("💾", "A save failed"),
    "training.skipped": ("⏩", "Skipped a step"),
    "training.spike": ("📈", "The loss jumped"),
    "training.started_over": ("⏮️", "Started over"),
    "training.upload_waits": ("💾", "A checkpoint waits"),
}

NOTICES: Mapping[str, tuple[str, str]] = {
    "budget.threshold": ("🚧", "Budget"),
    "channel.disabled": ("🔕", "A channel is disabled"),
    "channel.test": ("👋", "It works"),
    "clock.restored": ("🕰️", "The database's clock is right"),
    "clock.stepped": ("🕰️", "The database's clock is wrong"),
    "digest.daily": ("🧮", "Yesterday's spending"),
    "digest.weekly": ("🧮", "Last week's spending"),
    "orphan.destroy_failed": ("🚨", "An orphan cannot be destroyed"),
    "orphan.spared": ("👻", "A machine that this database does not know"),
}
SUMS: Mapping[str, str] = {
    "spent_usd": "Spent",
    "lost_usd": "Lost work in it",
    "saved_on_demand_usd": "Saved against on-demand",
    "usd_per_hour": "An hour, now",
}
"""Totals of a digest, with their labels."""
UNITS: Mapping[str, str] = {"usd_per_hour": "{} an hour", "spent_usd": "{} spent", "cap_usd": "cap {}"}


def reply(event: Event, snapshot: JobSnapshot, folded: int) -> SlackMessage | None:
    """Return the reply to an event, or None if another message shows it. Unknown kinds are shown by their message."""
    if event.kind in SILENT or event.kind in ENDS or (event.kind == "attempt.ended" and "reason" in event.data):
        return None
    name = snapshot.job.spec.name
    symbol, title = TITLES.get(event.kind, ("•", event.kind.replace(".", " ").replace("_", " ")))
    more = [*_quoted(event), *_resumed(event, snapshot)]
    if folded:
        more.append(f"and {folded} more of the kind before it")
    summary = section(f"{symbol} *{line(title, 200)}*", line(event.message, MESSAGE) or "–")
    blocks = [summary, context(*(line(text, 600) for text in more))] if more else [summary]
    return message(f"{name}: {title}. {event.message}", *blocks)


def _quoted(event: Event) -> list[str]:
    """Return the next best offers, which explain the choice."""
    offers = event.data.get("offers") if event.kind == "attempt.planned" else None
    if not isinstance(offers, list):
        return []
    alternatives = [o for o in offers if isinstance(o, dict)]
    return [f"{n}. {o.get('offer')}: ${o.get('usd_p50')} to finish" for n, o in enumerate(alternatives, start=1)]


def _resumed(event: Event, snapshot: JobSnapshot) -> list[str]:
    """Return the cost of the lost machine's unsaved work, and the time without a machine."""
    now = next((a for a in snapshot.attempts if a.id == event.attempt_id), None)
    before = [a for a in snapshot.attempts if now is not None and a.number < now.number and a.create_sent_at]
    if event.kind != "attempt.training" or now is None or not before or before[-1].live:
        return []
    return [loss_message(before[-1], now)]


def loss_message(previous: Attempt, current: Attempt) -> str:
    """Return `lost with attempt 1: 3 min 20 s, $0.0100; 2 min 05 s without a machine`."""
    share = lost_share(previous)
    seconds = float(billed_hours(previous) * share) * 3600
    text = f"lost with attempt {previous.number}: {duration(seconds)}, {format_usd(usd(previous.charged_usd * share))}"
    end, start = previous.terminating_since or previous.ended_at, current.first_beat_at
    gap = (start - end).total_seconds() if start is not None and end is not None else 0.0
    return f"{text}; {duration(gap)} without a machine" if gap > 0 else text


def notice(subject: Notice) -> SlackMessage:
    """Return the message of a notice, which is not about a single job. Lists of rows in `data` become lines."""
    symbol, title = NOTICES.get(subject.kind, ("📣", subject.kind.replace(".", " ").replace("_", " ")))
    blocks: list[Json] = [
        {"type": "header", "text": plain(f"{symbol} {title}", HEADER_MAX)},
        section(line(subject.message, MESSAGE) or "–"),
        *_sums(subject.data),
        *_tables(subject.data),
        context(line(f"team {subject.team}" if subject.team else "the whole installation", 200)),
    ]
    return message(f"{title}: {subject.message}", *blocks)


def _sums(data: Mapping[str, Any]) -> list[Json]:
    """Return the digest's totals as columns."""
    totals = [f"*{name}*\n{line(_money(data[key]), 100)}" for key, name in SUMS.items() if key in data]
    return [{"type": "section", "fields": [mrkdwn(text) for text in totals]}] if totals else []


def _tables(data: Mapping[str, Any]) -> list[Json]:
    tables: list[Json] = []
    for name, rows in data.items():
        if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
            continue
        lines = [line(_row(row), 140) for row in rows[:ROWS]]
        hidden = len(rows) - len(lines)
        more = [f"and {hidden} more"] if hidden else []
        tables.append(section(f"*{line(name.replace('_', ' '), 100)}*", *lines, *more))
    return tables[:10]


def _row(row: object) -> str:
    """Return `tune · ann · 1 x l40s · $0.73 an hour · $1.20 spent`. Money is formatted; ids are left out."""
    if not isinstance(row, Mapping):
        return str(row)
    named = {key: value for key, value in row.items() if key != "id" or "name" not in row}
    return " · ".join(UNITS.get(key, "{}").format(_money(v) if "usd" in key else v) for key, v in named.items())


def _money(value: object) -> str:
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return str(value)
    return format_usd(amount) if amount.is_finite() and abs(amount) < MONEY_MAX else str(value)
