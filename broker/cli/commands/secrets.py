"""Commands on secrets."""

import sys
from typing import Annotated

import typer

from broker.cli.core.command import Json, client, command, interruptible
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output


@command
async def secret_set(
    name: Annotated[str, typer.Argument(help="Name of the environment variable, e.g. HF_TOKEN.")], as_json: Json = False
) -> None:
    """Store a secret. The value is read from stdin or a prompt, never from an argument."""
    out = Output(as_json=as_json)
    if sys.stdin.isatty():
        with interruptible():
            value = str(typer.prompt(f"Value of {name}", hide_input=True))
    else:
        value = _piped(name)
    if not value:
        raise BadInput(f"the value of {name} is empty; pipe it in or type it")
    async with client() as c:
        await c.put_secret(name, value)
    out.document({"set": name})
    out.print(f"secret {name} is set")


def _piped(name: str) -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as e:
        raise BadInput(
            f"the value of {name}: byte {e.start} is not UTF-8; encode it, for example with base64"
        ) from None


@command
async def secret_ls(as_json: Json = False) -> None:
    """List the names of secrets; values are never shown."""
    out = Output(as_json=as_json)
    async with client() as c:
        page = await c.secrets()
    out.document(page)
    for name in page.names:
        out.print(name)


@command
async def secret_rm(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Delete a secret."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.delete_secret(name)
    out.document({"removed": name})
    out.print(f"secret {name} deleted")
