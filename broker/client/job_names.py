"""Jobs by name for the Python client: an id is sent as it is, a name is looked up."""

import re
from collections.abc import Iterable

from broker.api.schemas.base import ProblemView
from broker.api.schemas.job_list import JobView
from broker.client.transport.errors import ApiError
from broker.domain.job import RESTING_JOB_STATES

FULL_ID = re.compile(r"[a-z2-7]{13}")
SEARCHED_JOBS = 500


def is_id(job: str) -> bool:
    return FULL_ID.fullmatch(job) is not None


def named(jobs: Iterable[JobView], name: str) -> str:
    """Return the id of the live job with this name, otherwise of the newest one. `jobs`: newest first.

    Raises ApiError if no job, or several live jobs, have the name.
    """
    matching = [job for job in jobs if job.name == name]
    live = [job.id for job in matching if job.state not in RESTING_JOB_STATES]
    if not matching:
        detail = f"no job {name!r} among the newest {SEARCHED_JOBS}; give an id or a name of `jobs()`"
        raise ApiError(ProblemView(title="Not Found", status=404, detail=detail))
    if len(live) > 1:
        detail = f"{name!r} matches {len(live)} live jobs ({', '.join(live[:5])}); give the id"
        raise ApiError(ProblemView(title="Conflict", status=409, detail=detail))
    return live[0] if live else matching[0].id
