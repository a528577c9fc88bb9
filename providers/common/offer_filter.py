"""Filter for impossible offers of a cloud: they are dropped and counted, never repaired."""

from collections import Counter
from collections.abc import Iterable, Mapping

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
        self.strange: list[str] = []
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

    def ask_back(self, cloud: str, regions: Iterable[str]) -> None:
        """Report configured regions without offers, counted like dropped rows. `regions`: see `unsold`."""
        for region in regions:
            line = f"of providers.{cloud}.regions is not there now: {region}"
            self.strange.append(line)
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
