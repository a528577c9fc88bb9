"""Emulator of RunPod's GraphQL API: a real parser over the published fields, and pods with RunPod's states."""

import base64
import re
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from aiohttp import web
from graphql import DocumentNode, GraphQLError, OperationDefinitionNode, build_schema, execute, parse, validate
from graphql.language import FieldNode

from tests.clouds.bill import MONTH_H, TARIFFS
from tests.clouds.faults import Faults
from tests.clouds.machine import MachineSpec
from tests.clouds.runpod_market import DATA_CENTERS, GPUS, Pool, runpod_market
from tests.clouds.state import Rented, World

SDL = Path(__file__).with_name("schema") / "runpod.graphql"
SSH_PORTS_FROM = 41000
DISK_USD_PER_GB_MONTH = Decimal("0.10")
"""Price of a pod's volume, and of its container's disk while the pod runs (docs.runpod.io/pods/storage/types,
"Comparison").

The container's disk is billed only while the pod is running (docs.runpod.io/sdks/graphql/manage-pods)."""
CONTAINER_DISK_GB = 10
"""Default size of the container's disk, as in the SDK (runpod/api/ctl_commands.py)."""
OWN_CALLS = frozenset({"pod", "podStop", "podTerminate"})
"""Calls that a pod's own key permits, on this pod alone."""
NONE_LEFT = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)


