"""`gpubroker compare`: runs side by side, with results, money and the settings in which their specs differ."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from broker.api.schemas.jobs import JobDetail
from broker.cli.core import formatting
from broker.cli.core.command import Json, client, command
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.domain.job import RESTING_JOB_STATES
from broker.reporting.comparison import (
    MAX_RUNS,
    ReportedResult,
    SpecDifference,
    run_result,
    setting_text,
    spec_differences,
)

COLUMN_CELLS = 12
"""Terminal cells to which the column of a run may shrink."""


@command
async def compare(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB JOB...", help=f"2 to {MAX_RUNS} jobs: ids, their first characters, names, `last`."),
    ],
    as_json: Json = False,
) -> None:
    """Compare up to 8 runs: results, money, time, and the settings in which their specs differ."""
    out = Output(as_json=as_json)
    async with client() as c:
        ids = list(dict.fromkeys([await job_id(c, job) for job in jobs[: MAX_RUNS + 1]]))
        if not 1 < len(ids) <= MAX_RUNS:
            raise BadInput(f"JOB: name 2 to {MAX_RUNS} different jobs; `gpubroker ls` lists jobs")
        details = [await c.job(full_id) for full_id in ids]
    results = [run_result(job.runs) for job in details]
    differences = spec_differences([job.spec for job in details])
    out.document(
        {
            "runs": [_document(job, result) for job, result in zip(details, results, strict=True)],
            "differences": TypeAdapter(list[SpecDifference]).dump_python(differences, mode="json"),
        }
    )
    heads = [Column(name=f"{job.name} {job.id[:6]}", min_width=COLUMN_CELLS) for job in details]
    rows = [_row(job, result) for job, result in zip(details, results, strict=True)]
    facts = [(name, *(row[name] for row in rows)) for name in rows[0]]
    settings = [(d.path, *map(setting_text, d.values)) for d in differences]
    out.print(TerminalTable([Column(name=""), *heads], [*facts, *settings]))
    link = ",".join(job.id for job in details)
    out.print(f"curves: the page /ui/compare?jobs={link}, which `gpubroker web` signs in to")


def _seconds(job: JobDetail) -> float:
    """Return the seconds from the submit to the end, or until now."""
    ended = job.finished_at or max((run.ended_at for run in job.runs if run.ended_at), default=job.created_at)
    is_over = job.state in RESTING_JOB_STATES
    return ((ended if is_over else datetime.now(UTC)) - job.created_at).total_seconds()


def _document(job: JobDetail, result: ReportedResult) -> dict[str, Any]:
    """Return a run as JSON values, with money as decimal strings."""
    measured: dict[str, Any] = TypeAdapter(ReportedResult).dump_python(result, mode="json")
    money = {"spent_usd": str(job.spent_usd), "cap_usd": str(job.cap_usd)}
    return {
        "job": job.id, "name": job.name, "state": job.state.value, **measured, **money, "seconds": _seconds(job),
        "attempts": job.attempts,
    }  # fmt: skip


def _row(job: JobDetail, result: ReportedResult) -> dict[str, str]:
    """Return the facts of a run by their names."""
    before, after = result.heldout_before, result.heldout_after
    return {
        "state": job.state.value,
        "step": f"{result.step:,} of {result.total_steps:,}" if result.total_steps else "–",
        "loss": "–" if result.loss is None else f"{result.loss:.4f}",
        "held-out loss": "–" if after is None else f"{'–' if before is None else f'{before:.4f}'} -> {after:.4f}",
        "tokens/s": "–" if result.tokens_per_s is None else f"{result.tokens_per_s:,.0f}",
        "spent": f"{formatting.money(job.spent_usd)} of {formatting.money(job.cap_usd)}",
        "time": formatting.duration(_seconds(job)),
        "attempts": str(job.attempts),
        "latest machine": formatting.machine(job.runs[-1]) if job.runs else "–",
    }
