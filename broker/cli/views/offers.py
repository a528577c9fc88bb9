"""What is for sale, for people: one line an offer, then one line a provider."""

from broker.api.schemas.offers import OfferList, OfferView, ProviderStatusView
from broker.cli.core import formatting as words
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable

COLUMNS = (
    Column(name="cloud", least=11),
    Column(name="region", least=9, rank=2),
    Column(name="type", least=8, rank=1),
    Column(name="GPU"),
    Column(name="market"),
    Column(name="$/h", right=True),
    Column(name="$/GPU h", right=True, rank=3),
    Column(name="vCPU", right=True, rank=6),
    Column(name="RAM", right=True, rank=7),
    Column(name="host", rank=8),
    Column(name="free", rank=5),
    Column(name="age", right=True, rank=4),
    Column(name="source", rank=9),
)
FREE = {True: "yes", False: "no", None: "?"}


def show(out: Output, found: OfferList) -> None:
    sheet = TerminalTable(COLUMNS, map(_row, found.items))
    out.say(sheet if found.items else "nothing is for sale", f"{len(found.items)} of {found.total} offers")
    for status in found.providers:
        out.say(provider(status))


def _row(offer: OfferView) -> tuple[str, ...]:
    return (
        words.cloud(offer),
        offer.region,
        offer.instance_type,
        words.gpu(offer),
        words.market(offer),
        words.money(offer.usd_per_hour),
        words.money(offer.usd_per_hour / offer.gpus) if offer.gpus > 1 else "",
        str(offer.vcpus),
        words.size(offer.ram_bytes),
        _host(offer),
        FREE[offer.available],
        words.ago(offer.seen_at).removesuffix(" ago"),
        offer.source,
    )


def _host(offer: OfferView) -> str:
    """`community, 99.2 %`: whose it is and how reliable its cloud says it is."""
    parts: list[str] = [offer.trust] if offer.trust else []
    if offer.facts is not None and offer.facts.reliability is not None:
        parts.append(f"{offer.facts.reliability:.1%}")
    return ", ".join(parts)


def provider(status: ProviderStatusView) -> str:
    """`vast: 4812 offers, 3 s ago; left out: 12 price 0 or less`, or what it said instead."""
    text = f"{status.name}: {status.offers} offers"
    if status.seen_at is not None:
        text += f", {words.ago(status.seen_at)}"
    if status.error is not None:
        text += f"; DOWN: {status.error}"
    if status.dropped:
        ranked = sorted(status.dropped.items(), key=lambda item: (-item[1], item[0]))
        text += "; left out: " + ", ".join(f"{count} {why}" for why, count in ranked)
    return text
