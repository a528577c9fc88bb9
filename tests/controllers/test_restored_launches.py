"""A backup of a moment in which a launch was on its way: what came of it, and what followed, no row tells."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import InstanceName, JobId
from broker.domain.instance import BootSpec, Observed
from broker.domain.job import AttemptState, Handle, JobState, Reason
from broker.domain.offer import Offer
from broker.ports import Change
from providers.simulated.provider import SimulatedProvider
from tests.clouds.warp import LoopClock
from tests.controllers.house import ENDLESS, INSTALLATION, config
from tests.controllers.virtual import WORTH, Virtual, told
from tests.sim.backups import copied
from tests.support.memory_store.store import MemoryStore

Build = Callable[[AttemptState], tuple[Virtual, "Saved", list[InstanceName]]]
"""A house, its store, and the names that were created."""


class Saved(MemoryStore):
    """Backed up as soon as an attempt is in a state."""

    def __init__(self, at: AttemptState) -> None:
        super().__init__(LoopClock())
        self._at, self._backup = at, dict[str, Any]()

    async def apply(self, changes: Sequence[Change]) -> Sequence[bool]:
        held = await super().apply(changes)
        if not self._backup and any(row.value.state is self._at for row in self._state.attempts.values()):
            self._backup = copied(vars(self._state))
        return held

    def restore(self) -> None:
        vars(self._state).update(copied(self._backup))


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def of(at: AttemptState) -> tuple[Virtual, Saved, list[InstanceName]]:
        created = []

        class Noting(SimulatedProvider):
            async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
                created.append(name)
                return await super().create(name, offer, boot)

        store, virtual = Saved(at), ENDLESS | {"beat_s": 5}
        return Virtual(store=store, config=config(virtual=virtual), state=tmp_path, cloud=Noting), store, created

    return of


@pytest.mark.parametrize("later_s", [0.0, 310.0], ids=["at once", "when its quote is old"])
def test_the_machine_of_an_intent_that_was_sent_is_taken_up(build: Build, later_s: float) -> None:
    async def story() -> None:
        house, store, created = build(AttemptState.PLANNED)
        async with house.running():
            job = await house.submit(**WORTH)
            (attempt,) = await house.train([job])
        await house.clock.sleep(later_s)
        begin_again(house, store)
        assert [one.state for one in await house.attempts(job)] == [AttemptState.PLANNED]
        async with house.running():
            await house.eventually(lambda: trains(house, job, 1))
            assert await house.machines() == [attempt.name]
        (again,) = await house.attempts(job)
        assert again.create_sent_at == attempt.created_at, "it is charged for all of the time that it may have stood"
        assert created == [attempt.name]

    told(story())


@pytest.mark.parametrize("at", [AttemptState.PLANNED, AttemptState.LAUNCHING])
def test_old_row_deadline_does_not_end_a_machine_missing_once(build: Build, at: AttemptState) -> None:
    """A machine that the first listing leaves out is not ended by the deadline of an old row."""

    async def story() -> None:
        house, store, created = build(at)
        async with house.running():
            job = await house.submit(**WORTH)
            (attempt,) = await house.train([job])
        await house.clock.sleep(house.provider.caps.boot_deadline_s)
        begin_again(house, store)
        _leave_out_once(house)
        async with house.running():
            await house.eventually(lambda: trains(house, job, 1))
            assert await house.machines() == [attempt.name]
        assert created == [attempt.name]

    told(story())


@pytest.mark.parametrize("at", [AttemptState.PLANNED, AttemptState.LAUNCHING])
def test_what_has_finished_since_is_not_bought_again(build: Build, at: AttemptState) -> None:
    async def story() -> None:
        house, store, created = build(at)
        async with house.running():
            job = await house.submit(**WORTH)
            (attempt,) = await house.train([job])
            await house.completed(job)
        begin_again(house, store)
        async with house.running():
            ended = await house.until(job, lambda found: found.state is JobState.SUCCEEDED)
        (known,) = await house.attempts(job)
        assert (known.reason, known.charged_to) == (Reason.COMPLETED, known.absent_at)
        assert ended.spent_usd > 0, "it stood from when its create may have been sent"
        assert created == [attempt.name]

    told(story())


def test_a_launch_that_another_attempt_has_followed_is_not_made_again(build: Build) -> None:
    async def story() -> None:
        house, store, created = build(AttemptState.LAUNCHING)
        async with house.running():
            job = await house.submit(**WORTH)
            (first,) = await house.train([job])
            house.body._instances[first.name].dies_at = house.clock.monotonic()
            await house.until(job, lambda found: found.attempts == 2)
            await house.eventually(lambda: trains(house, job, 2))
            second = (await house.attempts(job))[1]
        begin_again(house, store)
        await _unreadable(house, job)
        begin_again(house, store)
        async with house.running():
            held = await house.until(job, lambda found: found.state is JobState.QUEUED and "exists" in found.reason)
            assert f"{second.name} at simulated exists and bills" in held.reason
        (known,) = await house.attempts(job)
        assert (known.state, known.reason) == (AttemptState.ENDED, Reason.PREEMPTED)
        assert await house.machines() == [second.name]
        assert created == [first.name, second.name]

    told(story())


def test_unsent_intent_followed_by_another_is_not_sent(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """An intent that was never sent and that another has followed is not sent."""

    async def story() -> None:
        house, store, created = build(AttemptState.PLANNED)
        with monkeypatch.context() as sold_out:
            answers = iter(["it has been sold out since"])
            sold_out.setattr("broker.lifecycle.decisions.intent_decision.outdated", lambda *_: next(answers, None))
            async with house.running():
                job = await house.submit(**WORTH)
                await house.eventually(lambda: trains(house, job, 2))
        second = (await house.attempts(job))[1]
        begin_again(house, store)
        async with house.running():
            await house.until(job, lambda found: found.state is JobState.QUEUED and "exists" in found.reason)
        assert created == await house.machines() == [second.name]
        assert [one.reason for one in await house.attempts(job)] == [Reason.QUOTE_EXPIRED]

    told(story())


def begin_again(house: Virtual, store: Saved) -> None:
    """The backup is restored, and a new process begins on it."""
    store.restore()
    house.provider = house.cloud(
        house.config, house.body, installation=INSTALLATION, state=house.state / "simulated", clock=house.clock
    )
    house.market = MarketPoller({"simulated": house.provider}, house.clock, MarketIntervals())


def _leave_out_once(house: Virtual) -> None:
    """The next listing shows nothing of what stands."""
    listing = house.provider.list

    async def blank() -> Sequence[Observed]:
        house.provider.list = listing  # type: ignore[method-assign]
        return []

    house.provider.list = blank  # type: ignore[method-assign]


async def trains(house: Virtual, job: JobId, number: int) -> bool:
    attempts = await house.attempts(job)
    return len(attempts) == number and attempts[-1].state is AttemptState.TRAINING


async def _unreadable(house: Virtual, job: JobId) -> None:
    """While the blob store does not tell whether another one followed, nothing is created."""

    async def down(key: str) -> bytes:
        raise BlobsUnavailable("down")

    get, house.blobs.get = house.blobs.get, down  # type: ignore[method-assign]
    async with house.running():
        await house.clock.sleep(60)
        (attempt,) = await house.attempts(job)
        assert attempt.state is AttemptState.LAUNCHING
    house.blobs.get = get  # type: ignore[method-assign]
