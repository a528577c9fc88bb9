"""Commands on teams, tokens and the audit log."""

import json
from typing import Annotated

import typer

from broker.api.schemas.tenancy import AuditView, TeamRequest, TokenRequest, TokenView
from broker.cli.core import formatting
from broker.cli.core.command import Json, client, command
from broker.cli.core.durations import TIME_HELP, future, past
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.cli.core.usage_errors import checked

SHOWN_CHARACTERS = 60
TOKENS = (
    Column(name="token"),
    Column(name="team", min_width=8),
    Column(name="owner", min_width=8),
    Column(name="scopes", min_width=8),
    Column(name="created", rank=2),
    Column(name="expires"),
    Column(name="note", min_width=12, rank=1),
)
AUDITED = (
    Column(name="at"),
    Column(name="team", min_width=8, rank=3),
    Column(name="who", min_width=8),
    Column(name="token", rank=4),
    Column(name="action"),
    Column(name="target", min_width=13),
    Column(name="amount", right=True, rank=2),
    Column(name="change", min_width=12, prose=True, rank=1),
)
OF_TOKEN = {"owner": "OWNER", "scopes": "--scope", "team": "--team", "expires_at": "--expires", "note": "--note"}
OF_TEAM = {"name": "NAME", "note": "--note"}
Note = Annotated[str, typer.Option(help="Free text, shown in lists.")]


@command
async def token_new(
    owner: Annotated[str, typer.Argument(help="User that the token acts as; it uses this user's secrets and uploads.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="read, submit, manage, metrics or admin. Default: read and submit. Repeatable."),
    ] = None,
    team: Annotated[str | None, typer.Option(help="Team of the token. Default: your team.")] = None,
    expires: Annotated[str | None, typer.Option(metavar="TIME", help=f"{TIME_HELP}. Default: never.")] = None,
    note: Note = "",
    as_json: Json = False,
) -> None:
    """Create a token. It is shown only once."""
    out = Output(as_json=as_json)
    values = {"owner": owner, "scopes": scope or ["read", "submit"], "team": team, "note": note}
    request = checked(
        TokenRequest, {**values, "expires_at": None if expires is None else future("--expires", expires)}, OF_TOKEN
    )
    async with client() as c:
        token = await c.create_token(request)
    out.document(token)
    until = "" if token.expires_at is None else f", until {token.expires_at:%Y-%m-%d %H:%M} UTC"
    rights = f"{', '.join(token.scopes)}{until}"
    out.secret(f"token {token.id} of {token.owner} in {token.team} ({rights}), shown only once:", token.token)


@command
async def token_ls(as_json: Json = False) -> None:
    """List the tokens of your team, or all tokens as an admin. Their secrets are never shown."""
    out = Output(as_json=as_json)
    async with client() as c:
        page = await c.tokens()
    out.document(page)
    out.print(TerminalTable(TOKENS, map(_token, page.items)))


def _token(token: TokenView) -> tuple[str, ...]:
    until = "never" if token.expires_at is None else f"{token.expires_at:%Y-%m-%d %H:%M}"
    scopes, age = ", ".join(token.scopes), formatting.ago(token.created_at)
    return token.id, token.team, token.owner, scopes, age, until, token.note


@command
async def token_rm(token: Annotated[str, typer.Argument(help="Id of the token.")], as_json: Json = False) -> None:
    """Revoke a token."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.delete_token(token)
    out.document({"removed": token})
    out.print(f"token {token} revoked")


@command
async def team_new(name: Annotated[str, typer.Argument()], note: Note = "", as_json: Json = False) -> None:
    """Create a team. Then create tokens for its users: `gpubroker token new OWNER --team NAME`."""
    out = Output(as_json=as_json)
    request = checked(TeamRequest, {"name": name, "note": note}, OF_TEAM)
    async with client() as c:
        team = await c.create_team(request)
    out.document(team)
    out.print(f"team {team.name} created; next: gpubroker token new OWNER --team {team.name}")
    out.print("with several teams, jobs on the daemon's host run isolated, and only for providers.local.teams")


@command
async def team_ls(as_json: Json = False) -> None:
    """Show your team, or list all teams as an admin."""
    out = Output(as_json=as_json)
    async with client() as c:
        page = await c.teams()
    out.document(page)
    rows = [(team.name, formatting.ago(team.created_at), team.note) for team in page.items]
    out.print(
        TerminalTable((Column(name="team"), Column(name="created", rank=1), Column(name="note", min_width=16)), rows)
    )


@command
async def team_rm(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Delete a team that never had a job, with its tokens, secrets and uploads."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.delete_team(name)
    out.document({"removed": name})
    out.print(f"team {name} deleted")


@command
async def audit(
    actor: Annotated[str | None, typer.Option(help="User who made the change.")] = None,
    action: Annotated[str | None, typer.Option(help="Action: job.submit, or job for all job actions.")] = None,
    target: Annotated[str | None, typer.Option(help="Target id or name.")] = None,
    team: Annotated[str | None, typer.Option(help="Only this team (admins only).")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help=f"Start: {TIME_HELP}.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help=f"End: {TIME_HELP}.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Number of entries, the newest.")] = 50,
    as_json: Json = False,
) -> None:
    """Show the audit log of your team, or of all teams as an admin. The newest entry is last."""
    out = Output(as_json=as_json)
    since, until = past("--since", since), past("--until", until)
    async with client() as c:
        page = await c.audit(
            team=team, actor=actor, action=action, target=target, since=since, until=until, limit=limit
        )
    out.document(page)
    out.print(TerminalTable(AUDITED, map(_entry, reversed(page.items))))


def _entry(entry: AuditView) -> tuple[str, ...]:
    cost = "" if entry.usd is None else formatting.money(entry.usd)
    at = f"{entry.at:%Y-%m-%d %H:%M:%S}"
    return at, entry.team, entry.actor, entry.token_id, entry.action, entry.target, cost, _change(entry)


def _change(entry: AuditView) -> str:
    """Return `before -> after`, shortened; --json has the whole text."""
    sides = [json.dumps(side, ensure_ascii=False) for side in (entry.before, entry.after) if side is not None]
    text = " -> ".join(sides)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
