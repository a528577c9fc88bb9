"""A scaling table, for people, and its plot."""

from pathlib import Path
from typing import Any

from rich.table import Table

from broker.cli.exits import BadInput
from broker.cli.output import Output
from broker.domain.offer import GIB
from broker.notify.plot import scaling_png


def show(out: Output, found: dict[str, Any], plot: Path | None) -> None:
    """The table with its assumptions; `plot`: a PNG of it. Raises BadInput where no plot can be drawn or written."""
    out.document(found)
    if not out.as_json:
        _show(out, found)
    if plot is not None:
        picture = scaling_png(found)
        if picture is None:
            raise BadInput("--plot: matplotlib is not installed, or nothing fits; pip install 'gpubroker[plots]'")
        try:
            plot.write_bytes(picture)
        except OSError as e:
            raise BadInput(f"--plot {plot}: {e.strerror}") from None
        out.say(f"plot: {plot}")


def _show(out: Output, found: dict[str, Any]) -> None:
    table = Table(title=f"{found['model']}, {found['method']}, on {found['gpu']}", title_justify="left")
    table.add_column("GPUs", justify="right")
    table.add_column("plan")
    for name in ("GiB a GPU", "tokens/s", "of all, MFU", "hours", "$"):
        table.add_column(name, justify="right")
    for row in found["points"]:
        low, high = row["tokens_per_s_interval"]
        fits = row["plan"] is not None
        hours, usd = row["hours"], row["usd"]
        table.add_row(
            str(row["gpus"]),
            _plan(row),
            f"{row['need_bytes'] / GIB:.1f}",
            f"{row['tokens_per_s']:,.0f} ({low:,.0f} – {high:,.0f})" if fits else "",
            f"{row['mfu']:.0%}" if fits else "",
            f"{hours:,.2f}" if fits and hours is not None else "",
            f"{usd:,.2f}" if fits and usd is not None else "",
        )
    out.say(table)
    if any(row["plan"] and not row["runnable"] for row in found["points"]):
        out.say("* gpubroker's own trainer cannot run this yet; it is never bought")
    for line in found["assumptions"]:
        out.say(f"assumed: {line}")


def _plan(row: dict[str, Any]) -> str:
    plan = row["plan"]
    if plan is None:
        return "does not fit"
    again = ", recomputing" if plan["gradient_checkpointing"] else ""
    mark = "" if row["runnable"] else " *"
    idle = f" of {row['gpus']}" if plan["devices"] < row["gpus"] else ""
    return f"{plan['parallelism']} on {plan['devices']}{idle}: {plan['accumulation']} x {plan['micro_batch']}{again}{mark}"
