"""Up to eight runs side by side: curves, results, money and the settings in which their specs differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from aiohttp import web

from broker.domain.job import RESTING_JOB_STATES, Attempt, Job
from broker.domain.spec import JobSpec
from broker.ports import JobFilter
from broker.reporting.comparison import (
    MAX_RUNS,
    ReportedResult,
    SpecDifference,
    run_result,
    setting_text,
    spec_differences,
)
from broker.web import formats
from broker.web.browser import Visit, redirect_to
from broker.web.pages.run import job_of_team
from broker.web.routes import Routes

routes = Routes()
OFFERED_JOBS = 30
"""Newest jobs that the form offers."""
SHOWN_DIFFERENCES = 200
SHOWN_CHARACTERS = 300
"""Characters of a setting that are shown; the run's tab Spec has all."""


@dataclass(frozen=True, kw_only=True)
class ComparedColumn:
    """A column of the comparison."""

    job: Job
    attempt: Attempt | None
    """Latest attempt; None: nothing was bought yet."""
    word: str
    shape: str
    is_over: bool
    result: ReportedResult
    seconds: float
    """Seconds from the submit to the end, or until now."""
    without: str
    """Query of the comparison without this run."""


@routes.get("/ui/compare")
async def compare(visit: Visit) -> web.Response:
    """Compare the runs that the URL names; without any, offer the newest jobs."""
    query = visit.request.query
    ids = list(dict.fromkeys(i for i in [*query.get("jobs", "").split(","), *query.getall("job", [])] if i))
    if "job" in query:
        return redirect_to(
            f"/ui/compare?jobs={quote(','.join(ids), safe=',')}"
        )  # the form's address as one that is shared
    values: dict[str, Any] = {"runs": (), "differences": (), "hidden": 0, "fault": "", "chosen": (), "most": MAX_RUNS}
    if len(ids) > MAX_RUNS:
        values["fault"] = f"jobs: {len(ids)} runs are chosen, at most {MAX_RUNS} are compared; choose fewer"
    else:
        jobs = [await job_of_team(visit, job_id) for job_id in ids]
        values["runs"] = [await _run(visit, job, jobs) for job in jobs]
        threads = visit.service.quotes.threads.of_team(visit.caller.team)
        values["differences"], values["hidden"] = await threads(lambda: _differences([job.spec for job in jobs]))
        values["chosen"] = jobs
    newest = (await visit.service.jobs(visit.caller, JobFilter(limit=OFFERED_JOBS), None)).jobs
    chosen_ids = {job.id for job in values["chosen"]}
    values["offered"] = [*values["chosen"], *(job for job in newest if job.id not in chosen_ids)]
    return visit.page("compare.html", 422 if values["fault"] else 200, words=formats.STATES, **values)


async def _run(visit: Visit, job: Job, jobs: Sequence[Job]) -> ComparedColumn:
    attempts = await visit.service.attempts(visit.caller, job)
    latest = attempts[-1] if attempts else None
    word, shape = formats.state(job, latest)
    is_over = job.state in RESTING_JOB_STATES
    ended = job.finished_at or max((a.ended_at for a in attempts if a.ended_at), default=job.created_at)
    others = ",".join(other.id for other in jobs if other.id != job.id)
    return ComparedColumn(
        job=job,
        attempt=latest,
        word=word,
        shape=shape,
        is_over=is_over,
        result=run_result(attempts),
        seconds=((ended if is_over else visit.service.clock.now()) - job.created_at).total_seconds(),
        without=f"?jobs={others}" if others else "",
    )


def _differences(specs: Sequence[JobSpec]) -> tuple[list[tuple[str, list[str]]], int]:
    """Return (path and texts of each difference that is shown, number of the others)."""
    differences = spec_differences(specs)
    rows = [(d.path, _texts(d)) for d in differences[:SHOWN_DIFFERENCES]]
    return rows, len(differences) - len(rows)


def _texts(difference: SpecDifference) -> list[str]:
    """Return the setting in each run, shortened."""
    texts = [setting_text(value) for value in difference.values]
    return [t if len(t) <= SHOWN_CHARACTERS else f"{t[:SHOWN_CHARACTERS]}…" for t in texts]
