"""What a listing's prices and machines come to: changes of what an attempt is charged, and from when on."""

from dataclasses import replace
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from broker.decide.billing import accrued
from broker.decide.prices import price_changes, with_surplus
from broker.domain.instance import InstanceState
from broker.domain.job import PriceChange
from broker.domain.money import usd
from tests.unit.decide import build
from tests.unit.decide.test_accrual import change, more, priced, prices, seconds, seen

LATER = {"2": build.at(70)}
"""When the second machine did not stand yet."""


def test_a_rise_counts_from_the_last_charge_and_a_fall_from_now() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    assert price_changes(attempt, (seen("0.40"),), build.at(115), {}) == (change(100, "0.40"),)
    assert price_changes(attempt, (seen("0.30"),), build.at(115), {}) == (change(115, "0.30"),)
    assert price_changes(replace(attempt, charged_to=None), (seen("0.40"),), build.at(9), {}) == (change(0, "0.40"),)
    assert not price_changes(attempt, (seen("0.36"),), build.at(115), {})
    assert not price_changes(attempt, (seen(None),), build.at(115), {})
    assert not price_changes(attempt, (), build.at(115), {})


def test_a_rise_counts_from_no_earlier_than_the_change_before_it() -> None:
    attempt = priced("0.36", charged_to=build.at(100), prices=(change(110, "0.30"),))
    assert price_changes(attempt, (seen("0.40"),), build.at(115), {}) == (change(110, "0.40"),)


def test_a_bill_that_leaves_the_disk_out_is_not_believed_and_a_dearer_one_is() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    assert not price_changes(attempt, (seen("0.30", moves=False),), build.at(115), {})
    assert not price_changes(attempt, (seen("0.362", moves=False),), build.at(115), {})
    assert price_changes(attempt, (seen("0.50", moves=False),), build.at(115), {}) == (change(100, "0.50"),)
    dear = replace(attempt, prices=(change(100, "0.50"),))
    assert price_changes(dear, (seen("0.30", moves=False),), build.at(130), {}) == (change(130, "0.36"),)


def test_the_dearest_of_several_machines_counts_once_all_are_seen() -> None:
    two = replace(priced("0.36"), line=replace(build.line(), nodes=2))
    assert not price_changes(two, (seen("0.40"),), build.at(9), {})
    both = (seen("0.40"), seen("0.50", number=2))
    assert price_changes(two, both, build.at(9), {}) == (change(0, "0.50"),)


# ------------------------------------------------------------------------------------------------- a machine too many


def test_a_machine_too_many_counts_from_when_it_may_have_come_and_until_it_is_seen_no_more() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    two, lone = (seen("0.36"), seen("0.36", number=2)), (seen("0.36"),)
    assert price_changes(attempt, two, build.at(115), LATER) == (more(70, "0.36"),)
    assert price_changes(attempt, two, build.at(115), {}) == (more(0, "0.36"),), "nothing is known of its birth"
    both = replace(attempt, prices=(more(70, "0.36"),))
    assert not price_changes(both, two, build.at(130), LATER)
    assert price_changes(both, lone, build.at(130), LATER) == (change(130, "0.36"),)
    assert accrued(replace(both, prices=(*both.prices, change(130, "0.36"))), build.at(170)) == usd(
        Decimal("0.36") * (170 + 60) / 3600
    )


def test_a_machine_too_many_that_stood_while_nothing_was_listed_counts_from_before_the_last_charge() -> None:
    attempt = priced("0.36", charged_to=build.at(1000))
    two = (seen("0.36"), seen("0.36", number=2))
    assert price_changes(attempt, two, build.at(1015), LATER) == (more(70, "0.36"),)
    assert price_changes(attempt, two, build.at(1015), {"2": build.at(1005)}) == (more(1005, "0.36"),)


def test_a_machine_too_many_that_outlives_the_one_that_was_bought_is_charged_beside_it() -> None:
    attempt = priced("0.36", charged_to=build.at(100), handles=(seen("0.36").handle,))
    assert price_changes(attempt, (seen("0.36", number=2),), build.at(115), LATER) == (more(70, "0.36"),)
    assert not price_changes(attempt, (seen("0.36"),), build.at(115), LATER)
    partly = replace(attempt, line=replace(attempt.line, nodes=2))  # one of two is recorded
    assert not price_changes(partly, (seen("0.36"), seen("0.36", number=2)), build.at(115), LATER)


def test_where_more_are_recorded_than_were_bought_each_beside_those_counts() -> None:
    two = tuple(seen("0.36", number=number) for number in (1, 2))
    attempt = priced("0.36", charged_to=build.at(100), handles=tuple(one.handle for one in two))
    found = price_changes(attempt, (*two, seen("0.36", number=3)), build.at(115), {"3": build.at(90)})
    assert found == (more(0, "0.36"), more(90, "0.36", surplus=2))


