"""RunPod's market: GPU types × counts × data centres (or countries), each with its live price and stock."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from broker.domain.errors import OutcomeUnknown
from broker.domain.formatting import unsold_regions
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB, HostFacts, Offer
from broker.ports import Clock
from providers.common.gpu_names import GB, accelerator
from providers.common.market_rules import OfferFilter, bid
from providers.skypilot.plugin.shared import COMMUNITY_ZONE

SKY_NAMES = {
    "NVIDIA B200": "B200", "NVIDIA H200": "H200-SXM", "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H100 NVL": "H100-NVL", "NVIDIA H100 PCIe": "H100", "NVIDIA A100-SXM4-80GB": "A100-80GB-SXM",
    "NVIDIA A100 80GB PCIe": "A100-80GB", "NVIDIA A40": "A40", "NVIDIA A30": "A30", "NVIDIA L40S": "L40S",
    "NVIDIA L40": "L40", "NVIDIA L4": "L4", "NVIDIA GeForce RTX 5090": "RTX5090", "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 3090": "RTX3090", "NVIDIA RTX 6000 Ada Generation": "RTX6000-Ada",
    "NVIDIA RTX 5000 Ada Generation": "RTX5000-Ada", "NVIDIA RTX A6000": "RTXA6000", "NVIDIA RTX A5000": "RTXA5000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTXPRO6000",
}  # fmt: skip
"""SkyPilot's name (`provision/runpod/utils.py`) by RunPod's id of a GPU type. SkyPilot cannot buy other types."""
DISK_GB = 100
DISK_USD_PER_GB_MONTH = Decimal("0.10")
"""Price of a running pod's container disk, in addition to the GPU (docs.runpod.io/pods/storage/types, "Comparison")."""
MONTH_H = Decimal(720)
DISK_USD_PER_HOUR = usd(DISK_GB * DISK_USD_PER_GB_MONTH / MONTH_H)
PRICES_PER_QUERY = 600
_CONTINENTS = frozenset({"EU", "EUR", "AP", "SEA", "OC", "AS", "ME", "AF", "SA"})
_PRICE = "{ minimumBidPrice uninterruptablePrice stockStatus minVcpu minMemory }"

