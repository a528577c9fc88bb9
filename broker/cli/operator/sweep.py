"""`gpubroker sweep`: the net below the daemon, from any machine that has the clouds' keys."""

import asyncio
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli.core.command import Json, command
from broker.cli.core.confirm import confirm
from broker.cli.core.exit_codes import BadInput, JobFailed, ServerProblem
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.cli.operator.local_store import installation_of, store_of
from broker.daemon.config import DaemonConfig
from broker.domain.errors import BlobsUnavailable, GpubrokerError, InvalidInput
from broker.domain.ids import Installation

if TYPE_CHECKING:
    from broker.controllers.termination.offline_sweep import FoundMachine, Survey
    from broker.ports import Blobs, Clock, Provider

PAUSE_S = 60.0
WATCH_S = 120.0
COLUMNS = (
    Column(name="cloud"),
    Column(name="region", least=9, rank=1),
    Column(name="machine", least=16),
    Column(name="id", least=13),
    Column(name="state"),
    Column(name="orphan", least=12),
)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was found, and what it takes to end it; the clouds are open only while it is looked at."""

    installation: Installation
    found: "Survey"
    providers: "dict[str, Provider]"
    clock: "Clock"
    blobs: "Blobs"
    daemon: bool
    """One runs on this home."""


@command
async def sweep(
    once: Annotated[bool, typer.Option("--once", help="One round; without it, a round a minute until Ctrl-C.")] = False,
    destroy: Annotated[bool, typer.Option("--destroy", help="Destroy what nobody answers for.")] = False,
    spared: Annotated[
        bool,
        typer.Option(
            "--spared",
            help="With --destroy, also what the daemon's sweep only reports: it was bought after the backup that the "
            "database comes from, or nobody can tell.",
        ),
    ] = False,
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
            left = await _round(settings, installation, out, destroy=destroy, spared=spared, yes=yes, watch_s=watch_s)
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
    settings: DaemonConfig, named: str | None, out: Output, *, destroy: bool, spared: bool, yes: bool, watch_s: float
) -> str:
    """What is left to do, in one line; empty: nothing."""
    async with looking(settings, named, watch_s=watch_s) as look:
        found, name = look.found, look.installation
        orphans = [machine for machine in found.machines if machine.orphan]
        _show(out, found, name)
        if destroy and any(one.spared for one in orphans):
            await _warn(out, look)
        doomed = [one for one in orphans if destroy and (spared or not one.spared)]
        kept = [one for one in orphans if destroy and one not in doomed]
        for one in kept:
            out.say(f"{one.observed.handle.name} at {one.provider} is left alone: {one.spared}")
        failed = await _end(out, look, doomed, yes=yes) if doomed else {}
        ended = {id(one) for one in doomed if one.observed.handle.name not in failed}
        out.document(_document(found, name, ended=ended))
    stand = "machines that nobody answers for stand and bill"
    if orphans and not destroy:
        return f"{len(orphans)} {stand}; --destroy ends them" + _flag(orphans)
    if failed or kept:
        return f"{len(failed) + len(kept)} {stand}" + _flag(kept)
    return f"nothing is known of {', '.join(found.silent)}; see above" if found.silent else ""


def _flag(left: "Sequence[FoundMachine]") -> str:
    count = sum(bool(one.spared) for one in left)
    return f"; {count} of them with --destroy --spared only: see `gpubroker doctor --orphans`" if count else ""


async def _warn(out: Output, look: Look) -> None:
    """Where another daemon lives, its database may be the newer one."""
    from broker.runtime.peers import lease_is_renewed

    if look.daemon:
        return
    try:
        lives = await lease_is_renewed(look.blobs, look.clock, 0.0)
    except BlobsUnavailable as e:
        out.say(f"PROBLEM  whether a daemon of this installation lives cannot be told: {e}")
        return
    if lives:
        out.say(
            "PROBLEM  a daemon of this installation lives, and knows better if its database is not this one: ask there"
        )


async def _end(out: Output, look: Look, doomed: "Sequence[FoundMachine]", *, yes: bool) -> dict[str, str]:
    """Why some could not be destroyed, by name."""
    from broker.controllers.termination import offline_sweep as outside

    confirm(out, f"Destroy {len(doomed)} machines?", yes=yes, to="destroy", else_="nothing was destroyed")
    failed: dict[str, str] = {}
    ends = [outside.destroy(one, look.providers[one.provider], look.clock) for one in doomed]
    for one, why in zip(doomed, await asyncio.gather(*ends), strict=True):
        out.say(f"{one.observed.handle.name} at {one.provider}: {why or 'destroyed; the cloud says absent'}")
        if why:
            failed[one.observed.handle.name] = why
    return failed


@asynccontextmanager
async def looking(settings: DaemonConfig, named: str | None, *, watch_s: float) -> AsyncIterator[Look]:
    """One look at every cloud. Raises BadInput, GpubrokerError."""
    from broker.blobs import ObstoreBlobs
    from broker.controllers.termination import offline_sweep as outside
    from broker.runtime.clock import SystemClock
    from providers.registry import build

    clock = SystemClock()
    async with AsyncExitStack() as stack:
        name = installation_of(settings, named)
        store, daemon = await store_of(settings, name, stack)
        blobs = ObstoreBlobs.open(settings.blobs_url, name, options=settings.blob_options)
        providers = build(
            settings.providers, installation=name, state=settings.home / "providers", clock=clock, blobs=blobs
        )
        for provider in providers.values():
            stack.push_async_callback(provider.close)
        found = await outside.survey(name, providers, clock, store=store, blobs=blobs, watch_s=watch_s)
        yield Look(installation=name, found=found, providers=providers, clock=clock, blobs=blobs, daemon=daemon)


def _show(out: Output, found: Any, name: Installation) -> None:
    rows = [
        (one.provider, one.observed.handle.region, one.observed.handle.name, one.observed.handle.id,
         str(one.observed.state), one.orphan)
        for one in found.machines
    ]  # fmt: skip
    sheet = TerminalTable(COLUMNS, rows, title=f"Machines of installation {name}, judged by {found.judged_by}")
    out.say(sheet if found.machines else f"no machine of installation {name} stands anywhere that answered")
    for cloud, said in found.silent.items():
        out.say(f"PROBLEM  {cloud} did not answer: {said}")


def _document(found: Any, name: Installation, *, ended: Set[int]) -> dict[str, Any]:
    machines = [
        {
            "provider": one.provider,
            "id": one.observed.handle.id,
            "name": one.observed.handle.name,
            "region": one.observed.handle.region,
            "state": str(one.observed.state),
            "orphan": one.orphan,
            "spared": one.spared,
            "destroyed": id(one) in ended,
        }
        for one in found.machines
    ]
    return {"installation": name, "judged_by": found.judged_by, "machines": machines, "silent": dict(found.silent)}
