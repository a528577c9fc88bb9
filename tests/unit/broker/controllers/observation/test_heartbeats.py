"""Readable time of heartbeats: time in which no broker could read heartbeats is no evidence against a machine."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from broker.blobs import ObstoreBlobs
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.attempt_observer import AttemptObserver
from broker.controllers.observation.heartbeats import MAX_BEAT, MAX_FINAL, HeartbeatReader, read_final
from broker.controllers.observation.inventory import Inventory
from broker.domain.errors import BlobsUnavailable
from broker.domain.job import AttemptState
from broker.ports import BlobInfo, Blobs, Store
from tests.support import build
from tests.unit.providers.clocks import SteppedClock
from trainer.contract import object_keys as keys
from trainer.contract.documents import Final, Heartbeat, Outcome

POLL_S = 2.0
OWN = build.attempt().id


class Flaky:
    """A blob store with the first machine's beat, if there is any, and those of others."""

    away = False
    beat: Heartbeat | None = None

    def __init__(self) -> None:
        self.mates: dict[str, Heartbeat] = {}

    async def list(self, prefix: str, *, max_per_folder: int) -> Sequence[BlobInfo]:
        if self.away:
            raise BlobsUnavailable("503")
        one = self.beat
        found = [BlobInfo(key=keys.heartbeat(OWN, 0), bytes=9, etag=str(one.seq))] if one else []
        return found + [BlobInfo(key=key, bytes=9, etag=mate.boot + str(mate.seq)) for key, mate in self.mates.items()]

    async def get(self, key: str, *, max_bytes: int = 0) -> bytes | None:
        found = self.mates.get(key, self.beat)
        return found.model_dump_json().encode() if found else None


class Watched:
    def __init__(self) -> None:
        self.store, self.clock = Flaky(), SteppedClock()
        context = ControllerContext(
            installation=build.INSTALLATION, owner="test", store=cast(Store, None), blobs=cast(Blobs, self.store),
            providers={}, clock=self.clock,
        )  # fmt: skip
        self.beats = HeartbeatReader(context)
        self.looker = AttemptObserver(context, Inventory(context), self.beats)

    async def polls(self, *away: bool) -> float | None:
        for one in away:
            self.clock.advance(POLL_S)
            self.store.away = one
            try:
                await self.beats.refresh()
            except BlobsUnavailable:
                continue
        return self.beats.readable_s

    async def ages(self) -> list[float]:
        """Return the age of the heartbeat, and of the progress that it reports."""
        watch = await self.beats.latest(OWN)
        assert watch is not None
        return [self.clock.monotonic() - at for at in (watch.changed, watch.progressed)]


async def test_a_store_that_fails_some_calls_can_be_read_in_between() -> None:
    """Single failed reads do not restart the readable time. Otherwise no boot deadline would ever expire."""
    watched = Watched()
    assert await watched.polls(False) == 0
    assert await watched.polls(*[True, False] * 10) == 20 * POLL_S
    assert await watched.polls(True) is None


@pytest.mark.parametrize("looked", [True, False])
async def test_silence_counts_from_zero_after_a_store_outage(looked: bool) -> None:
    watched = Watched()
    await watched.polls(*[False] * 10)
    if looked:
        assert await watched.polls(*[True] * 1800) is None
    else:
        watched.clock.advance(3600)
    assert await watched.polls(False) == 0
    assert await watched.polls(False) == POLL_S


@pytest.mark.parametrize("looked", [True, False])
async def test_a_time_without_polls_ages_no_heartbeat(looked: bool) -> None:
    """The store is unavailable, or the database, so that no broker reads. A machine that worked all the time is not
    hung when both are back. One failed read does not make a stuck machine young again.
    """
    watched = Watched()
    watched.store.beat = Heartbeat(attempt=OWN, boot="b", seq=1, phase="training", step=3)
    await watched.polls(*[False] * 10)
    assert await watched.beats.latest(OWN) is not None
    before = await watched.ages()
    if looked:
        await watched.polls(*[True] * 200)
    else:
        watched.clock.advance(400)
    await watched.polls(False)
    assert await watched.ages() == before
    await watched.polls(False)
    assert await watched.ages() == [age_s + POLL_S for age_s in before]
    await watched.polls(*[False] * 200, True, False)
    assert await watched.ages() == [age_s + 201 * POLL_S for age_s in before]


