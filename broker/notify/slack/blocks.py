"""Slack messages about jobs as Block Kit. Pure functions of a job or an event."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_CEILING, Decimal

from broker.domain.formatting import duration
from broker.domain.job import Attempt, Job, JobState, Reason
from broker.domain.money import format_usd
from broker.domain.notifications import JobSnapshot
from broker.notify.slack.text import (
    CONFIRM_MAX,
    HEADER_MAX,
    MESSAGE_MAX,
    Json,
    bar,
    code,
    context,
    line,
    mrkdwn,
    plain,
    section,
)
from broker.reporting.loss_curve import Losses, sparkline
from broker.reporting.progress import steps, steps_redone

EXTEND_BY = Decimal("1.25")
CENT = Decimal("0.01")
CAP_MAX = Decimal(1_000_000)
"""Highest cap that a spec allows."""
ATTEMPTS_SHOWN = 12
GIB = 1024**3
PHASES = frozenset({"", "starting", "training"})
"""Heartbeat phases that are not shown, because the attempt's state already implies them."""
SYMBOL = {
    JobState.AWAITING_APPROVAL: "✋",
    JobState.QUEUED: "🕓",
    JobState.ACTIVE: "🟢",
    JobState.RECOVERING: "🔁",
    JobState.SUCCEEDED: "✅",
    JobState.CAPPED: "🛑",
    JobState.CANCELLED: "⏹️",
    JobState.FAILED: "❌",
}


@dataclass(frozen=True, kw_only=True)
class SlackMessage:
    """A Slack message. `text` is shown in notifications and read by screen readers."""

    text: str
    blocks: tuple[Json, ...]

    @property
    def digest(self) -> str:
        """Hash of the content. A message with an unchanged digest is not updated."""
        return hashlib.sha256(json.dumps([self.text, self.blocks], sort_keys=True).encode()).hexdigest()[:16]


def message(text: str, *blocks: Json) -> SlackMessage:
    """Return a message; `text` is not escaped yet."""
    return SlackMessage(text=line(text, MESSAGE_MAX) or "–", blocks=blocks)


# ------------------------------------------------------------------------------------------------ the job's own message


def root(snapshot: JobSnapshot) -> SlackMessage:
    """Return a job's root message: state, progress, money, machine and buttons. Equal states give equal messages."""
    job = snapshot.job
    run = snapshot.attempts[-1] if snapshot.attempts else None
    state = _state(job, run)
    blocks: list[Json] = [
        {"type": "header", "text": plain(f"{SYMBOL[job.state]} {job.spec.name}", HEADER_MAX)},
        section(f"*{line(state, 200)}*", *_where(job, run), *_progress(job, snapshot.attempts)),
        {"type": "section", "fields": [mrkdwn(text) for text in _money(job, run)]},
        context(f"{line(job.owner, 100)} · {line(job.team, 100)} · {code(f'gpubroker watch {job.id}')}"),
    ]
    if actions := buttons(job):
        blocks.append({"type": "actions", "block_id": f"job-{job.id}", "elements": actions})
    spent = f"{format_usd(job.spent_usd)} of {format_usd(job.cap_usd)}"
    return message(f"{job.spec.name}: {state}, {spent}", *blocks)


def _state(job: Job, run: Attempt | None) -> str:
    if job.state is not JobState.ACTIVE or run is None:
        return job.state.value.replace("_", " ") + (" (stopping)" if job.stop_requested and not job.finished_at else "")
    phase = run.beat.phase if run.beat else ""
    inner = f" ({phase})" if phase not in PHASES else ""
    return f"attempt {run.number} {run.state.value}{inner}" + (", stopping" if job.stop_requested else "")


def _where(job: Job, run: Attempt | None) -> list[str]:
    """Return the machine of a running job, otherwise the reason why it waits or ended."""
    if job.state is JobState.ACTIVE and run is not None:
        return [line(machine(run), 500)]
    return [line(job.reason, 800)] if job.reason else []


