"""Find the job that a JOB argument names: by id, prefix of an id, name, or `last` (the user's newest job)."""

import re

from broker.cli.core.exit_codes import BadInput, NotFoundExit
from broker.client.async_client import AsyncClient
from broker.domain.job import RESTING_JOB_STATES

FULL_ID = re.compile(r"[a-z2-7]{13}")
SEARCHED_JOBS = 500
MIN_PREFIX = 4
"""Characters of the shortest accepted prefix of an id. A shorter prefix could match a job because of a typing error."""


async def job_id(client: AsyncClient, name: str) -> str:
    """Return the id of the job that `name` means, searched among the newest jobs. A full id is returned unchecked.

    A name means the live job of that name, otherwise the newest. Raises NotFoundExit, and BadInput when several live
    jobs have the name or several ids begin with it.
    """
    if FULL_ID.fullmatch(name):
        return name
    if name == "last":
        me = await client.me()
        newest = (await client.jobs(team=me.team, owner=me.owner, limit=1)).items
        if not newest:
            raise NotFoundExit("you have no job yet; `gpubroker submit SPEC.yaml` makes one")
        return newest[0].id
    if not name:
        raise BadInput("JOB is empty; give a job id, its first characters, a name, or last")
    jobs = (await client.jobs(limit=SEARCHED_JOBS)).items
    by_prefix = [j.id for j in jobs if j.id.startswith(name)] if len(name) >= MIN_PREFIX else []
    named = [j for j in jobs if j.name == name]
    matching = by_prefix or [j.id for j in named if j.state not in RESTING_JOB_STATES] or [j.id for j in named[:1]]
    if not matching:
        short = f" (a prefix of an id has at least {MIN_PREFIX} characters)" if len(name) < MIN_PREFIX else ""
        raise NotFoundExit(f"no job {name!r} among the newest {SEARCHED_JOBS}{short}; `gpubroker ls` lists jobs")
    if len(matching) > 1:
        raise BadInput(f"{name!r} matches {len(matching)} jobs ({', '.join(matching[:5])}); give the id")
    return matching[0]
