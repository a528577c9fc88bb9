"""Tables of the data check and the quote."""

from math import floor
from typing import Any

from pydantic import TypeAdapter
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from broker.api.schemas.policies import HoldView
from broker.api.schemas.quotes import LineView, ProspectView, QuoteView
from broker.cli.core import formatting
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.domain.offer import DropReason, OfferVerdict
from broker.domain.workload import ModelShape
from broker.estimator.speed.throughput import DOWNLOAD_BYTES_PER_S, START_S
from broker.policy.budgets import Hold
from broker.preflight.dataset import BYTES_PER_TOKEN, DataReport
from broker.quote.machine_cost import SETUP_SPREAD, UPLOAD_BYTES_PER_S
from broker.quote.summary import LABELS

SHOWN = 10
UNCHECKED = " *"
"""Mark after a time whose speed was not compared with a similar run. Lines below the table explain the mark."""
LONGEST_TEXT = 400


def show(out: Output, quote: QuoteView, *, every: bool = False) -> None:
    """Print the kept offers ranked, and the dropped offers grouped by reason. `every`: print all kept offers."""
    kept_lines = [line for line in quote.lines if line.verdict is OfferVerdict.KEPT]
    lines_shown = kept_lines if every else kept_lines[:SHOWN]
    if lines_shown:
        reasons = {line.reason for line in lines_shown}
        out.print(offers(lines_shown, why=len(reasons) > 1))
        if len(reasons) == 1:
            out.print(f"kept: {reasons.pop()}")
    for text in speeds(lines_shown):
        out.print(text)
    if quote.kept > len(lines_shown):
        out.print(f"and {quote.kept - len(lines_shown)} more that fit; `gpubroker quote --all` shows all")
    for line in dropped(quote):
        out.print(line)
    for region in quote.unsold_regions:
        out.print(f"no offer is in region {region}")
    if not quote.kept:
        cheapest = f" (the cheapest that fits: {formatting.money(quote.cheapest_usd)})" if quote.cheapest_usd else ""
        out.print(f"no offer fits{cheapest}; a submitted job would wait until one does")
    for text in policies(quote):
        out.print(text)
    if quote.held is not None:
        out.print(hold_message(quote.held))
    if any(line.offer.simulated for line in lines_shown):
        out.print("simulated offers cost no money: their machines are processes on the daemon's host")


def policies(quote: QuoteView) -> list[str]:
    """Return the expected cost and end of the chosen policy, those of on-demand only, and the latest start."""
    if quote.chosen is None:
        return []
    lines = [f"now: {quote.chosen.reason}", f"chosen policy: {_prospect(quote.chosen)}"]
    if quote.on_demand is not None:
        lines.append(f"on demand only: {_prospect(quote.on_demand)}")
    if (latest := quote.latest_on_demand_start) is not None:
        past = " (is past)" if latest < quote.made_at else ""
        lines.append(f"latest start on demand for the deadline: {latest:%Y-%m-%d %H:%MZ}{past}")
    return lines


def _prospect(expected: ProspectView) -> str:
    usd = [formatting.money(value) for value in (expected.usd_p50, expected.usd_p10, expected.usd_p90)]
    text = f"{usd[0]} expected (P10 – P90: {usd[1]} – {usd[2]})"
    if expected.finish_p50 is None or expected.finish_p90 is None:
        text += ", end unknown"
    else:
        after = " if spot does not return" if expected.action == "wait" else ""
        text += f", ends {expected.finish_p50:%Y-%m-%d %H:%MZ}{after} (P90 {expected.finish_p90:%Y-%m-%d %H:%MZ})"
    if expected.deadline_chance is None:
        return text
    return f"{text}, in time with a chance of at least {floor(100 * expected.deadline_chance)} %"


def hold_message(hold: HoldView) -> str:
    """Return why a policy would hold a submitted job."""
    if hold.hold is Hold.APPROVAL:
        return f"approval: a job submitted now {hold.reason}; a user with the scope manage can approve it"
    return f"policy: a job submitted now {hold.reason}"


COLUMNS = (
    Column(name="#", right=True),
    Column(name="cloud", min_width=11),
    Column(name="region", min_width=9, rank=3),
    Column(name="GPU", min_width=12),
    Column(name="market", rank=2),
    Column(name="$/h", right=True, rank=1),
    Column(name="time P50 – P90", right=True, min_width=9),
    Column(name="$ to finish P50 – P90", right=True, min_width=12),
    Column(name="why", min_width=16),
)


def offers(lines: list[LineView], *, why: bool) -> TerminalTable:
    """Return the offers, ranked by expected dollars to finish. `why`: add the reason of each."""
    columns = COLUMNS if why else COLUMNS[:-1]
    rows = (_row(number, line)[: len(columns)] for number, line in enumerate(lines, 1))
    return TerminalTable(columns, rows, title="Quote: offers by expected $ to finish")


def _row(number: int, line: LineView) -> tuple[str, ...]:
    offer = line.offer
    return (
        str(number),
        formatting.cloud(offer),
        offer.region,
        formatting.gpu(offer, line.nodes),
        formatting.market(offer),
        formatting.money(offer.usd_per_hour * line.nodes),
        formatting.hours(line.hours_p50, line.hours_p90) + UNCHECKED * (line.tier == "unchecked"),
        formatting.span(line.usd_p50, line.usd_p90),
        line.reason,
    )


def speeds(lines: list[LineView]) -> list[str]:
    """Return the evidence for the speed of each offer, one line for offers with the same evidence."""
    by_basis: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if line.tier is not None:
            by_basis.setdefault(f"{line.tier} ({line.evidence})", []).append(str(number))
    return [f"speed of {', '.join(numbers)}: {basis}" for basis, numbers in by_basis.items()]


