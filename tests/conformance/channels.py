"""Channels and streams for the store's contract tests."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from broker.domain.ids import base32
from broker.domain.job import Event, Job
from broker.domain.notifications import Channel, Notice
from broker.ports import ChannelStatus, DeliveryResult, Settlement, Store, Stream
from tests.conformance.samples import START, make_event, make_job

KINDS = ("log", "webhook")


def make_channel(name: str = "hook", **changes: Any) -> Channel:
    channel = Channel(
        id=base32(os.urandom(9), 13), kind="webhook", name=name, team="default", config={"host": "h"}, sealed=b"s",
        created_at=START,
    )  # fmt: skip
    return replace(channel, **changes)


async def only(store: Store, *channels: Channel) -> None:
    """Enable these channels only."""
    for status in await store.channels():
        await store.write_channel(replace(status.channel, enabled=False))
    for channel in channels:
        assert await store.add_channel(channel)


async def submit_with_events(store: Store, *kinds: str, **changes: Any) -> Job:
    """Return a new job with these events."""
    job = make_job(**changes)
    await store.submit(job, key=None, body_sha256="", events=[make_event(job, kind) for kind in kinds])
    return job


async def add_events(store: Store, job: Job, *kinds: str) -> None:
    """Add events to a queued job."""
    for kind in kinds:
        event = Event(job_id=job.id, kind=kind, message="m")
        now = await store.job(job.id)
        assert now is not None
        assert await store.raise_cap(job.id, now.cap_usd + 1, event)


async def claim(store: Store, **changes: Any) -> Sequence[Stream]:
    asked: dict[str, Any] = {"busy": [], "owner": "o", "lease_s": 300, "limit": 10, "depth": 10}
    return await store.claim_streams(KINDS, **asked | changes)


async def settle(store: Store, stream: Stream, *, channel: dict[str, Any] | None = None, wait_s: float = 0,
                 notice: Notice | None = None, **changes: Any) -> int:  # fmt: skip
    settled = DeliveryResult(stream=stream, **{"state": stream.state} | changes)
    moved = replace(stream.channel, **channel or {})
    return await store.settle(Settlement(channel=moved, wait_s=wait_s, streams=(settled,), notice=notice))


def kinds(stream: Stream) -> list[str]:
    return [pending.delivery.kind for pending in stream.pending]


def numbers(stream: Stream) -> list[int]:
    return [pending.row for pending in stream.pending]


async def status(store: Store, name: str = "hook") -> ChannelStatus:
    (found,) = [channel for channel in await store.channels() if channel.channel.name == name]
    return found
