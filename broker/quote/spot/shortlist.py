"""The few offers that a review of a running attempt compares, shared by all attempts of a round.

A quote over a whole market takes up to 0.1 s, too long for thousands of running attempts. An attempt moves to one of
the cheapest spot offers of a kind of machine only, so the others are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest

from broker.domain.offer import Offer
from broker.domain.spec import Resources
from broker.estimator.preemption_rate import History
from broker.lifecycle.account_refusals import account_keys
from broker.quote.offer_index import OfferGroup, offer_index

OFFERS_OF_A_KIND = 8
"""Number of offers of each kind of machine that are compared, the cheapest ones."""


def shortlist(
    offers: Sequence[Offer], spots: History, resources: Resources, excluded: Mapping[str, str]
) -> tuple[Offer, ...]:
    """Return the cheapest offers of each kind that the spec's providers and regions allow and that are on sale."""
    index, selected = offer_index(offers, spots), list[Offer]()
    regions, providers = frozenset(resources.regions), frozenset(resources.providers)
    for group in index.machines:
        if providers and group.like.provider not in providers:
            continue
        on_sale = (
            (price, number)
            for price, number in _on_sale(group)
            if (not regions or offers[number].region in regions) and not _is_excluded(offers[number], excluded)
        )
        selected += (offers[number] for _, number in nsmallest(OFFERS_OF_A_KIND, on_sale))
    return tuple(selected)


def _on_sale(group: OfferGroup) -> Iterable[tuple[float, int]]:
    """Yield price and number of each offer that the cloud does not report as sold out."""
    return (
        (price, number)
        for price, number, is_gone in zip(group.prices, group.numbers, group.gone, strict=True)
        if not is_gone and price >= 0
    )


def _is_excluded(offer: Offer, excluded: Mapping[str, str]) -> bool:
    if not excluded:
        return False
    return any(key in excluded for key in (offer.id, offer.host_key, *account_keys(offer)))