async def test_paused_broker_counts_no_silence_it_did_not_observe() -> None:
    """The broker pauses between the reading of heartbeats and the verdict, and a listing is wrong meanwhile."""
    watched = Watched()
    watched.store.beat = Heartbeat(attempt=OWN, boot="b", seq=1, phase="training", step=3)
    watched.store.mates = mate(1)
    await watched.polls(False)
    attempt = build.attempt(AttemptState.TRAINING, running_at=build.T0)
    two = replace(attempt, line=replace(attempt.line, nodes=2))
    await watched.looker.observe(two, {attempt.line.offer.provider})
    await watched.polls(False, False)
    watched.clock.advance(24.0)
    _, seen = await watched.looker.observe(two, {attempt.line.offer.provider})
    assert [seen.beat_age_s, seen.progress_age_s, seen.peers_silent_s] == [2 * POLL_S] * 3


def mate(node: int, **changes: Any) -> dict[str, Heartbeat]:
    return {keys.heartbeat(OWN, node): Heartbeat(attempt=OWN, node=node, boot="b", seq=1, phase="training", **changes)}


async def test_most_silent_machine_decides_until_it_is_done() -> None:
    watched = Watched()
    watched.store.mates = mate(1)
    await watched.polls(False)
    beats = watched.beats
    assert (beats.peers_silent_s(OWN, 1), beats.peers_silent_s(OWN, 2), beats.peers_silent_s(OWN, 3)) == (
        None,
        0.0,
        math.inf,
    )
    assert not beats.shown(OWN, 2), "the first one has not beaten yet"
    await watched.polls(False)
    watched.store.mates |= mate(2)
    await watched.polls(False)
    assert beats.peers_silent_s(OWN, 3) == 2 * POLL_S
    watched.store.mates[keys.heartbeat(OWN, 1)] = Heartbeat(attempt=OWN, node=1, boot="b", seq=2, phase="done")
    await watched.polls(False)
    assert await beats.finished(OWN, 3) == 1
    await watched.polls(False)
    assert beats.peers_silent_s(OWN, 3) == 2 * POLL_S, "of the one that works"
    assert await beats.finished(OWN, 2) == 1
    assert beats.peers_silent_s(OWN, 2) is None


@pytest.mark.parametrize("name", ["01", "-1", "x", "16", "1/2", "", "\u0661"])
async def test_only_heartbeat_keys_of_machines_are_polled(name: str) -> None:
    """A machine may write any number of keys below its own."""
    watched = Watched()
    watched.store.mates = {f"{keys.HEARTBEATS}{OWN}/{name}": Heartbeat(attempt=OWN, boot="b", seq=1)}
    await watched.polls(False)
    assert not watched.beats._watched


async def test_an_object_that_a_host_made_too_large_is_its_fault() -> None:
    """A heartbeat over the limit proves life without progress; a report over the limit ends the attempt."""
    watched = Watched()
    blobs = ObstoreBlobs.open("memory://", build.INSTALLATION)
    watched.beats._context = context = replace(watched.beats._context, blobs=blobs)
    beat = Heartbeat(attempt=OWN, boot="b", seq=1, phase="training", step=3).model_dump_json().encode()
    await blobs.put(keys.heartbeat(OWN, 0), beat)
    await watched.polls(False)
    await blobs.put(keys.heartbeat(OWN, 0), beat.ljust(MAX_BEAT + 1))  # written between the LIST and the read
    record = await watched.beats.latest(OWN)
    assert record is not None
    assert record.beat is None
    assert await read_final(context, OWN) is None
    report = Final(attempt=OWN, outcome=Outcome.COMPLETED).model_dump_json().encode()
    await blobs.put(keys.final(OWN), report.ljust(MAX_FINAL))
    assert await read_final(context, OWN) == Final(attempt=OWN, outcome=Outcome.COMPLETED)
    await blobs.put(keys.final(OWN), report.ljust(MAX_FINAL + 1))
    final = await read_final(context, OWN)
    assert final is not None
    assert (final.outcome, final.bad_host) == (Outcome.INFRASTRUCTURE, True)
    assert f"final.json has {MAX_FINAL + 1} bytes, more than the {MAX_FINAL} that are read" in final.message
