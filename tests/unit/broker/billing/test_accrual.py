"""Charges never lose or repeat time, and the drain starts early enough for the cap to hold."""

from dataclasses import replace
from datetime import timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.billing.accrual import accrued, billed_until, machine_s, runs_since, uncharged_after_end_usd, uncharged_usd
from broker.billing.caps import cap_is_near, min_budget_usd, reservation
from broker.billing.drain import drain_lead_s
from broker.billing.prices import price_changes
from broker.billing.time_limits import out_of_time
from broker.domain.ids import InstanceName
from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import Attempt, AttemptState, Handle, PriceChange, Reason
from broker.domain.money import ZERO
from broker.domain.offer import GIB, HostFacts
from broker.domain.workload import MemoryNeed
from broker.lifecycle.signals import is_drain_over
from tests.support import build
from tests.support.build import drain_budget
from trainer.contract.documents import CheckpointRef, Heartbeat

CAPS = Caps(spot=True, teardown_s=30, list_lag_s=5)
prices = st.decimals(min_value="0.0001", max_value="100", places=4)
quanta = st.sampled_from([1, 60, 3600])


def priced(price: Decimal | str, quantum: int = 1, **changes: object) -> Attempt:
    return build.attempt(line=build.line(usd_per_hour=Decimal(price), billing_quantum_s=quantum), **changes)


def test_nothing_accrues_before_the_create_is_sent() -> None:
    assert accrued(build.attempt(AttemptState.PLANNED), build.at(100)) == ZERO


def test_a_started_quantum_is_paid_whole() -> None:
    attempt = priced("3.6", quantum=60)
    assert accrued(attempt, build.at(0)) == ZERO
    assert accrued(attempt, build.at(1)) == Decimal("0.06")
    assert accrued(attempt, build.at(60)) == Decimal("0.06")
    assert accrued(attempt, build.at(61)) == Decimal("0.12")


def test_billing_from_running_charges_the_boot_only_until_it_is_known() -> None:
    """A machine that is billed from running is charged for the boot only until it is known to run."""
    booting = build.attempt(line=build.line(usd_per_hour=Decimal("3.6"), billed_from="running"))
    assert accrued(booting, build.at(100)) == Decimal("0.1")
    runs = replace(booting, running_at=build.at(90))
    assert accrued(runs, build.at(90)) == ZERO
    assert accrued(runs, build.at(100)) == Decimal("0.01")


def test_billing_from_create_charges_the_boot() -> None:
    assert accrued(priced("3.6", running_at=build.at(90)), build.at(100)) == Decimal("0.1")


LATE = Handle(provider="simulated", id="i-1", name=build.attempt().name)


def ended(charged_to: float, **changes: Any) -> Attempt:
    """Return an ended attempt whose bill was settled at `charged_to`."""
    attempt = priced("3.6", state=AttemptState.ENDED, charged_to=build.at(charged_to), **changes)
    return replace(attempt, charged_usd=accrued(attempt, build.at(charged_to)))


def test_late_machine_is_charged_from_birth_or_from_the_last_charge() -> None:
    """A machine of unknown birth is charged from the last charge."""
    attempt = ended(100)
    assert uncharged_after_end_usd(attempt, LATE, build.at(160), build.at(170)) == Decimal("0.01")
    assert uncharged_after_end_usd(attempt, LATE, None, build.at(170)) == Decimal("0.07")
    never_charged = replace(attempt, charged_to=None, charged_usd=ZERO)
    assert uncharged_after_end_usd(never_charged, LATE, build.at(160), build.at(170)) == Decimal("0.17")


