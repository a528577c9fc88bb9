"""Slack notifier: one thread per job. The root message shows the job's state; replies report events.

A delivery may arrive twice, and Slack has no idempotency key for posts. Each message therefore carries a key as
metadata, and a sender without a current record of the thread searches for the key first.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import aiohttp

from broker.domain.errors import GpubrokerError, NotifyError
from broker.domain.job import Event, Job
from broker.domain.notifications import Channel, Delivery, JobSnapshot
from broker.notify import plot
from broker.notify.slack import replies as slack_replies
from broker.notify.slack.blocks import SlackMessage, end_message, root
from broker.notify.slack.client import API_URL, Missing, SlackClient, new_session
from broker.notify.slack.settings import Secrets, check
from broker.ports import Clock, Settings, State
from broker.reporting.loss_curve import Losses
from broker.runtime.secret_box import SecretBox

log = logging.getLogger(__name__)

REFRESH_S = 30.0
TRUST_S = 5.0
"""Seconds for which this process trusts its own record of a thread.

This is less than the outbox's lease, so no other process can have posted meanwhile.
"""
TRUSTED = 4096
LOOK_BACK = timedelta(minutes=5)
"""Margin before the start of a search. The clocks of this host and Slack must differ by less."""

Curve = Callable[[Job], Awaitable[Losses]]
"""(job) -> loss curve of its last checkpoint. Raises GpubrokerError."""


class SlackNotifier:
    """`ports.Notifier` for Slack conversations."""

    kind = "slack"
    refresh_s: float | None = REFRESH_S

    def __init__(self, box: SecretBox, clock: Clock, curve: Curve, *, api_url: str = API_URL) -> None:
        self._box = box
        self._clock = clock
        self._curve = curve
        self._api_url = api_url
        self._session: aiohttp.ClientSession | None = None
        self._clients: dict[str, tuple[bytes | None, str, SlackClient]] = {}
        self._threads: OrderedDict[tuple[str, str], _ThreadRecord] = OrderedDict()

    def check(self, config: Mapping[str, object], secrets: Mapping[str, str]) -> Settings:
        return check(config, secrets)

    def fresh(self, secrets: Mapping[str, str]) -> tuple[Mapping[str, str], str | None]:
        return secrets, None

    def client(self, channel: Channel) -> SlackClient:
        """Return the client of a channel's current token and conversation. Raises SecretsError."""
        conversation = str(channel.config["channel"])
        cached = self._clients.get(channel.id)
        if cached is not None and cached[:2] == (channel.sealed, conversation):
            return cached[2]
        token = Secrets.opened(self._box, channel.sealed).bot_token
        created = SlackClient(token, conversation, clock=self._clock, session=self.session(), api_url=self._api_url)
        self._clients[channel.id] = (channel.sealed, conversation, created)
        return created

    def session(self) -> aiohttp.ClientSession:
        """Return the shared HTTP session, created in the loop that uses it."""
        if self._session is None:
            self._session = new_session()
        return self._session

    async def deliver(
        self, channel: Channel, delivery: Delivery, snapshot: JobSnapshot | None, state: State | None
    ) -> State | None:
        name, now = (channel.id, delivery.stream), self._clock.monotonic()
        session = self._threads.pop(name, None)
        replies = (
            session.replies if session is not None and session.state == state and now - session.at < TRUST_S else None
        )
        thread = _Thread(self.client(channel), self._curve, channel, dict(state or {}), replies)
        try:
            if snapshot is None:
                await thread.notice(delivery)
            else:
                await thread.job(delivery, snapshot)
        except NotifyError as e:
            e.state = thread.state or None
            raise
        if thread.replies is not None:
            now = self._clock.monotonic()
            self._threads[name] = _ThreadRecord(replies=thread.replies, state=thread.state or None, at=now)
        while len(self._threads) > TRUSTED:
            self._threads.popitem(last=False)
        return thread.state or None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


@dataclass(frozen=True, kw_only=True)
class _ThreadRecord:
    """State of a thread when this process last wrote to it."""

    replies: set[str]
    state: State | None
    at: float


