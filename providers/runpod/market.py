"""RunPod's market: GPU types × counts × data centres (or countries), each with its live price and stock.

The catalogue of REST v2 has list prices, stock and CUDA versions. It has no bids, so GraphQL gives them while it
answers. RunPod withdraws spot: where nothing gives a bid, no spot is offered. Source: schema `GpuType` of the OpenAPI
document of 2026-08-20. Unknown: the least vCPUs and memory of a pod, so the values that SkyPilot requests are used.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from broker.domain.errors import OutcomeUnknown, ProviderError
from broker.domain.formatting import unsold_regions
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB, DiskSale, HostFacts, Offer
from broker.ports import Clock
from providers.common.bill_rules import BILL_RULES
from providers.common.cloud_values import number, positive, text
from providers.common.gpu_names import GB
from providers.common.market_rules import OfferFilter, RawRow, bid
from providers.runpod.api import RunpodApi
from providers.runpod.gpu_types import SKY_NAMES, accelerator_of, interconnect
from providers.runpod.pods import version
from providers.skypilot.plugin.shared import COMMUNITY_ZONE

log = logging.getLogger(__name__)

__all__ = ["DISK_USD_PER_HOUR", "SKY_NAMES", "RunpodMarket", "country"]

DISK_GB = 100
DISK_USD_PER_GB_MONTH = Decimal("0.10")
"""Price of a running pod's container disk, in addition to the GPU (docs.runpod.io/pods/storage/types, "Comparison")."""
MONTH_H = Decimal(720)
LARGER_DISK = DiskSale(max_bytes=1000 * GB, usd_per_gib_hour=DISK_USD_PER_GB_MONTH * GIB / GB / MONTH_H)
"""The limit is assumed: RunPod documents none, and a host with less space refuses the create."""
DISK_USD_PER_HOUR = usd(DISK_GB * DISK_USD_PER_GB_MONTH / MONTH_H)
PRICES_PER_QUERY = 600
_CONTINENTS = frozenset({"EU", "EUR", "AP", "SEA", "OC", "AS", "ME", "AF", "SA"})
_PRICE = "{ minimumBidPrice uninterruptablePrice minVcpu minMemory }"


@dataclass(frozen=True, kw_only=True)
class _GpuLocation:
    """GPU type, number of GPUs, tier, and data centre (secure tier) or country (community tier)."""

    gpu: Mapping[str, Any]
    count: int
    secure: bool
    zone: str
    region: str
    in_stock: bool | None
    """None: the catalogue has no stock level that is known."""
    per_gpu: Any
    """List price in dollars per GPU and hour, as the catalogue has it."""
    cuda_versions: tuple[str, ...]
    """CUDA versions of the hosts, none older than the floor; empty: the catalogue has none."""

    @property
    def query(self) -> str:
        """Return the GraphQL field for the lowest price at this location."""
        location = f'dataCenterId: "{self.zone}"' if self.secure else f'countryCode: "{self.region}"'
        return f"lowestPrice(input: {{ gpuCount: {self.count}, secureCloud: {str(self.secure).lower()}, {location} }})"


def country(zone: str) -> str:
    """Return the country of a data centre as in SkyPilot's catalog: `US-TX-1` → US, `EUR-IS-1` → IS."""
    parts = zone.split("-")
    return (parts[1] if parts[0] in _CONTINENTS and len(parts) > 1 else parts[0]).upper()


