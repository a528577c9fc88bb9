"""`gpubroker logs`: the log of a job, followed or up to now."""

import sys
from typing import Annotated

import typer

from broker.cli.core.command import JobArgument, Json, client, command
from broker.cli.core.durations import TIME_HELP, past
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output
from broker.cli.jobs.jobs import Follow
from broker.cli.jobs.watch import RETRY_FOR_S
from broker.client.async_client import AsyncClient
from broker.domain.formatting import visible


@command
async def logs(
    job: JobArgument,
    follow_to_end: Follow = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Number of the attempt. Default: the newest.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=1, help="Only the last lines.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"Only text that was uploaded since: {TIME_HELP}.")
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Begin each line with the time of its upload, in UTC.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the log of a job, escaped on a terminal; --follow --json writes one document per line."""
    out, start = Output(as_json=as_json), past("--since", since)
    if follow_to_end and (tail or since or timestamps):
        raise BadInput("--follow takes no --tail, --since or --timestamps; leave them or --follow out")
    async with client(retry_for_s=RETRY_FOR_S if follow_to_end else 0) as c:
        full_id = await job_id(c, job)
        if follow_to_end:
            return await _follow(c, full_id, attempt, out)
        text = await c.log_now(full_id, attempt=attempt, tail=tail, since=start, timestamps=timestamps)
        why = "" if text else await _no_log_message(c, full_id, filtered=since is not None)
    out.document({"job": full_id, "text": text})
    if why:
        sys.stderr.write(f"{visible(why)}\n")
    elif not as_json:
        out.log(text if text.endswith("\n") else f"{text}\n")


async def _follow(c: AsyncClient, job: str, attempt: int | None, out: Output) -> None:
    """Stream the log until the job ends."""
    async for piece in c.logs(job, attempt=attempt):
        if out.as_json:
            out.line(piece)
        else:
            out.log(piece.text)


async def _no_log_message(c: AsyncClient, job: str, *, filtered: bool) -> str:
    """Return the reason why a log is empty."""
    detail = await c.job(job)
    if not detail.attempts:
        reason = f" ({detail.reason})" if detail.reason else ""
        return f"job {job} never ran, so it has no log; its state is {detail.state.value}{reason}"
    return f"job {job} uploaded nothing in that time" if filtered else f"job {job} has uploaded no log yet"
