"""Offers of AWS: each instance type on demand per region, and as spot per zone."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from broker.domain.errors import ProviderError
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB, DiskSale, HostFacts, Offer
from broker.ports import Clock
from providers.aws.market import AwsMachineType, AwsMarket, InstanceTypes, quota_of
from providers.common.bill_rules import BILL_RULES
from providers.common.market_rules import OfferFilter, RawRow, listed_price

DISK_GIB = 200
"""Size of the volume (gp3) in GiB: 45 for the system, the rest for image and job. An offer's price includes it."""
MAX_DISK_GIB = 16_384
"""Largest gp3 volume in GiB that every region sells."""
HOURS_PER_MONTH = 730
BILL = BILL_RULES["aws"]
MIN_SCORE = 3
"""Placement score from which spot capacity counts as available. For a single type AWS returns at most this score."""
NO_PRICE = "on-demand price is not known: the Pricing API does not answer, or does not list it"


@dataclass(frozen=True, kw_only=True)
class _Region:
    """Facts about one region."""

    name: str
    kinds: InstanceTypes
    zones: Mapping[str, Mapping[str, str]]
    """Zone ids by zone name, by instance type."""
    spot: Mapping[tuple[str, str], Decimal]
    """Dollars per hour by (instance type, zone name), without the disk."""
    quotas: Mapping[str, float]
    on_demand: Mapping[str, Decimal | None]
    """Dollars per hour by instance type, without the disk; None: the price is not known."""
    scores: Mapping[str, Mapping[str, int]]
    """Spot placement scores by zone id, by instance type."""
    disk_usd_per_gib_month: Decimal | None
    """Dollars per GiB and month of gp3; None: the price is not known, and prices of offers exclude the disk."""
    egress_usd_per_gib: Decimal | None
    """Dollars per GiB to the internet; None: the price is not known."""


class AwsOffers:
    """Offers of all configured regions; a region that does not answer is counted as a dropped row."""

    def __init__(self, market: AwsMarket, clock: Clock, regions: Sequence[str]) -> None:
        self._market, self._clock, self._regions = market, clock, tuple(regions)

    async def rows(self, offer_filter: OfferFilter) -> None:
        """Add the offers of all regions to `offer_filter`. Raises the first region's error if no region answers."""
        results = await asyncio.gather(*(self._facts_of(region) for region in self._regions), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, ProviderError) or len(errors) == len(results):
                raise error
        for region, result in zip(self._regions, results, strict=True):
            if isinstance(result, BaseException):
                offer_filter.drop(f"{region} does not answer")
            else:
                self._add_region(result, offer_filter)

    def price(self, region: str, kind: str) -> Decimal | None:
        """Return the on-demand dollars per hour with disk from the last polls, or None if they had no price.

        The method makes no call.
        """
        price, _ = listed_price(self._market.on_demand.last(kind, {}).get(region))
        return None if price is None else _with_disk(price, self._market.disk.last("gp3", {}).get(region))

    def spot_price(self, region: str, kind: str, zone: str) -> Decimal | None:
        """Return the spot dollars per hour with disk from the last polls, or None. The method makes no call."""
        price, _ = listed_price(self._market.spot.last(region, {}).get((kind, zone)))
        return None if price is None else _with_disk(price, self._market.disk.last("gp3", {}).get(region))

    async def _facts_of(self, region: str) -> _Region:
        market = self._market
        kinds, zones, spot = await asyncio.gather(
            market.kinds.get(region), market.zones.get(region), market.spot.get(region)
        )
        names = sorted(kinds.machines)
        quotas, disk, egress = await asyncio.gather(
            market.quotas.get_or(region, {}), market.disk.get_or("gp3", {}), market.egress.get_or("internet", {})
        )
        prices = await asyncio.gather(*(market.on_demand.get_or(name, {}) for name in names))
        scores = await asyncio.gather(*(market.scores.get_or(name, {}) for name in names))
        return _Region(
            name=region, kinds=kinds, zones=zones, spot=spot, quotas=quotas,
            on_demand={name: listed.get(region) for name, listed in zip(names, prices, strict=True)},
            scores=dict(zip(names, scores, strict=True)),
            disk_usd_per_gib_month=disk.get(region),
            egress_usd_per_gib=egress.get(region),
        )  # fmt: skip

    def _add_region(self, region: _Region, offer_filter: OfferFilter) -> None:
        for why, times in region.kinds.dropped.items():
            for _ in range(times):
                offer_filter.drop(why)
        for name, machine in region.kinds.machines.items():
            zones = region.zones.get(name, {})
            if not zones:
                continue
            if not offer_filter.takes(RawRow(gpu=machine.gpu, gpus=machine.gpus)):
                continue
            on_demand = offer_filter.on_demand(region.on_demand[machine.name])
            if machine.on_demand:
                self._add_on_demand(region, machine, on_demand, offer_filter)
            if machine.spot:
                self._add_spot(region, machine, zones, on_demand, offer_filter)

    def _add_on_demand(
        self, region: _Region, machine: AwsMachineType, price: Decimal | None, offer_filter: OfferFilter
    ) -> None:
        if price is None:
            if region.on_demand[machine.name] is None:
                offer_filter.drop(NO_PRICE)
        elif (why := _quota_message(machine, False, region.quotas)) is not None:
            offer_filter.drop(why)
        else:
            offer_filter.add(self._offer(region, machine, None, price, price))

    def _add_spot(
        self, region: _Region, machine: AwsMachineType, zones: Iterable[str], on_demand: Decimal | None,
        offer_filter: OfferFilter,
    ) -> None:  # fmt: skip
        why = _quota_message(machine, True, region.quotas)
        for zone in zones:
            price = offer_filter.spot(region.spot.get((machine.name, zone)), on_demand)
            if price is None:
                continue
            if why is not None:
                offer_filter.drop(why)
            else:
                offer_filter.add(self._offer(region, machine, zone, price, on_demand))

    def _offer(
        self, region: _Region, machine: AwsMachineType, zone: str | None, price: Decimal, listed: Decimal | None
    ) -> Offer:
        ids = region.zones[machine.name]
        disk = region.disk_usd_per_gib_month
        market = f"spot/{zone}" if zone else "on-demand"
        score = region.scores[machine.name].get(ids[zone], 0) if zone else 0
        return Offer(
            id=f"aws/aws/{region.name}/{machine.name}/{market}",
            provider="aws",
            cloud="aws",
            region=region.name,
            instance_type=machine.name,
            accelerator=machine.accelerator,
            gpus=machine.gpus,
            gpu_memory_bytes=machine.gpu_memory_bytes,
            vcpus=machine.vcpus,
            ram_bytes=machine.ram_bytes,
            disk_bytes=DISK_GIB * GIB,
            larger_disk=_larger_disk(disk),
            spot=zone is not None,
            usd_per_hour=_with_disk(price, disk),
            on_demand_usd_per_hour=None if listed is None else _with_disk(listed, disk),
            billing_quantum_s=BILL.quantum_s,
            billed_from=BILL.billed_from,  # EC2 bills the state "running"; "pending" is free
            billing_minimum_s=BILL.minimum_s,
            price_moves=zone is not None,
            available=True if score >= MIN_SCORE else None,
            trust="secure",
            facts=_facts(machine, disk, region.egress_usd_per_gib),
            purchase=_purchase(region, machine, zone, listed),
            seen_at=self._clock.now(),
        )