def machine(run: Attempt) -> str:
    """Return `vast (simulated) eu-se · 2× l40s 45 GiB · spot · $0.50/h`."""
    offer, nodes = run.line.offer, run.line.nodes
    cloud = f"{offer.cloud} (simulated)" if offer.simulated else offer.cloud
    count = f"{offer.gpus}× " if offer.gpus > 1 else ""
    machines = f"{nodes} nodes of " if nodes > 1 else ""
    memory = f" {offer.gpu_memory_bytes / GIB:.0f} GiB" if offer.gpu_memory_bytes else ""
    market = "spot" if offer.spot else "on-demand"
    price = f"{format_usd(offer.usd_per_hour * nodes)}/h"
    return f"{cloud} {offer.region} · {machines}{count}{offer.accelerator}{memory} · {market} · {price}"


def _progress(job: Job, attempts: Sequence[Attempt]) -> list[str]:
    beats = [a.beat for a in attempts if a.beat is not None]
    total = max((b.total_steps for b in beats), default=0)
    if not total:
        return []
    step = next((b.step for b in reversed(beats) if b.step), 0)
    now = beats[-1]
    facts = [f"step {step}/{total}"]
    if now.loss is not None:
        facts.append(f"loss {now.loss:.3f}")
    if job.state is JobState.ACTIVE and now.tokens_per_s is not None:
        facts.append(f"{now.tokens_per_s:,.0f} tokens/s")
    left = _left_s(job, attempts[-1])
    if left is not None:
        facts.append(f"{duration(left)} left")
    return [f"`{bar(step / total)}` {step / total:.0%}", line(" · ".join(facts), 300)]


def _left_s(job: Job, run: Attempt) -> float | None:
    """Return seconds of training left at the current speed, or None if unknown."""
    beat = run.beat
    if beat is None or beat.phase != "training" or not beat.rows_per_s or job.spec.train is None or not run.live:
        return None
    return (beat.total_steps - beat.step) * job.spec.train.global_batch_rows / beat.rows_per_s


def _money(job: Job, run: Attempt | None) -> list[str]:
    share = float(job.spent_usd / job.cap_usd) if job.cap_usd else 1.0
    spent = f"*Spent*\n{format_usd(job.spent_usd)} of {format_usd(job.cap_usd)}\n`{bar(share, 10)}` {share:.0%}"
    expected = run.line.usd_p50 if run is not None and job.state is JobState.ACTIVE else None
    return [spent] if expected is None else [spent, f"*Expected for this attempt*\n{format_usd(expected)}"]


# -------------------------------------------------------------------------------------------------------------- buttons


def extended(cap: Decimal) -> Decimal:
    """Return the cap that the button offers: `cap` plus a quarter, rounded up to whole cents."""
    return (cap * EXTEND_BY).quantize(CENT, rounding=ROUND_CEILING)


def buttons(job: Job) -> list[Json]:
    """Return the buttons for a job's state; each asks for confirmation."""
    if job.state is JobState.AWAITING_APPROVAL:
        question = f"It may then spend up to {format_usd(job.cap_usd)}."
        return [
            _button("approve", "Approve", job, question, value=f"{job.id}:{job.cap_usd}", style="primary"),
            _button("refuse", "Refuse", job, "It will be cancelled.", style="danger"),
        ]
    elements = []
    new_cap = extended(job.cap_usd)
    if job.state in (JobState.QUEUED, JobState.ACTIVE, JobState.RECOVERING, JobState.CAPPED) and new_cap <= CAP_MAX:
        question = (
            f"Raise the cap from {format_usd(job.cap_usd)} to {format_usd(new_cap)}. That much may be spent then."
        )
        elements.append(
            _button("extend", f"Cap to {format_usd(new_cap)}", job, question, value=f"{job.id}:{job.cap_usd}:{new_cap}")
        )
    if job.state in (JobState.QUEUED, JobState.ACTIVE, JobState.RECOVERING) and not job.stop_requested:
        question = "It saves a checkpoint and stops; its machines are destroyed."
        elements.append(_button("cancel", "Cancel", job, question, style="danger"))
    if job.state in (JobState.FAILED, JobState.CANCELLED, JobState.CAPPED):
        question = f"A new job resumes from the last checkpoint, with a cap of {format_usd(job.cap_usd)} of its own."
        elements.append(_button("retry", "Retry", job, question))
    return elements


