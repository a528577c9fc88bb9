"""Vast's asks as offers: each ask once at its own price and once by bid."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from broker.domain.formatting import unsold_regions
from broker.domain.money import usd
from broker.domain.offer import GIB, HostFacts, Offer
from broker.ports import Clock
from providers.common.bids import bid
from providers.common.gpu_names import GB, accelerator
from providers.common.offer_filter import OfferFilter

MIB = 1024**2
DISK_GB = 100
"""What SkyPilot asks for; the disk is paid for as long as the instance exists."""
MONTH_H = 720
"""Hours of a month in Vast's price of storage [assumed], where the ask does not tell the hourly price itself."""
MOST = 20_000
CUT = 64
"""Asks in an answer that was cut off: the search may hold to its own default whatever `limit` says."""
GPUS = (
    "RTX 4090", "RTX A6000", "L40S", "L4", "A10", "A100 PCIE", "A100 SXM4", "H100 PCIE", "H100 NVL", "H100 SXM", "H200",
    "B200",
)  # fmt: skip
"""Vast's names of the GPUs whose speed the broker knows."""
AT_ONCE = 500
"""Rows that are read before other work of the daemon gets a turn."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which asks are offers at all."""

    regions: Sequence[str]
    community: bool
    verified: bool
    min_reliability: float
    cuda_min: str
    restart_s: float


def country(geolocation: Any) -> str | None:
    """`Bavaria, DE` → DE: hosts say where they are as they like, but a country code comes last."""
    found = re.search(r"\b([A-Z]{2})$", geolocation) if isinstance(geolocation, str) else None
    return found[1] if found else None


class VastMarket:
    def __init__(self, wanted: Wanted, clock: Clock) -> None:
        self._wanted, self._clock = wanted, clock
        self._cuda_min = _version(wanted.cuda_min)

    def query(self, gpu: str | None = None) -> Mapping[str, Any]:
        """Body of the search. What is left out for a reason that people should see is asked for all the same.

        By price; of one GPU by what a dollar does, since the cheapest would all be machines with a single one.
        """
        query: dict[str, Any] = {
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "disk_space": {"gte": DISK_GB},
            "type": "on-demand",
            "allocated_storage": DISK_GB,
            "order": [["dlperf_per_dphtotal", "desc"]] if gpu else [["dph_total", "asc"]],
            "limit": MOST,
        }
        if gpu:
            query["gpu_name"] = {"eq": gpu}
        if self._wanted.verified:
            query["verified"] = {"eq": True}
        return query

    async def fill(self, sieve: OfferFilter, asks: Sequence[Any]) -> None:
        """Each ask once, however often it was found."""
        now = self._clock.now()
        seen: set[int] = set()
        countries: set[str] = set()
        for start in range(0, len(asks), AT_ONCE):
            for ask in asks[start : start + AT_ONCE]:
                try:
                    if ask["id"] not in seen:
                        seen.add(ask["id"])
                        if (region := country(ask.get("geolocation"))) is not None:
                            countries.add(region)
                        self._add(sieve, ask, now)
                except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError):
                    sieve.drop("unreadable")
            await asyncio.sleep(0)
        sieve.ask_back("vast", unsold_regions(self._wanted.regions, countries))

    def _add(self, sieve: OfferFilter, ask: Mapping[str, Any], now: datetime) -> None:
        region = country(ask["geolocation"])
        if (why := self._unfit(ask, region)) is not None:
            return sieve.drop(why)
        assert region is not None
        if self._wanted.regions and region not in self._wanted.regions:
            return
        disk = _disk_usd_per_hour(ask)
        whole = Decimal(str(ask["dph_base"]))
        sell = _Seller(ask, region, disk, whole, now)
        sieve.add(sell.offer(whole, spot=False))
        if ask.get("min_bid") is not None:
            floor = Decimal(str(ask["min_bid"]))
            sieve.add(sell.offer(floor if floor > whole else bid(floor, whole, self._wanted.restart_s), spot=True))

    def _unfit(self, ask: Mapping[str, Any], region: str | None) -> str | None:
        """Why an ask is not for us, as a short reason to count by."""
        wanted = self._wanted
        if region is None:
            return "no country"
        if _version(str(ask["cuda_max_good"])) < self._cuda_min:
            return f"driver older than CUDA {wanted.cuda_min}"
        if not wanted.community and not _datacentre(ask):
            return "not in a data centre"
        if ask["reliability2"] < wanted.min_reliability:
            return f"reliability below {wanted.min_reliability:g}"
        return None


