"""The table of `gpubroker ls`."""

from collections.abc import Iterable

from rich.text import Text

from broker.api.schemas.job_list import JobView
from broker.cli.core import formatting
from broker.cli.core.table import Column, TerminalTable
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
    spent, cap = formatting.money(job.spent_usd), formatting.money(job.cap_usd)
    return (
        job.id, job.name, f"{job.team}/{job.owner}", state, str(job.attempts), spent, cap, forecast(job),
        formatting.ago(job.created_at), job.reason,
    )  # fmt: skip


def forecast(job: JobView) -> Text:
    """Return the expected total cost; red when it exceeds the cap or the job will be late."""
    expected = job.forecast
    if expected is None:
        return Text("–")
    return Text(formatting.money(expected.usd), style="red" if expected.over_cap or expected.late else "")
