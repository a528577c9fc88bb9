"""Rules that the clouds' markets share: which offers are dropped as impossible, and how much to bid."""

from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, Decimal
from math import log

from broker.domain.offer import GIB, GpuAsk, Offer

_MEMORY_GB = {
    "h100-sxm": (79, 96), "h100-pcie": (79, 96), "h100-nvl": (93, 102), "h200-sxm": (138, 152), "b200": (178, 196),
    "a100-80gb-sxm": (79, 87), "a100-80gb-pcie": (79, 87), "a100-40gb": (39, 44), "l40s": (44, 52),
    "rtx4090": (23, 52), "a6000": (47, 52), "a10g": (22, 26), "l4": (22, 26),
}  # fmt: skip
"""Possible memory of one GPU in decimal gigabytes, by accelerator.

The ranges allow for drivers' reserves and both readings of `GB`. An RTX 4090 has 24, or 48 if it was modified.
"""


class OfferFilter:
    """Collects plausible offers that match an ask, and counts dropped offers by reason."""

    def __init__(self, ask: GpuAsk) -> None:
        self._ask = ask
        self._dropped: Counter[str] = Counter()
        self.offers: list[Offer] = []
        self.unknown_settings: list[str] = []
        """Configured values that the cloud does not know, one line each."""

    @property
    def dropped(self) -> Mapping[str, int]:
        return dict(self._dropped)

    def add(self, offer: Offer) -> None:
        """Add a plausible offer that matches the ask; count an impossible one; ignore others."""
        if (why := impossible(offer)) is not None:
            self.drop(why)
        elif self._asked(offer):
            self.offers.append(offer)

    def report_unknown_regions(self, cloud: str, regions: Iterable[str]) -> None:
        """Report configured regions without offers, and count them as dropped rows. `regions`: see `unsold_regions`."""
        for region in regions:
            line = f"of providers.{cloud}.regions is not there now: {region}"
            self.unknown_settings.append(line)
            self.drop(line)

    def drop(self, why: str) -> None:
        self._dropped[why] += 1

    def _asked(self, offer: Offer) -> bool:
        ask = self._ask
        wanted = not ask.accelerators or any(
            offer.accelerator == name or offer.accelerator.startswith(name + "-") for name in ask.accelerators
        )
        return wanted and (not ask.regions or offer.region in ask.regions) and offer.gpus >= ask.min_gpus


def impossible(offer: Offer) -> str | None:
    """Return why an offer is impossible, as a short reason to count by, or None if it is plausible."""
    if offer.usd_per_hour <= 0:
        return "price 0 or less"
    if offer.spot and offer.on_demand_usd_per_hour is not None and offer.usd_per_hour > offer.on_demand_usd_per_hour:
        return "spot above on-demand"
    low, high = _MEMORY_GB.get(offer.accelerator, (1, 1000))
    if not low * 10**9 <= offer.gpu_memory_bytes <= high * 10**9:
        return f"memory of {offer.accelerator} out of range"
    if offer.gpus < 1 or offer.vcpus < 1 or offer.ram_bytes < GIB:
        return "no GPU, no processor or no memory"
    return None


OUTBID_PER_HOUR = 1.0
"""Evictions per hour of a machine with a bid at the floor price [assumed]; the lowest bid is evicted first."""
PRICE_STEP = 0.05
"""Margin, as a share of the floor price, that makes evictions e times rarer [assumed]."""
TENTH_CENT = Decimal("0.001")
"""Unit in dollars to which bids are rounded up."""


def bid(floor: Decimal, on_demand: Decimal | None, restart_s: float) -> Decimal:
    """Return the bid in $/h for a machine whose lowest winning bid is `floor`, all per GPU or all per machine.

    The cloud charges the bid. With margin h an hour costs `floor (1 + h)`. Evictions have the rate
    `OUTBID_PER_HOUR exp(-h / PRICE_STEP)`, and each one also costs `restart_s` of paid time. To first order in h the
    cost is minimal at

        h = PRICE_STEP log(OUTBID_PER_HOUR restart_s / 3600 / PRICE_STEP),    at least 0,

    so the margin is 0 if a restart is cheap. The bid never exceeds the on-demand price, which cannot be outbid.
    """
    ratio = OUTBID_PER_HOUR * restart_s / 3600 / PRICE_STEP
    margin = Decimal(repr(round(PRICE_STEP * log(ratio), 6))) if ratio > 1 else Decimal(0)
    amount = (floor * (1 + margin)).quantize(TENTH_CENT, rounding=ROUND_CEILING)
    return amount if on_demand is None else min(amount, on_demand)
