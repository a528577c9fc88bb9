"""`gpubroker policy`, `budget`, `approve` and `refuse`: what may be spent, and what is."""

from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.table import Table

from broker.api.core.problems import of_validation
from broker.api.schemas import policies as wire
from broker.cli.core import formatting as words
from broker.cli.core.command import JobArgument, Json, client, command
from broker.cli.core.exit_codes import BadInput, NotFoundExit
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output
from broker.cli.spec.spec_file import parsed
from broker.client.transport.errors import ApiError
from broker.domain.policy import Policy
from trainer.contract.yaml_document import YamlDocument

BAR = 20
SHOWN = 10
"""Launches of a dry run that are named; `--json` has all."""
File = Annotated[Path, typer.Argument(metavar="FILE", help="A policy: docs/guide/caps-and-budgets.md describes it.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The policy's name.")]
Team = Annotated[str | None, typer.Option(help="Of this team; by default of your own, else of the installation.")]


@command
async def apply(file: File, as_json: Json = False) -> None:
    """Make a policy, or a new version of it; every launch obeys it from now on."""
    out, document, policy = Output(as_json=as_json), parsed(file), _read(file)
    async with client() as c:
        try:
            kept = await c.apply_policy(policy)
        except ApiError as error:
            raise _placed(document, error) from None
    out.document(kept)
    out.say(f"policy {kept.policy.name} ({kept.policy.scope}) is version {kept.version}")


@command
async def dry_run(
    file: File,
    days: Annotated[int, typer.Option(min=1, max=90, help="So much of the past.")] = 30,
    as_json: Json = False,
) -> None:
    """Say what a policy would have done to what the ledger says has happened; nothing is changed."""
    out, document, policy = Output(as_json=as_json), parsed(file), _read(file)
    async with client() as c:
        try:
            done = await c.dry_run_policy(policy, days=days)
        except ApiError as error:
            raise _placed(document, error) from None
    out.document(done)
    _told(out, done)


def _read(file: Path) -> dict[str, Any]:
    """The checked policy as JSON. Raises BadInput with file, line and field."""
    document = parsed(file)
    try:
        policy = Policy.model_validate(document.data)
    except ValidationError as e:
        problems = of_validation(e, Policy, document.data, root="").problems
        raise _bad(document, tuple((p.field, p.message) for p in problems)) from None
    return policy.model_dump(mode="json", exclude_defaults=True)


def _placed(document: YamlDocument, error: ApiError) -> Exception:
    """The daemon's complaints by file and line."""
    pairs = tuple((p.field, p.message) for p in error.problem.errors)
    return _bad(document, pairs) if pairs else error


def _bad(document: YamlDocument, pairs: tuple[tuple[str, str], ...]) -> BadInput:
    lines = [
        f"{document.place(tuple(field.split('.')) if field else ())}: {f'{field}: ' if field else ''}{message}"
        for field, message in pairs
    ]
    return BadInput("\n".join(lines), problems=pairs)


@command
async def ls(as_json: Json = False) -> None:
    """List policies."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.policies()
    out.document(found)
    table = Table()
    for name in ("policy", "covers", "limits", "version", "changed", "by"):
        table.add_column(name)
    for one in found.items:
        limits = "; ".join(_limits(one.policy))
        table.add_row(
            one.policy.name, one.policy.scope, limits, str(one.version), words.ago(one.changed_at), one.changed_by
        )
    out.say(table if found.items else "there is no policy; `gpubroker policy apply FILE` makes one")


def _limits(policy: Policy) -> list[str]:
    """A policy in a few words."""
    told = [
        f"{words.money(b.limit_usd)} a {'rolling ' if b.window == 'rolling' else ''}{b.per}" for b in policy.budgets
    ]
    told += [f"{policy.max_gpus} GPUs"] if policy.max_gpus is not None else []
    told += [f"{policy.max_jobs} jobs"] if policy.max_jobs is not None else []
    above = policy.approval_above_usd
    return told + ([f"approval above {words.money(above)}"] if above is not None else [])


@command
async def show(name: Name, team: Team = None, as_json: Json = False) -> None:
    """Show a policy as YAML."""
    out = Output(as_json=as_json)
    async with client() as c:
        latest = (await c.policy_history(name, team=team)).items[0]
    if latest.policy is None:
        raise NotFoundExit(f"policy {name} was deleted by {latest.actor}; `gpubroker policy history {name}` shows it")
    out.document(latest)
    out.say(yaml.safe_dump(latest.policy.model_dump(mode="json", exclude_defaults=True), sort_keys=False).rstrip())


@command
async def history(name: Name, team: Team = None, as_json: Json = False) -> None:
    """Show every version of a policy, newest first, and who made it."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.policy_history(name, team=team)
    out.document(found)
    for one in found.items:
        what = "; ".join(_limits(one.policy)) if one.policy else "deleted"
        out.say(f"{one.version:3}  {one.at:%Y-%m-%d %H:%M:%S} UTC  {one.actor}: {what}")


