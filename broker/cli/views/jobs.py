"""The facts of a single job."""

from rich.table import Table
from rich.text import Text

from broker.api.schemas.job_data import StorageView
from broker.api.schemas.jobs import JobDetail, JobView
from broker.cli.core import formatting
from broker.cli.views.progress import view


def forecast_message(job: JobView) -> str:
    """Return the expected total cost and end of a job; empty without a forecast."""
    expected = job.forecast
    if expected is None:
        return ""
    notes = "; above the cap" * expected.over_cap + "; too late" * expected.late
    text = f"{formatting.money(expected.usd)} by {expected.finish_at:%Y-%m-%d %H:%M} UTC (P50)"
    if (interval := expected.interval) is not None:
        text += f"; 90 % interval {formatting.money(interval.usd_low)} to {formatting.money(interval.usd_high)}"
        text += f", {interval.finish_earliest:%Y-%m-%d %H:%M} to {interval.finish_latest:%Y-%m-%d %H:%M} UTC"
    return text + notes


def detail(job: JobDetail) -> Table:
    """Return the facts and attempts of one job, one per line."""
    now, spent = view(job), formatting.money(job.spent_usd)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    facts = [
        ("job", f"{job.name} ({job.id})"),
        ("state", now.state + (f": {job.reason}" if job.reason else "")),
        ("money", f"{spent} spent of {formatting.money(job.cap_usd)}, {formatting.money(job.reserved_usd)} reserved"),
        (
            "submitted",
            f"{formatting.ago(job.created_at)} by {job.owner}" + (f", retry of {job.retry_of}" if job.retry_of else ""),
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
            table.add_row(name, Text(text))
    for run in job.runs:
        why = f" ({run.reason.value})" if run.reason else ""
        what = f"{run.state.value}{why}, {formatting.machine(run)}, {formatting.money(run.charged_usd)}"
        table.add_row(f"attempt {run.number}", Text(what + (f": {run.detail}" if run.detail else "")))
    return table


def storage_message(storage: StorageView | None) -> str:
    """Return the size of a job's stored data with the age of the figure, its monthly cost and its cost so far."""
    if storage is None:
        return "stores data whose size is not measured yet"
    text = f"stores {formatting.size(storage.bytes)} (measured {formatting.ago(storage.measured_at)})"
    text += f", {formatting.money(storage.usd_per_month)} a month, {formatting.money(storage.usd)} so far"
    deleted = ", ".join(f"{deletion.what} on {deletion.at:%Y-%m-%d}" for deletion in storage.deleted)
    return text + (f"; already deleted: {deleted}" if deleted else "")