def test_each_late_machine_that_exists_is_charged() -> None:
    attempt = ended(100)
    assert uncharged_after_end_usd(attempt, LATE, build.at(160), build.at(170), standing=2) == Decimal("0.02")
    before = PriceChange(since=build.at(50), usd_per_hour=attempt.line.offer.usd_per_hour, extra_machines=1)
    assert uncharged_after_end_usd(replace(attempt, prices=(before,)), LATE, build.at(160), build.at(170)) == Decimal(
        "0.01"
    )
    several = replace(attempt, line=replace(attempt.line, nodes=2))
    assert uncharged_after_end_usd(several, LATE, build.at(160), build.at(170)) == Decimal("0.02")


def test_late_machine_costs_at_least_the_clouds_minimum() -> None:
    attempt = ended(100)
    offer = replace(attempt.line.offer, billing_minimum_s=60)
    least = replace(attempt, line=replace(attempt.line, offer=offer))
    assert uncharged_after_end_usd(least, LATE, build.at(160), build.at(170)) == Decimal("0.06")
    charged = replace(least, charged_to=build.at(170))
    assert uncharged_after_end_usd(charged, LATE, build.at(160), build.at(190)) == ZERO
    assert uncharged_after_end_usd(charged, LATE, build.at(160), build.at(230)) == Decimal("0.01")


@given(
    looks=st.lists(st.floats(0, 5000), min_size=1, max_size=6).map(sorted), born=st.floats(0, 5000), quantum=quanta,
    nodes=st.integers(1, 3),
)  # fmt: skip
def test_late_machine_is_charged_once_per_second_however_often_billed(
    looks: list[float], born: float, quantum: int, nodes: int
) -> None:
    attempt = ended(100)
    offer = replace(attempt.line.offer, billing_quantum_s=quantum)
    attempt = replace(attempt, line=replace(attempt.line, offer=offer, nodes=nodes))
    birth, total, last = build.at(100 + born), ZERO, build.at(100 + born + looks[-1])
    at_once = uncharged_after_end_usd(attempt, LATE, birth, last)
    for look in looks:
        now = build.at(100 + born + look)
        usd = uncharged_after_end_usd(attempt, LATE, birth, now)
        total += usd
        attempt = replace(attempt, charged_to=now, charged_usd=attempt.charged_usd + usd)
    assert total == at_once


def test_boot_charges_offset_later_accrual() -> None:
    runs = build.attempt(
        line=build.line(usd_per_hour=Decimal("3.6"), billed_from="running"),
        running_at=build.at(90), charged_usd=Decimal("0.1"),
    )  # fmt: skip
    assert uncharged_usd(runs, build.at(190)) == ZERO
    assert uncharged_usd(runs, build.at(191)) == Decimal("0.001")


def test_boot_charges_count_against_the_cap() -> None:
    line = build.line(usd_per_hour=Decimal("3.6"), billed_from="running")
    runs = build.attempt(line=line, running_at=build.at(9000), charged_usd=Decimal(9), reserved_usd=Decimal(10))
    job = build.active_job(cap_usd=Decimal(10), spent_usd=Decimal("9.99"))
    assert not cap_is_near(runs, job, CAPS, build.at(9001), drain_budget())
    assert cap_is_near(runs, replace(job, spent_usd=Decimal(10)), CAPS, build.at(9001), drain_budget())


def test_machine_may_run_since_a_list_lag_before_last_seen_absent() -> None:
    """A listing may lag, so a machine that was last seen not running at 60 may run since 55."""
    attempt = build.attempt()
    assert runs_since(attempt, build.at(60), CAPS) == build.at(55)
    assert runs_since(attempt, build.at(3), CAPS) == build.at(0)
    assert runs_since(attempt, None, CAPS) == build.at(0)


def test_the_minimum_bill_is_due_once_a_machine_exists() -> None:
    line = build.line(usd_per_hour=Decimal("3.6"), billing_minimum_s=60)
    standing = build.attempt(line=line, handles=(Handle(provider="x", id="1", name=InstanceName("n")),))
    assert accrued(standing, build.at(1)) == accrued(standing, build.at(60)) == Decimal("0.06")
    assert accrued(standing, build.at(61)) == Decimal("0.061")
    assert accrued(replace(standing, handles=()), build.at(1)) == Decimal("0.001")


