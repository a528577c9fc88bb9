"""`gpubroker serve` and `gpubroker blobs init`."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.core.command import Json, command
from broker.cli.core.exit_codes import BadInput, JobFailed, Outdated, ServerProblem
from broker.cli.core.output import Output
from broker.daemon.config import DaemonConfig
from broker.daemon.log_setup import set_up
from broker.domain.errors import GpubrokerError, InvalidInput, SchemaNewer

if TYPE_CHECKING:
    from broker.daemon.listeners import Addresses


@command  # Not uvloop: a child process that uvloop forks runs Python code before exec, and can deadlock.
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
    on_host = providers.local is not None or (providers.simulated is not None and providers.simulated.body == "real")
    if on_host and importlib.util.find_spec("torch") is None:
        typer.echo("note: fine-tunes on this machine need `pip install 'gpubroker[trainer]'`", err=True)


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
    rows = [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in report.checks]
    out.document({"url": report.url, "ok": report.ok, "checks": rows, "policy": report.policy})
    for check in report.checks:
        out.print(f"{'ok' if check.ok else 'PROBLEM':<8} {check.name}" + (f": {check.detail}" if check.detail else ""))
    out.print("", "Minimal permissions of the broker:", report.policy)
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
