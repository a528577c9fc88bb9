"""Commands on one job: get, explain, watch, events, cancel, cap, retry, artifacts."""

import asyncio
import secrets
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.api.schemas.jobs import EventList, JobDetail
from broker.cli.core import formatting, plots
from broker.cli.core.command import Form, JobArgument, Json, client, command
from broker.cli.core.exit_codes import BadInput, NotFoundExit
from broker.cli.core.job_lookup import job_id
from broker.cli.core.output import Output
from broker.cli.jobs import artifacts as results
from broker.cli.jobs.watch import RETRY_FOR_S, raise_for_state, watch
from broker.cli.views import jobs
from broker.cli.views import summary as summary_view
from broker.cli.views.offers import show_decision
from broker.cli.views.progress import event_line
from broker.cli.views.summary_data import PICTURE, Summary, summarise
from broker.client.async_client import AsyncClient
from broker.client.files import select_results
from broker.domain.job import RESTING_JOB_STATES
from broker.domain.money import usd
from broker.reporting.loss_curve import losses as read_losses

Wait = Annotated[
    bool, typer.Option("--watch", "-w", help="Follow the job until it ends; the exit code gives its result.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Stream new output until the job ends.")]


@command
async def get(job: JobArgument, wait: Wait = False, form: Form = None, as_json: Json = False) -> None:
    """Show a job: state, progress, attempts and cost."""
    out = Output(as_json=as_json, form=form)
    async with client(retry_for_s=RETRY_FOR_S if wait else 0) as c:
        full_id = await job_id(c, job)
        if wait:
            return await follow(c, full_id, out)
        detail = await c.job(full_id)
    out.document(detail)
    out.print(jobs.detail(detail))


@command
async def explain(
    job: JobArgument,
    attempt: Annotated[int | None, typer.Option(min=1, help="Number of the attempt. Default: the newest.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of offers, the best ones first.")] = 20,
    form: Form = None,
    as_json: Json = False,
) -> None:
    """Show why a job waited, moved or stayed, and every offer at a purchase, kept or dropped, with the reason."""
    out = Output(as_json=as_json, form=form)
    async with client() as c:
        full_id = await job_id(c, job)
        number = attempt or (await c.job(full_id)).attempts
        history = () if out.as_json else await _decisions(c, full_id)
        for line in history:
            out.print(line)
        if not number:
            if history:
                return
            raise NotFoundExit(
                f"job {full_id} has no attempt yet; `gpubroker quote SPEC.yaml` shows the current offers"
            )
        decision = await c.decision(full_id, number)
    out.document(decision)
    show_decision(out, decision, limit)


DECISIONS = frozenset({"job.waiting", "attempt.planned", "attempt.moves", "attempt.stays", "attempt.preempted"})
"""Events that say why a job waited, bought, moved or stayed."""


async def _decisions(c: AsyncClient, job: str) -> list[str]:
    """Return a line for each decision about the job, oldest first."""
    after, lines = 0, list[str]()
    while events := (await c.events_now(job, after=after)).items:
        lines += [event_line(event) for event in events if event.kind in DECISIONS]
        after = events[-1].seq
    return lines


@command
async def watch_job(job: JobArgument, as_json: Json = False) -> None:
    """Follow a job until it ends: events, progress, then a summary. Ctrl-C leaves the job running."""
    async with client(retry_for_s=RETRY_FOR_S) as c:
        await follow(c, await job_id(c, job), Output(as_json=as_json))


async def follow(c: AsyncClient, job: str, out: Output) -> None:
    """Follow the job until it ends, print its summary and raise its exit code.

    Ctrl-C leaves the job running, and prints the commands to follow or cancel it.
    """
    try:
        detail = await watch(c, job, out)
    except asyncio.CancelledError:
        out.print(f"job {job} keeps running; follow it: `gpubroker watch {job}`, stop it: `gpubroker cancel {job}`")
        raise
    summary = await summary_of(c, detail)
    out.document(summary.document())
    summary_view.show(out, summary)
    raise_for_state(detail)


async def summary_of(c: AsyncClient, detail: JobDetail) -> Summary:
    """Return the summary of a running or ended job."""
    messages = await results.read_messages(c, detail.id)
    machines = tuple(formatting.machine(run) for run in detail.runs)
    return summarise(detail, machines, messages.losses, messages.samples)


