"""`gpubroker rm`: delete the stored data of a job."""

from enum import StrEnum
from typing import Annotated

import typer

from broker.api.schemas.job_data import StoredKindView
from broker.cli.core.command import JobArgument, Json, client, command, confirm
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output
from broker.cli.views.jobs import storage_message


class DataKind(StrEnum):
    """Kinds of data that a job stores."""

    ARTIFACTS = "artifacts"
    CHECKPOINTS = "checkpoints"
    LOGS = "logs"
    DATA = "data"


@command
async def rm(
    job: JobArgument,
    data: Annotated[
        bool, typer.Option("--data", help="Required: delete data in the blob store. The job itself is kept.")
    ] = False,
    kind: Annotated[
        list[DataKind] | None, typer.Option("--kind", "-k", help="Kind of data. Repeatable; default: all kinds.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a job's results, checkpoints, logs and data set copy. Shows their cost and asks first."""
    out = Output(as_json=as_json)
    if not data:
        raise BadInput("add --data to delete the job's data; the job itself and its ledger are always kept")
    kinds: tuple[StoredKindView, ...] = tuple(member.value for member in kind or DataKind)
    async with client() as c:
        detail = await c.job(await job_id(c, job, writes=True))
        out.print(f"{detail.name} ({detail.id}) {storage_message(detail.storage)}")
        question = f"Delete its {', '.join(kinds)}? This cannot be undone"
        confirm(out, question, yes=yes or as_json, verb="delete", refusal="nothing was deleted")
        after = await c.delete_data(detail.id, kinds)
    out.document(after)
    out.print(f"deleted: {', '.join(kinds)}; the objects are removed within minutes")