def _button(action: str, label: str, job: Job, question: str, *, value: str = "", style: str = "") -> Json:
    button: Json = {
        "type": "button",
        "action_id": f"gpubroker.{action}",
        "text": plain(label, 30),
        "value": value or job.id,
        "confirm": {
            "title": plain(f"{label}: {job.spec.name}?", 100),
            "text": plain(question, CONFIRM_MAX),
            "confirm": plain(label, 30),
            "deny": plain("Leave it", 30),
        },
    }
    return button | {"style": style} if style else button


# -------------------------------------------------------------------------------------------------------------- the end


def end_message(snapshot: JobSnapshot, curve: Losses) -> SlackMessage:
    """Return the summary of an ended job. `curve` is drawn with characters, for messages without a picture."""
    job, attempts = snapshot.job, snapshot.attempts
    spark = sparkline(curve)
    blocks = [
        section(
            f"{SYMBOL[job.state]} *{line(job.spec.name, 200)}* {job.state.value}"
            + (f": {line(job.reason, 800)}" if job.reason else ""),
            *(line(fact, 300) for fact in _facts(job, attempts)),
            *([f"loss `{spark}` {curve[0][1]:.3f} → {curve[-1][1]:.3f}"] if len(curve) > 1 and spark else []),
        )
    ]
    if attempts:
        lines_shown = [line(_attempt(a), 220) for a in attempts[-ATTEMPTS_SHOWN:]]
        hidden = len(attempts) - len(lines_shown)
        blocks.append(section(*([f"{hidden} earlier attempts"] if hidden else []), *lines_shown))
    if any(a.beat or a.final for a in attempts):
        blocks.append(context(f"files: {code(f'gpubroker artifacts {job.id} --to DIR')}"))
    spent = f"{format_usd(job.spent_usd)} of {format_usd(job.cap_usd)}"
    return message(f"{job.spec.name} {job.state.value}, {spent}", *blocks)


def _facts(job: Job, attempts: Sequence[Attempt]) -> list[str]:
    interruptions = sum(a.reason in (Reason.PREEMPTED, Reason.LOST) for a in attempts)
    count = f"{len(attempts)} attempt{'' if len(attempts) == 1 else 's'}, {interruptions} preempted"
    reached = max((end for _, end in map(steps, attempts) if end is not None), default=0)
    redone = f"; {reached} steps, {steps_redone(attempts)} of them lost and redone" if reached else ""
    facts = [f"{count}{redone}; {duration(_seconds(job.created_at, job.finished_at))}"]
    facts.append(f"{format_usd(job.spent_usd)} spent of {format_usd(job.cap_usd)}")
    finals = [a.final for a in attempts if a.final is not None]
    before = next((f.heldout_loss_before for f in reversed(finals) if f.heldout_loss_before is not None), None)
    after = finals[-1].heldout_loss_after if finals else None
    if before is not None and after is not None:
        facts.append(f"held-out loss {before:.3f} → {after:.3f}")
    return facts


def _attempt(run: Attempt) -> str:
    start, end = steps(run)
    did = "" if start is None else f" · steps {start} → {end}"
    why = run.reason.value if run.reason else run.state.value
    return f"{run.number}. {machine(run)}{did} · {why} · {format_usd(run.charged_usd)}"


def _seconds(start: datetime, end: datetime | None) -> float | None:
    return None if end is None else (end - start).total_seconds()
