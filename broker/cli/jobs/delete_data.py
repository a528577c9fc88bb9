"""`gpubroker rm`: delete what a job keeps."""

from enum import StrEnum
from typing import Annotated

import typer

from broker.api.schemas.job_data import StoredKindView
from broker.cli.core.command import JobArgument, Json, client, command
from broker.cli.core.confirm import confirm
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output
from broker.cli.views.jobs import kept


class DataKind(StrEnum):
    """What a job keeps."""

    ARTIFACTS = "artifacts"
    CHECKPOINTS = "checkpoints"
    LOGS = "logs"
    DATA = "data"


@command
async def rm(
    job: JobArgument,
    data: Annotated[bool, typer.Option("--data", help="What it keeps in the blob store. A job itself stays.")] = False,
    kind: Annotated[list[DataKind] | None, typer.Option("--kind", "-k", help="Repeat; default: all of them.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a job's data: results, checkpoints, logs and its copy of the data set. What it costs is shown first."""
    out = Output(as_json=as_json)
    if not data:
        raise BadInput("say what to remove: --data; jobs themselves stay, as their ledgers do")
    kinds: tuple[StoredKindView, ...] = tuple(one.value for one in kind or DataKind)
    async with client() as c:
        detail = await c.job(await job_id(c, job))
        out.say(f"{detail.name} ({detail.id}) {kept(detail.storage)}")
        asked = f"Delete its {', '.join(kinds)}? They cannot be brought back"
        confirm(out, asked, yes=yes or as_json, to="delete", else_="nothing was deleted")
        after = await c.delete_data(detail.id, kinds)
    out.document(after)
    out.say(f"deleted: {', '.join(kinds)}; the objects follow within minutes")
