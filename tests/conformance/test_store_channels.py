"""Channels and their outbox, in every store."""

import asyncio

from broker.domain.tenancy import Tenant
from broker.ports import Store
from tests.conformance.channels import (
    add_events,
    claim,
    kinds,
    make_channel,
    numbers,
    only,
    settle,
    status,
    submit_with_events,
)
from tests.conformance.conftest import TimedStore
from tests.conformance.samples import make_event, make_job, running

# ------------------------------------------------------------------------------------------------------------- fan-out


async def test_the_log_channel_of_an_installation_receives_every_event(store: Store) -> None:
    job = await submit_with_events(store, "job.submitted", "job.waiting")
    (stream,) = await claim(store)
    assert (stream.channel.kind, stream.channel.team, stream.name) == ("log", None, job.id)
    assert [(p.delivery.event and p.delivery.event.seq, p.delivery.id) for p in stream.pending] == [
        (1, f"evt_{job.id}_1"),
        (2, f"evt_{job.id}_2"),
    ]
    assert stream.snapshot is not None
    assert (stream.snapshot.job.id, stream.snapshot.attempts) == (job.id, ())


async def test_event_reaches_subscribed_channels_of_team_and_installation(store: Store) -> None:
    """An event goes to the channels of its team and the installations that want it."""
    await store.put_team("nlp", "")
    await only(
        store,
        make_channel("all"),
        make_channel("some", events=("attempt.*", "job.done")),
        make_channel("off", enabled=False),
        make_channel("theirs", team="nlp"),
        make_channel("operator", team=None),
    )
    await submit_with_events(store, "job.submitted", "attempt.booting", "job.done", "job.donee")
    got = {stream.channel.name: kinds(stream) for stream in await claim(store)}
    everything = ["job.submitted", "attempt.booting", "job.done", "job.donee"]
    assert got == {"all": everything, "operator": everything, "some": ["attempt.booting", "job.done"]}


async def test_a_teams_own_write_reaches_the_installations_channels(store: Store) -> None:
    ann = store.as_tenant(Tenant(team="default", owner="ann"))
    job = make_job()
    await ann.submit(job, key=None, body_sha256="", events=[make_event(job)])
    await ann.request_stop(job.id, make_event(job, "job.stop_requested"))
    assert not await ann.channels()
    (stream,) = await claim(store)
    assert kinds(stream) == ["job.note", "job.stop_requested"]


async def test_a_snapshot_has_the_attempts(store: Store) -> None:
    attempt, _ = await running(store)
    (stream,) = await claim(store)
    assert stream.snapshot is not None
    assert [one.id for one in stream.snapshot.attempts] == [attempt.id]


# ------------------------------------------------------------------------------------------------- claims, settlements


async def test_a_stream_is_one_brokers_until_its_lease_lapses(timed_store: TimedStore) -> None:
    store = timed_store.store
    await submit_with_events(store, "a", "b")
    (first,) = await claim(store)
    assert not await claim(store)
    await timed_store.pass_time(301)
    (second,) = await claim(store)
    assert kinds(second) == ["a", "b"]
    assert await settle(store, first, done=numbers(first)) == 0
    assert (await status(store, "log")).waiting == 2
    assert await settle(store, second, done=numbers(second)) == 1
    assert (await status(store, "log")).waiting == 0
    await timed_store.pass_time(301)
    assert not await claim(store)


async def test_settled_deliveries_never_repeat_and_the_rest_keeps_its_order(store: Store) -> None:
    await submit_with_events(store, "a", "b", "c", "d")
    (stream,) = await claim(store, depth=3)
    assert kinds(stream) == ["a", "b", "c"]
    await settle(store, stream, done=numbers(stream)[:2])
    (stream,) = await claim(store)
    assert kinds(stream) == ["c", "d"]


async def test_a_failed_delivery_holds_its_stream_and_no_other(timed_store: TimedStore) -> None:
    store = timed_store.store
    job = await submit_with_events(store, "a", "b")
    (stream,) = await claim(store)
    await settle(store, stream, attempts=3, due_in_s=600)
    other = await submit_with_events(store, "x")
    await add_events(store, job, "c")
    assert [one.name for one in await claim(store)] == [other.id]
    await timed_store.pass_time(601)
    again = {one.name: one for one in await claim(store)}[job.id]
    assert kinds(again) == ["a", "b", "c"]
    assert [pending.delivery.attempts for pending in again.pending] == [3, 0, 0]


