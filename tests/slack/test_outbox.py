"""The real outbox over the real client: an hour without Slack, brokers that die, and Slack's own limits."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest

from broker.controllers.base.context import ControllerContext, Intervals
from broker.controllers.notifications.outbox import LEASE_S, Outbox
from broker.domain.ids import Installation
from broker.domain.job import Event, Job
from broker.notify.slack.notifier import REFRESH_S, SlackNotifier
from broker.reporting.loss_curve import Losses
from tests.conformance.samples import ManualClock, make_event, make_job
from tests.slack.conftest import BOX, Clock, channel
from tests.slack.server import Slack, slack
from tests.support.memory_store.store import MemoryStore


class Waiting(ManualClock):
    """Clock with the time of another clock."""

    def __init__(self, of: Clock) -> None:
        self._of = of

    @property
    def time(self) -> datetime:  # type: ignore[override]
        return self._of.time


@dataclass
class Rig:
    there: Slack
    time: Clock
    curve: Losses = ()
    brokers: list[tuple[Outbox, SlackNotifier]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = MemoryStore(Waiting(self.time))
        self.new_broker()

    def new_broker(self) -> None:
        """Start a new broker that knows only the stored state of its killed predecessor."""
        notifier = SlackNotifier(BOX, self.time, self._losses, api_url=f"{self.there.url}/api/")
        context = ControllerContext(
            installation=Installation("test"), owner=f"b{len(self.brokers)}", store=self.store, blobs=None,  # type: ignore[arg-type]
            providers={}, clock=Waiting(self.time), intervals=Intervals(poll_s=0.005),
        )  # fmt: skip
        self.brokers.append((Outbox(context, [notifier], jitter=lambda: 0.0), notifier))

    async def _losses(self, job: Job) -> Losses:
        return self.curve

    async def job(self) -> Job:
        job = make_job()
        await self.store.submit(job, key=None, body_sha256="", events=[make_event(job, "job.submitted")])
        return job

    async def add_event(self, job: Job, message: str, kind: str = "attempt.preempted") -> None:
        now = await self.store.job(job.id)
        assert now is not None
        await self.store.raise_cap(job.id, now.cap_usd + 1, Event(job_id=job.id, kind=kind, message=message))

    async def live(self, seconds: float, *, step_s: float = 5.0) -> None:
        end = self.time.monotonic() + seconds
        while self.time.monotonic() < end:
            while await self.brokers[-1][0].step():
                pass
            self.time.time += timedelta(seconds=step_s)

    async def all_delivered(self) -> None:
        """Run the outbox until no delivery is due and the refreshes are done."""
        async with asyncio.timeout(300):
            while any(channel.waiting for channel in await self.store.channels() if channel.channel.kind == "slack"):
                await self.live(5)
            await self.live(2 * REFRESH_S)

    def last_word_of_each(self, job: Job) -> list[str]:
        (root,) = [m for m in self.there.messages() if m["metadata"]["event_payload"].get("job") == job.id]
        return [m["text"].rsplit(" ", 1)[-1] for m in self.there.messages(thread=root["ts"])]

    def roots(self) -> str:
        return json.dumps([m["blocks"] for m in self.there.messages()])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    time = Clock()
    async with slack(now=time.monotonic) as there:
        rig = Rig(there, time)
        await rig.store.add_channel(channel(created_at=time.now()))
        yield rig
        for outbox, notifier in rig.brokers:
            await outbox.close()
            await notifier.close()


async def test_an_hour_without_slack_loses_no_message(rig: Rig) -> None:
    """Afterwards everything is reported in order, at Slack's pace, and each root is updated once."""
    jobs = [await rig.job() for _ in range(3)]
    await rig.all_delivered()
    for minute in range(60):
        rig.there.down = ("500", "reset")[minute % 2]
        if minute % 5 == 0:
            for job in jobs:
                await rig.add_event(job, f"minute {minute}")
        await rig.live(60, step_s=30)
    rig.there.down = ""
    rig.there.limits.enforced = True
    asked = len(rig.there.calls)
    await rig.all_delivered()
    minutes = [str(minute) for minute in range(0, 60, 5)]
    assert [rig.last_word_of_each(job) for job in jobs] == [minutes] * 3
    assert rig.roots().count("of $22.00") == 3
    methods = [method for method, _ in rig.there.calls[asked:]]
    assert methods.count("chat.postMessage") == 3 * len(minutes)
    assert methods.count("chat.update") == 3


@pytest.mark.parametrize("after", ["chat.postMessage", "chat.update", "files.completeUploadExternal"])
async def test_a_broker_killed_after_a_call_posts_nothing_twice(rig: Rig, after: str) -> None:
    """Slack carries out the call, but the broker dies before it records the call. Another broker continues when
    the lease has ended.
    """
    rig.curve = ((1, 4.0), (2, 3.0))
    job = await rig.job()
    if after == "chat.update":
        await rig.all_delivered()
    for number in range(3):
        rig.there.stall = after
        kind = "job.failed" if after.startswith("files") else "attempt.preempted"
        await rig.add_event(job, f"number {number}", kind)
        working = asyncio.create_task(rig.live(1))
        await asyncio.wait_for(rig.there.stalled.wait(), 300)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await rig.brokers[-1][0].close()
        rig.there.stalled.clear()
        rig.new_broker()
        await rig.live(LEASE_S)
        await rig.all_delivered()
    texts = rig.last_word_of_each(job)
    if after.startswith("files"):
        assert len([text for text in texts if text]) == 3
        assert texts.count("") == 3, "a picture each"
    else:
        assert texts == ["0", "1", "2"]


async def test_a_busy_hour_stays_within_slacks_limits(rig: Rig) -> None:
    """Limits are enforced to the letter. Only a few calls are refused, and everything is reported."""
    rig.there.limits.enforced = True
    jobs = [await rig.job() for _ in range(20)]
    for number in range(3):
        for job in jobs:
            await rig.add_event(job, f"n {number}")
        await rig.live(120)
    await rig.all_delivered()
    assert [rig.last_word_of_each(job) for job in jobs] == [["0", "1", "2"]] * 20
    assert rig.roots().count("of $13.00") == 20