class RunPodApi:
    """One account at RunPod."""

    def __init__(self, world: World, faults: Faults) -> None:
        self.world, self.faults = world, faults
        self.schema = build_schema(SDL.read_text(encoding="utf-8"))
        self._documents: dict[str, DocumentNode] = {}
        """Valid queries, parsed, by text."""
        self.gpus = {gpu.id: gpu for gpu in GPUS}
        self.pools = runpod_market()
        self.pub_key = ""
        self.templates: dict[str, dict[str, Any]] = {}
        self.registries: dict[str, dict[str, str]] = {}
        self.sell_instead: str | None = None
        """GPU type that the next pod gets instead of the type that it asks for."""
        self._root = {
            "myself": self._myself, "pod": self._pod, "gpuTypes": self._gpu_types,
            "dataCenters": lambda _: [_data_center(name) for name in DATA_CENTERS],
            "countryCodes": lambda _: sorted({pool.country for pool in self.pools}),
            "updateUserSettings": self._settings, "podFindAndDeployOnDemand": self._deploy,
            "podRentInterruptable": self._rent, "deployCpuPod": self._deploy_cpu, "podStop": self._stop,
            "podResume": self._resume, "podBidResume": self._resume, "podTerminate": self._terminate,
            "saveTemplate": self._save_template, "deleteTemplate": self._delete_template,
            "saveRegistryAuth": self._save_registry, "updateRegistryAuth": self._save_registry,
            "deleteRegistryAuth": lambda _, **gone: self.registries.pop(gone["registryAuthId"], None) and None,
        }  # fmt: skip

    @property
    def calls(self) -> Collection[str]:
        """Return the names of the calls, which are the fields of the root type."""
        return self._root.keys()

    def routes(self) -> Sequence[web.RouteDef]:
        return [web.post("/graphql", self._handle)]

    # -------------------------------------------------------------------------------------------------------- GraphQL

    async def _handle(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.query.get("api_key")
        root = self._root if key == self.world.api_key else self._own_calls(key)
        if root is None:
            return web.json_response({"errors": [{"message": "Unauthorized"}]}, status=401)
        asked = await request.json()
        document = self._documents.get(asked["query"])
        if document is None:
            try:
                document = parse(asked["query"])
            except GraphQLError as e:
                return self._refuse([e])
            if problems := validate(self.schema, document):
                return self._refuse(problems)
            self._documents[asked["query"]] = document

        async def carry_out() -> web.Response:
            done = execute(
                self.schema, document, root, variable_values=asked.get("variables"),
                operation_name=asked.get("operationName"),
            )  # fmt: skip
            result = done if not hasattr(done, "__await__") else await done
            return web.json_response(result.formatted)

        return await self.faults.around(request, "runpod", _call(document, asked.get("operationName")), carry_out)

    def _own_calls(self, key: str | None) -> dict[str, Any] | None:
        """Return the calls that a pod may make with its own key; None for an unknown key."""
        pods = (r.id for r in self.world.rented.values() if r.cloud == "runpod" and r.gone_at is None)
        pod = next((pod for pod in pods if key_of(pod) == key), None)

        def guarded(name: str, act: Any) -> Any:
            def carry_out(info: Any, **arguments: Any) -> Any:
                if name not in OWN_CALLS or arguments["input"]["podId"] != pod:
                    raise GraphQLError("Unauthorized")
                return act(info, **arguments)

            return carry_out

        return None if pod is None else {name: guarded(name, act) for name, act in self._root.items()}

    def _refuse(self, problems: Sequence[GraphQLError]) -> web.Response:
        for problem in problems:
            self.world.violate("runpod", problem.message)
        return web.json_response({"errors": [{"message": p.message} for p in problems]}, status=400)

    # --------------------------------------------------------------------------------------------------------- market

    def _gpu_types(self, _: Any, input: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        asked = input or {}
        wanted = [asked["id"]] if asked.get("id") else asked.get("ids") or list(self.gpus)
        return [self._gpu(self.gpus[name]) for name in wanted if name in self.gpus]

    def _gpu(self, gpu: Any) -> dict[str, Any]:
        pools = [pool for pool in self.pools if pool.gpu == gpu.id]
        secure, community = [p for p in pools if p.secure], [p for p in pools if not p.secure]
        return {
            "id": gpu.id, "displayName": gpu.name, "manufacturer": "Nvidia", "memoryInGb": gpu.memory_gb,
            "cudaCores": 0, "maxGpuCount": gpu.max_count, "secureCloud": bool(secure),
            "communityCloud": bool(community), "securePrice": _least(p.price for p in secure),
            "communityPrice": _least(p.price for p in community),
            "secureSpotPrice": _least(p.floor for p in secure),
            "communitySpotPrice": _least(p.floor for p in community),
            "oneWeekPrice": None, "oneMonthPrice": None, "threeMonthPrice": None,
            "maxGpuCountSecureCloud": gpu.max_count if secure else 0,
            "maxGpuCountCommunityCloud": gpu.max_count if community else 0,
            "lowestPrice": lambda _, input=None: self._lowest(gpu, input or {"gpuCount": 1}),
            "nodeGroupDatacenters": [_data_center(p.data_center) for p in secure if p.data_center and p.free],
        }  # fmt: skip

    def _lowest(self, gpu: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prices per GPU of the cheapest pool with enough free GPUs; without one, null except the name."""
        fitting = [p for p in self._fitting(gpu.id, asked) if asked.get("secureCloud") in {None, p.secure}]
        best = min(fitting, key=lambda p: p.price, default=None)
        counts = [n for n in range(1, gpu.max_count + 1) if any(p.free >= n for p in fitting)]
        return {
            "gpuName": gpu.name, "gpuTypeId": gpu.id, "minimumBidPrice": _least(p.floor for p in fitting),
            "uninterruptablePrice": best.price if best else None,
            "minVcpu": best.vcpus * asked["gpuCount"] if best else None,
            "minMemory": best.memory_gb * asked["gpuCount"] if best else None,
            "stockStatus": _stock(sum(p.free for p in fitting)), "compliance": None,
            "maxUnreservedGpuCount": counts[-1] if counts else 0, "availableGpuCounts": counts,
            "rentedCount": 0, "totalCount": sum(p.free for p in fitting), "rentalPercentage": 0.0,
            "minDownload": None, "minUpload": None, "minDisk": None,
            "countryCode": best.country if best else None, "supportPublicIp": True if best else None,
        }  # fmt: skip

    def _fitting(self, gpu: str, asked: Mapping[str, Any]) -> list[Pool]:
        count = asked.get("gpuCount") or 1
        return [
            p for p in self.pools
            if p.gpu == gpu and p.free >= count
            and asked.get("dataCenterId") in {None, p.data_center} and asked.get("countryCode") in {None, p.country}
            and p.vcpus * count >= (asked.get("minVcpuCount") or 0)
            and p.memory_gb * count >= (asked.get("minMemoryInGb") or 0)
        ]  # fmt: skip

    # ----------------------------------------------------------------------------------------------------------- pods

    def _myself(self, _: Any) -> dict[str, Any]:
        return {
            "id": f"user-{self.world.account}", "pubKey": self.pub_key, "networkVolumes": [], "clientBalance": 100.0,
            "currentSpendPerHr": 0.0, "spendLimit": 80.0, "podTemplates": list(self.templates.values()),
            "pods": [self._shown(r) for r in self.world.listed("runpod")],
        }  # fmt: skip

    def _pod(self, _: Any, input: Mapping[str, Any]) -> dict[str, Any] | None:
        shown = [self._shown(r) for r in self.world.listed("runpod") if r.id == input["podId"]]
        return shown[0] if shown else None

    def _shown(self, rented: Rented) -> dict[str, Any]:
        asked, pool, gpu = rented.request, rented.facts["pool"], self.gpus.get(rented.gpu)
        per_hour, up = float(rented.usd_per_hour), rented.status == "RUNNING"
        age_s = int((self.world.now() - rented.created_at).total_seconds())
        return {
            "id": rented.id, "name": rented.name, "imageName": asked.get("imageName"),
            "env": [f"{pair['key']}={pair['value']}" for pair in asked.get("env") or []],
            "machineId": f"m-{rented.id}", "containerDiskInGb": asked.get("containerDiskInGb"),
            "containerRegistryAuthId": None, "costPerHr": per_hour, "adjustedCostPerHr": per_hour,
            "desiredStatus": rented.status, "dockerArgs": asked.get("dockerArgs"), "dockerId": None,
            "gpuCount": rented.gpus, "lastStatusChange": None, "memoryInGb": pool.memory_gb * max(rented.gpus, 1),
            "podType": "INTERRUPTABLE" if rented.spot else "RESERVED", "port": None, "ports": asked.get("ports"),
            "uptimeSeconds": age_s if up else 0, "vcpuCount": pool.vcpus * max(rented.gpus, 1),
            "volumeInGb": asked.get("volumeInGb") or 0, "volumeMountPath": asked.get("volumeMountPath"),
            "createdAt": rented.created_at.isoformat(), "lastStartedAt": rented.created_at.isoformat(),
            "locked": False, "templateId": asked.get("templateId"),
            "runtime": {"uptimeInSeconds": age_s, "ports": ports_of(rented)} if up else None,
            "machine": {
                "podHostId": f"{rented.id}-host", "gpuDisplayName": gpu.name if gpu else None, "gpuTypeId": rented.gpu,
                "location": pool.country, "dataCenterId": pool.data_center, "secureCloud": pool.secure,
                "costPerHr": per_hour,
            },
        }  # fmt: skip

    async def _deploy(self, _: Any, input: Mapping[str, Any]) -> dict[str, Any]:
        return await self.sell(input, bid=None)

    async def _rent(self, _: Any, input: Mapping[str, Any]) -> dict[str, Any]:
        return await self.sell(input, bid=Decimal(str(input["bidPerGpu"])))

    async def _deploy_cpu(self, _: Any, input: Mapping[str, Any]) -> dict[str, Any]:
        raise GraphQLError(NONE_LEFT)

    async def sell(self, asked: Mapping[str, Any], *, bid: Decimal | None) -> dict[str, Any]:
        self.world.sale("runpod")
        if asked.get("gpuTypeId") not in self.gpus:
            raise GraphQLError("The GPU type does not exist.")
        tiers = {"SECURE": {True}, "COMMUNITY": {False}}.get(asked.get("cloudType") or "ALL", {True, False})
        pools = [p for p in self._fitting(asked["gpuTypeId"], asked) if p.secure in tiers]
        if bid is not None:
            spot = [p for p in pools if p.floor is not None]
            pools = [p for p in spot if Decimal(str(p.floor)) <= bid]
            if spot and not pools:
                raise GraphQLError("Your bid is below the minimum bid price.")
        if not pools:
            raise GraphQLError(NONE_LEFT)
        pool = min(pools, key=lambda p: p.price)
        rented = self._sold(pool, asked, bid)
        pool.free -= rented.gpus
        await self.world.rent(rented, billed_from=TARIFFS["runpod"].billed_from, running="RUNNING")
        return self._shown(rented)

    def _sold(self, pool: Pool, asked: Mapping[str, Any], bid: Decimal | None) -> Rented:
        count, (ip, number) = asked.get("gpuCount") or 1, self.world.address()
        pod, gpu, self.sell_instead = f"pod{number:011d}", self.sell_instead or pool.gpu, None
        rate = bid if bid is not None else Decimal(str(pool.price))
        return Rented(
            id=pod, cloud="runpod", name=asked.get("name") or "", gpu=gpu, gpus=count, spot=bid is not None,
            usd_per_hour=rate * count, status="CREATED", created_at=self.world.now(), request=asked,
            disk_usd_per_hour=DISK_USD_PER_GB_MONTH * (asked.get("containerDiskInGb") or CONTAINER_DISK_GB) / MONTH_H,
            storage_usd_per_hour=DISK_USD_PER_GB_MONTH * (asked.get("volumeInGb") or 0) / MONTH_H,
            spec=MachineSpec(
                id=pod, user="root", ip=ip, ssh_port=SSH_PORTS_FROM + number, image=asked.get("imageName") or "",
                public_keys=tuple(line for line in self.pub_key.splitlines() if line),
                startup=startup_of(asked.get("dockerArgs") or ""),
                env={pair["key"]: pair["value"] for pair in asked.get("env") or []}
                | {"RUNPOD_POD_ID": pod, "RUNPOD_API_KEY": key_of(pod)},
            ),
            facts={"pool": pool},
        )  # fmt: skip

    async def _stop(self, _: Any, input: Mapping[str, Any]) -> dict[str, Any]:
        rented = self._owned(input)
        await self.world.stop(rented, "EXITED", "stopped")
        return self._shown(rented)

    async def _resume(self, _: Any, input: Mapping[str, Any]) -> dict[str, Any]:
        rented = self._owned(input)
        if "bidPerGpu" in input:
            rented.usd_per_hour = Decimal(str(input["bidPerGpu"])) * rented.gpus
        await self.world.resume(rented, starting="CREATED", running="RUNNING")
        return self._shown(rented)

    async def _terminate(self, _: Any, input: Mapping[str, Any]) -> None:
        await self.end(self._owned(input))

    async def end(self, rented: Rented) -> None:
        rented.facts["pool"].free += rented.gpus
        await self.world.destroy(rented, "TERMINATED")

    def _owned(self, input: Mapping[str, Any]) -> Rented:
        rented = self.world.owned("runpod", input["podId"])
        if rented is None:
            raise GraphQLError("pod not found")
        return rented

    # -------------------------------------------------------------------------------------------------------- account

    def _settings(self, _: Any, input: Mapping[str, Any]) -> dict[str, Any]:
        self.pub_key = input["pubKey"]
        return {"id": "user", "pubKey": self.pub_key}

    def _save_template(self, _: Any, input: Mapping[str, Any]) -> dict[str, Any]:
        template = {"id": f"template{len(self.templates)}", **input}
        self.templates[template["name"]] = template
        return template

    def _delete_template(self, _: Any, templateName: str) -> None:  # noqa: N803
        if self.templates.pop(templateName, None) is None:
            raise GraphQLError("template not found")

    def _save_registry(self, _: Any, input: Mapping[str, str]) -> dict[str, str]:
        registry = {"id": f"registry{len(self.registries)}", **input}
        self.registries[registry["id"]] = registry
        return registry


def key_of(pod: str) -> str:
    """Return a pod's key (docs.runpod.io/pods/templates/environment-variables: `Pod-scoped API key`)."""
    return f"own-key-of-{pod}"


def startup_of(docker_args: str) -> str:
    """Return the script in a pod's start command, decoded if it is SkyPilot's `echo <base64> | base64 --decode`."""
    found = re.search(r"echo (\S+) \| base64", docker_args)
    return base64.b64decode(found.group(1)).decode() if found else docker_args


def _call(document: DocumentNode, operation: str | None) -> str:
    """Return the first field of the operation: its name is the call's."""
    operations = [node for node in document.definitions if isinstance(node, OperationDefinitionNode)]
    chosen = next((o for o in operations if o.name is not None and o.name.value == operation), operations[0])
    fields = [node for node in chosen.selection_set.selections if isinstance(node, FieldNode)]
    return fields[0].name.value


def _least(prices: Any) -> float | None:
    return min((price for price in prices if price is not None), default=None)


def _stock(free: int) -> str | None:
    return None if free == 0 else "Low" if free < 4 else "Medium" if free < 16 else "High"


def _data_center(name: str) -> dict[str, Any]:
    country = DATA_CENTERS[name]
    return {
        "id": name, "name": name, "location": country, "listed": True, "storageSupport": True, "globalNetwork": False,
    }  # fmt: skip


def ports_of(rented: Rented) -> list[dict[str, Any]]:
    """Return the port mappings: public SSH, others behind RunPod's proxy, as SkyPilot needs one that is not public."""
    public = {"ip": rented.spec.ip, "isIpPublic": True, "privatePort": 22, "publicPort": rented.spec.ssh_port}
    asked = [int(part.split("/")[0]) for part in (rented.request.get("ports") or "").split(",") if "/http" in part]
    proxied = [
        {"ip": rented.spec.ip, "isIpPublic": False, "privatePort": port, "publicPort": 60000 + n, "type": "http"}
        for n, port in enumerate(asked)
    ]
    return [public | {"type": "tcp"}, *proxied]
