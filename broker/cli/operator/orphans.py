"""`gpubroker doctor --orphans`: lists orphaned machines, which belong to no live attempt, with the next action."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from broker.cli.core.exit_codes import BadInput, JobFailed, ServerProblem
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.cli.operator.sweep import SweepContext, surveying
from broker.daemon.config import DaemonConfig
from broker.domain.errors import GpubrokerError, InvalidInput
from broker.domain.formatting import duration
from broker.domain.money import format_usd

if TYPE_CHECKING:
    from broker.controllers.termination.offline_sweep import FoundMachine

WATCH_S = 120.0
"""Seconds for which the lease is watched if the database is missing, as in `gpubroker sweep`."""
BY_HAND = "`gpubroker sweep --once --destroy{}` ends it"


async def doctor(out: Output) -> None:
    """List orphaned machines; destroy nothing. Raises JobFailed for any orphan, and if a cloud does not answer."""
    try:
        settings = DaemonConfig.load()
        async with surveying(settings, None, watch_s=WATCH_S) as sweep:
            orphans = [machine for machine in sweep.survey.machines if machine.orphan]
            actions = {id(machine): next_action(machine, sweep, settings) for machine in orphans}
            now = sweep.clock.now()
    except InvalidInput as e:
        raise BadInput("\n".join(f"{p.field}: {p.message}" for p in e.problems)) from None
    except GpubrokerError as e:
        raise ServerProblem(str(e)) from None
    survey = sweep.survey
    out.document(
        {
            "installation": sweep.installation,
            "judged_by": survey.judged_by,
            "orphans": [_document(machine, actions[id(machine)], now) for machine in orphans],
            "silent": dict(survey.silent),
        }
    )
    out.print(_table(orphans, actions, now) if orphans else f"no orphaned machine; {_survey_message(sweep)}")
    for cloud, problem in survey.silent.items():
        out.print(f"PROBLEM  {cloud} did not answer, so its machines are unknown: {problem}")
    if orphans or survey.silent:
        summary = f"{len(orphans)} orphaned machines; {len(survey.silent)} clouds did not answer"
        raise JobFailed(summary, is_in_document=True)


def next_action(machine: "FoundMachine", sweep: SweepContext, settings: DaemonConfig) -> str:
    """Return what the sweep will do with an orphaned machine, and when."""
    from broker.daemon.installation import REPORT_ONLY

    by_hand = BY_HAND.format(" --spared" if machine.spared else "")
    if (settings.home / REPORT_ONLY).exists():
        return f"only reported, because {settings.home / REPORT_ONLY} exists; remove it and restart, or {by_hand}"
    if machine.spared:
        return f"{machine.spared}; {by_hand}"
    within_s = sweep.providers[machine.provider].caps.list_lag_s + 2 * settings.intervals.sweep_s
    if sweep.has_daemon:
        return f"destroyed by the daemon within {within_s:.0f} s"
    if sweep.survey.judged_by == "the database":
        return f"destroyed within {within_s:.0f} s while a daemon runs; otherwise {by_hand}"
    return f"no daemon sweeps; {by_hand}"


def _survey_message(sweep: SweepContext) -> str:
    survey = sweep.survey
    return f"{len(survey.machines)} machines of installation {sweep.installation}, judged by {survey.judged_by}"


def _age(machine: "FoundMachine", now: datetime) -> str:
    return "unknown" if machine.since is None else duration((now - machine.since).total_seconds())


COLUMNS = (
    Column(name="cloud"),
    Column(name="id", min_width=13),
    Column(name="name", min_width=16),
    Column(name="age", rank=2),
    Column(name="$/h", right=True),
    Column(name="why", min_width=12, rank=1),
    Column(name="next", min_width=16),
)


def _table(orphans: "list[FoundMachine]", actions: dict[int, str], now: datetime) -> TerminalTable:
    rows = []
    for machine in orphans:
        handle, price = machine.observed.handle, machine.observed.usd_per_hour
        rate, action = "unknown" if price is None else format_usd(price), actions[id(machine)]
        rows.append((machine.provider, handle.id, handle.name, _age(machine, now), rate, machine.orphan, action))
    return TerminalTable(COLUMNS, rows, title="Orphaned machines")


def _document(machine: "FoundMachine", action: str, now: datetime) -> dict[str, Any]:
    handle, price = machine.observed.handle, machine.observed.usd_per_hour
    return {
        "provider": machine.provider,
        "id": handle.id,
        "name": handle.name,
        "region": handle.region,
        "state": str(machine.observed.state),
        "age_s": None if machine.since is None else (now - machine.since).total_seconds(),
        "usd_per_hour": None if price is None else str(price),
        "reason": machine.orphan,
        "next": action,
    }
