"""The sweep over a restored database and with clouds that hang; waiting takes no time in the virtual clock's loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from broker.controllers.base.context import ControllerContext, Intervals
from broker.controllers.observation.inventory import Inventory
from broker.controllers.termination.destroy_queue import WAIT_S, Destroys
from broker.controllers.termination.orphan_facts import OLD_S
from broker.controllers.termination.orphan_sweep import RECHECK_S, Sweep
from broker.domain.errors import BlobsUnavailable, OutcomeUnknown, Rejected
from broker.domain.ids import AttemptId, InstanceName, instance_name
from broker.domain.instance import BootSpec, Observed
from broker.domain.job import AttemptState, Handle
from broker.domain.offer import GpuAsk
from broker.ports import Charge
from providers.simulated.config import SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend
from tests.clouds.paper import FarBlobs
from tests.clouds.warp import LoopClock
from tests.conformance.samples import running
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import INSTALLATION
from tests.support.rig.virtual_time import run_in_virtual_time
from trainer.contract import object_keys as keys

STRAY = AttemptId("a" * 13)
LAG_S = 15.0


class Yard:
    """Clouds with machines, and a sweep whose database was always empty."""

    def __init__(self, folder: Path, *clouds: str) -> None:
        self.blobs = FarBlobs.in_memory(INSTALLATION)
        clock = LoopClock()
        config = SimulatedConfig.model_validate(
            {"body": "virtual", "sold_out": 0, "faults": {"list_lag_s": LAG_S}, "virtual": {"boot_s": 1e6}}
        )  # they stand, and do nothing
        self.clouds = {
            name: SimulatedProvider(
                config, VirtualBackend(self.blobs, clock, config.virtual), installation=INSTALLATION,
                state=folder / name, clock=clock,
            )
            for name in clouds
        }  # fmt: skip
        self.context = ControllerContext(
            installation=INSTALLATION, owner="one", store=MemoryStore(clock), blobs=self.blobs,
            providers=self.clouds, clock=clock, intervals=Intervals(),
        )  # fmt: skip

    async def stray(self, cloud: str = "one", attempt: AttemptId = STRAY) -> InstanceName:
        """Return a machine that no record explains."""
        provider, name = self.clouds[cloud], instance_name(INSTALLATION, attempt)
        offers = await provider.offers(GpuAsk())
        await provider.create(name, offers[0], BootSpec(env={"GPUBROKER_ATTEMPT": "x"}))
        return name

    async def ended(self) -> AttemptId:
        """Return an ended attempt whose machine still runs."""
        attempt, _ = await running(self.context.store, AttemptState.ENDED)
        await self.stray(attempt=attempt.id)
        return attempt.id

    async def standing(self, cloud: str = "one") -> list[str]:
        return [o.handle.name for o in await self.clouds[cloud]._backend.machines() if o.state.value != "gone"]

    async def sweeps(self, sweep: Sweep, for_s: float) -> None:
        clock, until = self.context.clock, self.context.clock.monotonic() + for_s
        while clock.monotonic() < until:
            await sweep.step()
            await clock.sleep(sweep.every_s)

    def sweep(self, **more: Any) -> Sweep:
        return Sweep(self.context, Inventory(self.context), Destroys(self.context), **more)


def fails(times: int, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return `call` with `times` failures before its first answer."""
    left = [OutcomeUnknown("503")] * times

    async def asked(*args: Any) -> Any:
        if left:
            raise left.pop()
        return await call(*args)

    return asked


def test_unknown_machine_is_destroyed_after_the_list_lag(tmp_path: Path) -> None:
    """A machine without a record is destroyed once it is older than the longest lag of a listing."""

    async def story() -> None:
        yard = Yard(tmp_path, "one")
        name = await yard.stray()
        await yard.context.clock.sleep(LAG_S)
        sweep = yard.sweep()
        await sweep.step()
        assert await yard.standing() == [name]
        assert [(orphan.provider, orphan.name) for orphan in sweep.orphans()] == [("one", name)]
        await yard.sweeps(sweep, 2 * yard.context.intervals.sweep_s + LAG_S)
        assert await yard.standing() == []
        await yard.sweeps(sweep, 2 * yard.context.intervals.sweep_s + LAG_S)
        assert list(sweep.orphans()) == []

    run_in_virtual_time(story())


