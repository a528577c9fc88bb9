"""Steps from a spec file to a job: upload, check, quote, cap, confirm, submit."""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import typer

from broker.api.schemas.files import UploadView
from broker.api.schemas.jobs import JobView
from broker.cli.core import formatting
from broker.cli.core.command import cli_error, confirm, interruptible
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.spec.code_archive import pack
from broker.cli.spec.spec_file import UPLOAD, Prepared, SpecFile
from broker.cli.views import quote
from broker.client.async_client import AsyncClient
from broker.client.transport.errors import ApiError
from broker.domain.money import usd
from trainer.contract.data_config import DataConfig
from trainer.contract.script import ScriptConfig
from trainer.dataset import sources
from trainer.dataset.prompts import DataError

CENT = Decimal("0.01")


async def prepare(client: AsyncClient, file: SpecFile, *, limit: int = 100) -> Prepared:
    """Upload the files that the spec names, and request a quote. No job is created.

    Raises BadInput naming file and line.
    """
    body = file.spec.model_dump(mode="json", exclude_unset=True)
    columns: tuple[str, ...] = ()
    if file.spec.train is not None:
        body["train"]["model"] = _model(file, file.spec.train.model)
        path = file.spec.train.data.path
        if not path.startswith(UPLOAD):
            with ExitStack() as stack:
                name, local, fmt = await asyncio.to_thread(stack.enter_context, _data(file, file.spec.train.data))
                upload = await _upload(client, file, "train.data.path", local, name, fmt)
            body["train"]["data"]["path"] = upload.ref
            body["train"]["data"].pop("secret", None)  # the secret was for the source, which is now an upload
            columns = tuple((upload.summary or {}).get("columns", ()))
    elif file.spec.script is not None and not file.spec.script.code.startswith(UPLOAD):
        _check_requirements(file, file.spec.script)
        with _code(file, file.spec.script.code) as (name, local):
            body["script"]["code"] = (await _upload(client, file, "script.code", local, name, "tar")).ref
    try:
        return Prepared(file=file, body=body, quote=await client.quote(body, limit=limit), columns=columns)
    except ApiError as e:
        raise _with_lines(file, e) from None


def show(out: Output, prepared: Prepared, *, every: bool = False) -> None:
    """Print the data check and the quote."""
    if (check := quote.check(prepared.quote.check, prepared.columns)) is not None:
        out.print(check)
    quote.show(out, prepared.quote, every=every)


def with_cap(out: Output, prepared: Prepared, *, yes: bool) -> Prepared:
    """Return the prepared job with a cap: that of the spec, or the proposed cap.

    On a terminal the user confirms or changes the proposed cap. Otherwise the proposed cap is used and printed.
    Raises BadInput when no offer is left to propose a cap from, or the run time is unknown.
    """
    if prepared.file.has_cap:
        return prepared
    proposed = prepared.quote.proposed_cap_usd
    if proposed is None:
        raise BadInput(f"{prepared.file.path}: cap_usd: {_no_proposal(prepared)}")
    proposed = max(proposed, CENT)
    if out.is_interactive and not yes:
        proposed = _ask_cap(proposed)
    else:
        out.print(
            f"cap: {formatting.money(proposed)} (P90 of the best offer × 1.25; set cap_usd in the spec to change it)"
        )
    return replace(prepared, body={**prepared.body, "cap_usd": str(proposed)})


def _no_proposal(prepared: Prepared) -> str:
    """Return why no cap can be proposed, with the fix."""
    if not prepared.quote.kept:
        return "no offer fits, so no cap can be proposed; change resources, or set cap_usd"
    what = "a script's run time" if prepared.file.spec.script else "the speed of this training on these GPUs"
    return f"{what} is unknown, so no cap can be proposed; set cap_usd in the spec, or with --set cap_usd=10"


def confirm_submission(out: Output, prepared: Prepared, *, yes: bool) -> None:
    """Ask before submitting. Raises Refused when the user answers no, BadInput when stdin is not a terminal."""
    cap = formatting.money(Decimal(str(prepared.body["cap_usd"])))
    question = f"Submit {prepared.file.spec.name}? It never spends more than {cap}"
    confirm(out, question, yes=yes or out.as_json, verb="submit", refusal="nothing was submitted")


