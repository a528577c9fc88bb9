"""Causes of continuing charges that only a person can end are reported. All in virtual time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from broker.domain.errors import Rejected
from broker.domain.job import AttemptState, JobState
from broker.ports import Lane
from tests.clouds.warp import LoopClock
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import ENDLESS, SAVE_RARELY, SILENT, config
from tests.support.rig.simulated_cloud import CloudFaults
from tests.support.rig.virtual_time import VirtualTimeRig, run_in_virtual_time

HOUR = 3600.0


LISTS_NOTHING = Rejected("the key may not list (403)")


def build(folder: Path, virtual: dict[str, float]) -> VirtualTimeRig:
    return VirtualTimeRig(store=MemoryStore(LoopClock()), config=config(virtual=virtual), state=folder)


def _refuse_listings(faults: CloudFaults) -> None:
    faults.list_error = LISTS_NOTHING


def _ignore_destroys(faults: CloudFaults) -> None:
    faults.ignores_destroys = True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _refuse_listings,
            "cannot be proven gone, and is charged: simulated cannot be listed: the key may not list (403)",
        ),
        (_ignore_destroys, "simulated has accepted the destroy of"),
    ],
)
def test_the_reason_why_an_attempt_does_not_end_is_reported(
    change: Callable[[CloudFaults], None], words: str, tmp_path: Path
) -> None:
    async def story() -> None:
        rig = build(tmp_path, ENDLESS | {"beat_s": 5})
        async with rig.running():
            job = await rig.submit(cap_usd="1000")
            await rig.train([job])
            change(rig.faults)
            await rig.stop(job)
            await rig.clock.sleep(2 * HOUR)
            messages = [event.message for event in await rig.events(job) if event.kind == "attempt.destroy_failed"]
            assert 1 <= len(messages) <= 8, "it is reported less and less often"
            assert all(words in message for message in messages)
            (attempt,) = await rig.attempts(job)
            assert attempt.state is AttemptState.TERMINATING
            assert words in attempt.detail
            rig.faults.list_error, rig.faults.ignores_destroys = None, False
            await rig.state_of(job, JobState.CANCELLED)

    run_in_virtual_time(story())


def test_another_broker_may_at_once_end_what_a_cut_off_broker_cannot(tmp_path: Path) -> None:
    """Both brokers poll every few seconds. A broker that always polls right after the cut-off one must not wait."""

    async def story() -> None:
        rig = build(tmp_path, ENDLESS | {"beat_s": 5})
        async with rig.running():
            job = await rig.submit(cap_usd="1000")
            await rig.train([job])
            rig.faults.list_error = LISTS_NOTHING
            await rig.stop(job)
            await rig.until(job, lambda found: found.stop_requested)
            await rig.clock.sleep(HOUR + 0.05)  # between its looks, which are in whole seconds
            for _ in range(40):
                await rig.clock.sleep(0.3)
                found = await rig.store.claim_attempts(Lane.TERMINATION, owner="another", lease_s=1, limit=1)
                assert [one.attempt.job_id for one in found] == [job]
                await rig.store.release([], [one.attempt for one in found], due_in_s=0.0)

    run_in_virtual_time(story())


def test_silent_machine_of_a_silent_cloud_is_reported_once(tmp_path: Path) -> None:
    """The message is posted once while neither the machine nor its cloud responds."""

    async def story() -> None:
        rig = build(tmp_path, SILENT)
        async with rig.running():
            job = await rig.submit(checkpoint=SAVE_RARELY, cap_usd="1000")
            await rig.train([job])
            rig.faults.list_error = LISTS_NOTHING
            await rig.clock.sleep(HOUR / 2)
            (attempt,) = await rig.attempts(job)
            assert attempt.state is AttemptState.TRAINING, "unknown is not dead"
            (message,) = [event.message for event in await rig.events(job) if event.kind == "attempt.silent"]
            assert "simulated cannot be listed: the key may not list (403)" in message
            assert attempt.detail in message
            rig.faults.list_error = None
            await rig.clock.sleep(60)
            assert (await rig.attempts(job))[0].detail != attempt.detail

    run_in_virtual_time(story())
