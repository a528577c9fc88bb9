"""Conditions for storing tokenised rows in the blob store, and their cost under the cap."""

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.billing.caps import min_budget_usd
from broker.domain.instance import Caps
from broker.domain.offer import GIB, HostFacts
from broker.domain.workload import Workload
from broker.quote.token_cache import HOURS_A_GIB, MAX_BYTES, rows_bytes
from tests.support import build

WORK = Workload(shape=None, method="full", data_bytes=GIB)


def facts(out: str, into: str = "0") -> HostFacts:
    return HostFacts(egress_usd_per_gib=Decimal(out), ingress_usd_per_gib=Decimal(into))


def test_token_caches_are_always_sent_when_traffic_is_free() -> None:
    for spot in (True, False):
        assert rows_bytes(WORK, build.offer(spot=spot), 1) > GIB, "each row has some bytes of its own"
        assert rows_bytes(WORK, build.offer(spot=spot, facts=HostFacts()), 1) > GIB


def test_an_on_demand_machine_sends_no_token_cache_that_costs() -> None:
    assert rows_bytes(WORK, build.offer(spot=False, facts=facts("0.01")), 1) == 0


def test_on_spot_machines_the_dollars_of_their_time_decide() -> None:
    price = Decimal("2")
    again = price * HOURS_A_GIB
    for out, into, nodes, sends in (
        (again, "0", 1, True),
        (again + Decimal("0.01"), "0", 1, False),
        (again + Decimal("0.01"), "0", 2, True),
        (again / 2, again, 1, False),
    ):
        offer = build.offer(spot=True, usd_per_hour=price, facts=facts(str(out), str(into)))
        assert (rows_bytes(WORK, offer, nodes) > 0) is sends, (out, into, nodes)


def test_token_caches_of_unknown_size_are_not_sent() -> None:
    assert rows_bytes(replace(WORK, data_bytes=0), build.offer(), 1) == 0


@given(st.integers(1, 2**45))
def test_the_upload_of_a_token_cache_is_bounded(size: int) -> None:
    most = rows_bytes(replace(WORK, data_bytes=size), build.offer(), 1)
    assert min(size, MAX_BYTES) <= most <= MAX_BYTES


@pytest.mark.parametrize("rows", [0, GIB])
def test_a_cap_without_room_for_the_upload_buys_nothing(rows: int) -> None:
    line = replace(build.line(facts=facts("0.09")), rows_bytes=rows)
    without = replace(line, rows_bytes=0)
    room = [min_budget_usd(one, Caps(spot=True), 60.0, build.drain_budget()) for one in (line, without)]
    assert room[0] - room[1] == Decimal("0.09") * rows / GIB
