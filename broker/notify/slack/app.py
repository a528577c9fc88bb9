"""Requests from Slack: checks signatures, looks up users and sends answers. The API decides about permissions."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from slack_sdk.signature import SignatureVerifier
from slack_sdk.webhook.async_client import AsyncWebhookClient

from broker.domain.notifications import Channel, JobSnapshot
from broker.notify.slack.blocks import message, root
from broker.notify.slack.notifier import SlackNotifier
from broker.notify.slack.settings import Secrets
from broker.notify.slack.text import Json, line, section
from broker.ports import Clock
from broker.runtime.secret_box import SecretBox, SecretsError

log = logging.getLogger(__name__)

LINE = 600


class SlackApp:
    """Slack calls of the API; implements `broker.api.service.slack.SlackAdapter`."""

    def __init__(self, notifier: SlackNotifier, box: SecretBox, clock: Clock, *, api_url: str) -> None:
        self._notifier = notifier
        self._box = box
        self._clock = clock
        self._api_url = urlsplit(api_url)

    def now(self) -> float:
        """Return Unix time, for slack_sdk's verifier."""
        return self._clock.now().timestamp()

    def secrets(self, channel: Channel) -> Secrets | None:
        """Return a channel's secrets, or None, with a log line, if another master key encrypted them."""
        try:
            return Secrets.opened(self._box, channel.sealed)
        except SecretsError as e:
            log.warning("channel %s: %s", channel.name, e)
            return None

    def signers(
        self, channels: Sequence[Channel], body: bytes, timestamp: str | None, signature: str | None
    ) -> list[Channel]:
        """Return the channels whose signing secret made this signature within the last five minutes."""
        valid: dict[str, bool] = {"": False}
        signing = []
        for channel in channels:
            secrets = self.secrets(channel)
            secret = secrets.signing_secret if secrets is not None else ""
            if secret not in valid:
                valid[secret] = self._signed(secret, body, timestamp, signature)
            if valid[secret]:
                signing.append(channel)
        return signing

    def _signed(self, secret: str, body: bytes, timestamp: str | None, signature: str | None) -> bool:
        verifier = SignatureVerifier(secret, clock=self)  # type: ignore[arg-type] # it calls only `now`
        try:
            return verifier.is_valid(body, timestamp, signature)
        except (ValueError, TypeError, OverflowError):  # an invalid timestamp, or a body or signature that is not text
            return False

    async def person(self, channel: Channel, user: str) -> tuple[str, str] | None:
        """Return (workspace, name) of a Slack user, or None for an unknown id. Raises NotifyError."""
        client = self._notifier.client(channel)
        name = await client.person(user)
        return None if name is None else (await client.workspace(), name)

    async def reply(self, url: str, lines: Sequence[str]) -> None:
        """Send lines that only the requesting user sees."""
        reply = message(lines[0] if lines else "", section(*(line(text, LINE) for text in lines)))
        await self._send_answer(url, {"text": reply.text, "blocks": list(reply.blocks)})

    async def update_message(self, url: str, snapshot: JobSnapshot) -> None:
        """Replace the clicked message with the job's current state."""
        updated = root(snapshot)
        await self._send_answer(url, {"text": updated.text, "blocks": list(updated.blocks), "replace_original": True})

    async def _send_answer(self, url: str, body: Mapping[str, Any]) -> None:
        """Send an answer. A failure is only logged, because the requested action has already been carried out."""
        if not self._is_slacks(url):
            log.warning("an answer was asked for at an address that is not Slack's; none is given")
            return
        content: Json = {"response_type": "ephemeral", "replace_original": False, **body}
        try:
            client = AsyncWebhookClient(url, session=self._notifier.session(), retry_handlers=[])
            answer = await client.send_dict(content)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            log.warning("Slack did not take an answer: %s", type(e).__name__)
            return
        if answer.status_code != 200:
            log.warning("Slack did not take an answer: status %d, %s", answer.status_code, line(answer.body, 200))

    def _is_slacks(self, url: str) -> bool:
        """Return True for an address of Slack, because the broker must call no other host that a request names."""
        target, host = urlsplit(url), self._api_url.hostname or ""
        return target.scheme == self._api_url.scheme and (target.hostname or "") in (host, f"hooks.{host}")
