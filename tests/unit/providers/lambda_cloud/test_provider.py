"""Lambda's native half against a server that answers as its API does."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from broker.domain.errors import Gone, OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import AttemptId, Installation, InstanceName, instance_name
from broker.domain.instance import BootSpec, InstanceState, Liveness, TrainerBundle
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from providers.common.account_guard import Account
from providers.common.cloud import CloudProvider, Purchase
from providers.common.machine_task import MachineTask
from providers.common.market_rules import OfferFilter
from providers.lambda_cloud.provider import LAUNCH_INTERVAL_S, LambdaCloud, LambdaConfig
from tests.unit.providers.clocks import SteppedClock

OURS = Installation("aaaa")
NAME = instance_name(OURS, AttemptId("b" * 13))
KEY = "secret_test-key"


def kind(name: str, description: str, gpus: int, cents: Any = 329, regions: tuple[str, ...] = ("us-east-1",)) -> Any:
    specs = {"vcpus": 26 * max(1, gpus), "memory_gib": 200, "storage_gib": 1024, "gpus": gpus}
    return {
        "instance_type": {
            "name": name, "description": f"{gpus}x {description}", "gpu_description": description,
            "price_cents_per_hour": cents, "specs": specs,
        },
        "regions_with_capacity_available": [{"name": r, "description": r} for r in regions],
    }  # fmt: skip


def machine(status: str = "active", name: str | None = f"{NAME}-1a2b3c4d-head", **more: Any) -> dict[str, Any]:
    return {
        "id": "m1", "name": name, "status": status, "ip": "10.0.0.1", "region": {"name": "us-east-1"},
        "instance_type": kind("gpu_1x_h100_pcie", "H100 (80 GB PCIe)", 1)["instance_type"], **more,
    }  # fmt: skip


@dataclass
class Api:
    types: dict[str, Any] = field(default_factory=dict)
    machines: list[Any] = field(default_factory=list)
    status: int = 200
    asked: list[str] = field(default_factory=list)
    terminated: list[str] = field(default_factory=list)
    keys: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "k1", "name": "mine"}])

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return self.error(401, "global/invalid-api-key")
        if self.status != 200:
            return self.error(self.status, "global/internal")
        if request.path == "/api/v1/instance-types":
            return web.json_response({"data": self.types})
        if request.path == "/api/v1/ssh-keys":
            return web.json_response({"data": self.keys})
        if request.path == "/api/v1/instances":
            return web.json_response({"data": self.machines})
        if request.path == "/api/v1/instance-operations/terminate" and request.method == "POST":
            wanted = (await request.json())["instance_ids"]
            if not all(any(m["id"] == w for m in self.machines) for w in wanted):
                return self.error(400, "global/object-does-not-exist")
            self.terminated += wanted
            return web.json_response({"data": {"terminated_instances": []}})
        return self.error(404, "no such path")

    @staticmethod
    def error(status: int, code: str) -> web.Response:
        return web.json_response({"error": {"code": code, "message": code, "suggestion": ""}}, status=status)


@dataclass
class World:
    api: Api
    endpoint: str
    home: Path
    opened: list[LambdaCloud] = field(default_factory=list)

    def open(self, *, key: str | None = KEY, regions: tuple[str, ...] = ()) -> LambdaCloud:
        env = {} if key is None else {"LAMBDA_API_KEY": key}
        config = LambdaConfig(endpoint=self.endpoint, regions=regions)
        cloud = LambdaCloud(config, installation=OURS, clock=SteppedClock(), env=env, home=self.home)
        self.opened.append(cloud)
        return cloud


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    api = Api()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    async with TestServer(app, host="127.0.0.1") as server:
        world = World(api=api, endpoint=str(server.make_url("")), home=tmp_path)
        yield world
        for cloud in world.opened:
            await cloud.close()


async def offers(cloud: LambdaCloud) -> tuple[dict[str, Offer], dict[str, int]]:
    offer_filter = OfferFilter(GpuAsk())
    await cloud.rows(offer_filter)
    return {offer.id: offer for offer in offer_filter.offers}, dict(offer_filter.dropped)


async def test_a_type_is_sold_in_each_region_that_has_it(world: World) -> None:
    both = ("us-east-1", "us-west-1")
    world.api.types = {
        "gpu_8x_a100_80gb_sxm4": kind("gpu_8x_a100_80gb_sxm4", "A100 (80 GB SXM4)", 8, 1432, both),
        "gpu_1x_h100_pcie": kind("gpu_1x_h100_pcie", "H100 (80 GB PCIe)", 1, "329"),
        "gpu_1x_a10": kind("gpu_1x_a10", "A10 (24 GB PCIe)", 1, 75),
        "gpu_1x_a100": kind("gpu_1x_a100", "A100 (40 GB PCIe)", 1, 129, ()),
    }
    found, dropped = await offers(world.open())
    assert not dropped
    assert sorted(found) == [
        "lambda/lambda/us-east-1/gpu_1x_a10/on-demand",
        "lambda/lambda/us-east-1/gpu_1x_h100_pcie/on-demand",
        "lambda/lambda/us-east-1/gpu_8x_a100_80gb_sxm4/on-demand",
        "lambda/lambda/us-west-1/gpu_8x_a100_80gb_sxm4/on-demand",
    ]
    big = found["lambda/lambda/us-west-1/gpu_8x_a100_80gb_sxm4/on-demand"]
    assert (big.accelerator, big.gpus, big.usd_per_hour) == ("a100-80gb-sxm", 8, Decimal("14.32"))
    assert (big.billing_quantum_s, big.billed_from, big.available, big.spot) == (60, "running", True, False)
    assert big.facts is not None
    assert big.facts.interconnect == "nvlink"
    one = found["lambda/lambda/us-east-1/gpu_1x_h100_pcie/on-demand"]
    assert (one.accelerator, one.gpu_memory_bytes, one.usd_per_hour) == ("h100-pcie", 80 * 10**9, Decimal("3.29"))
    assert found["lambda/lambda/us-east-1/gpu_1x_a10/on-demand"].accelerator == "a10"


async def test_unusable_and_impossible_offers_are_counted(world: World) -> None:
    world.api.types = {
        "gh": kind("gpu_1x_gh200", "GH200 (96 GB)", 1, 149),
        "cpu": kind("cpu_4x_general", "N/A", 0, 20),
        "free": kind("gpu_1x_h100_pcie", "H100 (80 GB PCIe)", 1, 0),
        "odd": {"instance_type": {"name": "x"}, "regions_with_capacity_available": [{"name": "us-east-1"}]},
        "good": kind("gpu_8x_h100_sxm5", "H100 (80 GB SXM5)", 8, 2392),
    }
    found, dropped = await offers(world.open())
    assert [offer.accelerator for offer in found.values()] == ["h100-sxm"]
    assert dropped == {
        "ARM processor: the image is for x86-64": 1, "no GPU": 1, "price 0 or less": 1, "unreadable": 1,
    }  # fmt: skip


async def test_a_region_that_lambda_does_not_have_is_reported(world: World) -> None:
    """A sold-out region is not reported: the API names only regions that have machines left."""
    world.api.types = {"a": kind("gpu_1x_h100_pcie", "H100 (80 GB PCIe)", 1, regions=("us-new-9",))}
    _, dropped = await offers(world.open(regions=("us-est-1", "us-east-1", "us-new-9")))
    (said,) = dropped
    assert said.startswith("of providers.lambda.regions is not there now: us-est-1 (did you mean ")
    assert "us-east-1" in said


async def test_only_configured_regions_are_sold(world: World) -> None:
    world.api.types = {"a": kind("gpu_1x_h100_pcie", "H100 (80 GB PCIe)", 1, regions=("us-east-1", "us-west-1"))}
    found, _ = await offers(world.open(regions=("us-west-1",)))
    assert {offer.region for offer in found.values()} == {"us-west-1"}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("booting", InstanceState.STARTING), ("active", InstanceState.RUNNING), ("unhealthy", InstanceState.RUNNING),
        ("terminating", InstanceState.STOPPED), ("terminated", InstanceState.GONE), ("preempted", InstanceState.GONE),
        ("resurrecting", InstanceState.UNKNOWN),
    ],
)  # fmt: skip
async def test_states_are_mapped_whole(world: World, status: str, state: InstanceState) -> None:
    world.api.machines = [machine(status)]
    (seen,) = await world.open().list()
    assert seen.state is state
    assert seen.handle == Handle(provider="lambda", id="m1", name=NAME, region="us-east-1")
    assert (seen.accelerator, seen.gpus, seen.spot, seen.usd_per_hour) == ("h100-pcie", 1, False, Decimal("3.29"))


async def test_machines_of_others_are_not_listed(world: World) -> None:
    look_alikes = [None, "", "gb-aaab-" + "b" * 13, f"{NAME}c-1a2b-head", f"x{NAME}", NAME[:-1]]
    world.api.machines = [machine(name=name) for name in look_alikes] + [machine(name=NAME), machine(instance_type={})]
    seen = await world.open().list()
    assert [one.handle.name for one in seen] == [NAME, NAME]
    assert seen[1].gpus is None


async def test_a_listing_that_cannot_be_read_proves_nothing(world: World) -> None:
    broken = machine()
    del broken["id"]
    world.api.machines = [machine(), broken]
    with pytest.raises(OutcomeUnknown, match="cannot be read"):
        await world.open().list()


async def test_destroy_asks_once_and_knows_what_is_absent(world: World) -> None:
    world.api.machines = [machine()]
    cloud = world.open()
    await cloud.destroy(Handle(provider="lambda", id="m1", name=NAME, region="us-east-1"))
    assert world.api.terminated == ["m1"]
    with pytest.raises(Gone):
        await cloud.destroy(Handle(provider="lambda", id="m2", name=NAME, region="us-east-1"))


async def test_check_says_what_is_missing(world: World) -> None:
    assert await world.open().check() is None
    assert world.api.asked == ["GET /api/v1/instances"]
    with pytest.raises(Rejected, match="LAMBDA_API_KEY") as missing:
        await world.open(key=None).check()
    with pytest.raises(Rejected, match="refuses the key") as wrong:
        await world.open(key="secret_other").check()
    assert all("\n" not in str(e.value) and "secret_other" not in str(e.value) for e in (missing, wrong))


@pytest.mark.parametrize(("status", "error"), [(429, Throttled), (500, OutcomeUnknown), (400, Rejected)])
async def test_every_status_is_distinguished(world: World, status: int, error: type[Exception]) -> None:
    world.api.status = status
    with pytest.raises(error):
        await offers(world.open())
    with pytest.raises(error):
        await world.open().list()


async def test_a_purchase_pins_the_type_in_skypilots_catalog(world: World) -> None:
    world.api.types = {"a": kind("gpu_8x_h100_sxm5", "H100 (80 GB SXM5)", 8, 2392)}
    cloud = world.open()
    found, _ = await offers(cloud)
    (offer,) = found.values()
    bought = cloud.purchase(offer, BootSpec())
    assert (bought.cloud, bought.region, bought.instance_type) == ("lambda", "us-east-1", "gpu_8x_h100_sxm5")
    assert (bought.use_spot, bought.launch_interval_s, bought.network_tier) == (False, LAUNCH_INTERVAL_S, None)
    (row,) = bought.catalog["lambda/vms.csv"]
    assert (row["InstanceType"], row["Region"], row["Price"]) == ("gpu_8x_h100_sxm5", "us-east-1", "23.920000")
    assert (row["AcceleratorName"], row["AcceleratorCount"]) == ("H100-SXM", "8.0")


@dataclass
class Launches:
    """A launcher whose machines the API lists at once."""

    api: Api
    id: str = "here"
    at: list[float] = field(default_factory=list)

    async def launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        self.at.append(asyncio.get_running_loop().time())
        self.api.machines.append(machine(name=f"{name}-1a2b3c4d-head", id=f"of {name}"))

    async def liveness(self, launched_by: str, name: InstanceName) -> Liveness:
        return Liveness.DEAD

    async def started(self, name: InstanceName) -> bool | str:
        return True

    async def cancel(self, name: InstanceName) -> None: ...
    async def forget(self, name: InstanceName) -> None: ...
    async def close(self) -> None: ...
    async def ssh(self, name: InstanceName, *, tty: bool) -> Sequence[str]:
        return ()


async def test_launches_are_as_far_apart_as_lambda_wants(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("providers.lambda_cloud.provider.LAUNCH_INTERVAL_S", 0.1)
    world.api.types = {"a": kind("gpu_1x_h100_pcie", "H100 (80 GB PCIe)", 1)}
    launches = Launches(world.api)
    cloud = world.open()
    provider = CloudProvider(cloud, launches, Account(cloud, tmp_path / "account.json"), installation=OURS)
    (offer,) = await provider.offers(GpuAsk())
    names = [instance_name(OURS, AttemptId(letter * 13)) for letter in "abc"]
    trainer = TrainerBundle(url="https://example.invalid/trainer.tar", sha256="0" * 64)
    begun = asyncio.get_running_loop().time()
    created = await asyncio.gather(*(provider.create(name, offer, BootSpec(trainer=trainer)) for name in names))
    assert sorted(handle.name for (handle,) in created) == sorted(names)
    # Counted from the start: a busy machine may be late with one launch and in time with the next. Timers fire up to
    # the clock's resolution early.
    for before, at in enumerate(launches.at):
        assert at - begun > 0.1 * before - 0.001


async def test_a_failed_listing_proves_no_absence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.api, "machines", {})
    with pytest.raises(OutcomeUnknown, match="is not a list"):
        await world.open().list()
