"""RunPod's pods by both APIs: read back, ended, and never absent without a whole listing."""

from decimal import Decimal
from typing import Any

import pytest
from aiohttp import web

from broker.domain.errors import Gone, OutcomeUnknown, Rejected, Throttled
from broker.domain.instance import BootSpec, InstanceState
from broker.domain.offer import GpuAsk
from providers.common.market_rules import OfferFilter
from providers.runpod.gpu_types import SKY_NAMES, accelerator_of
from tests.unit.providers.runpod.shop import (
    DELETE,
    GPUS,
    GRAPHQL,
    HANDLE,
    NAME,
    PODS,
    RTX4090,
    Shop,
    graphql_pod,
    pod,
    price,
    shop,
)

__all__ = ["shop"]


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ("PROVISIONING", InstanceState.STARTING),
        ("STARTING", InstanceState.STARTING),
        ("RUNNING", InstanceState.RUNNING),
        ("EXITED", InstanceState.STOPPED),
        ("ERROR", InstanceState.STOPPED),
        ("TERMINATED", InstanceState.STOPPED),
        ("WHAT_IS_THIS", InstanceState.UNKNOWN),
        (None, InstanceState.UNKNOWN),
    ],
)
async def test_pod_states_map_to_machine_states(shop: Shop, told: str | None, state: InstanceState) -> None:
    shop.pods = [pod(status=told)]
    (seen,) = await shop.cloud().list()
    assert seen.state is state
    assert (seen.handle.name, seen.handle.id) == (NAME, "pod1")
    assert (seen.fault is not None) == (told == "ERROR")


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ("CREATED", InstanceState.STARTING),
        ("RESTARTING", InstanceState.STARTING),
        ("RUNNING", InstanceState.RUNNING),
        ("PAUSED", InstanceState.STOPPED),
        ("EXITED", InstanceState.STOPPED),
        ("DEAD", InstanceState.STOPPED),
        ("TERMINATED", InstanceState.STOPPED),
        ("WHAT_IS_THIS", InstanceState.UNKNOWN),
    ],
)
@pytest.mark.parametrize("status", [404, 410])
async def test_graphql_lists_once_rest_is_retired(shop: Shop, told: str, state: InstanceState, status: int) -> None:
    shop.retire(PODS, status=status)
    shop.pods = [graphql_pod(desiredStatus=told)]
    (seen,) = await shop.cloud().list()
    assert (seen.state, seen.accelerator, seen.spot) == (state, "rtx4090", True)


async def test_listed_pods_are_read_back(shop: Shop) -> None:
    shop.pods = [
        pod(), pod(id="p2", gpu={"id": "NVIDIA A100-SXM4-80GB", "count": 2}, cost=3.28), pod(id="p3", cost=0, gpu=None),
        pod(id="p4", cudaVersion="12.2"), pod(id="p5", cudaVersion=None),
    ]  # fmt: skip
    one, two, bare, old, unsaid = await shop.cloud().list()
    assert (one.accelerator, one.gpus, one.spot, one.usd_per_hour) == ("rtx4090", 1, None, Decimal("0.36"))
    assert (two.accelerator, two.gpus, two.usd_per_hour) == ("a100-80gb-sxm", 2, Decimal("3.28"))
    assert (bare.accelerator, bare.gpus, bare.usd_per_hour) == (None, None, None)
    assert old.fault == "the host's driver runs CUDA 12.2, older than 12.4"
    assert (one.fault, unsaid.fault) == (None, None)


DISPLAY = {
    "NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H100 NVL": "H100 NVL", "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA GeForce RTX 5090": "RTX 5090", "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada", "NVIDIA RTX 5000 Ada Generation": "RTX 5000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000",
}  # fmt: skip


@pytest.mark.parametrize("gpu_id", DISPLAY)
def test_names_by_id_and_display_name_are_one(gpu_id: str) -> None:
    assert accelerator_of(gpu_id) == accelerator_of(DISPLAY[gpu_id])


