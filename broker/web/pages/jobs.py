"""The list of jobs, with its filters in the URL."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from pydantic import ValidationError

from broker.api.core import problems
from broker.api.schemas.queries import JobsQuery
from broker.api.service import views
from broker.domain.errors import InvalidInput
from broker.domain.job import Attempt, Job, JobState
from broker.web import formats
from broker.web.browser import Visit
from broker.web.routes import Routes

routes = Routes()
REPEATED = ("state", "label")
"""Filters that may be given several times."""
FILTERS = ("state", "label", "owner", "team", "since", "until", "cursor", "limit")


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One line of the list: the job, and the machine of its latest attempt."""

    job: Job
    attempt: Attempt | None
    word: str
    shape: str

    @property
    def forecast_usd(self) -> Any:
        """Expected dollars at the end; None: not known, or the job does not run."""
        forecast = self.job.forecast
        return forecast.usd if forecast is not None and self.job.state is JobState.ACTIVE else None


@routes.get("/ui/jobs")
async def jobs(visit: Visit) -> web.Response:
    """Show the caller's jobs, newest first; `part=table` only the table, for its refresh."""
    given = visit.request.query
    filters: dict[str, Any] = {
        name: [v for v in given.getall(name) if v] if name in REPEATED else given[name]
        for name in FILTERS
        if given.get(name)
    }
    values: dict[str, Any] = {"chosen": filters, "states": tuple(JobState), "faults": {}, "rows": (), "next": None}
    try:
        query = JobsQuery.model_validate(filters)
        page = await visit.service.jobs(visit.caller, views.job_filter(query), query.cursor)
    except ValidationError as error:
        values["faults"] = _by_field(problems.invalid_input_of(error, JobsQuery, filters, root="query"))
        return visit.page("jobs.html", 422, **values)
    except InvalidInput as error:
        values["faults"] = _by_field(error)
        return visit.page("jobs.html", 422, **values)
    rows = await _rows(visit, page.jobs)
    following = None if page.next is None else urlencode({**filters, "cursor": page.next}, doseq=True)
    template = "jobs_table.html" if given.get("part") == "table" else "jobs.html"
    return visit.page(template, **(values | {"rows": rows, "next": following, "query": _query(filters)}))


def _query(filters: Mapping[str, Any]) -> str:
    return urlencode({**filters, "part": "table"}, doseq=True)


def _by_field(error: InvalidInput) -> dict[str, str]:
    """Return the API's line for each field; of a repeated field the first."""
    lines: dict[str, str] = {}
    for fault in error.problems:
        lines.setdefault(fault.field.partition(".")[0].partition("[")[0], fault.message)
    return lines


async def _rows(visit: Visit, jobs: Any) -> list[JobRow]:
    """Return the rows with one query for all attempts."""
    attempts = await visit.service.latest_attempts(jobs)
    rows = []
    for job in jobs:
        attempt = attempts.get(job.id)
        word, shape = formats.state(job, attempt)
        rows.append(JobRow(job=job, attempt=attempt, word=word, shape=shape))
    return rows
