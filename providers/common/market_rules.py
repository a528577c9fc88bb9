"""Rules that the clouds' markets share: which offers are dropped as impossible, and how much to bid."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from math import log

from broker.domain.offer import GIB, GpuAsk, Offer
from providers.common.cloud_values import number
from providers.common.gpu_names import memory_is_possible, name_fault

MIN_CONTRACT_S = 300.0
"""Shortest rest of a host's contract in seconds: the boot and the agent's start take as long at Vast [assumed].

A quote drops longer contracts that end before the job.
"""
X86 = frozenset({"amd64", "x86_64", "x86-64", "x86", "x64"})
UNLISTED = frozenset({"", "-", "n/a", "none", "null", "unknown"})
"""Texts of a missing processor or maker."""
MAX_GPUS = 64
"""Largest plausible number of GPUs of one machine; no cloud sells more than 16."""
NO_PRICE = "price 0 or less"
BAD_PRICE = "price that is not a number"


@dataclass(frozen=True, kw_only=True)
class RawRow:
    """One row of a market as the cloud lists it, before any price is added to it. None: the cloud does not list it."""

    gpu: str
    gpus: object
    architecture: str | None = None
    """Processor, e.g. `amd64` or `arm64`."""
    maker: str | None = None
    """Maker of the GPU, e.g. `NVIDIA`."""
    contract_s: object = None
    """Seconds until the host's contract ends."""


class OfferFilter:
    """Collects plausible offers that match an ask, and counts dropped offers by reason.

    An adapter first passes each raw row to `takes`, and each raw price to `on_demand` or `spot`. Only then may it add a
    disk's price, because a price of 0 with a disk looks like a price.
    """

    def __init__(self, ask: GpuAsk) -> None:
        self._ask = ask
        self._dropped: Counter[str] = Counter()
        self._position: dict[str, int] = {}
        """Position in `offers` by the offer's id."""
        self.offers: list[Offer] = []
        self.unknown_settings: list[str] = []
        """Configured values that the cloud does not know, one line each."""

    @property
    def dropped(self) -> Mapping[str, int]:
        return dict(self._dropped)

    def takes(self, row: RawRow) -> bool:
        """Return True for a plausible row that can be sold; count any other as dropped."""
        if (why := row_fault(row)) is not None:
            self.drop(why)
        return why is None

    def on_demand(self, price: object) -> Decimal | None:
        """Return a listed on-demand price, or None without a plausible price; count an implausible price as dropped."""
        amount, why = listed_price(price)
        if why is not None:
            self.drop(why)
        return amount

    def spot(self, price: object, on_demand: Decimal | None) -> Decimal | None:
        """Return a listed spot price, or None without a plausible price; count an implausible price as dropped.

        `on_demand`: the answer of `on_demand` for the same machine.
        """
        amount, why = listed_price(price)
        if amount is not None and on_demand is not None and amount > on_demand:
            why = "spot above on-demand"
        if why is not None:
            self.drop(why)
            return None
        return amount

    def add(self, offer: Offer) -> None:
        """Add a plausible offer that matches the ask; count an impossible one; ignore others.

        Of an offer that is listed twice the dearer one counts, because a cost cap must hold for either.
        """
        if (why := impossible(offer)) is not None:
            self.drop(why)
        elif self._is_requested(offer):
            position = self._position.setdefault(offer.id, len(self.offers))
            if position == len(self.offers):
                self.offers.append(offer)
                return
            self.drop("listed twice")
            if offer.usd_per_hour > self.offers[position].usd_per_hour:
                self.offers[position] = offer

    def report_unknown_regions(self, cloud: str, regions: Iterable[str]) -> None:
        """Report configured regions without offers, and count them as dropped rows. `regions`: see `unsold_regions`."""
        for region in regions:
            line = f"of providers.{cloud}.regions is not there now: {region}"
            self.unknown_settings.append(line)
            self.drop(line)

    def drop(self, why: str) -> None:
        self._dropped[why] += 1

    def _is_requested(self, offer: Offer) -> bool:
        ask = self._ask
        is_wanted = not ask.accelerators or any(
            offer.accelerator == name or offer.accelerator.startswith(name + "-") for name in ask.accelerators
        )
        return is_wanted and (not ask.regions or offer.region in ask.regions) and offer.gpus >= ask.min_gpus


def row_fault(row: RawRow) -> str | None:
    """Return why a row cannot be true or cannot be sold, as a short reason to count by, or None."""
    maker, architecture = (str(value or "").strip().lower() for value in (row.maker, row.architecture))
    if maker not in UNLISTED and not maker.startswith("nvidia"):
        return "not an NVIDIA GPU"
    if architecture not in UNLISTED and architecture not in X86:
        return "ARM processor: the image is for x86-64"
    if (why := name_fault(row.gpu)) is not None:
        return why
    gpus = number(row.gpus)
    if gpus is None or gpus <= 0:
        return "no GPU"
    if not gpus.is_integer():
        return "share of a GPU"
    if gpus > MAX_GPUS:
        return "too many GPUs"
    contract_s = number(row.contract_s)
    if row.contract_s is not None and contract_s is None:
        return "end of the host's contract that cannot be read"
    if contract_s is not None and contract_s < MIN_CONTRACT_S:
        return f"contract of the host ends within {MIN_CONTRACT_S / 60:.0f} min"
    return None


def listed_price(price: object) -> tuple[Decimal | None, str | None]:
    """Return a listed price, or why the price is implausible; None and None: not listed."""
    if price is None:
        return None, None
    if isinstance(price, bool):
        return None, BAD_PRICE
    try:
        amount = Decimal(str(price))
    except InvalidOperation:
        return None, BAD_PRICE
    if not amount.is_finite():
        return None, BAD_PRICE
    return (amount, None) if amount > 0 else (None, NO_PRICE)


def impossible(offer: Offer) -> str | None:
    """Return why an offer is impossible, as a short reason to count by, or None if it is plausible."""
    if offer.usd_per_hour <= 0:
        return NO_PRICE
    if offer.spot and offer.on_demand_usd_per_hour is not None and offer.usd_per_hour > offer.on_demand_usd_per_hour:
        return "spot above on-demand"
    if not memory_is_possible(offer.accelerator, offer.gpu_memory_bytes):
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