def test_restored_database_destroys_nothing_bought_after_the_backup(tmp_path: Path) -> None:
    """The machines are recognised by their specs, which are in the blob store before each create."""

    async def story() -> None:
        yard = Yard(tmp_path, "one")
        name = await yard.stray()
        forged = await yard.stray(attempt=AttemptId("b" * 13))
        await yard.blobs.put(keys.spec(STRAY), b"{}")
        await yard.sweeps(yard.sweep(), 600)
        assert await yard.standing() == [name]
        assert forged not in await yard.standing()

    run_in_virtual_time(story())


def test_during_a_blob_store_outage_the_buyer_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        yard = Yard(tmp_path, "one")
        name, sweep = await yard.stray(), yard.sweep()

        async def down(key: str, *_: object, **__: object) -> bytes:
            raise BlobsUnavailable("down")

        with monkeypatch.context() as outage:
            outage.setattr(yard.blobs, "get", down)
            outage.setattr(yard.blobs, "get_range", down)
            await yard.sweeps(sweep, 600)
        assert await yard.standing() == [name]
        await yard.sweeps(sweep, 2 * yard.context.intervals.sweep_s)
        assert await yard.standing() == []

    run_in_virtual_time(story())


def test_a_new_database_only_reports(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path, "one")
        name = await yard.stray()
        await yard.sweeps(yard.sweep(report_only=True), 600)
        assert await yard.standing() == [name]

    run_in_virtual_time(story())


def test_failed_destroys_and_listings_do_not_wait_for_the_next_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first nine of ten listings fail, and the first nine of ten destroys."""

    async def story() -> None:
        yard = Yard(tmp_path, "one")
        await yard.stray()
        await yard.context.clock.sleep(LAG_S)
        for call in ("list", "destroy"):
            monkeypatch.setattr(yard.clouds["one"], call, fails(9, getattr(yard.clouds["one"], call)))
        begun = yard.context.clock.monotonic()
        sweeping = asyncio.create_task(yard.sweeps(yard.sweep(), 600))
        while await yard.standing():
            await yard.context.clock.sleep(1)
        assert yard.context.clock.monotonic() - begun <= 2 * 9 * RECHECK_S + LAG_S + RECHECK_S
        sweeping.cancel()

    run_in_virtual_time(story())


@pytest.mark.parametrize(("listed_s", "gone"), [(0.0, True), (OLD_S, False)])
def test_a_destroy_does_not_wait_for_a_listing_that_is_not_answered(
    listed_s: float, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep has found it before, if that is not too long ago."""

    async def story() -> None:
        yard = Yard(tmp_path, "one")
        await yard.stray()
        await yard.context.clock.sleep(LAG_S)
        sweep = yard.sweep()
        await sweep.step()
        monkeypatch.setattr(yard.clouds["one"], "list", fails(1000, yard.clouds["one"].list))
        await yard.context.clock.sleep(listed_s)
        await yard.sweeps(sweep, LAG_S + 2 * RECHECK_S)
        assert (await yard.standing() == []) is gone

    run_in_virtual_time(story())


