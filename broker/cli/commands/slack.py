"""Commands on who of Slack acts as whom."""

from typing import Annotated

import typer
from rich.table import Table

from broker.api.schemas.slack_users import SlackLinkRequest
from broker.cli.core import formatting as words
from broker.cli.core.command import Json, client, command
from broker.cli.core.output import Output
from broker.cli.core.request_bodies import checked

Member = Annotated[str, typer.Argument(help="Member ID in Slack (U…): a profile there shows it, under ⋮.")]

OF_LINK = {"user": "USER", "owner": "--owner", "scopes": "--scope", "team": "--team", "channel": "--channel"}


@command
async def link(
    user: Member,
    owner: Annotated[str, typer.Option(help="As whom the person acts here.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="read, submit (the two by default) or manage. Repeat."),
    ] = None,
    team: Annotated[str | None, typer.Option(help="Of another team; operators only.")] = None,
    channel: Annotated[str | None, typer.Option(help="Name of the channel whose workspace it is.")] = None,
    as_json: Json = False,
) -> None:
    """Let a person of Slack use buttons and /gpubroker as somebody here; again: change it."""
    out = Output(as_json=as_json)
    values = {"user": user, "owner": owner, "scopes": scope or ["read", "submit"], "team": team, "channel": channel}
    request = checked(SlackLinkRequest, values, OF_LINK)
    async with client() as c:
        made = await c.link_slack_user(request)
    out.document(made)
    out.say(f"{made.name} ({made.user}) acts as {made.owner} of {made.team}: {', '.join(made.scopes)}")


@command
async def links(as_json: Json = False) -> None:
    """List who of Slack acts as whom."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.slack_users()
    out.document(found)
    table = Table()
    for name in ("member", "name", "owner", "team", "scopes", "linked"):
        table.add_column(name)
    for one in found.items:
        table.add_row(one.user, one.name, one.owner, one.team, ", ".join(one.scopes), words.ago(one.linked_at))
    out.say(table)


@command
async def unlink(user: Member, as_json: Json = False) -> None:
    """Take the link away."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.unlink_slack_user(user)
    out.document({"unlinked": user})
    out.say(f"{user} acts as nobody any more")