@dataclass
class _Thread:
    """One delivery. `state`: {"ts": root message, "shown": its digest}."""

    client: SlackClient
    curve: Curve
    channel: Channel
    state: dict[str, object]
    replies: set[str] | None
    """Identities of posted replies, which no delivery may post again; None: not looked up yet."""

    async def notice(self, delivery: Delivery) -> None:
        """Send a notice unless Slack has it. Outbox and channel test share the stream, so always search first."""
        if delivery.notice is not None:
            key = {"channel": self.channel.id, "id": delivery.id}
            if await self.client.find(key, since=_search_start(delivery.notice.at)) is None:
                await self.client.post(slack_replies.notice(delivery.notice), key=key)

    async def job(self, delivery: Delivery, snapshot: JobSnapshot) -> None:
        if delivery.refresh and ("ts" not in self.state or self.client.busy):
            return
        try:
            await self._deliver_job(delivery, snapshot)
        except Missing:  # a user deleted the root message; a new one lets users find the job
            self.state.clear()
            if not delivery.refresh:
                self.replies = None
                with contextlib.suppress(Missing):
                    await self._deliver_job(delivery, snapshot)

    async def _deliver_job(self, delivery: Delivery, snapshot: JobSnapshot) -> None:
        message = root(snapshot)
        thread = str(self.state.get("ts") or await self._open(snapshot, message))
        if delivery.event is not None:
            await self._reply(delivery, delivery.event, snapshot, thread)
        if self.state.get("shown") != message.digest:
            await self.client.update(thread, message)
            self.state["shown"] = message.digest

    async def _open(self, snapshot: JobSnapshot, message: SlackMessage) -> str:
        key = {"channel": self.channel.id, "job": snapshot.job.id}
        since = _search_start(max(snapshot.job.created_at, self.channel.created_at))
        existing = await self.client.find(key, since=since)
        if existing is None:
            existing = await self.client.post(message, key=key)
            self.state["shown"], self.replies = message.digest, set()
        self.state["ts"] = existing
        return existing

    async def _reply(self, delivery: Delivery, event: Event, snapshot: JobSnapshot, thread: str) -> None:
        if event.kind not in slack_replies.ENDS:
            content = slack_replies.reply(event, snapshot, delivery.folded)
            if content is not None:
                await self._post(content, delivery.id, event, thread)
            return
        losses = await self._losses(snapshot.job)
        picture = plot.png(losses, _heldout(snapshot), _resumed(snapshot)) if len(losses) > 1 else None
        await self._post(end_message(snapshot, () if picture else losses), delivery.id, event, thread)
        if picture is not None:
            await self._upload(picture, snapshot.job, event, thread)

    async def _post(self, content: SlackMessage, name: str, event: Event, thread: str) -> None:
        posted = await self._posted_since(event, thread)
        if name not in posted:
            await self.client.post(content, key={"channel": self.channel.id, "id": name}, thread=thread)
            posted.add(name)

    async def _upload(self, picture: bytes, job: Job, event: Event, thread: str) -> None:
        name, posted = f"loss-{job.id}-{event.seq}.png", await self._posted_since(event, thread)
        if name not in posted:
            await self.client.upload(name, picture, title=f"loss of {job.spec.name}", thread=thread)
            posted.add(name)

    async def _posted_since(self, event: Event, thread: str) -> set[str]:
        """Return the identities of replies since the event, looked up once per delivery.

        The lookup is necessary because the previous sender may have posted more replies than it recorded.
        """
        if self.replies is None:
            self.replies = await self.client.thread(thread, since=_search_start(event.at))
        return self.replies

    async def _losses(self, job: Job) -> Losses:
        """Return the loss curve, empty if it is unavailable, because a summary must not wait for the blob store."""
        try:
            return await self.curve(job)
        except GpubrokerError as e:
            log.warning("no loss curve for job %s: %s", job.id, e)
            return ()


def _search_start(at: datetime | None) -> float:
    return 0.0 if at is None else (at - LOOK_BACK).timestamp()


def _heldout(snapshot: JobSnapshot) -> tuple[float | None, float | None]:
    final = snapshot.attempts[-1].final if snapshot.attempts else None
    return (final.heldout_loss_before, final.heldout_loss_after) if final else (None, None)


def _resumed(snapshot: JobSnapshot) -> tuple[int, ...]:
    return tuple(a.beat.resumed_from for a in snapshot.attempts[1:] if a.beat and a.beat.resumed_from)
