"""An offer is dropped if the host's contract ends before the job's P90 and a changeover."""

from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from broker.domain.instance import Caps
from broker.domain.offer import DropReason, Offer, Quote, QuoteLine
from broker.domain.workload import Workload
from broker.quote.engine import quote
from broker.quote.request import UNKNOWN_RUN_S
from broker.quote.servability import may_be_served
from broker.quote.summary import summary
from tests.support.machines import NOW, SCRIPT, WORK, offer, spec

CAPS = {"cloud": Caps(spot=True, teardown_s=30, list_lag_s=10, boot_s=60)}


def quoted_until(*ends_at: datetime | None, work: Workload = WORK, like: Offer | None = None, **changes: Any) -> Quote:
    """Return the quote of offers that differ in their end only."""
    sold = [replace(like or offer(), id=f"cloud/{number}", ends_at=end) for number, end in enumerate(ends_at)]
    return quote(
        spec(**changes), work, sold, now=NOW, local_files=False, scoped_store=True, spent=Decimal(0),
        cap_left=Decimal(1000), excluded={}, caps=CAPS,
    )  # fmt: skip


def line_until(seconds: float | None, **arguments: Any) -> QuoteLine:
    end = None if seconds is None else NOW + timedelta(seconds=seconds)
    (line,) = quoted_until(end, **arguments).lines
    return line


def occupied_s(**arguments: Any) -> float:
    """Return the shortest contract with which the offer is kept, found by bisection."""
    low, high = 0.0, 1e7
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if line_until(middle, **arguments).drop else (low, middle)
    return high


@pytest.mark.parametrize("like", [offer(), offer(spot=True, preemptions_per_hour=0.5)])
def test_the_contract_must_outlast_the_p90_and_a_changeover(like: Offer) -> None:
    kept = line_until(None, like=like)
    assert (kept.drop, kept.hours_p90 is None) == (None, False)
    p90_s, needed_s = (kept.hours_p90 or 0) * 3600, occupied_s(like=like)
    # A changeover takes at least the boot, the teardown and two delays of the listing.
    assert needed_s > p90_s + 60 + 30 + 2 * 10
    line = line_until(needed_s - 2, like=like)
    assert line.drop is DropReason.CONTRACT
    hours = f"{(needed_s - 2) / 3600:.2f} h; the job and a changeover take up to {needed_s / 3600:.2f} h (P90)"
    assert line.reason == f"the host's contract ends in {hours}"


def test_a_contract_drops_its_own_offer_only() -> None:
    ends = [NOW - timedelta(days=1), None, NOW + timedelta(days=365), NOW + timedelta(minutes=1)]
    quote_of_four = quoted_until(*ends)
    assert [line.offer.ends_at for line in quote_of_four.lines if line.drop is None] == ends[1:3]
    assert quote_of_four.drops == {DropReason.CONTRACT: 2}
    assert "2 on hosts with a contract that ends before the job" in summary(quote_of_four)
    assert "ends in 0.00 h" in quote_of_four.lines[2].reason


def test_jobs_wait_while_all_contracts_end_too_early() -> None:
    ending = quoted_until(NOW)
    assert ending.best is None
    assert ending.cheapest_usd is None
    assert may_be_served(ending)


def test_max_duration_limits_what_the_contract_must_cover() -> None:
    kept = line_until(None)
    most_s = int((kept.hours_p50 or 0) * 3600) + 60
    assert most_s < (kept.hours_p90 or 0) * 3600
    assert occupied_s() - occupied_s(max_duration=most_s) == pytest.approx((kept.hours_p90 or 0) * 3600 - most_s, abs=3)


def test_the_contract_of_a_scripts_host_covers_max_duration() -> None:
    set_up_s = occupied_s(work=SCRIPT) - UNKNOWN_RUN_S
    assert 0 < set_up_s < 600
    assert line_until(36_000, work=SCRIPT, max_duration=36_000).drop is DropReason.CONTRACT
    assert line_until(36_000 + set_up_s, work=SCRIPT, max_duration=36_000).drop is None
