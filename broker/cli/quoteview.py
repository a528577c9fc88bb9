"""The data check and the quote, for people."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from broker.api.models import LineView, QuoteView
from broker.cli import words
from broker.cli.output import Output
from broker.decide.quote import LABELS
from broker.domain.offer import Drop, Verdict

SHOWN = 10
LONGEST_TEXT = 400


def show(out: Output, quote: QuoteView, *, every: bool = False) -> None:
    """The check, the kept offers ranked, the dropped ones grouped by reason; `every` cuts nothing."""
    kept = [line for line in quote.lines if line.verdict is Verdict.KEPT]
    shown = kept if every else kept[:SHOWN]
    if shown:
        out.say(offers(shown))
    if quote.kept > len(shown):
        out.say(f"and {quote.kept - len(shown)} more that would do; `gpubroker quote --all` shows every one")
    for line in dropped(quote):
        out.say(line)
    if not quote.kept:
        cheapest = f" (the cheapest that fits: {words.money(quote.cheapest_usd)})" if quote.cheapest_usd else ""
        out.say(f"no offer is left{cheapest}")
    if any(line.offer.simulated for line in shown):
        out.say("simulated offers cost nothing real: their machines are processes of the daemon's host")


def offers(lines: list[LineView]) -> Table:
    """Ranked by expected dollars to finish."""
    table = Table(title="Quote: offers by expected $ to finish", title_justify="left")
    for name, side in (("#", "right"), ("cloud", "left"), ("region", "left"), ("GPU", "left"), ("market", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for name in ("$/h", "time P50 – P90", "$ to finish P50 – P90"):
        table.add_column(name, justify="right")
    table.add_column("why")
    for number, line in enumerate(lines, 1):
        offer = line.offer
        table.add_row(
            str(number),
            words.cloud(offer),
            offer.region,
            words.gpu(offer),
            words.market(offer),
            words.money(offer.usd_per_hour),
            words.hours(line.hours_p50, line.hours_p90),
            words.span(line.usd_p50, line.usd_p90),
            line.reason,
        )
    return table


def dropped(quote: QuoteView) -> list[str]:
    """`dropped 12 offers: need more memory, e.g. rtx4090: needs 31 GiB of 24`, most frequent first."""
    examples: dict[Drop, LineView] = {}
    for line in quote.lines:
        if line.drop is not None:
            examples.setdefault(line.drop, line)
    lines = []
    for drop, count in sorted(quote.drops.items(), key=lambda item: -item[1]):
        example = examples.get(drop)
        text = f"; e.g. {words.gpu(example.offer)} at {words.cloud(example.offer)}: {example.reason}" if example else ""
        lines.append(f"dropped {count} {LABELS[drop]}{text}")
    return lines


def check(report: dict[str, Any]) -> RenderableType:
    """What the check found: a line each; texts are cut."""
    table = Table(title="Data and model", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(report):
        table.add_row(name, Text(value) if len(value) <= LONGEST_TEXT else Text(value[: LONGEST_TEXT - 1] + "…"))
    return table


def _flat(report: dict[str, Any], above: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in report.items():
        name = f"{above}{key.replace('_', ' ')}"
        if isinstance(value, dict):
            rows.extend(_flat(value, f"{name} · "))
        elif isinstance(value, list | tuple) and not any(isinstance(v, dict | list) for v in value):
            rows.append((name, ", ".join(map(str, value)) or "–"))
        elif value is not None:
            rows.append((name, _number(key, value)))
    return rows


def _number(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith("share"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
