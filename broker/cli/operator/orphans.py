"""`gpubroker doctor --orphans`: the machines that no record explains, and what becomes of each."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from broker.cli.core.exit_codes import BadInput, JobFailed, ServerProblem
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.cli.operator.sweep import Look, looking
from broker.daemon.config import DaemonConfig
from broker.domain.errors import GpubrokerError, InvalidInput
from broker.domain.formatting import duration
from broker.domain.money import show

if TYPE_CHECKING:
    from broker.controllers.termination.offline_sweep import FoundMachine

WATCH_S = 120.0
"""How long the lease is watched where there is no database: as `gpubroker sweep` does."""
BY_HAND = "`gpubroker sweep --once --destroy{}` ends it"


async def doctor(out: Output) -> None:
    """Raises JobFailed when there is one, or a cloud did not answer; nothing is destroyed."""
    try:
        settings = DaemonConfig.load()
        async with looking(settings, None, watch_s=WATCH_S) as look:
            orphans = [one for one in look.found.machines if one.orphan]
            said = {id(one): becomes(one, look, settings) for one in orphans}
            now = look.clock.now()
    except InvalidInput as e:
        raise BadInput("\n".join(f"{p.field}: {p.message}" for p in e.problems)) from None
    except GpubrokerError as e:
        raise ServerProblem(str(e)) from None
    found = look.found
    out.document(
        {
            "installation": look.installation,
            "judged_by": found.judged_by,
            "orphans": [_document(one, said[id(one)], now) for one in orphans],
            "silent": dict(found.silent),
        }
    )
    out.say(_table(orphans, said, now) if orphans else f"no orphan; {_judged(look)}")
    for cloud, why in found.silent.items():
        out.say(f"PROBLEM  {cloud} did not answer, so nothing is known of it: {why}")
    if orphans or found.silent:
        counted = f"{len(orphans)} machines that no record explains; {len(found.silent)} clouds are silent"
        raise JobFailed(counted, told=True)


def becomes(one: "FoundMachine", look: Look, settings: DaemonConfig) -> str:
    """What the sweep will do with it, and when."""
    from broker.daemon.installation import REPORT_ONLY

    by_hand = BY_HAND.format(" --spared" if one.spared else "")
    if (settings.home / REPORT_ONLY).exists():
        return f"only reported: {settings.home / REPORT_ONLY} is there; remove it and restart, or {by_hand}"
    if one.spared:
        return f"{one.spared}; {by_hand}"
    within_s = look.providers[one.provider].caps.list_lag_s + 2 * settings.rhythm.sweep_s
    if look.daemon:
        return f"destroyed by the daemon within {within_s:.0f} s"
    if look.found.judged_by == "the database":
        return f"destroyed within {within_s:.0f} s while a daemon runs; else {by_hand}"
    return f"nobody sweeps; {by_hand}"


def _judged(look: Look) -> str:
    return f"{len(look.found.machines)} machines of installation {look.installation}, judged by {look.found.judged_by}"


def _age(one: "FoundMachine", now: datetime) -> str:
    return "unknown" if one.since is None else duration((now - one.since).total_seconds())


COLUMNS = (
    Column(name="cloud"),
    Column(name="id", least=13),
    Column(name="name", least=16),
    Column(name="age", rank=2),
    Column(name="$/h", right=True),
    Column(name="why", least=12, rank=1),
    Column(name="what becomes of it", least=16),
)


def _table(orphans: "list[FoundMachine]", said: dict[int, str], now: datetime) -> TerminalTable:
    rows = []
    for one in orphans:
        handle, price = one.observed.handle, one.observed.usd_per_hour
        rate = "unknown" if price is None else show(price)
        rows.append((one.provider, handle.id, handle.name, _age(one, now), rate, one.orphan, said[id(one)]))
    return TerminalTable(COLUMNS, rows, title="Machines that no record explains")


def _document(one: "FoundMachine", said: str, now: datetime) -> dict[str, Any]:
    handle, price = one.observed.handle, one.observed.usd_per_hour
    return {
        "provider": one.provider,
        "id": handle.id,
        "name": handle.name,
        "region": handle.region,
        "state": str(one.observed.state),
        "age_s": None if one.since is None else (now - one.since).total_seconds(),
        "usd_per_hour": None if price is None else str(price),
        "why": one.orphan,
        "becomes": said,
    }
