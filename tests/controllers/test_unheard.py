"""What keeps a bill running, and is nobody's to mend but a person's, is told. All in virtual time."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from broker.domain.errors import Rejected
from broker.domain.instance import Observed
from broker.domain.job import AttemptState, Handle, JobState
from broker.ports import Lane
from providers.simulated.provider import SimulatedProvider
from tests.clouds.warp import LoopClock
from tests.controllers.house import ENDLESS, SAVE_RARELY, SILENT, config
from tests.controllers.virtual import Virtual, told
from tests.support.memory_store.store import MemoryStore

HOUR = 3600.0


class Strange(SimulatedProvider):
    """A cloud whose account has changed."""

    unlisted = False
    """Its listings are refused."""
    deaf = False
    """It takes destroys, and does nothing."""
    shown: Sequence[Observed] = ()

    async def list(self) -> Sequence[Observed]:
        if self.unlisted:
            raise Rejected("the key may not list (403)")
        if not self.deaf:
            self.shown = await super().list()
        return self.shown

    async def destroy(self, handle: Handle) -> None:
        if not self.deaf:
            await super().destroy(handle)


def strange(folder: Path, virtual: dict[str, float]) -> tuple[Virtual, Strange]:
    house = Virtual(store=MemoryStore(LoopClock()), config=config(virtual=virtual), state=folder, cloud=Strange)
    assert isinstance(house.provider, Strange)
    return house, house.provider


def _unlisted(cloud: Strange) -> None:
    cloud.unlisted = True


def _deaf(cloud: Strange) -> None:
    cloud.deaf = True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_unlisted, "cannot be proven gone, and is charged: simulated cannot be listed: the key may not list (403)"),
        (_deaf, "simulated has accepted the destroy of"),
    ],
)
def test_people_hear_why_an_attempt_does_not_end(change: Callable[[Strange], None], words: str, tmp_path: Path) -> None:
    async def story() -> None:
        house, cloud = strange(tmp_path, ENDLESS | {"beat_s": 5})
        async with house.running():
            job = await house.submit(cap_usd="1000")
            await house.train([job])
            change(cloud)
            await house.stop(job)
            await house.clock.sleep(2 * HOUR)
            said = [one.message for one in await house.events(job) if one.kind == "attempt.destroy_failed"]
            assert 1 <= len(said) <= 8, "it is told less and less often"
            assert all(words in message for message in said)
            (attempt,) = await house.attempts(job)
            assert attempt.state is AttemptState.TERMINATING
            assert words in attempt.detail
            cloud.unlisted = cloud.deaf = False
            await house.state_of(job, JobState.CANCELLED)

    told(story())


def test_what_a_broker_cannot_end_another_one_may_at_once(tmp_path: Path) -> None:
    """Each looks every few seconds: who always comes right after one that is cut off would come in vain for minutes."""

    async def story() -> None:
        house, cloud = strange(tmp_path, ENDLESS | {"beat_s": 5})
        async with house.running():
            job = await house.submit(cap_usd="1000")
            await house.train([job])
            cloud.unlisted = True
            await house.stop(job)
            await house.until(job, lambda found: found.stop_requested)
            await house.clock.sleep(HOUR + 0.05)  # between its looks, which are in whole seconds
            for _ in range(40):
                await house.clock.sleep(0.3)
                found = await house.store.claim_attempts(Lane.TERMINATION, owner="another", lease_s=1, limit=1)
                assert [one.attempt.job_id for one in found] == [job]
                await house.store.release([], [one.attempt for one in found], due_in_s=0.0)

    told(story())


def test_silent_machine_of_a_silent_cloud_is_reported_once(tmp_path: Path) -> None:
    """People hear once where neither a machine nor its cloud says anything."""

    async def story() -> None:
        house, cloud = strange(tmp_path, SILENT)
        async with house.running():
            job = await house.submit(checkpoint=SAVE_RARELY, cap_usd="1000")
            await house.train([job])
            cloud.unlisted = True
            await house.clock.sleep(HOUR / 2)
            (attempt,) = await house.attempts(job)
            assert attempt.state is AttemptState.TRAINING, "unknown is not dead"
            (said,) = [one.message for one in await house.events(job) if one.kind == "attempt.silent"]
            assert "simulated cannot be listed: the key may not list (403)" in said
            assert attempt.detail in said
            cloud.unlisted = False
            await house.clock.sleep(60)
            assert (await house.attempts(job))[0].detail != attempt.detail

    told(story())
