"""AWS's market: instance types, prices, quotas and spot placement scores, all from AWS's own APIs.

Each kind of fact is cached for as long as it is likely to hold, so a poll costs one call per region (spot prices).
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Generic, TypeVar

from broker.domain.errors import OutcomeUnknown, ProviderError
from broker.domain.money import usd
from broker.ports import Clock
from providers.aws.api import Aws
from providers.common.cloud_values import as_integer, number
from providers.common.gpu_names import accelerator
from providers.common.market_rules import RawRow, row_fault

K = TypeVar("K")
V = TypeVar("V")

MIB = 1024**2
PRICING_REGION = "us-east-1"
"""Region that serves the Pricing API; its answers cover all regions."""
HOUR_S = 3600.0
NOT_A_PRICE = Decimal("NaN")
"""Spot price that cannot be read; the filter of offers counts it."""
RETRY_S = 300.0
"""Seconds before a failed call is repeated; a failed call for spot prices is repeated at once."""
KNOWN_GPUS = frozenset({"h100-sxm", "h200-sxm", "b200", "a100-80gb-sxm", "a100-40gb", "l40s", "a10g", "l4"})
"""GPUs of the hardware table that AWS offers."""
FAMILIES = ("g*", "p*")
"""Patterns of the names of instance types with GPUs."""
_LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError)
_ON_DEMAND = {
    "operatingSystem": "Linux", "tenancy": "Shared", "capacitystatus": "Used", "preInstalledSw": "NA",
    "operation": "RunInstances",
}  # fmt: skip


class RequestCache(Generic[K, V]):
    """Cache of answers by key.

    Each key is loaded once per `keep_s` seconds. After a failed load its error is raised for `retry_s` without a call.
    """

    def __init__(
        self, clock: Clock, load: Callable[[K], Awaitable[V]], *, keep_s: float, retry_s: float = RETRY_S
    ) -> None:
        self._clock, self._load, self._keep_s, self._retry_s = clock, load, keep_s, retry_s
        self._values: dict[K, tuple[float, V]] = {}
        self._failures: dict[K, tuple[float, ProviderError]] = {}
        self._locks: dict[K, asyncio.Lock] = {}

    async def get(self, key: K) -> V:
        async with self._locks.setdefault(key, asyncio.Lock()):
            now = self._clock.monotonic()
            if key in self._values and now - self._values[key][0] < self._keep_s:
                return self._values[key][1]
            if key in self._failures and now - self._failures[key][0] < self._retry_s:
                raise self._failures[key][1]
            try:
                value = await self._load_value(key)
            except ProviderError as e:
                self._failures[key] = (now, e)
                raise
            self._values[key] = (now, value)
            return value

    async def _load_value(self, key: K) -> V:
        try:
            return await self._load(key)
        except _UNREADABLE as e:
            raise OutcomeUnknown(f"AWS: an answer about {key} cannot be read: {e!r}") from None

    async def get_or(self, key: K, default: V) -> V:
        try:
            return await self.get(key)
        except ProviderError:
            return default

    def last(self, key: K, default: V) -> V:
        """Return the last answer, however old; `default` before the first answer."""
        return self._values[key][1] if key in self._values else default


@dataclass(frozen=True, kw_only=True)
class AwsMachineType:
    """One instance type with GPUs."""

    name: str
    accelerator: str
    gpu: str
    """AWS's name of the GPU."""
    gpus: int
    gpu_memory_bytes: int
    vcpus: int
    ram_bytes: int
    network_mbit_s: float | None
    """Sum of the network cards' baseline bandwidth in Mbit/s; None: AWS does not report it."""
    spot: bool
    """True if AWS sells the type as spot."""
    on_demand: bool
    """True if AWS sells the type on demand."""


@dataclass(frozen=True, kw_only=True)
class InstanceTypes:
    """Instance types of a region, and the number of excluded types by reason."""

    machines: Mapping[str, AwsMachineType] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)


