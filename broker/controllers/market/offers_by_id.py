"""The market's latest offers by id."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from broker.domain.offer import Offer

Offers = Callable[[], Sequence[Offer]]
"""What is for sale; the same object until the market was asked again."""


class OffersById:
    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self._read: Sequence[Offer] = ()
        self._by_id: Mapping[str, Offer] = {}
        self._seen_at: dict[str, datetime] = {}

    def get(self, offer_id: str) -> Offer | None:
        """The offer as it is for sale now; None when it is not any more."""
        self._refresh()
        return self._by_id.get(offer_id)

    def seen_at(self, provider: str) -> datetime | None:
        """When the provider's newest offer was seen; None: it sells nothing."""
        self._refresh()
        return self._seen_at.get(provider)

    def _refresh(self) -> None:
        latest = self._offers()
        if latest is self._read:
            return
        self._read, self._by_id, self._seen_at = latest, {offer.id: offer for offer in latest}, {}
        for offer in latest:
            if (known := self._seen_at.get(offer.provider)) is None or offer.seen_at > known:
                self._seen_at[offer.provider] = offer.seen_at
