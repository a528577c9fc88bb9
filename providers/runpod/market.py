"""What RunPod sells: GPU types × counts × data centres (or countries), each with its live price and stock."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from broker.domain.errors import OutcomeUnknown
from broker.domain.formatting import unsold_regions
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB, HostFacts, Offer
from broker.ports import Clock
from providers.common.bids import bid
from providers.common.gpu_names import GB, accelerator
from providers.common.offer_filter import OfferFilter
from providers.skypilot.shared import COMMUNITY_ZONE

SKY_NAMES = {
    "NVIDIA B200": "B200", "NVIDIA H200": "H200-SXM", "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H100 NVL": "H100-NVL", "NVIDIA H100 PCIe": "H100", "NVIDIA A100-SXM4-80GB": "A100-80GB-SXM",
    "NVIDIA A100 80GB PCIe": "A100-80GB", "NVIDIA A40": "A40", "NVIDIA A30": "A30", "NVIDIA L40S": "L40S",
    "NVIDIA L40": "L40", "NVIDIA L4": "L4", "NVIDIA GeForce RTX 5090": "RTX5090", "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 3090": "RTX3090", "NVIDIA RTX 6000 Ada Generation": "RTX6000-Ada",
    "NVIDIA RTX 5000 Ada Generation": "RTX5000-Ada", "NVIDIA RTX A6000": "RTXA6000", "NVIDIA RTX A5000": "RTXA5000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTXPRO6000",
}  # fmt: skip
"""RunPod's id of a GPU type → SkyPilot's name (`provision/runpod/utils.py`), without which it cannot be bought."""
DISK_GB = 100
DISK_USD_PER_GB_MONTH = Decimal("0.10")
"""Of a running pod's container disk (docs.runpod.io/pods/storage/types, "Comparison"): beside the price of the GPU."""
MONTH_H = Decimal(720)
DISK_USD_PER_HOUR = usd(DISK_GB * DISK_USD_PER_GB_MONTH / MONTH_H)
PRICES_A_QUERY = 600
_CONTINENTS = frozenset({"EU", "EUR", "AP", "SEA", "OC", "AS", "ME", "AF", "SA"})
_PRICE = "{ minimumBidPrice uninterruptablePrice stockStatus minVcpu minMemory }"

