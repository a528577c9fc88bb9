"""Index of a market that is built once, and facts that offers of one machine kind do not share."""

from dataclasses import replace
from decimal import Decimal

import pytest

from broker.domain.offer import GIB, DropReason, Offer, Quote
from broker.domain.workload import SpotHours
from broker.estimator.planning.corrections import Corrections
from broker.quote.engine import quote
from broker.quote.offer_index import offer_index
from tests.support.machines import CAPS, NOW, WORK, offer, quoted, spec

OFTEN = SpotHours(provider="cloud", cloud="Cloud", region="eu", accelerator="h100-sxm", hours=1.0, preemptions=3)
TAKEN = Corrections(spots={("cloud", "Cloud", "eu", "h100-sxm"): OFTEN})
MARKET = tuple(
    offer(id=f"cloud/{n}", spot=n % 2 == 0, usd_per_hour=Decimal(n + 1), vcpus=8 * (n + 1)) for n in range(6)
)


def learned(offers: list[Offer] | tuple[Offer, ...], experience: Corrections) -> Quote:
    return quote(
        spec(), WORK, offers, now=NOW, local_files=False, scoped_store=True, spent=Decimal(0), cap_left=Decimal(100),
        excluded={}, caps=CAPS, learned=experience,
    )  # fmt: skip


def test_the_index_is_rebuilt_only_when_market_or_history_changes() -> None:
    spots = TAKEN.spots
    first = offer_index(MARKET, spots)
    assert offer_index(MARKET, spots) is first
    assert offer_index(MARKET, dict(spots)) is not first
    assert offer_index((*MARKET,), spots) is not first


def test_a_market_that_may_change_is_never_remembered() -> None:
    market = list(MARKET)
    assert quoted(market).kept_count == 6
    market.append(offer(id="cloud/new"))
    assert quoted(market).kept_count == 7


def test_the_index_gives_the_same_quote_as_a_fresh_one() -> None:
    for market in (MARKET, MARKET[:3], MARKET):
        for experience in (TAKEN, Corrections(), TAKEN):
            assert list(learned(market, experience).lines) == list(learned(list(market), experience).lines)
    (calm, *_), (taken, *_) = (
        sorted(learned(MARKET, e).lines, key=lambda x: x.offer.id) for e in (Corrections(), TAKEN)
    )
    assert (taken.usd_p50 or 0) > (calm.usd_p50 or 0)


@pytest.mark.parametrize("small", [{"vcpus": 1}, {"ram_bytes": GIB}, {"disk_bytes": GIB}])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_only_the_small_host_of_equal_offers_is_dropped(small: dict[str, int], place: int) -> None:
    market = [offer(id=f"cloud/{n}") for n in range(3)]
    market[place] = replace(market[place], **small)  # type: ignore[arg-type]
    drops = {line.offer.id: line.drop for line in quoted(market).lines}
    assert [drops[f"cloud/{n}"] for n in range(3)] == [DropReason.HOST if n == place else None for n in range(3)]
