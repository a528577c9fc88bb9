"""A new job on one page: data, columns, model, hardware, limits, a live quote, and one write at the end."""

from collections.abc import Mapping
from typing import Any, get_args
from urllib.parse import urlencode

from aiohttp import web
from pydantic import ValidationError

from broker.api.core import problems
from broker.api.core.problems import StorageFull, TooLarge, TooMany
from broker.api.http.context import DATA_IMPORTS, STREAMS
from broker.api.schemas.files import DataImport
from broker.api.schemas.queries import UploadQuery
from broker.api.schemas.quotes import QuoteSpec
from broker.api.service.interfaces import Checked
from broker.domain.errors import IdempotencyConflict, InvalidInput, OverBudget, Problem
from broker.domain.formatting import visible
from broker.domain.spec import JobSpec
from broker.policy.budgets import Refusal
from broker.web.browser import Visit, key_of, redirect_to
from broker.web.file_form import chunks, form_with_file
from broker.web.job_form import (
    FIELDS,
    MORE,
    SCRIPT,
    as_yaml,
    cap_text,
    document,
    field_of,
    fields_of,
    form_of,
    further_settings,
    suggested,
)
from broker.web.pages.run import job_of_team
from broker.web.pages.team.layout import checked
from broker.web.quote_view import QuoteSummary, quote_summary
from broker.web.rendering import HEADERS
from broker.web.routes import Routes
from trainer.contract.data_config import COLUMN_SETTINGS, USES, TaskName

routes = Routes()
NEW = "/ui/new"
TASKS = get_args(TaskName)
CHOICES = {
    "task": (*TASKS, SCRIPT),
    "method": ("lora", "qlora", "full"),
    "gpus": ("auto", "1", "2", "4", "8"),
    "spot": ("allowed", "never", "only"),
    "objective": ("cheapest", "hourly", "fastest", "balanced"),
}
SHOWN_FAULTS = (*(field.name for field in FIELDS), "upload", "source", MORE)


@routes.get(NEW, scope="submit")
async def new_job(visit: Visit) -> web.Response:
    """Show the form; the query prefills it, so that `?model=` can be linked to. `?clone=`: a job to start from."""
    fields = {name: visit.request.query[name] for name in (*SHOWN_FAULTS, "upload") if name in visit.request.query}
    cloned, faults = await _started_from(visit)
    if fields.get("upload"):
        faults.pop("upload", None)
    return visit.page("new_job.html", **await _form(visit, cloned | fields, faults))


async def _started_from(visit: Visit) -> tuple[dict[str, str], dict[str, str]]:
    """Return (the form's values, its faults) of the job that the query names as `clone`, and of its `task`."""
    job_id = visit.request.query.get("clone", "")
    values, faults = await _cloned(visit, job_id) if job_id else ({}, {})
    return values | {name: visit.request.query[name] for name in ("task",) if name in visit.request.query}, faults


def _with_data(visit: Visit, sha256: str) -> web.Response:
    """Show the form with an upload, its task, and the fields of the job that it started from."""
    given = {name: visit.request.query.get(name, "") for name in ("clone", "task")}
    query = {"upload": f"upload:{sha256}"} | {name: value for name, value in given.items() if value}
    return redirect_to(f"{NEW}?{urlencode(query, safe=':')}")


