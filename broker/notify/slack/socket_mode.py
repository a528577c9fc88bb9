"""Socket Mode: receives Slack's clicks and commands over an outgoing connection, without a public address."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slack_sdk.errors import SlackClientError
from slack_sdk.socket_mode.aiohttp import SocketModeClient
from slack_sdk.socket_mode.async_client import AsyncBaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse
from slack_sdk.web.async_client import AsyncWebClient

from broker.domain.notifications import Channel
from broker.notify.slack.app import SlackApp
from broker.ports import Clock

log = logging.getLogger(__name__)
_sdk = logging.getLogger(f"{__name__}.sdk")
_sdk.setLevel(logging.CRITICAL)  # slack_sdk logs tracebacks while Slack is unreachable; our own single line suffices

EVERY_S = 5.0
CONNECT_S = 20.0
BACK_OFF_S = (5.0, 300.0)
PING_S = 10.0

Channels = Callable[[], Awaitable[Sequence[Channel]]]
"""() -> enabled Slack channels. Raises StoreUnavailable."""
Take = Callable[[Sequence[Channel], str, Mapping[str, Any]], Awaitable[None]]
"""(channels of the app, envelope id, payload) -> None. Returns once the request is recorded."""


@dataclass
class _Link:
    """Connection of one app."""

    client: SocketModeClient | None = None
    failures: int = 0
    not_before: float = float("-inf")


class SlackSockets:
    """Keeps one connection per app token. Each broker connects; Slack sends each request to one connection."""

    name = "slack socket"
    every_s = EVERY_S

    def __init__(self, app: SlackApp, channels: Channels, take: Take, clock: Clock, *, api_url: str) -> None:
        self._app = app
        self._channels = channels
        self._take = take
        self._clock = clock
        self._api_url = api_url
        self._links: dict[str, _Link] = {}

    async def step(self) -> bool:
        channels_by_token = await self._channels_by_token()
        for token in [open_token for open_token in self._links if open_token not in channels_by_token]:
            await self._close(self._links.pop(token))
        for token in channels_by_token:
            link = self._links.setdefault(token, _Link())
            up = link.client is not None and await link.client.is_connected()
            if not up and link.not_before <= self._clock.monotonic():
                await self._open(token, link)
        return False

    async def _channels_by_token(self) -> dict[str, list[Channel]]:
        tokens: dict[str, list[Channel]] = {}
        for channel in await self._channels():
            secrets = self._app.secrets(channel)
            if secrets is not None and secrets.app_token:
                tokens.setdefault(secrets.app_token, []).append(channel)
        return tokens

    async def _open(self, token: str, link: _Link) -> None:
        await self._close(link)
        web = AsyncWebClient(base_url=self._api_url, retry_handlers=[], timeout=int(CONNECT_S), logger=_sdk)
        client = SocketModeClient(
            token, web_client=web, auto_reconnect_enabled=False, ping_interval=PING_S, logger=_sdk
        )

        async def told(_: AsyncBaseSocketModeClient, request: SocketModeRequest) -> None:
            await self._received(token, client, request)

        client.socket_mode_request_listeners.append(told)
        try:
            async with asyncio.timeout(CONNECT_S):
                client.wss_uri = await client.issue_new_wss_url()
                await client.connect()
        except (SlackClientError, OSError, TimeoutError, ValueError) as e:
            await client.close()
            min_s, max_s = BACK_OFF_S
            wait = min(max_s, min_s * 2.0 ** min(link.failures, 10))
            link.failures, link.not_before = link.failures + 1, self._clock.monotonic() + wait
            log.warning("Slack's Socket Mode did not open (%s); again in %.0f s", _why(e), wait)
            return
        link.client, link.failures = client, 0

    async def _received(self, token: str, client: SocketModeClient, request: SocketModeRequest) -> None:
        """Record a request, then acknowledge it. Slack repeats other requests, perhaps to another broker."""
        channels = (await self._channels_by_token()).get(token, [])
        await self._take(channels, request.envelope_id, request.payload)
        await client.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id))

    async def _close(self, link: _Link) -> None:
        if link.client is not None:
            await link.client.close()
            link.client = None

    async def close(self) -> None:
        for link in self._links.values():
            await self._close(link)


def _why(error: Exception) -> str:
    """Return the error's name only, because slack_sdk's messages repeat whole answers."""
    response = getattr(error, "response", None)
    error_code = response.get("error") if response is not None else None
    return str(error_code or type(error).__name__)
