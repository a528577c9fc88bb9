"""Commands that link Slack users to gpubroker users."""

from typing import Annotated

import typer
from rich.table import Table

from broker.api.schemas.slack_users import SlackLinkRequest
from broker.cli.core import formatting
from broker.cli.core.command import Json, client, command
from broker.cli.core.output import Output
from broker.cli.core.usage_errors import checked

Member = Annotated[str, typer.Argument(help="Slack member ID (U…); in a Slack profile, under ⋮.")]

OF_LINK = {"user": "USER", "owner": "--owner", "scopes": "--scope", "team": "--team", "channel": "--channel"}


@command
async def link(
    user: Member,
    owner: Annotated[str, typer.Option(help="The gpubroker user that the Slack user acts as.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="read, submit or manage. Default: read and submit. Repeatable."),
    ] = None,
    team: Annotated[str | None, typer.Option(help="Link to another team (operators only).")] = None,
    channel: Annotated[str | None, typer.Option(help="Name of a channel in the user's Slack workspace.")] = None,
    as_json: Json = False,
) -> None:
    """Link a Slack user, who may then use buttons and /gpubroker; repeat the command to change the link."""
    out = Output(as_json=as_json)
    values = {"user": user, "owner": owner, "scopes": scope or ["read", "submit"], "team": team, "channel": channel}
    request = checked(SlackLinkRequest, values, OF_LINK)
    async with client() as c:
        created = await c.link_slack_user(request)
    out.document(created)
    user_text = f"{created.name} ({created.user})"
    out.print(f"{user_text} acts as {created.owner} of {created.team}: {', '.join(created.scopes)}")


@command
async def links(as_json: Json = False) -> None:
    """List linked Slack users."""
    out = Output(as_json=as_json)
    async with client() as c:
        page = await c.slack_users()
    out.document(page)
    table = Table()
    for name in ("member", "name", "owner", "team", "scopes", "linked"):
        table.add_column(name)
    for user in page.items:
        scopes = ", ".join(user.scopes)
        table.add_row(user.user, user.name, user.owner, user.team, scopes, formatting.ago(user.linked_at))
    out.print(table)


@command
async def unlink(user: Member, as_json: Json = False) -> None:
    """Remove the link of a Slack user."""
    out = Output(as_json=as_json)
    async with client() as c:
        await c.unlink_slack_user(user)
    out.document({"unlinked": user})
    out.print(f"{user} is no longer linked")
