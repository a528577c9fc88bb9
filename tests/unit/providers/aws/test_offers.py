"""AWS's native half against moto, with the prices, quotas and scores of `aws_front`."""

from decimal import Decimal
from typing import Any

import pytest

from broker.domain.errors import Gone, OutcomeUnknown, Rejected, Throttled
from broker.domain.instance import InstanceState
from broker.lifecycle.liveness import mismatch_message
from providers.aws.market import quota_of
from providers.aws.offers import DISK_GIB, NO_PRICE
from providers.aws.provider import AwsCloud, AwsConfig
from tests.unit.providers.aws.world import EAST, KEYS, NAME, OURS, QUOTAS, WEST, World, handle, offers

# ------------------------------------------------------------------------------------------------------------- offers


async def test_a_machine_is_sold_on_demand_and_by_the_spot_price_of_each_zone(world: World) -> None:
    world.front.scores = {"use1-az6": 3, "use1-az1": 1}
    found, _ = await offers(world.open())
    assert sorted(found) == [
        "aws/aws/us-east-1/g6e.xlarge/on-demand",
        "aws/aws/us-east-1/g6e.xlarge/spot/us-east-1a",
        "aws/aws/us-east-1/g6e.xlarge/spot/us-east-1b",
        "aws/aws/us-east-1/p5.48xlarge/on-demand",
    ]
    spot = found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1a"]
    assert (spot.accelerator, spot.gpus, spot.vcpus, spot.ram_bytes) == ("l40s", 1, 4, 32 * 1024**3)
    assert (spot.gpu_memory_bytes, spot.spot) == (45776 * 1024**2, True)
    assert (spot.usd_per_hour, spot.on_demand_usd_per_hour) == (Decimal("0.60"), Decimal("1.861"))
    assert spot.available is True
    assert found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1b"].available is None
    big = found["aws/aws/us-east-1/p5.48xlarge/on-demand"]
    assert (big.accelerator, big.gpus, big.gpu_memory_bytes) == ("h100-sxm", 8, 80 * 1024**3)
    assert big.facts is not None
    assert (big.facts.interconnect, big.facts.down_mbit_s) == ("nvlink", 3_200_000.0)


async def test_the_disk_is_part_of_the_price(world: World) -> None:
    world.front.disk = {EAST: "0.073"}
    found, _ = await offers(world.open())
    disk = Decimal("0.073") * DISK_GIB / 730
    assert found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1b"].usd_per_hour == Decimal("0.53") + disk
    assert found["aws/aws/us-east-1/g6e.xlarge/on-demand"].usd_per_hour == Decimal("1.861") + disk


async def test_machines_that_cannot_run_the_image_are_counted(world: World) -> None:
    _, dropped = await offers(world.open())
    assert dropped["ARM processor: the image is for x86-64"] == 6
    assert dropped["share of a GPU"] > 0
    assert dropped["GPU that is not in the hardware table"] > 0


async def test_a_machine_that_lacks_a_field_is_counted_and_the_others_are_sold(world: World) -> None:
    world.front.rewritten = {"<defaultVCpus>192</defaultVCpus>": ""}
    found, dropped = await offers(world.open())
    assert {offer.instance_type for offer in found.values()} == {"g6e.xlarge"}
    assert dropped["unreadable"] > 0


async def test_a_spot_price_that_cannot_be_read_is_counted(world: World) -> None:
    world.front.spot[("g6e.xlarge", f"{EAST}a")] = "cheap"
    found, dropped = await offers(world.open())
    assert f"aws/aws/{EAST}/g6e.xlarge/spot/{EAST}b" in found
    assert f"aws/aws/{EAST}/g6e.xlarge/spot/{EAST}a" not in found
    assert dropped["price that is not a number"] == 1


