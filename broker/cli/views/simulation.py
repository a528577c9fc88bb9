"""Result of `gpubroker simulate`: figures, the timeline of the first run as text and as a picture."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from broker.cli.core.exit_codes import BadInput
from broker.cli.core.formatting import duration
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.notify.plot import timeline_picture
from broker.simulation.traces import Trace
from broker.simulation.windows import SimulatedWork, WindowResult, spans

KINDS = (".png", ".svg")
WIDTH = 96
"""Columns of the timeline."""
LEGEND = "S on spot, D on demand, w waits, - spot on sale, blank: sold out"
COLUMNS = (
    Column(name="market", min_width=8),
    Column(name="zones", right=True, rank=2),
    Column(name="runs", right=True),
    Column(name="cost / optimum", right=True),
    Column(name="worst", right=True, rank=1),
    Column(name="on demand / optimum", right=True, min_width=9),
    Column(name="late", right=True),
    Column(name="preemptions", right=True),
    Column(name="moves and starts", right=True, rank=3),
    Column(name="waited", right=True),
)


def check_file(plot: Path | None) -> None:
    """Raise BadInput for a picture of an unknown kind, before a long simulation."""
    if plot is not None and plot.suffix.lower() not in KINDS:
        raise BadInput(f"--plot {plot}: unknown kind of picture; end the name in .png or .svg")


def show(
    out: Output,
    policy: str,
    job: SimulatedWork,
    results: Sequence[WindowResult],
    *,
    short: Sequence[str],
    plot: Path | None,
) -> None:
    """Print the figures. `short`: markets that were left out. Raises BadInput if the picture cannot be written."""
    if plot is not None:
        _draw(policy, results[0], plot)
    out.document(_document(policy, job, results, short))
    for market in short:
        out.print(f"left out {market}: its traces are shorter than the deadline")
    if not out.as_json:
        total = _row("all", results)
        rows = [_row(market, list(of)) for market, of in groupby(results, key=lambda result: result.market)]
        title = (
            f"{policy}: {duration(job.work_s)} of work in {duration(job.deadline_s)}, "
            f"{duration(job.changeover_s)} a changeover"
        )
        out.print(TerminalTable(COLUMNS, rows, total=total if len(rows) > 1 else (), title=title))
        for line in timeline(results[0]):
            out.print(line)
    if plot is not None:
        out.print(f"plot: {plot}")


def _row(market: str, results: Sequence[WindowResult]) -> tuple[str, ...]:
    ratios = [result.ratio for result in results]
    waited_s = sum(result.waits * result.zones[0].tick_s for result in results)
    return (
        market,
        str(max(len(result.zones) for result in results)),
        str(len(results)),
        f"{fmean(ratios):.3f}",
        f"{max(ratios):.3f}",
        f"{fmean(result.on_demand_usd / result.optimum_usd for result in results):.3f}",
        str(sum(result.is_late for result in results)),
        str(sum(result.preemptions for result in results)),
        str(sum(result.starts for result in results)),
        duration(waited_s),
    )


def _document(policy: str, job: SimulatedWork, results: Sequence[WindowResult], short: Sequence[str]) -> dict[str, Any]:
    return {
        "policy": policy,
        "work_s": job.work_s,
        "deadline_s": job.deadline_s,
        "changeover_s": job.changeover_s,
        "n": len(results),
        "cost_over_optimum": round(fmean(result.ratio for result in results), 4),
        "on_demand_over_optimum": round(fmean(result.on_demand_usd / result.optimum_usd for result in results), 4),
        "misses": sum(result.is_late for result in results),
        "preemptions": sum(result.preemptions for result in results),
        "starts": sum(result.starts for result in results),
        "waits_s": sum(result.waits * result.zones[0].tick_s for result in results),
        "too_short": list(short),
        "runs": [_run(result) for result in results],
    }


def _run(result: WindowResult) -> dict[str, Any]:
    return {
        "market": result.market,
        "zones": [zone.zone for zone in result.zones],
        "start_s": result.start_s,
        "usd": round(result.usd, 4),
        "optimum_usd": round(result.optimum_usd, 4),
        "on_demand_usd": round(result.on_demand_usd, 4),
        "cost_over_optimum": round(result.ratio, 4),
        "missed": result.is_late,
        "preemptions": result.preemptions,
        "starts": result.starts,
        "waits_s": result.waits * result.zones[0].tick_s,
        "timeline": [
            {"machine": span.machine, "zone": span.zone or None, "from_s": span.from_s, "to_s": span.to_s}
            for span in spans(result)
        ],
    }


def timeline(result: WindowResult) -> list[str]:
    """Return one line for each zone of a run, with the machine that the job had there."""
    ticks, tick_s = len(result.zones[0].available), result.zones[0].tick_s
    width = min(WIDTH, ticks)
    label = max(len("waits"), *(len(zone.zone) for zone in result.zones))
    head = f"first run: {result.market}, from {duration(result.start_s)}; cost / optimum {result.ratio:.3f}"
    marks = {zone.zone: _zone_marks(number, zone, result) for number, zone in enumerate(result.zones)}
    marks["waits"] = ["w" if machine is None else " " for machine in result.machines]
    lines = [f"{name:{label}} |{_compressed(cells, ticks, width)}|" for name, cells in marks.items()]
    hours = f"{'':{label}}  0{f'{ticks * tick_s / 3600:g} h':>{width - 1}}"
    return [head, *lines, hours, LEGEND]


def _zone_marks(number: int, zone: Trace, result: WindowResult) -> list[str]:
    cells = ["-" if is_on_sale else " " for is_on_sale in zone.available]
    for tick, machine in enumerate(result.machines):
        if machine is not None and machine.zone == number:
            cells[tick] = "S" if machine.market == "spot" else "D"
    return cells


def _compressed(cells: Sequence[str], ticks: int, width: int) -> str:
    """Return `width` characters, each the most frequent one of its ticks."""
    bounds = [round(column * ticks / width) for column in range(width + 1)]
    shares = (cells[start:end] for start, end in pairwise(bounds))
    return "".join(Counter(share).most_common(1)[0][0] if share else " " for share in shares)


def _draw(policy: str, result: WindowResult, plot: Path) -> None:
    tick_h = result.zones[0].tick_s / 3600
    zones = {zone.zone: _times(zone.available, tick_h) for zone in result.zones}
    bars = spans(result)
    machines = {
        kind: [(span.from_s / 3600, span.to_s / 3600) for span in bars if span.machine == kind]
        for kind in ("spot", "on-demand", "none")
    }
    title = f"{policy} in {result.market}: cost / optimum {result.ratio:.3f}; blue: spot on sale"
    picture = timeline_picture(zones, machines, title, plot.suffix.lower().removeprefix("."))
    if picture is None:
        raise BadInput("--plot: matplotlib is not installed; pip install 'gpubroker[plots]'")
    try:
        plot.write_bytes(picture)
    except OSError as e:
        raise BadInput(f"--plot {plot}: {e.strerror}") from None


def _times(available: Sequence[bool], tick_h: float) -> list[tuple[float, float]]:
    times, tick = [], 0
    for is_on_sale, ticks in groupby(available):
        end = tick + len(list(ticks))
        if is_on_sale:
            times.append((tick * tick_h, end * tick_h))
        tick = end
    return times
