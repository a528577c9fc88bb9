"""Emulator of RunPod's REST API v2 over the account of the GraphQL API, and of either API's retirement."""

import json
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

from aiohttp import web
from graphql import GraphQLError

from tests.clouds.bill import Bill
from tests.clouds.faults import Faults
from tests.clouds.rest_api import Ask, JsonApi, Refusal
from tests.clouds.runpod_api import RunPodApi, key_of, ports_of
from tests.clouds.runpod_market import DATA_CENTERS, Pool
from tests.clouds.state import Rented, World

Api = Literal["rest", "graphql"]
CUDA = ("12.4", "12.6", "12.8")
"""CUDA versions of the emulated hosts."""
_STATUS = {"CREATED": "PROVISIONING", "RESTARTING": "STARTING", "PAUSED": "EXITED", "DEAD": "ERROR"}
"""Status of REST v2 by GraphQL's; the others are the same in both."""
_TITLES = {400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


class RunPodRest(JsonApi):
    """REST v2 of the account of `api`."""

    def __init__(self, world: World, faults: Faults, api: RunPodApi) -> None:
        super().__init__("runpod", world, faults)
        self._api = api
        self.page_size = 1000
        """Pods on a page of the listing. RunPod's own size is unknown."""
        self._ends: dict[Api, tuple[datetime, int]] = {}

    def retire(self, api: Api, at: datetime, status: int = 410) -> None:
        """End an API at a time. From then on, each of its calls is answered with the status."""
        self._ends[api] = (at, status)

    def routes(self) -> Sequence[web.RouteDef]:
        return [
            web.get("/v2/catalog/gpus", self.handle("listGpuTypes", self._gpus)),
            web.get("/v2/catalog/gpus/{id}", self.handle("getGpuType", self._gpu)),
            web.get("/v2/catalog/datacenters", self.handle("listDataCenters", self._centres)),
            web.get("/v2/pods", self.handle("listPods", self._pods)),
            web.post("/v2/pods", self.handle("createPod", self._create)),
            web.get("/v2/pods/{id}", self.handle("getPod", self._pod)),
            web.delete("/v2/pods/{id}", self.handle("deletePod", self._delete)),
            web.get("/v2/billing/pods", self.handle("listPodBilling", self._billing)),
        ]

    @web.middleware
    async def retirement(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answer for a retired API."""
        api: Api = "graphql" if request.path == "/graphql" else "rest"
        at, status = self._ends.get(api, (None, 0))
        if at is not None and at <= self.world.now() and (api == "graphql" or request.path.startswith("/v2/")):
            return web.Response(status=status, text=json.dumps({"message": "This API has been retired"}))
        answer: web.StreamResponse = await handler(request)
        return answer

    def error(self, refusal: Refusal) -> web.Response:
        problem = {"title": _TITLES[refusal.status], "status": refusal.status, "detail": refusal.message}
        return web.json_response(problem, status=refusal.status, content_type="application/problem+json")

    def authorised(self, request: web.Request) -> bool:
        """Accept the account's key, and a pod's own key for this pod. Unknown: whether RunPod's REST v2 accepts it."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        pod = request.match_info.get("id")
        of_pod = pod is not None and self.world.owned("runpod", pod) is not None and key == key_of(pod)
        return key == self.world.api_key or of_pod

    # ------------------------------------------------------------------------------------------------------ catalogue

    async def _gpus(self, ask: Ask) -> Any:
        if "include" in ask.query and "product" not in ask.query:
            raise Refusal(400, "", "include=AVAILABILITY requires product")
        return {"gpus": [self._shown_gpu(gpu, ask.query) for gpu in self._api.gpus.values()]}

    async def _gpu(self, ask: Ask) -> Any:
        if (gpu := self._api.gpus.get(ask.path["id"])) is None:
            raise Refusal(404, "", "resource not found")
        return self._shown_gpu(gpu, {})

    def _shown_gpu(self, gpu: Any, query: Any) -> dict[str, Any]:
        pools = [pool for pool in self._api.pools if pool.gpu == gpu.id]
        tiers = {"secure": [p for p in pools if p.secure], "community": [p for p in pools if not p.secure]}
        shown: dict[str, Any] = {
            "id": gpu.id, "name": gpu.name, "pool": None, "manufacturer": "NVIDIA", "memory": gpu.memory_gb,
            "secure": bool(tiers["secure"]), "community": bool(tiers["community"]),
            "price": {tier: min((p.price for p in own), default=0) for tier, own in tiers.items()},
            "maxCount": {tier: gpu.max_count if own else 0 for tier, own in tiers.items()},
        }  # fmt: skip
        shown["price"]["serverless"] = 9.9
        if "include" not in query:
            return shown
        count = query.get("count", 1)
        fitting = [p for p in tiers[query.get("cloud", "SECURE").lower()] if p.free >= count]
        shown["availability"] = _level(sum(p.free for p in fitting))
        if fitting:
            shown["dataCenters"] = [
                {"id": _place(p), "name": _place(p), "availability": _level(p.free)} for p in fitting
            ]
        floor = query.get("minCudaVersion", 0)
        shown["cudaVersions"] = [{"version": v, "available": bool(fitting)} for v in CUDA if float(v) >= floor]
        return shown

    async def _centres(self, _: Ask) -> Any:
        return {
            "dataCenters": [
                {
                    "id": name, "name": name, "region": "EUROPE" if name.startswith("EU") else "NORTH_AMERICA",
                    "globalNetwork": False, "networkVolumeTypes": ["STANDARD"], "compliance": [],
                }
                for name in DATA_CENTERS
            ]
        }  # fmt: skip

    # ----------------------------------------------------------------------------------------------------------- pods

    async def _pods(self, ask: Ask) -> Any:
        start = int(ask.query.get("cursor", 0))
        pods = [self._shown(r) for r in self.world.listed("runpod")]
        end = start + min(self.page_size, ask.query.get("limit", self.page_size))
        more = end < len(pods)
        return {
            "pods": pods[start:end],
            "pagination": {"nextCursor": str(end) if more else None, "hasNextPage": more},
        }  # fmt: skip

    async def _pod(self, ask: Ask) -> Any:
        found = [r for r in self.world.listed("runpod") if r.id == ask.path["id"]]
        if not found:
            raise Refusal(404, "", "pod not found")
        return self._shown(found[0])

    async def _create(self, ask: Ask) -> Any:
        body, gpu = ask.body, ask.body["gpu"]
        asked = {
            "name": body["name"], "imageName": body.get("image"), "gpuTypeId": gpu["id"],
            "gpuCount": gpu.get("count", 1), "cloudType": body.get("cloud", "SECURE"),
            "dataCenterId": (body.get("dataCenterIds") or [None])[0],
            "containerDiskInGb": body.get("disk"), "dockerArgs": body.get("args"),
            "ports": ",".join(body.get("ports") or []), "minCudaVersion": gpu.get("minCudaVersion"),
            "env": [{"key": key, "value": value} for key, value in (body.get("env") or {}).items()],
        }  # fmt: skip
        try:
            pod = await self._api.sell(asked, bid=None)
        except GraphQLError as e:
            raise Refusal(400, "", e.message) from None
        return self._shown(self.world.rented[pod["id"]])

    async def _delete(self, ask: Ask) -> Any:
        rented = self.world.owned("runpod", ask.path["id"])
        if rented is None:
            raise Refusal(404, "", "pod not found")
        await self._api.end(rented)
        return None

    def _shown(self, rented: Rented) -> dict[str, Any]:
        asked, pool, up = rented.request, rented.facts["pool"], rented.status == "RUNNING"
        direct = {
            "host": rented.spec.ip, "port": rented.spec.ssh_port, "username": "root",
            "command": f"ssh root@{rented.spec.ip} -p {rented.spec.ssh_port}",
        }  # fmt: skip
        runtime = [
            {"private": p["privatePort"], "public": p["publicPort"], "type": p["type"], "ip": p["ip"]}
            for p in ports_of(rented)
        ]
        age_s = int((self.world.now() - rented.created_at).total_seconds())
        is_billed = rented.status not in ("EXITED", "TERMINATED")
        return {
            "id": rented.id, "name": rented.name, "image": asked.get("imageName") or "",
            "args": asked.get("dockerArgs") or "", "disk": asked.get("containerDiskInGb") or 0, "registry": None,
            "ports": [port for port in (asked.get("ports") or "").split(",") if port],
            "env": {pair["key"]: pair["value"] for pair in asked.get("env") or []},
            "status": _STATUS.get(rented.status, rented.status), "actions": ["terminate"], "mounts": {},
            "gpu": {
                "id": rented.gpu, "count": rented.gpus, "vcpuCount": pool.vcpus * rented.gpus,
                "memory": pool.memory_gb * rented.gpus,
            },
            "cloud": "SECURE" if pool.secure else "COMMUNITY", "dataCenterId": pool.data_center,
            "cudaVersion": rented.facts.get("cuda", CUDA[-1]), "ssh": {"proxy": None, "direct": direct if up else None},
            "template": None, "cost": float(rented.usd_per_hour) if is_billed else 0,
            "locked": False, "globalNetworking": {"enabled": False},
            "runtime": {"uptime": age_s, "ports": runtime} if up else None,
            "createdAt": rented.created_at.isoformat(), "startedAt": rented.created_at.isoformat(),
        }  # fmt: skip

    async def _billing(self, ask: Ask) -> Any:
        """Return one record for each pod, from its creation until now."""
        now = self.world.now()
        pods = [r for r in self.world.rented.values() if r.cloud == "runpod"]
        bills = {r.id: Bill([e for e in self.world.events if e.id == r.id], now).usd() for r in pods}
        records = [
            {
                "startTime": rented.created_at.isoformat(), "endTime": now.isoformat(), "podId": rented.id,
                **_amounts(bills[rented.id]),
            }
            for rented in pods
            if ask.query.get("podId") in {None, rented.id}
        ]  # fmt: skip
        return {
            "records": records,
            "metadata": {
                "query": {}, "recordCount": len(records), "uniquePodCount": len(records),
                "totals": _amounts(sum(bills.values(), Decimal(0))),
            },
        }  # fmt: skip


def _amounts(total: Decimal) -> dict[str, float]:
    return {"totalAmount": float(total), "gpuAmount": float(total), "cpuAmount": 0, "diskAmount": 0}


def _place(pool: Pool) -> str:
    """Return a pool's data centre; a community host is shown under a centre of its country (assumed)."""
    return pool.data_center or f"{pool.country}-COMMUNITY-1"


def _level(free: int) -> str:
    return "NONE" if free == 0 else "LOW" if free < 4 else "MEDIUM" if free < 16 else "HIGH"
