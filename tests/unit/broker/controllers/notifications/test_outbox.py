"""Outbox controller with the in-memory store and a scripted notifier."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from broker.controllers.base.context import ControllerContext, Intervals
from broker.controllers.notifications.channel_round import AT_ONCE
from broker.controllers.notifications.outbox import LEASE_S, TRIM_S, Outbox, OutboxRetention
from broker.domain.errors import ChannelRefused, NotDelivered, RetryAfter, Undeliverable
from broker.domain.ids import Installation
from broker.domain.job import Event, Job, JobState
from broker.domain.notifications import Channel, Delivery, JobSnapshot, Notice
from broker.ports import Change, ChannelStatus, Settings, State
from broker.reporting.delivery import DISABLE_AFTER, GIVE_UP_AFTER
from tests.conformance.samples import START, ManualClock, claimed_job, make_event, make_job
from tests.support.memory_store.store import MemoryStore

Act = Callable[[Channel, Delivery, State | None], State | None]


@dataclass
class Scripted:
    """Notifier that records its deliveries; `act` may raise, or return the state."""

    kind: str = "webhook"
    refresh_s: float | None = None
    act: Act = lambda channel, delivery, state: state
    calls: list[Delivery] = field(default_factory=list)
    told: list[Delivery] = field(default_factory=list)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)

    def check(self, config: Mapping[str, Any], secrets: Mapping[str, str]) -> Settings:
        return config, secrets

    def fresh(self, secrets: Mapping[str, str]) -> tuple[Mapping[str, str], str | None]:
        return secrets, None

    async def deliver(
        self, channel: Channel, delivery: Delivery, snapshot: JobSnapshot | None, state: State | None
    ) -> State | None:
        self.calls.append(delivery)
        if gate := self.gates.get(channel.id) or self.gates.get(delivery.stream):
            await gate.wait()
        kept = self.act(channel, delivery, state)
        self.told.append(delivery)
        return kept

    async def close(self) -> None:
        """Do nothing: the notifier holds no resources."""

    def heard(self, job: Job) -> list[str]:
        return [one.kind for one in self.told if one.stream == job.id]


@dataclass
class Desk:
    """One broker's outbox, one webhook channel `hook`, and a manual clock."""

    notifier: Scripted
    clock: ManualClock = field(default_factory=ManualClock)
    keep: OutboxRetention = field(default_factory=OutboxRetention)

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock)
        self.outbox = self.another("one")

    def another(self, owner: str) -> Outbox:
        context = ControllerContext(
            installation=Installation("test"), owner=owner, store=self.store, blobs=None, providers={},  # type: ignore[arg-type]
            clock=self.clock, intervals=Intervals(poll_s=0.01),
        )  # fmt: skip
        return Outbox(context, [self.notifier], jitter=lambda: 0.0, keep=self.keep)

    async def add(self, **changes: Any) -> None:
        channel = Channel(id="c1", kind="webhook", name="hook", team="default", created_at=START)
        assert await self.store.add_channel(replace(channel, **changes))

    async def job(self, *kinds: str) -> Job:
        job = make_job()
        await self.store.submit(job, key=None, body_sha256="", events=[make_event(job, kind) for kind in kinds])
        return job

    async def say(self, job: Job, kind: str) -> None:
        now = await self.store.job(job.id)
        assert now is not None
        await self.store.raise_cap(job.id, now.cap_usd + 1, Event(job_id=job.id, kind=kind, message="m"))

    async def run(self) -> None:
        """Run steps until no delivery is due."""
        while await self.outbox.step():
            pass

    async def live(self, seconds: int) -> None:
        for _ in range(seconds):
            await self.run()
            self.clock.time += timedelta(seconds=1)

    async def status(self, name: str = "hook") -> ChannelStatus:
        (found,) = [one for one in await self.store.channels() if one.channel.name == name]
        return found


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk(notifier=Scripted())
    await made.add()
    yield made
    await made.outbox.close()