@pytest.mark.parametrize(
    "other", ["RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "A100X", "RTX A1000", "NVIDIA H200 NVL"]
)
def test_names_of_other_types_match_no_sold_type(other: str) -> None:
    assert accelerator_of(other) not in {accelerator_of(gpu_id) for gpu_id in SKY_NAMES}


async def test_foreign_pods_are_not_ours_and_unreadable_ones_no_absence(shop: Shop) -> None:
    shop.pods = [pod(name="mine"), pod(id="p2", name="gb-zzzz-aaaaaaaaaaaaa-1a2b3c4d-head"), pod(id="p3")]
    assert [o.handle.id for o in await shop.cloud().list()] == ["p3"]
    shop.pods = [{"id": "p4"}]
    with pytest.raises(OutcomeUnknown):
        await shop.cloud().list()


async def test_every_page_of_pods_is_read(shop: Shop) -> None:
    pages = {
        "": {"pods": [pod()], "pagination": {"nextCursor": "a b", "hasNextPage": True}},
        "a b": {"pods": [pod(id="p2")], "pagination": {"nextCursor": None, "hasNextPage": False}},
    }  # fmt: skip
    shop.api.routes[PODS] = lambda _, query: pages[query.get("cursor", "")]
    assert [o.handle.id for o in await shop.cloud().list()] == ["pod1", "p2"]


@pytest.mark.parametrize(
    "more",
    [
        {"pagination": {"nextCursor": "same", "hasNextPage": True}},
        {"pagination": {"hasNextPage": True}},
        {"pagination": {}},
        {"pagination": "yes"},
        {"nextPageToken": "x"},
        {"truncated": True},
    ],
)
async def test_a_listing_without_an_end_proves_nothing(shop: Shop, more: dict[str, Any]) -> None:
    shop.api.routes[PODS] = lambda _, query: {"pods": [], **more}
    with pytest.raises(OutcomeUnknown):
        await shop.cloud().list()


async def test_destroy_ends_the_pod(shop: Shop) -> None:
    shop.pods = [pod(), pod(id="other")]
    await shop.cloud().destroy(HANDLE)
    assert [p["id"] for p in shop.pods] == ["other"]


def not_found(*_: Any) -> web.Response:
    return web.json_response({"title": "Not Found", "status": 404, "detail": "pod not found"}, status=404)


async def test_a_pod_not_found_is_gone_only_by_a_complete_listing(shop: Shop) -> None:
    shop.api.routes[DELETE] = not_found
    with pytest.raises(Gone):
        await shop.cloud().destroy(HANDLE)
    said = {"errors": [{"message": "Something went wrong. Please try again later."}], "data": {"podTerminate": None}}
    shop.api.routes[GRAPHQL] = lambda body, query: said
    shop.pods = [pod()]
    with pytest.raises(OutcomeUnknown, match="Something went wrong"):
        await shop.cloud().destroy(HANDLE)
    shop.pods = []
    shop.retire(PODS)
    with pytest.raises(OutcomeUnknown):
        await shop.cloud().destroy(HANDLE)


@pytest.mark.parametrize("status", [404, 410, 500, 403])
async def test_graphql_ends_what_rest_does_not(shop: Shop, status: int) -> None:
    shop.pods = [pod(), pod(id="other")]
    shop.retire(DELETE, status=status)
    await shop.cloud().destroy(HANDLE)
    assert [p["id"] for p in shop.pods] == ["other"]


@pytest.mark.parametrize("status", [404, 410])
async def test_two_retired_apis_prove_nothing(shop: Shop, status: int) -> None:
    shop.retire(PODS, DELETE, GRAPHQL, status=status)
    cloud = shop.cloud()
    for call in (cloud.list(), cloud.destroy(HANDLE)):
        with pytest.raises(OutcomeUnknown, match=str(status)):
            await call


async def test_a_retired_rest_is_reported(shop: Shop) -> None:
    shop.retire(PODS)
    said = await shop.cloud().check()
    assert said is not None
    assert "update gpubroker" in said


async def test_without_graphql_pods_are_listed_and_nothing_is_bought(shop: Shop) -> None:
    """SkyPilot 0.14.1 creates pods by GraphQL; the account is known by its key."""
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, 0.3))
    shop.pods = [pod()]
    cloud = shop.cloud()
    before = await cloud.account()
    shop.retire(GRAPHQL)
    assert set(before) & set(await cloud.account())
    assert len(await cloud.list()) == 1
    with pytest.raises(Rejected, match="SkyPilot"):
        await cloud.rows(OfferFilter(GpuAsk()))
    said = await cloud.check()
    assert said is not None
    assert "SkyPilot" in said


async def test_without_bids_there_is_no_spot(shop: Shop) -> None:
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, None))
    offers, dropped = await shop.offers()
    assert ([o.spot for o in offers.values()], dropped) == ([False], {})
    shop.errors = [{"message": 'Cannot query field "minimumBidPrice" on type "LowestPrice".'}]
    offers, dropped = await shop.offers()
    assert ([o.spot for o in offers.values()], dropped) == ([False], {})