async def test_the_state_of_a_stream_is_kept_with_its_settlement(store: Store) -> None:
    await submit_with_events(store, "a", "b")
    (stream,) = await claim(store)
    assert stream.state is None
    await settle(store, stream, done=numbers(stream)[:1], state={"ts": "1.5", "text": "ü\0"})
    (stream,) = await claim(store)
    assert stream.state is not None
    assert stream.state["ts"] == "1.5"


async def test_a_paused_channel_yields_no_stream(timed_store: TimedStore) -> None:
    store = timed_store.store
    await only(store, make_channel("a"), make_channel("b"))
    await submit_with_events(store, "x")
    streams = {one.channel.name: one for one in await claim(store)}
    await settle(store, streams["a"], wait_s=600)
    await settle(store, streams["b"])
    await submit_with_events(store, "y")
    assert {one.channel.name for one in await claim(store)} == {"b"}
    await timed_store.pass_time(601)
    assert {one.channel.name for one in await claim(store)} == {"a", "b"}


async def test_a_failing_channel_gives_one_stream_as_a_probe(timed_store: TimedStore) -> None:
    store = timed_store.store
    for _ in range(3):
        await submit_with_events(store, "a")
    first, *_ = await claim(store, limit=1)
    await settle(store, first, channel={"failures": 1, "reason": "503"}, attempts=1, due_in_s=500)
    assert len(await claim(store)) == 1
    assert (await status(store, "log")).channel.failures == 1


async def test_busy_channels_and_kinds_without_a_notifier_are_not_claimed(store: Store) -> None:
    await store.add_channel(make_channel())
    await submit_with_events(store, "a")
    hook = (await status(store)).channel.id
    assert [one.channel.kind for one in await claim(store, busy=[hook])] == ["log"]
    assert not await store.claim_streams(["slack"], busy=[], owner="o", lease_s=30, limit=9, depth=9)


async def test_a_limit_holds_for_each_channel(store: Store) -> None:
    await store.add_channel(make_channel())
    for _ in range(5):
        await submit_with_events(store, "a")
    assert sorted(one.channel.kind for one in await claim(store, limit=2)) == ["log", "log", "webhook", "webhook"]


async def test_a_refresh_is_due_when_nothing_waits(timed_store: TimedStore) -> None:
    store = timed_store.store
    job = await submit_with_events(store, "a")
    (stream,) = await claim(store)
    await settle(store, stream, done=numbers(stream), refresh_in_s=100, state={"ts": "1"})
    assert not await claim(store)
    await timed_store.pass_time(101)
    (stream,) = await claim(store)
    assert (stream.name, stream.pending, stream.state) == (job.id, (), {"ts": "1"})
    assert stream.snapshot is not None
    await settle(store, stream, refresh_in_s=None)
    await timed_store.pass_time(99)
    assert not await claim(store)


async def test_dropped_deliveries_are_counted_by_reason(store: Store) -> None:
    await submit_with_events(store, "a", "b", "c")
    (stream,) = await claim(store)
    one, two, three = numbers(stream)
    await settle(store, stream, done=[three], dropped={one: "folded", two: "folded"})
    assert (await status(store, "log")).dropped == {"folded": 2}
    assert not await claim(store)


async def test_no_event_is_lost_between_writers_and_settlements(store: Store) -> None:
    jobs = [await submit_with_events(store, "first") for _ in range(4)]
    got: dict[str, list[int]] = {job.id: [] for job in jobs}
    event = asyncio.Event()

    async def write() -> None:
        await asyncio.gather(*(add_events(store, job, *["more"] * 15) for job in jobs))
        event.set()

    async def read() -> None:
        while True:
            streams = await claim(store, depth=2)
            if not streams and event.is_set() and not (await status(store, "log")).waiting:
                return
            for stream in streams:
                got[stream.name] += [p.delivery.event.seq for p in stream.pending if p.delivery.event]
                assert await settle(store, stream, done=numbers(stream)) == 1
            await asyncio.sleep(0)

    async with asyncio.timeout(300):
        await asyncio.gather(write(), read(), read())
    assert got == {job.id: list(range(1, 17)) for job in jobs}
