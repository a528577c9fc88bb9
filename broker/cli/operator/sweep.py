"""`gpubroker sweep`: find and destroy orphaned machines from any host that has the clouds' keys.

The command needs no daemon, so it serves as a safety net.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli.core.command import Json, command, confirm
from broker.cli.core.exit_codes import BadInput, JobFailed, ServerProblem
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.cli.operator.local_store import Config, Home, installation_of, store_of
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
    Column(name="region", min_width=9, rank=1),
    Column(name="machine", min_width=16),
    Column(name="id", min_width=13),
    Column(name="state"),
    Column(name="orphan", min_width=12),
)
Destroy = Annotated[bool, typer.Option("--destroy", help="Destroy orphaned machines.")]
Spared = Annotated[
    bool,
    typer.Option(
        "--spared",
        help="With --destroy, also destroy machines that the daemon only reports: bought after the backup from which "
        "the database was restored, or possibly so.",
    ),
]
Watch = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=1,
        help="Without a database, watch the daemon's lease this long. "
        "Default: 120; with --destroy, until trainers without a broker have saved.",
    ),
]
Owner = Annotated[
    str | None,
    typer.Option("--installation", metavar="ID", help="Installation id. Default: this home's, or the database's."),
]


@dataclass(frozen=True, kw_only=True)
class SweepContext:
    """Result of one survey with open providers, which are closed when the survey is left."""

    installation: Installation
    survey: "Survey"
    providers: "dict[str, Provider]"
    clock: "Clock"
    blobs: "Blobs"
    has_daemon: bool
    """True if a daemon runs on this home."""


@command
async def sweep(
    once: Annotated[bool, typer.Option("--once", help="Run once. Default: every minute until Ctrl-C.")] = False,
    destroy: Destroy = False,
    spared: Spared = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    installation: Owner = None,
    watch: Watch = None,
    home: Home = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """List this installation's machines in every cloud, and mark orphaned machines. Needs no daemon."""
    out = Output(as_json=as_json)
    try:
        settings = DaemonConfig.load(config, home=home)
        watch_s = watch or (_save_time_s(settings) if destroy else WATCH_S)
        while True:
            problem = await _round(
                settings, installation, out, destroy=destroy, spared=spared, yes=yes, watch_s=watch_s
            )
            if once:
                break
            await asyncio.sleep(PAUSE_S)
    except InvalidInput as e:
        raise BadInput("\n".join(f"{p.field}: {p.message}" for p in e.problems)) from None
    except GpubrokerError as e:
        raise ServerProblem(str(e)) from None
    if problem:
        raise JobFailed(problem, is_in_document=True)


def _save_time_s(settings: "DaemonConfig") -> float:
    """Return the seconds after which trainers without a broker have saved and stopped.

    A broker that cannot reach its database does not renew its lease; its trainers continue for this time.
    """
    return WATCH_S + settings.limits.deadman_s + settings.limits.drain_s


async def _round(
    settings: DaemonConfig, named: str | None, out: Output, *, destroy: bool, spared: bool, yes: bool, watch_s: float
) -> str:
    """Survey once and destroy orphans. Return the remaining problem as a message; empty: none."""
    async with surveying(settings, named, watch_s=watch_s) as context:
        survey, name = context.survey, context.installation
        orphans = [machine for machine in survey.machines if machine.orphan]
        _show(out, survey, name)
        if destroy and any(machine.spared for machine in orphans):
            await _warn(out, context)
        doomed = [machine for machine in orphans if destroy and (spared or not machine.spared)]
        reported = [machine for machine in orphans if destroy and machine not in doomed]
        for machine in reported:
            out.print(f"{machine.observed.handle.name} at {machine.provider} is not destroyed: {machine.spared}")
        failed = await _destroy(out, context, doomed, yes=yes) if doomed else {}
        ended = {id(machine) for machine in doomed if machine.observed.handle.name not in failed}
        out.document(_document(survey, name, ended=ended))
    problem = "orphaned machines are running and billed"
    if orphans and not destroy:
        return f"{len(orphans)} {problem}; --destroy ends them" + _spared_message(orphans)
    if failed or reported:
        return f"{len(failed) + len(reported)} {problem}" + _spared_message(reported)
    return f"the machines of {', '.join(survey.silent)} are unknown; see above" if survey.silent else ""


