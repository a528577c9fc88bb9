"""Launches that ended while no broker ran, at a cloud whose launchers set machines up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import InstanceName, JobId
from broker.domain.instance import InstanceState, Liveness, Observed
from broker.domain.job import Attempt, AttemptState, JobState, Reason
from tests.controllers.test_restored_launches import Saved
from tests.support.rig.broker_rig import ENDLESS, config
from tests.support.rig.launcher_cloud import LauncherCloud, cloud_of, until_machine_recorded
from tests.support.rig.virtual_time import WORTH, VirtualTimeRig, run_in_virtual_time

Built = tuple[VirtualTimeRig, Saved]


@pytest.fixture
def build(tmp_path: Path) -> Callable[[], Built]:
    def of() -> Built:
        store = Saved(AttemptState.LAUNCHING)
        virtual = ENDLESS | {"beat_s": 5}
        return VirtualTimeRig(store=store, config=config(virtual=virtual), state=tmp_path, cloud=LauncherCloud), store

    return of


def begin_again(rig: VirtualTimeRig, store: Saved) -> None:
    """Restore the backup and open the cloud again, long after the boot deadline of what was launching."""
    store.restore()
    rig.reopen_cloud()
    cloud_of(rig).setup_allowed.set()


def shut(rig: VirtualTimeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def down(*_: Any, **__: Any) -> Any:
        raise BlobsUnavailable("down")

    for call in ("get", "put", "list"):
        monkeypatch.setattr(rig.blobs, call, down)


async def of(rig: VirtualTimeRig, job: JobId) -> Attempt:
    return (await rig.attempts(job))[0]


def charged_after(attempt: Attempt, since: datetime) -> float:
    assert attempt.charged_to is not None
    return (attempt.charged_to - since).total_seconds()


def test_an_outage_of_the_blob_store_charges_nothing_for_what_vanished(
    build: Callable[[], Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        rig, _ = build()
        async with rig.running():
            job = await rig.submit(**WORTH)
            await until_machine_recorded(rig, job)
            with monkeypatch.context() as patch:
                shut(rig, patch)
                name, gone = (await of(rig, job)).name, rig.clock.now()
                cloud_of(rig).extra.pop(name)
                cloud_of(rig).kill(name)
                await rig.clock.sleep(4 * 3600)

            async def ended() -> bool:
                return not (await of(rig, job)).live

            await rig.eventually(ended)
            known = await of(rig, job)
            assert (known.reason, charged_after(known, gone) < 120) == (Reason.PREEMPTED, True)

    run_in_virtual_time(story())


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("launcher", [Liveness.DEAD, Liveness.UNKNOWN])
def test_training_attempt_survives_its_old_boot_deadline(
    build: Callable[[], Built], monkeypatch: pytest.MonkeyPatch, nodes: int, launcher: Liveness
) -> None:
    """A listing omits one of the machines."""

    async def story() -> None:
        rig, store = build()
        cloud_of(rig).setup_allowed.set()
        async with rig.running():
            job = await rig.submit(**WORTH, resources={"nodes": nodes})
            await rig.train([job])
        await rig.clock.sleep(rig.provider.caps.boot_deadline_s)
        begin_again(rig, store)
        monkeypatch.setattr(rig.provider, "launcher", _says(launcher))
        monkeypatch.setattr(rig.provider, "list", _once_without(rig, "-1" if nodes > 1 else ""))
        async with rig.running():
            await rig.clock.sleep(100)
            assert (await of(rig, job)).state is AttemptState.TRAINING
        assert [call for call, _ in cloud_of(rig).calls if call == "destroy"] == []

    run_in_virtual_time(story())


def test_stopped_job_is_cancelled_though_its_machine_is_listed_as_gone(
    build: Callable[[], Built],
) -> None:
    """The job was stopped after the backup."""

    async def story() -> None:
        rig, store = build()
        cloud_of(rig).setup_allowed.set()
        async with rig.running():
            job = await rig.submit(**WORTH)
            (first,) = await rig.train([job])
            (machine,) = [attempt for attempt in await rig.provider.list() if attempt.handle.name == first.name]
            await rig.stop(job)
            await rig.until(job, lambda found: found.state is JobState.CANCELLED)
        begin_again(rig, store)
        cloud_of(rig).extra[machine.handle.id] = replace(machine, state=InstanceState.GONE)
        async with rig.running():
            await rig.until(job, lambda found: found.state is JobState.CANCELLED)
        assert [attempt.reason for attempt in await rig.attempts(job)] == [Reason.STOPPED]

    run_in_virtual_time(story())


def test_alternating_listings_do_not_delay_the_boot_deadline(
    build: Callable[[], Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cloud's listings omit the machines alternately."""

    async def story() -> None:
        rig, _ = build()
        cloud = cloud_of(rig)
        cloud.creates_hang, cloud.lost_cancels = True, 10**9
        every, turn = rig.provider.list, 0

        async def by_turns() -> Sequence[Observed]:
            nonlocal turn
            turn += 1
            return [machine for machine in await every() if machine.handle.id.endswith("-1") is (turn % 2 == 0)]

        monkeypatch.setattr(rig.provider, "list", by_turns)
        async with rig.running():
            job = await rig.submit(**WORTH, resources={"nodes": 2})
            await rig.clock.sleep(cloud.caps.boot_deadline_s + 120)
            assert (await of(rig, job)).reason is Reason.INFRASTRUCTURE

    run_in_virtual_time(story())


def _says(liveness: Liveness) -> Callable[..., Any]:
    async def launcher(launched_by: str, name: InstanceName) -> Liveness:
        return liveness

    return launcher


def _once_without(rig: VirtualTimeRig, end: str) -> Callable[..., Any]:
    """Return the second listing, since the first is the start's own."""
    every, listings = rig.provider.list, 0

    async def listing() -> Sequence[Observed]:
        nonlocal listings
        listings += 1
        return [machine for machine in await every() if listings != 2 or not machine.handle.id.endswith(end)]

    return listing
