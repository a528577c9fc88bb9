"""Tables of offers: the current offers with one line per provider, and the offers of a past decision."""

from collections import Counter

from broker.api.schemas.offers import OfferList, OfferView, ProviderStatusView
from broker.api.schemas.plans import DecisionView
from broker.cli.core import formatting
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable

COLUMNS = (
    Column(name="cloud", min_width=11),
    Column(name="region", min_width=9, rank=2),
    Column(name="type", min_width=8, rank=1),
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


def show(out: Output, page: OfferList) -> None:
    """Print the offers, then one line per provider."""
    table = TerminalTable(COLUMNS, map(_row, page.items))
    out.print(table if page.items else "no offers", f"{len(page.items)} of {page.total} offers")
    for status in page.providers:
        out.print(provider(status))


def _row(offer: OfferView) -> tuple[str, ...]:
    return (
        formatting.cloud(offer),
        offer.region,
        offer.instance_type,
        formatting.gpu(offer),
        formatting.market(offer),
        formatting.money(offer.usd_per_hour),
        formatting.money(offer.usd_per_hour / offer.gpus) if offer.gpus > 1 else "",
        str(offer.vcpus),
        formatting.size(offer.ram_bytes),
        _host(offer),
        FREE[offer.available],
        formatting.ago(offer.seen_at).removesuffix(" ago"),
        offer.source,
    )


def _host(offer: OfferView) -> str:
    """Return `community, 99.2 %`: the trust class of the host, and the reliability that its cloud reports."""
    parts: list[str] = [offer.trust] if offer.trust else []
    if offer.facts is not None and offer.facts.reliability is not None:
        parts.append(f"{offer.facts.reliability:.1%}")
    return ", ".join(parts)


def provider(status: ProviderStatusView) -> str:
    """Return `vast: 4812 offers, 3 s ago; skipped: 12 price 0 or less`, or the provider's error."""
    text = f"{status.name}: {status.offers} offers"
    if status.seen_at is not None:
        text += f", {formatting.ago(status.seen_at)}"
    if status.error is not None:
        text += f"; DOWN: {status.error}"
    if status.dropped:
        ranked = sorted(status.dropped.items(), key=lambda item: (-item[1], item[0]))
        text += "; skipped: " + ", ".join(f"{count} {why}" for why, count in ranked)
    return text


DECISION = (
    Column(name="offer"),
    Column(name="$/h", right=True, rank=3),
    Column(name="$ to finish", right=True, rank=2),
    Column(name="result"),
    Column(name="reason", min_width=12, rank=1),
)


REASONS_FROM = 100
"""Width in terminal cells from which the table of a decision shows the reasons."""


def dropped_examples(decision: DecisionView) -> list[str]:
    """Return one line for each reason of drops, such as `memory (12): needs 31 GiB of 24`, most frequent first."""
    dropped = [line for line in decision.items if line.drop is not None]
    examples = {line.drop: line.reason for line in reversed(dropped)}
    counts = Counter(line.drop for line in dropped)
    return [f"{drop} ({count}): {examples[drop]}" for drop, count in counts.most_common()]


def show_decision(out: Output, decision: DecisionView, limit: int) -> None:
    """Print the first `limit` offers of a purchase decision, ranked as they were then."""
    rows = [
        (
            line.offer,
            formatting.money(line.usd_per_hour),
            formatting.money(line.usd_p50),
            line.drop or "kept",
            line.reason,
        )
        for line in decision.items[:limit]
    ]
    out.print(TerminalTable(DECISION, rows, title="Offers at the time of purchase", plain=True))
    if out.console.width < REASONS_FROM:
        for text in dropped_examples(decision):
            out.print(text)
    if (more := len(decision.items) - limit) > 0:
        out.print(f"{more} more offers; --limit {len(decision.items)} shows all")
