"""A scaling table, for people, and its plot."""

from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.table import Table

from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.spec.prepared import Prepared
from broker.domain.offer import GIB, DropReason
from broker.domain.workload import ModelShape
from broker.estimator.speed.hardware import TABLE
from broker.estimator.workload import steps_of
from broker.notify.plot import scaling_png
from broker.preflight.dataset import DataReport
from broker.sizing.estimate import EstimateError, hardware_of
from broker.sizing.what_if import of_spec

WhatIf = Annotated[
    str | None,
    typer.Option("--what-if", metavar="gpus=1,2,…,512", help="What more GPUs would bring: throughput, hours, dollars."),
]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Of --what-if, a picture.")]


def show(out: Output, found: dict[str, Any], plot: Path | None) -> None:
    """The table with its assumptions; `plot`: a PNG of it. Raises BadInput where no plot can be drawn or written."""
    if plot is not None:  # first, since --json prints one document, the table or the error
        _draw(found, plot)
    out.document(found)
    if not out.as_json:
        _show(out, found)
    if plot is not None:
        out.say(f"plot: {plot}")


def without(**given: object) -> None:
    """Raises BadInput for the first option that was given, all of which mean nothing without --what-if."""
    for name, value in given.items():
        if value is not None:
            raise BadInput(f"--{name.replace('_', '-')} goes with --what-if, for example --what-if gpus=1,2,4,8")


def _draw(found: dict[str, Any], plot: Path) -> None:
    picture = scaling_png(found)
    if picture is None:
        raise BadInput("--plot: matplotlib is not installed, or nothing fits; pip install 'gpubroker[plots]'")
    try:
        plot.write_bytes(picture)
    except OSError as e:
        raise BadInput(f"--plot {plot}: {e.strerror}") from None


def of_quote(out: Output, prepared: Prepared, said: str, gpu: str | None, plot: Path | None) -> None:
    """The table for a spec's job, at the least price a GPU of the offers. Raises BadInput."""
    train, quote = prepared.file.spec.train, prepared.quote
    model, data = quote.check.get("model"), quote.check.get("data")
    if train is None or not model or not data:
        raise BadInput(
            f"{prepared.file.path}: --what-if needs a job that is estimated, and nothing is known of this one"
        )
    shape, found = TypeAdapter(ModelShape).validate_python(model), DataReport.model_validate(data)
    sold = (line.offer.accelerator for line in quote.lines)
    gpu = next((name for name in sold if name in TABLE and TABLE[name].gpu), None) if gpu is None else gpu
    try:
        hardware = hardware_of(gpu)
        if hardware is None:
            raise BadInput("--what-if: no offer has a GPU; give --gpu, for example --gpu H100-SXM")
        prices = [
            float(line.offer.usd_per_hour) / line.offer.gpus
            for line in quote.lines
            if line.offer.accelerator == hardware.name and line.offer.gpus and line.drop is not DropReason.PRICE
        ]
        scaled = of_spec(
            said, train, shape, hardware, mean=found.tokens_mean - found.tokens_written,
            written=found.tokens_written, steps=steps_of(prepared.file.spec, found.rows),
            usd_per_gpu_hour=min(prices, default=None),
        )  # fmt: skip
    except EstimateError as e:
        raise BadInput(str(e)) from None
    show(out, scaled, plot)


def _short(number: float) -> str:
    """Cents, and of what is less than one the first two digits."""
    return f"{number:,.2f}" if number >= 1 else f"{number:.2g}"


def _show(out: Output, found: dict[str, Any]) -> None:
    table = Table(title=f"{found['model']}, {found['method']}, on {found['gpu']}", title_justify="left")
    table.add_column("GPUs", justify="right")
    table.add_column("plan")
    for name in ("GiB a GPU", "tokens/s", "MFU", "hours", "$"):
        table.add_column(name, justify="right")
    for row in found["points"]:
        fits = row["plan"] is not None
        low, high = row["tokens_per_s_interval"] or (0, 0)
        hours, usd = row["hours"], row["usd"]
        table.add_row(
            str(row["gpus"]),
            _plan(row),
            f"{row['need_bytes'] / GIB:.1f}",
            f"{row['tokens_per_s']:,.0f} ({low:,.0f} – {high:,.0f})" if fits else "",
            f"{row['mfu']:.0%}" if fits else "",
            _short(hours) if fits and hours is not None else "",
            _short(usd) if fits and usd is not None else "",
        )
    out.say(table)
    for basis, rows in groupby((row for row in found["points"] if row["plan"]), key=_basis):
        out.say(f"tokens/s (GPUs: {', '.join(str(row['gpus']) for row in rows)}): {basis}")
    for line in found["assumptions"]:
        out.say(f"assumed: {line}")


def _basis(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_s_evidence']} ({row['tokens_per_s_basis']})"


def _plan(row: dict[str, Any]) -> str:
    plan = row["plan"]
    if plan is None:
        return "does not fit"
    again = ", recomputing" if plan["gradient_checkpointing"] else ""
    idle = f" of {row['gpus']}" if plan["devices"] < row["gpus"] else ""
    return f"{plan['parallelism']} on {plan['devices']}{idle}: {plan['accumulation']} x {plan['micro_batch']}{again}"
