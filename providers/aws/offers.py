"""Rows of AWS: a machine in a region on demand, and in each of its zones by the spot price there."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from broker.domain.errors import ProviderError
from broker.domain.money import ZERO, usd
from broker.domain.offer import GIB, HostFacts, Offer
from broker.ports import Clock
from providers.aws.market import AwsMachineType, AwsMarket, Kinds, quota_of
from providers.common.offer_filter import OfferFilter

DISK_GIB = 200
"""Of the volume (gp3): the system takes 45, the image and the job the rest. Its price is part of the machine's."""
HOURS_A_MONTH = 730
MINIMUM_S = 60
"""aws.amazon.com/ec2/pricing/on-demand: by the second, with a minimum of 60 seconds."""
LIKELY = 3
"""Score from which spot capacity counts as there. Asked for one type alone, AWS never scores higher than this."""
NO_PRICE = "on-demand price is not known: the Pricing API does not answer, or does not list it"


@dataclass(frozen=True, kw_only=True)
class _Region:
    """What is known of one region."""

    name: str
    kinds: Kinds
    zones: Mapping[str, Mapping[str, str]]
    spot: Mapping[tuple[str, str], Decimal]
    quotas: Mapping[str, float]
    on_demand: Mapping[str, Decimal | None]
    """By instance type, of the machine alone."""
    scores: Mapping[str, Mapping[str, int]]
    disk_usd_per_gib_month: Decimal | None
    egress_usd_per_gib: Decimal | None


class AwsOffers:
    """Asks all regions at once; one that does not answer is counted, and the others go on."""

    def __init__(self, market: AwsMarket, clock: Clock, regions: Sequence[str]) -> None:
        self._market, self._clock, self._regions = market, clock, tuple(regions)

    async def rows(self, sieve: OfferFilter) -> None:
        """Raises the first region's error when none answers."""
        found = await asyncio.gather(*(self._known(region) for region in self._regions), return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        for error in errors:
            if not isinstance(error, ProviderError) or len(errors) == len(found):
                raise error
        for region, one in zip(self._regions, found, strict=True):
            if isinstance(one, BaseException):
                sieve.drop(f"{region} does not answer")
            else:
                self._sell(one, sieve)

    def price(self, region: str, kind: str) -> Decimal | None:
        """What such a machine costs on demand with its disk, as far as the last polls told; asks nobody."""
        alone = self._market.on_demand.last(kind, {}).get(region)
        return None if alone is None else _with_disk(alone, self._market.disk.last("gp3", {}).get(region))

    def spot_price(self, region: str, kind: str, zone: str) -> Decimal | None:
        """What such a spot machine costs by now with its disk, likewise."""
        alone = self._market.spot.last(region, {}).get((kind, zone))
        return None if alone is None else _with_disk(alone, self._market.disk.last("gp3", {}).get(region))

    async def _known(self, region: str) -> _Region:
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

    def _sell(self, region: _Region, sieve: OfferFilter) -> None:
        for why, times in region.kinds.dropped.items():
            for _ in range(times):
                sieve.drop(why)
        for name, machine in region.kinds.machines.items():
            zones = region.zones.get(name, {})
            if not zones:
                continue
            if machine.on_demand:
                self._sell_on_demand(region, machine, sieve)
            if machine.spot:
                self._sell_spot(region, machine, zones, sieve)

    def _sell_on_demand(self, region: _Region, machine: AwsMachineType, sieve: OfferFilter) -> None:
        price = region.on_demand[machine.name]
        if price is None:
            sieve.drop(NO_PRICE)
        elif (why := _over_quota(machine, False, region.quotas)) is not None:
            sieve.drop(why)
        else:
            sieve.add(self._offer(region, machine, None, price))

    def _sell_spot(self, region: _Region, machine: AwsMachineType, zones: Iterable[str], sieve: OfferFilter) -> None:
        why = _over_quota(machine, True, region.quotas)
        for zone in zones:
            price = region.spot.get((machine.name, zone))
            if price is None:
                continue
            if why is not None:
                sieve.drop(why)
            else:
                sieve.add(self._offer(region, machine, zone, price))

    def _offer(self, region: _Region, machine: AwsMachineType, zone: str | None, price: Decimal) -> Offer:
        ids = region.zones[machine.name]
        listed = region.on_demand[machine.name]
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
            spot=zone is not None,
            usd_per_hour=_with_disk(price, disk),
            on_demand_usd_per_hour=None if listed is None else _with_disk(listed, disk),
            billed_from="running",  # EC2: seconds in the state "running"; "pending" is free
            billing_minimum_s=MINIMUM_S,
            price_moves=zone is not None,
            available=True if score >= LIKELY else None,
            trust="secure",
            facts=_facts(machine, disk, region.egress_usd_per_gib),
            purchase=_purchase(region, machine, zone),
            seen_at=self._clock.now(),
        )


def _facts(machine: AwsMachineType, disk: Decimal | None, egress: Decimal | None) -> HostFacts:
    together = None
    if machine.gpus > 1:
        together = "nvlink" if machine.accelerator.startswith(("h", "b", "a100")) else "pcie"
    return HostFacts(
        disk_usd_per_gib_month=disk,
        down_mbit_s=machine.network_mbit_s,
        up_mbit_s=machine.network_mbit_s,
        ingress_usd_per_gib=ZERO,
        egress_usd_per_gib=egress,
        interconnect=together,
    )


def _purchase(region: _Region, machine: AwsMachineType, zone: str | None) -> Mapping[str, str]:
    """`zones`: what SkyPilot's catalog says of each zone, `<id>=<spot price>` and empty where that is not known."""
    ids = region.zones[machine.name]
    prices = {name: region.spot.get((machine.name, name)) for name in ids if zone in (None, name)}
    listed = region.on_demand[machine.name]
    bought = {"zones": ",".join(f"{ids[name]}={'' if price is None else price}" for name, price in prices.items())}
    if zone is not None:
        bought["zone"] = zone
    if listed is not None:
        bought["on_demand"] = str(listed)
    return bought


def _with_disk(price: Decimal, usd_per_gib_month: Decimal | None) -> Decimal:
    return usd(price + (usd_per_gib_month or ZERO) * DISK_GIB / HOURS_A_MONTH)


def _over_quota(machine: AwsMachineType, spot: bool, quotas: Mapping[str, float]) -> str | None:
    found = quota_of(machine.name, spot, quotas)
    if found is None or found[1] >= machine.vcpus:
        return None
    name, vcpus = found
    return f"quota of 0 for {name}" if vcpus <= 0 else f"quota of {vcpus:g} vCPUs for {name}"
