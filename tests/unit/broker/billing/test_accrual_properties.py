"""Prices that move, traffic and time: what accrues of them, and what they leave of the cap."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.billing.accrual import accrued, counted, machine_s, traffic, traffic_cost, traffic_owed, uncharged_usd
from broker.billing.caps import cap_is_near, limit, min_budget_usd, reserved
from broker.billing.drain import drain_lead_s
from broker.billing.prices import price_changes, price_now
from broker.billing.time_limits import out_of_time, out_of_time_message, time_is_up, time_left_s
from broker.domain.ids import InstanceName
from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import Attempt, AttemptState, Handle, PriceChange, Signal, Traffic
from broker.domain.money import MICRO, ZERO, usd
from broker.domain.offer import GIB, HostFacts
from broker.domain.workload import MemoryNeed
from broker.lifecycle.signals import due_signal
from tests.support import build
from tests.support.build import drain_budget
from trainer.contract.documents import CheckpointRef, Final, Heartbeat, Outcome

CAPS = Caps(spot=True, teardown_s=30, list_lag_s=5)
prices = st.decimals(min_value="0.0001", max_value="100", places=4)
quanta = st.sampled_from([1, 7, 60, 3600])
seconds = st.floats(min_value=0, max_value=20_000)
moves = st.lists(st.tuples(seconds, prices), max_size=6)


def priced(price: Decimal | str, quantum: int = 1, **changes: Any) -> Attempt:
    return build.attempt(line=build.line(usd_per_hour=Decimal(price), billing_quantum_s=quantum), **changes)


def change(at: float, price: Decimal | str) -> PriceChange:
    return PriceChange(since=build.at(at), usd_per_hour=Decimal(price))


def extra_change(at: float, price: Decimal | str, extra_machines: int = 1) -> PriceChange:
    return replace(change(at, price), extra_machines=extra_machines)


def seen(price: str | None, *, moves: bool = True, number: int = 1) -> Observed:
    handle = Handle(provider="x", id=str(number), name=InstanceName("n"))
    rate = None if price is None else Decimal(price)
    return Observed(handle=handle, state=InstanceState.RUNNING, usd_per_hour=rate, price_moves=moves)


def beat(boot: str = "b", **counters: Any) -> Heartbeat:
    return Heartbeat(attempt="x", boot=boot, seq=1, **counters)


def final(boot: str = "b", **counters: Any) -> Final:
    return Final(attempt="x", outcome=Outcome.COMPLETED, boot=boot, **counters)


# ------------------------------------------------------------------------------------------------------------- prices


def test_a_price_counts_from_its_change_on() -> None:
    moved = priced("3.6", prices=(change(100, "7.2"), change(200, "1.8")))
    assert accrued(moved, build.at(100)) == Decimal("0.1")
    assert accrued(moved, build.at(200)) == Decimal("0.3")
    assert accrued(moved, build.at(300)) == Decimal("0.35")
    assert price_now(moved) == Decimal("1.8")


def test_a_quantum_costs_the_highest_price_in_it() -> None:
    hourly = priced("1", 3600, prices=(change(600, "3"), change(1200, "2")))
    assert accrued(hourly, build.at(599)) == Decimal(1)
    assert accrued(hourly, build.at(601)) == Decimal(3)
    assert accrued(hourly, build.at(3600)) == Decimal(3)
    assert accrued(hourly, build.at(3601)) == Decimal(5)


def test_a_price_from_before_the_billing_began_is_the_first() -> None:
    late = build.attempt(
        line=build.line(usd_per_hour=Decimal("3.6"), billed_from="running"),
        running_at=build.at(50), prices=(change(10, "7.2"), change(10, "1.8")),
    )  # fmt: skip
    assert accrued(late, build.at(150)) == Decimal("0.2")


@given(prices, quanta, moves, st.lists(seconds, min_size=2, max_size=8))
def test_accrual_is_monotone_and_within_the_price_bounds(
    first: Decimal, quantum: int, later: list[tuple[float, Decimal]], times: list[float]
) -> None:
    moved = priced(first, quantum, prices=tuple(change(at, price) for at, price in later))
    totals = [accrued(moved, build.at(t)) for t in sorted(times)]
    assert all(a <= b for a, b in pairwise(totals))
    lowest, highest = (f([first, *(price for _, price in later)]) for f in (min, max))
    for t, total in zip(sorted(times), totals, strict=True):
        assert accrued(priced(lowest, quantum), build.at(t)) <= total <= accrued(priced(highest, quantum), build.at(t))
        assert total == total.quantize(MICRO)


@given(prices, quanta, moves, seconds, st.randoms(use_true_random=False))
def test_the_order_in_which_changes_are_known_does_not_matter(
    first: Decimal, quantum: int, later: list[tuple[float, Decimal]], until: float, random: Random
) -> None:
    changes = [change(at, price) for at, price in later]
    straight = accrued(priced(first, quantum, prices=tuple(changes)), build.at(until))
    random.shuffle(changes)
    assert accrued(priced(first, quantum, prices=tuple(changes)), build.at(until)) == straight


@given(prices, quanta, moves, st.lists(seconds, max_size=8))
def test_charging_while_prices_become_known_charges_each_second_once(
    first: Decimal, quantum: int, later: list[tuple[float, Decimal]], ticks: list[float]
) -> None:
    """Simulate billing: each tick records the price changes so far, and a rise counts from the previous tick."""
    attempt, charged = priced(first, quantum), ZERO
    for t in sorted(ticks):
        market = max((m for m in later if m[0] <= t), default=(0.0, first), key=lambda m: m[0])[1]
        found = price_changes(attempt, (seen(str(market)),), build.at(t), ())
        attempt = replace(attempt, prices=(*attempt.prices, *found))
        due = uncharged_usd(attempt, build.at(t))
        charged += due
        attempt = replace(attempt, charged_usd=attempt.charged_usd + due, charged_to=build.at(t))
    last = build.at(max(ticks, default=0))
    assert charged == attempt.charged_usd >= accrued(attempt, last)
    if not any(
        a.usd_per_hour > b.usd_per_hour
        for a, b in pairwise((PriceChange(since=last, usd_per_hour=first), *attempt.prices))
    ):
        assert charged == accrued(attempt, last)


def test_a_machine_too_many_leaves_less_of_the_cap() -> None:
    alone = priced("0.36")
    beside = replace(alone, prices=(extra_change(0, "0.36"),))
    cap = usd(Decimal("0.36") * (1000 + int(drain_lead_s(alone, CAPS, drain_budget()))) / 3600)
    assert not cap_is_near(alone, build.active_job(cap_usd=cap), CAPS, build.at(600), drain_budget())
    assert cap_is_near(beside, build.active_job(cap_usd=cap), CAPS, build.at(600), drain_budget())


def test_a_moving_price_starts_the_drain_early_enough_for_the_highest() -> None:
    still = build.attempt(line=build.line(usd_per_hour=Decimal("0.36"), on_demand_usd_per_hour=Decimal("3.6")))
    moving = build.attempt(
        line=build.line(usd_per_hour=Decimal("0.36"), on_demand_usd_per_hour=Decimal("3.6"), price_moves=True)
    )
    lead = drain_lead_s(still, CAPS, drain_budget())
    cap = usd(Decimal("0.36") * (1000 + int(lead)) / 3600)
    job = build.active_job(cap_usd=cap)
    assert not cap_is_near(still, job, CAPS, build.at(500), drain_budget())
    assert cap_is_near(moving, job, CAPS, build.at(500), drain_budget())
    assert min_budget_usd(moving.line, CAPS, 300, drain_budget()) == 10 * min_budget_usd(
        still.line, CAPS, 300, drain_budget()
    )


@settings(max_examples=60)
@given(
    st.integers(min_value=1, max_value=20), quanta, st.floats(min_value=10, max_value=60), st.randoms(),
    st.decimals(min_value="0.5", max_value="12", places=2),
)  # fmt: skip
def test_spend_stays_under_the_cap_for_any_price(
    times: int, quantum: int, tick: float, random: Random, cap: Decimal
) -> None:
    """The cloud's own bill stays under the cap in the worst case. The price changes right after each poll of billing,
    up to the on-demand price. The trainer uses its whole drain and sends checkpoints as often as allowed, the last one
    at the end. It sends its tokenised rows after the last poll.
    """
    first, top = Decimal(5), Decimal(5) * times
    size = random.choice([0, GIB, 20 * GIB])
    facts = HostFacts(egress_usd_per_gib=Decimal("0.01"))
    line = build.line(
        usd_per_hour=first, on_demand_usd_per_hour=top, price_moves=True, billing_quantum_s=quantum, facts=facts
    )
    line = replace(line, memory=_need(size), rows_bytes=random.choice([0, 50 * GIB]))
    every_s = random.choice([30.0, 300.0])
    if min_budget_usd(line, CAPS, every_s, drain_budget(tick_s=tick)) >= cap:
        return
    attempt, now, real = build.attempt(line=line), 0.0, first
    job = build.active_job(cap_usd=cap, spec=build.spec(checkpoint={"every_s": every_s}))
    bill: list[PriceChange] = []
    while not cap_is_near(attempt, job, CAPS, build.at(now), drain_budget(tick_s=tick)):
        due = uncharged_usd(attempt, build.at(now)) + traffic_owed(attempt, build.at(now))
        moved = traffic_owed(attempt, build.at(now))
        attempt = replace(
            attempt, charged_usd=attempt.charged_usd + due, traffic_usd=attempt.traffic_usd + moved,
            charged_to=build.at(now),
        )  # fmt: skip
        job = replace(job, spent_usd=job.spent_usd + due)
        real = random.choice([real, first, top, (first + top) / 2])
        bill.append(PriceChange(since=build.at(now), usd_per_hour=usd(real)))
        now += tick
        found = price_changes(attempt, (seen(str(usd(real))),), build.at(now), ())
        saves = int(now / every_s)
        saved = CheckpointRef(manifest="m", step=saves, save_s=60, bytes=size) if saves else None
        attempt = replace(
            attempt, prices=(*attempt.prices, *found),
            beat=beat(sent_bytes=min(saves * size, 2**53), checkpoint=saved),
        )  # fmt: skip
    ends = build.at(now) + timedelta(seconds=60 + CAPS.teardown_s)
    bill.append(PriceChange(since=build.at(now), usd_per_hour=top))
    sent = Traffic(sent=(int((now + 60) / every_s) + 1) * size + line.rows_bytes)
    paid = accrued(replace(attempt, prices=tuple(bill)), ends) + traffic_cost(line.offer, sent)
    assert paid <= cap
    assert job.spent_usd <= cap


def _need(size: int) -> MemoryNeed:
    return MemoryNeed(
        weights=size, gradients=0, optimizer=0, activations=0, logits=0, context=0, margin=0, source="test"
    )


# ------------------------------------------------------------------------------------------------------------ traffic


def sending(**changes: Any) -> Attempt:
    facts = HostFacts(egress_usd_per_gib=Decimal("0.09"), ingress_usd_per_gib=Decimal("0.01"))
    return build.attempt(line=build.line(facts=facts), **changes)


def test_traffic_is_charged_once_for_any_reports() -> None:
    attempt = sending(beat=beat(sent_bytes=10 * GIB, received_bytes=GIB))
    assert traffic_owed(attempt, build.at(100)) == Decimal("0.91")
    charged = replace(attempt, charged_usd=Decimal("0.91"), traffic_usd=Decimal("0.91"))
    assert traffic_owed(charged, build.at(100)) == ZERO
    assert traffic_owed(replace(charged, beat=beat(sent_bytes=1)), build.at(100)) == ZERO, "a number is not taken back"
    assert uncharged_usd(charged, build.at(100)) == accrued(charged, build.at(100)), "it pays for no machine"


def test_a_restarted_agent_counts_on_where_the_last_one_stopped() -> None:
    first = sending(beat=beat("one", sent_bytes=3, received_bytes=1))
    same = counted(first, replace(first, beat=beat("one", sent_bytes=5, received_bytes=2)))
    assert traffic(same, build.at(100)) == Traffic(sent=5, received=2)
    again = counted(same, replace(same, beat=beat("two", sent_bytes=7)))
    assert traffic(again, build.at(100)) == Traffic(sent=12, received=2)
    assert counted(sending(), first) == first
    assert counted(first, sending()) == sending()


@pytest.mark.parametrize(
    ("last", "sent"),
    [(final(sent_bytes=9), 9), (final(sent_bytes=2), 5), (final("other", sent_bytes=2), 7), (None, 5)],
)
def test_the_final_report_counts_traffic_after_the_last_heartbeat(last: Final | None, sent: int) -> None:
    assert traffic(sending(beat=beat(sent_bytes=5), final=last), build.at(100)).sent == sent


def test_a_final_report_without_a_heartbeat_counts() -> None:
    assert traffic(sending(final=final(sent_bytes=9)), build.at(100)).sent == 9


def test_a_final_report_of_a_later_start_adds_to_earlier_traffic() -> None:
    word = final("b", sent_bytes=2, received_bytes=7)
    attempt = sending(earlier_traffic=Traffic(sent=3, received=5), beat=beat("a", received_bytes=20), final=word)
    assert traffic(attempt, build.at(9)) == Traffic(sent=5, received=32)


def test_traffic_above_the_networks_capacity_is_ignored() -> None:
    attempt = sending(beat=beat(sent_bytes=2**53, received_bytes=2**53))
    most = 10 * 12_500_000_000
    assert traffic(attempt, build.at(10)) == Traffic(sent=most, received=most)


def test_traffic_without_a_stated_price_is_free() -> None:
    assert traffic_cost(build.offer(), Traffic(sent=GIB, received=GIB)) == ZERO
    assert traffic_cost(build.offer(facts=HostFacts()), Traffic(sent=GIB)) == ZERO


def test_the_last_checkpoints_are_kept_free_under_the_cap() -> None:
    saved = CheckpointRef(manifest="m", step=1, save_s=1, bytes=10 * GIB)
    quiet, busy = sending(beat=beat()), sending(beat=beat(checkpoint=saved))
    job = build.active_job(cap_usd=Decimal("1.8"))
    assert not cap_is_near(quiet, job, CAPS, build.at(100), drain_budget())
    assert cap_is_near(busy, job, CAPS, build.at(100), drain_budget())
    unsaved = replace(quiet, line=replace(quiet.line, memory=_need(10 * GIB)))
    assert cap_is_near(unsaved, job, CAPS, build.at(100), drain_budget())
    assert min_budget_usd(unsaved.line, CAPS, 300, drain_budget()) - min_budget_usd(
        quiet.line, CAPS, 300, drain_budget()
    ) == Decimal("1.8")


# --------------------------------------------------------------------------------------------------------------- time


def timed(**spec: Any) -> Any:
    return build.job(spec_changes={"cap_usd": "100", **spec}, state=build.active_job().state, attempts=1)


def test_jobs_without_time_limits_never_run_out_of_time() -> None:
    assert time_left_s(timed(), build.at(0)) is None
    assert out_of_time(timed(), build.at(0)) is None
    assert not time_is_up(build.attempt(), timed(), CAPS, build.at(1e6), drain_budget())


def test_a_deadline_leaves_time_for_a_drain() -> None:
    job, lead = timed(deadline="2026-01-01T01:00:00Z"), drain_lead_s(build.attempt(), CAPS, drain_budget())
    assert not time_is_up(build.attempt(), job, CAPS, build.at(3600 - lead - 1), drain_budget())
    assert time_is_up(build.attempt(), job, CAPS, build.at(3600 - lead), drain_budget())
    assert due_signal(build.attempt(), job, CAPS, build.at(3600 - lead), drain_budget()) is Signal.OUT_OF_TIME
    assert due_signal(build.attempt(), job, CAPS, build.at(0), drain_budget()) is None


def test_max_duration_counts_every_attempt() -> None:
    job, lead = timed(max_duration=3600), drain_lead_s(build.attempt(), CAPS, drain_budget())
    assert not time_is_up(build.attempt(), job, CAPS, build.at(3000), drain_budget())
    older = replace(job, machine_s=700.0)
    assert time_is_up(build.attempt(), older, CAPS, build.at(2900 - lead), drain_budget())
    assert not time_is_up(build.attempt(), older, CAPS, build.at(2899 - lead), drain_budget())
    assert machine_s(build.attempt(AttemptState.PLANNED), build.at(9)) == 0
    assert machine_s(build.attempt(), build.at(-9)) == 0


def test_the_cap_is_reported_before_the_time_and_nothing_twice() -> None:
    job = replace(timed(deadline="2026-01-01T00:00:01Z"), cap_usd=Decimal("0.0001"))
    assert due_signal(build.attempt(), job, CAPS, build.at(0), drain_budget()) is Signal.CAP
    assert due_signal(build.attempt(signal=Signal.IDLE), job, CAPS, build.at(0), drain_budget()) is None


def test_the_message_names_the_limit_that_was_reached() -> None:
    both = timed(deadline="2026-01-01T02:00:00+01:00", max_duration=7200)
    assert "its deadline 2026-01-01 01:00 UTC" in out_of_time_message(both, build.at(3600))
    assert "its max_duration of 7200 s" in out_of_time_message(replace(both, machine_s=7200.0), build.at(0))
    assert "its max_duration of 60 s" in out_of_time_message(timed(max_duration=60), build.at(0))
    assert "its deadline" in out_of_time_message(timed(deadline="2026-01-01T00:00:00Z"), build.at(0))
    assert out_of_time(timed(max_duration=60), build.at(0), needed_s=60) == out_of_time_message(
        timed(max_duration=60), build.at(0)
    )
    assert out_of_time(timed(max_duration=60), build.at(0), needed_s=59) is None


def test_less_is_reserved_where_less_time_is_allowed() -> None:
    line = build.line(usd_per_hour=Decimal("3.6"))
    lead = 10 + 60 + 7 + 30 + 10 + 1
    assert reserved(timed(), line, CAPS, drain_budget()) == Decimal(100)
    assert reserved(timed(max_duration=3600), line, CAPS, drain_budget()) == usd(Decimal("0.001") * (3600 + lead))
    used = replace(timed(max_duration=3600), machine_s=3600.0)
    assert reserved(used, line, CAPS, drain_budget()) == usd(Decimal("0.001") * lead)
    assert reserved(replace(timed(max_duration=3600), cap_usd=Decimal(1)), line, CAPS, drain_budget()) == Decimal(1)


def test_time_reservation_covers_every_save_of_known_size() -> None:
    """Saves come up to five times as often as the bound, where machines are lost that often."""
    facts = HostFacts(egress_usd_per_gib=Decimal("0.1"))
    line = build.line(usd_per_hour=Decimal("3.6"), facts=facts)
    job = timed(max_duration=3600, checkpoint={"every_s": 300})
    assert reserved(job, line, CAPS, drain_budget()) == Decimal(100), "a script"
    known = replace(line, memory=_need(GIB))
    room = usd(Decimal("0.001") * 3718) + Decimal("0.1") * (5 * 3718 // 300 + 2)
    assert reserved(job, known, CAPS, drain_budget()) == room
    assert reserved(job, replace(known, rows_bytes=GIB), CAPS, drain_budget()) == room + Decimal("0.1"), (
        "its tokenised rows"
    )


def test_with_max_duration_the_reservation_holds_as_the_cap_does() -> None:
    attempt = priced("3.6", reserved_usd=Decimal(1))
    job = timed(max_duration=360_000)
    assert cap_is_near(attempt, job, CAPS, build.at(1000), drain_budget())
    assert not cap_is_near(replace(attempt, reserved_usd=Decimal(100)), job, CAPS, build.at(1000), drain_budget())


def test_attempt_spends_no_more_than_reserved_after_a_raised_cap() -> None:
    """The kept machine of a failed job is about to end, so the higher cap reserved nothing for it."""
    attempt = priced("3.6", reserved_usd=Decimal(1))
    assert cap_is_near(attempt, timed(), CAPS, build.at(1000), drain_budget())
    assert not cap_is_near(attempt, timed(), CAPS, build.at(800), drain_budget())
    charged = replace(attempt, charged_usd=Decimal("0.5"))
    assert limit(charged, replace(timed(), spent_usd=Decimal("2.5"))) == Decimal(3)
