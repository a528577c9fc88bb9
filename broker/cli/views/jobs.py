"""Jobs in a list and one job alone, for people."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from broker.api.schemas.job_data import StorageView
from broker.api.schemas.jobs import JobDetail, JobView
from broker.cli.core import formatting as words
from broker.cli.core.table import Column, TerminalTable
from broker.cli.views.progress import view
from broker.domain.job import JobState

COLOURS = {
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CAPPED: "red",
    JobState.ACTIVE: "cyan",
    JobState.RECOVERING: "yellow",
}


COLUMNS = (
    Column(name="job"),
    Column(name="name", least=8),
    Column(name="owner", least=8, rank=4),
    Column(name="state"),
    Column(name="attempts", right=True, rank=5),
    Column(name="spent", right=True),
    Column(name="cap", right=True, rank=2),
    Column(name="forecast", right=True, rank=3),
    Column(name="age", rank=6),
    Column(name="why", least=12, prose=True, rank=1),
)


def table(jobs: Iterable[JobView]) -> TerminalTable:
    """Newest first, as they come; of whom, where it is not all the same person."""
    jobs = list(jobs)
    several = len({(job.team, job.owner) for job in jobs}) > 1
    shown = [n for n, column in enumerate(COLUMNS) if several or column.name != "owner"]
    return TerminalTable([COLUMNS[n] for n in shown], ([_row(job)[n] for n in shown] for job in jobs))


def _row(job: JobView) -> tuple[str | Text, ...]:
    state = Text(job.state.value, style=COLOURS.get(job.state, ""))
    spent, cap = words.money(job.spent_usd), words.money(job.cap_usd)
    return (
        job.id, job.name, f"{job.team}/{job.owner}", state, str(job.attempts), spent, cap, forecast(job),
        words.ago(job.created_at), job.reason,
    )  # fmt: skip


def forecast(job: JobView) -> Text:
    """Expected dollars at its end; red when they, or its time, do not suffice."""
    made = job.forecast
    if made is None:
        return Text("–")
    return Text(words.money(made.usd), style="red" if made.over_cap or made.late else "")


def foreseen(job: JobView) -> str:
    made = job.forecast
    if made is None:
        return ""
    notes = "; above the cap" * made.over_cap + "; too late" * made.late
    return f"{words.money(made.usd)} by {made.finish_at:%Y-%m-%d %H:%M} UTC (P50){notes}"


def detail(job: JobDetail) -> Table:
    """One job: a line a fact, a line an attempt."""
    now = view(job)
    shown = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    facts = [
        ("job", f"{job.name} ({job.id})"),
        ("state", now.state + (f": {job.reason}" if job.reason else "")),
        (
            "money",
            f"{words.money(job.spent_usd)} spent of {words.money(job.cap_usd)}, {words.money(job.reserved_usd)} held",
        ),
        (
            "submitted",
            f"{words.ago(job.created_at)} by {job.owner}" + (f", retry of {job.retry_of}" if job.retry_of else ""),
        ),
        ("labels", ", ".join(f"{k}:{v}" for k, v in job.labels.items())),
        ("progress", now.line() if job.runs else ""),
        ("forecast", foreseen(job)),
        ("storage", kept(job.storage) if job.storage else ""),
        ("estimate", job.runs[-1].evidence if job.runs else ""),
        ("out of memory", "; ".join(job.ran_out_of_memory)),
    ]
    for name, text in facts:
        if text:
            shown.add_row(name, Text(text))
    for run in job.runs:
        why = f" ({run.reason.value})" if run.reason else ""
        what = f"{run.state.value}{why}, {words.machine(run)}, {words.money(run.charged_usd)}"
        shown.add_row(f"attempt {run.number}", Text(what + (f": {run.detail}" if run.detail else "")))
    return shown


def kept(storage: StorageView | None) -> str:
    """What is kept, what that costs, and what it has cost."""
    if storage is None:
        return "keeps data that nobody has measured yet"
    text = f"keeps {words.size(storage.bytes)}, {words.money(storage.usd_per_month)} a month"
    text += f", {words.money(storage.usd)} so far"
    gone = ", ".join(f"{one.what} on {one.at:%Y-%m-%d}" for one in storage.deleted)
    return text + (f"; deleted already: {gone}" if gone else "")
