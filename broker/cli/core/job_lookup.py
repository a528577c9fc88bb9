"""Find the job that a JOB argument names: by id, prefix of an id, name, or `last` (the user's newest job)."""

from collections.abc import Sequence

from broker.cli.core.exit_codes import BadInput, NotFoundExit
from broker.client.async_client import AsyncClient
from broker.client.job_names import SEARCHED_JOBS, is_id, searched
from broker.domain.job import jobs_meant

MIN_PREFIX = 4
"""Characters of the shortest accepted prefix of an id. A shorter prefix could match a job because of a typing error."""


async def job_id(client: AsyncClient, name: str, *, writes: bool = False) -> str:
    """Return the id of the job that `name` means. A full id without a job is looked up as a name, then returned as is.

    A name means the user's live job, otherwise the user's newest. See `jobs_meant` for other owners' jobs. `writes`:
    the command changes the job. Raises NotFoundExit, and BadInput when several jobs may be meant.
    """
    if is_id(name):
        return await client.job_id(name, writes=writes)
    if name == "last":
        me = await client.me()
        newest = (await client.jobs(team=me.team, owner=me.owner, limit=1)).items
        if not newest:
            raise NotFoundExit("you have no job yet; `gpubroker submit SPEC.yaml` makes one")
        return newest[0].id
    if not name:
        raise BadInput("JOB is empty; give a job id, its first characters, a name, or last")
    matching = await _matching(client, name, writes=writes)
    if not matching:
        short = f" (a prefix of an id has at least {MIN_PREFIX} characters)" if len(name) < MIN_PREFIX else ""
        raise NotFoundExit(f"no job {name!r} among the newest {SEARCHED_JOBS}{short}; `gpubroker ls` lists jobs")
    if len(matching) > 1:
        raise BadInput(f"{name!r} matches {len(matching)} jobs ({', '.join(matching[:5])}); give the id")
    return matching[0]


async def _matching(client: AsyncClient, name: str, *, writes: bool) -> Sequence[str]:
    """Return the ids of the jobs that a prefix or a name may mean."""
    me = await client.me()
    jobs = await searched(client, me.team, me.owner)
    by_prefix = [j.id for j in jobs if j.id.startswith(name)] if len(name) >= MIN_PREFIX else []
    named = [j for j in jobs if j.name == name]
    return by_prefix or [j.id for j in jobs_meant(named, me.team, me.owner, writes=writes)]
