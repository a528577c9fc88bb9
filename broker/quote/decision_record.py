"""The record of a purchase: every offer of its market, with the reason why it was kept or dropped."""

import json
import zlib
from collections.abc import Sequence

from broker.domain.money import usd
from broker.domain.offer import DropReason, OfferSummary, Quote


def packed(quote: Quote) -> bytes:
    """Compressed, about 10 bytes an offer: reasons are few and written once."""
    reasons: dict[str, int] = {}
    rows = [
        (offer, str(price), drop, reasons.setdefault(reason, len(reasons)), None if cost is None else str(cost))
        for offer, price, drop, reason, cost in quote.considered()
    ]
    return zlib.compress(json.dumps({"reasons": list(reasons), "offers": rows}, separators=(",", ":")).encode())


def unpacked(document: bytes) -> Sequence[OfferSummary]:
    """In the order in which the offers were ranked."""
    told = json.loads(zlib.decompress(document))
    return [
        OfferSummary(
            offer=offer,
            usd_per_hour=usd(price),
            drop=None if drop is None else DropReason(drop),
            reason=told["reasons"][reason],
            usd_p50=None if cost is None else usd(cost),
        )
        for offer, price, drop, reason, cost in told["offers"]
    ]
