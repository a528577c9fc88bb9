"""A job's whole life as a webhook hears it, with two brokers and a receiver that stumbles."""

import asyncio
import json
from collections.abc import Callable

from aiohttp import web

from broker.domain.job import JobState
from broker.domain.notifications import Channel
from broker.notify.webhook.notifier import WebhookNotifier
from broker.notify.webhook.signature import new_secret
from broker.reporting.delivery import PROGRESS
from broker.runtime.clock import SystemClock
from tests.controllers.house import BOX, House
from tests.unit.broker.notify.harness import receiving

Build = Callable[..., House]


async def test_a_webhook_hears_every_event_of_a_job_in_order(house: Build) -> None:
    stumbles = 3

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal stumbles
        stumbles -= 1
        return web.Response(status=500 if stumbles >= 0 else 204)

    market = {"lifetimes_s": (1.5,), "virtual": {"run_s": 2, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02}}
    clock = SystemClock()
    # None is sent again because this machine is slow.
    notifier = WebhookNotifier(BOX, clock, insecure_hosts=["127.0.0.1"], total_s=300)
    built = house(**market)
    built.notifiers = [notifier]
    async with receiving(answer) as receiver:
        secrets = {"url": f"http://127.0.0.1:{receiver.port}/", "signing": new_secret()}
        channel = Channel(
            id="hook", kind="webhook", name="hook", team="default", sealed=BOX.seal(json.dumps(secrets)),
            created_at=clock.now(),
        )  # fmt: skip
        assert await built.store.add_channel(channel)
        async with built.running("one", "two") as broker:
            jobs = [await broker.submit(resources={"spot": "only"}, retry={"max": 50}) for _ in range(3)]
            for job in jobs:
                await broker.state_of(job, JobState.SUCCEEDED)
            await _quiet(broker)
            told = [json.loads(body) for _, body in receiver.got]
            ids = [headers["webhook-id"] for headers, _ in receiver.got]
            for job in jobs:
                heard = {one["data"]["seq"]: one for one in told if one["data"]["job_id"] == job}
                assert list(heard) == sorted(heard)
                events = {event.seq: event.kind for event in await broker.events(job)}
                assert {seq: one["type"] for seq, one in heard.items()}.items() <= events.items()
                assert {kind for seq, kind in events.items() if seq not in heard} <= PROGRESS
                assert len(heard) + sum(one["data"]["folded"] for one in heard.values()) == len(events)
                assert heard[len(events)]["data"]["job"]["state"] == "succeeded"
    assert len(ids) == len(set(ids)) + 3
    await notifier.close()


async def _quiet(broker: House) -> None:
    """Until the webhook waits for nothing."""

    async def done() -> bool:
        (hook,) = [one for one in await broker.store.channels() if one.channel.id == "hook"]
        await asyncio.sleep(0)
        return hook.waiting == 0

    await broker.eventually(done)
