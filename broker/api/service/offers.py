"""Listings of offers and providers."""

from collections.abc import Collection, Mapping

from broker.api.schemas.offers import OfferList, OfferView, ProviderList, ProviderStatusView, ProviderView
from broker.api.service.interfaces import MarketReader
from broker.estimator.speed.hardware import matches


def for_sale(market: MarketReader, *, provider: str | None, accelerators: Collection[str], limit: int) -> OfferList:
    """List offers, cheapest first. An empty filter accepts every offer."""
    matching = [
        o
        for o in market.offers()
        if provider in (None, o.provider)
        and (not accelerators or any(matches(name, o.accelerator) for name in accelerators))
    ]
    matching.sort(key=lambda o: (o.usd_per_hour, o.id))
    shown = tuple(OfferView.model_validate(o) for o in matching[:limit])
    sources = tuple(ProviderStatusView.model_validate(s) for s in market.status())
    return OfferList(items=shown, total=len(matching), providers=sources)


def providers(market: MarketReader, problems: Mapping[str, str | None]) -> ProviderList:
    """List configured providers. `problems`: faults of their credentials, by provider; empty: not checked."""
    caps = market.caps()
    views = []
    for status in market.status():
        known = {"problem": problems.get(status.name), "self_stop": caps[status.name].self_stop}
        views.append(ProviderView(**ProviderStatusView.model_validate(status).model_dump(), **known))
    return ProviderList(items=tuple(views))