def test_every_machine_of_an_attempt_is_paid_for() -> None:
    two = build.attempt(line=replace(build.line(usd_per_hour=Decimal("3.6"), billing_quantum_s=60), nodes=2))
    assert accrued(two, build.at(61)) == Decimal("0.24")
    alone = min_budget_usd(replace(two.line, nodes=1), CAPS, 300, drain_budget())
    assert min_budget_usd(two.line, CAPS, 300, drain_budget()) == 2 * alone


def test_absent_or_terminating_machine_is_not_charged_for_proof_time() -> None:
    assert billed_until(build.attempt(), build.at(100), 30) == build.at(100)
    assert billed_until(build.attempt(AttemptState.TERMINATING), build.at(100), 30) == build.at(70)
    absent = build.attempt(AttemptState.TERMINATING, absent_at=build.at(60))
    assert billed_until(absent, build.at(100), 30) == build.at(60)
    assert billed_until(absent, build.at(50), 30) == build.at(50)


def test_a_create_that_was_refused_costs_nothing_and_takes_no_time() -> None:
    asked = build.attempt(AttemptState.LAUNCHING)
    assert billed_until(asked, build.at(100), 30, is_listed=False) == build.at(0)
    assert billed_until(asked, build.at(100), 30, is_listed=True) == build.at(100)
    assert accrued(asked, build.at(100)) > ZERO  # the cap counts it as if the machine existed
    no = replace(asked, state=AttemptState.TERMINATING, reason=Reason.NO_CAPACITY)
    assert (uncharged_usd(no, build.at(100)), machine_s(no, build.at(100))) == (ZERO, 0)
    # What came before it, whose outcome is unknown, stays charged, and nothing more.
    before = replace(no, charged_to=build.at(40), charged_usd=Decimal("0.004"))
    assert (uncharged_usd(before, build.at(100)), machine_s(before, build.at(100))) == (ZERO, 40)


@pytest.mark.parametrize("known", ["handles", "running_at", "booted_at"])
def test_a_machine_of_a_refused_create_is_charged(known: str) -> None:
    no = build.attempt(AttemptState.TERMINATING, reason=Reason.REJECTED)
    machine = Handle(provider="simulated", id="i", name=no.name)
    stands = replace(no, **{known: (machine,) if known == "handles" else build.at(0)})  # type: ignore[arg-type]
    assert uncharged_usd(stands, build.at(100)) == Decimal("0.01")


def test_machine_after_a_refusal_is_charged_from_birth_or_attempt_end() -> None:
    no = build.attempt(
        AttemptState.ENDED, reason=Reason.NO_CAPACITY, charged_to=build.at(0), ended_at=build.at(50)
    )  # fmt: skip
    machine = Handle(provider="simulated", id="i", name=no.name)
    assert uncharged_after_end_usd(no, machine, None, build.at(100)) == Decimal("0.005")
    assert uncharged_after_end_usd(no, machine, build.at(80), build.at(100)) == Decimal("0.002")


@given(prices, quanta, st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=20))
def test_charging_in_any_steps_equals_charging_once(price: Decimal, quantum: int, times: list[float]) -> None:
    """The clock may go backwards between two steps: time already charged is not charged again."""
    attempt, total = priced(price, quantum), ZERO
    for t in times:
        due = uncharged_usd(attempt, build.at(t))
        assert due >= 0
        total += due
        attempt = replace(attempt, charged_usd=attempt.charged_usd + due)
    assert total == accrued(attempt, build.at(max(times)))


