"""Columnar index of all offers, built once per market poll and shared by all quotes.

Every quote reads tens of thousands of offers. Reading the objects, which are scattered over memory, would take most of
the quote's time.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, groupby, islice
from math import inf
from operator import attrgetter, eq

from broker.domain.offer import Offer
from broker.estimator.preemption_rate import History, preemptions_per_s
from broker.quote.machine_cost import line_key

IMPLAUSIBLE = -1.0
"""Entry of `OfferGroup.prices` for an offer whose spot price is above its on-demand price."""
_OPTIONAL_PARTS = attrgetter("emulated_on", "emulated_vcpus", "vcpus", "reaches_local_files")


class OfferGroup:
    """Offers of one kind of machine. Each column has an entry for each offer."""

    __slots__ = ("cores", "disk", "ends", "gone", "like", "number", "numbers", "prices", "ram", "rates")

    def __init__(self, like: Offer, number: int) -> None:
        """Start a group with its first offer. Other offers differ in price, region, host and preemption rate only."""
        self.like, self.number = like, number
        self.cores, self.ram, self.disk = like.vcpus, like.ram_bytes, like.disk_bytes
        """Smallest vCPUs, RAM and disk of the group's offers."""
        self.numbers = array("l")
        """Number of each offer: its position in `OfferIndex.offers`. The other columns have the same order."""
        self.prices = array("d")
        """Dollars an hour of one machine, or `IMPLAUSIBLE`."""
        self.rates = array("d")
        """Expected preemptions a second of one machine."""
        self.ends = array("d")
        """Epoch seconds at which the host's contract ends; infinite: no end is listed."""
        self.gone = bytearray()
        """1 if the cloud reports that the offer is sold out, otherwise 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OfferIndex:
    """All offers of a market, grouped by kind of machine."""

    offers: Sequence[Offer]
    spots: History
    machines: Sequence[OfferGroup]
    which: Sequence[int]
    """Position in `machines` of each offer's group, by offer number."""


def offer_index(offers: Sequence[Offer], spots: History) -> OfferIndex:
    """Return the index of a market.

    The latest indices of tuples are cached, because they are used until the clouds are polled again. In addition to the
    market, reviews of running attempts use short lists.
    """
    for cached in _latest:
        if cached.offers is offers and cached.spots is spots:
            return cached
    index = _build(offers, spots)
    if isinstance(offers, tuple):
        _latest.append(index)
    return index


_latest: deque[OfferIndex] = deque(maxlen=4)


def _build(offers: Sequence[Offer], spots: History) -> OfferIndex:
    """Build the index in one pass in memory order, because reading the offers takes most of the time."""
    kinds: dict[object, OfferGroup] = {}
    which = array("l")
    for number, offer in enumerate(offers):
        key = _key(offer)
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = OfferGroup(offer, len(kinds))
        which.append(kind.number)
        kind.numbers.append(number)
        if offer.vcpus < kind.cores:
            kind.cores = offer.vcpus
        if offer.ram_bytes < kind.ram:
            kind.ram = offer.ram_bytes
        if offer.disk_bytes < kind.disk:
            kind.disk = offer.disk_bytes
        price, on_demand = offer.usd_per_hour, offer.on_demand_usd_per_hour
        is_implausible = offer.spot and on_demand is not None and price > on_demand
        kind.prices.append(IMPLAUSIBLE if is_implausible else float(price))
        kind.rates.append(preemptions_per_s(offer, spots))
        kind.ends.append(inf if offer.ends_at is None else offer.ends_at.timestamp())
        kind.gone.append(offer.available is False)
    return OfferIndex(offers=offers, spots=spots, machines=tuple(kinds.values()), which=which)


def _key(offer: Offer) -> object:
    """Return the key of the offer's group: offers with the same key differ in price, region, host, end and hazard."""
    # Direct attribute access is faster than an `attrgetter`, which serves only the few offers with optional parts.
    key: object = (
        offer.provider, offer.accelerator, offer.gpus, offer.gpu_memory_bytes,
        offer.spot, offer.trust, offer.billing_quantum_s, offer.billing_minimum_s,
    )  # fmt: skip
    if offer.facts is not None:
        key = (key, line_key(offer.facts))
    if offer.emulated_on is not None or offer.reaches_local_files or not offer.gpus:
        key = (key, _OPTIONAL_PARTS(offer))
    return key


def rank(numbers: list[int], keys: Sequence[float], offers: Sequence[Offer]) -> list[int]:
    """Return `numbers` sorted by key, then by offer id. Sorts ties separately, because this is faster than two keys."""
    ranked = sorted(numbers, key=keys.__getitem__)
    costs = list(map(keys.__getitem__, ranked))
    ties = compress(range(len(costs)), map(eq, costs, islice(costs, 1, None)))
    for _, run in groupby(enumerate(ties), key=lambda at: at[1] - at[0]):
        positions = [position for _, position in run]
        tie = slice(positions[0], positions[-1] + 2)
        ranked[tie] = sorted(ranked[tie], key=lambda number: offers[number].id)
    return ranked
