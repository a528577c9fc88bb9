"""From a spec file to a job: upload, check, quote, cap, confirm, submit."""

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
from broker.cli.core import formatting as words
from broker.cli.core.command import interruptible, of_client
from broker.cli.core.confirm import confirm
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.spec import code_archive as pack
from broker.cli.spec.prepared import Prepared
from broker.cli.spec.spec_file import UPLOAD, SpecFile
from broker.cli.views import quote as quoteview
from broker.client.async_client import AsyncClient
from broker.client.transport.errors import ApiError
from broker.domain.money import usd
from trainer.contract.train import DataConfig
from trainer.dataset import sources as places
from trainer.dataset.prompts import DataError

CENT = Decimal("0.01")


async def prepare(client: AsyncClient, file: SpecFile, *, limit: int = 100) -> Prepared:
    """Uploads what the spec names and asks for the quote. Raises BadInput naming file and line; no job is created."""
    body = file.spec.model_dump(mode="json", exclude_unset=True)
    columns: tuple[str, ...] = ()
    if file.spec.train is not None:
        body["train"]["model"] = _model(file, file.spec.train.model)
        path = file.spec.train.data.path
        if not path.startswith(UPLOAD):
            with ExitStack() as stack:
                name, found, fmt = await asyncio.to_thread(stack.enter_context, _data(file, file.spec.train.data))
                kept = await _upload(client, file, "train.data.path", found, name, fmt)
            body["train"]["data"]["path"] = kept.ref
            body["train"]["data"].pop("secret", None)  # it reads what is an upload now
            columns = tuple((kept.summary or {}).get("columns", ()))
    elif file.spec.script is not None and not file.spec.script.code.startswith(UPLOAD):
        with _code(file, file.spec.script.code) as (name, found):
            body["script"]["code"] = (await _upload(client, file, "script.code", found, name, "tar")).ref
    try:
        return Prepared(file=file, body=body, quote=await client.quote(body, limit=limit), columns=columns)
    except ApiError as e:
        raise _placed(file, e) from None


def show(out: Output, prepared: Prepared, *, every: bool = False) -> None:
    """The data check and the quote."""
    if (check := quoteview.check(prepared.quote.check, prepared.columns)) is not None:
        out.say(check)
    quoteview.show(out, prepared.quote, every=every)


def with_cap(out: Output, prepared: Prepared, *, yes: bool) -> Prepared:
    """The cap is the spec's, else the proposed one: asked for where there is somebody to ask, else taken and said.

    Raises BadInput when no offer is left to propose a cap from.
    """
    if prepared.file.has_cap:
        return prepared
    proposed = prepared.quote.proposed_cap_usd
    if proposed is None:
        raise BadInput(
            f"{prepared.file.path}: cap_usd: no offer fits, so no cap can be proposed; change resources, or set it"
        )
    proposed = max(proposed, CENT)
    if out.asks and not yes:
        proposed = _ask_cap(proposed)
    else:
        out.say(f"cap: {words.money(proposed)} (P90 of the best offer × 1.25; set cap_usd in the spec to choose)")
    return replace(prepared, body={**prepared.body, "cap_usd": str(proposed)})


def confirm_submission(out: Output, prepared: Prepared, *, yes: bool) -> None:
    """Raises Refused when the person says no, BadInput when there is nobody to ask."""
    cap = words.money(Decimal(str(prepared.body["cap_usd"])))
    asked = f"Submit {prepared.file.spec.name}? It never spends more than {cap}"
    confirm(out, asked, yes=yes or out.as_json, to="submit", else_="nothing was submitted")


async def send(client: AsyncClient, prepared: Prepared, *, key: str | None) -> JobView:
    """Durable when it returns; without a key of the user's, repeats within this call still make one job."""
    try:
        return await client.submit(prepared.body, key=key or secrets.token_hex(16))
    except ApiError as e:
        raise _placed(prepared.file, e) from None


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
        typer.echo("give dollars above 0, for example 2.50")


@contextmanager
def _data(file: SpecFile, data: DataConfig) -> Iterator[tuple[str, Path, str | None]]:
    """(name, file, format) of the data set, wherever it lies."""
    where = file.place("train.data.path")
    with ExitStack() as stack:
        try:
            found = stack.enter_context(places.gathered(data, file.path.parent))
            found.path.open("rb").close()
        except DataError as e:
            text = str(e).removeprefix("data.path: ")
            raise BadInput(f"{where}: {text}", problems=(("train.data.path", text),)) from None
        except OSError as e:
            raise BadInput(
                f"{where}: {e.filename}: {e.strerror}; the path is relative to the spec",
                problems=(("train.data.path", str(e.strerror)),),
            ) from None
        known = found.format if found.format == "tar" or places.is_remote(data.path) else data.format
        yield found.name, found.path, known


def _model(file: SpecFile, model: str) -> str:
    """A folder beside the spec becomes an absolute path; anything else is a Hub id, and the daemon's to judge."""
    folder = file.file(model)
    return str(folder.resolve()) if os.path.isdir(folder) else model


@contextmanager
def _code(file: SpecFile, code: str) -> Iterator[tuple[str, Path]]:
    """(name, archive) of the code; a folder's is packed for as long as it is used."""
    source = file.file(code)
    if os.path.isfile(source):
        yield source.name, source
        return
    with tempfile.TemporaryDirectory(prefix="gpubroker-") as folder:
        archive = Path(folder) / f"{source.resolve().name}.tar"
        try:
            with archive.open("xb") as into:
                pack.pack(source, into)
        except BadInput as e:
            raise BadInput(f"{file.place('script.code')}: {e}", problems=(("script.code", str(e)),)) from None
        except OSError as e:
            why = f"cannot pack {source} into {folder}: {e.strerror}; free some room there, or set TMPDIR"
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


def _placed(file: SpecFile, error: ApiError) -> Exception:
    """The API's problems with the spec by file and line; any other refusal as it is."""
    if error.status == 422 and error.problem.errors:
        return file.problem(tuple((p.field, p.message) for p in error.problem.errors))
    return of_client(error)
