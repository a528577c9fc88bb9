"""`gpubroker launcher`: what creates machines, and may be lost with its computer."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.core.command import Json, command
from broker.cli.core.confirm import confirm
from broker.cli.core.exit_codes import BadInput, NotFoundExit
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.cli.operator.local_store import Config, Home, Named, opened
from broker.daemon.config import DaemonConfig
from broker.domain.formatting import duration
from broker.domain.ids import AttemptId, Installation
from broker.domain.job import Attempt

if TYPE_CHECKING:
    from broker.ports import Provider


@command
async def ls(installation: Named = None, home: Home = None, config: Config = None, as_json: Json = False) -> None:
    """List attempts on their way out whose launcher is not known to be through. Needs no daemon."""
    out = Output(as_json=as_json)
    async with opened(home, config, installation) as it:
        found, now = await it.store.unproven_launches(), await it.store.ping()
    out.document({"attempts": [_document(one) for one in found]})
    out.say(_table(found, now) if found else "no attempt waits for its launcher")


@command
async def lost(
    attempt: Annotated[str, typer.Argument(metavar="ATTEMPT", help="As `gpubroker launcher ls` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    installation: Named = None,
    home: Home = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Vouch that a launcher can create nothing any more, since its process or computer is lost for good: its attempt
    ends once the cloud shows no machine, and the job goes on. Needs no daemon.
    """
    from broker.controllers.provisioning.launcher_completion import StillLives, confirm_lost

    out = Output(as_json=as_json)
    async with AsyncExitStack() as stack:
        it = await stack.enter_async_context(opened(home, config, installation))
        one = next((found for found in await it.store.unproven_launches() if found.id == attempt), None)
        if one is None:
            raise NotFoundExit(f"no attempt {attempt} waits for its launcher; see `gpubroker launcher ls`")
        asked = f"Is {one.launched_by!r}, which was to create {one.name} at {one.line.offer.provider}, lost for good?"
        confirm(out, asked, yes=yes, to="vouch", else_="nothing was changed")
        provider = await _provider(it.settings, it.installation, one, stack)
        try:
            done = await confirm_lost(it.store, one, provider)
        except StillLives as e:
            raise BadInput(str(e)) from None
    if not done:
        raise NotFoundExit(f"attempt {attempt} has gone on meanwhile; nothing was changed")
    out.document(_document(one) | {"lost": True})
    out.say(
        f"{one.name} at {one.line.offer.provider} will not come any more; its attempt ends once the cloud shows none"
    )


async def _provider(
    settings: DaemonConfig, name: Installation, one: Attempt, stack: AsyncExitStack
) -> "Provider | None":
    """Where it launches; None where that is not configured here."""
    from broker.blobs import ObstoreBlobs
    from broker.runtime.clock import SystemClock
    from providers.registry import build

    blobs = ObstoreBlobs.open(settings.blobs_url, name, options=settings.blob_options)
    state = settings.home / "providers"
    providers = build(settings.providers, installation=name, state=state, clock=SystemClock(), blobs=blobs)
    for provider in providers.values():
        stack.push_async_callback(provider.close)
    return providers.get(one.line.offer.provider)


COLUMNS = (
    Column(name="attempt"),
    Column(name="job"),
    Column(name="machine", least=16),
    Column(name="cloud", rank=1),
    Column(name="launcher", least=8),
    Column(name="leaving for", least=8, rank=2),
)


def _table(found: Sequence[Attempt], now: datetime) -> TerminalTable:
    rows = []
    for one in found:
        left = duration((now - (one.terminating_since or one.created_at)).total_seconds())
        rows.append((one.id, one.job_id, one.name, one.line.offer.provider, one.launched_by, left))
    return TerminalTable(COLUMNS, rows)


def _document(one: Attempt) -> dict[str, str]:
    return {
        "id": AttemptId(one.id),
        "job": one.job_id,
        "machine": one.name,
        "provider": one.line.offer.provider,
        "launcher": one.launched_by,
        "since": (one.terminating_since or one.created_at).isoformat(),
    }
