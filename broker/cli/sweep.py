"""`gpubroker sweep`: the net below the daemon, from any machine that has the clouds' keys."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from broker.cli.exits import BadInput, JobFailed, Refused, ServerProblem
from broker.cli.output import Output
from broker.cli.shell import Json, command, interruptible
from broker.config import DaemonConfig
from broker.domain.errors import GpubrokerError, InvalidInput
from broker.domain.ids import INSTALLATION_LENGTH, Installation
from broker.store.embedded import EmbeddedPostgres, StateFolderLocked

if TYPE_CHECKING:
    from broker.outside import Survey
    from broker.ports import Clock, Provider

PAUSE_S = 60.0
WATCH_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was found, and what it takes to end it; the clouds are open only while it is looked at."""

    installation: Installation
    found: "Survey"
    providers: "dict[str, Provider]"
    clock: "Clock"
    daemon: bool
    """One runs on this home."""


@command
async def sweep(
    once: Annotated[bool, typer.Option("--once", help="One round; without it, a round a minute until Ctrl-C.")] = False,
    destroy: Annotated[bool, typer.Option("--destroy", help="Destroy what nobody answers for.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    installation: Annotated[
        str | None, typer.Option(metavar="ID", help="Whose machines; default: the home's, or the database's.")
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="How long the lease is watched without a database. "
            "Default: 120, and with --destroy until trainers without a broker have saved.",
        ),
    ] = None,
    home: Annotated[Path | None, typer.Option(help="The daemon's state folder; default $GPUBROKER_HOME.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration; default gpubroker.yaml in the home.")] = None,
    as_json: Json = False,
) -> None:
    """List our machines in every cloud, and those that nobody answers for. Needs no daemon."""
    out = Output(as_json=as_json)
    try:
        settings = DaemonConfig.load(config, home=home)
        watch_s = watch or (_until_saved(settings) if destroy else WATCH_S)
        while True:
            left = await _round(settings, installation, out, destroy=destroy, yes=yes, watch_s=watch_s)
            if once:
                break
            await asyncio.sleep(PAUSE_S)
    except InvalidInput as e:
        raise BadInput("\n".join(f"{p.field}: {p.message}" for p in e.problems)) from None
    except GpubrokerError as e:
        raise ServerProblem(str(e)) from None
    if left:
        raise JobFailed(left, told=True)


def _until_saved(settings: "DaemonConfig") -> float:
    """Seconds: a broker whose database is away touches no lease, and its trainers go on for so long."""
    return WATCH_S + settings.limits.deadman_s + settings.limits.drain_s


async def _round(
    settings: DaemonConfig, named: str | None, out: Output, *, destroy: bool, yes: bool, watch_s: float
) -> str:
    """What is left to do, in one line; empty: nothing."""
    from broker import outside

    async with looking(settings, named, watch_s=watch_s) as look:
        found, name = look.found, look.installation
        orphans = [machine for machine in found.machines if machine.orphan]
        _show(out, found, name)
        failed: dict[str, str] = {}
        if orphans and destroy:
            _confirm(out, len(orphans), yes=yes)
            ends = [outside.destroy(one, look.providers[one.provider], look.clock) for one in orphans]
            for one, why in zip(orphans, await asyncio.gather(*ends), strict=True):
                out.say(f"{one.observed.handle.name} at {one.provider}: {why or 'destroyed; the cloud says absent'}")
                if why:
                    failed[one.observed.handle.name] = why
        out.document(_document(found, name, destroyed=destroy, failed=failed))
    if failed or (orphans and not destroy):
        count = len(failed) if destroy else len(orphans)
        return f"{count} machines that nobody answers for stand and bill" + ("" if destroy else "; --destroy ends them")
    return f"nothing is known of {', '.join(found.silent)}; see above" if found.silent else ""


@asynccontextmanager
async def looking(settings: DaemonConfig, named: str | None, *, watch_s: float) -> AsyncIterator[Look]:
    """One look at every cloud. Raises BadInput, GpubrokerError."""
    from broker import outside
    from broker.blobs import ObstoreBlobs
    from broker.clock import SystemClock
    from broker.store.postgres import PostgresStore
    from providers.registry import build

    clock = SystemClock()
    async with AsyncExitStack() as stack:
        name = _installation(settings, named)
        dsn, daemon = await _database(settings, stack)
        store = None
        if dsn is not None:
            store = await PostgresStore.connect(dsn)
            stack.push_async_callback(store.close)
            if (theirs := await store.installation(name)) != name:
                raise BadInput(f"the database belongs to installation {theirs}, not {name}; correct one of the two")
        blobs = ObstoreBlobs.open(settings.blobs_url, name, options=settings.blob_options)
        providers = build(
            settings.providers, installation=name, state=settings.home / "providers", clock=clock, blobs=blobs
        )
        for provider in providers.values():
            stack.push_async_callback(provider.close)
        found = await outside.survey(name, providers, clock, store=store, blobs=blobs, watch_s=watch_s)
        yield Look(installation=name, found=found, providers=providers, clock=clock, daemon=daemon)


def _installation(settings: DaemonConfig, named: str | None) -> Installation:
    """Raises BadInput when none is known: no other's machines are ever touched by a guess."""
    file = settings.home / "installation"
    known = named or (file.read_text().strip() if file.exists() else "")
    if len(known) != INSTALLATION_LENGTH:
        where = f"on the daemon's host it is in {file}"
        raise BadInput(f"whose machines? give --installation, {INSTALLATION_LENGTH} characters; {where}")
    return Installation(known)


async def _database(settings: DaemonConfig, stack: AsyncExitStack) -> tuple[str | None, bool]:
    """(the configured server, or the home's own; whether a daemon keeps that one)"""
    if settings.database_url is not None:
        return settings.database_url, False
    folder = settings.home / "postgres"
    if not folder.exists():
        return None, False
    try:
        server = await stack.enter_async_context(await EmbeddedPostgres.start(folder))
    except StateFolderLocked:
        return EmbeddedPostgres.dsn_of(folder), True
    return server.dsn, False


def _confirm(out: Output, count: int, *, yes: bool) -> None:
    if yes:
        return
    if not out.asks:
        raise BadInput("there is nobody to ask for confirmation; add -y to destroy without a question")
    with interruptible():
        if not typer.confirm(f"Destroy {count} machines?", default=False):
            raise Refused("nothing was destroyed")


def _show(out: Output, found: Any, name: Installation) -> None:
    table = Table(title=f"Machines of installation {name}, judged by {found.judged_by}", title_justify="left")
    for column in ("cloud", "region", "machine", "state", "orphan"):
        table.add_column(column)
    for one in found.machines:
        handle = one.observed.handle
        table.add_row(one.provider, handle.region, f"{handle.name} ({handle.id})", one.observed.state, one.orphan)
    out.say(table if found.machines else f"no machine of installation {name} stands anywhere that answered")
    for cloud, said in found.silent.items():
        out.say(f"PROBLEM  {cloud} did not answer: {said}")


def _document(found: Any, name: Installation, *, destroyed: bool, failed: dict[str, str]) -> dict[str, Any]:
    machines = [
        {
            "provider": one.provider,
            "id": one.observed.handle.id,
            "name": one.observed.handle.name,
            "region": one.observed.handle.region,
            "state": str(one.observed.state),
            "orphan": one.orphan,
            "destroyed": bool(one.orphan) and destroyed and one.observed.handle.name not in failed,
        }
        for one in found.machines
    ]
    return {"installation": name, "judged_by": found.judged_by, "machines": machines, "silent": dict(found.silent)}
