"""Commands on tokens and secrets."""

import sys
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.table import Table

from broker.api.models import TokenRequest
from broker.cli import words
from broker.cli.exits import BadInput
from broker.cli.output import Output
from broker.cli.shell import Json, client, command, interruptible


@command
async def token_new(
    owner: Annotated[str, typer.Argument(help="Whose jobs the token sees.")],
    scope: Annotated[list[str] | None, typer.Option("--scope", help="read, submit or admin. Repeat.")] = None,
    note: Annotated[str, typer.Option(help="For people.")] = "",
    as_json: Json = False,
) -> None:
    """Make a token; it is shown this once."""
    out = Output(as_json=as_json)
    try:
        request = TokenRequest.model_validate({"owner": owner, "scopes": scope or ["read", "submit"], "note": note})
    except ValidationError as e:
        raise BadInput("; ".join(f"{error['loc'][0]}: {error['msg']}" for error in e.errors())) from None
    async with client() as c:
        made = await c.create_token(request)
    out.document(made)
    out.say(f"token {made.id} of {made.owner} ({', '.join(made.scopes)}), shown this once:")
    out.say(made.token)


@command
async def token_ls(as_json: Json = False) -> None:
    """List tokens, without their secrets."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.tokens()
    out.document(found)
    table = Table()
    for name in ("token", "owner", "scopes", "made", "note"):
        table.add_column(name)
    for t in found.items:
        table.add_row(t.id, t.owner, ", ".join(t.scopes), words.ago(t.created_at), t.note)
    out.say(table)


@command
async def token_rm(token: Annotated[str, typer.Argument(help="The token's id.")], as_json: Json = False) -> None:
    """Revoke a token."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.delete_token(token)
    out.document({"removed": token})
    out.say(f"token {token} is revoked")


@command
async def secret_set(
    name: Annotated[str, typer.Argument(help="As the program sees it: HF_TOKEN.")], as_json: Json = False
) -> None:
    """Store a secret; the value is read from stdin or asked for, never an argument."""
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
    out.say(f"secret {name} is set")


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
        found = await c.secrets()
    out.document(found)
    for name in found.names:
        out.say(name)


@command
async def secret_rm(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Forget a secret."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.delete_secret(name)
    out.document({"removed": name})
    out.say(f"secret {name} is forgotten")
