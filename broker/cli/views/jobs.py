"""Tables of a list of jobs and of a single job."""

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
    Column(name="name", min_width=8),
    Column(name="owner", min_width=8, rank=4),
    Column(name="state"),
    Column(name="attempts", right=True, rank=5),
    Column(name="spent", right=True),
    Column(name="cap", right=True, rank=2),
    Column(name="forecast", right=True, rank=3),
    Column(name="age", rank=6),
    Column(name="why", min_width=12, prose=True, rank=1),
)


def table(jobs: Iterable[JobView]) -> TerminalTable:
    """Return the jobs in the given order; the owner column appears only if owners differ."""
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
    """Return the expected total cost; red when it exceeds the cap or the job will be late."""
    expected = job.forecast
    if expected is None:
        return Text("–")
    return Text(words.money(expected.usd), style="red" if expected.over_cap or expected.late else "")


def forecast_message(job: JobView) -> str:
    """Return the expected total cost and end of a job; empty without a forecast."""
    expected = job.forecast
    if expected is None:
        return ""
    notes = "; above the cap" * expected.over_cap + "; too late" * expected.late
    return f"{words.money(expected.usd)} by {expected.finish_at:%Y-%m-%d %H:%M} UTC (P50){notes}"


def detail(job: JobDetail) -> Table:
    """Return the facts and attempts of one job, one per line."""
    now, spent = view(job), words.money(job.spent_usd)
    shown = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    facts = [
        ("job", f"{job.name} ({job.id})"),
        ("state", now.state + (f": {job.reason}" if job.reason else "")),
        ("money", f"{spent} spent of {words.money(job.cap_usd)}, {words.money(job.reserved_usd)} reserved"),
        (
            "submitted",
            f"{words.ago(job.created_at)} by {job.owner}" + (f", retry of {job.retry_of}" if job.retry_of else ""),
        ),
        ("labels", ", ".join(f"{k}:{v}" for k, v in job.labels.items())),
        ("progress", now.line() if job.runs else ""),
        ("forecast", forecast_message(job)),
        ("storage", storage_message(job.storage) if job.storage else ""),
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


def storage_message(storage: StorageView | None) -> str:
    """Return the size of a job's stored data, its monthly cost and its cost so far."""
    if storage is None:
        return "stores data whose size is not measured yet"
    text = f"stores {words.size(storage.bytes)}, {words.money(storage.usd_per_month)} a month"
    text += f", {words.money(storage.usd)} so far"
    deleted = ", ".join(f"{deletion.what} on {deletion.at:%Y-%m-%d}" for deletion in storage.deleted)
    return text + (f"; already deleted: {deleted}" if deleted else "")
