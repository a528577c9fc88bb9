"""Amounts, durations, sizes and machines as text for the terminal."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from broker.domain.formatting import duration as duration
from broker.domain.gpu_names import marketed_gb
from broker.domain.money import format_usd

if TYPE_CHECKING:
    from broker.api.schemas.jobs import AttemptView
    from broker.api.schemas.offers import OfferView

GIB = 1024**3


def money(value: Decimal | None) -> str:
    return "–" if value is None else format_usd(value)


def hours(p50: float | None, p90: float | None) -> str:
    """Return the range from the median to the 90th percentile."""
    if p50 is None:
        return "–"
    return duration(p50 * 3600) if p90 is None else f"{duration(p50 * 3600)} – {duration(p90 * 3600)}"


def span(p50: Decimal | None, p90: Decimal | None) -> str:
    if p50 is None:
        return "–"
    return money(p50) if p90 is None else f"{money(p50)} – {money(p90)}"


def hours_count(hours: float) -> str:
    """Return hours with at least two significant digits: `0.0042`, `0.31`, `12.5`, `1,234.5`."""
    if not 0 < hours < 1:
        return f"{hours:,.1f}"
    return f"{hours:.2f}" if hours >= 0.095 else f"{hours:.4f}"


def size(count: float) -> str:
    """Return a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def gpu(offer: "OfferView", nodes: int = 1) -> str:
    """Return `2× l40s 48 GB`, or for several machines `3 nodes of 2× l40s 48 GB`: the size by which it is sold."""
    machines = f"{nodes} nodes of " if nodes > 1 else ""
    count = f"{offer.gpus}× " if offer.gpus > 1 else ""
    memory = f" {marketed_gb(offer.accelerator, offer.gpu_memory_bytes)} GB" if offer.gpu_memory_bytes else ""
    return f"{machines}{count}{offer.accelerator}{memory}"


def market(offer: "OfferView") -> str:
    return "spot" if offer.spot else "on-demand"


def cloud(offer: "OfferView") -> str:
    """Return the name of an offer's cloud; a simulated cloud is labelled in every view."""
    return f"{offer.cloud} (simulated)" if offer.simulated else offer.cloud


def machine(attempt: "AttemptView") -> str:
    """Return the machines of an attempt as text, with the price of all its nodes."""
    offer, nodes = attempt.offer, attempt.nodes
    price = money(offer.usd_per_hour * nodes)
    return f"{cloud(offer)} {offer.region} {gpu(offer, nodes)} {market(offer)} {price}/h"


def short_duration(seconds: float) -> str:
    """Return `45s`, `12m`, `3h05m` or `2d4h`, for narrow columns."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m"
    if total < 86_400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86_400}d{total % 86_400 // 3600}h" if total < 864_000 else f"{total // 86_400}d"


def short_age(then: datetime) -> str:
    """Return the age of a time in one unit: `45s`, `12m`, `30h` or `3d`."""
    total = max(0, round((datetime.now(UTC) - then).total_seconds()))
    units = ((172_800, 86_400, "d"), (5400, 3600, "h"), (90, 60, "m"), (0, 1, "s"))
    return next(f"{total // unit_s}{name}" for least_s, unit_s, name in units if total >= least_s)


def ago(then: datetime | None) -> str:
    return "–" if then is None else f"{duration((datetime.now(UTC) - then).total_seconds())} ago"
