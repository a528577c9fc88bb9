"""Commands on jobs that are there: ls, get, watch, logs, events, cancel, cap, retry, artifacts."""

import asyncio
import secrets
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.api.schemas.jobs import EventList, JobDetail
from broker.cli.core import formatting as words
from broker.cli.core import plots
from broker.cli.core.command import JobArgument, Json, client, command
from broker.cli.core.exit_codes import BadInput, NotFoundExit
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output
from broker.cli.jobs import artifacts as results
from broker.cli.jobs.watch import PATIENCE_S, verdict, watch
from broker.cli.views import decision as decisionview
from broker.cli.views import jobs as jobviews
from broker.cli.views import summary as summaryview
from broker.cli.views.progress import event_line
from broker.cli.views.summary_data import PICTURE, Summary, summarise
from broker.client.async_client import AsyncClient
from broker.client.files import chosen
from broker.domain.job import RESTING_JOB_STATES, JobState
from broker.domain.money import usd
from broker.reporting import loss_curve as curve

Wait = Annotated[
    bool, typer.Option("--watch", "-w", help="Follow the job to its end; the exit code says how it ended.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job's end.")]


@command
async def ls(
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="Repeat: all of them.")
    ] = None,
    state: Annotated[list[JobState] | None, typer.Option("--state", "-s", help="Repeat: any of them.")] = None,
    owner: Annotated[str | None, typer.Option(help="Who submitted them; all of the team without it.")] = None,
    team: Annotated[str | None, typer.Option(help="Of this team; for admins, who see all without it.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="ISO 8601 with a zone: 2026-01-31T12:00:00Z.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 50,
    cursor: Annotated[str | None, typer.Option(help="`next` of the page before.")] = None,
    as_json: Json = False,
) -> None:
    """List your team's jobs, newest first."""
    out = Output(as_json=as_json)
    labels = [_label(text) for text in label or []]
    async with client() as c:
        page = await c.jobs(
            labels=labels,
            states=[s.value for s in state or []],
            team=team,
            owner=owner,
            since=since,
            limit=limit,
            cursor=cursor,
        )
    out.document(page)
    if page.items:
        out.say(jobviews.table(page.items))
    elif label or state or owner or team or since or cursor:
        out.say("no job matches; `gpubroker ls` alone shows the newest")
    else:
        out.say("no jobs; `gpubroker submit SPEC.yaml` makes one")
    if page.next:
        out.say(f"older ones: --cursor {page.next}")


@command
async def get(job: JobArgument, wait: Wait = False, as_json: Json = False) -> None:
    """Show a job: state, progress, attempts, money."""
    out = Output(as_json=as_json)
    async with client(patience_s=PATIENCE_S if wait else 0) as c:
        wanted = await job_id(c, job)
        if wait:
            return await follow(c, wanted, out)
        detail = await c.job(wanted)
    out.document(detail)
    out.say(jobviews.detail(detail))


@command
async def explain(
    job: JobArgument,
    attempt: Annotated[int | None, typer.Option(min=1, help="Its number; by default the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Say why an attempt was bought: every offer that there was, kept or dropped, with the reason."""
    out = Output(as_json=as_json)
    async with client() as c:
        wanted = await job_id(c, job)
        number = attempt or (await c.job(wanted)).attempts
        if not number:
            raise NotFoundExit(f"job {wanted} has no attempt yet; `gpubroker quote` says what there is for it")
        found = await c.decision(wanted, number)
    out.document(found)
    out.say(decisionview.show(found))


@command
async def watch_job(job: JobArgument, as_json: Json = False) -> None:
    """Follow a job to its end: events, progress, then the summary. Ctrl-C leaves the job running."""
    async with client(patience_s=PATIENCE_S) as c:
        await follow(c, await job_id(c, job), Output(as_json=as_json))


async def follow(c: AsyncClient, job: str, out: Output) -> None:
    """To the job's rest, its summary, and its exit code. Ctrl-C leaves it running and says how to come back."""
    try:
        detail = await watch(c, job, out)
    except asyncio.CancelledError:
        out.say(f"job {job} goes on; come back with `gpubroker watch {job}`, stop it with `gpubroker cancel {job}`")
        raise
    summary = await summary_of(c, detail)
    out.document(summary.document())
    summaryview.show(out, summary)
    verdict(detail)


async def summary_of(c: AsyncClient, detail: JobDetail) -> Summary:
    """Of a job at rest or on its way."""
    told = await results.told(c, detail.id)
    return summarise(detail, tuple(words.machine(run) for run in detail.runs), told.losses, told.samples)


@command
async def events(job: JobArgument, go_on: Follow = False, as_json: Json = False) -> None:
    """Show what happened to a job; with --follow --json one document a line."""
    out = Output(as_json=as_json)
    async with client(patience_s=PATIENCE_S if go_on else 0) as c:
        wanted = await job_id(c, job)
        if not go_on:
            found = await all_events(c, wanted)
            out.document(found)
            for event in found.items:
                out.say(event_line(event))
            return
        async for event in c.events(wanted):
            if as_json:
                out.line(event)
            else:
                out.say(event_line(event))


async def all_events(c: AsyncClient, job: str) -> EventList:
    """Every event up to now, page by page."""
    found = list((await c.events_now(job)).items)
    while more := (await c.events_now(job, after=found[-1].seq)).items if found else ():
        found.extend(more)
    return EventList(items=tuple(found))


@command
async def logs(
    job: JobArgument,
    go_on: Follow = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Number of the attempt; default: the latest.")] = None,
    as_json: Json = False,
) -> None:
    """Show what the program wrote; with --follow --json one document a line."""
    out = Output(as_json=as_json)
    async with client(patience_s=PATIENCE_S if go_on else 0) as c:
        wanted = await job_id(c, job)
        if not go_on:
            text = await c.log_now(wanted, attempt=attempt)
            out.document({"job": wanted, "text": text})
            if not as_json:
                typer.echo(text, nl=not text.endswith("\n"))
            return
        async for piece in c.logs(wanted, attempt=attempt):
            if as_json:
                out.line(piece)
            else:
                typer.echo(piece.text, nl=False)


@command
async def cancel(job: JobArgument, as_json: Json = False) -> None:
    """Stop a job: it saves a checkpoint, and its machines are destroyed."""
    out = Output(as_json=as_json)
    async with client() as c:
        view = await c.cancel(await job_id(c, job))
    out.document(view)
    out.say(
        f"job {view.id} is asked to stop" if view.state not in RESTING_JOB_STATES else f"job {view.id} is {view.state}"
    )


@command
async def cap(job: JobArgument, cap_usd: Annotated[str, typer.Argument(metavar="USD")], as_json: Json = False) -> None:
    """Raise a job's cap; a capped job goes on."""
    out = Output(as_json=as_json)
    async with client() as c:
        view = await c.raise_cap(await job_id(c, job), _usd(cap_usd))
    out.document(view)
    out.say(f"job {view.id} may spend {words.money(view.cap_usd)}; it is {view.state.value}")


@command
async def retry(
    job: JobArgument,
    resume: Annotated[bool, typer.Option(help="Continue from the last checkpoint, if there is one.")] = True,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Run a job that has ended again, as a new job linked to it."""
    out = Output(as_json=as_json)
    async with client(patience_s=PATIENCE_S if wait else 0) as c:
        view = await c.retry(await job_id(c, job), resume=resume, key=secrets.token_hex(16))
        out.say(f"job {view.id} submitted, a retry of {view.retry_of}")
        if wait:
            return await follow(c, view.id, out)
    out.document(view)


@command
async def artifacts(
    job: JobArgument,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Download into this folder.")] = None,
    every: Annotated[bool, typer.Option("--all", help="The whole checkpoint, with what is for resuming only.")] = False,
    as_json: Json = False,
) -> None:
    """List a job's files, or download them: the adapter or model, metrics, samples, the loss curve."""
    out = Output(as_json=as_json)
    async with client() as c:
        wanted = await job_id(c, job)
        found = await c.artifacts(wanted)
        files = chosen(found, every=every)
        if to is None:
            if not files:
                raise NotFoundExit(f"job {wanted} has no files yet; they come with its first checkpoint")
            out.document(found)
            for file in files:
                out.say(f"{words.size(file.bytes):>12}  {file.path}")
            return
        written = [str(path) for path in await fetch(c, await c.job(wanted), to, out, every=every)]
    document: dict[str, Any] = {"job": wanted, "step": found.step, "complete": found.complete, "files": written}
    out.document(document)
    out.say(f"{len(written)} files of step {found.step} in {to}" + ("" if found.complete else " (the job is not done)"))


async def fetch(c: AsyncClient, detail: JobDetail, folder: Path, out: Output, *, every: bool = False) -> list[Path]:
    """Downloads a job's results into `folder`, and draws the loss curve there."""
    found = await c.artifacts(detail.id)
    written = await results.download(c, detail.id, chosen(found, every=every), folder, out)
    metrics = folder / "metrics.jsonl"
    losses = curve.losses(metrics.read_bytes()) if metrics in written else ()
    final = detail.runs[-1].final if detail.runs else None
    heldout = (final.heldout_loss_before, final.heldout_loss_after) if final else (None, None)
    resumed = tuple(r.beat.resumed_from for r in detail.runs[1:] if r.beat and r.beat.resumed_from)
    picture = folder / PICTURE
    if len(losses) > 1 and plots.to_png(losses, heldout, resumed, picture):
        written.append(picture)
    return written


def _label(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f"--label {text}: write KEY=VALUE")
    return f"{key}:{value}"


def _usd(text: str) -> Decimal:
    try:
        value = usd(text.removeprefix("$"))
    except ArithmeticError:
        raise BadInput(f"{text!r} is not an amount; write dollars, for example 2.50") from None
    if not value.is_finite() or value <= 0:
        raise BadInput(f"{text!r} must be above 0")
    return value
