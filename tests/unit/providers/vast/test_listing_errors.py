"""Vast's listings in unusual forms: a listing that may be incomplete proves nothing; an odd fact costs itself alone."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected, Throttled
from broker.domain.instance import InstanceState
from tests.unit.providers.answers import serving
from tests.unit.providers.vast.test_provider import HANDLE, INSTANCES, World, machine


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with serving() as api:
        world = World(api, tmp_path)
        yield world
        for cloud in world.clouds:
            await cloud.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"instances": [], "total_instances": "3"},
        {"instances": [], "total_instances": 3.0},
        {"instances": [], "success": "false"},
        {"instances": [], "success": 0},
        {"instances": [{"id": None}]},
        {"instances": [{"id": ""}]},
        {"instances": [{"id": [7]}]},
        {"instances": [{"id": True}]},
        {"instances": ["7"]},
        {"instances": {"7": {}}},
        {"instances": [], "next_token": {"at": 25}},
        {"instances": [], "next_token": True},
        {"instances": [], "msg": "try later", "error": "busy"},
    ],
)
async def test_listings_that_may_be_incomplete_are_unknown(world: World, answer: Any) -> None:
    world.api.routes[INSTANCES] = lambda body, query: answer
    with pytest.raises(OutcomeUnknown):
        await world.cloud().list()


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (200, "<html>ok</html>", OutcomeUnknown),
        (200, "", OutcomeUnknown),
        (200, "[]", OutcomeUnknown),
        (200, "null", OutcomeUnknown),
        (403, '{"error": "spend limit reached"}', Rejected),
        (403, '{"detail": "API requests too frequent"}', Throttled),
        (404, '{"instances": []}', OutcomeUnknown),
        (500, '{"instances": []}', OutcomeUnknown),
    ],
)
async def test_answers_that_are_no_listing_have_an_error(
    world: World, status: int, text: str, kind: type[ProviderError]
) -> None:
    world.api.routes[INSTANCES] = lambda body, query: web.Response(status=status, text=text)
    with pytest.raises(kind) as e:
        await world.cloud().list()
    assert e.type is kind


@pytest.mark.parametrize("last", [None, "", False])
async def test_an_empty_last_page_ends_the_listing(world: World, last: object) -> None:
    pages = {None: ([machine()], "25"), "25": ([], last)}

    def answer(body: Any, query: Any) -> Any:
        rows, token = pages[query.get("after_token")]
        return {"instances": rows, "total_instances": 1, "next_token": token}

    world.api.routes[INSTANCES] = answer
    assert [o.handle.id for o in await world.cloud().list()] == ["77"]


async def test_a_page_that_repeats_itself_is_not_read_for_ever(world: World) -> None:
    world.api.routes[INSTANCES] = lambda body, query: {"instances": [machine()], "next_token": "25"}
    with pytest.raises(OutcomeUnknown):
        await world.cloud().list()
    assert len(world.api.asked) == 2


async def test_an_instance_on_two_pages_is_listed_once(world: World) -> None:
    world.listing(machine(), machine(id="77"), total_instances=1)
    assert [o.handle.id for o in await world.cloud().list()] == ["77"]


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"num_gpus": "1"}, {"gpus": 1}),
        ({"num_gpus": "one"}, {"gpus": None}),
        ({"gpu_ram": "24564"}, {"gpu_memory_bytes": 24564 * 1024**2}),
        ({"gpu_ram": float("nan")}, {"gpu_memory_bytes": None}),
        ({"dph_total": "0.2139"}, {"usd_per_hour": Decimal("0.2139")}),
        ({"dph_total": float("nan")}, {"usd_per_hour": None}),
        ({"dph_total": -1}, {"usd_per_hour": None}),
        ({"dph_total": "free"}, {"usd_per_hour": None}),
        ({"is_bid": "false"}, {"spot": False}),
        ({"is_bid": "maybe"}, {"spot": None}),
        ({"gpu_name": 4090}, {"state": InstanceState.RUNNING}),
        ({"gpu_name": ["RTX 4090"]}, {"accelerator": None}),
        ({"start_date": "1764331200"}, {"created_at": datetime(2025, 11, 28, 12, tzinfo=UTC)}),
        ({"start_date": 1764331200000}, {"created_at": datetime(2025, 11, 28, 12, tzinfo=UTC)}),
        ({"start_date": 0}, {"created_at": None}),
        ({"start_date": "soon"}, {"created_at": None}),
        ({"actual_status": "RUNNING"}, {"state": InstanceState.RUNNING}),
        ({"actual_status": "Exited"}, {"state": InstanceState.STOPPED}),
        ({"intended_status": "Stopped"}, {"state": InstanceState.STOPPED}),
        ({"actual_status": "evacuating"}, {"state": InstanceState.UNKNOWN}),
        ({"actual_status": 3}, {"state": InstanceState.UNKNOWN}),
    ],
)
async def test_odd_facts_cost_no_machine_of_the_listing(
    world: World, changes: dict[str, Any], facts: dict[str, Any]
) -> None:
    world.listing(machine(**changes))
    (listed,) = await world.cloud().list()
    assert {name: getattr(listed, name) for name in facts} == facts


@pytest.mark.parametrize("success", [True, "true", 1])
async def test_a_destroy_is_confirmed_by_any_form_of_true(world: World, success: object) -> None:
    world.api.routes["DELETE /api/v0/instances/77/"] = lambda body, query: {"success": success}
    await world.cloud().destroy(HANDLE)


@pytest.mark.parametrize("answer", [{}, {"success": "false"}, {"success": None}, {"success": "done"}])
async def test_a_destroy_without_a_confirmation_is_unknown(world: World, answer: Any) -> None:
    world.api.routes["DELETE /api/v0/instances/77/"] = lambda body, query: answer
    with pytest.raises(OutcomeUnknown):
        await world.cloud().destroy(HANDLE)
