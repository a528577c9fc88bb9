"""Slack: one thread a job. The first message shows the job as it is; replies tell what happened.

A delivery may come twice. Slack has no idempotency key for posts, so each message carries ours as metadata, and whoever
cannot be sure that a message is new looks for it first.
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
from broker.notify.slack.blocks import SlackMessage, ended, root
from broker.notify.slack.client import API_URL, Missing, SlackClient, new_session
from broker.notify.slack.settings import Secrets, check
from broker.ports import Clock, Settings, State
from broker.reporting.loss_curve import Losses
from broker.runtime.secret_box import SecretBox

log = logging.getLogger(__name__)

REFRESH_S = 30.0
TRUST_S = 5.0
"""A thread that this process left so lately, nobody else has written to since: less than the outbox's lease."""
TRUSTED = 4096
LOOK_BACK = timedelta(minutes=5)
"""Clocks of ours and Slack's differ by less."""

Curve = Callable[[Job], Awaitable[Losses]]
"""The loss curve of a job's last checkpoint. Raises GpubrokerError."""


class SlackNotifier:
    """`ports.Notifier` into Slack conversations."""

    kind = "slack"
    refresh_s: float | None = REFRESH_S

    def __init__(self, box: SecretBox, clock: Clock, curve: Curve, *, api_url: str = API_URL) -> None:
        self._box = box
        self._clock = clock
        self._curve = curve
        self._api_url = api_url
        self._session: aiohttp.ClientSession | None = None
        self._clients: dict[str, tuple[bytes | None, str, SlackClient]] = {}
        self._seen: OrderedDict[tuple[str, str], _Seen] = OrderedDict()

    def check(self, config: Mapping[str, object], secrets: Mapping[str, str]) -> Settings:
        return check(config, secrets)

    def fresh(self, secrets: Mapping[str, str]) -> tuple[Mapping[str, str], str | None]:
        return secrets, None

    def client(self, channel: Channel) -> SlackClient:
        """For a channel's token and conversation as they are now. Raises SecretsError."""
        conversation = str(channel.config["channel"])
        known = self._clients.get(channel.id)
        if known is not None and known[:2] == (channel.sealed, conversation):
            return known[2]
        token = Secrets.opened(self._box, channel.sealed).bot_token
        made = SlackClient(token, conversation, clock=self._clock, session=self.session(), api_url=self._api_url)
        self._clients[channel.id] = (channel.sealed, conversation, made)
        return made

    def session(self) -> aiohttp.ClientSession:
        """One for all that is said to Slack; made in the loop that uses it."""
        if self._session is None:
            self._session = new_session()
        return self._session

    async def deliver(
        self, channel: Channel, delivery: Delivery, snapshot: JobSnapshot | None, state: State | None
    ) -> State | None:
        name, now = (channel.id, delivery.stream), self._clock.monotonic()
        seen = self._seen.pop(name, None)
        replies = seen.replies if seen is not None and seen.state == state and now - seen.at < TRUST_S else None
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
            self._seen[name] = _Seen(replies=thread.replies, state=thread.state or None, at=now)
        while len(self._seen) > TRUSTED:
            self._seen.popitem(last=False)
        return thread.state or None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A thread as this process left it."""

    replies: set[str]
    state: State | None
    at: float


@dataclass
class _Thread:
    """One delivery. `state`: {"ts": the root, "shown": its digest}."""

    client: SlackClient
    curve: Curve
    channel: Channel
    state: dict[str, object]
    replies: set[str] | None
    """Ours in the thread that this delivery or a later one could repeat; None: to be looked up."""

    async def notice(self, delivery: Delivery) -> None:
        """Its stream has two senders, the outbox and whoever tests the channel: looking is the only way to know."""
        if delivery.notice is not None:
            key = {"channel": self.channel.id, "id": delivery.id}
            if await self.client.find(key, since=_since(delivery.notice.at)) is None:
                await self.client.post(slack_replies.notice(delivery.notice), key=key)

    async def job(self, delivery: Delivery, snapshot: JobSnapshot) -> None:
        if delivery.refresh and ("ts" not in self.state or self.client.busy):
            return
        try:
            await self._told(delivery, snapshot)
        except Missing:  # somebody deleted it: people who look for the job find it again
            self.state.clear()
            if not delivery.refresh:
                self.replies = None
                with contextlib.suppress(Missing):
                    await self._told(delivery, snapshot)

    async def _told(self, delivery: Delivery, snapshot: JobSnapshot) -> None:
        shown = root(snapshot)
        thread = str(self.state.get("ts") or await self._open(snapshot, shown))
        if delivery.event is not None:
            await self._reply(delivery, delivery.event, snapshot, thread)
        if self.state.get("shown") != shown.digest:
            await self.client.update(thread, shown)
            self.state["shown"] = shown.digest

    async def _open(self, snapshot: JobSnapshot, shown: SlackMessage) -> str:
        key = {"channel": self.channel.id, "job": snapshot.job.id}
        since = _since(max(snapshot.job.created_at, self.channel.created_at))
        found = await self.client.find(key, since=since)
        if found is None:
            found = await self.client.post(shown, key=key)
            self.state["shown"], self.replies = shown.digest, set()
        self.state["ts"] = found
        return found

    async def _reply(self, delivery: Delivery, event: Event, snapshot: JobSnapshot, thread: str) -> None:
        if event.kind not in slack_replies.ENDS:
            said = slack_replies.reply(event, snapshot, delivery.folded)
            if said is not None:
                await self._say(said, delivery.id, event, thread)
            return
        losses = await self._losses(snapshot.job)
        picture = plot.png(losses, _heldout(snapshot), _resumed(snapshot)) if len(losses) > 1 else None
        await self._say(ended(snapshot, () if picture else losses), delivery.id, event, thread)
        if picture is not None:
            await self._upload(picture, snapshot.job, event, thread)

    async def _say(self, said: SlackMessage, name: str, event: Event, thread: str) -> None:
        told = await self._told_since(event, thread)
        if name not in told:
            await self.client.post(said, key={"channel": self.channel.id, "id": name}, thread=thread)
            told.add(name)

    async def _upload(self, picture: bytes, job: Job, event: Event, thread: str) -> None:
        name, told = f"loss-{job.id}-{event.seq}.png", await self._told_since(event, thread)
        if name not in told:
            await self.client.upload(name, picture, title=f"loss of {job.spec.name}", thread=thread)
            told.add(name)

    async def _told_since(self, event: Event, thread: str) -> set[str]:
        """Looked up once for all that waits: whoever held the stream before may have told more than it wrote down."""
        if self.replies is None:
            self.replies = await self.client.thread(thread, since=_since(event.at))
        return self.replies

    async def _losses(self, job: Job) -> Losses:
        """Empty where there are none; a summary does not wait for the blob store."""
        try:
            return await self.curve(job)
        except GpubrokerError as e:
            log.warning("no loss curve for job %s: %s", job.id, e)
            return ()


def _since(at: datetime | None) -> float:
    return 0.0 if at is None else (at - LOOK_BACK).timestamp()


def _heldout(snapshot: JobSnapshot) -> tuple[float | None, float | None]:
    final = snapshot.attempts[-1].final if snapshot.attempts else None
    return (final.heldout_loss_before, final.heldout_loss_after) if final else (None, None)


def _resumed(snapshot: JobSnapshot) -> tuple[int, ...]:
    return tuple(a.beat.resumed_from for a in snapshot.attempts[1:] if a.beat and a.beat.resumed_from)
