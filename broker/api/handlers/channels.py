"""Handlers: notification channels."""

from broker.api.http.context import SERVICE
from broker.api.http.openapi import Api, Call
from broker.api.schemas import channels as wire
from broker.api.schemas.queries import ChannelRef
from broker.api.service.channels import NewChannel
from broker.ports import ChannelStatus

api = Api()


@api.op("GET", "/v1/channels", scope="manage")
async def list_channels(call: Call) -> wire.ChannelList:
    """List your team's channels with their backlog; for admins all. Secrets are never shown."""
    channels = await call.request.app[SERVICE].channels.list(call.caller)
    return wire.ChannelList(items=tuple(map(_view, channels)))


@api.op("POST", "/v1/channels", scope="manage", status=201, errors=(409,))
async def create_channel(call: Call, body: wire.ChannelRequest) -> wire.ChannelMade:
    """Add a channel. A webhook's signing secret is shown in this answer only."""
    wish = NewChannel(
        kind=body.kind,
        name=body.name,
        team=body.team,
        installation=body.installation,
        events=body.events,
        config=body.config,
        secrets=body.secrets,
    )
    channel, secret = await call.request.app[SERVICE].channels.create(call.caller, wish)
    return wire.ChannelMade(id=channel.id, name=channel.name, secret=secret)


@api.op("GET", "/v1/channels/{channel_id}", scope="manage", errors=(404,))
async def get_channel(call: Call, channel_id: ChannelRef) -> wire.ChannelView:
    """Show one channel."""
    return _view(await call.request.app[SERVICE].channels.status(call.caller, channel_id))


@api.op("PATCH", "/v1/channels/{channel_id}", scope="manage", errors=(404,))
async def change_channel(call: Call, channel_id: ChannelRef, body: wire.ChannelChange) -> wire.ChannelView:
    """Change the events of a channel, or enable or disable it."""
    channels = call.request.app[SERVICE].channels
    return _view(await channels.change(call.caller, channel_id, events=body.events, enabled=body.enabled))


@api.op("POST", "/v1/channels/{channel_id}/rotate", scope="manage", errors=(404, 409))
async def rotate_channel(call: Call, channel_id: ChannelRef) -> wire.ChannelMade:
    """Create a new signing secret. The previous one stays valid for a day."""
    channel, secret = await call.request.app[SERVICE].channels.rotate(call.caller, channel_id)
    return wire.ChannelMade(id=channel.id, name=channel.name, secret=secret)


@api.op("POST", "/v1/channels/{channel_id}/test", scope="manage", errors=(404,))
async def test_channel(call: Call, channel_id: ChannelRef) -> wire.ChannelTested:
    """Send a real test message now."""
    return wire.ChannelTested.model_validate(await call.request.app[SERVICE].channels.test(call.caller, channel_id))


@api.op("DELETE", "/v1/channels/{channel_id}", scope="manage", status=204, errors=(404, 409))
async def delete_channel(call: Call, channel_id: ChannelRef) -> None:
    """Remove a channel with its backlog."""
    await call.request.app[SERVICE].channels.delete(call.caller, channel_id)


def _view(status: ChannelStatus) -> wire.ChannelView:
    channel = status.channel
    return wire.ChannelView(
        id=channel.id,
        kind=channel.kind,
        name=channel.name,
        team=channel.team,
        events=channel.events,
        config=dict(channel.config),
        created_at=channel.created_at,
        enabled=channel.enabled,
        reason=channel.reason,
        failures=channel.failures,
        waiting=status.waiting,
        oldest_s=status.oldest_s,
        dropped=dict(status.dropped),
    )
