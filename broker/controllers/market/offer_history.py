"""Recorder of prices and availability, in buckets of five minutes.

Steps: add each new answer of a provider to its bucket; write a bucket once its five minutes are over.
Facts: the market's offers, and the time of each provider's latest answer.
Decisions: the figures of a bucket, by `broker.reporting.offer_history`. A provider without an answer has no bucket: its
offers are unknown, not sold out. Every broker writes its buckets; the database keeps the first that arrives.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from broker.controllers.base.context import ControllerContext
from broker.domain.market.offer_history import bucket_of
from broker.domain.offer import Offer, ProviderStatus
from broker.reporting.offer_history import BucketTally, OfferPoll

AT_ONCE = 2000
"""Offers that are read before other tasks may run: about 2 ms."""


class ListedMarket(Protocol):
    """Latest answers of all providers; see `MarketPoller`."""

    def offers(self) -> Sequence[Offer]: ...

    def status(self) -> Sequence[ProviderStatus]: ...


async def offers_by_provider(market: ListedMarket) -> dict[str, list[Offer]]:
    """Return the offers for sale by provider. Other tasks run meanwhile."""
    by_provider: dict[str, list[Offer]] = defaultdict(list)
    for number, offer in enumerate(market.offers(), start=1):
        by_provider[offer.provider].append(offer)
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
    return by_provider


class OfferHistory:
    name = "offer_history"

    def __init__(self, context: ControllerContext, market: ListedMarket) -> None:
        self._context = context
        self._market = market
        self._tallies: dict[str, BucketTally] = {}
        self._answered_at: dict[str, datetime] = {}
        self.every_s = context.intervals.market_s

    async def step(self) -> bool:
        listed_at = {s.name: s.seen_at for s in self._market.status() if s.seen_at and self._is_new(s.name, s.seen_at)}
        offers = await offers_by_provider(self._market) if listed_at else {}
        for name, at in listed_at.items():
            await self._add(name, at, offers.get(name, []))
        await self._write_ended()
        return False

    def _is_new(self, name: str, answered_at: datetime) -> bool:
        is_new = self._answered_at.get(name) != answered_at
        self._answered_at[name] = answered_at
        return is_new and not self._context.providers[name].caps.runs_on_host  # the daemon's own host is not a market

    async def _add(self, name: str, at: datetime, offers: Sequence[Offer]) -> None:
        bucket, tally = bucket_of(at), self._tallies.get(name)
        if tally is not None and tally.bucket < bucket:
            await self._write_ended()
            tally = None
        if tally is None or tally.bucket > bucket:  # the clock was set back: the later bucket has not begun
            tally = self._tallies[name] = BucketTally(name, bucket)
        poll = OfferPoll()
        for start in range(0, len(offers), AT_ONCE):
            poll.add(offers[start : start + AT_ONCE])
            await asyncio.sleep(0)
        tally.add(poll)

    async def _write_ended(self) -> None:
        """Write the buckets that are over. While the clock is not trusted they are dropped, so they stay unknown."""
        now = bucket_of(self._context.clock.now())
        ended = [tally for tally in self._tallies.values() if tally.bucket < now]
        if ended and await self._context.is_clock_right():
            await self._context.store.record_offers([tally.sample() for tally in ended])
        for tally in ended:
            del self._tallies[tally.provider]
