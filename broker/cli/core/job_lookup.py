"""Which job a person means: its id, the start of it, its name, or `last`, the newest of one's own."""

import re

from broker.cli.core.exit_codes import BadInput, NotFoundExit
from broker.client.async_client import AsyncClient

FULL = re.compile(r"[a-z2-7]{13}")
LOOKED_AT = 500
LEAST_START = 4
"""Characters of an id's start: with fewer, a slip of a key means some job or other."""


async def job_id(client: AsyncClient, said: str) -> str:
    """Among the newest jobs; a full id is not looked up. Raises NotFound, BadInput when several are meant."""
    if FULL.fullmatch(said):
        return said
    if said == "last":
        me = await client.me()
        newest = (await client.jobs(team=me.team, owner=me.owner, limit=1)).items
        if not newest:
            raise NotFoundExit("you have no job yet; `gpubroker submit SPEC.yaml` makes one")
        return newest[0].id
    if not said:
        raise BadInput("JOB is empty; give an id, the start of one, a name, or last")
    jobs = (await client.jobs(limit=LOOKED_AT)).items
    started = [j.id for j in jobs if j.id.startswith(said)] if len(said) >= LEAST_START else []
    found = started or [j.id for j in jobs if j.name == said]
    if not found:
        short = f" (the start of an id takes {LEAST_START} characters)" if len(said) < LEAST_START else ""
        raise NotFoundExit(f"no job {said!r} among the newest {LOOKED_AT}{short}; `gpubroker ls` shows what there is")
    if len(found) > 1:
        raise BadInput(f"{said!r} means {len(found)} jobs ({', '.join(found[:5])}); give the id")
    return found[0]
