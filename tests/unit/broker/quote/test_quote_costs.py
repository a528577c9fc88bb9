"""Dollars and hours of a quote, the order of offers, and the hosts that a job accepts."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.domain.instance import Caps
from broker.domain.offer import GIB, DropReason, HostFacts, Offer, Quote, QuoteLine
from broker.domain.spec import JobSpec
from broker.estimator.planning.corrections import Corrections
from broker.quote.engine import quote
from tests.support.machines import CAPS, NOW, SCRIPT, WORK, offer, quoted, spec

OBJECTIVES = ("cheapest", "hourly", "fastest", "balanced")


def kept(one: Offer, **arguments: Any) -> QuoteLine:
    line = quoted([one], **arguments).lines[0]
    assert line.drop is None, line.reason
    return line


def parts(line: QuoteLine) -> tuple[float, float, float, float]:
    assert line.costs is not None
    return tuple(float(x) for x in (line.costs.machines, line.costs.traffic, line.costs.storage, line.costs.requests))  # type: ignore[return-value]


def stored(one: Offer, usd_per_gib_month: str) -> QuoteLine:
    return quote(
        spec(), WORK, [one], now=NOW, local_files=False, scoped_store=True, spent=Decimal(0), cap_left=Decimal(100),
        excluded={}, caps=CAPS, storage_usd_per_gib_month=Decimal(usd_per_gib_month),
    ).lines[0]  # fmt: skip


@pytest.mark.parametrize("spot", [True, False])
def test_the_cost_parts_add_up(spot: bool) -> None:
    facts = HostFacts(egress_usd_per_gib=Decimal("0.09"), ingress_usd_per_gib=Decimal("0.01"), down_mbit_s=400)
    line = stored(offer(spot=spot, facts=facts), "0.023")
    hours = line.hours
    assert hours is not None
    whole = (
        hours.boot + hours.load + hours.training + hours.evaluation + hours.checkpoints + hours.preemptions
    )  # fmt: skip
    assert whole == pytest.approx(line.hours_p50)
    assert (hours.preemptions > 0) == spot
    assert sum(parts(line)) == pytest.approx(float(line.usd_p50 or 0), abs=4e-6)
    assert min(parts(line)) > 0


def test_traffic_is_paid_where_charged_and_again_after_a_preemption() -> None:
    free, out = offer(), offer(facts=HostFacts(egress_usd_per_gib=Decimal("0.09")))
    dear = replace(out, facts=HostFacts(ingress_usd_per_gib=Decimal("0.09")))
    assert parts(kept(free))[1] == 0
    fetched = (5 * GIB + 2 * 8_030_261_248) / GIB * 0.09
    assert parts(kept(dear))[1] == pytest.approx(fetched, rel=1e-3)
    assert 0 < parts(kept(out))[1] < 1
    assert parts(kept(replace(dear, spot=True, preemptions_per_hour=1.0)))[1] > fetched


def test_a_slow_line_takes_longer_to_start_and_to_save() -> None:
    plain, slow, fast = (
        kept(offer(facts=HostFacts(down_mbit_s=down, up_mbit_s=down))) for down in (None, 100.0, 100_000.0)
    )  # fmt: skip
    assert plain.hours == fast.hours
    assert slow.hours is not None
    assert plain.hours is not None
    # 5 GiB of image and 16 GB of weights over 90.5 Mbit/s in place of 1600.
    late = (5 * GIB + 2 * 8_030_261_248) * (1 / (90.5 * 125_000) - 1 / 200e6) / 3600
    assert slow.hours.boot - plain.hours.boot == pytest.approx(late, rel=1e-3)
    assert slow.hours.checkpoints > plain.hours.checkpoints


def test_the_bucket_costs_space_and_requests_where_it_costs_anything() -> None:
    assert parts(stored(offer(), "0"))[2:] == (0, 0)
    _, _, storage, requests = parts(stored(offer(), "0.023"))
    assert 0 < storage < requests < 0.01
    assert parts(stored(offer(emulated_on="cpu", gpus=1), "0.023"))[2] == 0


def test_the_least_that_a_cloud_bills_is_paid() -> None:
    assert parts(kept(offer(billing_minimum_s=36_000)))[0] == 25
    (spot,) = quoted([offer(billing_minimum_s=36_000, spot=True, preemptions_per_hour=0.01)]).considered()
    assert spot.usd_p50 == 25
    assert parts(kept(offer(billing_minimum_s=1))) == parts(kept(offer()))


def ranked(objective: str, market: list[Offer], **more: Any) -> list[str]:
    made = quoted(market, resources={"objective": objective}, **more)
    return [line.offer.id for line in made.lines[: made.kept_count]]


BUSY = replace(WORK, sequence=4096, tokens_per_row=2000.0)
"""Rows that keep every one of these GPUs busy, so that the faster one is the faster one."""
MARKET = [
    offer(id="b200", accelerator="b200", gpu_memory_bytes=180 * GIB, usd_per_hour=Decimal(9)),
    offer(id="h100", usd_per_hour=Decimal("2.5")),
    offer(id="l40s", accelerator="l40s", gpu_memory_bytes=45 * GIB, usd_per_hour=Decimal("0.8")),
    offer(id="a6000", accelerator="a6000", gpu_memory_bytes=48 * GIB, usd_per_hour=Decimal("0.79")),
]


def test_each_objective_ranks_offers_by_its_measure() -> None:
    assert ranked("hourly", MARKET) == ["a6000", "l40s", "h100", "b200"]
    assert ranked("fastest", MARKET, work=BUSY) == ["b200", "h100", "l40s", "a6000"]
    assert ranked("cheapest", MARKET, work=BUSY)[0] == "l40s"
    assert ranked("balanced", MARKET, work=BUSY)[0] == "h100"
    assert ranked("fastest", MARKET, work=BUSY, cap_left=Decimal(2))[0] == "h100"
    assert ranked("fastest", MARKET[:2], work=SCRIPT) == ["h100", "b200"]


markets = st.lists(
    st.builds(
        offer,
        id=st.uuids().map(str),
        accelerator=st.sampled_from(["h100-sxm", "a100-80gb-sxm", "l40s"]),
        gpus=st.sampled_from([1, 2, 8]),
        vcpus=st.just(64),
        usd_per_hour=st.decimals("0.01", 50, places=4),
        spot=st.booleans(),
        preemptions_per_hour=st.none() | st.floats(0, 30),
        billing_quantum_s=st.sampled_from([1, 3600]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.id,
)


@settings(max_examples=60, deadline=None)
@given(markets, st.sampled_from(OBJECTIVES), st.data())
def test_price_up_never_ranks_an_offer_higher(market: list[Offer], objective: str, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(market) - 1))
    more = data.draw(st.decimals("0.0001", 40, places=4))
    dearer = [replace(o, usd_per_hour=o.usd_per_hour + more) if n == number else o for n, o in enumerate(market)]
    before, after = ranked(objective, market), ranked(objective, dearer)
    name = market[number].id
    if name not in before:
        assert name not in after
    elif name in after:
        assert after.index(name) >= before.index(name)


@settings(max_examples=60, deadline=None)
@given(markets, st.integers(2, 8))
def test_more_gpus_at_the_same_price_each_are_never_cheaper_by_the_hour(market: list[Offer], times: int) -> None:
    one = market[0]
    more = replace(one, id="more", gpus=one.gpus * times, usd_per_hour=one.usd_per_hour * times, vcpus=512)
    large = replace(more, ram_bytes=4096 * GIB)
    order = ranked("hourly", [large, one])
    assert order.index(one.id) < order.index("more") if len(order) == 2 else True


def test_only_hosts_of_the_trust_that_is_asked_for() -> None:
    market = [offer(id=t, trust=t) for t in ("community", "secure", "own")]
    found = {t: {x.offer.id for x in quoted(market, resources={"trust": t}).lines if x.drop is None} for t in
             ("community", "secure", "own")}  # fmt: skip
    assert found == {
        "community": {"community", "secure", "own"}, "secure": {"secure", "own"}, "own": {"own"},
    }  # fmt: skip
    line = quoted(market[:1], resources={"trust": "secure"}).lines[0]
    assert (line.drop, line.reason) == (DropReason.TRUST, "a community host; asked for trust secure")


def scripted(one: Offer, *, checkpoints: bool) -> Quote:
    asked = JobSpec.model_validate(
        {
            "name": "job",
            "cap_usd": "5",
            "script": {"code": "upload:00", "command": ["true"], "checkpoints": checkpoints},
        }
    )
    return quote(
        asked, SCRIPT, [one], now=NOW, local_files=False, scoped_store=True, spent=Decimal(0), cap_left=Decimal(5),
        excluded={}, caps={"cloud": Caps(spot=True)},
    )  # fmt: skip


def test_no_spot_machine_for_what_writes_no_checkpoints() -> None:
    line = scripted(offer(spot=True), checkpoints=False).lines[0]
    assert line.drop is DropReason.NO_CHECKPOINTS
    assert "lose all" in line.reason
    assert (
        scripted(offer(), checkpoints=False).kept_count == scripted(offer(spot=True), checkpoints=True).kept_count == 1
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 8, "vcpus": 15, "ram_bytes": 2000 * GIB}, "15 CPU cores for 8 GPUs; 2 for each are the minimum"),
        ({"gpus": 8, "vcpus": 64, "ram_bytes": 63 * GIB}, "63 GiB of RAM for 8 GPUs; 8 for each are the minimum"),
        ({"disk_bytes": 27 * GIB}, "27 GiB of disk; 28 for image, model, data and checkpoints"),
    ],
)
def test_a_host_too_small_for_its_gpus_is_dropped(changes: dict[str, Any], words: str) -> None:
    line = quoted([offer(**changes)]).lines[0]
    assert (line.drop, line.reason) == (DropReason.HOST, words)


def test_a_host_that_is_small_for_its_gpus_says_so() -> None:
    assert "3 cores and 200 GiB of RAM are few for 1 GPUs" in kept(offer(vcpus=3)).reason
    assert "few" not in kept(offer(vcpus=4)).reason


def test_an_emulated_host_is_not_judged_by_its_size() -> None:
    small = offer(emulated_on="cpu", emulated_vcpus=2, vcpus=1, ram_bytes=GIB, disk_bytes=GIB)
    assert kept(small, cap_left=Decimal(10**6)).hours is not None


def test_a_line_names_the_record_of_its_tier() -> None:
    line = kept(offer())
    assert line.tier is not None
    learned = Corrections(records={(line.tier, False): "3 of 4 held"})
    held = quote(
        spec(), WORK, [offer()], now=NOW, local_files=False, scoped_store=True, spent=Decimal(0), cap_left=Decimal(100),
        excluded={}, caps=CAPS, learned=learned,
    ).lines[0]  # fmt: skip
    assert held.evidence == f"{line.evidence}; 3 of 4 held"