@given(prices, quanta, st.floats(min_value=1, max_value=120), st.decimals(min_value="0.01", max_value="50", places=2))
def test_spend_stays_under_the_cap_when_drained_in_time(
    price: Decimal, quantum: int, tick: float, cap: Decimal
) -> None:
    """Spend stays at or below the cap with polling by ticks, the slowest allowed drain, and the stated teardown and
    list lag. The exception is a cap too small for one lead: the very first tick is then too late. Placement refuses
    such a cap.
    """
    attempt, job = priced(price, quantum), build.active_job(cap_usd=cap)
    lead = drain_lead_s(attempt, CAPS, drain_budget(tick_s=tick))
    if accrued(attempt, build.at(lead)) >= cap:
        return
    now = tick * max(0, int((float(cap / price) * 3600 - lead - 2 * quantum) / tick) - 3)
    while not cap_is_near(attempt, job, CAPS, build.at(now), drain_budget(tick_s=tick)):
        now += tick
    ends = build.at(now) + timedelta(seconds=60 + drain_budget().teardown_proof_s + CAPS.teardown_s + CAPS.list_lag_s)
    assert accrued(attempt, ends) <= cap


def test_a_measured_save_shortens_the_lead_but_not_below_half_a_minute() -> None:
    plain = priced("1")
    saved = CheckpointRef(manifest="m", step=1, save_s=14)
    measured = replace(plain, beat=Heartbeat(attempt="x", boot="b", seq=1, checkpoint=saved))
    quick = replace(
        plain, beat=Heartbeat(attempt="x", boot="b", seq=1, checkpoint=saved.model_copy(update={"save_s": 0.1}))
    )
    lead = [drain_lead_s(a, CAPS, drain_budget()) for a in (plain, measured, quick)]
    assert lead == [10 + drain + 7 + 30 + 10 + 1 for drain in (60, 42, 30)]


def test_earlier_attempts_count_against_the_cap() -> None:
    attempt = priced("3.6", charged_usd=Decimal("0.1"))
    rich = build.active_job(cap_usd=Decimal(10), spent_usd=Decimal("0.1"))
    poor = build.active_job(cap_usd=Decimal(10), spent_usd=Decimal("9.9"))
    assert not cap_is_near(attempt, rich, CAPS, build.at(100), drain_budget())
    assert cap_is_near(attempt, poor, CAPS, build.at(100), drain_budget())


def test_the_reservation_is_what_is_left() -> None:
    assert reservation(build.job(spent_usd=Decimal("0.25"))) == Decimal("0.75")
    assert reservation(build.job(spent_usd=Decimal(2))) == ZERO


@pytest.mark.parametrize(("more", "near"), [("0.0001", False), ("0", True)])
def test_a_purchase_above_the_minimum_budget_does_not_drain_at_once(more: str, near: bool) -> None:
    attempt = build.attempt()
    least = min_budget_usd(attempt.line, CAPS, 300, drain_budget())
    job = build.active_job(cap_usd=least + Decimal(more))
    assert cap_is_near(attempt, job, CAPS, build.at(0), drain_budget()) is near


STANDING = (Handle(provider="x", id="1", name=InstanceName("n")),)


def test_the_least_that_a_cloud_bills_must_fit_under_the_cap() -> None:
    """A machine owes the minimum as soon as it exists, so no drain comes early enough."""
    line = build.line(usd_per_hour=Decimal("3.6"), billing_minimum_s=3600)
    assert min_budget_usd(line, CAPS, 300, drain_budget()) == Decimal("3.6")
    assert min_budget_usd(replace(line, nodes=2), CAPS, 300, drain_budget()) == Decimal("7.2")


