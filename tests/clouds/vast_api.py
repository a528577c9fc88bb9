"""Emulator of Vast's API: an outbid instance stops, stays ours, and pays for its disk until it is destroyed."""

from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any

from aiohttp import web

from tests.clouds.bill import TARIFFS
from tests.clouds.faults import Faults
from tests.clouds.machine import MachineSpec
from tests.clouds.rest_api import Ask, JsonApi, Refusal
from tests.clouds.state import Rented, World
from tests.clouds.vast_market import VastOffer, storage_usd_per_hour, vast_market
from tests.clouds.vast_search import matching

V0, V1 = "/api/v0", "/api/v1"
PAGE = 25
"""Instances in one answer (vastai 1.9.1, vastai/api/instances.py asks for as many)."""
SEARCH_CAP = 64
"""Number of offers in one answer, regardless of `limit` (observed by open-source clients in 2026)."""
SSH_PORTS_FROM = 41000


class VastApi(JsonApi):
    """One account at Vast."""

    def __init__(self, world: World, faults: Faults) -> None:
        super().__init__("vast", world, faults)
        self.offers = {offer.id: offer for offer in vast_market()}
        self.search_cap: int | None = SEARCH_CAP
        self.keys: dict[int, dict[str, Any]] = {}
        self.sell_instead: int | None = None
        """Offer whose machine the next buyer gets instead of its choice."""
        self._next = 9000

    def routes(self) -> Sequence[web.RouteDef]:
        return [
            web.post(f"{V0}/bundles/", self.handle("bundles", self._bundles)),
            web.get(f"{V0}/ssh/", self.handle("show-ssh-keys", self._keys)),
            web.post(f"{V0}/ssh/", self.handle("create-ssh-key", self._add_key)),
            web.delete(f"{V0}/ssh/{{id}}/", self.handle("delete-ssh-key", self._delete_key)),
            web.put(f"{V0}/asks/{{id}}/", self.handle("create-instance", self._create)),
            web.get(f"{V1}/instances/", self.handle("instances", self._instances)),
            web.get(f"{V0}/instances/{{id}}/", self.handle("instance", self._instance)),
            web.put(f"{V0}/instances/{{id}}/", self.handle("change-instance", self._change)),
            web.delete(f"{V0}/instances/{{id}}/", self.handle("destroy-instance", self._destroy)),
            web.put(f"{V0}/instances/bid_price/{{id}}/", self.handle("change-bid", self._change_bid)),
            web.post(f"{V0}/instances/{{id}}/ssh/", self.handle("attach-ssh", self._attach)),
            web.get(f"{V0}/users/current", self.handle("user", self._user)),
            web.get(f"{V0}/users/current/", self.handle("user", self._user)),
        ]

    def authorised(self, request: web.Request) -> bool:
        """Accept the account's key, or an instance's own key for that instance alone."""
        if super().authorised(request) or request.query.get("api_key") == self.world.api_key:
            return True
        own = request.match_info.get("id", "")
        mine = self.world.owned("vast", own) is not None and request.path == f"{V0}/instances/{own}/"
        return mine and request.headers.get("Authorization") == f"Bearer {key_of(own)}"

    def error(self, refusal: Refusal) -> web.Response:
        code = "auth_error" if refusal.status == 401 else refusal.code
        return web.json_response({"success": False, "error": code, "msg": refusal.message}, status=refusal.status)

    # ------------------------------------------------------------------------------------------------------- reading

    async def _bundles(self, ask: Ask) -> Any:
        query = ask.body
        bid, gb = query.get("type") == "bid", query.get("allocated_storage", 5.0)
        rows = (offer.shown(bid=bid, allocated_gb=gb) for offer in self.offers.values())
        return {"offers": matching(rows, query, cap=self.search_cap)}

    async def _instances(self, ask: Ask) -> Any:
        filters = ask.query.get("select_filters") or {}
        rows = sorted((self._shown(r) for r in self.world.listed("vast")), key=lambda row: int(row["id"]))
        rows = [row for row in rows if all(_passes(row.get(name), test) for name, test in filters.items())]
        after = int(ask.query.get("after_token", 0))
        left = [row for row in rows if row["id"] > after]
        page = left[: min(int(ask.query.get("limit", PAGE)), PAGE)]
        token = str(page[-1]["id"]) if len(left) > len(page) else None
        return {"success": True, "instances": page, "next_token": token, "total_instances": len(rows)}

    async def _instance(self, ask: Ask) -> Any:
        for rented in self.world.listed("vast"):
            if rented.id == ask.path["id"]:
                return {"instances": self._shown(rented)}
        raise Refusal(404, "no_such_instance", "Instance not found.")

    def _shown(self, rented: Rented) -> dict[str, Any]:
        offer, up = self._offer_of(rented), rented.status == "running"
        stored = float(rented.storage_usd_per_hour)
        row = offer.shown(bid=rented.spot, allocated_gb=0)
        kept = (
            "machine_id", "host_id", "num_gpus", "gpu_name", "gpu_ram", "gpu_frac", "cuda_max_good", "driver_version",
            "cpu_cores_effective", "cpu_ram", "reliability2", "storage_cost", "min_bid", "geolocation", "hosting_type",
            "verification", "inet_down_cost", "inet_up_cost",
        )  # fmt: skip
        return {name: row[name] for name in kept} | {
            "id": int(rented.id), "label": rented.name, "actual_status": rented.status,
            "cur_state": rented.facts["state"], "next_state": rented.facts["state"],
            "intended_status": rented.facts["state"], "status_msg": None, "image_uuid": rented.request.get("image"),
            "image_runtype": rented.request.get("runtype", "ssh"), "disk_space": rented.facts["disk_gb"],
            "ssh_host": rented.spec.ip if up else None, "ssh_port": rented.spec.ssh_port if up else None,
            "public_ipaddr": rented.spec.ip, "local_ipaddrs": f"{rented.spec.ip} ",
            "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(rented.spec.ssh_port)}]} if up else {},
            "extra_env": [[name, value] for name, value in (rented.request.get("env") or {}).items()],
            "onstart": rented.request.get("onstart"), "start_date": rented.created_at.timestamp(), "end_date": None,
            "uptime_mins": (self.world.now() - rented.created_at) / timedelta(minutes=1), "is_bid": rented.spot,
            "dph_base": float(rented.usd_per_hour), "dph_total": float(rented.usd_per_hour) + stored,
            "storage_total_cost": stored, "template_hash_id": None,
        }  # fmt: skip

    def _offer_of(self, rented: Rented) -> VastOffer:
        offer: VastOffer = rented.facts["offer"]
        return offer

    async def _user(self, _: Ask) -> Any:
        return {"id": self.world.account, "email": "a@example.org", "credit": 100.0, "balance": 0.0, "username": "a"}

    # ---------------------------------------------------------------------------------------------------------- keys

    async def _keys(self, _: Ask) -> Any:
        return list(self.keys.values())

    async def _add_key(self, ask: Ask) -> Any:
        number = len(self.keys) + 1
        key = {"id": number, "public_key": ask.body["ssh_key"], "created_at": self.world.now().isoformat()}
        self.keys[number] = key
        return {"success": True, "key": key}

    async def _delete_key(self, ask: Ask) -> Any:
        if self.keys.pop(int(ask.path["id"]), None) is None:
            raise Refusal(404, "no_such_ssh_key", "The key was not found.")
        return {"success": True}

    async def _attach(self, ask: Ask) -> Any:
        self._owned(ask).facts.setdefault("attached_keys", []).append(ask.body["ssh_key"])
        return {"success": True}

    # ------------------------------------------------------------------------------------------------ rent and return

    async def _create(self, ask: Ask) -> Any:
        self.world.sale("vast")
        asked = ask.body
        offer = self.offers.get(int(ask.path["id"]))
        if offer is None or offer.rented:
            raise Refusal(410, "no_such_ask", f"Instance type by id {ask.path['id']} is not available.")
        if not asked.get("image") and not asked.get("template_hash_id"):
            raise Refusal(400, "invalid_args", "image or template_hash_id is needed")
        price = asked.get("price")
        if price is not None and price < offer.min_bid:
            raise Refusal(400, "bid_too_low", f"the bid is below {offer.min_bid}")
        if (asked.get("disk") or 10) > offer.disk_gb:
            raise Refusal(400, "invalid_args", f"the machine has {offer.disk_gb} GB of disk")
        sold, self.sell_instead = self.offers[self.sell_instead or offer.id], None
        offer.rented = sold.rented = True
        rented = self._sold(offer, sold, asked)
        await self.world.rent(rented, billed_from=TARIFFS["vast"].billed_from, running="running")
        return {"success": True, "new_contract": int(rented.id)}

    def _sold(self, offer: VastOffer, sold: VastOffer, asked: dict[str, Any]) -> Rented:
        self._next += 1
        (ip, number), price, disk = self.world.address(), asked.get("price"), float(asked.get("disk") or 10)
        return Rented(
            id=str(self._next), cloud="vast", name=asked.get("label") or "", gpu=sold.gpu, gpus=sold.gpus,
            spot=price is not None, status="loading", created_at=self.world.now(), request=asked,
            usd_per_hour=Decimal(str(offer.dph_base if price is None else price)),
            storage_usd_per_hour=Decimal(str(storage_usd_per_hour(offer.storage_cost, disk))),
            spec=MachineSpec(
                id=f"vast-{self._next}", user="root", ip=ip, ssh_port=SSH_PORTS_FROM + number,
                public_keys=tuple(key["public_key"] for key in self.keys.values()), startup=asked.get("onstart") or "",
                env=dict(asked.get("env") or {})
                | {"CONTAINER_ID": str(self._next), "CONTAINER_API_KEY": key_of(str(self._next))},
                image=asked.get("image") or "",
            ),
            facts={"offer": sold, "asked_offer": offer, "state": "running", "disk_gb": disk},
        )  # fmt: skip

    async def _destroy(self, ask: Ask) -> Any:
        rented = self._owned(ask)
        await self.world.destroy(rented, "exited")
        rented.facts["state"] = "stopped"
        for name in ("offer", "asked_offer"):
            rented.facts[name].rented = False
        return {"success": True}

    async def _change(self, ask: Ask) -> Any:
        rented, state = self._owned(ask), ask.body.get("state")
        if ask.body.get("label") is not None:
            rented.name = ask.body["label"]
        if state == "stopped":
            rented.facts["state"] = "stopped"
            await self.world.stop(rented, "stopped", "stopped")
        elif state == "running" and rented.facts["state"] == "stopped":
            rented.facts["state"] = "running"
            await self.world.resume(rented, starting="loading", running="running")
        return {"success": True}

    async def _change_bid(self, ask: Ask) -> Any:
        rented = self._owned(ask)
        if not rented.spot:
            raise Refusal(400, "invalid_args", "only an interruptible instance has a bid")
        self.world.reprice(rented, Decimal(str(ask.body["price"])))
        return {"success": True}

    def _owned(self, ask: Ask) -> Rented:
        rented = self.world.owned("vast", ask.path["id"])
        if rented is None:
            raise Refusal(404, "no_such_instance", "Instance not found.")
        return rented


def key_of(instance: str) -> str:
    """Return an instance's key (docs.vast.ai/guides/instances/docker-environment: CONTAINER_API_KEY)."""
    return f"own-key-of-{instance}"


def _passes(has: Any, test: dict[str, Any]) -> bool:
    return all(has == wants if operator == "eq" else has in wants for operator, wants in test.items())
