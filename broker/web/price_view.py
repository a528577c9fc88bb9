"""Recorded prices as the page Offers shows them: one line for each market, the share for sale, and days. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal

from broker.api.schemas.offers import OfferHistoryView, OfferSeriesView, PricePoint

WIDTH, HEIGHT, STRIP = 1000.0, 100.0, 10.0
"""Size of the drawing of prices, and height of the strip below it, in units of the drawing."""


@dataclass(frozen=True, kw_only=True)
class PriceStep:
    """All matching machines of one market in one step of time."""

    at: datetime
    usd: Decimal | None
    """Lowest dollars an hour of one GPU; None: no price was listed."""
    available: float | None
    """Share of the time in which a machine was for sale, at least; None: not known."""


@dataclass(frozen=True, kw_only=True)
class PriceDay:
    """One day (UTC) of a market."""

    day: date
    usd: Decimal | None
    """Lowest dollars an hour of one GPU; None: no price was listed."""
    available: float | None
    """Mean share of the time in which a machine was for sale; None: not known."""


@dataclass(frozen=True, kw_only=True)
class PriceLine:
    """Prices of one market over the window, as a drawing of WIDTH by HEIGHT and in figures."""

    market: str
    latest: Decimal | None
    """Price of the last step; None: no price was listed then."""
    lowest: Decimal | None
    highest: Decimal | None
    available: float | None
    """Mean share of the time in which a machine was for sale; None: not known."""
    path: str
    """Steps of the lowest price; steps without a price are gaps."""
    strip: str
    """Share for sale of each step."""
    known: str
    """Background of the strip, below the steps whose share is known."""
    days: tuple[PriceDay, ...]


def price_lines(history: OfferHistoryView) -> tuple[PriceLine, ...]:
    """Return a line for each market that the history contains, spot first."""
    by_market = [(spot, [item for item in history.items if item.spot is spot]) for spot in (True, False)]
    return tuple(_line("spot" if spot else "on demand", items, history) for spot, items in by_market if items)


def merged_steps(items: Iterable[OfferSeriesView]) -> list[PriceStep]:
    """Return the steps of several series as one, in the order of time."""
    steps: dict[datetime, list[tuple[int, PricePoint]]] = defaultdict(list)
    for item in items:
        for point in item.points:
            steps[point.at].append((max(1, item.gpus), point))
    return [_merged(at, steps[at]) for at in sorted(steps)]


def _merged(at: datetime, points: Sequence[tuple[int, PricePoint]]) -> PriceStep:
    usd = min((point.lowest_usd / gpus for gpus, point in points if point.lowest_usd is not None), default=None)
    share = max((point.available for _, point in points if point.available is not None), default=None)
    # A machine that is listed without its capacity may be for sale, so that less than the whole share is unknown.
    is_unknown = any(point.available is None and point.lowest_usd is not None for _, point in points)
    return PriceStep(at=at, usd=usd, available=None if is_unknown and share != 1 else share)


def _line(market: str, items: Sequence[OfferSeriesView], history: OfferHistoryView) -> PriceLine:
    steps = merged_steps(items)
    prices = [step.usd for step in steps if step.usd is not None]
    lowest, highest = min(prices, default=None), max(prices, default=None)
    width = timedelta(seconds=history.step_s) / (history.until - history.since) * WIDTH

    def x_of(at: datetime) -> float:
        return (at - history.since) / (history.until - history.since) * WIDTH

    def price_y(step: PriceStep) -> float | None:
        if step.usd is None or lowest is None or highest is None:
            return None
        return HEIGHT / 2 if lowest == highest else float((highest - step.usd) / (highest - lowest)) * HEIGHT

    return PriceLine(
        market=market,
        latest=steps[-1].usd,
        lowest=lowest,
        highest=highest,
        available=_mean(step.available for step in steps),
        path="".join(_path(steps, price_y, x_of, width)),
        strip="".join(_bars([(x_of(step.at), step.available or 0.0) for step in steps], width)),
        known="".join(_bars([(x_of(step.at), 1.0) for step in steps if step.available is not None], width)),
        days=tuple(_days(steps)),
    )


def _path(
    steps: Sequence[PriceStep],
    y_of: Callable[[PriceStep], float | None],
    x_of: Callable[[datetime], float],
    width: float,
) -> Iterator[str]:
    """Yield SVG path commands: each step is level, and a gap begins a new line."""
    end: float | None = None
    for step in steps:
        y, x = y_of(step), x_of(step.at)
        if y is None:
            continue
        if end is None or abs(x - end) > width / 2:
            yield f"M{_inside(x):.1f} {y:.1f}"
        else:
            yield f"V{y:.1f}"
        end = x + width
        yield f"H{_inside(end):.1f}"


def _bars(steps: Sequence[tuple[float, float]], width: float) -> Iterator[str]:
    """Yield SVG path commands: a bar for each (start, share of the strip's height); none for 0."""
    for x, share in steps:
        if share:
            top = STRIP * (1 - share)
            yield f"M{_inside(x):.1f} {STRIP:.0f}V{top:.1f}H{_inside(x + width):.1f}V{STRIP:.0f}z"


def _inside(x: float) -> float:
    return min(WIDTH, max(0.0, x))


def _days(steps: Sequence[PriceStep]) -> Iterator[PriceDay]:
    by_day: dict[date, list[PriceStep]] = defaultdict(list)
    for step in steps:
        by_day[step.at.date()].append(step)
    for day, members in sorted(by_day.items(), reverse=True):
        usd = min((step.usd for step in members if step.usd is not None), default=None)
        yield PriceDay(day=day, usd=usd, available=_mean(step.available for step in members))


def _mean(shares: Iterable[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None