@command
async def delete(name: Name, team: Team = None, as_json: Json = False) -> None:
    """Delete a policy; its history stays."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.delete_policy(name, team=team)
    out.document({"deleted": name})
    out.say(f"policy {name} is deleted; jobs that waited for it go on")


@command
async def budget(as_json: Json = False) -> None:
    """Show what is spent and reserved of every budget, and how many machines are held."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.budgets()
    out.document(found)
    table = Table()
    for name in ("policy", "covers", "of", "", "spent", "reserved", "limit", "until"):
        table.add_column(name, justify="right" if name in ("spent", "reserved", "limit") else "left")
    for one in found.items:
        for row in _rows(one):
            table.add_row(*row)
    nothing = "there is no policy of your team: the cap of each job holds, and what an operator may have set for all"
    out.say(table if found.items else nothing)


def _rows(one: wire.StandingView) -> list[tuple[str, ...]]:
    whose = " of ".join(filter(None, (one.user and f"user {one.user}", one.team and f"team {one.team}")))
    covers = whose or "installation"
    rows = [(*_money(one, line), _ends(line)) for line in one.budgets]
    counted = (("GPUs", one.gpus, one.max_gpus), ("jobs", one.jobs, one.max_jobs))
    for of, held, most in counted:
        if most is not None:
            rows.append((of, _bar(Decimal(0), Decimal(held), Decimal(most)), "", str(held), str(most), ""))
    if one.approval_above_usd is not None:
        rows.append(("approval above", "", "", "", words.money(one.approval_above_usd), ""))
    return [(one.name if not n else "", covers if not n else "", *row) for n, row in enumerate(rows)]


def _money(one: wire.StandingView, line: wire.BudgetView) -> tuple[str, ...]:
    rolling = "rolling " if line.window == "rolling" else ""
    bar = _bar(line.charged_usd, one.outstanding_usd, line.limit_usd)
    reached = [t for t in line.thresholds if t.reached]
    told = f" {max(reached, key=lambda t: t.at).action.value}" if reached else ""
    spent, held, most = (words.money(usd) for usd in (line.charged_usd, one.outstanding_usd, line.limit_usd))
    return f"{rolling}{line.per}", f"{bar} {line.committed_usd / line.limit_usd:.0%}{told}", spent, held, most


def _ends(line: wire.BudgetView) -> str:
    return f"{line.until:%Y-%m-%d %H:%M} UTC" if line.until else "rolls"


def _bar(spent: Decimal, held: Decimal, most: Decimal) -> str:
    """█ spent, ▒ reserved, · free; full where there is no room at all."""
    total = most or Decimal(1)
    filled = min(BAR, round(spent / total * BAR))
    reserved = min(BAR - filled, round(held / total * BAR))
    return "█" * filled + "▒" * reserved + "·" * (BAR - filled - reserved)


@command
async def approve(
    job: JobArgument,
    up_to: Annotated[str | None, typer.Option("--up-to", metavar="USD", help="A higher cap in advance.")] = None,
    as_json: Json = False,
) -> None:
    """Approve a job that awaits it, or its next cap."""
    out, usd = Output(as_json=as_json), _usd(up_to)
    async with client() as c:
        wanted = await job_id(c, job)
        found = await c.approve(wanted, up_to_usd=usd)
    out.document(found)
    out.say(f"job {found.id} ({found.name}) is approved up to {words.money(max(found.cap_usd, usd or found.cap_usd))}")


def _usd(text: str | None) -> Decimal | None:
    try:
        value = None if text is None else Decimal(text)
    except InvalidOperation:
        raise BadInput(f"--up-to {text} is no amount in dollars; write it as 25 or 12.50") from None
    if value is not None and not (value.is_finite() and value > 0):
        raise BadInput(f"--up-to {text} is no amount in dollars; write it as 25 or 12.50")
    return value


@command
async def refuse(job: JobArgument, as_json: Json = False) -> None:
    """Refuse a job that awaits approval: it is cancelled."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.refuse(await job_id(c, job))
    out.document(found)
    out.say(f"job {found.id} ({found.name}) is refused and will be cancelled")


def _told(out: Output, done: wire.DryRunView) -> None:
    waited = [one for one in done.held if one.until is None]
    out.say(
        f"{done.since:%Y-%m-%d} to {done.until:%Y-%m-%d}: of {done.launches} launches {len(done.held)} would have "
        f"waited ({len(waited)} to the end), {len(done.drained)} drained, {len(done.asked)} jobs asked for approval",
        f"{words.money(done.usd_spent)} was spent, {words.money(done.usd_not_spent)} of it would not have been by now",
    )
    for crossed in done.crossed[:SHOWN]:
        out.say(f"{crossed.at:%Y-%m-%d %H:%M}  {crossed.budget} reaches {crossed.share:.0%}: {crossed.action.value}")
    for held in done.held[:SHOWN]:
        until = f"to {held.until:%Y-%m-%d %H:%M}" if held.until else "to the end"
        out.say(f"{held.at:%Y-%m-%d %H:%M}  {held.job_id} attempt {held.attempt} waits {until}: {held.reason}")
    more = max(0, len(done.held) - SHOWN) + max(0, len(done.crossed) - SHOWN)
    if more:
        out.say(f"… and {more} more; --json has all")
