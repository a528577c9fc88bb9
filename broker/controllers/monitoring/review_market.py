"""The market as the review of attempts reads it: news of spot offers, and short lists that rounds share.

Used by the review controller of one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from broker.controllers.market.offers_by_id import Offers
from broker.domain.offer import Offer
from broker.domain.spec import Resources
from broker.estimator.planning.corrections import NO_CORRECTIONS, Corrections
from broker.quote.spot.shortlist import shortlist

CHEAPER = Decimal("0.95")
"""A spot offer is news if its price falls to this share of the price at the previous review."""


@dataclass(frozen=True, kw_only=True)
class ReviewShortlists:
    """Short lists of one market, own runs and exclusions."""

    offers: Sequence[Offer] = ()
    learned: Corrections = NO_CORRECTIONS
    excluded: Mapping[str, str] = field(default_factory=dict)
    by_key: dict[object, tuple[Offer, ...]] = field(default_factory=dict)
    """Short lists by the owner's exclusions, providers and regions."""

    def of(self, resources: Resources, refused_on_host: Mapping[str, str]) -> tuple[Offer, ...]:
        key = frozenset(refused_on_host), tuple(resources.providers), tuple(resources.regions)
        if key not in self.by_key:
            excluded = {**self.excluded, **refused_on_host}
            self.by_key[key] = shortlist(self.offers, self.learned.spots, resources, excluded)
        return self.by_key[key]


class ReviewMarket:
    """Latest offers of the market, as of the latest call of `is_news`."""

    def __init__(self, offers: Offers) -> None:
        self._read = offers
        self.offers: Sequence[Offer] = ()
        self._spot_usd: Mapping[str, Decimal] = {}
        self._lists = ReviewShortlists()

    @property
    def has_spot(self) -> bool:
        """True if a spot offer is on sale."""
        return bool(self._spot_usd)

    def is_news(self) -> bool:
        """Read the market. Return True if a spot offer is on sale that was not, or that was clearly more expensive."""
        market, before = self._read(), self._spot_usd
        if market is self.offers:
            return False
        self.offers = market
        self._spot_usd = {
            offer.id: offer.usd_per_hour for offer in market if offer.spot and offer.available is not False
        }
        return any(
            identity not in before or price <= before[identity] * CHEAPER for identity, price in self._spot_usd.items()
        )

    def lists(self, learned: Corrections, excluded: Mapping[str, str]) -> ReviewShortlists:
        """Return the short lists; those of the previous round while nothing that they depend on has changed."""
        offers = self._lists
        if offers.offers is not self.offers or offers.learned is not learned or offers.excluded != excluded:
            self._lists = ReviewShortlists(offers=self.offers, learned=learned, excluded=excluded)
        return self._lists
