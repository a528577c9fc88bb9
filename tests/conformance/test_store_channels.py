"""Channels and their outbox, in every store."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from broker.domain.channel import NOTICES, Channel
from broker.domain.errors import StoreError
from broker.domain.ids import base32
from broker.domain.job import Event, Job
from broker.domain.notice import Notice
from broker.domain.tenancy import Tenant
from broker.ports import AuditFilter, ChannelStatus, Settled, Settlement, Store, Stream
from tests.conformance.conftest import House
from tests.conformance.samples import START, make_event, make_job, running

KINDS = ("log", "webhook")


def make_channel(name: str = "hook", **changes: Any) -> Channel:
    made = Channel(
        id=base32(os.urandom(9), 13), kind="webhook", name=name, team="default", config={"host": "h"}, sealed=b"s",
        created_at=START,
    )  # fmt: skip
    return replace(made, **changes)


async def only(store: Store, *channels: Channel) -> None:
    """No channel but these is enabled."""
    for status in await store.channels():
        await store.write_channel(replace(status.channel, enabled=False))
    for channel in channels:
        assert await store.add_channel(channel)


async def told(store: Store, *kinds: str, **changes: Any) -> Job:
    """A new job with these events."""
    job = make_job(**changes)
    await store.submit(job, key=None, body_sha256="", events=[make_event(job, kind) for kind in kinds])
    return job


async def say(store: Store, job: Job, *kinds: str) -> None:
    """More events of a job that is queued."""
    for kind in kinds:
        event = Event(job_id=job.id, kind=kind, message="m")
        now = await store.job(job.id)
        assert now is not None
        assert await store.raise_cap(job.id, now.cap_usd + 1, event)


async def claim(store: Store, **changes: Any) -> Sequence[Stream]:
    asked: dict[str, Any] = {"busy": [], "owner": "o", "lease_s": 30, "limit": 10, "depth": 10}
    return await store.claim_streams(KINDS, **asked | changes)


async def settle(store: Store, stream: Stream, *, channel: dict[str, Any] | None = None, wait_s: float = 0,
                 notice: Notice | None = None, **changes: Any) -> int:  # fmt: skip
    settled = Settled(stream=stream, **{"state": stream.state} | changes)
    moved = replace(stream.channel, **channel or {})
    return await store.settle(Settlement(channel=moved, wait_s=wait_s, streams=(settled,), notice=notice))


def kinds(stream: Stream) -> list[str]:
    return [pending.delivery.kind for pending in stream.pending]


def numbers(stream: Stream) -> list[int]:
    return [pending.row for pending in stream.pending]


async def status(store: Store, name: str = "hook") -> ChannelStatus:
    (found,) = [one for one in await store.channels() if one.channel.name == name]
    return found


# ------------------------------------------------------------------------------------------------------------- fan-out


async def test_every_installation_has_a_log_that_is_told_everything(store: Store) -> None:
    job = await told(store, "job.submitted", "job.waiting")
    (stream,) = await claim(store)
    assert (stream.channel.kind, stream.channel.team, stream.name) == ("log", None, job.id)
    assert [(p.delivery.event and p.delivery.event.seq, p.delivery.id) for p in stream.pending] == [
        (1, f"evt_{job.id}_1"),
        (2, f"evt_{job.id}_2"),
    ]
    assert stream.snapshot is not None
    assert (stream.snapshot.job.id, stream.snapshot.attempts) == (job.id, ())


async def test_an_event_goes_to_the_channels_of_its_team_and_the_installations_that_want_it(store: Store) -> None:
    await store.put_team("nlp", "")
    await only(
        store,
        make_channel("all"),
        make_channel("some", events=("attempt.*", "job.done")),
        make_channel("off", enabled=False),
        make_channel("theirs", team="nlp"),
        make_channel("house", team=None),
    )
    await told(store, "job.submitted", "attempt.booting", "job.done", "job.donee")
    got = {stream.channel.name: kinds(stream) for stream in await claim(store)}
    everything = ["job.submitted", "attempt.booting", "job.done", "job.donee"]
    assert got == {"all": everything, "house": everything, "some": ["attempt.booting", "job.done"]}


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


async def test_a_stream_is_one_brokers_until_its_lease_lapses(house: House) -> None:
    store = house.store
    await told(store, "a", "b")
    (first,) = await claim(store)
    assert not await claim(store)
    await house.pass_time(31)
    (second,) = await claim(store)
    assert kinds(second) == ["a", "b"]
    assert await settle(store, first, done=numbers(first)) == 0
    assert (await status(store, "log")).waiting == 2
    assert await settle(store, second, done=numbers(second)) == 1
    assert (await status(store, "log")).waiting == 0
    await house.pass_time(31)
    assert not await claim(store)


async def test_what_is_settled_is_never_given_again_and_the_rest_is_in_order(store: Store) -> None:
    await told(store, "a", "b", "c", "d")
    (stream,) = await claim(store, depth=3)
    assert kinds(stream) == ["a", "b", "c"]
    await settle(store, stream, done=numbers(stream)[:2])
    (stream,) = await claim(store)
    assert kinds(stream) == ["c", "d"]


async def test_a_failed_delivery_holds_its_stream_and_no_other(house: House) -> None:
    store = house.store
    job = await told(store, "a", "b")
    (stream,) = await claim(store)
    await settle(store, stream, attempts=3, due_in_s=60)
    other = await told(store, "x")
    await say(store, job, "c")
    assert [one.name for one in await claim(store)] == [other.id]
    await house.pass_time(61)
    again = {one.name: one for one in await claim(store)}[job.id]
    assert kinds(again) == ["a", "b", "c"]
    assert [pending.delivery.attempts for pending in again.pending] == [3, 0, 0]


async def test_the_state_of_a_stream_is_kept_with_its_settlement(store: Store) -> None:
    await told(store, "a", "b")
    (stream,) = await claim(store)
    assert stream.state is None
    await settle(store, stream, done=numbers(stream)[:1], state={"ts": "1.5", "text": "ü\0"})
    (stream,) = await claim(store)
    assert stream.state is not None
    assert stream.state["ts"] == "1.5"


async def test_a_channel_that_waits_gives_nothing(house: House) -> None:
    store = house.store
    await only(store, make_channel("a"), make_channel("b"))
    await told(store, "x")
    streams = {one.channel.name: one for one in await claim(store)}
    await settle(store, streams["a"], wait_s=60)
    await settle(store, streams["b"])
    await told(store, "y")
    assert {one.channel.name for one in await claim(store)} == {"b"}
    await house.pass_time(61)
    assert {one.channel.name for one in await claim(store)} == {"a", "b"}


async def test_a_failing_channel_gives_one_stream_as_a_probe(house: House) -> None:
    store = house.store
    for _ in range(3):
        await told(store, "a")
    first, *_ = await claim(store, limit=1)
    await settle(store, first, channel={"failures": 1, "reason": "503"}, attempts=1, due_in_s=5)
    assert len(await claim(store)) == 1
    assert (await status(store, "log")).channel.failures == 1


async def test_busy_channels_and_kinds_without_a_notifier_are_left_alone(store: Store) -> None:
    await store.add_channel(make_channel())
    await told(store, "a")
    hook = (await status(store)).channel.id
    assert [one.channel.kind for one in await claim(store, busy=[hook])] == ["log"]
    assert not await store.claim_streams(["slack"], busy=[], owner="o", lease_s=30, limit=9, depth=9)


async def test_a_limit_holds_for_each_channel(store: Store) -> None:
    await store.add_channel(make_channel())
    for _ in range(5):
        await told(store, "a")
    assert sorted(one.channel.kind for one in await claim(store, limit=2)) == ["log", "log", "webhook", "webhook"]


async def test_a_refresh_is_due_when_nothing_waits(house: House) -> None:
    store = house.store
    job = await told(store, "a")
    (stream,) = await claim(store)
    await settle(store, stream, done=numbers(stream), refresh_in_s=10, state={"ts": "1"})
    assert not await claim(store)
    await house.pass_time(11)
    (stream,) = await claim(store)
    assert (stream.name, stream.pending, stream.state) == (job.id, (), {"ts": "1"})
    assert stream.snapshot is not None
    await settle(store, stream, refresh_in_s=None)
    await house.pass_time(99)
    assert not await claim(store)


async def test_what_nobody_is_told_is_counted(store: Store) -> None:
    await told(store, "a", "b", "c")
    (stream,) = await claim(store)
    one, two, three = numbers(stream)
    await settle(store, stream, done=[three], dropped={one: "folded", two: "folded"})
    assert (await status(store, "log")).dropped == {"folded": 2}
    assert not await claim(store)


async def test_no_event_is_lost_between_writers_and_settlements(store: Store) -> None:
    jobs = [await told(store, "first") for _ in range(4)]
    got: dict[str, list[int]] = {job.id: [] for job in jobs}
    written = asyncio.Event()

    async def write() -> None:
        await asyncio.gather(*(say(store, job, *["more"] * 15) for job in jobs))
        written.set()

    async def read() -> None:
        while True:
            streams = await claim(store, depth=2)
            if not streams and written.is_set() and not (await status(store, "log")).waiting:
                return
            for stream in streams:
                got[stream.name] += [p.delivery.event.seq for p in stream.pending if p.delivery.event]
                assert await settle(store, stream, done=numbers(stream)) == 1
            await asyncio.sleep(0)

    async with asyncio.timeout(30):
        await asyncio.gather(write(), read(), read())
    assert got == {job.id: list(range(1, 17)) for job in jobs}


# ------------------------------------------------------------------------------------------------- disabling, notices


async def test_a_disabled_channel_keeps_what_waits_and_the_others_are_told(store: Store) -> None:
    await store.add_channel(make_channel())
    await told(store, "a")
    stream = next(one for one in await claim(store) if one.channel.kind == "webhook")
    notice = Notice(id="channel-disabled-1", kind="channel.disabled", message="m", team="default")
    await settle(store, stream, channel={"enabled": False, "reason": "410", "failures": 7}, notice=notice)
    gone = await status(store)
    assert (gone.channel.enabled, gone.channel.reason, gone.waiting) == (False, "410", 1)
    (heard,) = await claim(store)
    assert (heard.channel.kind, heard.name, kinds(heard)) == ("log", NOTICES, ["channel.disabled"])
    await told(store, "not for it")
    assert await store.write_channel(replace(gone.channel, enabled=True))
    back = await status(store)
    assert (back.channel.enabled, back.channel.reason, back.channel.failures) == (True, "", 0)
    assert ["a"] in [kinds(one) for one in await claim(store) if one.channel.kind == "webhook"]


async def test_what_a_person_disabled_stays_disabled(store: Store) -> None:
    await store.add_channel(make_channel())
    await told(store, "a")
    stream = next(one for one in await claim(store) if one.channel.kind == "webhook")
    await store.write_channel(replace(stream.channel, enabled=False, reason="by ann"))
    await settle(store, stream, channel={"failures": 1, "reason": "503"}, done=numbers(stream))
    assert ((await status(store)).channel.enabled, (await status(store)).channel.reason) == (False, "by ann")


async def test_a_notice_is_posted_once_and_goes_to_its_team(store: Store) -> None:
    await store.put_team("nlp", "")
    await only(store, make_channel("ours"), make_channel("theirs", team="nlp"), make_channel("house", team=None))
    of_team = Notice(id="n-1", kind="budget.threshold", message="m", team="nlp", data={"at": 0.5})
    assert await store.post(of_team)
    assert not await store.post(of_team)
    assert await store.post(Notice(id="n-2", kind="digest.daily", message="m"))
    got = {one.channel.name: one for one in await claim(store)}
    assert {name: kinds(one) for name, one in got.items()} == {
        "theirs": ["budget.threshold"],
        "house": ["budget.threshold", "digest.daily"],
    }
    first = got["theirs"].pending[0].delivery
    assert first.notice is not None
    assert first.notice.at is not None
    assert (first.id, first.notice.data, got["theirs"].snapshot) == ("ntc_n-1", {"at": 0.5}, None)


@pytest.mark.parametrize("own", ["", "a.b", "a b", "ä", "a" * 201])
async def test_a_notice_has_an_id_that_can_be_signed(store: Store, own: str) -> None:
    with pytest.raises(StoreError, match="notices_id"):
        await store.post(Notice(id=own, kind="k", message="m"))


async def test_a_notice_of_no_known_team_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="notices_team"):
        await store.post(Notice(id="n", kind="k", message="m", team="nobody"))


# ------------------------------------------------------------------------------------------------------------- bounds


async def test_what_is_too_old_or_too_much_is_given_up_oldest_first(house: House) -> None:
    store = house.store
    job = await told(store, "old")
    await house.pass_time(100)
    await say(store, job, "b", "c", "d")
    assert await store.trim_outbox(age_s=50, rows=2) == 2
    left = await status(store, "log")
    assert (left.waiting, left.dropped) == (2, {"too old": 1, "too many": 1})
    (stream,) = await claim(store)
    assert kinds(stream) == ["c", "d"]
    await settle(store, stream, done=numbers(stream))
    assert (await status(store, "log")).waiting == 0


async def test_a_trim_forgets_what_was_idle_for_long(house: House) -> None:
    store = house.store
    await told(store, "a")
    await store.post(Notice(id="n", kind="k", message="m"))
    for stream in await claim(store):
        await settle(store, stream, done=numbers(stream), state={"ts": "1"})
    await store.trim_outbox(age_s=1e9, rows=9)
    assert not await store.post(Notice(id="n", kind="k", message="m"))
    await house.pass_time(100 * 86_400)
    await store.trim_outbox(age_s=1e9, rows=9)
    assert await store.post(Notice(id="n", kind="k", message="m"))


async def test_the_age_of_what_waits_is_shown(house: House) -> None:
    await told(house.store, "a")
    await house.pass_time(60)
    await told(house.store, "b")
    shown = await status(house.store, "log")
    assert shown.waiting == 2
    assert 60 <= shown.oldest_s < 120


async def test_a_key_is_new_once(house: House) -> None:
    store = house.store
    assert await store.first_time("k", for_s=300)
    assert not await store.first_time("k", for_s=300)
    assert await store.first_time("other", for_s=300)
    await house.pass_time(301)
    assert await store.first_time("k", for_s=300)


# --------------------------------------------------------------------------------------------------------- whose it is


async def test_a_channel_is_kept_as_it_was_given(store: Store) -> None:
    given = make_channel(events=("job.*",), config={"host": "h", "deep": {"a": [1]}}, sealed=b"\0secret")
    assert await store.add_channel(given)
    assert not await store.add_channel(make_channel())
    kept = (await status(store)).channel
    assert replace(kept, created_at=START) == given
    changed = replace(kept, events=(), config={"host": "i"}, sealed=b"t")
    assert await store.write_channel(changed)
    assert (await status(store)).channel == changed
    await told(store, "a")
    assert await store.delete_channel(kept.id)
    assert not await store.delete_channel(kept.id)
    assert not await store.write_channel(changed)
    assert [one.channel.name for one in await store.channels()] == ["log"]


async def test_another_teams_channel_does_not_exist(store: Store) -> None:
    await store.put_team("nlp", "")
    theirs = make_channel("theirs", team="nlp")
    assert await store.add_channel(theirs)
    ann = store.as_tenant(Tenant(team="default", owner="ann"))
    assert not await ann.channels()
    assert not await ann.write_channel(theirs)
    assert not await ann.delete_channel(theirs.id)
    for foreign in (make_channel(team="nlp"), make_channel(team=None)):
        with pytest.raises(StoreError):
            await ann.add_channel(foreign)
    assert await ann.add_channel(make_channel("own"))
    assert [one.channel.name for one in await ann.channels()] == ["own"]
    bob = store.as_tenant(Tenant(team="nlp", owner="bob"))
    assert [one.channel.name for one in await bob.channels()] == ["theirs"]


async def test_writes_to_channels_are_audited_without_a_secret(store: Store) -> None:
    ann = store.as_tenant(Tenant(team="default", owner="ann"))
    channel = make_channel(sealed=b"hush")
    await ann.add_channel(channel)
    await ann.write_channel(replace(channel, sealed=b"other", enabled=False, reason="by ann"))
    await ann.delete_channel(channel.id)
    found = await ann.audit(AuditFilter(action="channel"))
    assert [(entry.action, entry.actor) for entry in reversed(found)] == [
        ("channel.add", "ann"),
        ("channel.change", "ann"),
        ("channel.remove", "ann"),
    ]
    assert "hush" not in repr(found)
    assert found[1].after is not None
    assert (found[1].after["secrets"], found[1].after["enabled"]) == ("changed", False)
