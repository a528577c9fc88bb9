"""Notices of a job's whole life at a webhook, with two brokers and a receiver that fails at times."""

import asyncio
import json

from aiohttp import web

from broker.domain.job import JobState
from broker.domain.notifications import Channel
from broker.notify.webhook.notifier import WebhookNotifier
from broker.notify.webhook.signature import new_secret
from broker.reporting.delivery import PROGRESS
from broker.runtime.clock import SystemClock
from tests.support.rig.broker_rig import BOX, BrokerRig, RigBuilder
from tests.unit.broker.notify.harness import receiving


async def test_a_webhook_receives_every_event_of_a_job_in_order(build_rig: RigBuilder) -> None:
    stumbles = 3

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal stumbles
        stumbles -= 1
        return web.Response(status=500 if stumbles >= 0 else 204)

    market = {"lifetimes_s": (1.5,), "virtual": {"run_s": 2, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02}}
    clock = SystemClock()
    # None is sent again because this machine is slow.
    notifier = WebhookNotifier(BOX, clock, insecure_hosts=["127.0.0.1"], total_s=300)
    built = build_rig(**market)
    built.notifiers = [notifier]
    async with receiving(answer) as receiver:
        secrets = {"url": f"http://127.0.0.1:{receiver.port}/", "signing": new_secret()}
        channel = Channel(
            id="hook", kind="webhook", name="hook", team="default", sealed=BOX.seal(json.dumps(secrets)),
            created_at=clock.now(),
        )  # fmt: skip
        assert await built.store.add_channel(channel)
        async with built.running("one", "two") as rig:
            jobs = [await rig.submit(resources={"spot": "only"}, retry={"max": 50}) for _ in range(3)]
            for job in jobs:
                await rig.state_of(job, JobState.SUCCEEDED)
            await _quiet(rig)
            bodies = [json.loads(body) for _, body in receiver.got]
            ids = [headers["webhook-id"] for headers, _ in receiver.got]
            for job in jobs:
                heard = {one["data"]["seq"]: one for one in bodies if one["data"]["job_id"] == job}
                assert list(heard) == sorted(heard)
                events = {event.seq: event.kind for event in await rig.events(job)}
                assert {seq: one["type"] for seq, one in heard.items()}.items() <= events.items()
                assert {kind for seq, kind in events.items() if seq not in heard} <= PROGRESS
                assert len(heard) + sum(one["data"]["folded"] for one in heard.values()) == len(events)
                assert heard[len(events)]["data"]["job"]["state"] == "succeeded"
    assert len(ids) == len(set(ids)) + 3
    await notifier.close()


async def _quiet(rig: BrokerRig) -> None:
    """Wait until no notice waits for the webhook."""

    async def done() -> bool:
        (hook,) = [channel for channel in await rig.store.channels() if channel.channel.id == "hook"]
        await asyncio.sleep(0)
        return hook.waiting == 0

    await rig.eventually(done)
