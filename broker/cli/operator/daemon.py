"""`gpubroker serve`, `login`, `doctor`, `blobs init` and `init`."""

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.core.command import Json, command, interruptible
from broker.cli.core.exit_codes import BadInput, JobFailed, Outdated, ServerProblem, UnreachableExit
from broker.cli.core.output import Output
from broker.cli.operator import doctor as checks
from broker.cli.spec import template
from broker.client.async_client import AsyncClient
from broker.client.transport import connection
from broker.daemon.config import DaemonConfig
from broker.daemon.log_setup import set_up
from broker.domain.errors import GpubrokerError, InvalidInput, SchemaNewer

if TYPE_CHECKING:
    from broker.daemon.listeners import Addresses


@command  # asyncio's own loop: child processes of uvloop run Python before exec and can deadlock
async def serve(
    home: Annotated[Path | None, typer.Option(help="State folder. Default: $GPUBROKER_HOME.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file. Default: gpubroker.yaml in the home.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. Default: 7070; 0 chooses a free port.")] = None,
) -> None:
    """Run the daemon until SIGINT or SIGTERM. Running machines keep training; the next start reattaches to them."""
    try:
        settings = DaemonConfig.load(config, home=home, host=host, port=port)
        note_missing_trainer(settings)
        set_up(settings.log_level)
        from broker.daemon.app import run

        await run(settings, ready=lambda at: typer.echo(_ready_message(at, settings.home)))
    except InvalidInput as e:
        raise BadInput("\n".join(f"{p.field}: {p.message}" for p in e.problems)) from None
    except SchemaNewer as e:
        raise Outdated(str(e)) from None
    except GpubrokerError as e:
        raise ServerProblem(str(e)) from None


def _ready_message(at: "Addresses", home: Path) -> str:
    grpc = f" and gRPC at {at.grpc}" if at.grpc else ""
    return f"gpubroker serves {at.url}{grpc} from {home}"


def note_missing_trainer(settings: DaemonConfig) -> None:
    """Print a note if jobs may run on this machine but the trainer is not installed. Rented machines have their own."""
    providers = settings.providers
    here = providers.local is not None or (providers.simulated is not None and providers.simulated.body == "real")
    if here and importlib.util.find_spec("torch") is None:
        typer.echo("note: fine-tunes on this machine need `pip install 'gpubroker[trainer]'`", err=True)


@command
async def login(
    url: Annotated[str | None, typer.Argument(metavar="URL", help="For example https://broker.example.com.")] = None,
    token: Annotated[str | None, typer.Option(help="Default: GPUBROKER_TOKEN, otherwise a prompt.")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Delete the stored login.")] = False,
    as_json: Json = False,
) -> None:
    """Store the URL and token of a daemon for this user. Without URL, show which daemon is in use."""
    out = Output(as_json=as_json)
    if forget:
        connection.login_file().unlink(missing_ok=True)
        out.document({"url": None})
        out.say("stored login deleted")
        return
    chosen = connection.find() if url is None else _given(out, url, token)
    if chosen is None:
        raise UnreachableExit("no daemon is configured; start one with `gpubroker serve`, or give a URL")
    async with AsyncClient(chosen.url, chosen.token, certificate=chosen.certificate) as c:
        me = await c.me()
    if url is not None:
        _store(chosen)
    out.document(
        {"url": chosen.url, "team": me.team, "owner": me.owner, "scopes": list(me.scopes), "source": chosen.source}
    )
    out.say(f"{chosen.url} as {me.owner} of {me.team} ({', '.join(me.scopes)}), from {chosen.source}")


def _store(chosen: connection.Connection) -> None:
    try:
        connection.write(connection.login_file(), chosen)
    except OSError as e:
        fix = "make it writable, or set GPUBROKER_URL and GPUBROKER_TOKEN"
        raise BadInput(f"{connection.login_file()} cannot be written ({e.strerror}); {fix}") from None


def _given(out: Output, url: str, token: str | None) -> connection.Connection:
    url = connection.address(url, "URL")
    if token is None:
        token = os.environ.get("GPUBROKER_TOKEN") or None
    if token is None and not out.asks:
        raise BadInput("give the token with --token or GPUBROKER_TOKEN")
    if token is None:
        with interruptible():
            token = str(typer.prompt("Token", hide_input=True))
    return connection.Connection(url=url, token=token.strip(), source=str(connection.login_file()))


@command
async def doctor(
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Only search for orphaned machines. Needs no daemon.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check the setup and suggest fixes."""
    out = Output(as_json=as_json)
    if orphans:
        from broker.cli.operator.orphans import doctor as search_orphans

        await search_orphans(out)
        return
    results = await checks.run()
    out.document({"ok": all(check.ok for check in results), "checks": [checks.document(check) for check in results]})
    for check in results:
        out.say(checks.line(check))
    if not all(check.ok for check in results):
        raise JobFailed("at least one check failed; see above", is_in_document=True)


@command
async def blobs_init(
    url: Annotated[str, typer.Argument(metavar="URL", help="file:///folder, s3://bucket/prefix, gs://… or az://…")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Option of the object store, e.g. endpoint. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create or check a blob store, test the required operations and print the minimal IAM policy. Needs no daemon."""
    from broker.blobs.bucket_check import check_bucket

    out = Output(as_json=as_json)
    try:
        report = await check_bucket(url, options=_options(option or []))
    except InvalidInput as e:
        raise BadInput("\n".join(p.message for p in e.problems)) from None
    shown = [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in report.checks]
    out.document({"url": report.url, "ok": report.ok, "checks": shown, "policy": report.policy})
    for check in report.checks:
        out.say(f"{'ok' if check.ok else 'PROBLEM':<8} {check.name}" + (f": {check.detail}" if check.detail else ""))
    out.say("", "Minimal permissions of the broker:", report.policy)
    if not report.ok:
        raise JobFailed(f"{url} cannot be used; see above", is_in_document=True)


def _options(pairs: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadInput(f"--option {pair}: write KEY=VALUE")
        options[key] = value
    return options


@command
async def init(
    path: Annotated[Path, typer.Argument(metavar="FILE")] = Path("job.yaml"),
    script: Annotated[bool, typer.Option("--script", help="Write a spec that runs your own program.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a spec that explains every setting; `-` writes it to stdout."""
    out = Output(as_json=as_json)
    text = template.spec("script" if script else "train")
    if str(path) == "-" and not as_json:
        typer.echo(text, nl=False)
        return
    if path.exists() and not force:
        raise BadInput(f"{path} already exists; give another name, or --force")
    try:
        await asyncio.to_thread(path.write_text, text)
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}") from None
    out.document({"path": str(path)})
    out.say(f"wrote {path}; next: `gpubroker quote {path}`")
