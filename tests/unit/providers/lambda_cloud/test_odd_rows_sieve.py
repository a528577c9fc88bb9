"""Lambda's answers in unusual forms: an odd value costs itself alone, and proves no machine absent."""

from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected, Throttled
from broker.domain.instance import InstanceState
from broker.domain.offer import GpuAsk, Offer
from providers.common.market_rules import OfferFilter
from providers.lambda_cloud.provider import LambdaCloud, LambdaConfig
from tests.unit.providers.answers import Api, serving
from tests.unit.providers.clocks import SteppedClock
from tests.unit.providers.lambda_cloud.test_provider import KEY, OURS, kind, machine

TYPES, MACHINES = "GET /api/v1/instance-types", "GET /api/v1/instances"


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with serving() as api:
        yield api


@pytest.fixture
async def cloud(api: Api, tmp_path: Path) -> AsyncIterator[LambdaCloud]:
    config = LambdaConfig(endpoint=api.url)
    cloud = LambdaCloud(config, installation=OURS, clock=SteppedClock(), env={"LAMBDA_API_KEY": KEY}, home=tmp_path)
    yield cloud
    await cloud.close()


async def offers(api: Api, cloud: LambdaCloud, *kinds: Any) -> tuple[list[Offer], dict[str, int]]:
    api.routes[TYPES] = lambda body, query: {"data": {str(n): row for n, row in enumerate(kinds)}}
    offer_filter = OfferFilter(GpuAsk())
    await cloud.rows(offer_filter)
    return offer_filter.offers, dict(offer_filter.dropped)


def h100(specs: Any = None, regions: Any = None, **changes: Any) -> Any:
    row = kind("h100", "H100 (80 GB SXM5)", 8, 2392)
    row["instance_type"] |= changes
    if specs is not None:
        row["instance_type"]["specs"] = row["instance_type"]["specs"] | specs if specs else None
    return row if regions is None else row | {"regions_with_capacity_available": regions}


GOOD = kind("a10", "A10 (24 GB PCIe)", 1, 75)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (h100(specs={"gpus": "eight"}), "no GPU"),
        (h100(specs={"gpus": True}), "no GPU"),
        (h100(specs={"gpus": 0.5}), "share of a GPU"),
        (h100(specs={"vcpus": None}), "unreadable"),
        (h100(specs={"memory_gib": "much"}), "unreadable"),
        (h100(specs={}), "unreadable"),
        (h100(price_cents_per_hour="free"), "price that is not a number"),
        (h100(price_cents_per_hour=True), "price that is not a number"),
        (h100(price_cents_per_hour="0.0"), "price 0 or less"),
        (h100(gpu_description="H100", description="8x H100"), "unreadable"),
        (h100(gpu_description="H100 (8 GB SXM5)"), "memory of h100-sxm out of range"),
        (h100(gpu_description=None, description=None), "GPU without a name"),
        (h100(regions=[None]), "unreadable"),
        (h100(regions=[{"name": None}, "us-east-1"]), "unreadable"),
        (h100(regions={"name": "us-east-1"}), "unreadable"),
        ({"instance_type": None, "regions_with_capacity_available": [{"name": "us-east-1"}]}, "unreadable"),
        (None, "unreadable"),
    ],
)
async def test_untrue_values_cost_their_type_alone(api: Api, cloud: LambdaCloud, row: Any, why: str) -> None:
    sold, dropped = await offers(api, cloud, row, GOOD)
    assert ({offer.accelerator for offer in sold}, set(dropped)) == ({"a10"}, {why})


@pytest.mark.parametrize(
    "row",
    [
        h100(specs={"gpus": "8"}), h100(specs={"gpus": 8.0}), h100(specs={"vcpus": "208", "memory_gib": 200.0}),
        h100(price_cents_per_hour="2392"), h100(price_cents_per_hour=2392.0), h100(gpu_description="N/A"),
        h100(gpu_description="H100 (80GB SXM5)"), h100(gpu_description="H100 (80 GiB SXM5)"),
        h100(regions=[None, {"name": "us-east-1"}]), h100(regions=[{"name": "us-east-1"}, {"name": "us-east-1"}]),
    ],
)  # fmt: skip
async def test_unusual_forms_give_the_same_offer(api: Api, cloud: LambdaCloud, row: Any) -> None:
    ((plain,), _), ((odd,), _) = await offers(api, cloud, h100()), await offers(api, cloud, row)
    assert (odd.id, odd.accelerator, odd.gpus, odd.vcpus, odd.ram_bytes, odd.usd_per_hour) == (
        plain.id, plain.accelerator, plain.gpus, plain.vcpus, plain.ram_bytes, plain.usd_per_hour
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"instance_type": None}, {"accelerator": None, "gpus": None, "usd_per_hour": None}),
        ({"instance_type": "gpu_1x_h100"}, {"accelerator": None}),
        ({"instance_type": {"gpu_description": "H100 PCIe"}}, {"accelerator": None, "gpu_memory_bytes": None}),
        ({"instance_type": {"specs": {"gpus": "8"}}}, {"gpus": 8}),
        ({"instance_type": {"specs": None}}, {"gpus": None}),
        ({"instance_type": {"price_cents_per_hour": "249"}}, {"usd_per_hour": Decimal("2.49")}),
        ({"instance_type": {"price_cents_per_hour": float("nan")}}, {"usd_per_hour": None}),
        ({"instance_type": {"price_cents_per_hour": -1}}, {"usd_per_hour": None}),
        ({"region": None}, {"state": InstanceState.RUNNING}),
        ({"region": {"name": None}}, {"state": InstanceState.RUNNING}),
        ({"status": "migrating"}, {"state": InstanceState.UNKNOWN}),
        ({"status": None}, {"state": InstanceState.UNKNOWN}),
    ],
)
async def test_odd_facts_cost_no_machine_of_the_listing(
    api: Api, cloud: LambdaCloud, changes: dict[str, Any], facts: dict[str, Any]
) -> None:
    api.routes[MACHINES] = lambda body, query: {"data": [machine() | changes]}
    (listed,) = await cloud.list()
    assert {name: getattr(listed, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (200, {"data": []} | {"next_page_token": "x"}, OutcomeUnknown),
        (200, {"data": [], "page": {"more": True}}, OutcomeUnknown),
        (200, {"data": [], "error": {}}, OutcomeUnknown),
        (200, {"data": {}}, OutcomeUnknown),
        (200, {"data": "[]"}, OutcomeUnknown),
        (200, {"data": [None]}, OutcomeUnknown),
        (200, {"data": [machine() | {"id": None}]}, OutcomeUnknown),
        (200, [], OutcomeUnknown),
        (403, {"error": {"code": "global/account-inactive", "message": "Insufficient balance"}}, Rejected),
        (400, {"error": {"code": "global/rate-limit", "message": "Rate limit exceeded"}}, Throttled),
        (500, {"data": []}, OutcomeUnknown),
    ],
)
async def test_listings_that_may_be_incomplete_have_an_error(
    api: Api, cloud: LambdaCloud, status: int, answer: Any, error: type[ProviderError]
) -> None:
    api.routes[MACHINES] = lambda body, query: web.json_response(answer, status=status)
    with pytest.raises(error) as e:
        await cloud.list()
    assert e.type is error


async def test_an_empty_error_and_no_further_page_are_a_listing(api: Api, cloud: LambdaCloud) -> None:
    api.routes[MACHINES] = lambda body, query: {"data": [machine()], "error": None, "next_page": None}
    assert [o.handle.id for o in await cloud.list()] == ["m1"]
