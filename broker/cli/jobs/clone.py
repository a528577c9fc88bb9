"""`gpubroker clone`: the spec of a job as a file, to change it and submit it again."""

from pathlib import Path
from typing import Annotated

import typer

from broker.cli.core.command import JobArgument, Json, client, command
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output
from broker.cli.spec.spec_yaml import spec_yaml

STDOUT = "-"


@command
async def clone(
    job: JobArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="File of the new spec; `-` writes it to stdout.")
    ] = STDOUT,
    as_json: Json = False,
) -> None:
    """Write the spec of a job to a file, to change it and submit it again."""
    out = Output(as_json=as_json)
    async with client() as c:
        detail = await c.job(await job_id(c, job))
    spec = detail.spec.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    out.document(spec)
    text = f"# Cloned from job {detail.id}. Its data is the stored upload.\n"
    text += spec_yaml(spec)
    if file == STDOUT:
        out.print(*([] if as_json else text.removesuffix("\n").split("\n")))
        return
    _write(Path(file), text)
    out.print(f"{file} has the spec of job {detail.id}; submit it: gpubroker submit {file}")


def _write(path: Path, text: str) -> None:
    """Write a new file. Raises BadInput if the file exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as spec_file:
            spec_file.write(text)
    except FileExistsError:
        raise BadInput(f"{path} exists; name a new file") from None
    except OSError as e:
        raise BadInput(f"{path} cannot be written ({e.strerror}); name another file") from None
