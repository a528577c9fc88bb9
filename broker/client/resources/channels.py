"""Calls for channels and Slack links."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from broker.client.transport.http import Calls, LazySchemas

if TYPE_CHECKING:
    from broker.api.schemas import channels as wire
    from broker.api.schemas import slack_users as slack_wire
else:
    wire, slack_wire = LazySchemas("channels"), LazySchemas("slack_users")


class ChannelCalls(Calls):
    async def channels(self) -> wire.ChannelList:
        """List the channels of your team; for admins all."""
        return await self._call("GET", "/v1/channels", wire.ChannelList)

    async def create_channel(self, request: wire.ChannelRequest) -> wire.ChannelMade:
        return await self._call("POST", "/v1/channels", wire.ChannelMade, json=request.model_dump(mode="json"))

    async def channel(self, channel_id: str) -> wire.ChannelView:
        return await self._call("GET", _path(channel_id), wire.ChannelView)

    async def change_channel(self, channel_id: str, change: wire.ChannelChange) -> wire.ChannelView:
        body = change.model_dump(mode="json", exclude_none=True)
        return await self._call("PATCH", _path(channel_id), wire.ChannelView, json=body)

    async def rotate_channel(self, channel_id: str) -> wire.ChannelMade:
        """Create a new signing secret, shown in this answer only."""
        return await self._call("POST", f"{_path(channel_id)}/rotate", wire.ChannelMade)

    async def test_channel(self, channel_id: str) -> wire.ChannelTested:
        """Send a real message."""
        return await self._call("POST", f"{_path(channel_id)}/test", wire.ChannelTested)

    async def delete_channel(self, channel_id: str) -> None:
        await self._http.read("DELETE", _path(channel_id))


class SlackCalls(Calls):
    async def slack_users(self) -> slack_wire.SlackUserList:
        """List the Slack links of your team; for admins all."""
        return await self._call("GET", "/v1/slack/users", slack_wire.SlackUserList)

    async def link_slack_user(self, request: slack_wire.SlackLinkRequest) -> slack_wire.SlackUserView:
        body = request.model_dump(mode="json")
        return await self._call("POST", "/v1/slack/users", slack_wire.SlackUserView, json=body)

    async def unlink_slack_user(self, user: str) -> None:
        await self._http.read("DELETE", f"/v1/slack/users/{quote(user, safe='')}")


def _path(channel_id: str) -> str:
    return f"/v1/channels/{quote(channel_id, safe='')}"
