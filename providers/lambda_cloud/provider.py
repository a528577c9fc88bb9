"""Lambda Cloud provider: on-demand machines of fixed instance types, no spot; images run by `docker run`.

`GET /api/v1/instance-types` returns prices and capacity, but lists only regions that have capacity now.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from broker.domain.errors import Gone, OutcomeUnknown, ProviderError, Rejected
from broker.domain.formatting import unsold_regions
from broker.domain.ids import Installation
from broker.domain.instance import BootSpec, Caps, InstanceState, Observed
from broker.domain.job import Handle
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB, HostFacts, Offer
from broker.ports import Clock
from providers.common.bill_rules import BILL_RULES
from providers.common.cloud import Purchase
from providers.common.cloud_values import as_integer, positive, text
from providers.common.credentials import digest_of, key_help, key_of, sky_files, source_of
from providers.common.gpu_names import GB, accelerator
from providers.common.http_json import Rest
from providers.common.market_rules import OfferFilter, RawRow
from providers.common.skypilot_names import cluster_of, gpu_columns
from trainer.contract.base import Config

ENDPOINT = "https://cloud.lambda.ai"
REGIONS = frozenset({
    "asia-northeast-1", "asia-northeast-2", "asia-south-1", "australia-east-1", "europe-central-1", "me-west-1",
    "us-east-1", "us-east-2", "us-east-3", "us-midwest-1", "us-midwest-2", "us-south-1", "us-south-2", "us-south-3",
    "us-southeast-1", "us-west-1", "us-west-2", "us-west-3",
})  # fmt: skip
"""Regions by `PublicRegionCode` of docs.lambda.ai/api/cloud, because the API lists only regions with capacity."""
LAUNCH_INTERVAL_S = 12.0
"""Seconds between two launches, the limit of the API. SkyPilot retries with a delay if the API refuses a launch."""
CAPS = Caps(
    spot=False,
    list_lag_s=15.0,
    teardown_s=60.0,
    boot_s=420.0,
    boot_deadline_s=2400.0,
    billing_quantum_s=BILL_RULES["lambda"].quantum_s,
    multi_node=True,
    self_stop="none",
    calls_per_s=1.0,
    agent_start_s=600.0,
)
"""Capabilities of Lambda; billed by the minute, from healthy to terminated (docs.lambda.ai/public-cloud/billing).

The API allows one request per second (docs.lambda.ai/public-cloud/cloud-api, "Rate limiting").
"""
_STATES = {
    "booting": InstanceState.STARTING,
    "active": InstanceState.RUNNING,
    "unhealthy": InstanceState.RUNNING,
    "terminating": InstanceState.STOPPED,
    "terminated": InstanceState.GONE,
    "preempted": InstanceState.GONE,
}
_MEMORY = re.compile(r"(\d+) ?Gi?B\b ?", re.I)
_ABSENT = re.compile("object-does-not-exist")
_REFUSED = re.compile(r"api-key|unauthorized|forbidden", re.I)
_MORE = re.compile(r"next|cursor|page|more|truncat", re.I)
"""Names of fields that may announce a further page. The API has none (docs.lambda.ai/api/cloud)."""
_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, ArithmeticError)


class LambdaConfig(Config):
    """Settings of Lambda Cloud."""

    endpoint: str | None = None
    """`http://host:port` of a proxy or an emulator. Default: https://cloud.lambda.ai."""
    emulated: bool = False
    """true: the endpoint is an emulator whose machines compute on a CPU and cost nothing."""
    regions: tuple[str, ...] = ()
    """Regions to buy in; empty: all."""


