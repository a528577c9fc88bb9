"""Price changes of an attempt that follow from listed prices and machines, and the time from which each counts."""

from dataclasses import replace
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from broker.billing.accrual import accrued
from broker.billing.prices import MachineSpan, extra_machine_changes, price_changes
from broker.domain.instance import InstanceState
from broker.domain.job import PriceChange
from broker.domain.money import usd
from tests.support import build
from tests.unit.broker.billing.test_accrual_properties import change, extra_change, priced, prices, seconds, seen

TWO = tuple(seen("0.36", number=number) for number in (1, 2))
THREE = tuple(seen("0.36", number=number) for number in (1, 2, 3))


def span(
    number: int, since: float | None = None, until: float | None = None, *, shown: float | None = None
) -> MachineSpan:
    """Return the span of one machine. `shown`: second of its first listing; None: the earliest possible second of its
    life.
    """
    born, gone = (None if at is None else build.at(at) for at in (since, until))
    first = (since or 0) if shown is None else shown
    return MachineSpan(id=str(number), since=born, shown=build.at(first), until=gone)


BOTH = (span(1), span(2, 70))
"""Machines of which the second did not exist yet at 70."""


def test_a_rise_counts_from_the_last_charge_and_a_fall_from_now() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    assert price_changes(attempt, (seen("0.40"),), build.at(115), ()) == (change(100, "0.40"),)
    assert price_changes(attempt, (seen("0.30"),), build.at(115), ()) == (change(115, "0.30"),)
    assert price_changes(replace(attempt, charged_to=None), (seen("0.40"),), build.at(9), ()) == (change(0, "0.40"),)
    assert not price_changes(attempt, (seen("0.36"),), build.at(115), ())
    assert not price_changes(attempt, (seen(None),), build.at(115), ())
    assert not price_changes(attempt, (), build.at(115), ())


def test_a_rise_counts_from_no_earlier_than_the_change_before_it() -> None:
    attempt = priced("0.36", charged_to=build.at(100), prices=(change(110, "0.30"),))
    assert price_changes(attempt, (seen("0.40"),), build.at(115), ()) == (change(110, "0.40"),)


def test_bill_without_the_disk_is_ignored_and_a_higher_one_is_believed() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    assert not price_changes(attempt, (seen("0.30", moves=False),), build.at(115), ())
    assert not price_changes(attempt, (seen("0.362", moves=False),), build.at(115), ())
    assert price_changes(attempt, (seen("0.50", moves=False),), build.at(115), ()) == (change(100, "0.50"),)
    dear = replace(attempt, prices=(change(100, "0.50"),))
    assert price_changes(dear, (seen("0.30", moves=False),), build.at(130), ()) == (change(130, "0.36"),)


def test_a_machine_that_is_listed_as_gone_says_nothing_of_the_price() -> None:
    """A machine that is listed as gone has no price and is ignored; the other machine's price decides."""
    attempt = priced("0.36", charged_to=build.at(100), prices=(change(90, "0.30"),))
    over = replace(seen(None, moves=False, number=2), state=InstanceState.GONE)
    assert not price_changes(attempt, (seen("0.30"), over), build.at(115), ())
    assert price_changes(attempt, (seen("0.20"), over), build.at(115), ()) == (change(115, "0.20"),)


def test_the_mean_of_several_machines_counts_and_a_fall_once_all_are_seen() -> None:
    two = replace(priced("0.36"), line=replace(build.line(), nodes=2))
    both = (seen("0.40"), seen("0.50", number=2))
    assert price_changes(two, both, build.at(9), ()) == (change(0, "0.45"),)
    assert price_changes(two, (seen("0.40"),), build.at(9), ()) == (change(0, "0.40"),), "the other one is left out"
    assert not price_changes(two, (seen("0.30"),), build.at(9), ())
    assert not price_changes(two, (seen("0.30"), seen(None, number=2)), build.at(9), ())


# ------------------------------------------------------------------------------------------------- a machine too many


def test_extra_machine_counts_from_possible_birth_to_last_sighting() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    assert price_changes(attempt, TWO, build.at(115), BOTH) == (extra_change(70, "0.36"),)
    unknown = (span(1), span(2))
    assert price_changes(attempt, TWO, build.at(115), unknown) == (extra_change(0, "0.36"),), (
        "nothing is known of its birth"
    )
    both = replace(attempt, prices=(extra_change(70, "0.36"),))
    assert not price_changes(both, TWO, build.at(130), BOTH)
    gone = (span(1), span(2, 70, 128))
    assert price_changes(both, TWO[:1], build.at(130), gone) == (change(130, "0.36"),)
    assert accrued(replace(both, prices=(*both.prices, change(130, "0.36"))), build.at(170)) == usd(
        Decimal("0.36") * (170 + 60) / 3600
    )


