"""A backup from the middle of a launch: no row records the result of the launch, or the events after it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import JobId
from broker.domain.instance import Observed
from broker.domain.job import AttemptState, JobState, Reason
from broker.ports import Change
from tests.clouds.warp import LoopClock
from tests.sim.backups import copied
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import ENDLESS, config
from tests.support.rig.virtual_time import WORTH, VirtualTimeRig, run_in_virtual_time

BuildOnBackup = Callable[[AttemptState], tuple[VirtualTimeRig, "Saved"]]
"""A rig and its store."""


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
def build(tmp_path: Path) -> BuildOnBackup:
    def on_backup(at: AttemptState) -> tuple[VirtualTimeRig, Saved]:
        store, virtual = Saved(at), ENDLESS | {"beat_s": 5}
        return VirtualTimeRig(store=store, config=config(virtual=virtual), state=tmp_path), store

    return on_backup


@pytest.mark.parametrize("later_s", [0.0, 310.0], ids=["at once", "when its quote is old"])
def test_the_machine_of_an_intent_that_was_sent_is_taken_up(build: BuildOnBackup, later_s: float) -> None:
    async def story() -> None:
        rig, store = build(AttemptState.PLANNED)
        async with rig.running():
            job = await rig.submit(**WORTH)
            (attempt,) = await rig.train([job])
        await rig.clock.sleep(later_s)
        begin_again(rig, store)
        assert [one.state for one in await rig.attempts(job)] == [AttemptState.PLANNED]
        async with rig.running():
            await rig.eventually(lambda: trains(rig, job, 1))
            assert await rig.machines() == [attempt.name]
        (again,) = await rig.attempts(job)
        assert again.create_sent_at == attempt.created_at, "it is charged for all of the time that it may have run"
        assert rig.provider.created == [attempt.name]

    run_in_virtual_time(story())


@pytest.mark.parametrize("at", [AttemptState.PLANNED, AttemptState.LAUNCHING])
def test_old_row_deadline_does_not_end_a_machine_missing_once(build: BuildOnBackup, at: AttemptState) -> None:
    """A machine that the first listing leaves out is not ended by the deadline of an old row."""

    async def story() -> None:
        rig, store = build(at)
        async with rig.running():
            job = await rig.submit(**WORTH)
            (attempt,) = await rig.train([job])
        await rig.clock.sleep(rig.provider.caps.boot_deadline_s)
        begin_again(rig, store)
        _leave_out_once(rig)
        async with rig.running():
            await rig.eventually(lambda: trains(rig, job, 1))
            assert await rig.machines() == [attempt.name]
        assert rig.provider.created == [attempt.name]

    run_in_virtual_time(story())


@pytest.mark.parametrize("at", [AttemptState.PLANNED, AttemptState.LAUNCHING])
def test_a_launch_that_finished_after_the_backup_is_not_repeated(build: BuildOnBackup, at: AttemptState) -> None:
    async def story() -> None:
        rig, store = build(at)
        async with rig.running():
            job = await rig.submit(**WORTH)
            (attempt,) = await rig.train([job])
            await rig.completed(job)
        begin_again(rig, store)
        async with rig.running():
            ended = await rig.until(job, lambda found: found.state is JobState.SUCCEEDED)
        (known,) = await rig.attempts(job)
        assert (known.reason, known.charged_to) == (Reason.COMPLETED, known.absent_at)
        assert ended.spent_usd > 0, "it may have run since its create may have been sent"
        assert rig.provider.created == [attempt.name]

    run_in_virtual_time(story())


def test_a_launch_that_another_attempt_has_followed_is_not_made_again(build: BuildOnBackup) -> None:
    async def story() -> None:
        rig, store = build(AttemptState.LAUNCHING)
        async with rig.running():
            job = await rig.submit(**WORTH)
            (first,) = await rig.train([job])
            rig.body._instances[first.name].dies_at = rig.clock.monotonic()
            await rig.until(job, lambda found: found.attempts == 2)
            await rig.eventually(lambda: trains(rig, job, 2))
            second = (await rig.attempts(job))[1]
        begin_again(rig, store)
        await _unreadable(rig, job)
        begin_again(rig, store)
        async with rig.running():
            held = await rig.until(job, lambda found: found.state is JobState.QUEUED and "exists" in found.reason)
            assert f"{second.name} at simulated exists and bills" in held.reason
        (attempt,) = await rig.attempts(job)
        assert (attempt.state, attempt.reason) == (AttemptState.ENDED, Reason.PREEMPTED)
        assert await rig.machines() == [second.name]
        assert rig.provider.created == [first.name, second.name]

    run_in_virtual_time(story())


def test_unsent_intent_followed_by_another_is_not_sent(build: BuildOnBackup, monkeypatch: pytest.MonkeyPatch) -> None:
    """An intent that was never sent and that another has followed is not sent."""

    async def story() -> None:
        rig, store = build(AttemptState.PLANNED)
        with monkeypatch.context() as sold_out:
            answers = iter(["it has been sold out since"])
            sold_out.setattr("broker.lifecycle.decisions.intent_decision.outdated", lambda *_: next(answers, None))
            async with rig.running():
                job = await rig.submit(**WORTH)
                await rig.eventually(lambda: trains(rig, job, 2))
        second = (await rig.attempts(job))[1]
        begin_again(rig, store)
        async with rig.running():
            await rig.until(job, lambda found: found.state is JobState.QUEUED and "exists" in found.reason)
        assert rig.provider.created == await rig.machines() == [second.name]
        assert [attempt.reason for attempt in await rig.attempts(job)] == [Reason.QUOTE_EXPIRED]

    run_in_virtual_time(story())


def begin_again(rig: VirtualTimeRig, store: Saved) -> None:
    """Restore the backup and open the cloud again, as a new process does."""
    store.restore()
    rig.reopen_cloud()


def _leave_out_once(rig: VirtualTimeRig) -> None:
    """Return an empty list as the next listing, although machines run."""
    listing = rig.provider.list

    async def blank() -> Sequence[Observed]:
        rig.provider.list = listing  # type: ignore[method-assign]
        return []

    rig.provider.list = blank  # type: ignore[method-assign]


async def trains(rig: VirtualTimeRig, job: JobId, number: int) -> bool:
    attempts = await rig.attempts(job)
    return len(attempts) == number and attempts[-1].state is AttemptState.TRAINING


async def _unreadable(rig: VirtualTimeRig, job: JobId) -> None:
    """Check that nothing is created while the blob store cannot show whether another attempt followed."""

    async def down(key: str) -> bytes:
        raise BlobsUnavailable("down")

    get, rig.blobs.get = rig.blobs.get, down  # type: ignore[method-assign]
    async with rig.running():
        await rig.clock.sleep(60)
        (attempt,) = await rig.attempts(job)
        assert attempt.state is AttemptState.LAUNCHING
    rig.blobs.get = get  # type: ignore[method-assign]
