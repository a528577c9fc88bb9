"""Columnar index of all offers, built once per market poll and shared by all quotes.

Every quote reads tens of thousands of offers, and fetching objects from all over memory would take most of its time.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, groupby, islice
from operator import attrgetter, eq

from broker.domain.offer import Offer
from broker.estimator.preemption_rate import History, preemptions_per_s
from broker.quote.machine_cost import line_key

UNTRUE = -1.0
"""Price of an offer whose spot price is above on-demand."""
_HERE = attrgetter("emulated_on", "emulated_vcpus", "vcpus", "reaches_local_files")


class OfferGroup:
    """Offers of one kind of machine. Each column has an entry for each offer."""

    __slots__ = ("cores", "disk", "gone", "like", "number", "numbers", "prices", "ram", "rates")

    def __init__(self, like: Offer, number: int) -> None:
        """Start a group with its first offer; the others differ only in price, place, host and hazard."""
        self.like, self.number = like, number
        self.cores, self.ram, self.disk = like.vcpus, like.ram_bytes, like.disk_bytes
        """Smallest values of any offer of the group."""
        self.numbers = array("l")
        """Numbers of the offers."""
        self.prices = array("d")
        """Dollars an hour of one machine."""
        self.rates = array("d")
        """Expected preemptions a second of one machine."""
        self.gone = bytearray()
        """1: the cloud reports that the offer is sold out."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OfferIndex:
    """All offers of a market, grouped by kind of machine."""

    offers: Sequence[Offer]
    spots: History
    machines: Sequence[OfferGroup]
    which: Sequence[int]
    """Position in `machines` for each offer number."""


def offer_index(offers: Sequence[Offer], spots: History) -> OfferIndex:
    """Return the index of a market.

    The latest one is cached if `offers` is a tuple, because it is used until the clouds are polled again.
    """
    cached = _latest.get("index")
    if cached is not None and cached.offers is offers and cached.spots is spots:
        return cached
    index = _build(offers, spots)
    if isinstance(offers, tuple):
        _latest["index"] = index
    return index


_latest: dict[str, OfferIndex] = {}


def _build(offers: Sequence[Offer], spots: History) -> OfferIndex:
    """Return the index, built in one pass in memory order, since reading the offers takes most of the time."""
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
        untrue = offer.spot and on_demand is not None and price > on_demand
        kind.prices.append(UNTRUE if untrue else float(price))
        kind.rates.append(preemptions_per_s(offer, spots))
        kind.gone.append(offer.available is False)
    return OfferIndex(offers=offers, spots=spots, machines=tuple(kinds.values()), which=which)


def _key(offer: Offer) -> object:
    """Return the key of a kind of machine; offers with the same key differ only in price, place, host and hazard."""
    # Direct attribute access is faster than an `attrgetter`. Few offers have the optional parts.
    key: object = (
        offer.provider, offer.accelerator, offer.gpus, offer.gpu_memory_bytes,
        offer.spot, offer.trust, offer.billing_quantum_s, offer.billing_minimum_s,
    )  # fmt: skip
    if offer.facts is not None:
        key = (key, line_key(offer.facts))
    if offer.emulated_on is not None or offer.reaches_local_files or not offer.gpus:
        key = (key, _HERE(offer))
    return key


def rank(numbers: list[int], keys: Sequence[float], offers: Sequence[Offer]) -> list[int]:
    """Return offer numbers by key, ties by offer id; sorting the numbers first and the few ties after is fastest."""
    ranked = sorted(numbers, key=keys.__getitem__)
    costs = list(map(keys.__getitem__, ranked))
    ties = compress(range(len(costs)), map(eq, costs, islice(costs, 1, None)))
    for _, run in groupby(enumerate(ties), key=lambda at: at[1] - at[0]):
        positions = [position for _, position in run]
        tie = slice(positions[0], positions[-1] + 2)
        ranked[tie] = sorted(ranked[tie], key=lambda number: offers[number].id)
    return ranked
