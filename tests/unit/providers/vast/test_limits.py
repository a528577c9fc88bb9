"""Vast's rate limits: searches, pages, destroys and creates keep them, and a refusal loses no partial result."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from broker.domain.errors import Throttled
from broker.domain.instance import BootSpec
from broker.domain.offer import GpuAsk, Offer
from providers.common.market_rules import OfferFilter
from providers.skypilot.plugin.call_turns import FOLDER_VARIABLE, CallTurns, address_folder, slots_folder
from providers.skypilot.plugin.vastai_sdk import PACES, VastAI
from providers.vast.provider import VastCloud, VastConfig
from tests.unit.providers.answers import serving
from tests.unit.providers.clocks import InstantClock
from tests.unit.providers.vast.test_provider import BUNDLES, HANDLE, INSTALLATION, INSTANCES, World, ask, machine

REFUSAL = "API requests too frequent endpoint threshold"
DELETE = "DELETE /api/v0/instances/77/"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with serving() as api:
        world = World(api, tmp_path)
        yield world
        for cloud in world.clouds:
            await cloud.close()


def limited(world: World, route: str, calls: int, per_s: float) -> list[float]:
    """Refuse calls of a route above its limit as Vast does, by the test's clock; return the times of the refused."""
    answer, sent, refused = world.api.routes[route], deque[float](), list[float]()

    def check(body: Any, query: Any) -> Any:
        now = world.clock.monotonic()
        while sent and now - sent[0] >= per_s:
            sent.popleft()
        if len(sent) >= calls:
            refused.append(now)
            return web.Response(status=429, text=REFUSAL)
        sent.append(now)
        return answer(body, query)

    world.api.routes[route] = check
    return refused


def market(world: World) -> None:
    """Sell 64 asks for each search, as an account sees that gets 64 rows at most."""

    def search(body: Any, query: Any) -> Any:
        gpu = body.get("gpu_name", {}).get("eq", "RTX 4090")
        number = sum(map(ord, gpu)) * 100
        return {"offers": [ask(id=number + n, gpu_name=gpu, gpu_ram=24564, min_bid=None) for n in range(64)]}

    world.api.routes[BUNDLES] = search


async def poll(cloud: Any) -> list[Offer]:
    offer_filter = OfferFilter(GpuAsk())
    await cloud.rows(offer_filter)
    return offer_filter.offers


async def test_searches_are_spread_over_polls_and_their_answers_kept(world: World) -> None:
    market(world)
    refused = limited(world, BUNDLES, 10, 60.0)
    cloud = world.cloud()
    for _ in range(8):
        assert await poll(cloud)
        world.clock.advance(30)
    asked = {(body.get("gpu_name") or {}).get("eq") for _, body, _ in world.api.asked}
    assert len(asked) == 13  # every GPU was searched for, and so was the whole market
    assert not any(refused)


async def test_search_that_other_programs_used_up_costs_no_offer_found_before(world: World) -> None:
    market(world)
    cloud = world.cloud()
    before = await poll(cloud)
    world.api.routes[BUNDLES] = lambda body, query: web.Response(status=429, text=REFUSAL)
    world.clock.advance(30)
    after = await poll(cloud)
    assert {offer.id for offer in after} == {offer.id for offer in before}
    assert {offer.seen_at for offer in after} == {offer.seen_at for offer in before}
    world.clock.advance(600)
    with pytest.raises(Throttled):
        await poll(cloud)


def pages(world: World, count: int) -> None:
    rows = [machine(id=1000 + n, label="another") for n in range(count)]

    def answer(body: Any, query: Any) -> Any:
        at = int(query.get("after_token", 0))
        token = str(at + 25) if at + 25 < len(rows) else None
        return {"instances": rows[at : at + 25], "total_instances": len(rows), "next_token": token}

    world.api.routes[INSTANCES] = answer


@pytest.mark.parametrize("count", [26, 60, 100])
async def test_pages_of_a_listing_wait_for_their_turn(world: World, count: int) -> None:
    pages(world, count)
    limited(world, INSTANCES, 1, 1.0)
    cloud = world.cloud()
    for _ in range(3):
        assert await cloud.list() == []


def recorded(answer: Callable[[Any, Any], Any], clock: InstantClock, times: list[float]) -> Callable[[Any, Any], Any]:
    """Return the answer of a route that records the time of each call."""

    def record(body: Any, query: Any) -> Any:
        times.append(clock.monotonic())
        return answer(body, query)

    return record


async def test_daemon_and_skypilot_keep_each_limit_together(world: World) -> None:
    """SkyPilot's server calls with the same account. One clock records the calls of both."""
    pages(world, 10)
    market(world)
    world.api.routes[DELETE] = lambda body, query: {"success": True}
    clock, times = world.clock, {"listing": list[float](), "search": list[float](), "destroy": list[float]()}
    for kind, route in (("listing", INSTANCES), ("search", BUNDLES), ("destroy", DELETE)):
        world.api.routes[route] = recorded(world.api.routes[route], clock, times[kind])
    folder = address_folder(slots_folder(world.home), world.api.url)
    skypilot = {
        pace.name: CallTurns(
            folder / pace.name, pace.interval_s, clock.monotonic, clock.advance, lambda: 0.5,
            calls=pace.calls, longest_queue_s=pace.longest_queue_s,
        )
        for pace in PACES
    }  # fmt: skip
    cloud = world.cloud()
    for n in range(40):
        for kind in ("listing", "search", "destroy") if n % 3 else ():
            skypilot[kind].wait()
            times[kind].append(clock.monotonic())
        await cloud.list()
        with suppress(Throttled):
            await poll(cloud)
        await cloud.destroy(HANDLE)
    for kind, calls, per_s in (("listing", 1, 1.0), ("search", 10, 60.0), ("destroy", 1, 3.0)):
        assert len(times[kind]) > 40
        assert min(after - before for before, after in zip(times[kind], times[kind][calls:], strict=False)) >= per_s


async def test_searches_of_skypilots_client_use_up_the_daemons(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    market(world)
    monkeypatch.setenv(FOLDER_VARIABLE, str(slots_folder(world.home)))
    client = VastAI("test-key", world.api.url + "/")
    for _ in range(10):
        await asyncio.to_thread(client.search_offers)
    cloud = VastCloud(
        VastConfig(endpoint=world.api.url),
        installation=INSTALLATION, clock=world.clock, env={"VAST_API_KEY": "test-key"}, home=world.home,
    )  # fmt: skip
    world.clouds.append(cloud)
    with pytest.raises(Throttled, match="Vast accepts no search for another"):
        await poll(cloud)
    assert len(world.api.asked) == 10


async def test_refused_page_is_repeated_and_not_the_listing(world: World) -> None:
    """Another program of the account lists too, so a page is refused although ours kept the pace."""
    pages(world, 30)
    answer, refusals = world.api.routes[INSTANCES], iter([False, True, False])
    world.api.routes[INSTANCES] = lambda body, query: (
        web.Response(status=429, text=REFUSAL) if next(refusals) else answer(body, query)
    )
    assert await world.cloud().list() == []


async def test_destroys_wait_for_their_turn(world: World) -> None:
    world.api.routes[DELETE] = lambda body, query: {"success": True}
    limited(world, DELETE, 1, 3.0)
    cloud = world.cloud()
    for _ in range(5):
        await cloud.destroy(HANDLE)


async def test_creates_are_apart(world: World) -> None:
    offers, _ = await world.offers(ask())
    assert world.cloud().purchase(offers[0], BootSpec()).launch_interval_s == 4.5