class RunpodMarket:
    """Reader of RunPod's prices: one catalogue query for each tier and count, then the bids of all locations."""

    def __init__(
        self, api: RunpodApi, clock: Clock, *, regions: Sequence[str], community: bool, counts: Sequence[int],
        restart_s: float, cuda_min: str,
    ) -> None:  # fmt: skip
        self._api, self._clock = api, clock
        self._regions, self._community = regions, community
        self._counts, self._restart_s, self._cuda_min = counts, restart_s, cuda_min

    async def fill(self, offer_filter: OfferFilter) -> None:
        """Add every offer to `offer_filter`. Raises the errors of `RunpodApi.rest`."""
        locations = await self._locations(offer_filter)
        for start in range(0, len(locations), PRICES_PER_QUERY):
            part = locations[start : start + PRICES_PER_QUERY]
            answer = await self._bids(part)
            for position, location in enumerate(part):
                self._add(offer_filter, location, _price_of(answer, position, location))

    async def _bids(self, locations: Sequence[_GpuLocation]) -> Mapping[str, Any]:
        """Return GraphQL's live prices; empty if it does not answer, so that on-demand offers remain."""
        try:
            return await self._api.graphql(_prices_query(locations))
        except ProviderError as e:
            log.info("RunPod gives no bids, so no spot is offered: %s", e)
            return {}

    async def _locations(self, offer_filter: OfferFilter) -> list[_GpuLocation]:
        known_places = {country(zone) for zone in await self._zones()}
        locations: list[_GpuLocation] = []
        nameless: set[str] = set()
        for secure in (True, False) if self._community else (True,):
            for count in self._counts:
                for gpu in await self._gpus(secure, count):
                    if not isinstance(gpu, dict) or not isinstance(gpu.get("id"), str):
                        offer_filter.drop("unreadable")
                    elif gpu["id"] in SKY_NAMES:
                        locations += self._locations_of(gpu, secure, count, offer_filter)
                    elif gpu["id"] not in nameless:
                        nameless.add(gpu["id"])
                        offer_filter.drop("SkyPilot has no name for the GPU")
        known_places |= {location.region for location in locations}
        offer_filter.report_unknown_regions("runpod", unsold_regions(self._regions, known_places))
        return [location for location in locations if not self._regions or location.region in self._regions]

    async def _zones(self) -> Sequence[str]:
        answer = await self._api.rest("GET", "/catalog/datacenters")
        centres = answer.get("dataCenters") if isinstance(answer, dict) else None
        if not isinstance(centres, list):
            raise OutcomeUnknown("RunPod: the list of data centres cannot be read")
        return [zone for centre in centres if (zone := _zone(centre)) is not None]

    async def _gpus(self, secure: bool, count: int) -> Sequence[Any]:
        query = {
            "include": "AVAILABILITY", "product": "POD", "count": str(count),
            "cloud": "SECURE" if secure else "COMMUNITY", "minCudaVersion": self._cuda_min,
        }  # fmt: skip
        answer = await self._api.rest("GET", "/catalog/gpus", query)
        gpus = answer.get("gpus") if isinstance(answer, dict) else None
        if not isinstance(gpus, list):
            raise OutcomeUnknown("RunPod: the list of GPU types cannot be read")
        return gpus

    def _locations_of(
        self, gpu: Mapping[str, Any], secure: bool, count: int, offer_filter: OfferFilter
    ) -> list[_GpuLocation]:
        """Return the locations of one GPU type. A location that cannot be read costs itself alone."""
        tier = "secure" if secure else "community"
        try:
            per_gpu, max_count = gpu["price"].get(tier), number(gpu["maxCount"].get(tier))
            centres = gpu.get("dataCenters") or []
            if per_gpu is None or not centres or (max_count is not None and count > max_count):
                return []
            versions = _cuda_versions(gpu.get("cudaVersions"), self._cuda_min)
            if versions is None:
                offer_filter.drop(f"driver older than CUDA {self._cuda_min}")
                return []
            locations: dict[tuple[str, str], _GpuLocation] = {}
            for centre in centres:
                if (zone := _zone(centre)) is None:
                    offer_filter.drop("unreadable")
                    continue
                location = _GpuLocation(
                    gpu=gpu, count=count, secure=secure, zone=zone if secure else COMMUNITY_ZONE, region=country(zone),
                    in_stock=_in_stock(centre.get("availability")), per_gpu=per_gpu, cuda_versions=versions,
                )  # fmt: skip
                previous = locations.get((location.zone, location.region))
                if previous is None or (location.in_stock and not previous.in_stock):
                    locations[location.zone, location.region] = location
            return list(locations.values())
        except (AttributeError, KeyError, TypeError, ValueError):
            offer_filter.drop("unreadable")
            return []

    def _add(self, offer_filter: OfferFilter, location: _GpuLocation, price: Mapping[str, Any]) -> None:
        """Add the on-demand and the spot offer of one location, if they exist."""
        try:
            if not offer_filter.takes(RawRow(gpu=location.gpu["id"], gpus=location.count)):
                return
            live = price.get("uninterruptablePrice")
            on_demand = offer_filter.on_demand(location.per_gpu if live is None else live)
            floor = offer_filter.spot(price.get("minimumBidPrice"), on_demand)
            if on_demand is not None:
                offer_filter.add(
                    self._offer(location, price, per_gpu=on_demand, on_demand_per_gpu=on_demand, spot=False)
                )
            if floor is not None:
                per_gpu = bid(floor, on_demand, self._restart_s)
                offer_filter.add(self._offer(location, price, per_gpu=per_gpu, on_demand_per_gpu=on_demand, spot=True))
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError):
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
        gpu, n, memory = location.gpu, location.count, int(float(location.gpu["memory"]))
        kind = f"{n}x_{SKY_NAMES[gpu['id']]}_{'SECURE' if location.secure else 'COMMUNITY'}"
        name = accelerator_of(gpu["id"])
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
            vcpus=max(int(positive(price.get("minVcpu")) or 0), 4 * n),
            ram_bytes=max(int(positive(price.get("minMemory")) or 0), memory * n) * GIB,
            disk_bytes=DISK_GB * GB,
            larger_disk=LARGER_DISK,
            spot=spot,
            usd_per_hour=_with_disk(per_gpu * n),
            on_demand_usd_per_hour=None if on_demand is None else _with_disk(on_demand),
            billing_quantum_s=BILL_RULES["runpod"].quantum_s,
            billed_from=BILL_RULES["runpod"].billed_from,
            billing_minimum_s=BILL_RULES["runpod"].minimum_s,
            available=location.in_stock,
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
        interconnect=interconnect(gpu, count),
    )


