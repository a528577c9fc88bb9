"""`gpubroker metrics`: steps, loss, learning rate and speed of a run."""

from typing import Annotated

import typer
from rich.text import Text

from broker.cli.core import plots
from broker.cli.core.command import JobArgument, Json, client, command
from broker.cli.core.exit_codes import NotFoundExit
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output


@command
async def metrics(
    job: JobArgument,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the loss instead of listing the steps.")] = False,
    after: Annotated[int, typer.Option(min=0, help="Only steps after this one.")] = 0,
    points: Annotated[
        int, typer.Option(min=2, max=10_000, help="Most points; more steps are reduced to means.")
    ] = 1000,
    as_json: Json = False,
) -> None:
    """Show the steps of a job over all attempts: loss, learning rate and tokens a second."""
    out = Output(as_json=as_json)
    async with client() as c:
        full_id = await job_id(c, job)
        series = await c.metrics(full_id, after=after, points=points)
    out.document(series)
    if not series.step:
        raise NotFoundExit(f"job {full_id} has no step yet; its first checkpoint brings them")
    losses = tuple((s, loss) for s, loss in zip(series.step, series.loss, strict=True) if loss is not None)
    if plot and len(losses) > 1:
        out.print(Text.from_ansi(plots.in_terminal(losses, colour=out.live)))
    else:
        for step, loss, lr, speed in zip(series.step, series.loss, series.lr, series.tokens_per_s, strict=True):
            out.print(f"step {step}  loss {_cell(loss, '.4f')}  lr {_cell(lr, '.2e')}  {_cell(speed, ',.0f')} tokens/s")
    if series.skipped_bytes:
        out.print(f"only the journal's end was read; `gpubroker artifacts {full_id}` downloads all of metrics.jsonl")
    for end in series.interruptions:
        out.print(f"attempt {end.attempt} ended at step {end.step}: {end.reason}")


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
