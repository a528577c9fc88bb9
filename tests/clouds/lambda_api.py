"""Emulator of Lambda's public cloud API, with the states booting, active, terminating and gone; no spot machines."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from aiohttp import web

from tests.clouds.bill import TARIFFS
from tests.clouds.faults import Faults
from tests.clouds.machine import MachineSpec
from tests.clouds.rest_api import Ask, JsonApi, Refusal
from tests.clouds.state import Rented, World

BASE = "/api/v1"


@dataclass(kw_only=True)
class LambdaType:
    """A row of the market."""

    name: str
    gpu: str
    """GPU name in the format of `gpu_description`, for example `H100 (80 GB PCIe)`."""
    gpus: int
    cents: int
    vcpus: int
    memory_gib: int
    storage_gib: int
    free: dict[str, int] = field(default_factory=dict)
    """Number of available machines by region."""


def lambda_market() -> list[LambdaType]:
    """Return rows as of 2026 (lambda.ai/pricing), few machines each."""
    return [
        LambdaType(
            name="gpu_1x_h100_pcie", gpu="H100 (80 GB PCIe)", gpus=1, cents=249, vcpus=26, memory_gib=225,
            storage_gib=1024, free={"us-west-3": 2},
        ),
        LambdaType(
            name="gpu_1x_h100_sxm5", gpu="H100 (80 GB SXM5)", gpus=1, cents=329, vcpus=26, memory_gib=225,
            storage_gib=2816, free={"us-east-1": 2, "us-south-3": 2},
        ),
        LambdaType(
            name="gpu_1x_a100_sxm4", gpu="A100 (40 GB SXM4)", gpus=1, cents=129, vcpus=30, memory_gib=220,
            storage_gib=512, free={"us-east-1": 2, "asia-south-1": 1},
        ),
        LambdaType(
            name="gpu_8x_a100_80gb_sxm4", gpu="A100 (80 GB SXM4)", gpus=8, cents=1432, vcpus=240, memory_gib=1800,
            storage_gib=20480, free={"us-midwest-1": 1},
        ),
        LambdaType(
            name="gpu_1x_gh200", gpu="GH200 (96 GB)", gpus=1, cents=149, vcpus=64, memory_gib=432, storage_gib=4096,
        ),
    ]  # fmt: skip


class LambdaApi(JsonApi):
    """One account at Lambda."""

    def __init__(self, world: World, faults: Faults) -> None:
        super().__init__("lambda", world, faults)
        self.types = {row.name: row for row in lambda_market()}
        self._keys_of: dict[int, dict[str, dict[str, str]]] = {}
        self.rules: list[dict[str, Any]] = []
        self.launch_interval_s = 0.0
        """Launches closer together than this are answered with 429 (the real API: about 12 s)."""
        self.sell_instead: str | None = None
        """Type that the next launch gets instead of the type that it asks for."""
        self._last_launch = float("-inf")

    @property
    def keys(self) -> dict[str, dict[str, str]]:
        """Return SSH keys of the account by name."""
        return self._keys_of.setdefault(self.world.account, {})

    def routes(self) -> Sequence[web.RouteDef]:
        return [
            web.get(f"{BASE}/instances", self.handle("instances", self._instances)),
            web.get(f"{BASE}/instances/{{id}}", self.handle("instance", self._instance)),
            web.get(f"{BASE}/instance-types", self.handle("instance-types", self._types)),
            web.get(f"{BASE}/ssh-keys", self.handle("ssh-keys", self._keys)),
            web.post(f"{BASE}/ssh-keys", self.handle("add-ssh-key", self._add_key)),
            web.delete(f"{BASE}/ssh-keys/{{id}}", self.handle("delete-ssh-key", self._delete_key)),
            web.get(f"{BASE}/firewall-rules", self.handle("firewall-rules", self._rules)),
            web.put(f"{BASE}/firewall-rules", self.handle("set-firewall-rules", self._set_rules)),
            web.post(f"{BASE}/instance-operations/launch", self.handle("launch", self._launch)),
            web.post(f"{BASE}/instance-operations/terminate", self.handle("terminate", self._terminate)),
        ]

    def error(self, refusal: Refusal) -> web.Response:
        code = "global/invalid-api-key" if refusal.status == 401 else refusal.code
        error = {"code": code, "message": refusal.message, "suggestion": ""}
        return web.json_response({"error": error}, status=refusal.status)

    # ------------------------------------------------------------------------------------------------------ reading

    async def _instances(self, _: Ask) -> Any:
        return {"data": [self._shown(r) for r in self.world.listed("lambda")]}

    async def _instance(self, ask: Ask) -> Any:
        for rented in self.world.listed("lambda"):
            if rented.id == ask.path["id"]:
                return {"data": self._shown(rented)}
        raise Refusal(404, "global/object-does-not-exist", "Specified instance does not exist.")

    async def _types(self, _: Ask) -> Any:
        return {
            "data": {
                row.name: {
                    "instance_type": _type(row),
                    "regions_with_capacity_available": [_region(name) for name, n in row.free.items() if n > 0],
                }
                for row in self.types.values()
            }
        }

    def _shown(self, rented: Rented) -> dict[str, Any]:
        return {
            "id": rented.id,
            "name": rented.name,
            "ip": None if rented.status == "booting" else rented.spec.ip,
            "private_ip": None if rented.status == "booting" else rented.spec.inner_ip,
            "status": rented.status,
            "hostname": rented.spec.ip,
            "ssh_key_names": list(rented.request["ssh_key_names"]),
            "file_system_names": [],
            "region": _region(rented.facts["region"]),
            "instance_type": _type(self.types[rented.facts["type"]]),
        }

    # ------------------------------------------------------------------------------------------------- keys and ports

    async def _keys(self, _: Ask) -> Any:
        return {"data": list(self.keys.values())}

    async def _add_key(self, ask: Ask) -> Any:
        if ask.body["name"] in self.keys:
            raise Refusal(400, "global/duplicate", "An SSH key with this name exists.")
        key = {"id": uuid.uuid4().hex, "name": ask.body["name"], "public_key": ask.body.get("public_key", "")}
        self.keys[key["name"]] = key
        return {"data": key}

    async def _delete_key(self, ask: Ask) -> Any:
        for name in [name for name, key in self.keys.items() if key["id"] == ask.path["id"]]:
            del self.keys[name]
        return {"data": {}}

    async def _rules(self, _: Ask) -> Any:
        return {"data": self.rules}

    async def _set_rules(self, ask: Ask) -> Any:
        self.rules = ask.body["data"]
        return {"data": self.rules}

    # ------------------------------------------------------------------------------------------- launch and terminate

    async def _launch(self, ask: Ask) -> Any:
        asked, now = ask.body, asyncio.get_running_loop().time()
        if now - self._last_launch < self.launch_interval_s:
            raise Refusal(429, "global/rate-limited", "Too many launch requests.")
        self._last_launch = now
        self.world.sale("lambda")
        row, region = self.types.get(asked["instance_type_name"]), asked["region_name"]
        if row is None:
            raise Refusal(400, "global/invalid-parameters", "Invalid instance type name.")
        keys = asked["ssh_key_names"]
        if len(keys) != 1 or keys[0] not in self.keys:
            raise Refusal(400, "global/object-does-not-exist", "Specify exactly one SSH key that exists.")
        if asked.get("quantity", 1) != 1:
            raise Refusal(400, "global/invalid-parameters", "Only one instance is launched at a time.")
        if row.free.get(region, 0) < 1:
            code = "instance-operations/launch/insufficient-capacity"
            raise Refusal(400, code, "Not enough capacity to fulfill launch request.")
        row.free[region] -= 1
        sold, self.sell_instead = self.types[self.sell_instead or row.name], None
        rented = self._sold(sold, region, asked, self.keys[keys[0]]["public_key"])
        await self.world.rent(rented, billed_from=TARIFFS["lambda"].billed_from, running="active")
        return {"data": {"instance_ids": [rented.id]}}

    def _sold(self, row: LambdaType, region: str, asked: dict[str, Any], key: str) -> Rented:
        machine_id, (ip, _) = uuid.uuid4().hex, self.world.address()
        return Rented(
            id=machine_id, cloud="lambda", name=asked.get("name") or "", gpu=row.gpu, gpus=row.gpus, spot=False,
            usd_per_hour=Decimal(row.cents) / 100, status="booting", created_at=self.world.now(), request=asked,
            spec=MachineSpec(id=machine_id, user="ubuntu", public_keys=(key,), ip=ip, ssh_port=22),
            facts={"type": row.name, "region": region, "asked_type": asked["instance_type_name"]},
        )  # fmt: skip

    async def _terminate(self, ask: Ask) -> Any:
        found = [self.world.owned("lambda", machine_id) for machine_id in ask.body["instance_ids"]]
        rented = [r for r in found if r is not None]
        if len(rented) < len(found):
            raise Refusal(404, "global/object-does-not-exist", "Specified instance does not exist.")
        for one in rented:
            self.types[one.facts["asked_type"]].free[one.facts["region"]] += 1
            await self.world.destroy(one, "terminating")
        return {"data": {"terminated_instances": [self._shown(one) for one in rented]}}


def _region(name: str) -> dict[str, str]:
    return {"name": name, "description": name}


def _type(row: LambdaType) -> dict[str, Any]:
    return {
        "name": row.name,
        "description": f"{row.gpus}x {row.gpu}",
        "gpu_description": row.gpu,
        "price_cents_per_hour": row.cents,
        "specs": {
            "vcpus": row.vcpus, "memory_gib": row.memory_gib, "storage_gib": row.storage_gib, "gpus": row.gpus,
        },
    }  # fmt: skip
