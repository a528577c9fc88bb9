"""Orphans: when they are destroyed, how long they are known, and what they cost after the end of their attempt."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import InstanceState, Observed
from broker.domain.job import AttemptState, Handle
from broker.lifecycle.decisions.orphan_decision import (
    LateMachineFacts,
    OrphanFacts,
    OrphanStep,
    OrphanWatch,
    decide_orphan,
    late_amounts,
)
from broker.lifecycle.orphans import Orphan
from tests.support import build

LAG_S = 15.0
ENDED = build.attempt(AttemptState.ENDED, charged_to=build.at(50), ended_at=build.at(60), charged_usd=Decimal("0.005"))
MACHINE = Observed(handle=Handle(provider="simulated", id="i", name=ENDED.name), state=InstanceState.RUNNING)
ORPHAN = Orphan(observed=MACHINE, id=ENDED.id, attempt=ENDED, why="its attempt has ended", born=build.T0)
STRAY = replace(ORPHAN, attempt=None)


def facts(**changes: Any) -> OrphanFacts:
    values: dict[str, Any] = {"orphan": ORPHAN, "listed_s": LAG_S, "lag_s": LAG_S}
    return OrphanFacts(**values | changes)


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, OrphanStep.DESTROY),
        ({"listed_s": LAG_S - 1}, OrphanStep.WAIT),
        ({"report_only": True}, OrphanStep.SPARE),
        ({"orphan": STRAY}, OrphanStep.SPARE),
        ({"orphan": STRAY, "is_bought": True}, OrphanStep.SPARE),
        ({"orphan": STRAY, "is_bought": False}, OrphanStep.DESTROY),
    ],
)
def test_each_fact_has_its_decision(changes: dict[str, Any], step: OrphanStep) -> None:
    decision = decide_orphan(facts(**changes))
    assert decision.step is step
    assert bool(decision.message) == (step is OrphanStep.SPARE)
    assert decision.wait_s == (1.0 if step is OrphanStep.WAIT else 0.0)


@given(
    st.floats(0, 100),
    st.floats(0, 100),
    st.booleans(),
    st.sampled_from([ORPHAN, STRAY]),
    st.sampled_from([None, True, False]),
)
def test_only_an_old_orphan_with_a_known_buyer_is_destroyed(
    listed_s: float, lag_s: float, report_only: bool, orphan: Orphan, is_bought: bool | None
) -> None:
    given_facts = facts(listed_s=listed_s, lag_s=lag_s, report_only=report_only, orphan=orphan, is_bought=is_bought)
    decision = decide_orphan(given_facts)
    if decision.step is OrphanStep.DESTROY:
        assert listed_s >= lag_s
        assert not report_only
        assert orphan.attempt is not None or is_bought is False
    if decision.step is OrphanStep.WAIT:
        assert 0 < decision.wait_s <= lag_s


MACHINES = st.sets(st.sampled_from("abc"))


@given(st.lists(st.tuples(MACHINES, st.booleans(), MACHINES), max_size=12))
def test_an_orphan_is_forgotten_when_two_new_listings_omit_it(
    rounds: list[tuple[set[str], bool, set[str]]],
) -> None:
    """Each round: the machines listed, whether the listing is new, and the machines whose destroy is unanswered."""
    watch, omitted = OrphanWatch(), dict.fromkeys("abc", 0)
    for machines, is_new, asked in rounds:
        known = set(watch.first_listed)
        orphans = watch.observe(dict.fromkeys(machines, ORPHAN), is_new=is_new)
        assert set(orphans) == (machines if is_new else machines & known) | watch.asked.keys()
        for machine in known if is_new else ():
            omitted[machine] = 0 if machine in orphans else omitted[machine] + 1
            assert (machine in watch.first_listed) == (omitted[machine] < 2)
            assert (machine in watch.missing_once) == (omitted[machine] == 1)
        for machine in orphans:
            omitted[machine] = 0 if machine not in watch.first_listed else omitted[machine]
            watch.first_listed.setdefault(machine, 0.0)
        watch.asked = dict.fromkeys(asked & orphans.keys(), ORPHAN)


def test_an_orphan_that_is_listed_again_is_charged_again() -> None:
    watch = OrphanWatch(asked={"a": ORPHAN, "b": ORPHAN}, charged={"a", "b", "c"})
    watch.observe({"a": ORPHAN}, is_new=True)
    assert watch.charged == {"b"}


def late(**changes: Any) -> tuple[Decimal, Decimal] | None:
    values: dict[str, Any] = {
        "orphan": ORPHAN, "attempt": ENDED, "now": build.at(150), "first_listed_at": build.at(100), "existing": 1,
    }  # fmt: skip
    return late_amounts(LateMachineFacts(**values | changes))


def test_time_after_the_charged_end_is_owed() -> None:
    assert late() == (Decimal("0.010"), Decimal(0))
    assert late(existing=2) == (Decimal("0.020"), Decimal(0))
    assert late(now=build.at(50)) is None


def test_a_late_machine_is_owed_from_its_first_listing_at_the_latest() -> None:
    """The clock of the machine's cloud may be ahead."""
    ahead = replace(ORPHAN, born=build.at(140))
    assert late(orphan=ahead) == (Decimal("0.005"), Decimal(0))
    assert late(orphan=replace(ORPHAN, born=None)) is not None


@given(st.floats(0, 500), st.floats(0, 500), st.integers(0, 3))
def test_later_sweeps_owe_no_less(now_s: float, later_s: float, existing: int) -> None:
    first = late(now=build.at(now_s), existing=existing)
    second = late(now=build.at(now_s + later_s), existing=existing)
    assert first is None or (second is not None and second[0] >= first[0] > 0)
