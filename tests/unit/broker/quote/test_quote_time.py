"""An offer that is expected to miss the job's time is not bought, unless every other one would also miss it."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from broker.domain.instance import Caps
from broker.domain.offer import DropReason, Offer, Quote, QuoteLine
from broker.domain.workload import Workload
from broker.quote.engine import quote
from broker.quote.summary import summary
from tests.support.machines import NOW, SCRIPT, WORK, offer, quoted, spec

CAPS = {"cloud": Caps(spot=True, teardown_s=30, list_lag_s=10, boot_s=60)}


def line(work: Workload = WORK, *, machine_s: float = 0, lead_s: float = 0, **changes: Any) -> QuoteLine:
    made = quote(
        spec(**changes), work, [offer()], now=NOW, local_files=False, scoped_store=True, spent=0 * offer().usd_per_hour,
        cap_left=100 * offer().usd_per_hour, excluded={}, caps=CAPS, machine_s=machine_s, lead_s=lead_s,
    )  # fmt: skip
    (only,) = made.lines
    return only


KEPT = quoted([offer()], caps=CAPS).lines[0]
assert KEPT.hours_p50 is not None
assert KEPT.hours_p90 is not None
P50_S, P90_S = KEPT.hours_p50 * 3600, KEPT.hours_p90 * 3600
DRAINED_S = 30 + 2 * 10 + 1
"""Teardown, list lags and a quantum."""


FAST = offer(id="cloud/fast", gpus=8, usd_per_hour=Decimal(40))
"""An offer that is faster and dearer than `offer()`."""


def by(seconds: float, *, lead_s: float = 0, cap_usd: int = 1000, offers: Sequence[Offer] = (offer(), FAST)) -> Quote:
    """Return the quote of `offers` with a deadline `seconds` from now."""
    deadline = (NOW + timedelta(seconds=seconds)).isoformat()
    return quote(
        spec(deadline=deadline), WORK, offers, now=NOW, local_files=False, scoped_store=True, spent=Decimal(0),
        cap_left=Decimal(cap_usd), excluded={}, caps=CAPS, lead_s=lead_s,
    )  # fmt: skip


def seconds(only: Offer) -> tuple[float, float]:
    """Return P50 and P90 of the duration on an offer."""
    (line,) = by(1e9, offers=[only]).lines
    assert line.hours_p50 is not None
    assert line.hours_p90 is not None
    return line.hours_p50 * 3600, line.hours_p90 * 3600


@pytest.mark.parametrize(
    ("lead_s", "spare_s", "drop"), [(0, 1, None), (0, -1, DropReason.DEADLINE), (135, 100, DropReason.DEADLINE)]
)
def test_the_p90_must_keep_the_deadline_and_leave_time_for_the_drain(
    lead_s: float, spare_s: float, drop: DropReason | None
) -> None:
    made = by(P90_S + DRAINED_S + spare_s, lead_s=lead_s)
    assert {line.offer.id: line.drop for line in made.lines} == {offer().id: drop, FAST.id: None}
    assert not made.deadline_at_risk


def test_an_uncertain_duration_alone_leaves_no_job_without_a_machine() -> None:
    """Offers whose P50 meets the deadline are kept if no P90 meets it, and the quote says so."""
    fast_p50_s, fast_p90_s = seconds(FAST)
    assert fast_p90_s < seconds(offer())[0]
    made = by(fast_p90_s + DRAINED_S - 1)
    assert made.best is not None
    assert (made.best.offer.id, made.kept_count, made.deadline_at_risk) == (FAST.id, 1, True)
    assert "may miss the deadline" in made.best.reason
    assert "the deadline may be missed" in summary(made)
    never = by(fast_p50_s + DRAINED_S - 1)
    assert (never.best, never.deadline_at_risk) == (None, False)


def test_the_fastest_offer_within_the_cap_leads_those_at_risk() -> None:
    slower = replace(FAST, id="cloud/slower", gpus=4, usd_per_hour=Decimal(1))
    between = seconds(slower)[0] + DRAINED_S + 1
    assert between < seconds(FAST)[1] + DRAINED_S
    assert [line.offer.id for line in by(between, offers=[slower, FAST]).lines] == [FAST.id, slower.id]
    capped = by(between, offers=[slower, FAST], cap_usd=2)
    assert [(line.offer.id, line.drop) for line in capped.lines] == [(slower.id, None), (FAST.id, DropReason.CAP)]


def test_the_p50_must_fit_into_the_machine_time_that_is_left() -> None:
    most = int(P50_S + DRAINED_S) + 2
    assert most < P90_S
    assert line(max_duration=most).drop is None
    late = line(max_duration=most, machine_s=10)
    assert late.drop is DropReason.DEADLINE
    assert f"takes {P50_S / 3600:.2f} h (P50), {P90_S / 3600:.2f} h (P90): 0.00 h too long" in late.reason


def test_a_scripts_deadline_is_judged_by_its_set_up_alone() -> None:
    assert "may miss" not in line(SCRIPT, deadline=NOW + timedelta(seconds=60 * 1.5 + DRAINED_S + 1)).reason
    assert "may miss" in line(SCRIPT, deadline=NOW + timedelta(seconds=60 * 1.5 + DRAINED_S - 1)).reason
    assert line(SCRIPT, deadline=NOW + timedelta(seconds=60 + DRAINED_S - 1)).drop is DropReason.DEADLINE