class LambdaCloud:
    """Lambda implementation of `providers.common.cloud.Cloud`."""

    name = "lambda"
    caps = CAPS
    docker_run = True

    def __init__(
        self, config: LambdaConfig, *, installation: Installation, clock: Clock, env: Mapping[str, str], home: Path
    ) -> None:
        self._config = config
        self._installation = installation
        self._clock = clock
        self._env, self._home = env, home
        self._apis: dict[str, Rest] = {}

    async def rows(self, offer_filter: OfferFilter) -> None:
        known_regions = set(REGIONS)
        for kind in _instance_types(await self._call("GET", "/instance-types")):
            try:
                regions = _regions(kind, offer_filter)
                known_regions.update(regions)
                self._add_offers(kind, regions, offer_filter)
            except _UNREADABLE:
                offer_filter.drop("unreadable")
        offer_filter.report_unknown_regions("lambda", unsold_regions(self._config.regions, known_regions))

    def _add_offers(self, kind: Mapping[str, Any], regions: Sequence[str], offer_filter: OfferFilter) -> None:
        """Add an offer for each region that has capacity for the instance type."""
        if self._config.regions:
            regions = [region for region in regions if region in self._config.regions]
        machine = kind["instance_type"]
        if not regions:
            return
        if not offer_filter.takes(RawRow(gpu=_gpu(machine), gpus=machine["specs"].get("gpus"))):
            return
        cents = offer_filter.on_demand(machine["price_cents_per_hour"])
        if cents is None:
            if machine["price_cents_per_hour"] is None:
                offer_filter.drop("no price")
            return
        for region in regions:
            offer_filter.add(self._offer_in(machine, region, usd(cents / 100)))

    def _offer_in(self, machine: Mapping[str, Any], region: str, price: Decimal) -> Offer:
        specs = machine["specs"]
        gpu = _gpu(machine)
        memory = _memory_bytes(gpu)
        return Offer(
            id=f"lambda/lambda/{region}/{machine['name']}/on-demand",
            provider="lambda",
            cloud="lambda",
            region=region,
            instance_type=machine["name"],
            accelerator=_accelerator(gpu, memory),
            gpus=int(float(specs["gpus"])),
            gpu_memory_bytes=memory,
            vcpus=int(float(specs["vcpus"])),
            ram_bytes=int(float(specs["memory_gib"])) * GIB,
            disk_bytes=int(float(specs["storage_gib"])) * GIB,
            spot=False,
            usd_per_hour=price,
            on_demand_usd_per_hour=price,
            billing_quantum_s=CAPS.billing_quantum_s,
            billed_from=BILL_RULES["lambda"].billed_from,
            billing_minimum_s=BILL_RULES["lambda"].minimum_s,
            available=True,
            trust="secure",
            facts=HostFacts(
                disk_usd_per_gib_month=ZERO,
                ingress_usd_per_gib=ZERO,
                egress_usd_per_gib=ZERO,
                interconnect=_interconnect(gpu, int(float(specs["gpus"]))),
            ),
            seen_at=self._clock.now(),
        )

    async def list(self) -> Sequence[Observed]:
        machines = await self._call("GET", "/instances")
        if not isinstance(machines, list):
            raise OutcomeUnknown("Lambda: the answer is not a list of machines")
        observed = []
        for machine in machines:
            try:
                name = cluster_of(self._installation, machine.get("name"))
                if name is not None:
                    if (machine_id := text(machine["id"])) is None:
                        raise ValueError("it has no id")
                    region = text((machine.get("region") or {}).get("name")) or ""
                    handle = Handle(provider="lambda", id=machine_id, name=name, region=region)
                    observed.append(_observed(handle, machine))
            except _UNREADABLE as e:
                # A partial listing would prove the absence of the machines that are missing in it.
                raise OutcomeUnknown(f"Lambda: a machine of the listing cannot be read: {e!r}") from None
        return observed

    async def destroy(self, handle: Handle) -> None:
        try:
            await self._call("POST", "/instance-operations/terminate", {"instance_ids": [handle.id]})
        except Rejected as e:
            if _ABSENT.search(str(e)):
                raise Gone(f"Lambda has no machine {handle.id}") from None
            raise

    async def check(self) -> str | None:
        await self._call("GET", "/instances")
        return None

    def source(self) -> str:
        return source_of("lambda", self._env, self._home)

    async def credential(self) -> str:
        return digest_of(sky_files("lambda", self._env, self._home))

    async def account(self) -> Sequence[str]:
        """Return marks of the account: the digest of the API key, and the ids of the account's SSH keys.

        The API does not report the owner of an API key. The id of an SSH key is unique to an account. An account with
        machines has an SSH key, because each launch needs one; SkyPilot adds its own at the first launch.
        """
        credential = await self.credential()
        keys = await self._call("GET", "/ssh-keys")
        try:
            return (f"key {credential[:8]}", *sorted(f"SSH key {key['id']}" for key in keys))
        except _UNREADABLE as e:
            raise OutcomeUnknown(f"Lambda: the list of SSH keys cannot be read: {e!r}") from None

    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase:
        """Return the purchase of an offer.

        SkyPilot needs a row for the instance type in `lambda/vms.csv`. It queries the region's capacity itself.
        """
        row = {
            "InstanceType": offer.instance_type,
            **gpu_columns(offer),
            "Price": str(offer.usd_per_hour),
            "SpotPrice": "",
            "Region": offer.region,
        }
        return Purchase(
            cloud="lambda",
            region=offer.region,
            instance_type=offer.instance_type,
            use_spot=False,
            catalog={"lambda/vms.csv": [row]},
            launch_interval_s=LAUNCH_INTERVAL_S,
        )

    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        """Do nothing: the listing has all facts that Lambda reports."""

    async def close(self) -> None:
        for api in self._apis.values():
            await api.close()
        self._apis.clear()

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Call the API and return `data` of its answer. Reads the key at each call, so a new key needs no restart."""
        key = key_of("lambda", self._env, self._home).key
        if key not in self._apis:
            base = (self._config.endpoint or ENDPOINT) + "/api/v1"
            headers = {"Authorization": f"Bearer {key}"}
            self._apis[key] = Rest("Lambda", base, headers, key_help=key_help("lambda"), absent=_ABSENT)
        answer = await self._apis[key].call(method, path, body)
        if isinstance(answer, dict) and answer.get("error", False) not in (None, False, ""):
            raise _error(f"Lambda: {method} {path}", answer["error"])
        if isinstance(answer, dict) and any(value and _MORE.search(field) for field, value in answer.items()):
            raise OutcomeUnknown(f"Lambda: {method} {path}: the answer has pages of an unknown kind")
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict | list):
            raise OutcomeUnknown(f"Lambda: {method} {path}: the answer has no `data`")
        return data


def _error(call: str, error: Any) -> ProviderError:
    """Return the broker's error for an `error` field in an answer with status 200."""
    text = f"{error.get('code') or ''} {error.get('message') or ''}" if isinstance(error, dict) else str(error)
    message = " ".join(text.split())[:200]
    if _REFUSED.search(message):
        return Rejected(f"Lambda refuses the key ({message}): {key_help('lambda')}")
    return OutcomeUnknown(f"{call}: {message}")