class _Seller:
    """One ask; what does not depend on the price is worked out once."""

    def __init__(self, ask: Mapping[str, Any], region: str, disk: Decimal, whole: Decimal, now: datetime) -> None:
        share = min(1.0, ask["cpu_cores_effective"] / ask["cpu_cores"])
        memory = int(ask["gpu_ram"]) * MIB
        self._ask, self._disk, self._whole, self._now = ask, disk, whole, now
        # SkyPilot splits the type at its hyphens.
        gpu = re.sub(r"[^0-9A-Za-z.]+", "_", ask["gpu_name"])
        self._kind = f"{ask['num_gpus']}x-{gpu}-{int(ask['cpu_cores'])}-{int(ask['cpu_ram'])}"
        self._region = region
        self._accelerator, self._memory = accelerator(ask["gpu_name"], memory), memory
        self._vcpus = int(ask["cpu_cores_effective"])
        self._ram = int(ask["cpu_ram"] * share) * MIB
        self._facts = _facts(ask)

    def offer(self, price: Decimal, *, spot: bool) -> Offer:
        ask = self._ask
        return Offer(
            id=f"vast/vast/{self._region}/{self._kind}/{ask['id']}/{'spot' if spot else 'on-demand'}",
            provider="vast",
            cloud="vast",
            region=self._region,
            instance_type=self._kind,
            accelerator=self._accelerator,
            gpus=ask["num_gpus"],
            gpu_memory_bytes=self._memory,
            vcpus=self._vcpus,
            ram_bytes=self._ram,
            disk_bytes=DISK_GB * GB,
            spot=spot,
            # A price that is 0 stays so, for the sieve to see.
            usd_per_hour=usd(price + self._disk) if price > 0 else price,
            on_demand_usd_per_hour=usd(self._whole + self._disk),
            available=True,
            trust="secure" if _datacentre(ask) else "community",
            facts=self._facts,
            purchase={"ask": str(ask["id"]), "machine": str(ask["machine_id"]), "bid": f"{price:f}" if spot else ""},
            seen_at=self._now,
        )


def _facts(ask: Mapping[str, Any]) -> HostFacts:
    gpus = ask["num_gpus"]
    return HostFacts(
        host=str(ask["machine_id"]),
        disk_usd_per_gib_month=_per_gib(ask.get("storage_cost")),
        disk_mb_s=ask.get("disk_bw"),
        down_mbit_s=ask.get("inet_down"),
        up_mbit_s=ask.get("inet_up"),
        ingress_usd_per_gib=_per_gib(ask.get("inet_down_cost")),
        egress_usd_per_gib=_per_gib(ask.get("inet_up_cost")),
        cuda_max=str(ask["cuda_max_good"]),
        driver=ask.get("driver_version"),
        interconnect=None if gpus < 2 else "nvlink" if (ask.get("bw_nvlink") or 0) > 0 else "pcie",
        reliability=ask["reliability2"],
    )


def _disk_usd_per_hour(ask: Mapping[str, Any]) -> Decimal:
    """Of `DISK_GB`: as the search was asked to price it, else from the price of a GB and month."""
    told = ask.get("storage_total_cost")
    if told is not None:
        return Decimal(str(told))
    return Decimal(str(ask["storage_cost"])) * DISK_GB / MONTH_H


def _datacentre(ask: Mapping[str, Any]) -> bool:
    return bool(ask.get("datacenter")) or (ask.get("hosting_type") or 0) >= 1


def _per_gib(usd_per_gb: Any) -> Decimal | None:
    return None if usd_per_gb is None else usd(Decimal(str(usd_per_gb)) * GIB / GB)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
