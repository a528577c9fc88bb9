"""The sweep without a daemon: over the simulated market's virtual machines."""

from dataclasses import replace
from pathlib import Path

import pytest

from broker.blobs import ObstoreBlobs
from broker.controllers.termination import offline_sweep as outside
from broker.domain.errors import BlobsUnavailable, OutcomeUnknown
from broker.domain.ids import AttemptId, Installation, instance_name
from broker.domain.instance import BootSpec, Observed
from broker.domain.offer import GpuAsk
from providers.simulated.config import SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend
from tests.support.memory_store.store import MemoryStore
from tests.unit.providers.clocks import SteppedClock as ManualClock
from trainer.contract import object_keys as keys

HERE = Installation("abcd")


class Remote(ObstoreBlobs):
    """A store that other machines can reach."""

    local = False  # type: ignore[assignment]


@pytest.fixture
def blobs() -> ObstoreBlobs:
    return Remote.open("memory://", HERE)


async def standing(tmp_path: Path, blobs: ObstoreBlobs, clock: ManualClock) -> SimulatedProvider:
    """Return a cloud with one machine of ours."""
    config = SimulatedConfig(body="virtual", sold_out=0)
    provider = SimulatedProvider(
        config, VirtualBackend(blobs, clock, config.virtual), installation=HERE, state=tmp_path, clock=clock
    )
    offer = (await provider.offers(GpuAsk()))[0]
    await provider.create(
        instance_name(HERE, AttemptId("a" * 13)), offer, BootSpec(env={"GPUBROKER_ATTEMPT": "a" * 13})
    )
    return provider


async def test_without_a_database_only_a_still_lease_makes_orphans(tmp_path: Path, blobs: ObstoreBlobs) -> None:
    clock, watching = ManualClock(), ManualClock()
    cloud = await standing(tmp_path, blobs, clock)
    await blobs.put(keys.BROKER_LEASE, b"0")
    touches = 0

    async def pass_at_once(seconds: float) -> None:
        watching.advance(seconds)
        await blobs.put(keys.BROKER_LEASE, str(touches).encode())

    watching.sleep = pass_at_once  # type: ignore[method-assign]
    still = await outside.survey(HERE, {"simulated": cloud}, watching, store=None, blobs=blobs, watch_s=60)
    assert "no broker has renewed its lease for 60 s" in still.machines[0].orphan
    touches = 1
    lives = await outside.survey(HERE, {"simulated": cloud}, watching, store=None, blobs=blobs, watch_s=60)
    assert lives.machines[0].orphan == ""
    assert await outside.destroy(still.machines[0], cloud, watching) is None
    assert await cloud.list() == []


async def test_a_store_without_any_lease_is_the_wrong_one_and_makes_none(tmp_path: Path, blobs: ObstoreBlobs) -> None:
    """A broker writes its lease when it starts."""
    clock = ManualClock()
    cloud = await standing(tmp_path, blobs, clock)
    found = await outside.survey(HERE, {"simulated": cloud}, clock, store=None, blobs=blobs, watch_s=60)
    assert found.machines[0].orphan == ""
    assert "is `blobs` that of the daemon?" in found.judged_by


async def test_with_the_database_the_sweeps_own_rules_decide(tmp_path: Path, blobs: ObstoreBlobs) -> None:
    clock = ManualClock()
    cloud = await standing(tmp_path, blobs, clock)
    found = await outside.survey(HERE, {"simulated": cloud}, clock, store=MemoryStore(clock), blobs=blobs, watch_s=60)
    assert found.machines[0].orphan == "no attempt of ours has this name"
    assert found.judged_by == "the database"


async def test_an_empty_or_unreadable_store_makes_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    folder = ObstoreBlobs.open((tmp_path / "blobs").as_uri(), HERE)
    cloud = await standing(tmp_path, folder, clock)
    alone = await outside.survey(HERE, {"simulated": cloud}, clock, store=None, blobs=folder, watch_s=60)
    assert alone.machines[0].orphan == ""
    unread = Remote.open("memory://", HERE)

    async def down(key: str, *_: object, **__: object) -> bytes:
        raise BlobsUnavailable("down")

    monkeypatch.setattr(unread, "get", down)
    monkeypatch.setattr(unread, "get_range", down)
    assert (await outside.survey(HERE, {"simulated": cloud}, clock, store=None, blobs=unread, watch_s=60)).machines[
        0
    ].orphan == ""


@pytest.mark.parametrize("lease", outside.LeaseState)
async def test_only_an_expired_lease_makes_an_orphan(
    tmp_path: Path, blobs: ObstoreBlobs, lease: outside.LeaseState
) -> None:
    machine = (await (await standing(tmp_path, blobs, ManualClock())).list())[0]
    facts = outside.SurveyFacts(listed=(("simulated", machine),), silent={}, lease=lease, watch_s=60)
    found = outside.judge(facts)
    assert bool(found.machines[0].orphan) is (lease is outside.LeaseState.EXPIRED)
    assert found.judged_by == lease.value
    assert outside.judge(replace(facts, listed=())).judged_by == "no machine exists"


async def test_a_silent_cloud_is_a_line(tmp_path: Path, blobs: ObstoreBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    good, bad = await standing(tmp_path / "a", blobs, clock), await standing(tmp_path / "b", blobs, clock)

    async def down() -> list[Observed]:
        raise OutcomeUnknown("bad: 503")

    monkeypatch.setattr(bad, "list", down)
    found = await outside.survey(
        HERE, {"good": good, "bad": bad}, clock, store=MemoryStore(clock), blobs=blobs, watch_s=1
    )
    assert found.silent == {"bad": "bad: 503"}
    assert [m.provider for m in found.machines] == ["good"]
