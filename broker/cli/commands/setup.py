"""`gpubroker login` and `init`: the daemon to use, and a first spec."""

import asyncio
import ipaddress
import os
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from broker.cli.core.command import Json, command, interruptible
from broker.cli.core.exit_codes import BadInput, UnreachableExit
from broker.cli.core.output import Output
from broker.cli.spec import template
from broker.cli.spec.schema_file import json_schema, store_schema
from broker.client.async_client import AsyncClient
from broker.client.transport import connection


@command
async def login(
    url: Annotated[str | None, typer.Argument(metavar="URL", help="For example https://broker.example.com.")] = None,
    token: Annotated[str | None, typer.Option(help="Default: GPUBROKER_TOKEN, otherwise a prompt.")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Delete the stored login.")] = False,
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="Send the token unencrypted to another host by http://.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Store the URL and token of a daemon for this user. Without URL, show which daemon is in use."""
    out = Output(as_json=as_json)
    if forget:
        connection.login_file().unlink(missing_ok=True)
        out.document({"url": None})
        out.print("stored login deleted")
        return
    stored = connection.find() if url is None else _connection_to(out, url, token, plain_http=plain_http)
    if stored is None:
        raise UnreachableExit("no daemon is configured; start one with `gpubroker serve`, or give a URL")
    async with AsyncClient(stored.url, stored.token, certificate=stored.certificate) as c:
        me = await c.me()
    if url is not None:
        _store(stored)
    out.document(
        {"url": stored.url, "team": me.team, "owner": me.owner, "scopes": list(me.scopes), "source": stored.source}
    )
    out.print(f"{stored.url} as {me.owner} of {me.team} ({', '.join(me.scopes)}), from {stored.source}")


def _store(stored: connection.Connection) -> None:
    try:
        connection.write(connection.login_file(), stored)
    except OSError as e:
        fix = "make it writable, or set GPUBROKER_URL and GPUBROKER_TOKEN"
        raise BadInput(f"{connection.login_file()} cannot be written ({e.strerror}); {fix}") from None


def is_this_host(url: str) -> bool:
    """Return True for the URL of a daemon at an address of this machine only."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _connection_to(out: Output, url: str, token: str | None, *, plain_http: bool) -> connection.Connection:
    url = connection.address(url, "URL")
    if urlsplit(url).scheme == "http" and not plain_http and not is_this_host(url):
        raise BadInput(
            "URL: http:// would show the token to the network; give https://, or --plain-http within your own network"
        )
    if token is None:
        token = os.environ.get("GPUBROKER_TOKEN") or None
    if token is None and not out.is_interactive:
        raise BadInput("give the token with --token or GPUBROKER_TOKEN")
    if token is None:
        with interruptible():
            token = str(typer.prompt("Token", hide_input=True))
    return connection.Connection(url=url, token=token.strip(), source=str(connection.login_file()))


@command
async def init(
    path: Annotated[Path, typer.Argument(metavar="FILE")] = Path("job.yaml"),
    script: Annotated[bool, typer.Option("--script", help="Write a spec that runs your own program.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Write every setting, with its meaning and values.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a short spec to start from; `-` writes it to stdout."""
    out = Output(as_json=as_json)
    kind: template.Kind = "script" if script else "train"
    if str(path) == "-" and not as_json:
        typer.echo(template.full_spec(kind) if full else template.short_spec(kind, None), nl=False)
        return
    if path.exists() and not force:
        raise BadInput(f"{path} already exists; give another name, or --force")
    schema = await asyncio.to_thread(store_schema)
    try:
        await asyncio.to_thread(
            path.write_text, template.full_spec(kind, schema) if full else template.short_spec(kind, schema)
        )
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}") from None
    out.document({"path": str(path)})
    out.print(f"wrote {path}; next: `gpubroker quote {path}`")


@command
async def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of a job's spec, for editors and other programs."""
    typer.echo(json_schema(), nl=False)
