"""Commands around the daemon: serve, login, doctor, blobs, init."""

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


@command  # on asyncio's own loop: uvloop's children run Python before they exec, and may wait for a lock for ever
async def serve(
    home: Annotated[Path | None, typer.Option(help="State folder; default $GPUBROKER_HOME.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration; default gpubroker.yaml in the home.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default 7070, 0 takes a free one.")] = None,
) -> None:
    """Run the daemon until SIGINT or SIGTERM. Machines go on meanwhile; the next start takes them over."""
    try:
        settings = DaemonConfig.load(config, home=home, host=host, port=port)
        note_missing_trainer(settings)
        set_up(settings.log_level)
        from broker.daemon.app import run

        await run(settings, ready=lambda at: typer.echo(_serves(at, settings.home)))
    except InvalidInput as e:
        raise BadInput("\n".join(f"{p.field}: {p.message}" for p in e.problems)) from None
    except SchemaNewer as e:
        raise Outdated(str(e)) from None
    except GpubrokerError as e:
        raise ServerProblem(str(e)) from None


def _serves(at: "Addresses", home: Path) -> str:
    beside = f" and gRPC at {at.grpc}" if at.grpc else ""
    return f"gpubroker serves {at.url}{beside} from {home}"


def note_missing_trainer(settings: DaemonConfig) -> None:
    """Machines of other people bring their own; jobs on this one need it here."""
    providers = settings.providers
    here = providers.local is not None or (providers.simulated is not None and providers.simulated.body == "real")
    if here and importlib.util.find_spec("torch") is None:
        typer.echo("note: fine-tunes on this machine need `pip install 'gpubroker[trainer]'`", err=True)


@command
async def login(
    url: Annotated[str | None, typer.Argument(metavar="URL", help="For example https://broker.example.com.")] = None,
    token: Annotated[str | None, typer.Option(help="Default: GPUBROKER_TOKEN, else asked for.")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Forget the stored login.")] = False,
    as_json: Json = False,
) -> None:
    """Store a daemon and a token for this person; without a URL, show which daemon is used."""
    out = Output(as_json=as_json)
    if forget:
        connection.login_file().unlink(missing_ok=True)
        out.document({"url": None})
        out.say("forgotten")
        return
    chosen = connection.find() if url is None else _given(out, url, token)
    if chosen is None:
        raise UnreachableExit("no daemon is known; start one with `gpubroker serve`, or give a URL")
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
        fix = "mend it, or set GPUBROKER_URL and GPUBROKER_TOKEN"
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
        bool, typer.Option("--orphans", help="Only look for machines that no record explains; needs no daemon.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check everything that a job needs; each problem comes with its fix."""
    out = Output(as_json=as_json)
    if orphans:
        from broker.cli.operator.orphans import doctor as look_for_orphans

        await look_for_orphans(out)
        return
    found = await checks.run()
    out.document({"ok": all(c.ok for c in found), "checks": [checks.document(c) for c in found]})
    for check in found:
        out.say(checks.line(check))
    if not all(check.ok for check in found):
        raise JobFailed("something is wrong; see above", told=True)


@command
async def blobs_init(
    url: Annotated[str, typer.Argument(metavar="URL", help="file:///folder, s3://bucket/prefix, gs://… or az://…")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="For the object store, e.g. endpoint. Repeat."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create or check a blob store, try what the broker relies on, print the least policy. Needs no daemon."""
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
    out.say("", "The least that the broker needs:", report.policy)
    if not report.ok:
        raise JobFailed(f"{url} cannot be used; see above", told=True)


def _options(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadInput(f"--option {pair}: write KEY=VALUE")
        found[key] = value
    return found


@command
async def init(
    path: Annotated[Path, typer.Argument(metavar="FILE")] = Path("job.yaml"),
    script: Annotated[bool, typer.Option("--script", help="A job that runs your own program.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a spec with every setting explained; `-` writes it to stdout."""
    out = Output(as_json=as_json)
    text = template.spec("script" if script else "train")
    if str(path) == "-" and not as_json:
        typer.echo(text, nl=False)
        return
    if path.exists() and not force:
        raise BadInput(f"{path} is there already; give another name, or --force")
    try:
        await asyncio.to_thread(path.write_text, text)
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}") from None
    out.document({"path": str(path)})
    out.say(f"wrote {path}; then `gpubroker quote {path}`")