def _spared_message(machines: "Sequence[FoundMachine]") -> str:
    count = sum(bool(machine.spared) for machine in machines)
    return f"; {count} of them only with --destroy --spared: see `gpubroker doctor --orphans`" if count else ""


async def _warn(out: Output, context: SweepContext) -> None:
    """Warn if a daemon runs on another host, because it may use another, newer database than this sweep."""
    from broker.runtime.peers import lease_is_renewed

    if context.has_daemon:
        return
    try:
        lives = await lease_is_renewed(context.blobs, context.clock, 0.0)
    except BlobsUnavailable as e:
        out.print(f"PROBLEM  cannot determine whether a daemon of this installation runs: {e}")
        return
    if lives:
        out.print(
            "PROBLEM  a daemon of this installation runs elsewhere; if it uses another database, sweep on its host"
        )


async def _destroy(
    out: Output, context: SweepContext, doomed: "Sequence[FoundMachine]", *, yes: bool
) -> dict[str, str]:
    """Destroy the machines. Return the errors by machine name."""
    from broker.controllers.termination import offline_sweep

    confirm(out, f"Destroy {len(doomed)} machines?", yes=yes, verb="destroy", refusal="nothing was destroyed")
    failed: dict[str, str] = {}
    calls = [offline_sweep.destroy(machine, context.providers[machine.provider], context.clock) for machine in doomed]
    for machine, error in zip(doomed, await asyncio.gather(*calls), strict=True):
        name = machine.observed.handle.name
        out.print(f"{name} at {machine.provider}: {error or 'destroyed; the cloud reports it absent'}")
        if error:
            failed[name] = error
    return failed


@asynccontextmanager
async def surveying(settings: DaemonConfig, named: str | None, *, watch_s: float) -> AsyncIterator[SweepContext]:
    """List the machines in every cloud once. Raises BadInput, GpubrokerError."""
    from broker.blobs import ObstoreBlobs
    from broker.controllers.termination import offline_sweep
    from broker.runtime.clock import SystemClock
    from providers.registry import build

    clock = SystemClock()
    async with AsyncExitStack() as stack:
        name = installation_of(settings, named)
        store, has_daemon = await store_of(settings, name, stack)
        blobs = ObstoreBlobs.open(settings.blobs_url, name, options=settings.blob_options)
        providers = build(
            settings.providers, installation=name, state=settings.home / "providers", clock=clock, blobs=blobs
        )
        for provider in providers.values():
            stack.push_async_callback(provider.close)
        survey = await offline_sweep.survey(name, providers, clock, store=store, blobs=blobs, watch_s=watch_s)
        yield SweepContext(
            installation=name, survey=survey, providers=providers, clock=clock, blobs=blobs, has_daemon=has_daemon
        )


def _show(out: Output, survey: "Survey", name: Installation) -> None:
    rows = [
        (
            machine.provider,
            machine.observed.handle.region,
            machine.observed.handle.name,
            machine.observed.handle.id,
            str(machine.observed.state),
            machine.orphan,
        )
        for machine in survey.machines
    ]
    table = TerminalTable(COLUMNS, rows, title=f"Machines of installation {name}, judged by {survey.judged_by}")
    out.print(table if survey.machines else f"installation {name} has no machine in any cloud that answered")
    for cloud, problem in survey.silent.items():
        out.print(f"PROBLEM  {cloud} did not answer: {problem}")


def _document(survey: "Survey", name: Installation, *, ended: Set[int]) -> dict[str, Any]:
    machines = [
        {
            "provider": machine.provider,
            "id": machine.observed.handle.id,
            "name": machine.observed.handle.name,
            "region": machine.observed.handle.region,
            "state": str(machine.observed.state),
            "orphan": machine.orphan,
            "spared": machine.spared,
            "destroyed": id(machine) in ended,
        }
        for machine in survey.machines
    ]
    return {"installation": name, "judged_by": survey.judged_by, "machines": machines, "silent": dict(survey.silent)}
