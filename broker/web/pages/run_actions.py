"""Writes on a run: cancel, raise the cap, run again."""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

from aiohttp import web
from pydantic import ValidationError

from broker.api.core import problems
from broker.api.core.problems import Conflict
from broker.api.schemas.jobs import CapChange
from broker.domain.errors import InvalidInput, OverBudget, Problem
from broker.domain.job import Job
from broker.web.browser import Visit, key_of, redirect_to
from broker.web.formats import money
from broker.web.pages.run import job_of_team, run_values
from broker.web.routes import Routes

routes = Routes()


@routes.post("/ui/jobs/{job_id}/cancel")
async def cancel(visit: Visit, job_id: str) -> web.Response:
    """Request the end of the run."""
    job = await job_of_team(visit, job_id)
    await visit.service.cancel(visit.caller, job.id)
    return redirect_to(f"/ui/jobs/{job.id}")


@routes.post("/ui/jobs/{job_id}/cap")
async def raise_cap(visit: Visit, job_id: str) -> web.Response:
    """Raise the cap to the form's dollars."""
    job = await job_of_team(visit, job_id)
    form = await visit.form()
    try:
        await visit.service.raise_cap(visit.caller, job.id, cap_of(form.get("cap_usd", "")))
    except InvalidInput as error:
        return await _refused(visit, job, {p.field: p.message for p in error.problems}, 422)
    except (OverBudget, Conflict) as error:
        return await _refused(visit, job, {"cap_usd": str(error)}, 409)
    return redirect_to(f"/ui/jobs/{job.id}")


async def _refused(visit: Visit, job: Job, faults: Mapping[str, str], status: int) -> web.Response:
    return visit.page("run.html", status, **await run_values(visit, job, "", faults))


def cap_of(text: str) -> Decimal:
    """Return the dollars of a form's field. Raises InvalidInput."""
    try:
        amount = Decimal(text.strip().removeprefix("$"))
    except InvalidOperation:
        raise InvalidInput(Problem(field="cap_usd", message=f"{text[:40]!r} is not an amount; write 12.50")) from None
    try:
        return CapChange.model_validate({"cap_usd": amount}).cap_usd
    except ValidationError as error:
        raise problems.invalid_input_of(error, CapChange, {"cap_usd": text}) from None


@routes.post("/ui/jobs/{job_id}/retry", runs_to_end=False)
async def retry(visit: Visit, job_id: str) -> web.Response:
    """Run an ended job again. The form's key makes a second send of the same form lead to the same new job."""
    job = await job_of_team(visit, job_id)
    form = await visit.form()
    if form.get("shown_cap") != str(job.cap_usd):
        line = f"Not started: the page showed another cap than {money(job.cap_usd)}; check the cap and run it again."
        return await _refused(visit, job, {"retry": line}, 409)
    resume = form.get("resume") == "1"
    new_job, _ = await visit.service.retry(visit.caller, job.id, resume=resume, key=key_of(form))
    return redirect_to(f"/ui/jobs/{new_job.id}")
