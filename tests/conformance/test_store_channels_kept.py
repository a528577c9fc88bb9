"""Stored properties of channels: switches, notices, bounds, and their team."""

from dataclasses import replace

import pytest

from broker.domain.errors import StoreError
from broker.domain.notifications import NOTICES, Notice
from broker.domain.tenancy import Tenant
from broker.ports import AuditFilter, Store
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
from tests.conformance.samples import START

# ------------------------------------------------------------------------------------------------- disabling, notices


async def test_a_disabled_channel_keeps_its_deliveries_and_others_are_notified(store: Store) -> None:
    await store.add_channel(make_channel())
    await submit_with_events(store, "a")
    stream = next(one for one in await claim(store) if one.channel.kind == "webhook")
    notice = Notice(id="channel-disabled-1", kind="channel.disabled", message="m", team="default")
    await settle(store, stream, channel={"enabled": False, "reason": "410", "failures": 7}, notice=notice)
    gone = await status(store)
    assert (gone.channel.enabled, gone.channel.reason, gone.waiting) == (False, "410", 1)
    (heard,) = await claim(store)
    assert (heard.channel.kind, heard.name, kinds(heard)) == ("log", NOTICES, ["channel.disabled"])
    await submit_with_events(store, "not for it")
    assert await store.write_channel(replace(gone.channel, enabled=True))
    back = await status(store)
    assert (back.channel.enabled, back.channel.reason, back.channel.failures) == (True, "", 0)
    assert ["a"] in [kinds(one) for one in await claim(store) if one.channel.kind == "webhook"]


async def test_a_channel_disabled_by_a_user_stays_disabled(store: Store) -> None:
    await store.add_channel(make_channel())
    await submit_with_events(store, "a")
    stream = next(one for one in await claim(store) if one.channel.kind == "webhook")
    await store.write_channel(replace(stream.channel, enabled=False, reason="by ann"))
    await settle(store, stream, channel={"failures": 1, "reason": "503"}, done=numbers(stream))
    assert ((await status(store)).channel.enabled, (await status(store)).channel.reason) == (False, "by ann")


async def test_a_notice_is_posted_once_and_goes_to_its_team(store: Store) -> None:
    await store.put_team("nlp", "")
    await only(store, make_channel("ours"), make_channel("theirs", team="nlp"), make_channel("operator", team=None))
    of_team = Notice(id="n-1", kind="budget.threshold", message="m", team="nlp", data={"at": 0.5})
    assert await store.post(of_team)
    assert not await store.post(of_team)
    assert await store.post(Notice(id="n-2", kind="digest.daily", message="m"))
    got = {one.channel.name: one for one in await claim(store)}
    assert {name: kinds(one) for name, one in got.items()} == {
        "theirs": ["budget.threshold"],
        "operator": ["budget.threshold", "digest.daily"],
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


async def test_old_and_excess_deliveries_are_dropped_oldest_first(timed_store: TimedStore) -> None:
    store = timed_store.store
    job = await submit_with_events(store, "old")
    await timed_store.pass_time(1000)
    await add_events(store, job, "b", "c", "d")
    assert await store.trim_outbox(age_s=500, rows=2) == 2
    left = await status(store, "log")
    assert (left.waiting, left.dropped) == (2, {"too old": 1, "too many": 1})
    (stream,) = await claim(store)
    assert kinds(stream) == ["c", "d"]
    await settle(store, stream, done=numbers(stream))
    assert (await status(store, "log")).waiting == 0


async def test_a_trim_forgets_what_was_idle_for_long(timed_store: TimedStore) -> None:
    store = timed_store.store
    await submit_with_events(store, "a")
    await store.post(Notice(id="n", kind="k", message="m"))
    for stream in await claim(store):
        await settle(store, stream, done=numbers(stream), state={"ts": "1"})
    await store.trim_outbox(age_s=1e9, rows=9)
    assert not await store.post(Notice(id="n", kind="k", message="m"))
    await timed_store.pass_time(100 * 86_400)
    await store.trim_outbox(age_s=1e9, rows=9)
    assert await store.post(Notice(id="n", kind="k", message="m"))


async def test_the_age_of_what_waits_is_shown(timed_store: TimedStore) -> None:
    await submit_with_events(timed_store.store, "a")
    await timed_store.pass_time(600)
    await submit_with_events(timed_store.store, "b")
    shown = await status(timed_store.store, "log")
    assert shown.waiting == 2
    assert 600 <= shown.oldest_s < 1200


async def test_a_request_key_is_new_once(timed_store: TimedStore) -> None:
    store = timed_store.store
    assert await store.first_time("k", for_s=300)
    assert not await store.first_time("k", for_s=300)
    assert await store.first_time("other", for_s=300)
    await timed_store.pass_time(301)
    assert await store.first_time("k", for_s=300)


# --------------------------------------------------------------------------------------------------------- whose it is


async def test_a_channel_is_kept_as_it_was_given(store: Store) -> None:
    given = make_channel(events=("job.*",), config={"host": "h", "deep": {"a": [1]}}, sealed=b"\0secret")
    assert await store.add_channel(given)
    assert not await store.add_channel(make_channel())
    stored = (await status(store)).channel
    assert replace(stored, created_at=START) == given
    changed = replace(stored, events=(), config={"host": "i"}, sealed=b"t")
    assert not await store.write_channel(changed, b"older")
    assert await store.write_channel(changed, b"\0secret")
    assert (await status(store)).channel == changed
    await submit_with_events(store, "a")
    assert await store.delete_channel(stored.id)
    assert not await store.delete_channel(stored.id)
    assert not await store.write_channel(changed)
    assert [channel.channel.name for channel in await store.channels()] == ["log"]


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
    assert [channel.channel.name for channel in await ann.channels()] == ["own"]
    bob = store.as_tenant(Tenant(team="nlp", owner="bob"))
    assert [channel.channel.name for channel in await bob.channels()] == ["theirs"]


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
