"""Why an attempt was bought, for people."""

from rich.table import Table

from broker.api.schemas.plans import DecisionView
from broker.cli.core import formatting as words


def show(found: DecisionView) -> Table:
    """Every offer, as it was ranked."""
    table = Table(title="Offers when it was bought", title_justify="left")
    for name, side in (("offer", "left"), ("$/h", "right"), ("$ to finish", "right"), ("", "left"), ("reason", "left")):
        table.add_column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
    for one in found.items:
        table.add_row(
            one.offer, words.money(one.usd_per_hour), words.money(one.usd_p50), one.drop or "kept", one.reason
        )  # fmt: skip
    return table
