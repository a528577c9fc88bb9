"""Record of a purchase: every offer of the market, with the reason why it was kept or dropped."""

import json
import zlib
from collections.abc import Sequence

from broker.domain.money import usd
from broker.domain.offer import DropReason, OfferSummary, Quote


def packed(quote: Quote) -> bytes:
    """Return a compressed record of about 10 bytes an offer; each distinct reason is stored once."""
    reasons: dict[str, int] = {}
    rows = [
        (offer, str(price), drop, reasons.setdefault(reason, len(reasons)), None if cost is None else str(cost))
        for offer, price, drop, reason, cost in quote.considered()
    ]
    return zlib.compress(json.dumps({"reasons": list(reasons), "offers": rows}, separators=(",", ":")).encode())


def unpacked(document: bytes) -> Sequence[OfferSummary]:
    """Return the offers in the order of their ranking."""
    record = json.loads(zlib.decompress(document))
    return [
        OfferSummary(
            offer=offer,
            usd_per_hour=usd(price),
            drop=None if drop is None else DropReason(drop),
            reason=record["reasons"][reason],
            usd_p50=None if cost is None else usd(cost),
        )
        for offer, price, drop, reason, cost in record["offers"]
    ]
