"""A market as a quote reads it: what each offer is judged by, in columns that are made once for many quotes.

Tens of thousands of offers are gone through for every quote, and most of that time would be spent on fetching objects
from all over memory.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from broker.domain.offer import Offer
from broker.estimator.preemption_rate import History, preemptions_per_s
from broker.quote.machine_cost import line_key

UNTRUE = -1.0
"""Stands for a spot price above on-demand."""
_HERE = attrgetter("emulated_on", "emulated_vcpus", "vcpus", "reaches_local_files")


class OfferGroup:
    """One kind of machine. Columns have an entry for each offer of it."""

    __slots__ = ("cores", "disk", "gone", "like", "number", "numbers", "prices", "ram", "rates")

    def __init__(self, like: Offer, number: int) -> None:
        """`like`: one of them; the others differ in price, place, host and hazard only."""
        self.like, self.number = like, number
        self.cores, self.ram, self.disk = like.vcpus, like.ram_bytes, like.disk_bytes
        """The least that any of them has."""
        self.numbers = array("l")
        """Of the offers."""
        self.prices = array("d")
        """Dollars an hour of one."""
        self.rates = array("d")
        """Expected preemptions a second of one."""
        self.gone = bytearray()
        """1: the cloud says that it has none now."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OfferIndex:
    offers: Sequence[Offer]
    spots: History
    machines: Sequence[OfferGroup]
    which: Sequence[int]
    """Of `machines`, by the number of an offer."""


def shelf(offers: Sequence[Offer], spots: History) -> OfferIndex:
    """Remembered for the last market, where it is a tuple: it is quoted from until the clouds are asked again."""
    kept = _latest.get("shelf")
    if kept is not None and kept.offers is offers and kept.spots is spots:
        return kept
    made = _stock(offers, spots)
    if isinstance(offers, tuple):
        _latest["shelf"] = made
    return made


_latest: dict[str, OfferIndex] = {}


def _stock(offers: Sequence[Offer], spots: History) -> OfferIndex:
    """In one pass and in their order: so they lie in memory, and reading them takes most of the time."""
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
        asked, on_demand = offer.usd_per_hour, offer.on_demand_usd_per_hour
        untrue = offer.spot and on_demand is not None and asked > on_demand
        kind.prices.append(UNTRUE if untrue else float(asked))
        kind.rates.append(preemptions_per_s(offer, spots))
        kind.gone.append(offer.available is False)
    return OfferIndex(offers=offers, spots=spots, machines=tuple(kinds.values()), which=which)


def _key(offer: Offer) -> object:
    """All that a kind of machine follows from: offers that agree in it differ in price, place, host and hazard only."""
    # An attribute is read faster in a line than by an `attrgetter`. Few offers have the other parts.
    key: object = (
        offer.provider, offer.accelerator, offer.gpus, offer.gpu_memory_bytes,
        offer.spot, offer.trust, offer.billing_quantum_s, offer.billing_minimum_s,
    )  # fmt: skip
    if offer.facts is not None:
        key = (key, line_key(offer.facts))
    if offer.emulated_on is not None or offer.reaches_local_files or not offer.gpus:
        key = (key, _HERE(offer))
    return key
