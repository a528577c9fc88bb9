"""Store operations on the history of prices and availability."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from broker.domain.market.offer_history import HistoryQuery, MarketGroup, OfferSample, RecordedHistory
from broker.domain.market.spot_evidence import SpotEvidence


class TenantOfferHistory(Protocol):
    """Part of `TenantStore`. The market belongs to no team, so every team reads the same."""

    async def offer_history(self, query: HistoryQuery) -> RecordedHistory:
        """Return the recorded buckets that a query selects."""
        ...

    async def recorded_accelerators(self) -> Sequence[str]:
        """Return the accelerators of the history, by name."""
        ...


class OfferHistoryStore(Protocol):
    """Part of `Store`, for the controllers."""

    async def record_offers(self, samples: Sequence[OfferSample]) -> Sequence[bool]:
        """Record buckets. Return for each whether it is new: of several brokers, the first writer of a bucket wins."""
        ...

    async def record_refusal(self, group: MarketGroup, bucket: int) -> None:
        """Record that a cloud refused a create for lack of capacity; a repetition within the bucket changes nothing."""
        ...

    async def spot_evidence(self, accelerators: Collection[str], *, since: datetime) -> SpotEvidence:
        """Return the spot offers and refused creates of some accelerators, and all own spot machines, since a time."""
        ...

    async def merge_offer_history(self, *, before: int) -> int:
        """Merge buckets before `before` into one row for each day, provider and GPU; return the number of merged rows.

        Returns 0 while another broker merges.
        """
        ...

    async def forget_offer_history(self, *, before: int) -> int:
        """Delete days that ended before bucket `before`, and refusals before it; return the number of deleted rows."""
        ...