async def test_a_quota_of_0_takes_its_machines_away_with_the_reason(world: World) -> None:
    world.front.quotas |= {"All G and VT Spot Instance Requests": 0.0, "Running On-Demand P instances": 96.0}
    found, dropped = await offers(world.open())
    assert set(found) == {"aws/aws/us-east-1/g6e.xlarge/on-demand"}
    assert dropped["quota of 0 for All G and VT Spot Instance Requests"] == 2
    assert dropped["quota of 96 vCPUs for Running On-Demand P instances"] == 1


@pytest.mark.parametrize(
    ("machine", "spot", "quota"),
    [
        ("p4de.24xlarge", True, ("All P4, P3 and P2 Spot Instance Requests", 0.0)),
        ("p5en.48xlarge", True, ("All P5 Spot Instance Requests", 16.0)),
        ("p6-b200.48xlarge", True, None),
        ("p6-b200.48xlarge", False, ("Running On-Demand P instances", 192.0)),
        ("gr6.4xlarge", True, ("All G and VT Spot Instance Requests", 64.0)),
        ("g6e.xlarge", False, ("Running On-Demand G and VT instances", 64.0)),
    ],
)
def test_each_family_has_its_quota(machine: str, spot: bool, quota: tuple[str, float] | None) -> None:
    assert quota_of(machine, spot, QUOTAS) == quota


@pytest.mark.parametrize("action", ["ListServiceQuotas", "GetSpotPlacementScores"])
async def test_optional_apis_may_be_denied(world: World, action: str) -> None:
    world.front.failing = {("*", action): (400, "AccessDeniedException")}
    found, _ = await offers(world.open())
    assert len(found) == 4


async def test_without_the_pricing_api_spot_is_sold_and_the_rest_is_counted(world: World) -> None:
    world.front.failing = {("*", "GetProducts"): (400, "AccessDeniedException")}
    cloud = world.open()
    found, dropped = await offers(cloud)
    assert {offer.spot for offer in found.values()} == {True}
    assert all(offer.on_demand_usd_per_hour is None for offer in found.values())
    assert dropped[NO_PRICE] > 10


async def test_list_prices_are_cached_for_hours_and_spot_prices_polled(world: World) -> None:
    cloud = world.open()
    await offers(cloud)
    first = len(world.front.asked)
    world.front.spot[("g6e.xlarge", f"{EAST}a")] = "0.75"
    world.clock.advance(30)
    found, _ = await offers(cloud)
    assert found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1a"].usd_per_hour == Decimal("0.75")
    assert world.front.asked[first:] == [(EAST, "DescribeSpotPriceHistory")]


async def test_one_region_down_does_not_hide_the_others(world: World) -> None:
    world.front.failing = {(WEST, "*"): (503, "Unavailable")}
    found, dropped = await offers(world.open(regions=(EAST, WEST)))
    assert {offer.region for offer in found.values()} == {EAST}
    assert dropped["us-west-2 does not answer"] == 1
    with pytest.raises(OutcomeUnknown, match="Unavailable"):
        await offers(world.open(regions=(WEST,)))


# ---------------------------------------------------------------------------------------------------------- inventory


async def test_machines_are_listed_by_our_tag_in_all_regions(world: World) -> None:
    cloud = world.open(regions=(EAST, WEST))
    await offers(cloud)
    spot = world.launch(Placement={"AvailabilityZone": f"{EAST}b"}, InstanceMarketOptions={"MarketType": "spot"})
    other = world.launch(WEST, InstanceType="p4d.24xlarge")
    for label in (None, "gb-aaab-" + "b" * 13 + "-1a2b3c4d", f"{NAME}c-1a2b3c4d", "x" + NAME):
        world.launch(label=label)
    seen = {machine.handle.id: machine for machine in await cloud.list()}
    assert set(seen) == {spot, other}
    first, second = seen[spot], seen[other]
    assert first.handle == handle(spot)
    assert (first.accelerator, first.gpus, first.spot) == ("l40s", 1, True)
    assert (second.handle.region, second.accelerator, second.gpus, second.spot) == (WEST, "a100-40gb", 8, False)
    assert second.usd_per_hour is None


