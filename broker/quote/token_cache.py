"""Whether an attempt puts its tokenised rows into the blob store, so that a recovery does not make them again.

Sending and fetching them costs the cloud's traffic, making them again the machines' time; both are in proportion to
their bytes, so it is worth it for all of them or for none.
"""

from decimal import Decimal

from broker.domain.money import ZERO
from broker.domain.offer import GIB, Offer
from broker.domain.workload import Workload

TOKENS_PER_S = 200_000
"""That one process tokenises [assumed: 170,000 measured with SmolLM2's tokenizer on a busy core]."""
BYTES_A_TOKEN = 4
HOURS_A_GIB = Decimal(GIB // BYTES_A_TOKEN // TOKENS_PER_S) / 3600
"""To tokenise so much."""
SPREAD = 2
"""Times the bytes of the tokens that are expected: each row has some of its own, and tokens are counted by a guess."""
LEAST = 1 << 20
MOST = 16 * GIB
"""More is sent for so long that it is hardly there when it is needed [assumed]."""


def rows_bytes(workload: Workload, offer: Offer, nodes: int) -> int:
    """The most bytes of tokenised rows that an attempt on this offer may send, and its cap counts; 0: none.

    A spot machine is expected to be taken away once; one on demand is not, so its rows are sent where that is free.
    """
    if not workload.data_bytes:
        return 0
    facts = offer.facts
    sent = (facts and facts.egress_usd_per_gib) or ZERO
    fetched = nodes * ((facts and facts.ingress_usd_per_gib) or ZERO)
    again = nodes * offer.usd_per_hour * HOURS_A_GIB if offer.spot else ZERO
    return min(MOST, SPREAD * workload.data_bytes + LEAST) if sent + fetched <= again else 0
