"""Jobs by name for the Python client and the command line: an id that exists is used, a name is looked up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from broker.api.schemas.base import ProblemView
from broker.api.schemas.job_list import JobPage, JobView
from broker.client.transport.errors import ApiError
from broker.domain.job import RESTING_JOB_STATES, JobState, jobs_meant

if TYPE_CHECKING:
    from broker.api.schemas.tenancy import Identity

FULL_ID = re.compile(r"[a-z2-7]{13}")
SEARCHED_JOBS = 500
"""Number of newest jobs of all owners, of live jobs, and of own jobs, among which a name is looked up."""
LIVE_STATES = tuple(state for state in JobState if state not in RESTING_JOB_STATES)


class JobLists(Protocol):
    """Calls of the client that a look-up needs."""

    async def me(self) -> Identity: ...

    async def jobs(
        self, *, states: Sequence[str] = (), team: str | None = None, owner: str | None = None, limit: int = 50
    ) -> JobPage: ...


def is_id(job: str) -> bool:
    """Return whether a text has the form of an id. A name may have this form too."""
    return FULL_ID.fullmatch(job) is not None


async def searched(client: JobLists, team: str, owner: str) -> Sequence[JobView]:
    """List the jobs among which a name is looked up, newest first: live jobs, the owner's jobs, and the newest."""
    pages = [
        await client.jobs(limit=SEARCHED_JOBS),
        await client.jobs(team=team, owner=owner, limit=SEARCHED_JOBS),
        await client.jobs(states=LIVE_STATES, limit=SEARCHED_JOBS),
    ]
    jobs = {job.id: job for page in pages for job in page.items}
    return sorted(jobs.values(), key=lambda job: (job.created_at, job.id), reverse=True)


async def find(client: JobLists, name: str, *, writes: bool) -> str:
    """Return the id of the job with this name. Raises ApiError if no job, or several, may be meant."""
    me = await client.me()
    named = [job for job in await searched(client, me.team, me.owner) if job.name == name]
    matching = [job.id for job in jobs_meant(named, me.team, me.owner, writes=writes)]
    if not matching:
        detail = f"no job {name!r} among the newest {SEARCHED_JOBS}; give an id or a name of `jobs()`"
        raise ApiError(ProblemView(title="Not Found", status=404, detail=detail))
    if len(matching) > 1:
        detail = f"{name!r} matches {len(matching)} jobs ({', '.join(matching[:5])}); give the id"
        raise ApiError(ProblemView(title="Conflict", status=409, detail=detail))
    return matching[0]


async def find_like_an_id(client: JobLists, text: str, *, writes: bool) -> str:
    """Return the id of the job with a name that has the form of an id, or the text if there is no such job.

    Raises ApiError (409) if several jobs may be meant.
    """
    try:
        return await find(client, text, writes=writes)
    except ApiError as e:
        if e.problem.status == 409:
            raise
        return text  # the request with this id is refused