async def _cloned(visit: Visit, job_id: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return (the form's values, its faults) of a job's spec. Raises NotFound."""
    job = await job_of_team(visit, job_id)
    spec = job.spec
    form, more = form_of(spec.model_dump(mode="json", exclude_unset=True))
    threads = visit.service.quotes.threads.of_team(visit.caller.team)
    form |= {MORE: await threads(lambda: as_yaml(more)) if more else "", "upload": _reference(spec)}
    if await _data(visit, form["upload"]) is not None:
        return form, {}
    line = f"the {'data' if spec.train else 'code'} of job {job.id} are not among your uploads; drop the file again"
    return form, {"upload": line}


def _reference(spec: JobSpec) -> str:
    """Return the upload of a spec."""
    if spec.train is not None:
        return spec.train.data.path
    assert spec.script is not None
    return spec.script.code


async def _form(visit: Visit, fields: Mapping[str, str], faults: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what the form shows. Columns that were not named yet get the names that the data suggest."""
    values = {field.name: fields.get(field.name, field.default) for field in FIELDS}
    data = await _data(visit, fields.get("upload", ""))
    columns = tuple(((data.summary or {}).get("columns") or {}) if data else ())
    mapping = _mapping(values["task"])
    uses = USES.get(values["task"], ())
    is_script = values["task"] == SCRIPT
    # Further settings may name columns; those of a clone do.
    if not is_script and not fields.get(MORE) and not any(all(values[name] for name in needed) for needed, _ in uses):
        values |= {name: values[name] or guess for name, guess in suggested(values["task"], columns).items()}
    if data is not None and not values["name"]:
        values["name"] = _name(data.name)
    return {
        "values": values,
        "upload": fields.get("upload", "") if data else "",
        "data": data,
        "columns": columns,
        "mapping": mapping,
        "is_script": is_script,
        "more": fields.get(MORE, ""),
        "source": fields.get("source", ""),
        "upload_query": _upload_query(visit, values["task"]),
        "choices": CHOICES,
        "faults": faults or {},
        "key": visit.service.entropy(12).hex(),
    }


def _upload_query(visit: Visit, task: str) -> str:
    """Return the query with which an upload keeps the job that the form started from, and the task."""
    given = {"clone": visit.request.query.get("clone", ""), "task": "" if task == TASKS[0] else task}
    query = urlencode({name: value for name, value in given.items() if value})
    return f"?{query}" if query else ""


def _mapping(task: str) -> list[str]:
    """Return the fields of columns that a task uses."""
    if task == SCRIPT:
        return []
    used = {name for need, more in USES.get(task, USES["causal_lm"]) for name in (*need, *more)}
    return [name for name in COLUMN_SETTINGS if name in used and name != "labels"]


async def _data(visit: Visit, reference: str) -> Any:
    """Return the caller's upload; None: there is none of this reference, or it was deleted."""
    sha256 = reference.removeprefix("upload:")
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        return None
    upload = await visit.service.rows(visit.caller).upload(visit.caller.owner, sha256)
    return None if upload is None or upload.gone_at is not None else upload


def _name(file: str) -> str:
    """Return a job's name made of a file's name."""
    stem = file.lower().partition(".")[0]
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in stem).strip("-")[:40] or "job"


@routes.post(NEW + "/upload", runs_to_end=False, streams=True)
async def upload(visit: Visit) -> web.Response:
    """Store the file of a multipart form, and show the form with it."""
    try:
        async with visit.request.app[STREAMS].slot(visit.caller, visit.session.token):
            _, part = await form_with_file(visit.request, "upload")
            name = UploadQuery.model_validate({"name": part.filename}).name
            stored = await visit.content.upload(visit.caller, name, None, chunks(part), sha256=None)
    except ValidationError as error:
        return await _not_uploaded(visit, problems.invalid_input_of(error, UploadQuery, {}))
    except InvalidInput as error:
        return await _not_uploaded(visit, error)
    except (TooLarge, TooMany, StorageFull) as error:
        return await _not_uploaded(visit, InvalidInput(Problem(field="", message=str(error))))
    return _with_data(visit, stored.sha256)


@routes.post(NEW + "/import", runs_to_end=False)
async def import_data(visit: Visit) -> web.Response:
    """Let the daemon read the data set that the form names, and show the form with it."""
    form = await visit.form()
    try:
        request = checked(DataImport, {"source": form.get("source", "").strip()})
        async with visit.request.app[STREAMS].slot(visit.caller, visit.session.token):
            stored = await visit.request.app[DATA_IMPORTS].fetch(visit.caller, request.source, None)
    except InvalidInput as error:
        lines = "; ".join(problem.message for problem in error.problems)
    except (TooLarge, TooMany, StorageFull) as error:
        lines = str(error)
    else:
        return _with_data(visit, stored.sha256)
    values = (await _started_from(visit))[0] | {"source": form.get("source", "")}
    return await _refused(visit, values, InvalidInput(Problem(field="source", message=lines)))


async def _not_uploaded(visit: Visit, error: InvalidInput) -> web.Response:
    line = "; ".join(problem.message for problem in error.problems)
    values, _ = await _started_from(visit)
    return await _refused(visit, values, InvalidInput(Problem(field="upload", message=line)))


async def _refused(visit: Visit, form: Mapping[str, str], error: InvalidInput, status: int = 422) -> web.Response:
    return visit.page("new_job.html", status, **await _form(visit, form, _faults(error)))


def _faults(error: InvalidInput) -> dict[str, str]:
    """Return the API's lines by field of the form; lines of other places are together under the empty name."""
    lines: dict[str, str] = {}
    for fault in error.problems:
        name = fault.field if fault.field in SHOWN_FAULTS else field_of(fault.field)
        line = fault.message if name else f"{fault.field}: {fault.message}" if fault.field else fault.message
        lines[name] = f"{lines[name]}; {line}" if name in lines else line
    return lines


async def _more(visit: Visit, form: Mapping[str, str]) -> Mapping[str, Any]:
    """Parse the further settings in a thread. Raises InvalidInput, Busy."""
    if not form.get(MORE, "").strip():
        return {}
    return await visit.service.quotes.threads.of_team(visit.caller.team)(lambda: further_settings(form))


def _spec(form: Mapping[str, str], more: Mapping[str, Any], model: type[JobSpec]) -> JobSpec:
    spec_document = document(form, form.get("upload", ""), more)
    try:
        return model.model_validate(spec_document)
    except ValidationError as error:
        raise problems.invalid_input_of(error, model, spec_document) from None


@routes.post(NEW + "/fields", scope="submit", runs_to_end=False)
async def to_fields(visit: Visit) -> web.Response:
    """Show the form with its further settings moved into the fields; settings without a field stay there."""
    form = await visit.form()
    try:
        more = await _more(visit, form)
    except InvalidInput as error:
        return await _refused(visit, form, error)
    kind = SCRIPT if "script" in more else TASKS[0] if "train" in more and form.get("task") == SCRIPT else ""
    fields, rest = form_of(document(form | ({"task": kind} if kind else {}), "", more))
    threads = visit.service.quotes.threads.of_team(visit.caller.team)
    fields |= {MORE: await threads(lambda: as_yaml(rest)) if rest else "", "upload": form.get("upload", "")}
    return visit.page("new_job.html", **await _form(visit, fields))


@routes.post(NEW + "/quote", scope="submit", runs_to_end=False)
async def quote(visit: Visit) -> web.Response:
    """Quote the form: for htmx the quote and the lines next to the fields, otherwise the whole page."""
    form = await visit.form()
    values = await _quote_values(visit, form)
    if visit.request.headers.get("HX-Request") == "true":
        return visit.page("new_quote.html", **values)
    faults = values["faults"]
    return visit.page("new_job.html", 422 if faults else 200, **(values | await _form(visit, form, faults)))


async def _quote_values(visit: Visit, form: Mapping[str, str], changed: str = "") -> dict[str, Any]:
    """Return what the quote shows. `changed`: line on why a submission was refused."""
    faults: dict[str, str] = {}
    values: dict[str, Any] = {"quote": None, "check": {}, "held": None, "cap": "", "is_own_cap": False, "yaml": ""}
    try:
        more = await _more(visit, form)
        values["yaml"] = await _yaml(visit, form, more)
        spec = _spec(form, more, QuoteSpec)
        checked, summary, refusal = await _quoted(visit, spec)
        is_own_cap = "cap_usd" in spec.model_fields_set
        cap = spec.cap_usd if is_own_cap else summary.proposed_cap
        values |= {"quote": summary, "check": checked.report, "held": refusal, "is_own_cap": is_own_cap}
        values["cap"] = "" if cap is None else cap_text(cap)
    except InvalidInput as error:
        faults = _faults(error)
    return values | {"faults": faults, "fields": _shown_fields(form), "changed": changed}


def _shown_fields(form: Mapping[str, str]) -> list[str]:
    """Return the fields that the form shows, each with a place for its fault."""
    task = form.get("task", "")
    mapping = _mapping(task)
    shown = [*(field.name for field in fields_of(task)), "upload", *(() if task == SCRIPT else ("source",)), MORE]
    return [name for name in shown if name not in COLUMN_SETTINGS or name in mapping]


async def _quoted(visit: Visit, spec: JobSpec) -> tuple[Checked, QuoteSummary, Refusal | None]:
    checked, ranking, refusal = await visit.service.quotes.quote(visit.caller, spec)
    return checked, quote_summary(ranking, visit.service.clock.now(), spec.deadline), refusal


async def _yaml(visit: Visit, form: Mapping[str, str], more: Mapping[str, Any]) -> str:
    """Return the spec as a file for the command line, which names the data's file."""
    data = await _data(visit, form.get("upload", ""))
    path = data.name if data else ""
    # The command line packs a folder of code itself.
    wanted = document(form, path.rpartition(".tar")[0] if form.get("task") == SCRIPT else path, more)
    return await visit.service.quotes.threads.of_team(visit.caller.team)(lambda: as_yaml(wanted))


@routes.post(NEW + "/spec", scope="submit", runs_to_end=False)
async def spec_file(visit: Visit) -> web.Response:
    """Download the form as a spec for the command line."""
    form = await visit.form()
    try:
        text = await _yaml(visit, form, await _more(visit, form))
    except InvalidInput as error:
        return await _refused(visit, form, error)
    headers = {**HEADERS, "Content-Disposition": 'attachment; filename="job.yaml"', "Cache-Control": "no-store"}
    return web.Response(text=text, content_type="application/yaml", charset="utf-8", headers=headers)


@routes.post(NEW + "/submit", runs_to_end=False)
async def submit(visit: Visit) -> web.Response:
    """Submit the job at the cap that the quote showed. A second send of the same form leads to the same job."""
    form = await visit.form()
    shown = form.get("shown_cap", "")
    try:
        more = await _more(visit, form)
        proposed = {} if form.get("cap_usd", "").strip() else {"cap_usd": shown}
        spec = _spec(form | proposed, more, JobSpec)
        if cap_text(spec.cap_usd) != shown:
            return await _quoted_again(visit, form, spec)
        job, _ = await visit.service.submit(visit.caller, spec, key=key_of(form))
    except InvalidInput as error:
        return await _refused(visit, form, error)
    except (OverBudget, IdempotencyConflict) as error:
        return await _refused(visit, form, InvalidInput(Problem(field="", message=str(error))), 409)
    return redirect_to(f"/ui/jobs/{job.id}")


async def _quoted_again(visit: Visit, form: Mapping[str, str], spec: JobSpec) -> web.Response:
    """Refuse to submit at a cap that the page has not shown, and show the quote with this cap."""
    shown_cap = f"${shown}" if (shown := visible(form.get("shown_cap", "")[:20])) else "no cap"
    changed = (
        f"Not submitted: the quote showed {shown_cap}, and the cap is ${cap_text(spec.cap_usd)}; check it and submit."
    )
    values = await _quote_values(visit, form, changed)
    return visit.page("new_job.html", 409, **(values | await _form(visit, form, values["faults"])))
