"""Commands that start something: quote, submit, offers."""

import re
from pathlib import Path
from typing import Annotated

import typer

from broker.api.schemas.offers import OfferList
from broker.api.service.spec_inputs import unknown_name
from broker.cli.core import formatting as words
from broker.cli.core.command import Json, client, command
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.jobs import submission
from broker.cli.jobs.jobs import follow
from broker.cli.jobs.watch import PATIENCE_S
from broker.cli.spec.spec_file import load
from broker.cli.views import offers as offersview
from broker.cli.views import quote as quoteview
from broker.cli.views import what_if as whatifview
from broker.cli.views.what_if import PlotFile, WhatIf
from broker.domain.gpu_names import gpu_name
from broker.estimator.speed.hardware import matches
from broker.sizing.estimate import EstimateError, hardware_of

SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="The job's spec, YAML or JSON.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change the spec: --set train.epochs=2. Repeat.")
]
UPLOAD_PATIENCE_S = 30.0
UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600}


@command
async def quote(
    spec: SpecArgument,
    settings: Settings = None,
    every: Annotated[bool, typer.Option("--all", help="Every offer, kept or dropped.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="What time and dollars of the best offers consist of, and every drop.")
    ] = False,
    what_if: WhatIf = None,
    gpu: Annotated[str | None, typer.Option(help="Of --what-if; by default the best offer's.")] = None,
    plot: PlotFile = None,
    as_json: Json = False,
) -> None:
    """Check a spec and its data, and price every offer against it. Nothing is created, nothing is bought."""
    out = Output(as_json=as_json)
    if what_if is None:
        whatifview.without(gpu=gpu, plot=plot)
    file = load(spec, tuple(settings or ()))
    async with client() as c:
        prepared = await submission.prepare(c, file, limit=1000 if every or explain or what_if else 100)
    if what_if is not None:
        return whatifview.of_quote(out, prepared, what_if, gpu, plot)
    out.document(prepared.quote)
    submission.show(out, prepared, every=every)
    if explain:
        quoteview.explain(out, prepared.quote)


@command
async def submit(
    spec: SpecArgument,
    settings: Settings = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return as soon as the job is durable.")] = False,
    keep_on_failure: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Keep a failed job's machine for so long, to look at it with `gpubroker ssh`: 90s, 15m, 2h. It bills.",
        ),
    ] = None,
    key: Annotated[str | None, typer.Option("--idempotency-key", help="The same key never makes a second job.")] = None,
    as_json: Json = False,
) -> None:
    """Check, quote, confirm, submit, and watch a job to its end. Ctrl-C leaves the job running."""
    out = Output(as_json=as_json)
    kept_s = None if keep_on_failure is None else _seconds(keep_on_failure)
    file = load(spec, tuple(settings or ()), keep_on_failure=kept_s)
    async with client(patience_s=0) as c:
        prepared = await submission.prepare(c, file)
        submission.show(out, prepared)
        prepared = submission.with_cap(out, prepared, yes=yes)
        submission.confirm_submission(out, prepared, yes=yes)
    async with client(patience_s=UPLOAD_PATIENCE_S) as c:
        job = await submission.send(c, prepared, key=key)
    out.say(f"job {job.id} submitted: {job.name}, cap {words.money(job.cap_usd)}")
    if detach:
        out.document(job)
        out.say(f"follow it with `gpubroker watch {job.id}`")
        return
    async with client(patience_s=PATIENCE_S) as c:
        await follow(c, job.id, out)


@command
async def offers(
    provider: Annotated[str | None, typer.Option(help="Only this provider's.")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", "-g", help="Only these, comma-separated: H100,A100-80GB,L40S,RTX4090.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=5000)] = 500,
    as_json: Json = False,
) -> None:
    """List what is for sale now, cheapest first, with the age and the source of each price."""
    out = Output(as_json=as_json)
    names = _gpus(gpu or [])
    async with client() as c:
        found = await c.offers(provider=provider, accelerators=names, limit=limit)
    _known(found, provider, names)
    out.document(found)
    offersview.show(out, found)


def _known(found: OfferList, provider: str | None, gpus: list[str]) -> None:
    """A name that nobody has would look like a market that is sold out. Raises BadInput."""
    providers = [status.name for status in found.providers]
    if provider is not None and provider not in providers:
        raise BadInput(f"--provider: {unknown_name('provider', provider, sorted(providers), 'configured')}")
    if found.total > len(found.items):  # dearer offers may have it
        return
    for name in gpus:
        if any(matches(gpu_name(name), offer.accelerator) for offer in found.items):
            continue
        try:
            hardware_of(name)
        except EstimateError as e:
            raise BadInput(str(e)) from None


def _seconds(said: str) -> int:
    """`90`, `90s`, `15m` or `2h` in seconds. Raises BadInput."""
    found = re.fullmatch(r"([0-9]{1,9})([smh]?)", said.strip())
    if found is None:
        raise BadInput(f"--keep-on-failure {said}: write a time as 90s, 15m or 2h")
    return int(found[1]) * UNITS_S[found[2]]


def _gpus(said: list[str]) -> list[str]:
    """`H100,RTX4090` one by one."""
    return [name.strip() for text in said for name in text.split(",") if name.strip()]