@given(
    prices, quanta, st.integers(min_value=0, max_value=100_000), st.floats(min_value=1, max_value=120),
    st.integers(min_value=0, max_value=3000), st.decimals(min_value="0.01", max_value="50", places=2),
)  # fmt: skip
def test_no_billing_minimum_breaks_the_cap_of_what_placement_buys(
    price: Decimal, quantum: int, minimum: int, tick: float, boots: int, cap: Decimal
) -> None:
    """The machine may exist from any second, and may run on or end at once."""
    line = build.line(usd_per_hour=price, billing_quantum_s=quantum, billing_minimum_s=minimum)
    if min_budget_usd(line, CAPS, 300, drain_budget(tick_s=tick)) >= cap:
        return
    launched, job = build.attempt(line=line), build.active_job(cap_usd=cap)
    standing = replace(launched, handles=STANDING)
    assert accrued(standing, build.at(1)) <= cap, "it is destroyed as soon as it exists"
    lead = drain_lead_s(launched, CAPS, drain_budget(tick_s=tick))
    now = tick * max(0, int((float(cap / price) * 3600 - lead - 2 * quantum) / tick) - 3)
    while not cap_is_near(standing if now >= boots else launched, job, CAPS, build.at(now), drain_budget(tick_s=tick)):
        now += tick
    assert (
        accrued(standing, build.at(now) + timedelta(seconds=60 + drain_budget().teardown_proof_s + CAPS.teardown_s))
        <= cap
    )


LAST_SAVE = CheckpointRef(manifest="m", step=1, save_s=1)


@given(prices, quanta, st.sampled_from([Reason.STOPPED, Reason.BUDGET, Reason.PREEMPTED]), st.floats(0, 300))
def test_a_drain_that_is_not_for_the_cap_ends_before_the_cap_as_well(
    price: Decimal, quantum: int, reason: Reason, early: float
) -> None:
    """The drain may begin just before the cap would be near, and has no lead of its own. Its trainer does no more
    work.
    """
    saved = Heartbeat(attempt="x", boot="b", seq=1, checkpoint=LAST_SAVE)
    attempt, tick = priced(price, quantum, beat=saved), 10.0
    lead = drain_lead_s(attempt, CAPS, drain_budget(tick_s=tick, drain_s=600))
    job = build.active_job(cap_usd=accrued(attempt, build.at(3000 + lead)))
    now = 3000 - early
    while early and cap_is_near(attempt, job, CAPS, build.at(now), drain_budget(tick_s=tick, drain_s=600)):
        now -= tick
    draining = replace(attempt, state=AttemptState.DRAINING, reason=reason, draining_since=build.at(now))
    while not is_drain_over(draining, job, CAPS, build.at(now), drain_budget(drain_s=600), poll_s=1, order_s=6):
        now += 1
    assert accrued(draining, build.at(now + drain_budget().teardown_proof_s + CAPS.teardown_s)) <= job.cap_usd


def test_cap_drain_has_three_times_the_last_save() -> None:
    """A drain for another reason has the configured time."""
    saved = Heartbeat(attempt="x", boot="b", seq=1, checkpoint=LAST_SAVE)
    spec = {"deadline": build.at(10_000).isoformat()}
    rich = build.active_job(cap_usd=Decimal(1000), spec_changes=spec)

    def waits(until: float, **changes: Any) -> bool:
        draining = replace(priced("1", beat=saved, draining_since=build.at(100)), **changes)
        return not is_drain_over(draining, rich, CAPS, build.at(until), drain_budget(drain_s=600), poll_s=1, order_s=6)

    assert [waits(at, reason=Reason.STOPPED) for at in (130, 131, 706, 707)] == [True, True, True, False]
    assert [waits(at, reason=Reason.CAPPED) for at in (130, 131)] == [True, False]
    assert waits(9_000, reason=Reason.STOPPED, draining_since=None)
    assert not waits(9_990, reason=Reason.STOPPED, draining_since=build.at(9_980)), "its time is over"


