"""The bill's arithmetic, from events alone."""

from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal

from tests.clouds.bill import Bill
from tests.clouds.conftest import START
from tests.clouds.state import CloudName, Event, Kind

Step = tuple[float, Kind, str]


def log(cloud: CloudName, *steps: Step, storage: str = "0", machine: str = "m", name: str = "gb-x-head") -> list[Event]:
    """Return events at seconds from the start: (when, kind, dollars an hour for computing from then on)."""
    return [
        Event(
            at=START + timedelta(seconds=at), cloud=cloud, id=machine, name=name, kind=kind,
            usd_per_hour=Decimal(usd), storage_usd_per_hour=Decimal(0 if kind == "destroyed" else storage),
        )
        for at, kind, usd in steps
    ]  # fmt: skip


def usd(events: Sequence[Event], seconds: float) -> Decimal:
    return Bill(events, START + timedelta(seconds=seconds)).usd()


def test_lambda_counts_minutes_from_when_it_runs() -> None:
    events = log("lambda", (0, "created", "0"), (90, "running", "3.6"), (151, "destroyed", "0"))
    assert usd(events, 1000) == Decimal("0.12")  # 61 s are two minutes


def test_runpod_counts_seconds_from_creation() -> None:
    events = log("runpod", (0, "created", "3.6"), (30, "running", "3.6"), (100.2, "destroyed", "0"))
    assert usd(events, 1000) == Decimal("0.101")


def test_vast_bills_the_disk_while_it_exists_and_computing_while_it_runs() -> None:
    steps: tuple[Step, ...] = (
        (0, "created", "0"),
        (100, "running", "3.6"),
        (200, "evicted", "0"),
        (1000, "destroyed", "0"),
    )
    assert usd(log("vast", *steps, storage="0.36"), 5000) == Decimal("0.1") + Decimal("0.1")


def test_aws_bills_a_minute_at_least() -> None:
    assert usd(log("aws", (0, "running", "3.6"), (5, "destroyed", "0")), 1000) == Decimal("0.06")


def test_running_machines_are_billed_up_to_now() -> None:
    events = log("runpod", (0, "created", "3.6"), (1, "running", "3.6"))
    assert usd(events, 10) == Decimal("0.01")
    assert list(Bill(events, START).open()) == ["m"]


def test_every_run_is_rounded_by_itself() -> None:
    events = log(
        "lambda", (0, "running", "3.6"), (61, "stopped", "0"), (100, "running", "3.6"), (101, "destroyed", "0")
    )
    assert usd(events, 1000) == Decimal("0.18")


def test_a_new_price_holds_from_its_moment() -> None:
    events = log("vast", (0, "running", "3.6"), (100, "price", "7.2"), (200, "destroyed", "0"))
    assert usd(events, 1000) == Decimal("0.3")


def test_machines_are_counted_and_priced_by_name() -> None:
    one = log("runpod", (0, "created", "3.6"), (10, "destroyed", "0"), machine="a", name="gb-x-head")
    two = log("runpod", (0, "created", "3.6"), (20, "destroyed", "0"), machine="b", name="gb-x-head")
    other = log("runpod", (0, "created", "3.6"), machine="c", name="gb-y-head")
    bill = Bill(one + two + other, START + timedelta(seconds=100))
    assert (bill.made("gb-x"), bill.usd("gb-x"), list(bill.open())) == (2, Decimal("0.03"), ["c"])
    assert bill.by_name() == {"gb-x-head": Decimal("0.03"), "gb-y-head": Decimal("0.1")}


def test_lambda_machines_taken_back_are_gone_and_others_remain_ours() -> None:
    """Lambdas machines that are taken are gone and others are still ours."""
    bill = Bill(
        log("lambda", (0, "running", "3.6"), (9, "evicted", "0"), machine="a")
        + log("runpod", (0, "created", "3.6"), (9, "evicted", "0"), machine="b"),
        START + timedelta(hours=1),
    )
    assert list(bill.open()) == ["b"]