def test_extra_machine_between_two_charges_counts_while_it_existed() -> None:
    """An extra machine that comes and goes between two charges is charged for the time that it existed."""
    attempt = priced("0.36", charged_to=build.at(100))
    gone = (span(1), span(2, 70, 112))
    passed = (extra_change(70, "0.36"), change(112, "0.36"))
    assert price_changes(attempt, TWO[:1], build.at(115), gone) == passed
    assert price_changes(attempt, (), build.at(115), gone) == passed, "with any listing now"
    assert not price_changes(replace(attempt, prices=passed), TWO[:1], build.at(115), gone)
    assert accrued(replace(attempt, prices=passed), build.at(150)) == usd(Decimal("0.36") * (150 + 42) / 3600)


def test_extra_machine_is_charged_at_each_price_of_its_life() -> None:
    """Each price counts if the price changes during the life of an extra machine. The last price counts once more after
    its end, without the machine.
    """
    attempt = priced("0.36", charged_to=build.at(100), prices=(change(80, "0.72"), change(95, "0.12")))
    gone = (span(1), span(2, 70, 90))
    assert price_changes(attempt, (), build.at(115), gone) == (
        extra_change(70, "0.36"), extra_change(80, "0.72"), change(90, "0.72"),
    )  # fmt: skip
    at_once = (span(1), span(2, 70, 95))
    assert price_changes(attempt, (), build.at(115), at_once) == (extra_change(70, "0.36"), extra_change(80, "0.72"))


def test_two_extra_machines_each_count_for_their_own_lifetime() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    three = (span(1), span(2, 30, 90), span(3, 50, 70))
    assert price_changes(attempt, TWO[:1], build.at(115), three) == (
        extra_change(30, "0.36"), extra_change(50, "0.36", extra_machines=2),
        extra_change(70, "0.36"), change(90, "0.36"),
    )  # fmt: skip


def test_extra_machine_during_a_listing_gap_counts_before_the_last_charge() -> None:
    """An extra machine that ran during a listing gap is charged from its start, before the last charge."""
    attempt = priced("0.36", charged_to=build.at(1000))
    assert price_changes(attempt, TWO, build.at(1015), BOTH) == (extra_change(70, "0.36"),)
    young = (span(1), span(2, 1005))
    assert price_changes(attempt, TWO, build.at(1015), young) == (extra_change(1005, "0.36"),)


def test_extra_machine_outliving_the_bought_one_is_charged_in_addition() -> None:
    """An extra machine that outlives the bought one is charged in addition to it."""
    attempt = priced("0.36", charged_to=build.at(100), handles=(seen("0.36").handle,))
    outlived = (span(1, None, 90), span(2, 70))
    assert price_changes(attempt, TWO[1:], build.at(115), outlived) == (extra_change(70, "0.36"),)
    assert not price_changes(attempt, TWO[:1], build.at(115), (span(1),))
    partly = replace(attempt, line=replace(attempt.line, nodes=2))  # one of two is recorded
    assert not price_changes(partly, TWO, build.at(115), BOTH)


def test_recorded_machines_beyond_the_bought_number_are_charged() -> None:
    attempt = priced("0.36", charged_to=build.at(100), handles=tuple(one.handle for one in TWO))
    found = price_changes(attempt, THREE, build.at(115), (span(1), span(2), span(3, 90)))
    assert found == (extra_change(0, "0.36"), extra_change(90, "0.36", extra_machines=2))


def test_youngest_unrecorded_machines_are_the_extra_ones() -> None:
    """The youngest of several unrecorded machines are the extra ones."""
    attempt = priced("0.36", charged_to=build.at(100))
    each = (extra_change(30, "0.36"), extra_change(70, "0.36", extra_machines=2))
    assert price_changes(attempt, THREE, build.at(115), (span(1), span(2, 30), span(3, 70))) == each
    assert price_changes(attempt, THREE[1:], build.at(115), (span(2, 30), span(3, 70))) == (extra_change(70, "0.36"),)
    unknown = (extra_change(0, "0.36"), extra_change(70, "0.36", extra_machines=2))
    assert price_changes(attempt, THREE, build.at(115), (span(1), span(2, 70), span(3))) == unknown


def test_a_third_machine_counts_from_its_own_birth() -> None:
    attempt = priced("0.36", charged_to=build.at(7200), prices=(extra_change(70, "0.36"),))
    born = (*BOTH, span(3, 7190))
    assert price_changes(attempt, THREE, build.at(7215), born) == (extra_change(7190, "0.36", extra_machines=2),)