@command
async def events(job: JobArgument, follow_to_end: Follow = False, as_json: Json = False) -> None:
    """Show the events of a job; --follow --json writes one document per line."""
    out = Output(as_json=as_json)
    async with client(retry_for_s=RETRY_FOR_S if follow_to_end else 0) as c:
        full_id = await job_id(c, job)
        if not follow_to_end:
            page = await all_events(c, full_id)
            out.document(page)
            for event in page.items:
                out.print(event_line(event))
            return
        async for event in c.events(full_id):
            if as_json:
                out.line(event)
            else:
                out.print(event_line(event))


async def all_events(c: AsyncClient, job: str) -> EventList:
    """Return every event up to now, read page by page."""
    events = list((await c.events_now(job)).items)
    while more := (await c.events_now(job, after=events[-1].seq)).items if events else ():
        events.extend(more)
    return EventList(items=tuple(events))


@command
async def cancel(job: JobArgument, as_json: Json = False) -> None:
    """Cancel a job: it saves a checkpoint, then its machines are destroyed."""
    out = Output(as_json=as_json)
    async with client() as c:
        view = await c.cancel(await job_id(c, job, writes=True))
    out.document(view)
    out.print(f"cancelling job {view.id}" if view.state not in RESTING_JOB_STATES else f"job {view.id} is {view.state}")


@command
async def cap(job: JobArgument, cap_usd: Annotated[str, typer.Argument(metavar="USD")], as_json: Json = False) -> None:
    """Raise a job's cap; a capped job resumes."""
    out = Output(as_json=as_json)
    async with client() as c:
        view = await c.raise_cap(await job_id(c, job, writes=True), _usd(cap_usd))
    out.document(view)
    out.print(f"job {view.id} may spend up to {formatting.money(view.cap_usd)}; its state is {view.state.value}")


@command
async def retry(
    job: JobArgument,
    resume: Annotated[bool, typer.Option(help="Resume from the last checkpoint, if it exists.")] = True,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Run an ended job again, as a new job that is linked to the old one."""
    out = Output(as_json=as_json)
    async with client(retry_for_s=RETRY_FOR_S if wait else 0) as c:
        view = await c.retry(await job_id(c, job, writes=True), resume=resume, key=secrets.token_hex(16))
        out.print(f"job {view.id} submitted, a retry of {view.retry_of}")
        if wait:
            return await follow(c, view.id, out)
    out.document(view)


@command
async def artifacts(
    job: JobArgument,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Download into this folder.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Include files needed only to resume the checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """List or download a job's files: the adapter or model, metrics, samples and the loss curve."""
    out = Output(as_json=as_json)
    async with client() as c:
        full_id = await job_id(c, job)
        page = await c.artifacts(full_id)
        files = select_results(page, every=every)
        if to is None:
            if not files:
                raise NotFoundExit(f"job {full_id} has no files yet; they come with its first checkpoint")
            out.document(page)
            for file in files:
                out.print(f"{formatting.size(file.bytes):>12}  {file.path}")
            return
        paths = [str(path) for path in await fetch(c, await c.job(full_id), to, out, every=every)]
    document: dict[str, Any] = {"job": full_id, "step": page.step, "complete": page.complete, "files": paths}
    out.document(document)
    out.print(f"{len(paths)} files of step {page.step} in {to}" + ("" if page.complete else " (the job is not done)"))


async def fetch(c: AsyncClient, detail: JobDetail, folder: Path, out: Output, *, every: bool = False) -> list[Path]:
    """Download a job's results into `folder`, and draw the loss curve there. Return the written files."""
    page = await c.artifacts(detail.id)
    paths = await results.download(c, detail.id, select_results(page, every=every), folder, out)
    metrics = folder / "metrics.jsonl"
    losses = read_losses(metrics.read_bytes()) if metrics in paths else ()
    final = detail.runs[-1].final if detail.runs else None
    heldout = (final.heldout_loss_before, final.heldout_loss_after) if final else (None, None)
    resumed = tuple(r.beat.resumed_from for r in detail.runs[1:] if r.beat and r.beat.resumed_from)
    picture = folder / PICTURE
    if len(losses) > 1 and plots.to_png(losses, heldout, resumed, picture):
        paths.append(picture)
    return paths


def _usd(text: str) -> Decimal:
    try:
        value = usd(text.removeprefix("$"))
    except ArithmeticError:
        raise BadInput(f"{text!r} is not an amount; write dollars, for example 2.50") from None
    if not value.is_finite() or value <= 0:
        raise BadInput(f"{text!r} must be above 0")
    return value
