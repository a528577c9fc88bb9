"""The table of `gpubroker ls`."""

from collections.abc import Iterable
from datetime import UTC, datetime

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
UNKNOWN = "–"


COLUMNS = (
    Column(name="job"),
    Column(name="name", min_width=9, cut=True, rank=1),
    Column(name="team, owner", min_width=8, rank=6),
    Column(name="state", min_width=8),
    Column(name="GPU", min_width=4, rank=4),
    Column(name="cloud", rank=4),
    Column(name="market", rank=8),
    Column(name="age", right=True, rank=2),
    Column(name="spent", right=True),
    Column(name="cap", right=True, rank=7),
    Column(name="forecast", right=True, rank=9),
    Column(name="ETA", right=True, rank=3),
    Column(name="attempts", right=True, rank=10),
    Column(name="why", min_width=12, prose=True, rank=5),
)


def table(jobs: Iterable[JobView]) -> TerminalTable:
    """Return the jobs in the given order; the owner column appears only if owners differ."""
    jobs = list(jobs)
    several = len({(job.team, job.owner) for job in jobs}) > 1
    visible = [n for n, column in enumerate(COLUMNS) if several or column.name != "team, owner"]
    return TerminalTable([COLUMNS[n] for n in visible], ([_row(job)[n] for n in visible] for job in jobs), plain=True)


def _row(job: JobView) -> tuple[str | Text, ...]:
    state = Text(job.state.value.replace("_", " "), style=COLOURS.get(job.state, ""))
    spent, cap = formatting.money(job.spent_usd), formatting.money(job.cap_usd)
    return (
        job.id, job.name, f"{job.team} {job.owner}", state, _gpu(job), _cloud(job), _market(job),
        formatting.short_age(job.created_at), spent, cap, forecast(job), _eta(job), str(job.attempts), job.reason,
    )  # fmt: skip


def _gpu(job: JobView) -> str:
    """Return `8× h100-sxm`, or for several machines `2 nodes of 8× h100-sxm`."""
    if (machine := job.machine) is None:
        return UNKNOWN
    nodes = f"{machine.nodes} nodes of " if machine.nodes > 1 else ""
    return f"{nodes}{f'{machine.gpus}× ' if machine.gpus > 1 else ''}{machine.accelerator}"


def _cloud(job: JobView) -> str:
    """Return the cloud of the latest attempt; a simulated one is labelled."""
    if (machine := job.machine) is None:
        return UNKNOWN
    return f"{machine.cloud} (sim)" if machine.simulated else machine.cloud


def _market(job: JobView) -> str:
    return UNKNOWN if job.machine is None else "spot" if job.machine.spot else "on-demand"


def _eta(job: JobView) -> Text:
    """Return the forecast time to the end; red when the job will be late."""
    if (expected := job.forecast) is None:
        return Text(UNKNOWN)
    left_s = (expected.finish_at - datetime.now(UTC)).total_seconds()
    return Text(formatting.short_duration(left_s), style="red" if expected.late else "")


def forecast(job: JobView) -> Text:
    """Return the expected total cost; red when it exceeds the cap or the job will be late."""
    expected = job.forecast
    if expected is None:
        return Text(UNKNOWN)
    return Text(formatting.money(expected.usd), style="red" if expected.over_cap or expected.late else "")
