"""`gpubroker launcher`: list and report lost launchers, the processes that create machines."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.core.command import Json, command, confirm
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
    """List ending attempts whose launcher is not known to have finished. Needs no daemon."""
    out = Output(as_json=as_json)
    async with opened(home, config, installation) as stores:
        attempts, now = await stores.store.unproven_launches(), await stores.store.ping()
    out.document({"attempts": [_document(attempt) for attempt in attempts]})
    out.print(_table(attempts, now) if attempts else "no attempt waits for its launcher")


@command
async def lost(
    attempt: Annotated[
        str, typer.Argument(metavar="ATTEMPT", help="Id of the attempt, as listed by `gpubroker launcher ls`.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    installation: Named = None,
    home: Home = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Confirm that a launcher's process or computer is gone for good and can create no machine. Needs no daemon.

    Its attempt then ends as soon as the cloud lists no machine, and the job continues.
    """
    from broker.controllers.provisioning.launcher_completion import StillLives, confirm_lost

    out = Output(as_json=as_json)
    async with AsyncExitStack() as stack:
        stores = await stack.enter_async_context(opened(home, config, installation))
        unproven = await stores.store.unproven_launches()
        lost_attempt = next((candidate for candidate in unproven if candidate.id == attempt), None)
        if lost_attempt is None:
            raise NotFoundExit(f"no attempt {attempt} waits for its launcher; see `gpubroker launcher ls`")
        machine = f"{lost_attempt.name} at {lost_attempt.line.offer.provider}"
        question = f"Is {lost_attempt.launched_by!r}, the launcher of {machine}, gone for good?"
        confirm(out, question, yes=yes, verb="confirm", refusal="nothing was changed")
        provider = await _provider(stores.settings, stores.installation, lost_attempt, stack)
        try:
            confirmed = await confirm_lost(stores.store, lost_attempt, provider)
        except StillLives as e:
            raise BadInput(str(e)) from None
    if not confirmed:
        raise NotFoundExit(f"attempt {attempt} has changed meanwhile; nothing was changed")
    out.document(_document(lost_attempt) | {"lost": True})
    out.print(f"{machine} will not be created; its attempt ends once the cloud lists no machine")


async def _provider(
    settings: DaemonConfig, name: Installation, attempt: Attempt, stack: AsyncExitStack
) -> "Provider | None":
    """Return the attempt's provider, or None if it is not configured on this host."""
    from broker.blobs import ObstoreBlobs
    from broker.runtime.clock import SystemClock
    from providers.registry import build

    blobs = ObstoreBlobs.open(settings.blobs_url, name, options=settings.blob_options)
    state = settings.home / "providers"
    providers = build(settings.providers, installation=name, state=state, clock=SystemClock(), blobs=blobs)
    for provider in providers.values():
        stack.push_async_callback(provider.close)
    return providers.get(attempt.line.offer.provider)


COLUMNS = (
    Column(name="attempt"),
    Column(name="job"),
    Column(name="machine", min_width=16),
    Column(name="cloud", rank=1),
    Column(name="launcher", min_width=8),
    Column(name="ending for", min_width=8, rank=2),
)


def _table(attempts: Sequence[Attempt], now: datetime) -> TerminalTable:
    rows = []
    for attempt in attempts:
        age = duration((now - (attempt.terminating_since or attempt.created_at)).total_seconds())
        provider = attempt.line.offer.provider
        rows.append((attempt.id, attempt.job_id, attempt.name, provider, attempt.launched_by, age))
    return TerminalTable(COLUMNS, rows)


def _document(attempt: Attempt) -> dict[str, str]:
    return {
        "id": AttemptId(attempt.id),
        "job": attempt.job_id,
        "machine": attempt.name,
        "provider": attempt.line.offer.provider,
        "launcher": attempt.launched_by,
        "since": (attempt.terminating_since or attempt.created_at).isoformat(),
    }
