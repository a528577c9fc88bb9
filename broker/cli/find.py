"""Which job a person means: its id, the start of it, its name, or `last`, the newest of one's own."""

import re

from broker.cli.exits import BadInput, NotFound
from broker.client.client import AsyncClient

FULL = re.compile(r"[a-z2-7]{13}")
LOOKED_AT = 500


async def job_id(client: AsyncClient, said: str) -> str:
    """Among the newest jobs; a full id is not looked up. Raises NotFound, BadInput when several are meant."""
    if FULL.fullmatch(said):
        return said
    if said == "last":
        me = await client.me()
        newest = (await client.jobs(team=me.team, owner=me.owner, limit=1)).items
        if not newest:
            raise NotFound("you have no job yet; `gpubroker submit SPEC.yaml` makes one")
        return newest[0].id
    jobs = (await client.jobs(limit=LOOKED_AT)).items
    found = [j.id for j in jobs if j.id.startswith(said)] or [j.id for j in jobs if j.name == said]
    if not found:
        raise NotFound(f"no job {said!r} among the newest {LOOKED_AT}; `gpubroker ls` shows what there is")
    if len(found) > 1:
        raise BadInput(f"{said!r} means {len(found)} jobs ({', '.join(found[:5])}); give the id")
    return found[0]