def test_one_listing_without_an_orphan_does_not_restart_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second listing, which was to prove the end of the machine, leaves the machine out."""

    async def story() -> None:
        yard = Yard(tmp_path, "one")
        await yard.stray()
        await yard.context.clock.sleep(LAG_S)
        listings, shown = 0, yard.clouds["one"].list

        async def blinks() -> Sequence[Observed]:
            nonlocal listings
            listings += 1
            return () if listings == 2 else await shown()

        monkeypatch.setattr(yard.clouds["one"], "list", blinks)
        await yard.sweeps(yard.sweep(), LAG_S + 2 * RECHECK_S)
        assert await yard.standing() == []

    run_in_virtual_time(story())


@pytest.mark.parametrize("late", ["effect", "answer"])
def test_slow_destroy_is_requested_once_and_charged_while_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """A destroy that takes longer than a look is asked for once and charged while its machine is listed."""

    async def story() -> None:
        yard, asked, charged = Yard(tmp_path, "one"), list[Handle](), list[Charge]()
        ended, provider = await yard.ended(), yard.clouds["one"]
        destroy, charge = provider.destroy, yard.context.store.charge

        async def slow(handle: Handle) -> None:
            asked.append(handle)
            await yard.context.clock.sleep(40 * (late == "effect"))
            await destroy(handle)
            await yard.context.clock.sleep(40 * (late == "answer"))

        async def heard(charges: Sequence[Charge]) -> None:
            charged.extend(charges)
            await charge(charges)

        monkeypatch.setattr(provider, "destroy", slow)
        monkeypatch.setattr(yard.context.store, "charge", heard)
        await yard.sweeps(yard.sweep(), 200)
        # Again only after it was answered, where a listing that lags shows it still.
        assert len(asked) == 1 if late == "answer" else len(asked) <= 2
        assert {entry.attempt_id for entry in charged} == {ended}
        # Before it, for who does not live to hear the answer; at each look at the call under way; and once more.
        looks = [entry.to for entry in charged]
        paid_s = (looks[-1] - looks[0]).total_seconds()
        assert paid_s >= 40 if late == "effect" else paid_s <= LAG_S + RECHECK_S + WAIT_S
        assert max((b - a).total_seconds() for a, b in pairwise(looks)) <= RECHECK_S + WAIT_S

    run_in_virtual_time(story())


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0])
def test_late_machine_billed_from_birth_despite_clock_skew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """A machine that came late is charged from its birth and from when it was seen by a clock that is ahead."""

    async def story() -> None:
        yard = Yard(tmp_path, "one")
        clock, provider = yard.context.clock, yard.clouds["one"]
        attempt, job = await running(yard.context.store, AttemptState.ENDED)
        settled = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=clock.now(), usd=Decimal(0))
        assert await yard.context.store.charge([settled]) == [True]
        await clock.sleep(10_000)
        born, shown = clock.now(), provider.list
        await yard.stray(attempt=attempt.id)

        async def dated() -> Sequence[Observed]:
            return [replace(one, created_at=born + timedelta(seconds=ahead_s)) for one in await shown()]

        monkeypatch.setattr(provider, "list", dated)
        await yard.sweeps(yard.sweep(), 3 * LAG_S + 60)
        assert await yard.standing() == []
        (ended,) = await yard.context.store.attempts(job.id)
        assert ended.charged_to is not None
        stood_s = (ended.charged_to - born).total_seconds()
        price = ended.line.offer.usd_per_hour * ended.line.nodes / 3600
        least_s = stood_s if ahead_s == 0 else stood_s - LAG_S - yard.context.intervals.sweep_s
        assert price * Decimal(least_s) <= ended.charged_usd <= price * Decimal(stood_s + 1)

    run_in_virtual_time(story())


def test_a_cloud_that_hangs_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        yard = Yard(tmp_path, "hangs1", "hangs2", "hangs3", "one")
        await yard.stray()

        async def never() -> Sequence[Observed]:
            await asyncio.sleep(3600)
            return ()

        for name in ("hangs1", "hangs2", "hangs3"):
            monkeypatch.setattr(yard.clouds[name], "list", never)
        sweep, before = yard.sweep(), yard.context.clock.monotonic()
        await sweep.step()
        assert yard.context.clock.monotonic() - before <= yard.context.intervals.list_limit_s
        await yard.sweeps(sweep, 2 * yard.context.intervals.sweep_s + LAG_S)
        assert await yard.standing() == []

    run_in_virtual_time(story())


def _notices(yard: Yard) -> list[tuple[str, str]]:
    store = yard.context.store
    assert isinstance(store, MemoryStore)
    return [(notice.kind, notice.message) for notice in store._state.outbox.notices.values()]


def test_undestroyable_orphan_is_reported_with_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People hear of an orphan that cannot be destroyed less and less often."""

    async def story() -> None:
        yard = Yard(tmp_path, "one")
        name = await yard.stray()

        async def refused(handle: Handle) -> None:
            raise Rejected("the key may not terminate (403)")

        destroy = yard.clouds["one"].destroy
        monkeypatch.setattr(yard.clouds["one"], "destroy", refused)
        both = [yard.sweep(), yard.sweep()]
        await asyncio.gather(*(yard.sweeps(sweep, 3600) for sweep in both))
        reported = _notices(yard)
        assert 3 <= len(reported) <= 6, "whoever asks"
        assert {kind for kind, _ in reported} == {"orphan.destroy_failed"}
        assert all(name in message and "the key may not terminate (403)" in message for _, message in reported)
        monkeypatch.setattr(yard.clouds["one"], "destroy", destroy)
        await yard.sweeps(both[0], 120)
        assert await yard.standing() == []
        assert _notices(yard) == reported

    run_in_virtual_time(story())


def test_machine_younger_than_a_restored_database_is_reported_once(tmp_path: Path) -> None:
    """People hear once of a machine that is younger than a restored database."""

    async def story() -> None:
        yard = Yard(tmp_path, "one")
        name = await yard.stray()
        await yard.blobs.put(keys.spec(STRAY), b"{}")
        await asyncio.gather(*(yard.sweeps(yard.sweep(), 600) for _ in range(2)))
        assert await yard.standing() == [name]
        ((kind, message),) = _notices(yard)
        assert (kind, name in message) == ("orphan.spared", True)

    run_in_virtual_time(story())
