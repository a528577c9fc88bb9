"""The latest offers of every provider."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from broker.domain.errors import ProviderError
from broker.domain.instance import Caps
from broker.domain.offer import GpuAsk, Offer
from broker.ports import Clock, Provider

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MarketRhythm:
    poll_s: float = 30.0
    stale_s: float = 600.0
    """Offers that could not be refreshed for so long are no longer for sale."""


class Market:
    """A controller that polls, and what quotes read. A silent provider keeps its last offers until stale."""

    name = "market"

    def __init__(self, providers: Mapping[str, Provider], clock: Clock, rhythm: MarketRhythm) -> None:
        self._providers = providers
        self._clock = clock
        self._rhythm = rhythm
        self._latest: dict[str, Sequence[Offer]] = {}
        self._for_sale: tuple[Offer, ...] = ()
        self.every_s = rhythm.poll_s

    async def step(self) -> bool:
        for name, provider in self._providers.items():
            try:
                self._latest[name] = tuple(await provider.offers(GpuAsk()))
            except ProviderError as e:
                log.warning("offers of %s: %s: %s", name, type(e).__name__, e)
        oldest = self._clock.now() - timedelta(seconds=self._rhythm.stale_s)
        self._for_sale = tuple(o for offers in self._latest.values() for o in offers if o.seen_at >= oldest)
        return False

    def offers(self) -> Sequence[Offer]:
        """What can be bought as far as we know; the same objects until the next poll."""
        return self._for_sale

    def caps(self) -> Mapping[str, Caps]:
        return {name: provider.caps for name, provider in self._providers.items()}