def down(message: str = "refused") -> Act:
    def act(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        raise NotDelivered(message)

    return act


def up(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
    return state


async def test_every_jobs_events_are_delivered_in_order(desk: Desk) -> None:
    kinds = [f"e{n}" for n in range(80)]
    jobs = [await desk.job(*kinds) for _ in range(5)]
    await desk.run()
    assert [desk.notifier.heard(job) for job in jobs] == [kinds] * 5
    assert len(desk.notifier.calls) == 400
    assert (await desk.status()).waiting == 0


async def test_two_brokers_deliver_everything_once(desk: Desk) -> None:
    jobs = [await desk.job("a", "b", "c") for _ in range(30)]
    other = desk.another("two")
    while any(await asyncio.gather(desk.outbox.step(), other.step())):
        pass
    assert [desk.notifier.heard(job) for job in jobs] == [["a", "b", "c"]] * 30


async def test_a_slow_stream_holds_up_no_other(desk: Desk) -> None:
    slow, quick = await desk.job("a"), await desk.job("a")
    gate = desk.notifier.gates[slow.id] = asyncio.Event()
    await desk.outbox.step()
    assert desk.notifier.heard(quick) == ["a"]
    gate.set()
    await desk.run()
    assert desk.notifier.heard(slow) == ["a"]


async def test_a_hanging_channel_holds_up_no_other(desk: Desk) -> None:
    await desk.add(id="c2", name="slow")
    gate = desk.notifier.gates["c2"] = asyncio.Event()
    for _ in range(3):
        job = await desk.job("a")
        await desk.run()
        assert desk.notifier.heard(job) == ["a"]
    gate.set()
    await desk.run()
    await desk.run()
    assert len(desk.notifier.told) == 6


async def test_a_channel_down_for_an_hour_loses_nothing_and_floods_nothing(desk: Desk) -> None:
    desk.notifier.act = down()
    jobs = [await desk.job("job.submitted") for _ in range(5)]
    for _ in range(36):
        for job in jobs:
            await desk.say(job, "job.waiting")
        await desk.live(100)
    assert len(desk.notifier.calls) < 40
    for job in jobs:
        await desk.say(job, "job.succeeded")
    desk.notifier.act = up
    await desk.live(600)
    for job in jobs:
        assert desk.notifier.heard(job)[0] == "job.submitted"
        assert desk.notifier.heard(job)[-1] == "job.succeeded"
    waits = [one for one in desk.notifier.told if one.kind == "job.waiting"]
    assert len(waits) <= 10
    assert len(waits) + sum(one.folded for one in waits) == 36 * 5
    after = await desk.status()
    assert (after.waiting, after.channel.enabled, after.channel.failures) == (0, True, 0)
    assert after.dropped == {"folded": sum(one.folded for one in waits)}


async def test_a_pause_is_obeyed_by_the_whole_channel_and_no_failure(desk: Desk) -> None:
    def busy(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        raise RetryAfter("429", 30)

    first, *others = [await desk.job("a", "b") for _ in range(3 * AT_ONCE)]
    desk.notifier.act = busy
    await desk.run()
    asked = len(desk.notifier.calls)
    assert asked <= AT_ONCE
    desk.notifier.act = up
    await desk.live(29)
    assert len(desk.notifier.calls) == asked
    await desk.live(3)
    assert [desk.notifier.heard(job) for job in (first, *others)] == [["a", "b"]] * (3 * AT_ONCE)
    assert (await desk.status()).channel.failures == 0


async def test_a_round_ends_before_its_lease_however_slow_the_channel(desk: Desk) -> None:
    def slow(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        desk.clock.time += timedelta(seconds=10)
        return state

    desk.notifier.act = slow
    job = await desk.job(*(f"e{n}" for n in range(20)))
    began = desk.clock.time
    await desk.outbox.step()
    assert (desk.clock.time - began).total_seconds() < LEASE_S
    await desk.run()
    assert desk.notifier.heard(job) == [f"e{n}" for n in range(20)]


async def test_an_undeliverable_message_is_dropped_and_counted(desk: Desk) -> None:
    def picky(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        if delivery.kind == "bad":
            raise Undeliverable("too long", "too long for it")
        return state

    desk.notifier.act = picky
    job = await desk.job("a", "bad", "b")
    await desk.run()
    assert desk.notifier.heard(job) == ["a", "b"]
    assert (await desk.status()).dropped == {"too long for it": 1}


async def test_one_poisonous_delivery_is_given_up_and_its_job_continues(desk: Desk) -> None:
    def poisoned(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        if delivery.kind == "bad":
            raise NotDelivered("500")
        return state

    desk.notifier.act = poisoned
    job = await desk.job("bad", "b")
    while "b" not in desk.notifier.heard(job):
        other = await desk.job("a")
        await desk.live(60)
        assert desk.notifier.heard(other) == ["a"]
        assert len(desk.notifier.calls) < 1000
    tries = [one.attempts for one in desk.notifier.calls if one.kind == "bad"]
    assert tries == list(range(GIVE_UP_AFTER))
    assert (await desk.status()).dropped == {"never taken": 1}


async def test_a_refusing_channel_is_disabled_and_users_notified_elsewhere(desk: Desk) -> None:
    def gone(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        if channel.name == "hook":
            raise ChannelRefused("410: wants no more")
        return state

    await desk.add(id="c2", name="other")
    desk.notifier.act = gone
    job = await desk.job("a")
    await desk.live(3)
    hook = await desk.status()
    assert (hook.channel.enabled, hook.channel.reason, hook.waiting) == (False, "410: wants no more", 1)
    (notice,) = [one.notice for one in desk.notifier.told if one.notice]
    assert (notice.kind, notice.team, notice.data["name"]) == ("channel.disabled", "default", "hook")
    desk.notifier.act = up
    await desk.store.write_channel(replace(hook.channel, enabled=True))
    await desk.run()
    assert desk.notifier.heard(job) == ["a", "a"]


async def test_a_channel_that_fails_for_about_a_day_is_disabled(desk: Desk) -> None:
    desk.notifier.act = down("503")
    await desk.job("a")
    hours = 0
    while (await desk.status()).channel.enabled:
        for _ in range(12):
            await desk.run()
            desk.clock.time += timedelta(seconds=300)
        hours += 1
        assert hours < 48
    assert hours > 12
    assert f"{DISABLE_AFTER} failures in a row, the last: 503" in (await desk.status()).channel.reason


async def test_an_error_of_our_own_is_reported_again(desk: Desk) -> None:
    def broken(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        raise KeyError("oops")

    desk.notifier.act = broken
    job = await desk.job("a")
    await desk.run()
    assert (await desk.status()).channel.reason == "'oops'"
    desk.notifier.act = up
    await desk.live(3)
    assert desk.notifier.heard(job) == ["a"]


async def test_the_state_before_a_failed_delivery_is_stored(desk: Desk) -> None:
    def half(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        if state is None:
            raise NotDelivered("the reply failed", state={"ts": "1"})
        return {**state, "replied": True}

    desk.notifier.act = half
    await desk.job("a")
    await desk.live(3)
    assert len(desk.notifier.told) == 1
    (row,) = [row for (own, _), row in desk.store._state.outbox.streams.items() if own == "c1"]
    assert row.state == {"ts": "1", "replied": True}


async def test_a_live_job_is_refreshed_until_it_is_terminal(desk: Desk) -> None:
    desk.notifier.refresh_s = 10
    job = await desk.job("a")
    await desk.live(35)
    refreshes = [one for one in desk.notifier.told if one.refresh]
    assert len(refreshes) == 3
    assert {one.stream for one in refreshes} == {job.id}
    held = await claimed_job(desk.store)
    ended = replace(held, state=JobState.FAILED, finished_at=START)
    assert await desk.store.apply([Change(job=(held, ended), events=(make_event(job, "job.failed"),))]) == [True]
    await desk.live(60)
    assert desk.notifier.heard(job)[-1] == "job.failed"
    assert len(desk.notifier.told) == 5


async def test_a_failed_refresh_is_no_failure(desk: Desk) -> None:
    desk.notifier.refresh_s = 10
    await desk.job("a")
    await desk.run()
    desk.notifier.act = down()
    await desk.live(35)
    assert (await desk.status()).channel.failures == 0
    assert len(desk.notifier.calls) == 4


async def test_notices_are_reported_in_their_own_order(desk: Desk) -> None:
    for n in range(5):
        await desk.store.post(Notice(id=f"n{n}", kind="budget.threshold", message="m", team="default"))
    await desk.run()
    assert [one.id for one in desk.notifier.told] == [f"ntc_n{n}" for n in range(5)]


async def test_undelivered_messages_are_dropped_after_their_limit() -> None:
    desk = Desk(notifier=Scripted(act=down()), keep=OutboxRetention(age_s=300, rows=3))
    await desk.add()
    job = await desk.job("a", "b", "c", "d")
    await desk.live(int(TRIM_S) + 1)
    assert (await desk.status()).dropped == {"too many": 1}
    await desk.live(400)
    assert (await desk.status()).dropped == {"too many": 1, "too old": 3}
    desk.notifier.act = up
    await desk.say(job, "e")
    await desk.live(400)
    assert desk.notifier.heard(job) == ["e"]
