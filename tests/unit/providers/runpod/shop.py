"""RunPod's side for unit tests: a catalogue, bids and pods that a test sets, by both APIs."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from broker.domain.ids import Installation, InstanceName
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from providers.common.market_rules import OfferFilter
from providers.runpod.provider import RunpodCloud, RunpodConfig
from tests.unit.providers.answers import Api, serving
from tests.unit.providers.clocks import SteppedClock

NAME = InstanceName("gb-abcd-aaaaaaaaaaaaa")
HANDLE = Handle(provider="runpod", id="pod1", name=NAME)
GRAPHQL, GPUS, PODS = "POST /graphql", "GET /v2/catalog/gpus", "GET /v2/pods"
DELETE = "DELETE /v2/pods/pod1"
RTX4090, H100 = "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3"
PRICE = re.compile(
    r"(\w+): lowestPrice\(input: \{ gpuCount: (\d+), secureCloud: (true|false)"
    r'(?:, (?:dataCenterId|countryCode): "([\w-]+)")? \}\)'
)
TYPE = re.compile(r'(\w+): gpuTypes\(input: \{ id: "([^"]+)" \}\) \{(.*?)\} (?=\w+: gpuTypes|\}$)', re.S)


def price(on_demand: float | None, bid: float | None, stock: str | None = "High") -> dict[str, Any]:
    return {
        "uninterruptablePrice": on_demand, "minimumBidPrice": bid, "stockStatus": stock, "minVcpu": 8, "minMemory": 62,
    }  # fmt: skip


def gpu(gpu_id: str, gb: int, most: int = 8) -> dict[str, Any]:
    return {
        "id": gpu_id, "name": gpu_id, "manufacturer": "NVIDIA", "memory": gb,
        "maxCount": {"secure": most, "community": most},
    }  # fmt: skip


class Shop:
    """RunPod's side: `prices` by (GPU, count, secure, place); place None is the lowest of all places."""

    def __init__(self, api: Api, home: Path) -> None:
        self.types = [gpu(RTX4090, 24), gpu(H100, 80, most=2)]
        self.zones: list[Any] = [{"id": "US-TX-1"}, {"id": "EU-RO-1"}]
        self.prices: dict[tuple[str, int, bool, str], Any] = {}
        self.cuda: list[Any] = [{"version": "12.4", "available": True}, {"version": "12.8", "available": False}]
        self.pods: list[dict[str, Any]] = []
        self.balance = 25.0
        self.errors: list[Any] = []
        self.queries: list[dict[str, str]] = []
        self.api, self.home = api, home
        self.clouds: list[RunpodCloud] = []
        api.routes |= {
            GRAPHQL: self.answer, GPUS: self.catalogue, PODS: lambda _, query: {"pods": self.pods},
            "GET /v2/catalog/datacenters": lambda _, query: {"dataCenters": self.zones}, DELETE: self.delete,
        }  # fmt: skip

    def sell(self, gpu_id: str, count: int, place: str, offered: Any, *, secure: bool = True) -> None:
        self.prices[gpu_id, count, secure, place] = offered

    def catalogue(self, _: Any, query: Any) -> Any:
        self.queries.append(dict(query))
        count, secure = int(query["count"]), query["cloud"] == "SECURE"
        tier = query["cloud"].lower()
        found = []
        for kind in self.types:
            sold = {
                place: price for (gpu_id, n, is_secure, place), price in self.prices.items()
                if (gpu_id, n, is_secure) == (kind["id"], count, secure)
            }  # fmt: skip
            centres = [
                {"id": place if secure else f"{place}-1", "availability": (price["stockStatus"] or "none").upper()}
                for place, price in sold.items()
            ]
            per_gpu = next((price["uninterruptablePrice"] for price in sold.values()), None)
            found.append(kind | {"price": {tier: per_gpu}, "dataCenters": centres, "cudaVersions": self.cuda})
        return {"gpus": found}

    def delete(self, _: Any, query: Any) -> Any:
        self.pods = [pod for pod in self.pods if pod["id"] != "pod1"]
        return web.Response(status=204)

    def retire(self, *routes: str, status: int = 410) -> None:
        for route in routes:
            self.api.routes[route] = lambda body, query: web.Response(status=status, text='{"message": "retired"}')

    def answer(self, body: Any, _: Any) -> Any:
        query = body["query"]
        if self.errors:
            return {"errors": self.errors}
        if "podTerminate" in query:
            self.pods = [pod for pod in self.pods if f'"{pod["id"]}"' not in query]
            return {"data": {"podTerminate": None}}
        if "myself" in query:
            return {"data": {"myself": {"pods": self.pods, "id": "u", "clientBalance": self.balance}}}
        return {"data": {alias: [self._priced(gpu_id, asked)] for alias, gpu_id, asked in TYPE.findall(query)}}

    def _priced(self, gpu_id: str, asked: str) -> dict[str, Any]:
        return {
            alias: self.prices.get((gpu_id, int(count), secure == "true", place), price(None, None, None))
            for alias, count, secure, place in PRICE.findall(asked)
        }

    def cloud(self, *, key: str = "test-key", **config: Any) -> RunpodCloud:
        cloud = RunpodCloud(
            RunpodConfig(endpoint=self.api.url, **config), installation=Installation("abcd"), clock=SteppedClock(),
            env={"RUNPOD_API_KEY": key} if key else {}, home=self.home,
        )  # fmt: skip
        self.clouds.append(cloud)
        return cloud

    async def offers(self, **config: Any) -> tuple[dict[str, Offer], dict[str, int]]:
        offer_filter = OfferFilter(GpuAsk())
        await self.cloud(**config).rows(offer_filter)
        return {offer.id: offer for offer in offer_filter.offers}, dict(offer_filter.dropped)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    async with serving() as api:
        shop = Shop(api, tmp_path)
        yield shop
        for cloud in shop.clouds:
            await cloud.close()


def pod(**changes: Any) -> dict[str, Any]:
    return {
        "id": "pod1", "name": f"{NAME}-1a2b3c4d-head", "status": "RUNNING", "cost": 0.36, "cudaVersion": "12.8",
        "gpu": {"id": RTX4090, "count": 1},
    } | changes  # fmt: skip


def graphql_pod(**changes: Any) -> dict[str, Any]:
    return {
        "id": "pod1", "name": f"{NAME}-1a2b3c4d-head", "desiredStatus": "RUNNING", "costPerHr": 0.36, "gpuCount": 1,
        "podType": "INTERRUPTABLE", "machine": {"gpuTypeId": None, "gpuDisplayName": "RTX 4090"},
    } | changes  # fmt: skip