def _purchase(location: _GpuLocation, per_gpu: Decimal, on_demand_per_gpu: Decimal | None) -> dict[str, str]:
    """Return the offer's `purchase` for `RunpodCloud.purchase`."""
    on_demand = per_gpu if on_demand_per_gpu is None else on_demand_per_gpu
    return {
        "gpu": SKY_NAMES[location.gpu["id"]],
        "zone": location.zone,
        "price": f"{per_gpu * location.count:f}",
        "on_demand": f"{on_demand * location.count:f}",
        "cuda": ",".join(location.cuda_versions),
    }


def _prices_query(locations: Sequence[_GpuLocation]) -> str:
    """Return the GraphQL query: one alias per GPU type, with a field `p<number>` for each location of the type."""
    fields: dict[str, list[str]] = {}
    for position, location in enumerate(locations):
        fields.setdefault(location.gpu["id"], []).append(f"p{position}: {location.query} {_PRICE}")
    types = (f'{_alias(gpu)}: gpuTypes(input: {{ id: "{gpu}" }}) {{ {" ".join(p)} }}' for gpu, p in fields.items())
    return f"query {{ {' '.join(types)} }}"


def _price_of(answer: Mapping[str, Any], position: int, location: _GpuLocation) -> Mapping[str, Any]:
    """Return GraphQL's price of a location; empty if it has none."""
    types = answer.get(_alias(location.gpu["id"]))
    price = types[0].get(f"p{position}") if isinstance(types, list) and types and isinstance(types[0], dict) else None
    return price if isinstance(price, dict) else {}


def _zone(centre: Any) -> str | None:
    """Return the id of a data centre; None: it has none that may be put into a query."""
    zone = centre.get("id") if isinstance(centre, dict) else None
    return zone if isinstance(zone, str) and re.fullmatch(r"[A-Za-z0-9-]+", zone) else None


def _in_stock(level: Any) -> bool | None:
    """Return whether a stock level (HIGH, MEDIUM, LOW, NONE) has GPUs; None: the level is missing or unknown."""
    return {"HIGH": True, "MEDIUM": True, "LOW": True, "NONE": False}.get((text(level) or "").upper())


def _cuda_versions(versions: Any, floor: str) -> tuple[str, ...] | None:
    """Return the catalogue's CUDA versions from the floor on; None: all that it has are older.

    `cudaVersions` is absent for hosts that report none.
    """
    rows = versions if isinstance(versions, list) else [versions]
    listed = [row.get("version") if isinstance(row, dict) else row for row in rows]
    readable = [name for row in listed if (name := text(row)) is not None and re.fullmatch(r"\d+(\.\d+)*", name)]
    enough = tuple(name for name in readable if version(name) >= version(floor))
    return None if readable and not enough else enough


def _alias(gpu: str) -> str:
    return SKY_NAMES[gpu].replace("-", "_")


def _with_disk(price: Decimal) -> Decimal:
    return usd(price + DISK_USD_PER_HOUR)
