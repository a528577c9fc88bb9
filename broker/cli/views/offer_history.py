"""History of offers in the terminal: a table, a plot of the cheapest series, and CSV."""

import csv
import io
from collections.abc import Sequence

from rich.text import Text

from broker.api.schemas.offers import OfferHistoryView, OfferSeriesView, PricePoint
from broker.cli.core import formatting
from broker.cli.core.output import Output
from broker.cli.core.plots import prices_in_terminal
from broker.cli.core.table import Column, TerminalTable

PLOTTED = 3
"""Maximum number of series in the plot. Without colours there is one, because all lines look the same."""
CSV_COLUMNS = (
    "at", "provider", "cloud", "region", "accelerator", "gpus", "market", "lowest_usd", "median_usd", "available",
)  # fmt: skip
COLUMNS = (
    Column(name="cloud", min_width=8),
    Column(name="region", min_width=9),
    Column(name="GPU"),
    Column(name="market"),
    Column(name="$/h now", right=True),
    Column(name="lowest", right=True),
    Column(name="median", right=True, rank=1),
    Column(name="available", right=True, rank=2),
    Column(name="points", right=True, rank=3),
)


def show(out: Output, page: OfferHistoryView) -> None:
    """Print one row for each series, then the prices of the cheapest series over time."""
    days = (page.until - page.since).days
    if not page.items:
        out.print(f"no price of these offers was recorded since {page.since:%Y-%m-%d %H:%M} UTC")
        return
    title = f"Prices of machines over {days} d, in steps of {formatting.duration(page.step_s)}"
    out.print(TerminalTable(COLUMNS, map(_row, page.items), title=title))
    if page.total > len(page.items):
        out.print(f"{len(page.items)} of {page.total} series; name --cloud, --region or --market to see others")
    lines = [(label(item), _days_ago(page, item)) for item in page.items[: PLOTTED if out.live else 1]]
    lines_shown = [(name, line) for name, line in lines if len(line) > 1]
    if lines_shown:
        out.print(Text.from_ansi(prices_in_terminal(lines_shown, colour=out.live)))


def label(item: OfferSeriesView) -> str:
    return f"{item.cloud} {item.region} {gpu(item)} {market(item)}"


def gpu(item: OfferSeriesView) -> str:
    return f"{item.gpus}× {item.accelerator}" if item.gpus > 1 else item.accelerator


def market(item: OfferSeriesView) -> str:
    return "spot" if item.spot else "on-demand"


def _row(item: OfferSeriesView) -> tuple[str, ...]:
    prices = [point.lowest_usd for point in item.points if point.lowest_usd is not None]
    medians = sorted(point.median_usd for point in item.points if point.median_usd is not None)
    shares = [point.available for point in item.points if point.available is not None]
    return (
        item.cloud,
        item.region,
        gpu(item),
        market(item),
        formatting.money(item.points[-1].lowest_usd),
        formatting.money(min(prices, default=None)),
        formatting.money(medians[len(medians) // 2] if medians else None),
        f"{sum(shares) / len(shares):.0%}" if shares else "?",
        str(len(item.points)),
    )


def _days_ago(page: OfferHistoryView, item: OfferSeriesView) -> list[tuple[float, float]]:
    """Return (days before the end, lowest price) of each point with a price."""
    return [
        (-(page.until - point.at).total_seconds() / 86_400, float(point.lowest_usd))
        for point in item.points
        if point.lowest_usd is not None
    ]


def as_csv(page: OfferHistoryView) -> str:
    """Return every point as one line of CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for item in page.items:
        writer.writerows(_csv_rows(item, item.points))
    return text.getvalue()


def _csv_rows(item: OfferSeriesView, points: Sequence[PricePoint]) -> list[list[object]]:
    where = [item.provider, item.cloud, item.region, item.accelerator, item.gpus, market(item)]
    return [[p.at.isoformat(), *where, p.lowest_usd, p.median_usd, p.available] for p in points]
