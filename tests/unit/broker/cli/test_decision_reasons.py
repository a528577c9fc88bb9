"""The offers of a purchase on a narrow terminal: each reason of drops is named below the table."""

from decimal import Decimal

import pytest

from broker.api.schemas.plans import ConsideredOffer, DecisionView
from broker.cli.core.output import Output
from broker.cli.views.offers import show_decision
from broker.domain.offer import DropReason

DECISION = DecisionView(
    items=tuple(
        ConsideredOffer(
            offer=f"cloud/a-region/a-machine-type-{n}/on-demand", usd_per_hour=Decimal(1), drop=drop, reason=reason
        )
        for n, (drop, reason) in enumerate(
            [
                (None, "fits"),
                (DropReason.CAP, "expected $9 to finish"),
                (DropReason.MEMORY, "needs 31 GiB of 24"),
                (DropReason.MEMORY, "needs 31 GiB of 16"),
            ]
        )
    )
)


@pytest.mark.parametrize(("width", "lists"), [(60, True), (200, False)])
def test_reasons_are_listed_once_each_where_the_table_hides_them(
    width: int, lists: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Output(as_json=False)
    out.console.width = width
    show_decision(out, DECISION, limit=10)
    shown = capsys.readouterr().out
    listed = ["memory (2): needs 31 GiB of 24", "cap (1): expected $9 to finish"]
    assert [line for line in shown.splitlines() if line in listed] == (listed if lists else [])
    assert ("needs 31 GiB of 16" in shown) is not lists
