"""The market's latest offers by id."""

from collections.abc import Callable, Mapping, Sequence

from broker.domain.offer import Offer

Offers = Callable[[], Sequence[Offer]]
"""What is for sale; the same object until the market was asked again."""


class ForSale:
    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self._read: Sequence[Offer] = ()
        self._by_id: Mapping[str, Offer] = {}

    def get(self, offer_id: str) -> Offer | None:
        """The offer as it is for sale now; None when it is not any more."""
        latest = self._offers()
        if latest is not self._read:
            self._read, self._by_id = latest, {offer.id: offer for offer in latest}
        return self._by_id.get(offer_id)