def test_saves_of_a_drain_do_not_cut_it_short() -> None:
    """The saves' cost was reserved under the cap when the drain began. During the drain they are sent, not awaited once
    more.
    """
    facts = HostFacts(egress_usd_per_gib=Decimal(1))
    saved = Heartbeat(attempt="x", boot="b", seq=1, checkpoint=LAST_SAVE.model_copy(update={"bytes": GIB}))
    attempt = priced("1", beat=saved, reason=Reason.CAPPED, draining_since=build.at(1000))
    attempt = replace(attempt, line=replace(attempt.line, offer=replace(attempt.line.offer, facts=facts)))
    job = build.active_job(cap_usd=accrued(attempt, build.at(1200)) + 1)
    assert cap_is_near(attempt, job, CAPS, build.at(1000), drain_budget())
    assert not is_drain_over(attempt, job, CAPS, build.at(1020), drain_budget(drain_s=60), poll_s=1, order_s=6)


def test_an_unobserved_start_is_dated_to_the_create() -> None:
    attempt = build.attempt(created_at=build.at(-50))
    assert attempt.create_sent_at == build.at(0)
    assert runs_since(attempt, None, CAPS) == build.at(0)
    assert runs_since(replace(attempt, create_sent_at=None), None, CAPS) == build.at(-50)


def test_time_is_out_when_none_is_left_and_not_before() -> None:
    japan = timezone(timedelta(hours=9))
    job = build.active_job(spec_changes={"deadline": build.at(100).astimezone(japan)})
    assert out_of_time(job, build.at(99.5)) is None
    words = out_of_time(job, build.at(100))
    assert words is not None
    assert words.startswith("out of time: its deadline 2026-01-01 00:01 UTC is reached; ")
    assert out_of_time(job, build.at(80), needed_s=20) == words


def test_the_deadline_is_named_when_both_time_limits_are_reached() -> None:
    job = build.active_job(spec_changes={"deadline": build.at(60), "max_duration": 60}, machine_s=60.0)
    assert "its deadline" in (out_of_time(job, build.at(60)) or "")


def test_a_drain_ends_when_the_next_round_would_pass_the_cap() -> None:
    job = build.active_job(cap_usd=Decimal(1))
    attempt = priced("3.6", state=AttemptState.DRAINING, draining_since=build.at(899))
    assert not is_drain_over(attempt, job, CAPS, build.at(900), drain_budget(), poll_s=1, order_s=6)
    assert is_drain_over(attempt, job, CAPS, build.at(900), drain_budget(), poll_s=60, order_s=6)


def test_the_minimum_budget_covers_every_save_of_a_drain() -> None:
    need = MemoryNeed(
        weights=6 * GIB, gradients=0, optimizer=4 * GIB, activations=0, logits=0, context=0, margin=0, source="test"
    )
    line = build.line(facts=HostFacts(egress_usd_per_gib=Decimal("0.1")))
    saves = min_budget_usd(replace(line, memory=need), CAPS, 30, drain_budget()) - min_budget_usd(
        line, CAPS, 30, drain_budget()
    )
    assert saves == 4 * 10 * Decimal("0.1"), "two in the 70 s until it has drained, one under way and the last"


def test_a_market_price_is_charged_with_the_larger_disk() -> None:
    """The cloud's market price has a disk of the usual size."""
    attempt = priced("3.6")
    offer = replace(attempt.line.offer, added_disk_usd_per_hour=Decimal("0.5"), on_demand_usd_per_hour=Decimal(9))
    attempt = replace(attempt, line=replace(attempt.line, offer=offer))
    handle = Handle(provider="x", id="1", name=InstanceName("n"))
    now = Observed(handle=handle, state=InstanceState.RUNNING, usd_per_hour=Decimal(2), price_moves=True)
    (change,) = price_changes(attempt, (now,), build.at(9), ())
    assert change.usd_per_hour == Decimal("2.5")


def test_a_machine_that_has_become_free_costs_nothing() -> None:
    attempt = priced("3.6")
    handle = Handle(provider="x", id="1", name=InstanceName("n"))
    free = Observed(handle=handle, state=InstanceState.RUNNING, usd_per_hour=ZERO, price_moves=True)
    assert price_changes(attempt, (free,), build.at(9), ()) == (PriceChange(since=build.at(9), usd_per_hour=ZERO),)
