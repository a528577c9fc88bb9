"""`gpubroker simulate`: the broker's spot decisions over traces, offline and without a daemon."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from broker.cli.core.command import Json, command
from broker.cli.core.durations import names, seconds
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.core.trace_files import read_traces
from broker.cli.views import simulation as view
from broker.simulation.synthetic import synthetic_traces
from broker.simulation.traces import Trace, TraceError
from broker.simulation.windows import OPTIMUM, POLICIES, SimulatedWork, WindowResult, markets, simulated

SYNTHETIC = "synthetic"
MAX_S = 1000 * 3600.0
"""Longest deadline. The time to compute the optimum grows with its square."""
SPACE = 3
"""Length of a synthetic trace in deadlines, from which windows are taken."""
CHOICES = [*POLICIES, OPTIMUM]


@command
async def simulate(
    trace: Annotated[
        str, typer.Option(metavar="FOLDER|synthetic", help="Folder of trace files, or `synthetic` for drawn ones.")
    ] = SYNTHETIC,
    policy: Annotated[
        str, typer.Option(metavar="|".join(CHOICES), help="Policy to simulate; auto: the broker's own.")
    ] = "auto",
    work: Annotated[str, typer.Option(metavar="TIME", help="Time of training without interruption.")] = "48h",
    deadline: Annotated[str, typer.Option(metavar="TIME", help="Time from submit to deadline.")] = "72h",
    changeover: Annotated[
        str, typer.Option(metavar="TIME", help="Time without progress after each start of a machine.")
    ] = "6m",
    gpu: Annotated[
        list[str] | None, typer.Option(help="Only traces of these GPUs, comma-separated: v100, v100_8.")
    ] = None,
    regions: Annotated[
        list[str] | None, typer.Option(help="Only these regions or zones, comma-separated. The job may use all.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, max=1000, help="Starts in each market, evenly spaced.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of synthetic traces.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.svg", help="Write the timeline of the first run to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the broker's spot decisions over traces and compare them with the cheapest run. Needs no daemon."""
    out = Output(as_json=as_json)
    if policy not in CHOICES:
        raise BadInput(f"--policy {policy}: no such policy; use one of {', '.join(CHOICES)}")
    view.check_file(plot)
    job = _job(work, deadline, changeover)
    try:
        chosen_markets = _markets(trace, job, names(gpu or []), names(regions or []), seed)
        results = [result for zones in chosen_markets for result in simulated(policy, zones, job, windows)]
    except TraceError as e:
        raise BadInput(str(e)) from None
    if not results:
        longest_h = max(min(len(zone.available) * zone.tick_s for zone in zones) for zones in chosen_markets) / 3600
        raise BadInput(f"--deadline {deadline}: the longest trace has {longest_h:g}h; give a shorter time")
    view.show(out, policy, job, results, short=_short(chosen_markets, results), plot=plot)


def _job(work: str, deadline: str, changeover: str) -> SimulatedWork:
    job = SimulatedWork(
        work_s=seconds("--work", work),
        deadline_s=seconds("--deadline", deadline, max_s=MAX_S),
        changeover_s=seconds("--changeover", changeover),
    )
    if not job.work_s:
        raise BadInput(f"--work {work}: nothing to do; give a time above 0")
    if job.work_s + job.changeover_s > job.deadline_s:
        needed = (job.work_s + job.changeover_s) / 3600
        raise BadInput(f"--deadline {deadline}: work and one changeover take {needed:g}h; give a later deadline")
    return job


def _markets(
    trace: str, job: SimulatedWork, gpus: Sequence[str], regions: Sequence[str], seed: int
) -> list[list[Trace]]:
    traces = _synthetic(job, gpus, regions, seed) if trace == SYNTHETIC else read_traces(Path(trace))
    return markets(traces, gpus=gpus, regions=regions)


def _synthetic(job: SimulatedWork, gpus: Sequence[str], regions: Sequence[str], seed: int) -> list[Trace]:
    file_names = [f"{region}_{gpu}_1" for gpu in gpus or ["gpu"] for region in regions or ["region-a"]]
    draw = Random(seed).random
    return synthetic_traces(file_names, SPACE * job.deadline_s, draw)


def _short(traces: Sequence[Sequence[Trace]], results: Sequence[WindowResult]) -> list[str]:
    """Return the markets whose traces are shorter than the deadline."""
    return sorted({zones[0].market for zones in traces} - {result.market for result in results})