EXPLAINED = 3
"""Number of the best offers whose time and cost `explain` prints in parts."""
ASSUMED = (
    f"tokens are bytes / {BYTES_PER_TOKEN}; attention is computed for rows of mean length, without padding",
    f"weights and data download at {DOWNLOAD_BYTES_PER_S / 1e6:.0f} MB/s and the last checkpoint uploads at "
    f"{UPLOAD_BYTES_PER_S / 1e6:.0f} MB/s, or slower if the cloud reports less; {START_S:.0f} s of imports",
    f"P90 uses the low end of the speed interval, boot and load x {SETUP_SPREAD}, and preemptions",
)
"""Assumptions of the estimates; docs/design/estimator.md lists all."""


def explain(out: Output, quote: QuoteView) -> None:
    """Print the parts of time and cost of the best offers, and the verdict on every offer with its reason."""
    for line in [line for line in quote.lines if line.verdict is OfferVerdict.KEPT][:EXPLAINED]:
        for text in explained(line):
            out.print(text)
    for text in ASSUMED if quote.lines and quote.lines[0].hours else ():
        out.print(f"assumed: {text}")
    table = Table(title="Every offer", title_justify="left")
    for name in ("offer", "verdict", "reason"):
        table.add_column(name, overflow="fold")
    for line in quote.lines:
        table.add_row(line.offer.id, line.drop or "kept", line.reason)
    out.print(table)
    unlisted = quote.kept + sum(quote.drops.values()) - len(quote.lines)
    if unlisted:
        out.print(f"and {unlisted} more; narrow the search with resources.accelerators or resources.providers")


def explained(line: LineView) -> list[str]:
    """Return the plan, the parts of the time and the parts of the cost of a kept offer; empty if its time is unknown.

    For example `time  boot 2 min, …` and `$  machines $0.41, …`.
    """
    if line.hours is None or line.costs is None or line.plan is None:
        return []
    plan, hours, costs = line.plan, line.hours.model_dump(), line.costs.model_dump()
    checkpointing = "gradient checkpointing" if plan.gradient_checkpointing else "no gradient checkpointing"
    batch = f"micro-batch {plan.micro_batch}, {plan.accumulation} per step, {checkpointing}"
    machine = f"{formatting.cloud(line.offer)} {formatting.gpu(line.offer, line.nodes)}"
    return [
        f"{machine}: {plan.parallelism} on {plan.devices}, {batch}",
        "  time  " + ", ".join(f"{name} {formatting.hours(value, None)}" for name, value in hours.items() if value),
        "  $     " + ", ".join(f"{name} {formatting.money(value)}" for name, value in costs.items() if value),
    ]


def dropped(quote: QuoteView) -> list[str]:
    """Return lines such as `dropped 12 need more memory; e.g. rtx4090: needs 31 GiB of 24`, most frequent first."""
    examples: dict[DropReason, LineView] = {}
    for line in quote.lines:
        if line.drop is not None:
            examples.setdefault(line.drop, line)
    lines = []
    for drop, count in sorted(quote.drops.items(), key=lambda item: -item[1]):
        example = examples.get(drop)
        text = (
            f"; e.g. {formatting.gpu(example.offer)} at {formatting.cloud(example.offer)}: {example.reason}"
            if example
            else ""
        )
        lines.append(f"dropped {count} {LABELS[drop]}{text}")
    return lines


def check(report: dict[str, Any], columns: tuple[str, ...] = ()) -> RenderableType | None:
    """Return the result of the check: rows, columns, tokens, one rendered example, the model. None for a script."""
    settled = [("settled", report["settled"])] if report.get("settled") else []
    facts = [*_data(report.get("data") or {}, columns), *settled, *_model(report.get("model") or {})]
    if not facts:
        return None
    table = Table(title="Data and model", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + "…"))
    return table


def _data(data: dict[str, Any], columns: tuple[str, ...]) -> list[tuple[str, str]]:
    if not data:
        return []
    report = DataReport.model_validate(data)
    rows = f"{report.rows:,}: {report.train_rows:,} to train on, {report.heldout_rows:,} held out"
    duplicates = f", {report.duplicates:,} duplicates" if report.duplicates else ""
    return [
        ("rows", rows + duplicates),
        *([("columns", ", ".join(columns))] if columns else []),
        *_example(report),
        *([("labels", ", ".join(report.labels))] if report.labels else []),
        *(("warning", warning) for warning in report.warnings),
    ]


def _example(report: DataReport) -> list[tuple[str, str]]:
    """Return one row as it is trained on, and the length of rows of text."""
    if not report.tokens_total:
        return [("example", f"{report.example_prompt} → {report.example_completion}")]
    cut = f"; {report.truncated_share:.1%} of the rows are truncated" if report.truncated_share else ""
    mean, p99, total = (f"{count:,.0f}" for count in (report.tokens_mean, report.tokens_p99, report.tokens_total))
    return [
        ("tokens", f"about {mean} per row, P99 {p99}, {total} in total{cut}"),
        ("prompt", report.example_prompt),
        ("completion", report.example_completion),
    ]


def _model(model: dict[str, Any]) -> list[tuple[str, str]]:
    if not model:
        return []
    shape = TypeAdapter(ModelShape).validate_python(model)
    remark = "" if shape.known else ", an architecture for which estimates were not validated"
    bundled = ", from the bundled catalogue" if shape.bundled else ""
    size = f"{shape.parameters / 1e6:,.{0 if shape.parameters >= 1e7 else 2}f} M parameters"
    return [("model", f"{shape.name}: {shape.family}, {size}{remark}{bundled}")]