def test_price_change_at_sighting_hides_no_time_of_an_extra_machine() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    cheap = tuple(seen("0.12", number=number) for number in (1, 2))
    fell = (change(115, "0.12"), extra_change(70, "0.36"), extra_change(115, "0.12"))
    assert price_changes(attempt, cheap, build.at(115), BOTH) == fell
    dear = tuple(seen("0.72", number=number) for number in (1, 2))
    rose = (change(100, "0.72"), extra_change(70, "0.36"), extra_change(100, "0.72"))
    assert price_changes(attempt, dear, build.at(115), BOTH) == rose
    before = Decimal("0.36") * (100 + 30) + Decimal("0.72") * 2 * 15
    assert accrued(replace(attempt, prices=rose), build.at(115)) == usd(before / 3600)


def test_price_change_before_sighting_hides_no_time_of_an_extra_machine() -> None:
    """One listing omits the extra machine and reports a new price. The extra machine is charged from its start."""
    attempt = priced("0.36", charged_to=build.at(1015), prices=(change(1000, "0.72"),))
    two = tuple(seen("0.72", number=number) for number in (1, 2))
    assert price_changes(attempt, two, build.at(1016), BOTH) == (extra_change(70, "0.36"), extra_change(1000, "0.72"))


def test_machine_wrongly_taken_as_gone_costs_none_of_its_absence() -> None:
    """A machine is assumed to be gone and then listed again. Each second of its life is charged exactly once."""
    attempt = priced("0.36", charged_to=build.at(115), prices=(extra_change(70, "0.36"), change(115, "0.36")))
    assert price_changes(attempt, TWO, build.at(130), BOTH) == (extra_change(115, "0.36"),)
    again = replace(attempt, prices=(*attempt.prices, extra_change(115, "0.36")))
    assert accrued(again, build.at(170)) == usd(Decimal("0.36") * (170 + 100) / 3600)


def test_a_price_change_at_an_extra_machines_end_is_recorded() -> None:
    both = priced("0.36", charged_to=build.at(100), prices=(extra_change(70, "0.36"),))
    gone = (span(1), span(2, 70, 114))
    assert price_changes(both, (seen("0.12"),), build.at(115), gone) == (change(115, "0.12"),)
    assert price_changes(both, (seen("0.72"),), build.at(115), gone) == (extra_change(100, "0.72"), change(115, "0.72"))


def test_the_end_of_one_of_two_extra_machines_lowers_the_price() -> None:
    both = priced("0.36", charged_to=build.at(100), prices=(extra_change(70, "0.36", extra_machines=2),))
    found = price_changes(both, TWO, build.at(115), (*BOTH, span(3, 70, 114)))
    assert found == (extra_change(115, "0.36"),)


def test_extra_machines_are_unknown_without_sightings() -> None:
    """Missing sightings add no extra machine, and a machine that is listed as gone ends one. Before the create was sent
    nothing counts.
    """
    both = priced("0.36", prices=(extra_change(0, "0.36"),), charged_to=build.at(100))
    gone, over = replace(seen("0.36"), state=InstanceState.GONE), (span(1), span(2, 0, 110))
    assert not price_changes(both, (), build.at(115), over)
    assert not price_changes(both, (gone,), build.at(115), over)
    assert price_changes(both, (seen("0.36"), gone), build.at(115), over) == (change(115, "0.36"),)
    unsent = replace(both, create_sent_at=None, prices=())
    assert not price_changes(unsent, (), build.at(115), BOTH), "nothing was bought"


def test_broker_that_knows_less_of_a_birth_adds_nothing() -> None:
    """The broker has just started, or had no listing for long."""
    attempt = priced("0.36", charged_to=build.at(36_050), prices=(extra_change(36_000, "0.36"),))
    young = (span(1, shown=36_060), span(2, shown=36_060))
    assert not price_changes(attempt, TWO, build.at(36_065), young)
    assert not price_changes(attempt, TWO, build.at(36_065), (span(1, 0), span(2, 9, shown=36_060)))
    third = price_changes(attempt, THREE, build.at(36_075), (*young, span(3, 36_065, shown=36_070)))
    assert third == (extra_change(36_065, "0.36", extra_machines=2),)


def test_a_late_first_sighting_does_not_move_an_earlier_birth() -> None:
    attempt = priced("0.36", charged_to=build.at(205), prices=(extra_change(200, "0.36"),))
    late = (span(1), span(2, 70, shown=80))
    assert price_changes(attempt, TWO, build.at(215), late) == (extra_change(70, "0.36"),)
    at_once = replace(attempt, prices=(extra_change(80, "0.36"),))
    assert not price_changes(at_once, TWO, build.at(215), late)


