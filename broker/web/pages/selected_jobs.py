"""Actions on the jobs that are ticked in the list: each first shows what it does, and a POST then does it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from aiohttp import web

from broker.api.core.status_codes import public_text
from broker.domain.errors import GpubrokerError, InvalidInput
from broker.domain.job import RESTING_JOB_STATES, TERMINAL_JOB_STATES, Attempt, Job, JobState
from broker.domain.money import ZERO
from broker.web import formats
from broker.web.browser import HOME, Visit, own_path, redirect_to
from broker.web.pages.run import job_of_team
from broker.web.pages.run_actions import cap_of
from broker.web.routes import Routes

routes = Routes()
PATH = "/ui/jobs/selected"
MAX_JOBS = 100
"""Maximum number of jobs of one action."""
NO_EFFECT = "nothing to do"


@dataclass(frozen=True, kw_only=True)
class SelectedJob:
    """One ticked job, and what the action does with it."""

    job: Job
    word: str
    shape: str
    effect: str
    """Effect on the job, for users; NO_EFFECT: it is left as it is."""
    fault: str = ""
    """Why the action failed for this job; empty: it was not tried, or it was done."""


@dataclass(frozen=True, kw_only=True)
class JobAction:
    """One action on several jobs."""

    title: str
    effect: Callable[[Visit, Job, Attempt | None], str]
    run: Callable[[Visit, Job, Mapping[str, str]], Awaitable[object]]


def _cancel_effect(visit: Visit, job: Job, attempt: Attempt | None) -> str:
    if job.state in RESTING_JOB_STATES or job.stop_requested:
        return NO_EFFECT
    if attempt is None or not attempt.live:
        return "ends at once and costs nothing more"
    lead_s = visit.service.settings.drain_budget.lead_s
    usd = attempt.line.offer.usd_per_hour * attempt.line.nodes * int(lead_s) / 3600
    return f"saves a checkpoint, at most {formats.duration(lead_s)} and {formats.money(usd)}, then its machines go"


def _retry_effect(_visit: Visit, job: Job, _attempt: Attempt | None) -> str:
    if job.state not in RESTING_JOB_STATES:
        return NO_EFFECT
    return f"a new job with the same spec and a cap of {formats.money(job.cap_usd)} of its own"


def _cap_effect(_visit: Visit, job: Job, _attempt: Attempt | None) -> str:
    if job.state in TERMINAL_JOB_STATES:
        return NO_EFFECT
    more = ", and continues" if job.state is JobState.CAPPED else ""
    return f"gets the new cap in place of {formats.money(job.cap_usd)}{more}"


async def _cancel(visit: Visit, job: Job, _form: Mapping[str, str]) -> object:
    return await visit.service.cancel(visit.caller, job.id)


async def _retry(visit: Visit, job: Job, form: Mapping[str, str]) -> object:
    key = f"{form.get('key', '')[:60]}-{job.id}"
    return await visit.service.retry(visit.caller, job.id, resume=form.get("resume") == "1", key=key)


async def _raise_cap(visit: Visit, job: Job, form: Mapping[str, str]) -> object:
    return await visit.service.raise_cap(visit.caller, job.id, cap_of(form.get("cap_usd", "")))


ACTIONS: Mapping[str, JobAction] = {
    "cancel": JobAction(title="Cancel", effect=_cancel_effect, run=_cancel),
    "retry": JobAction(title="Run again", effect=_retry_effect, run=_retry),
    "cap": JobAction(title="Raise the cap of", effect=_cap_effect, run=_raise_cap),
}


@routes.get(PATH, scope="submit")
async def confirmation_page(visit: Visit) -> web.Response:
    """Show what the action would do with each ticked job. Cloning is done at once: it writes nothing."""
    query = visit.request.query
    job_ids, action = list(dict.fromkeys(query.getall("job", []))), query.get("do", "")
    if action == "clone" and len(job_ids) == 1:
        return redirect_to(f"/ui/new?clone={quote((await job_of_team(visit, job_ids[0])).id)}")
    fault = _selection_fault(action, job_ids)
    selected = () if fault else await _selected(visit, action, job_ids)
    return _page(visit, action, selected, fault, back=own_path(query.get("back")), status=422 if fault else 200)


def _selection_fault(action: str, job_ids: Sequence[str]) -> str:
    if action == "clone":
        return f"{len(job_ids)} jobs are ticked; tick the one job to clone"
    if action not in ACTIONS:
        return "no such action; choose one of the buttons below the list"
    if not job_ids:
        return "no job is ticked; tick the jobs in the list first"
    return f"{len(job_ids)} jobs are ticked; tick at most {MAX_JOBS}" if len(job_ids) > MAX_JOBS else ""


async def _selected(visit: Visit, action: str, job_ids: Sequence[str]) -> list[SelectedJob]:
    """Return the jobs with the action's effect. Raises NotFound for a job of another team."""
    jobs = [await job_of_team(visit, job_id) for job_id in job_ids]
    attempts = await visit.service.latest_attempts(jobs)
    selected = []
    for job in jobs:
        word, shape = formats.state(job, attempts.get(job.id))
        effect = ACTIONS[action].effect(visit, job, attempts.get(job.id))
        selected.append(SelectedJob(job=job, word=word, shape=shape, effect=effect))
    return selected