async def test_the_cuda_floor_is_asked_for_and_bought(shop: Shop) -> None:
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, None))
    offers, _ = await shop.offers(cuda_min="12.6")
    assert {query["minCudaVersion"] for query in shop.queries} == {"12.6"}
    (offer,) = offers.values()
    assert shop.cloud(cuda_min="12.6").purchase(offer, BootSpec()).pin == {"cuda_min": "12.6", "cuda": "12.8"}


@pytest.mark.parametrize("regions", [(), ("US",), ("US", "XX")])
async def test_a_null_place_costs_one_offer(shop: Shop, regions: tuple[str, ...]) -> None:
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, None))
    shop.zones += [None, {"id": None}]
    good = shop.catalogue

    def catalogue(body: Any, query: Any) -> Any:
        answer = good(body, query)
        for kind in answer["gpus"]:
            if kind["dataCenters"]:
                kind["dataCenters"].append({"id": None, "availability": "HIGH"})
        return {"gpus": [None, *answer["gpus"]]}

    shop.api.routes[GPUS] = catalogue
    offers, dropped = await shop.offers(regions=regions, gpu_counts=(1,))
    assert [o.region for o in offers.values()] == ["US"]
    assert dropped["unreadable"] == 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "Unauthorized"}, Rejected),
        ({"message": "x", "extensions": {"code": "UNAUTHENTICATED"}}, Rejected),
        ({"message": "Cannot query field", "extensions": {"code": "GRAPHQL_VALIDATION_FAILED"}}, Rejected),
        ({"message": "Request failed with status code 401"}, Rejected),
        ({"message": "pod 403xq401ab8s cannot be found"}, OutcomeUnknown),
        ({"message": "machine 401 is being looked after"}, OutcomeUnknown),
        ({"message": "Too many requests"}, Throttled),
        ({"message": "Something went wrong"}, OutcomeUnknown),
        ("nonsense", OutcomeUnknown),
    ],
)
async def test_graphql_errors_become_provider_errors(shop: Shop, error: Any, kind: type[Exception]) -> None:
    shop.errors = [error]
    with pytest.raises(kind) as e:
        await shop.cloud().account()
    assert e.type is kind
    assert "\n" not in str(e.value)
    assert "test-key" not in str(e.value)


@pytest.mark.parametrize(
    ("status", "text", "kind", "says"),
    [
        (400, '{"title": "Bad Request", "status": 400, "detail": "no product"}', Rejected, "no product"),
        (422, '{"title": "x", "detail": "failed", "errors": ["$: bogus"]}', Rejected, r"failed; \$: bogus"),
        (402, '{"title": "x", "detail": "insufficient balance"}', Rejected, "pay in"),
        (403, '{"title": "Forbidden", "detail": "access denied"}', Rejected, "refuses the key"),
        (403, "<html>Attention Required</html>", OutcomeUnknown, "proxy"),
        (429, '{"title": "x", "detail": "minute window"}', Throttled, "429"),
        (500, "{}", OutcomeUnknown, "500"),
    ],
)
async def test_rest_errors_become_provider_errors(
    shop: Shop, status: int, text: str, kind: type[Exception], says: str
) -> None:
    shop.api.routes[PODS] = lambda body, query: web.Response(status=status, text=text)
    with pytest.raises(kind, match=says):
        await shop.cloud().list()


async def test_a_missing_or_refused_key_is_reported(shop: Shop) -> None:
    await shop.cloud().list()
    assert shop.api.asked[-1][2] == "Bearer test-key"
    with pytest.raises(Rejected, match="RUNPOD_API_KEY"):
        await shop.cloud(key="").list()
    shop.api.routes[PODS] = lambda body, query: web.Response(status=401)
    with pytest.raises(Rejected, match=r"refuses the key \(401\)"):
        await shop.cloud().list()


async def test_check_reports_the_accounts_state(shop: Shop) -> None:
    assert await shop.cloud().check() is None
    shop.balance = 0.25
    said = await shop.cloud().check()
    assert said is not None
    assert "$0.25" in said


@pytest.mark.parametrize("answer", [{"pods": None}, {"pods": {}}, {"data": {"myself": {}}}, [], {}])
async def test_an_answer_without_a_pod_list_is_refused(shop: Shop, answer: Any) -> None:
    shop.api.routes[PODS] = lambda body, query: answer
    with pytest.raises(OutcomeUnknown):
        await shop.cloud().list()