class AwsMarket:
    """Cached facts of AWS's market. `get` of a cache raises a ProviderError if AWS does not return the fact."""

    def __init__(self, aws: Aws, clock: Clock, regions: Sequence[str]) -> None:
        self._aws, self._clock, self._regions = aws, clock, tuple(regions)
        self.kinds = RequestCache(clock, self._kinds, keep_s=HOUR_S)
        """Instance types with GPUs; the key is the region."""
        self.zones = RequestCache(clock, self._zones, keep_s=HOUR_S)
        """Zone ids (`use1-az1`) by zone name (`us-east-1a`), by instance type; the key is the region."""
        self.spot = RequestCache(clock, self._spot, keep_s=15.0, retry_s=0.0)
        """Dollars per hour by (instance type, zone); the key is the region."""
        self.on_demand = RequestCache(clock, self._on_demand, keep_s=6 * HOUR_S)
        """Dollars per hour by region; the key is the instance type."""
        self.disk = RequestCache(clock, self._disk, keep_s=6 * HOUR_S)
        """Dollars per GiB and month of gp3 by region; the key is always `gp3`."""
        self.egress = RequestCache(clock, self._egress, keep_s=6 * HOUR_S)
        """Dollars per GiB to the internet by region, highest tier; the key is always `internet`."""
        self.quotas = RequestCache(clock, self._quotas, keep_s=RETRY_S)
        """Number of vCPUs by name of the quota; the key is the region."""
        self.scores = RequestCache(clock, self._scores, keep_s=HOUR_S)
        """Spot placement scores by zone id; the key is the instance type. AWS limits the distinct queries per day."""

    async def _kinds(self, region: str) -> InstanceTypes:
        filters = [{"Name": "instance-type", "Values": list(FAMILIES)}]
        kinds = await self._aws.pages("ec2", region, "describe_instance_types", "InstanceTypes", Filters=filters)
        machines: dict[str, AwsMachineType] = {}
        dropped: Counter[str] = Counter()
        for kind in kinds:
            try:
                if not kind.get("GpuInfo", {}).get("Gpus"):
                    continue
                machine = _machine(kind)
            except _UNREADABLE:
                machine = "unreadable"
            if isinstance(machine, str):
                dropped[machine] += 1
            else:
                machines[machine.name] = machine
        return InstanceTypes(machines=machines, dropped=dropped)

    async def _zones(self, region: str) -> Mapping[str, Mapping[str, str]]:
        kinds = await self.kinds.get(region)
        if not kinds.machines:
            return {}
        filters = [{"Name": "instance-type", "Values": sorted(kinds.machines)}]
        offered, zones = await asyncio.gather(
            self._aws.pages(
                "ec2", region, "describe_instance_type_offerings", "InstanceTypeOfferings",
                LocationType="availability-zone", Filters=filters,
            ),
            self._aws.call("ec2", region, "describe_availability_zones"),
        )  # fmt: skip
        pairs = ((_text_of(zone, "ZoneName"), _text_of(zone, "ZoneId")) for zone in zones["AvailabilityZones"])
        ids = {name: zone_id for name, zone_id in pairs if name and zone_id}
        zones_by_type: dict[str, dict[str, str]] = {}
        for offering in offered:
            zone, name = _text_of(offering, "Location"), _text_of(offering, "InstanceType")
            if zone in ids and name:
                zones_by_type.setdefault(name, {})[zone] = ids[zone]
        return zones_by_type

    async def _spot(self, region: str) -> Mapping[tuple[str, str], Decimal]:
        kinds = await self.kinds.get(region)
        spot_types = sorted(name for name, machine in kinds.machines.items() if machine.spot)
        if not spot_types:
            return {}
        now = self._clock.now()
        history = await self._aws.pages(
            "ec2", region, "describe_spot_price_history", "SpotPriceHistory",
            InstanceTypes=spot_types, ProductDescriptions=list(_LINUX), StartTime=now, EndTime=now,
        )  # fmt: skip
        latest: dict[tuple[str, str], tuple[Any, Decimal]] = {}
        unreadable: set[tuple[str, str]] = set()
        for entry in history:
            try:
                key = (entry["InstanceType"], entry["AvailabilityZone"])
                dollars = _decimal(entry["SpotPrice"])
                if dollars is None:
                    unreadable.add(key)
                elif entry["InstanceType"] in spot_types:
                    price = (entry["Timestamp"], usd(dollars))
                    latest[key] = max(latest.get(key, price), price, key=lambda dated: dated[0])
            except _UNREADABLE:
                continue  # the zone has no spot offer, and the others keep theirs
        return dict.fromkeys(unreadable, NOT_A_PRICE) | {key: price for key, (_, price) in latest.items()}

    async def _on_demand(self, kind: str) -> Mapping[str, Decimal]:
        products = await self._products("AmazonEC2", {**_ON_DEMAND, "instanceType": kind})
        return _prices(p for p in products if _attributes(p).get("marketoption", "OnDemand") == "OnDemand")

    async def _disk(self, kind: str) -> Mapping[str, Decimal]:
        return _prices(await self._products("AmazonEC2", {"productFamily": "Storage", "volumeApiName": kind}))

    async def _egress(self, _: str) -> Mapping[str, Decimal]:
        attributes = {"transferType": "AWS Outbound", "toLocation": "External"}
        return _prices(await self._products("AWSDataTransfer", attributes), region="fromRegionCode")

    async def _products(self, service: str, attributes: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
        filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in attributes.items()]
        products = await self._aws.pages(
            "pricing", PRICING_REGION, "get_products", "PriceList", ServiceCode=service, Filters=filters
        )
        return [product for text in products if (product := _product(text)) is not None]

    async def _quotas(self, region: str) -> Mapping[str, float]:
        quotas = await self._aws.pages("service-quotas", region, "list_service_quotas", "Quotas", ServiceCode="ec2")
        values = ((quota.get("QuotaName"), number(quota.get("Value"))) for quota in quotas)
        return {name: value for name, value in values if name is not None and value is not None}

    async def _scores(self, kind: str) -> Mapping[str, int]:
        scores = await self._aws.pages(
            "ec2", self._regions[0], "get_spot_placement_scores", "SpotPlacementScores",
            InstanceTypes=[kind], TargetCapacity=1, SingleAvailabilityZone=True, RegionNames=list(self._regions),
        )  # fmt: skip
        values = ((score.get("AvailabilityZoneId"), as_integer(score.get("Score"))) for score in scores)
        return {zone: value for zone, value in values if zone is not None and value is not None}