async def send(client: AsyncClient, prepared: Prepared, *, key: str | None) -> JobView:
    """Submit the job, which is durable when this returns.

    `key` None: a new key, so that retries within this call create only one job.
    """
    try:
        return await client.submit(prepared.body, key=key or secrets.token_hex(16))
    except ApiError as e:
        raise _with_lines(prepared.file, e) from None


def _ask_cap(proposed: Decimal) -> Decimal:
    while True:
        with interruptible():
            answer = str(typer.prompt("Cap in USD", default=str(proposed)))
        try:
            cap = usd(answer.removeprefix("$"))
            if cap > 0:
                return cap
        except ArithmeticError:
            pass
        typer.echo("enter dollars above 0, for example 2.50")


@contextmanager
def _data(file: SpecFile, data: DataConfig) -> Iterator[tuple[str, Path, str | None]]:
    """Yield (name, file, format) of the data set; a remote data set is downloaded first."""
    place = file.place("train.data.path")
    with ExitStack() as stack:
        try:
            local = stack.enter_context(sources.gather(data, file.path.parent))
            local.path.open("rb").close()
        except DataError as e:
            text = str(e).removeprefix("data.path: ")
            raise BadInput(f"{place}: {text}", problems=(("train.data.path", text),)) from None
        except OSError as e:
            raise BadInput(
                f"{place}: {e.filename}: {e.strerror}; the path is relative to the spec",
                problems=(("train.data.path", str(e.strerror)),),
            ) from None
        is_packed = local.format == "tar" or sources.is_remote(data.path)
        yield local.name, local.path, local.format if is_packed else data.format


def _model(file: SpecFile, model: str) -> str:
    """Return the absolute path of a model folder; other values are Hub ids, which the daemon checks."""
    folder = file.file(model)
    return str(folder.resolve()) if os.path.isdir(folder) else model


def _check_requirements(file: SpecFile, script: ScriptConfig) -> None:
    """Raise BadInput if the code folder lacks the requirements file. The content of an archive is not read."""
    source, name = file.file(script.code), script.requirements
    if name is not None and os.path.isdir(source) and not os.path.isfile(source / name):
        why = f"{script.code} has no file {name}; its path is relative to script.code"
        raise BadInput(f"{file.place('script.requirements')}: {why}", problems=(("script.requirements", why),))


@contextmanager
def _code(file: SpecFile, code: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, archive) of the code. A folder is packed into a temporary archive."""
    source = file.file(code)
    if os.path.isfile(source):
        yield source.name, source
        return
    with tempfile.TemporaryDirectory(prefix="gpubroker-") as folder:
        archive = Path(folder) / f"{source.resolve().name}.tar"
        try:
            with archive.open("xb") as into:
                pack(source, into)
        except BadInput as e:
            raise BadInput(f"{file.place('script.code')}: {e}", problems=(("script.code", str(e)),)) from None
        except OSError as e:
            why = f"cannot pack {source} into {folder}: {e.strerror}; free disk space there, or set TMPDIR"
            raise BadInput(f"{file.place('script.code')}: {why}", problems=(("script.code", why),)) from None
        yield archive.name, archive


async def _upload(
    client: AsyncClient, file: SpecFile, field: str, data: Path, name: str, fmt: str | None
) -> UploadView:
    try:
        return await client.upload(data, name=name, fmt=fmt)
    except ApiError as e:
        if e.status not in (413, 422):
            raise
        text = "; ".join(p.message for p in e.problem.errors) or e.problem.detail
        raise BadInput(f"{file.place(field)}: {name}: {text}", problems=((field, text),)) from None


def _with_lines(file: SpecFile, error: ApiError) -> Exception:
    """Return the API's errors about the spec with file and line; other errors unchanged."""
    if error.status == 422 and error.problem.errors:
        return file.problem(tuple((p.field, p.message) for p in error.problem.errors))
    return cli_error(error)
