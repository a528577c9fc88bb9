"""Vast's asks (machines for rent) as offers: each ask once on demand and once by bid."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from broker.domain.formatting import unsold_regions
from broker.domain.money import usd
from broker.domain.offer import GIB, DiskSale, HostFacts, Offer
from broker.ports import Clock
from providers.common.bill_rules import BILL_RULES
from providers.common.cloud_values import as_integer, flag, moment, money, number, positive, text
from providers.common.gpu_names import GB, accelerator
from providers.common.market_rules import OfferFilter, RawRow, bid
from providers.vast.searches import SearchAnswer

MIB = 1024**2
DISK_GB = 100
"""Disk that SkyPilot requests, in GB; it is billed as long as the instance exists."""
MONTH_H = 720
"""Hours per month in Vast's storage price [assumed], for asks without an hourly price."""
SEARCH_LIMIT = 20_000
TRUNCATED_AT = 64
"""Vast's default limit of asks per answer. An answer of this length may be truncated, because Vast ignored `limit`."""
GPUS = (
    "RTX 4090", "RTX A6000", "L40S", "L4", "A10", "A100 PCIE", "A100 SXM4", "H100 PCIE", "H100 NVL", "H100 SXM", "H200",
    "B200",
)  # fmt: skip
"""Vast's names of the GPUs in the hardware table."""
ROWS_PER_TURN = 500
"""Asks that are read before the event loop runs other tasks."""


@dataclass(frozen=True, kw_only=True)
class AskFilter:
    """Conditions that an ask must meet to become an offer; see `VastConfig`."""

    regions: Sequence[str]
    community: bool
    verified: bool
    min_reliability: float
    cuda_min: str
    restart_s: float


def country(geolocation: Any) -> str | None:
    """Return the country code of a location, or None. Hosts use free text that ends in the code: `Bavaria, DE`."""
    match = re.search(r"\b([A-Z]{2})$", geolocation.strip()) if isinstance(geolocation, str) else None
    return match[1] if match else None


class VastMarket:
    """Search queries for asks, and their conversion to offers."""

    def __init__(self, ask_filter: AskFilter, clock: Clock) -> None:
        self._filter, self._clock = ask_filter, clock
        self._cuda_min = _version(ask_filter.cuda_min)

    def query(self, gpu: str | None = None) -> Mapping[str, Any]:
        """Return the body of a search, for all asks or those with one `gpu`.

        The search does not exclude asks that `fill` drops, because users see the reasons. A search for all asks sorts
        by price. A search for one `gpu` sorts by performance per dollar, because the cheapest machines all have a
        single GPU.
        """
        query: dict[str, Any] = {
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "disk_space": {"gte": DISK_GB},
            "type": "on-demand",
            "allocated_storage": DISK_GB,
            "order": [["dlperf_per_dphtotal", "desc"]] if gpu else [["dph_total", "asc"]],
            "limit": SEARCH_LIMIT,
        }
        if gpu:
            query["gpu_name"] = {"eq": gpu}
        if self._filter.verified:
            query["verified"] = {"eq": True}
        return query

    async def fill(self, offer_filter: OfferFilter, answers: Sequence[SearchAnswer]) -> None:
        """Add the offers of all asks to `offer_filter`. Of duplicate asks the latest seen counts."""
        ask_ids: set[str] = set()
        countries: set[str] = set()
        for answer in sorted(answers, key=lambda answer: answer.at_s, reverse=True):
            for start in range(0, len(answer.rows), ROWS_PER_TURN):
                for ask in answer.rows[start : start + ROWS_PER_TURN]:
                    self._add_new(offer_filter, ask, answer.seen_at, ask_ids, countries)
                await asyncio.sleep(0)
        offer_filter.report_unknown_regions("vast", unsold_regions(self._filter.regions, countries))

    def _add_new(
        self, offer_filter: OfferFilter, ask: Any, seen_at: datetime, ask_ids: set[str], countries: set[str]
    ) -> None:
        """Add the offers of an ask that is not in `ask_ids` yet. An unreadable ask costs itself alone."""
        try:
            if (ask_id := _id(ask["id"])) not in ask_ids:
                ask_ids.add(ask_id)
                if (region := country(ask.get("geolocation"))) is not None:
                    countries.add(region)
                self._add(offer_filter, ask, seen_at)
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError):
            offer_filter.drop("unreadable")

    def _add(self, offer_filter: OfferFilter, ask: Mapping[str, Any], now: datetime) -> None:
        region = country(ask["geolocation"])
        if (why := self._drop_reason(ask, region)) is not None:
            return offer_filter.drop(why)
        assert region is not None
        if self._filter.regions and region not in self._filter.regions:
            return
        if not offer_filter.takes(_raw(ask, now)):
            return
        on_demand = offer_filter.on_demand(ask["dph_base"])
        floor = offer_filter.spot(ask.get("min_bid"), on_demand)
        ask_offers = _AskOffers(ask, region, _disk_usd_per_hour(ask), on_demand, now)
        if on_demand is not None:
            offer_filter.add(ask_offers.offer(on_demand, spot=False))
        if floor is not None:
            offer_filter.add(ask_offers.offer(bid(floor, on_demand, self._filter.restart_s), spot=True))

    def _drop_reason(self, ask: Mapping[str, Any], region: str | None) -> str | None:
        """Return a short reason for which an ask is not an offer, or None. Dropped asks are counted by reason."""
        if region is None:
            return "no country"
        if flag(ask.get("rentable")) is False or flag(ask.get("rented")) or flag(ask.get("external")):
            return "not for rent"
        if self._filter.verified and text(ask.get("verification")) not in (None, "verified"):
            return "not verified by Vast"
        if _version(str(ask["cuda_max_good"])) < self._cuda_min:
            return f"driver older than CUDA {self._filter.cuda_min}"
        if not self._filter.community and not _is_datacentre(ask):
            return "not in a data centre"
        reliability = _reliability(ask)
        if reliability is None or not 0 <= reliability <= 1:
            return "reliability that is no share"
        if reliability < self._filter.min_reliability:
            return f"reliability below {self._filter.min_reliability:g}"
        return None