def _facts(machine: AwsMachineType, disk: Decimal | None, egress: Decimal | None) -> HostFacts:
    interconnect = None
    if machine.gpus > 1:
        interconnect = "nvlink" if machine.accelerator.startswith(("h", "b", "a100")) else "pcie"
    return HostFacts(
        disk_usd_per_gib_month=disk,
        down_mbit_s=machine.network_mbit_s,
        up_mbit_s=machine.network_mbit_s,
        ingress_usd_per_gib=ZERO,
        egress_usd_per_gib=egress,
        interconnect=interconnect,
    )


def _larger_disk(usd_per_gib_month: Decimal | None) -> DiskSale | None:
    """Return the larger volumes of a region; None: their price is not known."""
    if usd_per_gib_month is None:
        return None
    return DiskSale(max_bytes=MAX_DISK_GIB * GIB, usd_per_gib_hour=usd_per_gib_month / HOURS_PER_MONTH)


def _purchase(region: _Region, machine: AwsMachineType, zone: str | None, listed: Decimal | None) -> Mapping[str, str]:
    """Return the offer's `purchase` for `AwsCloud.purchase`.

    `zones`: comma-separated `<zone id>=<spot price>`; the price is empty if it is not known.
    """
    ids = region.zones[machine.name]
    prices = {name: listed_price(region.spot.get((machine.name, name)))[0] for name in ids if zone in (None, name)}
    purchase = {"zones": ",".join(f"{ids[name]}={'' if price is None else price}" for name, price in prices.items())}
    if zone is not None:
        purchase["zone"] = zone
    if listed is not None:
        purchase["on_demand"] = str(listed)
    return purchase


def _with_disk(price: Decimal, usd_per_gib_month: Decimal | None) -> Decimal:
    return usd(price + (usd_per_gib_month or ZERO) * DISK_GIB / HOURS_PER_MONTH)


def _quota_message(machine: AwsMachineType, spot: bool, quotas: Mapping[str, float]) -> str | None:
    quota = quota_of(machine.name, spot, quotas)
    if quota is None or quota[1] >= machine.vcpus:
        return None
    name, vcpus = quota
    return f"quota of 0 for {name}" if vcpus <= 0 else f"quota of {vcpus:g} vCPUs for {name}"
