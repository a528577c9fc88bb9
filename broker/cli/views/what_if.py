"""The scaling table of `--what-if`, and its chart."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.table import Table

from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.domain.offer import GIB, DropReason
from broker.domain.workload import ModelShape
from broker.estimator.speed.hardware import TABLE
from broker.estimator.workload import steps_of
from broker.notify.plot import scaling_png
from broker.sizing.estimate import EstimateError, hardware_of
from broker.sizing.what_if import what_if_of_spec

if TYPE_CHECKING:
    from broker.cli.spec.spec_file import Prepared

WhatIf = Annotated[
    str | None,
    typer.Option(
        "--what-if",
        metavar="1,2,…,512",
        help="Compare GPU counts: throughput, hours and dollars, e.g. 1,2,4,8.",
    ),
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Write the --what-if chart to this file.")
]


def show(out: Output, scaling: dict[str, Any], plot: Path | None) -> None:
    """Print the table with its assumptions. `plot`: file for the chart as a PNG.

    Raises BadInput if the chart cannot be drawn or written.
    """
    if plot is not None:  # draw first, because --json writes only one document: the table or the error
        _draw(scaling, plot)
    out.document(scaling)
    if not out.as_json:
        _show(out, scaling)
    if plot is not None:
        out.print(f"plot: {plot}")


def check_unused(**options: object) -> None:
    """Raise BadInput for the first given option, because all of them require --what-if."""
    for name, value in options.items():
        if value is not None:
            raise BadInput(f"--{name.replace('_', '-')} requires --what-if, for example --what-if 1,2,4,8")


def _draw(scaling: dict[str, Any], plot: Path) -> None:
    picture = scaling_png(scaling)
    if picture is None:
        raise BadInput("--plot: matplotlib is not installed, or nothing fits; pip install 'gpubroker[plots]'")
    try:
        plot.write_bytes(picture)
    except OSError as e:
        raise BadInput(f"--plot {plot}: {e.strerror}") from None


def show_what_if_of_quote(out: Output, prepared: "Prepared", what_if: str, gpu: str | None, plot: Path | None) -> None:
    """Print the table for a spec's job, at the lowest price per GPU of the offers. Raises BadInput."""
    from broker.preflight.dataset import DataReport

    train, quote = prepared.file.spec.train, prepared.quote
    model, data = quote.check.get("model"), quote.check.get("data")
    if train is None or not model or not data:
        raise BadInput(
            f"{prepared.file.path}: --what-if needs a training job with a known model and data set; remove the option"
        )
    shape, report = TypeAdapter(ModelShape).validate_python(model), DataReport.model_validate(data)
    accelerators = (line.offer.accelerator for line in quote.lines)
    gpu = next((name for name in accelerators if name in TABLE and TABLE[name].gpu), None) if gpu is None else gpu
    try:
        hardware = hardware_of(gpu)
        if hardware is None:
            raise BadInput("--what-if: no offer has a GPU; give --gpu, for example --gpu H100-SXM")
        prices = [
            float(line.offer.usd_per_hour) / line.offer.gpus
            for line in quote.lines
            if line.offer.accelerator == hardware.name and line.offer.gpus and line.drop is not DropReason.PRICE
        ]
        scaled = what_if_of_spec(
            what_if, train, shape, hardware, mean_tokens=report.tokens_mean - report.tokens_written,
            generated_tokens=report.tokens_written, steps=steps_of(prepared.file.spec, report.train_rows),
            usd_per_gpu_hour=min(prices, default=None),
        )  # fmt: skip
    except EstimateError as e:
        raise BadInput(str(e)) from None
    show(out, scaled, plot)


def _short(number: float) -> str:
    """Return a number with two decimals, or below 1 with two significant digits."""
    return f"{number:,.2f}" if number >= 1 else f"{number:.2g}"


def _show(out: Output, scaling: dict[str, Any]) -> None:
    table = Table(title=f"{scaling['model']}, {scaling['method']}, on {scaling['gpu']}", title_justify="left")
    table.add_column("GPUs", justify="right")
    table.add_column("plan")
    for name in ("GiB per GPU", "tokens/s", "MFU", "hours", "$"):
        table.add_column(name, justify="right")
    for row in scaling["points"]:
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
    out.print(table)
    for basis, rows in groupby((row for row in scaling["points"] if row["plan"]), key=_basis):
        out.print(f"tokens/s (GPUs: {', '.join(str(row['gpus']) for row in rows)}): {basis}")
    for line in scaling["assumptions"]:
        out.print(f"assumed: {line}")


def _basis(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_s_evidence']} ({row['tokens_per_s_basis']})"


def _plan(row: dict[str, Any]) -> str:
    plan = row["plan"]
    if plan is None:
        return "does not fit"
    checkpointing = ", recomputing" if plan["gradient_checkpointing"] else ""
    idle = f" of {row['gpus']}" if plan["devices"] < row["gpus"] else ""
    batch = f"{plan['accumulation']} x {plan['micro_batch']}"
    return f"{plan['parallelism']} on {plan['devices']}{idle}: {batch}{checkpointing}"
