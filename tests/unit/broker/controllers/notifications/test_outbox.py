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
class Rig:
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

    async def add_event(self, job: Job, kind: str) -> None:
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
        (found,) = [channel for channel in await self.store.channels() if channel.channel.name == name]
        return found


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(notifier=Scripted())
    await rig.add()
    yield rig
    await rig.outbox.close()


def down(message: str = "refused") -> Act:
    def act(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        raise NotDelivered(message)

    return act


def up(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
    return state


async def test_every_jobs_events_are_delivered_in_order(rig: Rig) -> None:
    kinds = [f"e{n}" for n in range(80)]
    jobs = [await rig.job(*kinds) for _ in range(5)]
    await rig.run()
    assert [rig.notifier.heard(job) for job in jobs] == [kinds] * 5
    assert len(rig.notifier.calls) == 400
    assert (await rig.status()).waiting == 0


async def test_two_brokers_deliver_everything_once(rig: Rig) -> None:
    jobs = [await rig.job("a", "b", "c") for _ in range(30)]
    other = rig.another("two")
    while any(await asyncio.gather(rig.outbox.step(), other.step())):
        pass
    assert [rig.notifier.heard(job) for job in jobs] == [["a", "b", "c"]] * 30


async def test_a_slow_stream_holds_up_no_other(rig: Rig) -> None:
    slow, quick = await rig.job("a"), await rig.job("a")
    gate = rig.notifier.gates[slow.id] = asyncio.Event()
    await rig.outbox.step()
    assert rig.notifier.heard(quick) == ["a"]
    gate.set()
    await rig.run()
    assert rig.notifier.heard(slow) == ["a"]


async def test_a_hanging_channel_holds_up_no_other(rig: Rig) -> None:
    await rig.add(id="c2", name="slow")
    gate = rig.notifier.gates["c2"] = asyncio.Event()
    for _ in range(3):
        job = await rig.job("a")
        await rig.run()
        assert rig.notifier.heard(job) == ["a"]
    gate.set()
    await rig.run()
    await rig.run()
    assert len(rig.notifier.told) == 6


async def test_a_channel_down_for_an_hour_loses_nothing_and_floods_nothing(rig: Rig) -> None:
    rig.notifier.act = down()
    jobs = [await rig.job("job.submitted") for _ in range(5)]
    for _ in range(36):
        for job in jobs:
            await rig.add_event(job, "job.waiting")
        await rig.live(100)
    assert len(rig.notifier.calls) < 40
    for job in jobs:
        await rig.add_event(job, "job.succeeded")
    rig.notifier.act = up
    await rig.live(600)
    for job in jobs:
        assert rig.notifier.heard(job)[0] == "job.submitted"
        assert rig.notifier.heard(job)[-1] == "job.succeeded"
    waits = [wait for wait in rig.notifier.told if wait.kind == "job.waiting"]
    assert len(waits) <= 10
    assert len(waits) + sum(wait.folded for wait in waits) == 36 * 5
    after = await rig.status()
    assert (after.waiting, after.channel.enabled, after.channel.failures) == (0, True, 0)
    assert after.dropped == {"folded": sum(wait.folded for wait in waits)}


async def test_a_pause_is_obeyed_by_the_whole_channel_and_no_failure(rig: Rig) -> None:
    def busy(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        raise RetryAfter("429", 30)

    first, *others = [await rig.job("a", "b") for _ in range(3 * AT_ONCE)]
    rig.notifier.act = busy
    await rig.run()
    asked = len(rig.notifier.calls)
    assert asked <= AT_ONCE
    rig.notifier.act = up
    await rig.live(29)
    assert len(rig.notifier.calls) == asked
    await rig.live(3)
    assert [rig.notifier.heard(job) for job in (first, *others)] == [["a", "b"]] * (3 * AT_ONCE)
    assert (await rig.status()).channel.failures == 0


async def test_a_round_ends_before_its_lease_however_slow_the_channel(rig: Rig) -> None:
    def slow(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        rig.clock.time += timedelta(seconds=10)
        return state

    rig.notifier.act = slow
    job = await rig.job(*(f"e{n}" for n in range(20)))
    began = rig.clock.time
    await rig.outbox.step()
    assert (rig.clock.time - began).total_seconds() < LEASE_S
    await rig.run()
    assert rig.notifier.heard(job) == [f"e{n}" for n in range(20)]


async def test_an_undeliverable_message_is_dropped_and_counted(rig: Rig) -> None:
    def picky(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        if delivery.kind == "bad":
            raise Undeliverable("too long", "too long for it")
        return state

    rig.notifier.act = picky
    job = await rig.job("a", "bad", "b")
    await rig.run()
    assert rig.notifier.heard(job) == ["a", "b"]
    assert (await rig.status()).dropped == {"too long for it": 1}


async def test_one_poisonous_delivery_is_given_up_and_its_job_continues(rig: Rig) -> None:
    def poisoned(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        if delivery.kind == "bad":
            raise NotDelivered("500")
        return state

    rig.notifier.act = poisoned
    job = await rig.job("bad", "b")
    while "b" not in rig.notifier.heard(job):
        other = await rig.job("a")
        await rig.live(60)
        assert rig.notifier.heard(other) == ["a"]
        assert len(rig.notifier.calls) < 1000
    tries = [call.attempts for call in rig.notifier.calls if call.kind == "bad"]
    assert tries == list(range(GIVE_UP_AFTER))
    assert (await rig.status()).dropped == {"never taken": 1}


async def test_a_refusing_channel_is_disabled_and_users_notified_elsewhere(rig: Rig) -> None:
    def gone(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        if channel.name == "hook":
            raise ChannelRefused("410: wants no more")
        return state

    await rig.add(id="c2", name="other")
    rig.notifier.act = gone
    job = await rig.job("a")
    await rig.live(3)
    hook = await rig.status()
    assert (hook.channel.enabled, hook.channel.reason, hook.waiting) == (False, "410: wants no more", 1)
    (notice,) = [one.notice for one in rig.notifier.told if one.notice]
    assert (notice.kind, notice.team, notice.data["name"]) == ("channel.disabled", "default", "hook")
    rig.notifier.act = up
    await rig.store.write_channel(replace(hook.channel, enabled=True))
    await rig.run()
    assert rig.notifier.heard(job) == ["a", "a"]


async def test_a_channel_that_fails_for_about_a_day_is_disabled(rig: Rig) -> None:
    rig.notifier.act = down("503")
    await rig.job("a")
    hours = 0
    while (await rig.status()).channel.enabled:
        for _ in range(12):
            await rig.run()
            rig.clock.time += timedelta(seconds=300)
        hours += 1
        assert hours < 48
    assert hours > 12
    assert f"{DISABLE_AFTER} failures in a row, the last: 503" in (await rig.status()).channel.reason


async def test_an_error_of_our_own_is_reported_again(rig: Rig) -> None:
    def broken(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        raise KeyError("oops")

    rig.notifier.act = broken
    job = await rig.job("a")
    await rig.run()
    assert (await rig.status()).channel.reason == "'oops'"
    rig.notifier.act = up
    await rig.live(3)
    assert rig.notifier.heard(job) == ["a"]


async def test_the_state_before_a_failed_delivery_is_stored(rig: Rig) -> None:
    def half(channel: Channel, delivery: Delivery, state: State | None) -> State | None:
        if state is None:
            raise NotDelivered("the reply failed", state={"ts": "1"})
        return {**state, "replied": True}

    rig.notifier.act = half
    await rig.job("a")
    await rig.live(3)
    assert len(rig.notifier.told) == 1
    (row,) = [row for (own, _), row in rig.store._state.outbox.streams.items() if own == "c1"]
    assert row.state == {"ts": "1", "replied": True}


async def test_a_live_job_is_refreshed_until_it_is_terminal(rig: Rig) -> None:
    rig.notifier.refresh_s = 10
    job = await rig.job("a")
    await rig.live(35)
    refreshes = [one for one in rig.notifier.told if one.refresh]
    assert len(refreshes) == 3
    assert {one.stream for one in refreshes} == {job.id}
    held = await claimed_job(rig.store)
    ended = replace(held, state=JobState.FAILED, finished_at=START)
    assert await rig.store.apply([Change(job=(held, ended), events=(make_event(job, "job.failed"),))]) == [True]
    await rig.live(60)
    assert rig.notifier.heard(job)[-1] == "job.failed"
    assert len(rig.notifier.told) == 5


async def test_a_failed_refresh_is_no_failure(rig: Rig) -> None:
    rig.notifier.refresh_s = 10
    await rig.job("a")
    await rig.run()
    rig.notifier.act = down()
    await rig.live(35)
    assert (await rig.status()).channel.failures == 0
    assert len(rig.notifier.calls) == 4


async def test_notices_are_reported_in_their_own_order(rig: Rig) -> None:
    for n in range(5):
        await rig.store.post(Notice(id=f"n{n}", kind="budget.threshold", message="m", team="default"))
    await rig.run()
    assert [one.id for one in rig.notifier.told] == [f"ntc_n{n}" for n in range(5)]


async def test_undelivered_messages_are_dropped_after_their_limit() -> None:
    rig = Rig(notifier=Scripted(act=down()), keep=OutboxRetention(age_s=300, rows=3))
    await rig.add()
    job = await rig.job("a", "b", "c", "d")
    await rig.live(int(TRIM_S) + 1)
    assert (await rig.status()).dropped == {"too many": 1}
    await rig.live(400)
    assert (await rig.status()).dropped == {"too many": 1, "too old": 3}
    rig.notifier.act = up
    await rig.add_event(job, "e")
    await rig.live(400)
    assert rig.notifier.heard(job) == ["e"]