def test_bought_machines_may_have_existed_before_their_first_listing() -> None:
    attempt = priced("0.36", charged_to=build.at(100))
    found = price_changes(attempt, TWO, build.at(115), (span(1, 60, shown=75), span(2, 60, shown=80)))
    assert found == (extra_change(60, "0.36"),)


def test_more_recorded_than_bought_machines_are_extra() -> None:
    """Recorded machines beyond the bought number are extra. An unrecorded machine is extra even if the recorded one is
    not listed.
    """
    attempt = priced("0.36", charged_to=build.at(100), handles=tuple(one.handle for one in TWO))
    assert price_changes(attempt, TWO, build.at(115), BOTH) == (extra_change(70, "0.36"),)
    never_listed = replace(attempt, handles=attempt.handles[:1])
    assert price_changes(never_listed, TWO[1:], build.at(115), BOTH[1:]) == (extra_change(70, "0.36"),)


def test_a_machine_gone_before_the_recorded_one_was_no_extra_machine() -> None:
    """A cloud may try several machines, one after another, for one create."""
    attempt = priced("0.36", charged_to=build.at(100), handles=(seen("0.36", number=2).handle,))
    assert not price_changes(attempt, TWO[1:], build.at(115), (span(1, 10, 60), span(2, 65)))
    both = price_changes(attempt, TWO, build.at(115), (span(1, 10, 90), span(2, 65)))
    assert both == (extra_change(65, "0.36"), change(90, "0.36"))


def test_a_short_lived_extra_machine_costs_the_clouds_minimum() -> None:
    line = build.line(usd_per_hour=Decimal("0.36"), billing_minimum_s=60)
    attempt = replace(priced("0.36", charged_to=build.at(100)), line=line)
    short = (span(1), span(2, 68, 90, shown=70))
    assert price_changes(attempt, TWO[:1], build.at(115), short) == (extra_change(68, "0.36"),), "it bills still"
    known = replace(attempt, prices=(extra_change(68, "0.36"),))
    assert not price_changes(known, TWO[:1], build.at(129), short)
    assert price_changes(known, TWO[:1], build.at(131), short) == (change(131, "0.36"),)
    assert price_changes(attempt, TWO[:1], build.at(145), short) == (extra_change(68, "0.36"), change(130, "0.36"))


machines = st.lists(st.tuples(seconds, st.none() | seconds), max_size=4)


@given(
    prices, st.lists(st.tuples(seconds, st.integers(0, 3), prices), max_size=8), machines, st.floats(0, 300), seconds
)
def test_extra_machines_are_charged_once_for_any_earlier_knowledge(
    first: Decimal,
    known: list[tuple[float, int, Decimal]],
    lives: list[tuple[float, float | None]],
    late: float,
    until: float,
) -> None:
    """The charge always covers at least the earlier accrual, and at most all machines over the whole time."""
    attempt = priced(first, 1, prices=tuple(extra_change(at, price, extra_machines=n) for at, n, price in known))
    told = [span(0), *(span(n, born, gone, shown=born + late) for n, (born, gone) in enumerate(lives, 1))]
    found = replace(attempt, prices=(*attempt.prices, *extra_machine_changes(attempt, attempt.prices, told)))
    assert accrued(found, build.at(until)) >= accrued(attempt, build.at(until))
    assert not extra_machine_changes(found, found.prices, told)
    most = tuple(replace(one, extra_machines=max(one.extra_machines, len(lives))) for one in attempt.prices)
    everywhere = PriceChange(since=attempt.created_at, usd_per_hour=first, extra_machines=len(lives))
    assert accrued(found, build.at(until)) <= accrued(replace(attempt, prices=(everywhere, *most)), build.at(until))


@given(prices, machines, seconds)
def test_each_extra_machine_costs_its_own_lifetime(
    price: Decimal, lives: list[tuple[float, float | None]], until: float
) -> None:
    attempt = priced(price, 1)
    told = [span(0), *(span(number, *life) for number, life in enumerate(lives, 1))]
    found = replace(attempt, prices=extra_machine_changes(attempt, (), told))
    lasted = [max(0.0, min(until, until if gone is None else gone) - born) for born, gone in lives]
    least = price * Decimal(str(round(until + sum(lasted), 6))) / 3600
    paid = accrued(found, build.at(until))
    assert least - usd("0.00001") <= paid <= least + price * (2 * len(lives) + 2) / 3600 * 4 + usd("0.00001")