def _regions(kind: Mapping[str, Any], offer_filter: OfferFilter) -> Sequence[str]:
    """Return the regions with capacity, each once. An unreadable region costs itself alone."""
    regions: dict[str, None] = {}
    for region in kind["regions_with_capacity_available"]:
        if isinstance(region, dict) and (name := text(region.get("name"))) is not None:
            regions[name] = None
        else:
            offer_filter.drop("unreadable")
    return list(regions)


def _instance_types(data: Any) -> Iterable[Any]:
    """Return the instance types of an answer, which is a list or a mapping by name."""
    return data.values() if isinstance(data, dict) else data


def _observed(handle: Handle, machine: Mapping[str, Any]) -> Observed:
    """Return a machine. Unreadable facts of its type count as not reported, because the machine exists all the same."""
    listed = machine.get("instance_type")
    kind = listed if isinstance(listed, dict) else {}
    gpu = _gpu(kind)
    memory = _memory_bytes(gpu) if _MEMORY.search(gpu) else None
    specs = kind.get("specs")
    cents = positive(kind.get("price_cents_per_hour"))
    return Observed(
        handle=handle,
        state=_STATES.get(machine.get("status", ""), InstanceState.UNKNOWN),
        accelerator=_accelerator(gpu, memory) if memory else None,
        gpus=as_integer(specs.get("gpus")) if isinstance(specs, dict) else None,
        gpu_memory_bytes=memory,
        spot=False,
        usd_per_hour=None if cents is None else usd(Decimal(str(kind["price_cents_per_hour"]).strip()) / 100),
    )


def _gpu(kind: Mapping[str, Any]) -> str:
    """Return the GPU's description, e.g. `A100 (80 GB SXM4)`.

    If the API omits it, it is taken from the machine's description, e.g. `8x A100 (80 GB SXM4)`.
    """
    description = text(kind.get("gpu_description"))
    if description and description != "N/A":
        return description
    return re.sub(r"^\d+x ", "", text(kind.get("description")) or "")


def _accelerator(gpu: str, memory_bytes: int | None) -> str:
    """Return the accelerator's name. The slug of an unknown GPU has no memory size."""
    return accelerator(_MEMORY.sub("", gpu), memory_bytes)


def _memory_bytes(gpu: str) -> int:
    """Return the bytes of one GPU. `80 GB` is read as 80 × 10⁹, because no such card has less."""
    match = _MEMORY.search(gpu)
    if match is None:
        raise ValueError(f"no memory in {gpu!r}")
    return int(match[1]) * GB


def _interconnect(gpu: str, gpus: int) -> str | None:
    if gpus < 2:
        return None
    return "nvlink" if "SXM" in gpu.upper() else "pcie"
