"""`gpubroker convert`: a task file of SkyPilot or dstack as a spec, with the settings that are lost."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from broker.api.core.problems import invalid_input_of
from broker.api.schemas.quotes import QuoteSpec
from broker.cli.convert.conversion import Conversion
from broker.cli.convert.dstack_task import convert_dstack
from broker.cli.convert.skypilot_task import convert_skypilot
from broker.cli.core.command import Json, command
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.spec.spec_file import parsed
from broker.cli.spec.spec_yaml import spec_yaml

SKYPILOT_KEYS = frozenset({"run", "setup", "resources", "num_nodes", "workdir", "file_mounts", "envs"})


@command
async def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A task YAML of SkyPilot, or a .dstack.yml.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: stdout.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail, and write nothing, if a setting has no counterpart.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a SkyPilot or dstack task into a spec, and list on stderr what has no counterpart."""
    conversion = converted(file)
    losses = conversion.lines(conversion.lost)
    if strict and losses:
        raise BadInput("\n".join(losses), problems=tuple(conversion.lost))
    if output is not None and output.exists():
        raise BadInput(f"{output} already exists; give another name")
    text = spec_yaml(conversion.spec)
    if output is not None:
        try:
            await asyncio.to_thread(output.write_text, text)
        except OSError as e:
            raise BadInput(f"{output}: {e.strerror}") from None
    elif not as_json:
        typer.echo(text, nl=False)
    for line in (*(f"lost: {line}" for line in losses), *(f"hint: {h}" for h in conversion.lines(conversion.hints))):
        Output(as_json=True).print(line)
    remarks = {"lost": conversion.lost, "hints": conversion.hints}
    named = {kind: [{"field": f, "message": m} for f, m in pairs] for kind, pairs in remarks.items()}
    Output(as_json=as_json).document({"spec": conversion.spec, **named})


def converted(file: Path) -> Conversion:
    """Return the conversion of a file. Raises BadInput for another kind of file or an invalid result."""
    document = parsed(file)
    conversion = Conversion(document)
    try:
        if "type" in document.data:
            convert_dstack(conversion)
        elif SKYPILOT_KEYS & set(document.data):
            convert_skypilot(conversion)
        else:
            raise BadInput(f"{file}: is neither a task of SkyPilot (run, resources, …) nor of dstack (type: task)")
    except (AttributeError, TypeError, ValueError) as e:  # a value of another type than the formats have
        raise BadInput(f"{file}: a setting has another form than the format's documents say ({e})") from None
    try:
        QuoteSpec.model_validate(conversion.spec)
    except ValidationError as e:
        problems = invalid_input_of(e, QuoteSpec, conversion.spec, root="").problems
        lines = [f"{file}: {p.field} of the converted spec: {p.message}" for p in problems]
        raise BadInput("\n".join(lines), problems=tuple((p.field, p.message) for p in problems)) from None
    return conversion
