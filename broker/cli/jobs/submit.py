"""`gpubroker quote` and `submit`."""

from pathlib import Path
from typing import Annotated

import typer

from broker.cli.core import formatting
from broker.cli.core.command import Json, client, command
from broker.cli.core.durations import seconds
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.jobs import submission
from broker.cli.jobs.jobs import follow
from broker.cli.jobs.watch import RETRY_FOR_S
from broker.cli.spec.spec_file import SpecFile, load
from broker.cli.views import quote as quote_view
from broker.cli.views import what_if as what_if_view
from broker.cli.views.what_if import PlotFile, WhatIf
from trainer.contract.base import MOMENT_EXAMPLES

SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="Spec of the job, YAML or JSON.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override a setting of the spec: --set train.epochs=2. Repeatable."
    ),
]
UPLOAD_RETRY_FOR_S = 30.0


@command
async def quote(
    spec: SpecArgument,
    settings: Settings = None,
    every: Annotated[bool, typer.Option("--all", help="Show every offer that fits, not only the best.")] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Break down time and cost of the best offers, and explain every dropped offer."),
    ] = False,
    what_if: WhatIf = None,
    gpu: Annotated[str | None, typer.Option(help="With --what-if: the GPU. Default: that of the best offer.")] = None,
    plot: PlotFile = None,
    as_json: Json = False,
) -> None:
    """Check a spec and its data, and price the job on every offer. Nothing is created or bought."""
    out = Output(as_json=as_json)
    if what_if is None:
        what_if_view.check_unused(gpu=gpu, plot=plot)
    file = load(spec, tuple(settings or ()))
    async with client() as c:
        prepared = await submission.prepare(c, file, limit=1000 if every or explain or what_if else 100)
    if what_if is not None:
        return what_if_view.show_what_if_of_quote(out, prepared, what_if, gpu, plot)
    out.document(prepared.quote)
    submission.show(out, prepared, every=every)
    if explain:
        quote_view.explain(out, prepared.quote)


@command
async def submit(
    spec: SpecArgument,
    settings: Settings = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the job is stored; do not watch it.")
    ] = False,
    keep_on_failure: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="If the job fails, keep its machine this long for `gpubroker ssh`: 90s, 15m, 1h30m. It is billed.",
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--idempotency-key", help="Repeating a key never creates a second job.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check, quote, confirm and submit a job, then watch it until it ends. Ctrl-C leaves the job running."""
    out = Output(as_json=as_json)
    keep_s = None if keep_on_failure is None else round(seconds("--keep-on-failure", keep_on_failure))
    file = load(spec, tuple(settings or ()), keep_on_failure=keep_s)
    _check_key(file, key)
    async with client(retry_for_s=0) as c:
        prepared = await submission.prepare(c, file)
        submission.show(out, prepared)
        prepared = submission.with_cap(out, prepared, yes=yes)
        submission.confirm_submission(out, prepared, yes=yes)
    async with client(retry_for_s=UPLOAD_RETRY_FOR_S) as c:
        job = await submission.send(c, prepared, key=key)
    out.print(f"job {job.id} submitted: {job.name}, cap {formatting.money(job.cap_usd)}")
    if detach:
        out.document(job)
        out.print(f"follow it with `gpubroker watch {job.id}`")
        return
    async with client(retry_for_s=RETRY_FOR_S) as c:
        await follow(c, job.id, out)


def _check_key(file: SpecFile, key: str | None) -> None:
    """Raise BadInput if each repeat of the key would send another spec, which the API refuses."""
    if key is not None and file.has_relative_deadline:
        raise BadInput(
            f"{file.place('deadline')}: a time from now is another one at each repeat of --idempotency-key; "
            f"write {MOMENT_EXAMPLES}"
        )
