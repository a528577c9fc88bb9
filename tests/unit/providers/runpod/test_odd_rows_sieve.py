"""RunPod's catalogue and pods in unusual forms: an odd value costs itself alone, and proves no pod absent."""

from decimal import Decimal
from typing import Any

import pytest
from aiohttp import web

from broker.domain.errors import OutcomeUnknown, Rejected
from broker.domain.instance import InstanceState
from providers.runpod.gpu_types import accelerator_of
from tests.unit.providers.runpod.shop import DELETE, GPUS, GRAPHQL, H100, HANDLE, PODS, RTX4090, Shop, pod, price, shop

__all__ = ["shop"]


def gpu(**changes: Any) -> dict[str, Any]:
    return {
        "id": RTX4090, "name": "RTX 4090", "manufacturer": "NVIDIA", "memory": 24, "maxCount": {"secure": 8},
        "price": {"secure": 0.69}, "dataCenters": [{"id": "US-TX-1", "availability": "HIGH"}],
        "cudaVersions": [{"version": "12.8"}],
    } | changes  # fmt: skip


GOOD = gpu(id=H100, memory=80, price={"secure": 2.5})


def sell(shop: Shop, *gpus: Any) -> None:
    shop.api.routes[GPUS] = lambda body, query: {"gpus": list(gpus) if query["count"] == "1" else []}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"memory": None}, "unreadable"),
        ({"memory": "much"}, "unreadable"),
        ({"memory": 24_576}, "memory of rtx4090 out of range"),
        ({"price": None}, "unreadable"),
        ({"price": {"secure": 0}}, "price 0 or less"),
        ({"price": {"secure": -0.1}}, "price 0 or less"),
        ({"price": {"secure": True}}, "price that is not a number"),
        ({"price": {"secure": "free"}}, "price that is not a number"),
        ({"maxCount": None}, "unreadable"),
        ({"dataCenters": [None]}, "unreadable"),
        ({"dataCenters": [{"id": None}]}, "unreadable"),
        ({"dataCenters": [{"id": 'US-TX-1" }'}]}, "unreadable"),
        ({"cudaVersions": ["11.8", "12.1"]}, "driver older than CUDA 12.4"),
        ({"cudaVersions": "12.2"}, "driver older than CUDA 12.4"),
        ({"cudaVersions": [{"version": "12.1"}, {"version": "11.8"}]}, "driver older than CUDA 12.4"),
        ({"id": None}, "unreadable"),
        ({"id": "NVIDIA H20"}, "SkyPilot has no name for the GPU"),
    ],
)
async def test_untrue_values_cost_their_gpu_type_alone(shop: Shop, changes: dict[str, Any], why: str) -> None:
    sell(shop, gpu(**changes), GOOD, GOOD)
    offers, dropped = await shop.offers()
    assert {offer.accelerator for offer in offers.values()} == {"h100-sxm"}
    assert set(dropped) == {why, "listed twice"}


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": "24"}, {"memory": 24.0}, {"price": {"secure": "0.69"}}, {"maxCount": {"secure": "8"}},
        {"maxCount": {}}, {"cudaVersions": [None, {"version": None}, {"version": "12.8"}, {"version": "next"}]},
        {"cudaVersions": ["11.8", "12.8"]}, {"cudaVersions": "12.8"},
        {"cudaVersions": [{"version": "12.1"}, {"version": "12.8"}]}, {"manufacturer": None}, {"name": None},
        {"dataCenters": [None, {"id": "US-TX-1", "availability": "high"}]},
    ],
)  # fmt: skip
async def test_unusual_forms_give_the_same_offer(shop: Shop, changes: dict[str, Any]) -> None:
    sell(shop, gpu())
    plain, _ = await shop.offers()
    sell(shop, gpu(**changes))
    odd, _ = await shop.offers()
    (first,), (second,) = plain.values(), odd.values()
    assert (first.id, first.usd_per_hour, first.gpu_memory_bytes, first.purchase, first.available) == (
        second.id, second.usd_per_hour, second.gpu_memory_bytes, second.purchase, second.available
    )  # fmt: skip


@pytest.mark.parametrize(
    ("level", "available"), [("LOW", True), ("NONE", False), ("none", False), (None, None), ("SCARCE", None), (3, None)]
)
async def test_stock_levels_that_are_not_known_promise_nothing(shop: Shop, level: object, available: object) -> None:
    sell(shop, gpu(dataCenters=[{"id": "US-TX-1", "availability": level}]))
    offers, _ = await shop.offers()
    assert [offer.available for offer in offers.values()] == [available]


async def test_of_a_type_listed_twice_the_dearer_counts(shop: Shop) -> None:
    sell(shop, gpu(), gpu(price={"secure": 0.9}), gpu(price={"secure": 0.1}))
    offers, dropped = await shop.offers()
    assert [offer.on_demand_usd_per_hour for offer in offers.values()] == [Decimal("0.9") + Decimal("0.013889")]
    assert dropped == {"listed twice": 2}


