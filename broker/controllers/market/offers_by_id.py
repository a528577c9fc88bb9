"""The market's latest offers by id."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from broker.domain.offer import Offer

Offers = Callable[[], Sequence[Offer]]
"""Returns the offers; the same object until the next poll of the market."""


class OffersById:
    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self._read: Sequence[Offer] = ()
        self._by_id: Mapping[str, Offer] = {}
        self._seen_at: dict[str, datetime] = {}

    def get(self, offer_id: str) -> Offer | None:
        """Return the current offer; None: it is no longer offered."""
        self._refresh()
        return self._by_id.get(offer_id)

    def seen_at(self, provider: str) -> datetime | None:
        """Return the time of the provider's newest offer; None: it has no offers."""
        self._refresh()
        return self._seen_at.get(provider)

    def _refresh(self) -> None:
        latest = self._offers()
        if latest is self._read:
            return
        self._read, self._by_id, self._seen_at = latest, {offer.id: offer for offer in latest}, {}
        for offer in latest:
            if (seen_at := self._seen_at.get(offer.provider)) is None or offer.seen_at > seen_at:
                self._seen_at[offer.provider] = offer.seen_at