def _page(
    visit: Visit, action: str, selected: Sequence[SelectedJob], fault: str = "", *, status: int = 200, **values: Any
) -> web.Response:
    changed = [row for row in selected if row.effect != NO_EFFECT]
    fields: dict[str, Any] = {
        "action": action,
        "title": ACTIONS[action].title if action in ACTIONS else "Jobs",
        "selected": selected,
        "changed": changed,
        "total": str(sum((row.job.cap_usd for row in changed), ZERO)),
        "fault": fault,
        "faults": {},
        "key": visit.service.entropy(12).hex(),
        "cap_usd": "",
        "back": HOME,
    }
    return visit.page("selected_jobs.html", status, **(fields | values))


@routes.post(PATH)
async def act(visit: Visit) -> web.Response:
    """Do the action with each job on which it has an effect. A second send of the same form changes nothing more."""
    form = await visit.form()
    action, job_ids, back = form.get("do", ""), form.get("jobs", "").split(), own_path(form.get("back"))
    if fault := _selection_fault(action, job_ids):
        return _page(visit, action, (), fault, back=back, status=422)
    selected = await _selected(visit, action, list(dict.fromkeys(job_ids)))
    fields = {"back": back, "key": form.get("key", ""), "cap_usd": form.get("cap_usd", "")}
    if line := _form_fault(action, selected, form):
        return _page(
            visit, action, selected, back=back, faults={"cap_usd": line}, cap_usd=fields["cap_usd"], status=422
        )
    failed = [row for row in [await _done(visit, action, row, form) for row in selected] if row.fault]
    return _page(visit, action, failed, **fields, status=409) if failed else redirect_to(back)


def _form_fault(action: str, selected: Sequence[SelectedJob], form: Mapping[str, str]) -> str:
    """Return why the form as a whole is refused; empty: it is not."""
    total = sum((row.job.cap_usd for row in selected if row.effect != NO_EFFECT), ZERO)
    if action == "retry" and form.get("total") != str(total):
        return f"nothing was started: the page showed another sum of caps than {formats.money(total)}; check it"
    try:
        if action == "cap":
            cap_of(form.get("cap_usd", ""))
    except InvalidInput as error:
        return "; ".join(problem.message for problem in error.problems)
    return ""


async def _done(visit: Visit, action: str, row: SelectedJob, form: Mapping[str, str]) -> SelectedJob:
    """Return the row after the action, with the API's line if it failed."""
    if row.effect == NO_EFFECT:
        return row
    fault = ""
    try:
        await ACTIONS[action].run(visit, row.job, form)
    except GpubrokerError as error:
        fault = "; ".join(p.message for p in error.problems) if isinstance(error, InvalidInput) else public_text(error)
    return SelectedJob(job=row.job, word=row.word, shape=row.shape, effect=row.effect, fault=fault)
