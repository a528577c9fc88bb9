"""A Slack on loopback, and a notifier that posts there, for one test."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from broker.domain.job import Event, Job
from broker.domain.notifications import Channel, Delivery, JobSnapshot
from broker.notify.slack.client import POST_BURST
from broker.notify.slack.notifier import SlackNotifier
from broker.ports import State
from broker.reporting.loss_curve import Losses
from broker.runtime.secret_box import SecretBox
from tests.conformance.samples import START, ManualClock
from tests.slack.server import BOT_TOKEN, Slack, slack

BOX = SecretBox(b"test-only master key, 32 bytes !")
LIVELY = POST_BURST


class Clock(ManualClock):
    """Manual clock whose sleeps advance the time at once."""

    async def sleep(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


def channel(token: str = BOT_TOKEN, conversation: str = "C0JOBS", **changes: Any) -> Channel:
    values: dict[str, Any] = {
        "id": "ch1", "kind": "slack", "name": "jobs", "team": "default", "config": {"channel": conversation},
        "sealed": BOX.seal(f'{{"bot_token": "{token}"}}'), "created_at": START,
    }  # fmt: skip
    return Channel(**values | changes)


@dataclass
class Rig:
    """Stand-in for the outbox of one stream, which passes deliveries to the notifier and stores its state."""

    slack: Slack
    clock: Clock
    curve: Losses = ()
    channel: Channel = field(default_factory=channel)
    states: dict[str, State | None] = field(default_factory=dict)
    seq: int = 0

    def __post_init__(self) -> None:
        self.notifier = self.another()

    def another(self) -> SlackNotifier:
        """Return a notifier without memory, as after a restart of the daemon."""
        return SlackNotifier(BOX, self.clock, self._losses, api_url=f"{self.slack.url}/api/")

    async def _losses(self, job: Job) -> Losses:
        return self.curve

    def event(self, job: Job, kind: str, message: str = "said", **changes: Any) -> Delivery:
        self.seq += 1
        made = replace(Event(job_id=job.id, kind=kind, message=message, seq=self.seq, at=self.clock.now()), **changes)
        return Delivery(stream=job.id, event=made)

    async def tell(self, delivery: Delivery, snapshot: JobSnapshot | None) -> None:
        """Deliver and record; `deliver` alone is a crash before the record."""
        self.states[delivery.stream] = await self.deliver(delivery, snapshot)

    async def deliver(self, delivery: Delivery, snapshot: JobSnapshot | None) -> State | None:
        return await self.notifier.deliver(self.channel, delivery, snapshot, self.states.get(delivery.stream))

    def thread(self) -> list[str]:
        """Return the replies under the only root, as their fallback text."""
        (root,) = self.slack.messages()
        return [m["text"] for m in self.slack.messages(thread=root["ts"])]


@asynccontextmanager
async def rig_of(**settings: Any) -> AsyncIterator[Rig]:
    clock = Clock()
    async with slack(now=clock.monotonic, **settings) as there:
        rig = Rig(there, clock)
        yield rig
        await rig.notifier.close()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rig_of() as made:
        yield made


@pytest.fixture
def rigs() -> Callable[..., Any]:
    return rig_of
