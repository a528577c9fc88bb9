"""Least CPU cores, RAM and disk of a machine by the spec: dropped offers, larger disks and their price."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from broker.domain.instance import Caps
from broker.domain.offer import GB, GIB, DiskSale, DropReason, Offer, OfferVerdict, ProviderStatus
from broker.domain.workload import Workload
from broker.quote.servability import ServableMarket, unserved
from tests.support.machines import NOW, SCRIPT, WORK, offer, quoted, spec

SALE = DiskSale(max_bytes=2000 * GB, usd_per_gib_hour=Decimal("0.0001"))
UNKNOWN = {"vcpus": 0, "ram_bytes": 0, "disk_bytes": 0}


@pytest.mark.parametrize("work", [WORK, SCRIPT], ids=["train", "script"])
@pytest.mark.parametrize(
    ("changes", "resources", "words"),
    [
        ({}, {"cpus": 27}, "26 CPU cores; resources.cpus asks for 27"),
        ({}, {"memory_gb": 215}, "214.7 GB of RAM; resources.memory_gb asks for 215"),
        ({}, {"disk_gb": 1001}, "1000 GB of disk; resources.disk_gb asks for 1001"),
        ({"larger_disk": SALE}, {"disk_gb": 2001}, "1000 GB of disk, 2000 GB at most; resources.disk_gb asks for 2001"),
    ],
)
def test_an_offer_below_a_demand_is_dropped_by_name(
    work: Workload, changes: dict[str, Any], resources: dict[str, Any], words: str
) -> None:
    (line,) = quoted([offer(**changes)], resources=resources, work=work).lines
    assert (line.verdict, line.drop, line.reason) == (OfferVerdict.DROPPED, DropReason.HOST, words)


@pytest.mark.parametrize("resources", [{"cpus": 26}, {"memory_gb": 214}, {"disk_gb": 1000}])
def test_an_offer_that_meets_a_demand_is_kept(resources: dict[str, Any]) -> None:
    (line,) = quoted([offer()], resources=resources, work=SCRIPT).lines
    assert line.verdict is OfferVerdict.KEPT


@pytest.mark.parametrize(("field", "word"), [("cpus", "number"), ("memory_gb", "size"), ("disk_gb", "size")])
def test_an_unknown_value_meets_no_demand(field: str, word: str) -> None:
    market = [offer(**UNKNOWN)]
    assert quoted(market, work=SCRIPT).kept_count == 1
    (line,) = quoted(market, resources={field: 1}, work=SCRIPT).lines
    assert line.drop is DropReason.HOST
    assert line.reason.startswith(f"unknown {word}")


def test_a_larger_disk_is_bought_at_its_price() -> None:
    """The cheaper machine without a large disk is dropped; the price of whole GiB is in all figures."""
    small, large = offer(id="small", usd_per_hour=Decimal(1)), offer(id="large", larger_disk=SALE)
    plain = quoted([large]).lines[0]
    line, dropped = quoted([small, large], resources={"disk_gb": 1500}).lines
    added = Decimal("0.0001") * -(-500 * GB // GIB)
    assert (line.offer.id, line.offer.disk_bytes) == ("large", 1500 * GB)
    assert line.offer.usd_per_hour == Decimal("2.5") + added
    assert line.offer.added_disk_usd_per_hour == added
    assert "a disk of 1500 GB, for $0.0466/h more" in line.reason
    assert plain.usd_p50 is not None
    assert line.usd_p50 is not None
    assert line.usd_p50 > plain.usd_p50
    assert dropped.drop is DropReason.HOST


def test_a_larger_disk_raises_both_prices_once() -> None:
    spot = offer(spot=True, on_demand_usd_per_hour=Decimal(3), larger_disk=SALE)
    larger = spot.with_disk(1001 * GB)
    assert larger.on_demand_usd_per_hour == 3 + larger.added_disk_usd_per_hour
    assert larger.with_disk(1001 * GB) is larger
    assert spot.with_disk(10 * GB) is spot


def test_an_unknown_price_stays_unknown_with_a_larger_disk() -> None:
    free = offer(usd_per_hour=Decimal(0), larger_disk=SALE)
    assert free.with_disk(1500 * GB) is free


def test_a_job_that_no_machine_can_hold_is_refused_at_submit() -> None:
    mine = Caps(spot=False, trust="own", reaches_local_files=True, lists_all=True)
    here = offer(id="mine/gpu", provider="mine", trust="own")

    def refusal(**resources: int) -> tuple[str, str] | None:
        status = [ProviderStatus(name="mine", seen_at=NOW)]
        market = ServableMarket(
            caps={"mine": mine}, status=status, offers=[here], now=NOW, local_files=True, scoped_store=True
        )
        problem = unserved(spec(resources=resources), WORK, market)
        return None if problem is None else (problem.field, problem.message)

    assert refusal(cpus=26, memory_gb=200) is None
    refused = refusal(cpus=64)
    assert refused is not None
    assert refused[0] == "resources.cpus"
    assert refused[1].endswith("26 CPU cores; resources.cpus asks for 64; without cpus, 1× h100-sxm at mine would do")


@pytest.mark.parametrize("field", ["cpus", "memory_gb", "disk_gb"])
@pytest.mark.parametrize("value", [0, -1, 10**9, 1.5, "64GB"])
def test_an_impossible_demand_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        spec(resources={field: value})
    assert refused.value.errors()[0]["loc"] == ("resources", field)


def test_offers_of_other_jobs_are_unchanged() -> None:
    shared: tuple[Offer, ...] = (offer(larger_disk=SALE),)
    before = replace(shared[0])
    quoted(shared, resources={"disk_gb": 1500})
    assert shared == (before,)
