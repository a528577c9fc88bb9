"""Choice of the machine to buy, and the state of a job for which none is bought."""

from decimal import Decimal

import pytest
from hypothesis import given

from broker.domain.instance import Caps
from broker.domain.offer import GIB, Quote
from broker.quote.placement import Choice, Queue, choose, queue_verdict
from tests.support.machines import SCRIPT, offer, quoted
from tests.unit.broker.quote.test_engine import caps_left, markets


def bought(made: Quote, *, cap_left: Decimal, attempt_number: int, least: str = "0") -> Choice:
    return choose(made, cap_left=cap_left, attempt_number=attempt_number, min_budget=lambda _: Decimal(least))


def test_the_cheapest_finish_is_bought() -> None:
    made = quoted([offer(id="b", usd_per_hour=Decimal(9)), offer(id="a", spot=True, preemptions_per_hour=0.1)])
    choice = bought(made, cap_left=Decimal(100), attempt_number=3)
    assert choice.line == made.lines[0]
    assert choice.queue is None
    assert choice.reason.startswith("attempt 3: Cloud 1xH100 spot, eu, $2.5000/h, $")


def test_several_machines_are_bought_together_at_the_price_of_all() -> None:
    caps = {"cloud": Caps(spot=True, boot_s=120, multi_node=True)}
    two = quoted([offer()], resources={"nodes": 2}, caps=caps)
    assert two.best is not None
    assert two.best.nodes == 2
    assert two.best.hours_p50 is not None
    assert two.best.usd_p50 == pytest.approx(5 * Decimal(two.best.hours_p50), rel=Decimal("0.05"))
    choice = bought(two, cap_left=Decimal(100), attempt_number=1)
    assert choice.reason.startswith("attempt 1: 2 x Cloud 1xH100 on-demand, eu, $2.5000/h")


def test_a_script_is_bought_without_knowing_its_time() -> None:
    choice = bought(quoted([offer()], work=SCRIPT), cap_left=Decimal(1), attempt_number=1)
    assert choice.line is not None
    assert "on-demand, eu, $2.5000/h, time unknown" in choice.reason


def test_nothing_fits_waits_with_the_reasons_counted() -> None:
    market = [offer(id="a", gpu_memory_bytes=GIB), offer(id="b", gpu_memory_bytes=GIB), offer(id="c", region="us")]
    made = quoted(market, resources={"regions": ["eu"]})
    choice = bought(made, cap_left=Decimal(100), attempt_number=1)
    assert (choice.line, choice.queue) == (None, Queue.WAIT)
    assert choice.reason == "nothing fits: 0 of 3 offers kept; dropped: 2 need more memory, 1 are in other regions"


def test_a_cap_below_the_cheapest_finish_is_capped() -> None:
    left = Decimal("0.25")
    choice = bought(quoted([offer(), offer(id="z", accelerator="tpu")], cap_left=left), cap_left=left, attempt_number=1)
    assert choice.queue is Queue.CAPPED
    assert "$0.2500 of the cap is left; raise the cap" in choice.reason


def test_waiting_helps_while_something_within_the_cap_is_sold_out() -> None:
    left = Decimal(5)
    market = [offer(id="gone", available=False), offer(id="dear", usd_per_hour=Decimal(90))]
    choice = queue_verdict(quoted(market, cap_left=left), cap_left=left)
    assert choice.queue is Queue.WAIT
    assert choice.reason == "waits for capacity: 0 of 2 offers kept; dropped: 1 above the cap, 1 unavailable"


def test_placement_without_offers_waits() -> None:
    choice = bought(quoted([]), cap_left=Decimal(5), attempt_number=1)
    assert (choice.queue, choice.reason[:9]) == (Queue.WAIT, "no offers")


@given(markets, caps_left)
def test_something_is_bought_exactly_when_something_is_kept(market: list, left: Decimal) -> None:  # type: ignore[type-arg]
    """The exception is a job that waits for cheaper spot."""
    quote = quoted(market, cap_left=left)
    choice = bought(quote, cap_left=left, attempt_number=1)
    waits = choice.reason.startswith("waits for spot")
    assert (choice.line is not None) == (quote.kept_count > 0 and not waits)
    assert (choice.queue is None) == (choice.line is not None)
    assert choice.reason
    assert "\n" not in choice.reason


def test_offers_that_the_cap_would_end_at_once_are_skipped() -> None:
    made = quoted([offer(id="dear", usd_per_hour=Decimal(9)), offer(id="cheap")], work=SCRIPT)
    least = {"cheap": Decimal(6), "dear": Decimal(4)}
    choice = choose(made, cap_left=Decimal(5), attempt_number=1, min_budget=lambda line: least[line.offer.id])
    assert choice.line is not None
    assert choice.line.offer.id == "dear"


def test_cap_without_time_for_a_checkpoint_waits_for_something_cheaper() -> None:
    """The job ends as capped if no cheaper offer can return."""
    only, sold_out = offer(), offer(id="gone", available=False)
    for market, queue in (([only], Queue.CAPPED), ([only, sold_out], Queue.WAIT)):
        choice = bought(quoted(market, work=SCRIPT), cap_left=Decimal(2), attempt_number=1, least="2")
        assert (choice.line, choice.queue) == (None, queue)
        assert "needs more than $2.0000; raise the cap" in choice.reason