async def test_a_spot_machine_is_listed_with_the_price_of_now(world: World) -> None:
    """AWS bills that price. A price that rises after the purchase does not make the machine a different one."""
    cloud = world.open()
    found, _ = await offers(cloud)
    bought = found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1b"]
    zone: dict[str, Any] = {"Placement": {"AvailabilityZone": f"{EAST}b"}}
    spot, plain = world.launch(**zone, InstanceMarketOptions={"MarketType": "spot"}), world.launch(**zone)
    world.front.spot[("g6e.xlarge", f"{EAST}b")] = "0.99"
    world.clock.advance(30)
    await offers(cloud)
    ours = {spot: Decimal("0.99"), plain: Decimal("1.861")}
    seen = {one.handle.id: one for one in await cloud.list() if one.handle.id in ours}
    assert {machine: one.usd_per_hour for machine, one in seen.items()} == ours
    assert (seen[spot].price_moves, seen[plain].price_moves, bought.price_moves) == (True, False, True)
    assert mismatch_message(bought, (seen[spot],)) is None


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("pending", InstanceState.STARTING), ("running", InstanceState.RUNNING), ("stopping", InstanceState.STOPPED),
        ("stopped", InstanceState.STOPPED), ("shutting-down", InstanceState.STOPPED),
        ("terminated", InstanceState.GONE), ("hibernating", InstanceState.UNKNOWN),
    ],
)  # fmt: skip
async def test_states_are_mapped_whole(world: World, name: str, state: InstanceState) -> None:
    world.launch()
    world.front.rewritten = {"<name>running</name>": f"<name>{name}</name>"}
    assert [one.state for one in await world.open().list()] == [state]


async def test_a_destroyed_machine_is_listed_as_gone(world: World) -> None:
    cloud, machine = world.open(), world.launch()
    await cloud.destroy(handle(machine))
    assert [one.state for one in await cloud.list()] == [InstanceState.GONE]
    with pytest.raises(Gone):
        await cloud.destroy(handle(machine))
    with pytest.raises(Gone):
        await cloud.destroy(handle("i-0123456789abcdef0"))
    with pytest.raises(Rejected, match="region"):
        await cloud.destroy(handle(machine, region=""))


async def test_a_listing_without_one_region_is_an_error(world: World) -> None:
    world.launch()
    world.front.failing = {(WEST, "DescribeInstances"): (503, "RequestLimitExceeded")}
    with pytest.raises(Throttled):
        await world.open(regions=(EAST, WEST)).list()


# -------------------------------------------------------------------------------------------------------- credentials


async def test_check_is_read_only_and_says_what_is_missing(world: World) -> None:
    assert await world.open().check() is None
    assert world.front.asked == [(EAST, "GetCallerIdentity"), (EAST, "DescribeInstances")]
    with pytest.raises(Rejected, match="aws configure"):
        await world.open(AWS_REGION=EAST).check()
    world.front.failing = {("*", "DescribeInstances"): (403, "UnauthorizedOperation")}
    with pytest.raises(Rejected, match=r"deploy/iam/aws.json"):
        await world.open().check()
    world.front.failing = {("*", "GetCallerIdentity"): (400, "ExpiredToken")}
    with pytest.raises(Rejected, match="aws sso login"):
        await world.open().check()


async def test_changed_keys_of_the_home_are_used(world: World) -> None:
    cloud = world.open(AWS_REGION=EAST)
    with pytest.raises(Rejected):
        await cloud.check()
    (world.home / ".aws").mkdir()
    (world.home / ".aws/credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    assert await cloud.check() is None


async def test_an_unknown_region_is_named(world: World) -> None:
    config = AwsConfig(regions=("us-east-9",))
    env = {**KEYS, "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": world.endpoint}
    cloud = AwsCloud(config, installation=OURS, clock=world.clock, env=env, home=world.home)
    world.opened.append(cloud)
    assert await cloud.check() == "AWS: there is no region us-east-9; correct providers.aws.regions"
