"""Decides whether an attempt uploads its tokenised rows, so that a recovery need not tokenise again.

Upload and download cost traffic, and tokenising again costs machine time. Both are proportional to the bytes, so the
cache pays off for all rows or for none.
"""

from decimal import Decimal

from broker.domain.money import ZERO
from broker.domain.offer import GIB, Offer
from broker.domain.workload import Workload

TOKENS_PER_S = 200_000
"""Tokens a second of one process [assumed: 170,000 measured with SmolLM2's tokenizer on a busy core]."""
BYTES_A_TOKEN = 4
HOURS_A_GIB = Decimal(GIB // BYTES_A_TOKEN // TOKENS_PER_S) / 3600
"""Hours to tokenise a GiB."""
SPREAD = 2
"""Factor on the expected bytes: each row has an overhead, and the number of tokens is estimated."""
MIN_BYTES = 1 << 20
MAX_BYTES = 16 * GIB
"""A larger cache would rarely be uploaded before it is needed [assumed]."""


def rows_bytes(workload: Workload, offer: Offer, nodes: int) -> int:
    """Return the most bytes of tokenised rows that an attempt on this offer may upload, counted in its cap; 0: none.

    A spot machine is expected to be preempted once. An on-demand machine is expected to run to the end, so its rows are
    uploaded only where traffic is free.
    """
    if not workload.data_bytes:
        return 0
    facts = offer.facts
    sent = (facts and facts.egress_usd_per_gib) or ZERO
    fetched = nodes * ((facts and facts.ingress_usd_per_gib) or ZERO)
    retokenise = nodes * offer.usd_per_hour * HOURS_A_GIB if offer.spot else ZERO
    return min(MAX_BYTES, SPREAD * workload.data_bytes + MIN_BYTES) if sent + fetched <= retokenise else 0