RunQuery = Callable[[str], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class _GpuLocation:
    """GPU type, number of GPUs, tier, and data centre (secure tier) or country (community tier)."""

    gpu: Mapping[str, Any]
    count: int
    secure: bool
    zone: str
    region: str

    @property
    def query(self) -> str:
        """Return the GraphQL field for the lowest price at this location."""
        location = f'dataCenterId: "{self.zone}"' if self.secure else f'countryCode: "{self.region}"'
        return f"lowestPrice(input: {{ gpuCount: {self.count}, secureCloud: {str(self.secure).lower()}, {location} }})"


def country(zone: str) -> str:
    """Return the country of a data centre as in SkyPilot's catalog: `US-TX-1` → US, `EUR-IS-1` → IS."""
    parts = zone.split("-")
    return parts[1] if parts[0] in _CONTINENTS and len(parts) > 1 else parts[0]


class RunpodMarket:
    """Reader of RunPod's prices. The first query finds GPU types with a price; the next ones price each location."""

    def __init__(
        self, ask: RunQuery, clock: Clock, *, regions: Sequence[str], community: bool, counts: Sequence[int],
        restart_s: float,
    ) -> None:  # fmt: skip
        self._ask, self._clock = ask, clock
        self._regions, self._community = regions, community
        self._counts, self._restart_s = counts, restart_s

    async def fill(self, offer_filter: OfferFilter) -> None:
        """Add every offer to `offer_filter`. Raises the errors of `ask`."""
        locations = await self._locations(offer_filter)
        for start in range(0, len(locations), PRICES_PER_QUERY):
            part = locations[start : start + PRICES_PER_QUERY]
            answer = await self._ask(_prices_query(part))
            for number, location in enumerate(part):
                self._add(offer_filter, location, _price_of(answer, number, location))

    async def _locations(self, offer_filter: OfferFilter) -> list[_GpuLocation]:
        tiers = (("s", True), ("c", False)) if self._community else (("s", True),)
        prices = "\n".join(
            f"{tier}{n}: lowestPrice(input: {{ gpuCount: {n}, secureCloud: {str(secure).lower()} }}) {_PRICE}"
            for tier, secure in tiers
            for n in self._counts
        )
        answer = await self._ask(
            f"query {{ gpuTypes {{ id displayName memoryInGb maxGpuCount {prices} }} dataCenters {{ id listed }}"
            f" {'countryCodes' if self._community else ''} }}"
        )
        try:
            zones = [centre["id"] for centre in answer["dataCenters"] if centre["listed"]]
            locations = {
                "s": [(zone, country(zone)) for zone in zones],
                "c": [(COMMUNITY_ZONE, code) for code in answer.get("countryCodes") or ()],
            }
            known = {country(centre["id"]) for centre in answer["dataCenters"]} | {code for _, code in locations["c"]}
            offer_filter.report_unknown_regions("runpod", unsold_regions(self._regions, known))
            types = [gpu for gpu in answer["gpuTypes"] if self._has_sky_name(gpu, offer_filter)]
            return [
                _GpuLocation(gpu=gpu, count=n, secure=secure, zone=zone, region=region)
                for gpu in types
                for tier, secure in tiers
                for n in self._counts
                if n <= (gpu["maxGpuCount"] or 1) and _has_price(gpu.get(f"{tier}{n}"))
                for zone, region in locations[tier]
                if not self._regions or region in self._regions
            ]
        except (AttributeError, KeyError, TypeError) as e:
            raise OutcomeUnknown(f"RunPod: the list of GPU types cannot be read: {e!r}") from None

    def _has_sky_name(self, gpu: Mapping[str, Any], offer_filter: OfferFilter) -> bool:
        if gpu["id"] not in SKY_NAMES:
            offer_filter.drop("SkyPilot has no name for the GPU")
        return gpu["id"] in SKY_NAMES

    def _add(self, offer_filter: OfferFilter, location: _GpuLocation, price: Any) -> None:
        """Add the on-demand and the spot offer of one location, if they exist."""
        if not _has_price(price):
            return
        try:
            on_demand_per_gpu = _money(price["uninterruptablePrice"])
            floor = _money(price["minimumBidPrice"])
            if on_demand_per_gpu is not None:
                offer_filter.add(
                    self._offer(
                        location, price, per_gpu=on_demand_per_gpu, on_demand_per_gpu=on_demand_per_gpu, spot=False
                    )
                )
            if floor is not None:
                # A minimum bid above the on-demand price is not changed, so that the offer filter drops the row.
                offered = (
                    floor
                    if on_demand_per_gpu is not None and floor > on_demand_per_gpu
                    else bid(floor, on_demand_per_gpu, self._restart_s)
                )
                offer_filter.add(
                    self._offer(location, price, per_gpu=offered, on_demand_per_gpu=on_demand_per_gpu, spot=True)
                )
        except (KeyError, TypeError, ValueError, ArithmeticError):
            offer_filter.drop("unreadable")

    def _offer(
        self,
        location: _GpuLocation,
        price: Mapping[str, Any],
        *,
        per_gpu: Decimal,
        on_demand_per_gpu: Decimal | None,
        spot: bool,
    ) -> Offer:
        gpu, n = location.gpu, location.count
        memory = int(gpu["memoryInGb"])
        kind = f"{n}x_{SKY_NAMES[gpu['id']]}_{'SECURE' if location.secure else 'COMMUNITY'}"
        name = accelerator(gpu["id"], memory * GB)
        where = location.zone if location.secure else location.region
        on_demand = None if on_demand_per_gpu is None else on_demand_per_gpu * n
        return Offer(
            id=f"runpod/runpod/{where}/{kind}/{'spot' if spot else 'on-demand'}",
            provider="runpod",
            cloud="runpod",
            region=location.region,
            instance_type=kind,
            accelerator=name,
            gpus=n,
            gpu_memory_bytes=memory * GB,
            # SkyPilot requests at least this much (`provision/runpod/utils.py`, launch).
            vcpus=max(int(price["minVcpu"] or 0), 4 * n),
            ram_bytes=max(int(price["minMemory"] or 0), memory * n) * GIB,
            disk_bytes=DISK_GB * GB,
            spot=spot,
            usd_per_hour=_with_disk(per_gpu * n),
            on_demand_usd_per_hour=None if on_demand is None else _with_disk(on_demand),
            available=price["stockStatus"] is not None,
            trust="secure" if location.secure else "community",
            facts=_host_facts(name, n),
            purchase=_purchase(location, per_gpu, on_demand_per_gpu),
            seen_at=self._clock.now(),
        )


def _host_facts(gpu: str, count: int) -> HostFacts:
    return HostFacts(
        disk_usd_per_gib_month=usd(DISK_USD_PER_GB_MONTH * GIB / GB),
        ingress_usd_per_gib=ZERO,
        egress_usd_per_gib=ZERO,
        interconnect=_interconnect(gpu, count),
    )


def _purchase(location: _GpuLocation, per_gpu: Decimal, on_demand_per_gpu: Decimal | None) -> dict[str, str]:
    """Return the offer's `purchase` for `RunpodCloud.purchase`."""
    on_demand = per_gpu if on_demand_per_gpu is None else on_demand_per_gpu
    return {
        "gpu": SKY_NAMES[location.gpu["id"]],
        "zone": location.zone,
        "price": f"{per_gpu * location.count:f}",
        "on_demand": f"{on_demand * location.count:f}",
    }


def _prices_query(locations: Sequence[_GpuLocation]) -> str:
    """Return the GraphQL query: one alias per GPU type, with a field `p<number>` for each location of the type."""
    fields: dict[str, list[str]] = {}
    for number, location in enumerate(locations):
        fields.setdefault(location.gpu["id"], []).append(f"p{number}: {location.query} {_PRICE}")
    types = (f'{_alias(gpu)}: gpuTypes(input: {{ id: "{gpu}" }}) {{ {" ".join(p)} }}' for gpu, p in fields.items())
    return f"query {{ {' '.join(types)} }}"


def _price_of(answer: Mapping[str, Any], number: int, location: _GpuLocation) -> Any:
    types = answer.get(_alias(location.gpu["id"]))
    return types[0].get(f"p{number}") if isinstance(types, list) and types else None


def _alias(gpu: str) -> str:
    return SKY_NAMES[gpu].replace("-", "_")


def _has_price(price: Mapping[str, Any] | None) -> bool:
    """Return True if RunPod has a price; it has none for a location without machines."""
    return price is not None and any(price.get(key) is not None for key in ("uninterruptablePrice", "minimumBidPrice"))


def _money(value: Any) -> Decimal | None:
    return None if value is None else Decimal(str(value))


def _with_disk(price: Decimal) -> Decimal:
    """Return the price with disk. A price of 0 stays 0, so that the offer filter drops the row."""
    return usd(price + DISK_USD_PER_HOUR) if price > 0 else ZERO


def _interconnect(name: str, gpus: int) -> str | None:
    if gpus < 2:
        return None
    return "nvlink" if "sxm" in name or name == "b200" else "pcie"
