"""A launch whose end no broker was there to see, at a cloud whose launchers set machines up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import InstanceName, JobId
from broker.domain.instance import InstanceState, Liveness, Observed
from broker.domain.job import Attempt, AttemptState, JobState, Reason
from tests.controllers.house import ENDLESS, INSTALLATION, config
from tests.controllers.rented import Rented, cloud_of, standing
from tests.controllers.test_restored_launches import Saved
from tests.controllers.virtual import WORTH, Virtual, told

Built = tuple[Virtual, Saved]


@pytest.fixture
def build(tmp_path: Path) -> Callable[[], Built]:
    def of() -> Built:
        store = Saved(AttemptState.LAUNCHING)
        virtual = ENDLESS | {"beat_s": 5}
        return Virtual(store=store, config=config(virtual=virtual), state=tmp_path, cloud=Rented), store

    return of


def begin_again(house: Virtual, store: Saved) -> None:
    """The backup is restored, and a new process begins on it, long after the boot deadline of what was launching."""
    store.restore()
    bare = cloud_of(house).bare
    house.provider = house.cloud(
        house.config, house.body, installation=INSTALLATION, state=house.state / "simulated", clock=house.clock
    )
    cloud_of(house).bare = dict(bare)
    cloud_of(house).set_up.set()
    house.market = MarketPoller({"simulated": house.provider}, house.clock, MarketIntervals())


def shut(house: Virtual, monkeypatch: pytest.MonkeyPatch) -> None:
    async def down(*_: Any, **__: Any) -> Any:
        raise BlobsUnavailable("down")

    for call in ("get", "put", "list"):
        monkeypatch.setattr(house.blobs, call, down)


async def of(house: Virtual, job: JobId) -> Attempt:
    return (await house.attempts(job))[0]


def charged_after(attempt: Attempt, since: datetime) -> float:
    assert attempt.charged_to is not None
    return (attempt.charged_to - since).total_seconds()


def test_an_outage_of_the_blob_store_charges_nothing_for_what_vanished(
    build: Callable[[], Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        house, _ = build()
        async with house.running():
            job = await house.submit(**WORTH)
            await standing(house, job)
            with monkeypatch.context() as patch:
                shut(house, patch)
                name, gone = (await of(house, job)).name, house.clock.now()
                cloud_of(house).bare.pop(name)
                cloud_of(house).kill(name)
                await house.clock.sleep(4 * 3600)

            async def ended() -> bool:
                return not (await of(house, job)).live

            await house.eventually(ended)
            known = await of(house, job)
            assert (known.reason, charged_after(known, gone) < 120) == (Reason.PREEMPTED, True)

    told(story())


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("launcher", [Liveness.DEAD, Liveness.UNKNOWN])
def test_training_attempt_survives_its_old_boot_deadline(
    build: Callable[[], Built], monkeypatch: pytest.MonkeyPatch, nodes: int, launcher: Liveness
) -> None:
    """What trains outlives its old boot deadline where a listing leaves a machine out."""

    async def story() -> None:
        house, store = build()
        cloud_of(house).set_up.set()
        async with house.running():
            job = await house.submit(**WORTH, resources={"nodes": nodes})
            await house.train([job])
        await house.clock.sleep(house.provider.caps.boot_deadline_s)
        begin_again(house, store)
        monkeypatch.setattr(house.provider, "launcher", _says(launcher))
        monkeypatch.setattr(house.provider, "list", _once_without(house, "-1" if nodes > 1 else ""))
        async with house.running():
            await house.clock.sleep(100)
            assert (await of(house, job)).state is AttemptState.TRAINING
        assert [call for call, _ in cloud_of(house).called if call == "destroy"] == []

    told(story())


def test_stopped_job_is_cancelled_though_its_machine_is_listed_as_gone(
    build: Callable[[], Built],
) -> None:
    """A job that was stopped since is cancelled also where its machine is listed as gone."""

    async def story() -> None:
        house, store = build()
        cloud_of(house).set_up.set()
        async with house.running():
            job = await house.submit(**WORTH)
            (first,) = await house.train([job])
            (machine,) = [one for one in await house.provider.list() if one.handle.name == first.name]
            await house.stop(job)
            await house.until(job, lambda found: found.state is JobState.CANCELLED)
        begin_again(house, store)
        cloud_of(house).bare[machine.handle.id] = replace(machine, state=InstanceState.GONE)
        async with house.running():
            await house.until(job, lambda found: found.state is JobState.CANCELLED)
        assert [one.reason for one in await house.attempts(job)] == [Reason.STOPPED]

    told(story())


def test_alternating_listings_do_not_delay_the_boot_deadline(
    build: Callable[[], Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloud that leaves out machines by turns does not hold the boot deadline back."""

    async def story() -> None:
        house, _ = build()
        cloud = cloud_of(house)
        cloud.mute, cloud.deaf = True, 10**9
        every, turn = house.provider.list, 0

        async def by_turns() -> Sequence[Observed]:
            nonlocal turn
            turn += 1
            return [one for one in await every() if one.handle.id.endswith("-1") is (turn % 2 == 0)]

        monkeypatch.setattr(house.provider, "list", by_turns)
        async with house.running():
            job = await house.submit(**WORTH, resources={"nodes": 2})
            await house.clock.sleep(cloud.deadline_s + 120)
            assert (await of(house, job)).reason is Reason.INFRASTRUCTURE

    told(story())


def _says(liveness: Liveness) -> Callable[..., Any]:
    async def launcher(launched_by: str, name: InstanceName) -> Liveness:
        return liveness

    return launcher


def _once_without(house: Virtual, end: str) -> Callable[..., Any]:
    """The second listing, since the first is the start's own."""
    every, listings = house.provider.list, 0

    async def listing() -> Sequence[Observed]:
        nonlocal listings
        listings += 1
        return [one for one in await every() if listings != 2 or not one.handle.id.endswith(end)]

    return listing
