"""`gpubroker calibration`: how well the forecasts of finished jobs held."""

from collections.abc import Iterator

from broker.api.schemas.spending import CalibrationRowView, CalibrationView
from broker.cli.commands.spending import Since, Until
from broker.cli.core.command import Json, client, command
from broker.cli.core.durations import past
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.domain.spending import error_text, within_text

COLUMNS = (
    Column(name="by", rank=6),
    Column(name="group", min_width=8),
    Column(name="jobs", right=True, rank=5),
    Column(name="money", right=True),
    Column(name="error", right=True, rank=1),
    Column(name="time", right=True),
    Column(name="error", right=True, rank=2),
    Column(name="memory", right=True),
    Column(name="error", right=True, rank=3),
)
NOTES = (
    "money, time, memory: jobs within the P90 of the quote that bought their first working machine",
    "memory is within P90 if the peak was at most the size that the quote required",
    "error: median of |result / P50 - 1|",
)


@command
async def calibration(since: Since = None, until: Until = None, as_json: Json = False) -> None:
    """Show how many finished jobs stayed within the P90 of their quote, and the median error, by group."""
    since, until = past("--since", since), past("--until", until)
    async with client() as c:
        view = await c.calibration(since=since, until=until)
    out = Output(as_json=as_json)
    out.document(view)
    if not as_json:
        _show(out, view)


def _show(out: Output, view: CalibrationView) -> None:
    out.print(f"{view.since:%Y-%m-%d %H:%M} to {view.until:%Y-%m-%d %H:%M} UTC")
    if not view.total.jobs:
        out.print("no job finished")
        return
    rows = [tuple(_cells(row)) for row in view.rows]
    out.print(TerminalTable(COLUMNS, rows, total=tuple(_cells(view.total))), *NOTES)


def _cells(row: CalibrationRowView) -> Iterator[str]:
    yield from ("" if row.by == "all" else row.by, row.key, str(row.jobs))
    for record in (row.money, row.time, row.memory):
        yield within_text(record.judged, record.within)
        yield error_text(record.median_error)
