"""The record of a purchase: every offer of its market, with the reason why it was kept or dropped."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from broker.domain.money import usd
from broker.domain.offer import Drop, Quote


@dataclass(frozen=True, kw_only=True)
class Considered:
    """One offer as it stood. `drop` is None for one that was kept; `usd_p50`: expected dollars to finish."""

    offer: str
    usd_per_hour: Decimal
    drop: Drop | None
    reason: str
    usd_p50: Decimal | None = None


def packed(quote: Quote) -> bytes:
    """Compressed, about 10 bytes an offer: reasons are few and written once."""
    reasons: dict[str, int] = {}
    rows = [
        [
            line.offer.id,
            str(line.offer.usd_per_hour),
            line.drop,
            reasons.setdefault(line.reason, len(reasons)),
            None if line.usd_p50 is None else str(line.usd_p50),
        ]
        for line in quote.lines
    ]
    return zlib.compress(json.dumps({"reasons": list(reasons), "offers": rows}, separators=(",", ":")).encode())


def unpacked(document: bytes) -> Sequence[Considered]:
    """In the order in which the offers were ranked."""
    told = json.loads(zlib.decompress(document))
    return [
        Considered(
            offer=offer,
            usd_per_hour=usd(price),
            drop=None if drop is None else Drop(drop),
            reason=told["reasons"][reason],
            usd_p50=None if cost is None else usd(cost),
        )
        for offer, price, drop, reason, cost in told["offers"]
    ]
