"""The product's table of bill rules against the emulated clouds' bill, whose figures are independent."""

from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from broker.billing.accrual import machine_cost
from broker.domain.offer import Offer
from providers.common.bill_rules import BILL_RULES
from tests.clouds.bill import TARIFFS, Bill
from tests.clouds.conftest import START
from tests.clouds.state import Event
from tests.support.build import offer

DOCS = Path(__file__).parents[2] / "docs/guide/clouds.md"
BOOT_S = 90.0


def priced(cloud: str) -> Offer:
    rule = BILL_RULES[cloud]
    return offer(
        cloud=cloud, usd_per_hour=Decimal("3.6"), billing_quantum_s=rule.quantum_s, billed_from=rule.billed_from,
        billing_minimum_s=rule.minimum_s,
    )  # fmt: skip


def billed(cloud: Any, run_s: float) -> Decimal:
    """Return the cloud's bill for a machine that boots for `BOOT_S` and then runs for `run_s` at $3.6 an hour."""
    boots_usd = "3.6" if TARIFFS[cloud].billed_from == "created" else "0"
    steps = [(0.0, "created", boots_usd), (BOOT_S, "running", "3.6"), (BOOT_S + run_s, "destroyed", "0")]
    events = [
        Event(
            at=START + timedelta(seconds=at), cloud=cloud, id="m", name="gb-x-head", kind=kind,  # type: ignore[arg-type]
            usd_per_hour=Decimal(usd), storage_usd_per_hour=Decimal(0),
        )
        for at, kind, usd in steps
    ]  # fmt: skip
    return Bill(events, START + timedelta(days=1)).usd()


@pytest.mark.parametrize("cloud", sorted(BILL_RULES))
@pytest.mark.parametrize("run_s", [5.0, 60.0, 61.0, 3599.0, 3600.0, 7201.0])
def test_cost_by_the_rule_covers_the_clouds_bill(cloud: str, run_s: float) -> None:
    rule = BILL_RULES[cloud]
    ours_s = max(run_s, rule.minimum_s) + (BOOT_S if rule.billed_from == "created" else 0.0)
    sold = priced(cloud)
    ours = machine_cost(sold, 1, timedelta(seconds=ours_s), sold.usd_per_hour)
    theirs = billed(cloud, run_s)
    assert ours >= theirs
    if rule.billed_from == TARIFFS[cloud].billed_from:  # type: ignore[index]
        assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("cloud", sorted(BILL_RULES))
def test_rules_agree_with_the_emulated_tariffs(cloud: Any) -> None:
    rule, tariff = BILL_RULES[cloud], TARIFFS[cloud]
    assert (rule.quantum_s, rule.minimum_s) == (tariff.quantum_s, tariff.minimum_s)
    assert rule.billed_from in ("created", tariff.billed_from)  # never later than the cloud bills


@pytest.mark.parametrize("cloud", sorted(BILL_RULES))
def test_every_rule_has_a_source_that_the_guide_names(cloud: str) -> None:
    rule, guide = BILL_RULES[cloud], DOCS.read_text()
    assert rule.source.partition("/")[0] in guide
    assert rule.read_on in guide