Ask = Callable[[str], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class _GpuLocation:
    """One GPU type in one number at one place of one tier."""

    gpu: Mapping[str, Any]
    count: int
    secure: bool
    zone: str
    region: str

    @property
    def where(self) -> str:
        at = f'dataCenterId: "{self.zone}"' if self.secure else f'countryCode: "{self.region}"'
        return f"lowestPrice(input: {{ gpuCount: {self.count}, secureCloud: {str(self.secure).lower()}, {at} }})"


def country(zone: str) -> str:
    """Of a data centre: `US-TX-1` → US, `EUR-IS-1` → IS, as SkyPilot's catalog has them."""
    parts = zone.split("-")
    return parts[1] if parts[0] in _CONTINENTS and len(parts) > 1 else parts[0]


class RunpodMarket:
    """Two rounds: what is priced anywhere at all, then the places of that."""

    def __init__(
        self, ask: Ask, clock: Clock, *, regions: Sequence[str], community: bool, counts: Sequence[int],
        restart_s: float,
    ) -> None:  # fmt: skip
        self._ask, self._clock = ask, clock
        self._regions, self._community = regions, community
        self._counts, self._restart_s = counts, restart_s

    async def fill(self, sieve: OfferFilter) -> None:
        """Puts every offer into `sieve`. Raises what `ask` raises."""
        places = await self._places(sieve)
        for start in range(0, len(places), PRICES_A_QUERY):
            part = places[start : start + PRICES_A_QUERY]
            answer = await self._ask(_prices_query(part))
            for number, place in enumerate(part):
                self._add(sieve, place, _price_of(answer, number, place))

    async def _places(self, sieve: OfferFilter) -> list[_GpuLocation]:
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
            at = {
                "s": [(z, country(z)) for z in zones],
                "c": [(COMMUNITY_ZONE, c) for c in answer.get("countryCodes") or ()],
            }
            known = {country(centre["id"]) for centre in answer["dataCenters"]} | {c for _, c in at["c"]}
            sieve.ask_back("runpod", unsold_regions(self._regions, known))
            types = [gpu for gpu in answer["gpuTypes"] if self._buyable(gpu, sieve)]
            return [
                _GpuLocation(gpu=gpu, count=n, secure=secure, zone=zone, region=region)
                for gpu in types
                for tier, secure in tiers
                for n in self._counts
                if n <= (gpu["maxGpuCount"] or 1) and _sold(gpu.get(f"{tier}{n}"))
                for zone, region in at[tier]
                if not self._regions or region in self._regions
            ]
        except (AttributeError, KeyError, TypeError) as e:
            raise OutcomeUnknown(f"RunPod: the list of GPU types cannot be read: {e!r}") from None

    def _buyable(self, gpu: Mapping[str, Any], sieve: OfferFilter) -> bool:
        if gpu["id"] not in SKY_NAMES:
            sieve.drop("SkyPilot has no name for the GPU")
        return gpu["id"] in SKY_NAMES

    def _add(self, sieve: OfferFilter, place: _GpuLocation, price: Any) -> None:
        """The on-demand and the spot offer of one place, if there are any."""
        if not _sold(price):
            return
        try:
            whole = _money(price["uninterruptablePrice"])
            floor = _money(price["minimumBidPrice"])
            if whole is not None:
                sieve.add(self._offer(place, price, per_gpu=whole, whole=whole, spot=False))
            if floor is not None:
                offered = floor if whole is not None and floor > whole else bid(floor, whole, self._restart_s)
                sieve.add(self._offer(place, price, per_gpu=offered, whole=whole, spot=True))
        except (KeyError, TypeError, ValueError, ArithmeticError):
            sieve.drop("unreadable")

    def _offer(
        self, place: _GpuLocation, price: Mapping[str, Any], *, per_gpu: Decimal, whole: Decimal | None, spot: bool
    ) -> Offer:
        gpu, n = place.gpu, place.count
        memory = int(gpu["memoryInGb"])
        kind = f"{n}x_{SKY_NAMES[gpu['id']]}_{'SECURE' if place.secure else 'COMMUNITY'}"
        name = accelerator(gpu["id"], memory * GB)
        where = place.zone if place.secure else place.region
        on_demand = None if whole is None else whole * n
        return Offer(
            id=f"runpod/runpod/{where}/{kind}/{'spot' if spot else 'on-demand'}",
            provider="runpod",
            cloud="runpod",
            region=place.region,
            instance_type=kind,
            accelerator=name,
            gpus=n,
            gpu_memory_bytes=memory * GB,
            # SkyPilot asks for these at least (`provision/runpod/utils.py`, launch).
            vcpus=max(int(price["minVcpu"] or 0), 4 * n),
            ram_bytes=max(int(price["minMemory"] or 0), memory * n) * GIB,
            disk_bytes=DISK_GB * GB,
            spot=spot,
            usd_per_hour=_with_disk(per_gpu * n),
            on_demand_usd_per_hour=None if on_demand is None else _with_disk(on_demand),
            available=price["stockStatus"] is not None,
            trust="secure" if place.secure else "community",
            facts=HostFacts(
                disk_usd_per_gib_month=usd(DISK_USD_PER_GB_MONTH * GIB / GB),
                ingress_usd_per_gib=ZERO,
                egress_usd_per_gib=ZERO,
                interconnect=_interconnect(name, n),
            ),
            purchase=_purchase(place, per_gpu, whole),
            seen_at=self._clock.now(),
        )


def _purchase(place: _GpuLocation, per_gpu: Decimal, whole: Decimal | None) -> dict[str, str]:
    """What SkyPilot is told of it."""
    on_demand = per_gpu if whole is None else whole
    return {
        "gpu": SKY_NAMES[place.gpu["id"]],
        "zone": place.zone,
        "price": f"{per_gpu * place.count:f}",
        "on_demand": f"{on_demand * place.count:f}",
    }


def _prices_query(places: Sequence[_GpuLocation]) -> str:
    """`p<number>` for each place, below one alias a GPU type."""
    asked: dict[str, list[str]] = {}
    for number, place in enumerate(places):
        asked.setdefault(place.gpu["id"], []).append(f"p{number}: {place.where} {_PRICE}")
    types = (f'{_alias(gpu)}: gpuTypes(input: {{ id: "{gpu}" }}) {{ {" ".join(p)} }}' for gpu, p in asked.items())
    return f"query {{ {' '.join(types)} }}"


def _price_of(answer: Mapping[str, Any], number: int, place: _GpuLocation) -> Any:
    types = answer.get(_alias(place.gpu["id"]))
    return types[0].get(f"p{number}") if isinstance(types, list) and types else None


def _alias(gpu: str) -> str:
    return SKY_NAMES[gpu].replace("-", "_")


def _sold(price: Mapping[str, Any] | None) -> bool:
    """RunPod names no price where it has no machine at all."""
    return price is not None and any(price.get(key) is not None for key in ("uninterruptablePrice", "minimumBidPrice"))


def _money(value: Any) -> Decimal | None:
    return None if value is None else Decimal(str(value))


def _with_disk(price: Decimal) -> Decimal:
    """A price that is 0 stays so, for the sieve to see."""
    return usd(price + DISK_USD_PER_HOUR) if price > 0 else ZERO


def _interconnect(name: str, gpus: int) -> str | None:
    if gpus < 2:
        return None
    return "nvlink" if "sxm" in name or name == "b200" else "pcie"
