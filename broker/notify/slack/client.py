"""Client of Slack's Web API through slack_sdk. Slack's errors become domain errors.

This client repeats no call, and the retries of slack_sdk are off. A post may succeed although its answer is lost, so
callers search for the message before they post it again.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from slack_sdk.errors import SlackApiError, SlackClientError
from slack_sdk.web.async_client import AsyncWebClient

from broker.domain.errors import ChannelRefused, NotDelivered, RetryAfter, Undeliverable
from broker.notify.slack.blocks import SlackMessage
from broker.ports import Clock

API_URL = "https://slack.com/api/"
TIMEOUT_S = 10.0
EVENT_TYPE = "gpubroker"
PAGE = 200
PAGES = 20
"""Maximum pages of a search: 4000 messages."""
POST_BURST = 4
POST_EVERY_S = 1.0
"""Seconds between posts. Slack documents about one message a second per channel, and short bursts."""
UPDATES = 40
UPDATES_S = 60.0
"""Updates per minute; Slack allows 50 for `chat.update`."""
KEPT_FOR_EVENTS = 0.25
"""Share of updates that is reserved for events and not used by refreshes."""
POST_WAIT_S = 5.0
"""Seconds that a post may wait for its turn; after that the whole channel pauses."""
DEFAULT_RETRY_S = 30.0

REFUSED: Mapping[str, str] = {
    "invalid_auth": "the bot token is not valid; take the one of OAuth & Permissions",
    "not_authed": "there is no bot token; add the channel again with one",
    "account_inactive": "the app was removed from the workspace; install it again",
    "token_revoked": "the bot token was revoked; install the app again",
    "token_expired": "the bot token has expired; switch token rotation off, or install the app again",
    "missing_scope": "the app lacks a scope; see examples/slack/manifest.yaml, and install it again",
    "channel_not_found": "there is no such channel, or it is private; invite the app with /invite",
    "not_in_channel": "the app is not in the channel; invite it with /invite",
    "is_archived": "the channel is archived",
    "restricted_action": "the workspace lets no app post there",
    "team_access_not_granted": "the app may not use this workspace",
}
"""Errors that only a user can fix, with their messages."""
TOO_MUCH = frozenset({"invalid_blocks", "msg_too_long", "msg_blocks_too_long", "no_text", "metadata_too_large",
                      "invalid_arguments"})  # fmt: skip
MISSING = frozenset({"message_not_found", "cant_update_message", "edit_window_closed", "thread_not_found",
                     "cannot_reply_to_message"})  # fmt: skip


class Missing(Exception):
    """The message to update or reply to was deleted, or can no longer be edited."""


@dataclass(kw_only=True)
class Allowance:
    """Token bucket: `size` calls at once, and one more every `every_s` seconds."""

    size: float
    every_s: float
    left: float
    at: float

    def share(self, now: float) -> float:
        """Return the free share of `size`, 0 to 1."""
        self.left = min(self.size, self.left + (now - self.at) / self.every_s)
        self.at = now
        return self.left / self.size

    def wait_s(self, now: float) -> float:
        """Take a call and return 0, or return the seconds until one is free."""
        self.share(now)
        if self.left < 1:
            return (1 - self.left) * self.every_s
        self.left -= 1
        return 0.0


class SlackClient:
    """Client for one bot token and the conversation that a channel posts into."""

    def __init__(
        self, token: str, conversation: str, *, clock: Clock, session: aiohttp.ClientSession, api_url: str = API_URL
    ) -> None:
        self._web = AsyncWebClient(token, base_url=api_url, session=session, retry_handlers=[])
        self._clock = clock
        self.conversation = conversation
        now = clock.monotonic()
        self._posts = Allowance(size=POST_BURST, every_s=POST_EVERY_S, left=POST_BURST, at=now)
        self._updates = Allowance(size=UPDATES, every_s=UPDATES_S / UPDATES, left=UPDATES, at=now)

    async def post(self, content: SlackMessage, *, key: Mapping[str, str], thread: str | None = None) -> str:
        """Post a message and return its `ts`. `key` identifies the message for `find`. Raises Missing, NotifyError."""
        await self._wait_turn()
        answer = await self._call(
            self._web.chat_postMessage,
            channel=self.conversation,
            text=content.text,
            blocks=list(content.blocks),
            thread_ts=thread,
            metadata={"event_type": EVENT_TYPE, "event_payload": dict(key)},
            parse="none",
            link_names=False,
            unfurl_links=False,
            unfurl_media=False,
        )
        return str(answer["ts"])

    async def update(self, ts: str, content: SlackMessage) -> None:
        """Update a message. Raises Missing, NotifyError."""
        self._updates.wait_s(self._clock.monotonic())
        await self._call(
            self._web.chat_update,
            channel=self.conversation,
            ts=ts,
            text=content.text,
            blocks=list(content.blocks),
            parse="none",
            link_names=False,
        )

    @property
    def busy(self) -> bool:
        """Return True if recent updates leave no quota for a refresh."""
        return self._updates.share(self._clock.monotonic()) < KEPT_FOR_EVENTS

    async def find(self, key: Mapping[str, str], *, since: float) -> str | None:
        """Return the `ts` of our message with this key, posted outside threads after `since` (Unix time), or None."""
        async for message in self._messages(since, None):
            metadata = message.get("metadata") or {}
            if metadata.get("event_type") == EVENT_TYPE and metadata.get("event_payload") == key:
                return str(message["ts"])
        return None

    async def thread(self, root: str, *, since: float) -> set[str]:
        """Return the identities of replies after `since` (Unix time): the `id` of gpubroker's keys, and file names."""
        identities: set[str] = set()
        async for message in self._messages(since, root):
            metadata = message.get("metadata") or {}
            if metadata.get("event_type") == EVENT_TYPE:
                identities.add(str((metadata.get("event_payload") or {}).get("id")))
            identities.update(str(file.get("name")) for file in message.get("files") or ())
        return identities

    async def _messages(self, since: float, thread: str | None) -> AsyncIterator[Mapping[str, Any]]:
        cursor: str | None = None
        for _ in range(PAGES):
            options: dict[str, Any] = {"channel": self.conversation, "oldest": f"{since:.6f}", "limit": PAGE}
            method: Callable[..., Awaitable[Any]] = self._web.conversations_history
            if thread is not None:
                options["ts"] = thread
                method = self._web.conversations_replies
            page = await self._call(method, include_all_metadata=True, cursor=cursor, **options)
            for message in page.get("messages") or ():
                yield message
            cursor = (page.get("response_metadata") or {}).get("next_cursor")
            if not cursor:
                return

    async def upload(self, name: str, data: bytes, *, title: str, thread: str) -> None:
        """Upload a file as a reply. Raises Missing, NotifyError."""
        await self._wait_turn()
        await self._call(
            self._web.files_upload_v2,
            filename=name,
            content=data,
            title=title,
            alt_txt=title,
            channel=self.conversation,
            thread_ts=thread,
        )

    async def workspace(self) -> str:
        """Return the workspace (`T…`) of the token. Raises NotifyError."""
        return str((await self._call(self._web.auth_test))["team_id"])

    async def person(self, user: str) -> str | None:
        """Return the name of a Slack user, or None for an unknown id. Raises NotifyError."""
        try:
            answer = await self._call(self._web.users_info, user=user)
        except Undeliverable:
            return None
        profile = answer["user"].get("profile") or {}
        return str(profile.get("display_name") or profile.get("real_name") or user)

    async def _wait_turn(self) -> None:
        """Wait until a post is allowed. Raises RetryAfter if that takes too long."""
        begun = self._clock.monotonic()
        while wait := self._posts.wait_s(self._clock.monotonic()):
            if self._clock.monotonic() - begun > POST_WAIT_S:
                raise RetryAfter("more messages are waiting than Slack takes", POST_EVERY_S)
            await self._clock.sleep(wait)

    async def _call(self, method: Callable[..., Awaitable[Any]], **arguments: Any) -> Mapping[str, Any]:
        name = method.__name__
        try:
            answer = await method(**arguments)
        except SlackApiError as e:
            raise _of_answer(name, e) from None
        except (SlackClientError, aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as e:
            raise NotDelivered(f"Slack did not answer {name}: {type(e).__name__}") from None
        data: Mapping[str, Any] = answer.data
        return data


def _of_answer(name: str, error: SlackApiError) -> Exception:
    """Return the domain error of a Slack answer.

    Its message contains only Slack's error code, because slack_sdk's message repeats the whole answer.
    """
    status, data = error.response.status_code, error.response.data
    code = str(data.get("error", "")) if isinstance(data, dict) else ""
    if status == 429 or code in ("ratelimited", "rate_limited"):
        return RetryAfter("Slack asks for a pause", _retry_after(error.response.headers))
    if code in MISSING:
        return Missing(code)
    if code in REFUSED:
        return ChannelRefused(f"Slack: {code}: {REFUSED[code]}")
    if code in TOO_MUCH or code in ("user_not_found", "user_not_visible"):
        return Undeliverable(f"Slack refused {name}: {code}", f"slack {code}")
    return NotDelivered(f"Slack did not carry out {name}: {code or f'status {status}'}")


def _retry_after(headers: Mapping[str, str]) -> float:
    text = next((value for key, value in headers.items() if key.lower() == "retry-after"), "")
    return min(3600.0, max(1.0, float(text))) if text.isdecimal() else DEFAULT_RETRY_S


def new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