@pytest.mark.parametrize("live", [{"minVcpu": "8"}, {"minVcpu": None, "minMemory": "x"}, {"minMemory": -5}])
async def test_odd_limits_of_a_pod_cost_no_offer(shop: Shop, live: dict[str, Any]) -> None:
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, 0.3) | live)
    offers, dropped = await shop.offers()
    assert (len(offers), dropped) == (2, {})


@pytest.mark.parametrize(
    "answer",
    [
        {"pods": [pod()], "total": 2},
        {"pods": [pod()], "totalCount": "26"},
        {"pods": [pod()], "pagination": {"hasNextPage": False, "total": 26}},
        {"pods": [pod()], "pagination": {"hasNextPage": "true"}},
        {"pods": [], "error": "try later"},
        {"pods": [{"name": "x"}]},
        {"pods": [None]},
        {"pods": [pod(id=7)]},
        {"pods": {"pod1": pod()}},
        {"pods": None},
        {"title": "Internal", "status": 500, "detail": "try later"},
        [],
        None,
    ],
)
async def test_listings_that_may_be_incomplete_are_unknown(shop: Shop, answer: Any) -> None:
    shop.api.routes[PODS] = lambda body, query: web.json_response(answer)
    with pytest.raises(OutcomeUnknown):
        await shop.cloud().list()
    shop.retire(DELETE, GRAPHQL, status=500)
    with pytest.raises(OutcomeUnknown):
        await shop.cloud().destroy(HANDLE)


async def test_a_pod_on_two_pages_is_listed_once(shop: Shop) -> None:
    pages = {None: {"nextCursor": "c", "hasNextPage": True}, "c": {"nextCursor": "d", "hasNextPage": "false"}}
    shop.api.routes[PODS] = lambda body, query: {"pods": [pod()], "pagination": pages[query.get("cursor")]}
    assert [o.handle.id for o in await shop.cloud().list()] == ["pod1"]


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"gpu": {"id": RTX4090, "count": "1"}}, {"gpus": 1}),
        ({"gpu": {"id": 5, "count": None}}, {"gpus": None}),
        ({"gpu": "RTX 4090"}, {"accelerator": None}),
        ({"cost": "0.36"}, {"usd_per_hour": Decimal("0.36")}),
        ({"cost": float("nan")}, {"usd_per_hour": None}),
        ({"cost": -1}, {"usd_per_hour": None}),
        ({"cost": True}, {"usd_per_hour": None}),
        ({"cudaVersion": "unknown"}, {"fault": None}),
        ({"cudaVersion": 12.2}, {"fault": "the host's driver runs CUDA 12.2, older than 12.4"}),
        ({"status": "MIGRATING"}, {"state": InstanceState.UNKNOWN}),
        ({"status": None}, {"state": InstanceState.UNKNOWN}),
    ],
)
async def test_odd_facts_cost_no_pod_of_the_listing(shop: Shop, changes: dict[str, Any], facts: dict[str, Any]) -> None:
    shop.pods = [pod(**changes)]
    (listed,) = await shop.cloud().list()
    assert {name: getattr(listed, name) for name in facts} == facts


@pytest.mark.parametrize("body", [{"title": "Conflict", "status": 409, "detail": "busy"}, "<html>ok</html>"])
async def test_an_error_with_status_200_ends_no_pod(shop: Shop, body: Any) -> None:
    """The pod is then ended by GraphQL."""
    shop.pods = [pod()]
    shop.api.routes[DELETE] = lambda _, query: (
        web.json_response(body) if isinstance(body, dict) else web.Response(text=body)
    )
    await shop.cloud().destroy(HANDLE)
    assert shop.pods == []


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([{"message": "Unauthorized", "extensions": ["x"]}], Rejected),
        ([{"message": None, "extensions": {"code": "INTERNAL_SERVER_ERROR"}}], OutcomeUnknown),
        ("later", OutcomeUnknown),
        ({"message": "Unauthorized"}, Rejected),
    ],
)
async def test_graphql_errors_of_all_forms_are_read(shop: Shop, errors: Any, kind: type[Exception]) -> None:
    shop.retire(PODS)
    shop.api.routes[GRAPHQL] = lambda body, query: {"errors": errors}
    with pytest.raises(OutcomeUnknown, match="by GraphQL"):
        await shop.cloud().list()
    with pytest.raises(kind):
        await shop.cloud().account()


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("A100 SXM", "a100-80gb-sxm"), ("A100 PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"), ("A100 SXM 40GB", "a100-40gb"),
    ],
)  # fmt: skip
def test_names_with_a_size_keep_it(name: str, accelerator: str) -> None:
    assert accelerator_of(name) == accelerator
