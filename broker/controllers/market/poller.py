"""Market poller: the latest offers of every provider.

Steps: ask all providers at once, record offers or the error of each, publish the offers that are not stale.
Facts: the offers of each provider, the time of its latest answer.
Decisions: which offers are for sale, and why a provider has none.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from broker.domain.errors import OutcomeUnknown, ProviderError
from broker.domain.instance import Caps
from broker.domain.offer import GpuAsk, Offer, ProviderStatus
from broker.ports import Clock, Provider

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MarketIntervals:
    poll_s: float = 30.0
    limit_s: float = 60.0
    """Timeout of one provider. Its previous offers stay for sale meanwhile."""
    stale_s: float = 600.0
    """Age after which offers that could not be refreshed are no longer for sale."""


class MarketPoller:
    """Polls the providers and serves their offers. A provider that fails keeps its offers until they are stale."""

    name = "market"

    def __init__(self, providers: Mapping[str, Provider], clock: Clock, intervals: MarketIntervals) -> None:
        self._providers = providers
        self._clock = clock
        self._intervals = intervals
        self._latest: dict[str, Sequence[Offer]] = {}
        self._status = {name: ProviderStatus(name=name) for name in providers}
        self._for_sale: tuple[Offer, ...] = ()
        self.every_s = intervals.poll_s

    async def step(self) -> bool:
        """Poll all providers concurrently. A failing provider is reported in `status` and does not delay the others."""
        await asyncio.gather(*map(self._poll, self._providers))
        self._publish()
        return False

    async def _poll(self, name: str) -> None:
        provider, status = self._providers[name], self._status[name]
        try:
            offers = tuple(await self._list_offers(provider))
        except ProviderError as e:
            if status.error != str(e):
                log.warning("offers of %s: %s: %s", name, type(e).__name__, e)
            self._status[name] = replace(status, error=str(e))
            return
        self._latest[name] = offers
        self._status[name] = ProviderStatus(name=name, dropped=dict(provider.dropped), seen_at=self._clock.now())
        self._publish()  # offers of a fast cloud do not wait for a slow one

    async def _list_offers(self, provider: Provider) -> Sequence[Offer]:
        try:
            async with asyncio.timeout(self._intervals.limit_s):
                return await provider.offers(GpuAsk())
        except ProviderError:
            raise
        except TimeoutError:
            raise OutcomeUnknown(f"no prices within {self._intervals.limit_s:g} s") from None
        except Exception as e:
            log.exception("offers of %s failed", provider.name)
            raise OutcomeUnknown(f"{type(e).__name__} while asking for prices; see the daemon's log") from e

    def _publish(self) -> None:
        oldest = self._clock.now() - timedelta(seconds=self._intervals.stale_s)
        self._for_sale = tuple(offer for offers in self._latest.values() for offer in offers if offer.seen_at >= oldest)

    def offers(self) -> Sequence[Offer]:
        """Return the offers that are for sale; the same objects until the next poll."""
        return self._for_sale

    def status(self) -> Sequence[ProviderStatus]:
        """Return the status of every provider, in the order of the configuration."""
        counts = dict.fromkeys(self._providers, 0)
        for offer in self._for_sale:
            counts[offer.provider] += 1
        return [replace(status, offers=counts[name]) for name, status in self._status.items()]

    def troubles(self) -> Mapping[str, str]:
        """Return why a provider did not answer or has no offers, in one line, by its name."""
        return {status.name: why for status in self.status() if (why := _trouble(status)) is not None}

    def caps(self) -> Mapping[str, Caps]:
        return {name: provider.caps for name, provider in self._providers.items()}


def _trouble(status: ProviderStatus) -> str | None:
    if status.error is not None or status.offers:
        return status.error
    if not status.dropped:
        return "nothing is for sale"
    ranked = sorted(status.dropped.items(), key=lambda item: (-item[1], item[0]))
    return "left out: " + ", ".join(f"{count} {why}" for why, count in ranked)
