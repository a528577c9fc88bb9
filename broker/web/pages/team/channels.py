"""Notification channels of the team: list, add, test, stop, renew the signing secret, remove."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from broker.api.core.auth import Forbidden
from broker.api.core.problems import Conflict
from broker.api.schemas.channels import ChannelRequest
from broker.api.schemas.queries import ChannelRef
from broker.api.service.channels import NewChannel, secret_version
from broker.domain.errors import InvalidInput
from broker.domain.notifications import Channel
from broker.ports import ChannelStatus
from broker.web.browser import Visit, not_found, redirect_to
from broker.web.pages.team.layout import by_field, checked, echoed, removal_page, team_page
from broker.web.routes import Routes

routes = Routes()
REF = TypeAdapter[str](ChannelRef)
SECRETS = ("url", "bot_token", "signing_secret", "app_token")
"""Fields of the form that are secrets of a channel. The page never shows them again."""
NO_FIELDS: Mapping[str, str] = {}


@routes.get("/ui/team/channels", scope="manage")
async def channels(visit: Visit) -> web.Response:
    """Show the team's channels with their backlog."""
    return await _page(visit)


async def _page(visit: Visit, status: int = 200, form: Mapping[str, str] = NO_FIELDS, **values: Any) -> web.Response:
    fields = {name: text for name, text in echoed(form).items() if name not in SECRETS}
    rows = await visit.service.channels.list(visit.caller)
    return team_page(visit, "channels", status, channels=rows, form=fields, **values)


@routes.post("/ui/team/channels", scope="manage")
async def create(visit: Visit) -> web.Response:
    """Add a channel. A webhook's signing secret is shown in this answer only."""
    form = await visit.form()
    try:
        channel, secret = await _create(visit, form)
    except InvalidInput as error:
        return await _page(visit, 422, form, faults=by_field(error))
    except Conflict as error:
        return await _page(visit, 409, form, faults={"name": str(error)})
    except Forbidden as error:
        return await _page(visit, 403, form, faults={"name": str(error)})
    if secret is None:
        return redirect_to(f"/ui/team/channels/{channel.id}")
    return await _channel_page(visit, await visit.service.channels.status(visit.caller, channel.id), 201, secret=secret)


async def _create(visit: Visit, form: Mapping[str, str]) -> tuple[Channel, str | None]:
    events = [part.strip() for part in form.get("events", "").split(",") if part.strip()]
    body = checked(
        ChannelRequest,
        {
            "kind": form.get("kind", ""),
            "name": form.get("name", "").strip(),
            "installation": form.get("installation") == "1",
            "events": events,
            "config": {"channel": form["channel"].strip()} if form.get("channel", "").strip() else {},
            "secrets": {name: form[name].strip() for name in SECRETS if form.get(name, "").strip()},
        },
    )
    wish = NewChannel(
        kind=body.kind, name=body.name, installation=body.installation, events=body.events, config=body.config,
        secrets=body.secrets,
    )  # fmt: skip
    return await visit.service.channels.create(visit.caller, wish)


async def _channel_of_team(visit: Visit, channel_id: str) -> ChannelStatus:
    """Return a channel of the team. Raises NotFound, also for a text that is not an id."""
    try:
        channel_key = REF.validate_python(channel_id)
    except ValidationError:
        raise not_found("such channel; the list of channels shows yours") from None
    return await visit.service.channels.status(visit.caller, channel_key)


async def _channel_page(visit: Visit, row: ChannelStatus, status: int = 200, **values: Any) -> web.Response:
    values = {"secret": None, "tested": None, "fault": ""} | values
    return team_page(
        visit, "channel", status, row=row, channel=row.channel, version=secret_version(row.channel), **values
    )


@routes.get("/ui/team/channels/{channel_id}", scope="manage")
async def channel(visit: Visit, channel_id: str) -> web.Response:
    """Show one channel and what can be done with it."""
    return await _channel_page(visit, await _channel_of_team(visit, channel_id))


@routes.post("/ui/team/channels/{channel_id}/test", scope="manage")
async def test(visit: Visit, channel_id: str) -> web.Response:
    """Send a real test message now, and show what the receiver answered."""
    row = await _channel_of_team(visit, channel_id)
    tested = await visit.service.channels.test(visit.caller, row.channel.id)
    return await _channel_page(visit, row, tested=tested)


@routes.post("/ui/team/channels/{channel_id}/switch", scope="manage")
async def switch(visit: Visit, channel_id: str) -> web.Response:
    """Enable or disable a channel, as the form says."""
    row, form = await _channel_of_team(visit, channel_id), await visit.form()
    await visit.service.channels.change(
        visit.caller, row.channel.id, events=None, enabled=form.get("enabled", "1") == "1"
    )
    return redirect_to(f"/ui/team/channels/{row.channel.id}")


@routes.post("/ui/team/channels/{channel_id}/rotate", scope="manage")
async def rotate(visit: Visit, channel_id: str) -> web.Response:
    """Replace the signing secret that the page was made for, and show the new one once."""
    version = (await visit.form()).get("version", "")
    row = await _channel_of_team(visit, channel_id)
    try:
        channel, secret = await visit.service.channels.rotate(visit.caller, row.channel.id, version)
    except Conflict as error:
        return await _channel_page(visit, row, 409, fault=str(error))
    return await _channel_page(visit, replace(row, channel=channel), secret=secret)


@routes.get("/ui/team/channels/{channel_id}/remove", scope="manage")
async def ask_remove(visit: Visit, channel_id: str) -> web.Response:
    """Ask before a channel is removed."""
    row = await _channel_of_team(visit, channel_id)
    waiting = f"Messages that wait and are lost: {row.waiting}." if row.waiting else "No message waits."
    name, back = row.channel.name, f"/ui/team/channels/{row.channel.id}"
    lines = (f"It sends nothing any more. {waiting}",)
    return removal_page(visit, title=f"Remove the channel {name}?", lines=lines, button=f"Remove {name}", back=back)


@routes.post("/ui/team/channels/{channel_id}/remove", scope="manage")
async def remove(visit: Visit, channel_id: str) -> web.Response:
    """Remove a channel with its backlog."""
    row = await _channel_of_team(visit, channel_id)
    await visit.service.channels.delete(visit.caller, row.channel.id)
    return redirect_to("/ui/team/channels")
