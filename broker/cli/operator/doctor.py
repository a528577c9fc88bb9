"""`gpubroker doctor`: checks of the setup, one line each, with a fix for every problem."""

import importlib.util
from typing import Annotated

import typer

from broker.api.schemas.offers import ProviderView
from broker.cli.core.command import Json, command
from broker.cli.core.exit_codes import JobFailed
from broker.cli.core.output import Output
from broker.cli.operator.doctor_check import DoctorCheck, document, line, parts_of
from broker.client.async_client import AsyncClient
from broker.client.transport import connection
from broker.client.transport.errors import ApiError, ClientError, Misconfigured
from broker.paths import CONFIG_FILE


async def run() -> list[DoctorCheck]:
    """Run every check, even after a failure. Checks of this machine are skipped if the daemon is remote."""
    try:
        daemon = connection.find()
    except Misconfigured as e:  # whether the daemon runs on this machine is unknown too
        return [DoctorCheck(name="daemon", ok=False, detail=str(e))]
    checks = await _daemon(daemon)
    if daemon is None or daemon.source == str(connection.local_file()):
        checks += await _machine()
    return checks


async def _machine() -> list[DoctorCheck]:
    """Check this machine as the daemon's machine, if the packages of the daemon are installed."""
    if importlib.util.find_spec("asyncpg") is None:
        detail = "the client only; `pip install 'gpubroker[server]'` adds the daemon"
        return [DoctorCheck(name="installation", ok=True, detail=detail)]
    from broker.cli.operator.machine_checks import machine_checks

    return await machine_checks()


async def _daemon(daemon: connection.Connection | None) -> list[DoctorCheck]:
    if daemon is None:
        fix = "run `gpubroker serve` or `gpubroker login URL`"
        return [DoctorCheck(name="daemon", ok=False, detail="none is configured", fix=fix)]
    async with AsyncClient(daemon.url, daemon.token, certificate=daemon.certificate) as client:
        try:
            health = await client.ready()
        except ClientError as e:
            fix = f"run `gpubroker serve`, or correct {daemon.source}"
            return [DoctorCheck(name="daemon", ok=False, detail=str(e), fix=fix)]
        checks = [DoctorCheck(name="daemon", ok=True, detail=f"answers at {daemon.url}")]
        checks += parts_of(health)
        try:
            me = await client.me()
        except ApiError as e:
            fix = "set GPUBROKER_TOKEN, or run `gpubroker login URL`"
            return [*checks, DoctorCheck(name="token", ok=False, detail=str(e), fix=fix)]
        return [
            *checks,
            DoctorCheck(name="token", ok=True, detail=f"{me.owner} of {me.team} ({', '.join(me.scopes)})"),
            *await _providers(client, ask="admin" in me.scopes),
        ]


async def _providers(client: AsyncClient, *, ask: bool) -> list[DoctorCheck]:
    """Return one check per provider: its number of offers, and for admins (`ask`) whether its credentials work."""
    try:
        page = await (client.check_providers() if ask else client.providers())
    except ClientError as e:
        return [DoctorCheck(name="providers", ok=False, detail=str(e), fix="see the daemon's log")]
    if not page.items:
        fix = f"configure providers in {CONFIG_FILE}; see docs/design/providers.md"
        return [DoctorCheck(name="providers", ok=False, detail="none is configured", fix=fix)]
    return [_provider(status, has_credentials_checked=ask) for status in page.items]


def _provider(status: ProviderView, *, has_credentials_checked: bool) -> DoctorCheck:
    problem = status.problem or status.error
    work = f"credentials work{f' ({status.identity})' if status.identity else ''}, "
    detail = problem or f"{work if has_credentials_checked else ''}{status.offers} offers"
    if problem is None and status.self_stop == "none":
        detail += "; its machines cannot stop themselves: run `gpubroker sweep` on a second machine as a safety net"
    return DoctorCheck(name=status.name, ok=problem is None, detail=detail)


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
    results = await run()
    out.document({"ok": all(check.ok for check in results), "checks": [document(check) for check in results]})
    for check in results:
        out.print(line(check))
    if not all(check.ok for check in results):
        raise JobFailed("at least one check failed; see above", is_in_document=True)
