"""AWS's raw prices: a price of 0 is not a price, even after the disk's price; real spot prices remain."""

from decimal import Decimal

import pytest

from tests.unit.providers.aws.world import EAST, QUOTAS, World, offers

P5 = "p5.48xlarge"


@pytest.mark.parametrize("price", ["0.0000000000", "-1"])
async def test_untrue_on_demand_price_with_disk_is_not_offered_nor_listed(world: World, price: str) -> None:
    world.front.quotas = dict.fromkeys(QUOTAS, 1000.0)
    world.front.on_demand = {(P5, EAST): price}
    world.front.spot = {(P5, f"{EAST}a"): "14.30", (P5, f"{EAST}b"): "0"}
    world.front.disk = {EAST: "0.08"}
    cloud = world.open()
    sold, dropped = await offers(cloud)
    assert {(offer.spot, offer.usd_per_hour > 14, offer.on_demand_usd_per_hour) for offer in sold.values()} == {
        (True, True, None)
    }
    assert dropped["price 0 or less"] == 2
    world.launch(InstanceType=P5)
    (machine,) = await cloud.list()
    assert machine.usd_per_hour is None


async def test_disk_is_added_to_a_true_price(world: World) -> None:
    world.front.spot, world.front.disk = {}, {EAST: "0.073"}
    sold, _ = await offers(world.open())
    assert sold[f"aws/aws/{EAST}/g6e.xlarge/on-demand"].usd_per_hour == Decimal("1.861") + Decimal("0.02")
