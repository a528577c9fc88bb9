"""`gpubroker policy`, `budget`, `approve` and `refuse`: spending limits and their current use."""

from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.table import Table

from broker.api.core.problems import invalid_input_of
from broker.api.schemas import policies
from broker.cli.core import formatting
from broker.cli.core.command import JobArgument, Json, client, command
from broker.cli.core.durations import days as days_of
from broker.cli.core.exit_codes import BadInput, NotFoundExit
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output
from broker.cli.spec.spec_file import parsed
from broker.client.transport.errors import ApiError
from broker.domain.policy import Policy
from trainer.contract.yaml_document import YamlDocument

BAR = 20
SHOWN = 10
"""Maximum number of thresholds, and of launches, that a dry run prints; `--json` has all."""
File = Annotated[Path, typer.Argument(metavar="FILE", help="Policy file; see docs/guide/caps-and-budgets.md.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the policy.")]
Team = Annotated[str | None, typer.Option(help="Team of the policy. Default: your team, otherwise the installation.")]


@command
async def apply(file: File, as_json: Json = False) -> None:
    """Create a policy or a new version of it. It applies to every later launch."""
    out, document, policy = Output(as_json=as_json), parsed(file), _policy_document(file)
    async with client() as c:
        try:
            stored = await c.apply_policy(policy)
        except ApiError as error:
            raise _with_lines(document, error) from None
    out.document(stored)
    out.print(f"policy {stored.policy.name} ({stored.policy.scope}) is version {stored.version}")


@command
async def dry_run(
    file: File,
    days: Annotated[str, typer.Option(metavar="TIME", help="Time to look back, in days.")] = "30d",
    as_json: Json = False,
) -> None:
    """Show how a policy would have affected past launches. Nothing is changed."""
    out, document, policy = Output(as_json=as_json), parsed(file), _policy_document(file)
    count = days_of("--days", days, max_days=90)
    async with client() as c:
        try:
            result = await c.dry_run_policy(policy, days=count)
        except ApiError as error:
            raise _with_lines(document, error) from None
    out.document(result)
    _show_dry_run(out, result)


def _policy_document(file: Path) -> dict[str, Any]:
    """Return the validated policy as JSON. Raises BadInput with file, line and field."""
    document = parsed(file)
    try:
        policy = Policy.model_validate(document.data)
    except ValidationError as e:
        problems = invalid_input_of(e, Policy, document.data, root="").problems
        raise _bad(document, tuple((p.field, p.message) for p in problems)) from None
    return policy.model_dump(mode="json", exclude_defaults=True)


def _with_lines(document: YamlDocument, error: ApiError) -> Exception:
    """Return the daemon's errors with file and line."""
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
        page = await c.policies()
    out.document(page)
    table = Table()
    for name in ("policy", "scope", "limits", "version", "changed", "by"):
        table.add_column(name)
    for row in page.items:
        limits, changed = "; ".join(_limits(row.policy)), formatting.ago(row.changed_at)
        table.add_row(row.policy.name, row.policy.scope, limits, str(row.version), changed, row.changed_by)
    out.print(table if page.items else "no policies; `gpubroker policy apply FILE` creates one")


def _limits(policy: Policy) -> list[str]:
    """Return the limits of a policy as short texts."""
    limits = [
        f"{formatting.money(b.limit_usd)} per {'rolling ' if b.window == 'rolling' else ''}{b.per}"
        for b in policy.budgets
    ]
    limits += [f"{policy.max_gpus} GPUs"] if policy.max_gpus is not None else []
    limits += [f"{policy.max_jobs} jobs"] if policy.max_jobs is not None else []
    above = policy.approval_above_usd
    return limits + ([f"approval above {formatting.money(above)}"] if above is not None else [])


@command
async def show(name: Name, team: Team = None, as_json: Json = False) -> None:
    """Show a policy as YAML."""
    out = Output(as_json=as_json)
    async with client() as c:
        latest = (await c.policy_history(name, team=team)).items[0]
    if latest.policy is None:
        raise NotFoundExit(f"policy {name} was deleted by {latest.actor}; `gpubroker policy history {name}` shows it")
    out.document(latest)
    document = latest.policy.model_dump(mode="json", exclude_defaults=True)
    out.print(*yaml.safe_dump(document, sort_keys=False).splitlines())


@command
async def history(name: Name, team: Team = None, as_json: Json = False) -> None:
    """Show every version of a policy and its author, newest first."""
    out = Output(as_json=as_json)
    async with client() as c:
        page = await c.policy_history(name, team=team)
    out.document(page)
    for row in page.items:
        limits = "; ".join(_limits(row.policy)) if row.policy else "deleted"
        out.print(f"{row.version:3}  {row.at:%Y-%m-%d %H:%M:%S} UTC  {row.actor}: {limits}")