def test_of_several_machines_that_are_not_recorded_the_youngest_are_too_many() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    three = tuple(seen("0.36", number=number) for number in (1, 2, 3))
    old = {"2": build.at(30), "3": build.at(70)}
    each = (more(30, "0.36"), more(70, "0.36", surplus=2))
    assert price_changes(attempt, three, build.at(115), old) == each
    assert price_changes(attempt, three[1:], build.at(115), old) == (more(70, "0.36"),)
    assert price_changes(attempt, three, build.at(115), LATER) == (more(0, "0.36"), more(70, "0.36", surplus=2))


def test_a_third_machine_counts_from_its_own_birth() -> None:
    attempt = priced("0.36", charged_to=build.at(7200), prices=(more(70, "0.36"),))
    three = tuple(seen("0.36", number=number) for number in (1, 2, 3))
    born = {"2": build.at(70), "3": build.at(7190)}
    assert price_changes(attempt, three, build.at(7215), born) == (more(7190, "0.36", surplus=2),)


def test_a_price_that_moves_as_a_machine_too_many_is_seen_hides_none_of_its_time() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    cheap = tuple(seen("0.12", number=number) for number in (1, 2))
    fell = (change(115, "0.12"), more(70, "0.36"), more(115, "0.12"))
    assert price_changes(attempt, cheap, build.at(115), LATER) == fell
    dear = tuple(seen("0.72", number=number) for number in (1, 2))
    rose = (change(100, "0.72"), more(70, "0.36"), more(100, "0.72"))
    assert price_changes(attempt, dear, build.at(115), LATER) == rose
    before = Decimal("0.36") * (100 + 30) + Decimal("0.72") * 2 * 15
    assert accrued(replace(attempt, prices=rose), build.at(115)) == usd(before / 3600)


def test_a_price_that_moved_before_it_was_seen_hides_none_of_its_time_either() -> None:
    """One listing left it out, and told of the price."""
    attempt = priced("0.36", charged_to=build.at(1015), prices=(change(1000, "0.72"),))
    two = tuple(seen("0.72", number=number) for number in (1, 2))
    found = price_changes(attempt, two, build.at(1016), LATER)
    assert found == (more(70, "0.36"), more(1000, "0.72"))


def test_a_listing_that_leaves_a_machine_too_many_out_once_costs_none_of_its_time_and_no_more() -> None:
    attempt = priced("0.36", charged_to=build.at(115), prices=(more(70, "0.36"), change(115, "0.36")))
    two = tuple(seen("0.36", number=number) for number in (1, 2))
    assert price_changes(attempt, two, build.at(130), LATER) == (more(115, "0.36"),)
    again = replace(attempt, prices=(*attempt.prices, more(115, "0.36")))
    assert accrued(again, build.at(170)) == usd(Decimal("0.36") * (170 + 100) / 3600)


def test_a_price_that_moves_as_a_machine_too_many_is_seen_no_more() -> None:
    both = priced("0.36", charged_to=build.at(100), prices=(more(70, "0.36"),))
    assert price_changes(both, (seen("0.12"),), build.at(115), {}) == (change(115, "0.12"),)
    assert price_changes(both, (seen("0.72"),), build.at(115), {}) == (more(100, "0.72"), change(115, "0.72"))


def test_of_two_machines_too_many_one_goes() -> None:
    both = priced("0.36", charged_to=build.at(100), prices=(more(70, "0.36", surplus=2),))
    two = (seen("0.36"), seen("0.36", number=2))
    assert price_changes(both, two, build.at(115), {}) == (more(115, "0.36"),)


def test_where_nothing_or_less_is_seen_nothing_is_known_of_machines_too_many() -> None:
    both = priced("0.36", prices=(more(0, "0.36"),), charged_to=build.at(100))
    gone = replace(seen("0.36"), state=InstanceState.GONE)
    assert not price_changes(both, (), build.at(115), {})
    assert not price_changes(both, (gone,), build.at(115), {})
    assert price_changes(both, (seen("0.36"), gone), build.at(115), {}) == (change(115, "0.36"),)


@given(
    prices, st.lists(st.tuples(seconds, st.integers(0, 3), prices), max_size=8), st.lists(seconds, max_size=3), seconds
)
def test_machines_too_many_are_charged_once_and_no_less_whatever_was_known_of_them(
    first: Decimal, known: list[tuple[float, int, Decimal]], births: list[float], until: float
) -> None:
    """At each moment the greater of what is accrued already, and of what stood."""
    attempt = priced(first, 1, prices=tuple(more(at, price, surplus=n) for at, n, price in known))
    born = [build.at(at) for at in births]
    found = replace(attempt, prices=(*attempt.prices, *with_surplus(attempt, attempt.prices, born)))
    assert accrued(found, build.at(until)) >= accrued(attempt, build.at(until))
    assert not [*with_surplus(found, found.prices, born)]
    most = tuple(replace(one, surplus=max(one.surplus, len(births))) for one in attempt.prices)
    everywhere = PriceChange(since=attempt.created_at, usd_per_hour=first, surplus=len(births))
    assert accrued(found, build.at(until)) <= accrued(replace(attempt, prices=(everywhere, *most)), build.at(until))
