"""Commands on teams, tokens and the audit."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from broker.api.schemas.tenancy import AuditView, TeamRequest, TokenRequest, TokenView
from broker.cli.core import formatting as words
from broker.cli.core.command import Json, client, command
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.core.request_bodies import checked
from broker.cli.core.table import Column, TerminalTable

SPAN = re.compile(r"(\d{1,5})([hdw])")
UNITS = {"h": "hours", "d": "days", "w": "weeks"}
SHOWN_CHARACTERS = 60
TOKENS = (
    Column(name="token"),
    Column(name="team", least=8),
    Column(name="owner", least=8),
    Column(name="scopes", least=8),
    Column(name="made", rank=2),
    Column(name="expires"),
    Column(name="note", least=12, rank=1),
)
AUDITED = (
    Column(name="at"),
    Column(name="team", least=8, rank=3),
    Column(name="who", least=8),
    Column(name="token", rank=4),
    Column(name="action"),
    Column(name="target", least=13),
    Column(name="allows", right=True, rank=2),
    Column(name="change", least=12, prose=True, rank=1),
)
OF_TOKEN = {"owner": "OWNER", "scopes": "--scope", "team": "--team", "expires_at": "--expires", "note": "--note"}
OF_TEAM = {"name": "NAME", "note": "--note"}
Note = Annotated[str, typer.Option(help="For people.")]


@command
async def token_new(
    owner: Annotated[str, typer.Argument(help="As whom it acts: whose secrets and uploads it uses.")],
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="read, submit, manage, metrics or admin. Repeat.")
    ] = None,
    team: Annotated[str | None, typer.Option(help="Whose jobs it sees; yours without it.")] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="12h, 30d, 8w, or ISO 8601 with a zone; never without it.")
    ] = None,
    note: Note = "",
    as_json: Json = False,
) -> None:
    """Make a token; it is shown this once."""
    out = Output(as_json=as_json)
    wish = {"owner": owner, "scopes": scope or ["read", "submit"], "team": team, "note": note}
    request = checked(TokenRequest, {**wish, "expires_at": None if expires is None else _until(expires)}, OF_TOKEN)
    async with client() as c:
        made = await c.create_token(request)
    out.document(made)
    until = "" if made.expires_at is None else f", until {made.expires_at:%Y-%m-%d %H:%M} UTC"
    told = f"token {made.id} of {made.owner} in {made.team} ({', '.join(made.scopes)}{until}), shown this once:"
    out.secret(told, made.token)


@command
async def token_ls(as_json: Json = False) -> None:
    """List your team's tokens (an admin: all), without their secrets."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.tokens()
    out.document(found)
    out.say(TerminalTable(TOKENS, map(_token, found.items)))


def _token(t: TokenView) -> tuple[str, ...]:
    until = "never" if t.expires_at is None else f"{t.expires_at:%Y-%m-%d %H:%M}"
    return t.id, t.team, t.owner, ", ".join(t.scopes), words.ago(t.created_at), until, t.note


@command
async def token_rm(token: Annotated[str, typer.Argument(help="The token's id.")], as_json: Json = False) -> None:
    """Revoke a token."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.delete_token(token)
    out.document({"removed": token})
    out.say(f"token {token} is revoked")


@command
async def team_new(name: Annotated[str, typer.Argument()], note: Note = "", as_json: Json = False) -> None:
    """Make a team; then give its people tokens: `gpubroker token new OWNER --team NAME`."""
    out = Output(as_json=as_json)
    request = checked(TeamRequest, {"name": name, "note": note}, OF_TEAM)
    async with client() as c:
        made = await c.create_team(request)
    out.document(made)
    out.say(f"team {made.name} is made; next: gpubroker token new OWNER --team {made.name}")


@command
async def team_ls(as_json: Json = False) -> None:
    """List your team (an admin: all)."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.teams()
    out.document(found)
    rows = [(t.name, words.ago(t.created_at), t.note) for t in found.items]
    out.say(TerminalTable((Column(name="team"), Column(name="made", rank=1), Column(name="note", least=16)), rows))


@command
async def team_rm(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Remove a team that never had a job, with its tokens, secrets and uploads."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.delete_team(name)
    out.document({"removed": name})
    out.say(f"team {name} is removed")


@command
async def audit(
    actor: Annotated[str | None, typer.Option(help="Who did it.")] = None,
    action: Annotated[str | None, typer.Option(help="What was done: job.submit, or job for all of that kind.")] = None,
    target: Annotated[str | None, typer.Option(help="To what: an id or a name.")] = None,
    team: Annotated[str | None, typer.Option(help="Of this team; for admins.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="ISO 8601 with a zone.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="ISO 8601 with a zone.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Entries, the newest ones.")] = 50,
    as_json: Json = False,
) -> None:
    """Show who wrote what in your team (an admin: in all), newest last."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.audit(
            team=team, actor=actor, action=action, target=target, since=since, until=until, limit=limit
        )
    out.document(found)
    out.say(TerminalTable(AUDITED, map(_entry, reversed(found.items))))


def _entry(entry: AuditView) -> tuple[str, ...]:
    cost = "" if entry.usd is None else words.money(entry.usd)
    at = f"{entry.at:%Y-%m-%d %H:%M:%S}"
    return at, entry.team, entry.actor, entry.token_id, entry.action, entry.target, cost, _change(entry)


def _change(entry: AuditView) -> str:
    """`before -> after` in short; all of it is in --json."""
    sides = [json.dumps(side, ensure_ascii=False) for side in (entry.before, entry.after) if side is not None]
    text = " -> ".join(sides)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def _until(text: str) -> datetime:
    span = SPAN.fullmatch(text)
    if span is not None:
        return datetime.now(UTC) + timedelta(**{UNITS[span[2]]: int(span[1])})
    try:
        until = datetime.fromisoformat(text)
    except ValueError:
        until = None
    if until is None or until.tzinfo is None:
        raise BadInput(f"--expires {text}: give 12h, 30d, 8w, or a time with its zone, as 2027-01-31T12:00:00Z")
    return until