@command
async def delete(name: Name, team: Team = None, as_json: Json = False) -> None:
    """Delete a policy. Its history is kept."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.delete_policy(name, team=team)
    out.document({"deleted": name})
    out.print(f"policy {name} deleted; jobs that waited for it continue")


@command
async def budget(as_json: Json = False) -> None:
    """Show the use of every budget: spent and reserved dollars, GPUs and jobs."""
    out = Output(as_json=as_json)
    async with client() as c:
        page = await c.budgets()
    out.document(page)
    table = Table()
    for name in ("policy", "scope", "limit on", "", "spent", "reserved", "limit", "until"):
        table.add_column(name, justify="right" if name in ("spent", "reserved", "limit") else "left")
    for standing in page.items:
        for row in _rows(standing):
            table.add_row(*row)
    empty = "your team has no policy; each job's cap and any policy of the installation still apply"
    out.print(table if page.items else empty)


def _rows(standing: policies.StandingView) -> list[tuple[str, ...]]:
    parts = (standing.user and f"user {standing.user}", standing.team and f"team {standing.team}")
    scope = " of ".join(filter(None, parts)) or "installation"
    rows = [(*_money(standing, line), _end_text(line)) for line in standing.budgets]
    counts = (("GPUs", standing.gpus, standing.max_gpus), ("jobs", standing.jobs, standing.max_jobs))
    for unit, reserved, limit in counts:
        if limit is not None:
            rows.append((unit, _bar(Decimal(0), Decimal(reserved), Decimal(limit)), "", str(reserved), str(limit), ""))
    if standing.approval_above_usd is not None:
        rows.append(("approval above", "", "", "", formatting.money(standing.approval_above_usd), ""))
    return [(standing.name if not n else "", scope if not n else "", *row) for n, row in enumerate(rows)]


def _money(standing: policies.StandingView, line: policies.BudgetView) -> tuple[str, ...]:
    rolling = "rolling " if line.window == "rolling" else ""
    bar = _bar(line.charged_usd, standing.outstanding_usd, line.limit_usd)
    reached = [t for t in line.thresholds if t.reached]
    action = f" {max(reached, key=lambda t: t.at).action.value}" if reached else ""
    amounts = (line.charged_usd, standing.outstanding_usd, line.limit_usd)
    spent, reserved, limit = (formatting.money(usd) for usd in amounts)
    return f"{rolling}{line.per}", f"{bar} {line.committed_usd / line.limit_usd:.0%}{action}", spent, reserved, limit


def _end_text(line: policies.BudgetView) -> str:
    return f"{line.until:%Y-%m-%d %H:%M} UTC" if line.until else "rolls"


def _bar(spent: Decimal, held: Decimal, limit: Decimal) -> str:
    """Return a bar: █ spent, ▒ reserved, · free. With a limit of 0, any whole unit in use fills the bar."""
    total = limit or Decimal(1)
    filled = min(BAR, round(spent / total * BAR))
    reserved = min(BAR - filled, round(held / total * BAR))
    return "█" * filled + "▒" * reserved + "·" * (BAR - filled - reserved)


@command
async def approve(
    job: JobArgument,
    up_to: Annotated[
        str | None, typer.Option("--up-to", metavar="USD", help="Also approve raising the cap up to this amount.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Approve a job that awaits approval, or a higher cap for it."""
    out, usd = Output(as_json=as_json), _usd(up_to)
    async with client() as c:
        view = await c.approve(await job_id(c, job, writes=True), up_to_usd=usd)
    out.document(view)
    out.print(
        f"job {view.id} ({view.name}) is approved up to {formatting.money(max(view.cap_usd, usd or view.cap_usd))}"
    )


def _usd(text: str | None) -> Decimal | None:
    try:
        value = None if text is None else Decimal(text)
    except InvalidOperation:
        raise BadInput(f"--up-to {text} is not an amount in dollars; write it as 25 or 12.50") from None
    if value is not None and not (value.is_finite() and value > 0):
        raise BadInput(f"--up-to {text} is not an amount in dollars; write it as 25 or 12.50")
    return value


@command
async def refuse(job: JobArgument, as_json: Json = False) -> None:
    """Refuse and cancel a job that awaits approval."""
    out = Output(as_json=as_json)
    async with client() as c:
        view = await c.refuse(await job_id(c, job, writes=True))
    out.document(view)
    out.print(f"job {view.id} ({view.name}) is refused and will be cancelled")


def _show_dry_run(out: Output, run: policies.DryRunView) -> None:
    never_started = [launch for launch in run.held if launch.until is None]
    out.print(
        f"{run.since:%Y-%m-%d} to {run.until:%Y-%m-%d}: of {run.launches} launches, {len(run.held)} would have "
        f"waited ({len(never_started)} to the end) and {len(run.drained)} would have drained; {len(run.asked)} jobs "
        "would have needed approval",
        f"{formatting.money(run.usd_spent)} was spent, of which the policy would have prevented "
        f"{formatting.money(run.usd_not_spent)} so far",
    )
    for crossed in run.crossed[:SHOWN]:
        out.print(f"{crossed.at:%Y-%m-%d %H:%M}  {crossed.budget} reaches {crossed.share:.0%}: {crossed.action.value}")
    for hold in run.held[:SHOWN]:
        until = f"until {hold.until:%Y-%m-%d %H:%M}" if hold.until else "to the end"
        out.print(f"{hold.at:%Y-%m-%d %H:%M}  {hold.job_id} attempt {hold.attempt} waits {until}: {hold.reason}")
    more = max(0, len(run.held) - SHOWN) + max(0, len(run.crossed) - SHOWN)
    if more:
        out.print(f"… and {more} more; --json has all")