def _text_of(row: Any, field: str) -> str:
    """Return a text of a row; empty: the row has none, so the row alone is left out."""
    value = row.get(field) if isinstance(row, dict) else None
    return value if isinstance(value, str) else ""


def _machine(kind: Mapping[str, Any]) -> AwsMachineType | str:
    """Return the instance type, or the reason for which it is excluded."""
    (gpu, *others) = kind["GpuInfo"]["Gpus"]
    memory = int(gpu.get("MemoryInfo", {}).get("SizeInMiB", 0)) * MIB
    name = accelerator(gpu["Name"], memory)
    architectures = kind["ProcessorInfo"]["SupportedArchitectures"]
    row = RawRow(
        gpu=gpu["Name"], gpus=_whole_gpus(gpu),
        architecture="x86_64" if "x86_64" in architectures else architectures[0], maker=gpu.get("Manufacturer", ""),
    )  # fmt: skip
    if (why := row_fault(row)) is not None:
        return why
    if others or name not in KNOWN_GPUS:
        return "GPU that is not in the hardware table"
    cards = [card.get("BaselineBandwidthInGbps") for card in kind.get("NetworkInfo", {}).get("NetworkCards", [])]
    classes = kind.get("SupportedUsageClasses", [])
    return AwsMachineType(
        name=kind["InstanceType"],
        accelerator=name,
        gpu=gpu["Name"],
        gpus=int(gpu["Count"]),
        gpu_memory_bytes=memory,
        vcpus=int(kind["VCpuInfo"]["DefaultVCpus"]),
        ram_bytes=int(kind["MemoryInfo"]["SizeInMiB"]) * MIB,
        network_mbit_s=sum(cards) * 1000 if cards and None not in cards else None,
        spot="spot" in classes,
        on_demand="on-demand" in classes,
    )


def _whole_gpus(gpu: Mapping[str, Any]) -> float:
    """Return the number of GPUs; a fraction for a share of one.

    EC2 lists shares of a GPU (g6f) with 0 GPUs, and with the share in `GpuPartitionSize` and `LogicalGpuCount`.
    """
    share = number(gpu.get("GpuPartitionSize"))
    if share is not None and share < 1:
        return 0.5
    logical = number(gpu.get("LogicalGpuCount"))
    return float(gpu.get("Count") or 0.5) if logical is None or logical.is_integer() else logical


def _prices(products: Any, *, region: str = "regionCode") -> Mapping[str, Decimal]:
    """Return the highest price of the products by region, because a cost cap must hold in the most expensive tier."""
    highest: dict[str, Decimal] = {}
    for product in products:
        code = _attributes(product).get(region)
        if code is None:
            continue
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for tier in term.get("priceDimensions", {}).values():
                price = _decimal(tier.get("pricePerUnit", {}).get("USD"))
                if price is not None:
                    highest[code] = max(highest.get(code, price), price)
    return highest


def _product(text: Any) -> Mapping[str, Any] | None:
    """Return one product of a price list, which AWS sends as JSON in a text; None: it cannot be read."""
    try:
        product = json.loads(text)
    except (TypeError, ValueError):
        return None
    return product if isinstance(product, dict) else None


def _attributes(product: Mapping[str, Any]) -> Mapping[str, Any]:
    attributes = (product.get("product") or {}).get("attributes")
    return attributes if isinstance(attributes, dict) else {}


def _decimal(text: Any) -> Decimal | None:
    """Return a finite price; None: missing or unreadable."""
    return None if number(text) is None else Decimal(str(text).strip())


def quota_of(machine: str, spot: bool, quotas: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the quota (name, vCPUs) that limits an instance type; None if AWS lists none.

    Names of quotas: `Running On-Demand G and VT instances`, `All P4, P3 and P2 Spot Instance Requests`.
    """
    family = re.match(r"([a-z]+)(\d*)", machine)
    if family is None:
        return None
    letter = "VT" if family[1] == "vt" else family[1][:1].upper()
    pattern = r"All (.+) Spot Instance Requests" if spot else r"Running On-Demand (.+) instances"
    by_family: dict[str, tuple[str, float]] = {}
    for name, value in quotas.items():
        if (match := re.fullmatch(pattern, name)) is not None:
            by_family |= dict.fromkeys(re.findall(r"\b[A-Z]+\d*\b", match[1]), (name, value))
    return by_family.get(letter + family[2]) or by_family.get(letter)