def _raw(ask: Mapping[str, Any], now: datetime) -> RawRow:
    """Return the ask's raw facts."""
    return RawRow(
        gpu=ask["gpu_name"],
        gpus=ask["num_gpus"],
        architecture=text(ask.get("cpu_arch")),
        maker=text(ask.get("gpu_arch")),
        contract_s=_contract_s(ask, now),
    )


def _contract_s(ask: Mapping[str, Any], now: datetime) -> float | str | None:
    """Return the seconds until the host's contract ends; None: it has no end; a text: its end cannot be read.

    `duration` (seconds) and `end_date` (time of the epoch) both end it, so the earlier one counts.
    """
    duration, end = ask.get("duration"), ask.get("end_date")
    ends: list[float | None] = []
    if duration is not None:
        ends.append(number(duration))
    if end is not None:
        then = moment(end)
        ends.append(number(end) if then is None else (then - now).total_seconds())
    seconds = [end_s for end_s in ends if end_s is not None]
    return "unreadable" if len(seconds) < len(ends) else min(seconds, default=None)


def _ends_at(ask: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return when the host's contract ends; None: no end within the calendar's range."""
    contract_s = _contract_s(ask, now)
    try:
        return now + timedelta(seconds=contract_s) if isinstance(contract_s, float) else None
    except OverflowError:
        return None


def _id(value: Any) -> str:
    """Return the number of an ask. Raises ValueError for any other value, which SkyPilot could not buy."""
    number_of_ask = as_integer(value)
    if number_of_ask is None or number_of_ask < 0:
        raise ValueError(f"{value!r} is not the number of an ask")
    return str(number_of_ask)


class _AskOffers:
    """Maker of the offers of one ask. Facts that do not depend on the price are computed once."""

    def __init__(
        self, ask: Mapping[str, Any], region: str, disk: Decimal, on_demand: Decimal | None, now: datetime
    ) -> None:
        cores, effective, ram_mib, gpus = (
            float(ask["cpu_cores"]), float(ask["cpu_cores_effective"]), int(float(ask["cpu_ram"])), int(ask["num_gpus"])
        )  # fmt: skip
        share = min(1.0, effective / cores)
        memory = int(float(ask["gpu_ram"])) * MIB
        self._ask, self._disk, self._on_demand, self._now = ask, disk, on_demand, now
        self._ends_at = _ends_at(ask, now)
        # Replace hyphens in the GPU's name, because SkyPilot splits the type at hyphens.
        gpu = re.sub(r"[^0-9A-Za-z.]+", "_", ask["gpu_name"])
        self._id, self._gpus = _id(ask["id"]), gpus
        self._kind = f"{gpus}x-{gpu}-{int(cores)}-{ram_mib}"
        self._region = region
        self._accelerator, self._memory = accelerator(ask["gpu_name"], memory), memory
        self._vcpus = int(effective)
        self._ram = int(ram_mib * share) * MIB
        self._facts = _facts(ask)
        self._larger_disk = _larger_disk(ask)

    def offer(self, price: Decimal, *, spot: bool) -> Offer:
        ask = self._ask
        return Offer(
            id=f"vast/vast/{self._region}/{self._kind}/{self._id}/{'spot' if spot else 'on-demand'}",
            provider="vast",
            cloud="vast",
            region=self._region,
            instance_type=self._kind,
            accelerator=self._accelerator,
            gpus=self._gpus,
            gpu_memory_bytes=self._memory,
            vcpus=self._vcpus,
            ram_bytes=self._ram,
            disk_bytes=DISK_GB * GB,
            larger_disk=self._larger_disk,
            spot=spot,
            usd_per_hour=usd(price + self._disk),
            on_demand_usd_per_hour=None if self._on_demand is None else usd(self._on_demand + self._disk),
            billing_quantum_s=BILL_RULES["vast"].quantum_s,
            billed_from=BILL_RULES["vast"].billed_from,
            billing_minimum_s=BILL_RULES["vast"].minimum_s,
            available=True,
            ends_at=self._ends_at,
            trust="secure" if _is_datacentre(ask) else "community",
            facts=self._facts,
            purchase={
                "ask": self._id,
                "machine": text(ask.get("machine_id")) or "",
                "bid": f"{price:f}" if spot else "",
            },
            seen_at=self._now,
        )


def _facts(ask: Mapping[str, Any]) -> HostFacts:
    return HostFacts(
        host=text(ask.get("machine_id")),
        disk_usd_per_gib_month=_per_gib(ask.get("storage_cost")),
        disk_mb_s=positive(ask.get("disk_bw")),
        down_mbit_s=positive(ask.get("inet_down")),
        up_mbit_s=positive(ask.get("inet_up")),
        ingress_usd_per_gib=_per_gib(ask.get("inet_down_cost")),
        egress_usd_per_gib=_per_gib(ask.get("inet_up_cost")),
        cuda_max=str(ask["cuda_max_good"]),
        driver=text(ask.get("driver_version")),
        interconnect=None if int(ask["num_gpus"]) < 2 else "nvlink" if positive(ask.get("bw_nvlink")) else "pcie",
        reliability=_reliability(ask),
    )


def _larger_disk(ask: Mapping[str, Any]) -> DiskSale | None:
    """Return the larger disks up to the host's free space; None: Vast reports no space or no price."""
    space, price = positive(ask.get("disk_space")), money(ask.get("storage_cost"))
    if space is None or price is None or int(space) <= DISK_GB:
        return None
    return DiskSale(max_bytes=int(space) * GB, usd_per_gib_hour=price * GIB / GB / MONTH_H)


def _disk_usd_per_hour(ask: Mapping[str, Any]) -> Decimal:
    """Return the dollars per hour of `DISK_GB`, computed from the monthly price per GB if Vast reports no total."""
    total = money(ask.get("storage_total_cost"))
    if total is not None:
        return total
    per_gb_month = money(ask["storage_cost"])
    if per_gb_month is None:
        raise ValueError("the ask has no price of its disk")
    return per_gb_month * DISK_GB / MONTH_H


def _reliability(ask: Mapping[str, Any]) -> float | None:
    """Return the host's reliability. Vast lists it as `reliability2`, and as `reliability` in newer documents."""
    newest = ask.get("reliability2")
    return number(ask.get("reliability") if newest is None else newest)


def _is_datacentre(ask: Mapping[str, Any]) -> bool:
    return flag(ask.get("datacenter")) is True or (number(ask.get("hosting_type")) or 0) >= 1


def _per_gib(usd_per_gb: Any) -> Decimal | None:
    amount = money(usd_per_gb)
    return None if amount is None else usd(amount * GIB / GB)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
