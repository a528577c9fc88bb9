"""What a cloud lists and cannot be true is left out and counted: never repaired, never silent."""

from collections import Counter
from collections.abc import Iterable, Mapping

from broker.domain.offer import GIB, GpuAsk, Offer

_MEMORY_GB = {
    "h100-sxm": (79, 96), "h100-pcie": (79, 96), "h100-nvl": (93, 102), "h200-sxm": (138, 152), "b200": (178, 196),
    "a100-80gb-sxm": (79, 87), "a100-80gb-pcie": (79, 87), "a100-40gb": (39, 44), "l40s": (44, 52),
    "rtx4090": (23, 52), "a6000": (47, 52), "a10g": (22, 26), "l4": (22, 26),
}  # fmt: skip
"""What one GPU of a kind can have, decimal gigabytes, drivers' reserves and both readings of `GB` allowed for.

An RTX 4090 has 24, or 48 where somebody has rebuilt it.
"""


class OfferFilter:
    """Collects offers that can be true and match an ask; counts the others by reason."""

    def __init__(self, ask: GpuAsk) -> None:
        self._ask = ask
        self._dropped: Counter[str] = Counter()
        self.offers: list[Offer] = []
        self.strange: list[str] = []
        """What of the configuration the cloud does not know, one line each."""

    @property
    def dropped(self) -> Mapping[str, int]:
        return dict(self._dropped)

    def add(self, offer: Offer) -> None:
        """Keeps it, counts why not, or passes over what was not asked for."""
        if (why := impossible(offer)) is not None:
            self.drop(why)
        elif self._asked(offer):
            self.offers.append(offer)

    def ask_back(self, cloud: str, regions: Iterable[str]) -> None:
        """Of the configuration; counted like a row, so that it is shown with the offers. `regions`: see `unsold`."""
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
    """Why a row cannot be true, as a short reason to count by; None when nothing speaks against it."""
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
