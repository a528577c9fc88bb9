"""Jobs that await approval: approve or refuse."""

from aiohttp import web

from broker.api.core.problems import Conflict
from broker.api.schemas.policies import Approval
from broker.domain.errors import InvalidInput
from broker.domain.job import JobState
from broker.domain.spec import Usd
from broker.ports import JobFilter
from broker.web.browser import Visit, redirect_to
from broker.web.formats import money
from broker.web.pages.run import job_of_team
from broker.web.pages.team.layout import by_field, checked, removal_page, team_page
from broker.web.routes import Routes

routes = Routes()
SHOWN = 200
UP_TO_CHARACTERS = 40
"""Maximum characters of the field "up to" that are read."""


class ApprovalForm(Approval):
    """Form of an approval."""

    shown_cap: Usd
    """Cap that the page showed."""


@routes.get("/ui/team/approvals")
async def approvals(visit: Visit) -> web.Response:
    """Show the jobs that await approval, newest first."""
    return await _page(visit)


async def _page(visit: Visit, status: int = 200, job_id: str = "", fault: str = "", up_to: str = "") -> web.Response:
    """Return the list. `fault`: the API's line for the form of the job `job_id`."""
    page = await visit.service.jobs(visit.caller, JobFilter(states=(JobState.AWAITING_APPROVAL,), limit=SHOWN), None)
    return team_page(
        visit, "approvals", status, jobs=page.jobs, more=page.next is not None, refused=job_id, fault=fault,
        up_to=up_to,
    )  # fmt: skip


@routes.post("/ui/team/approvals/{job_id}/approve", scope="manage")
async def approve(visit: Visit, job_id: str) -> web.Response:
    """Approve the cap that the page showed, or a higher one in advance."""
    form = await visit.form()
    job = await job_of_team(visit, job_id)
    up_to = form.get("up_to_usd", "").strip().removeprefix("$")[:UP_TO_CHARACTERS]
    try:
        body = checked(ApprovalForm, {"up_to_usd": up_to or None, "shown_cap": form.get("shown_cap")})
        await visit.service.policies.approve(visit.caller, job.id, body.up_to_usd, body.shown_cap)
    except InvalidInput as error:
        return await _page(visit, 422, job.id, by_field(error).get("up_to_usd", str(error)), up_to)
    except Conflict as error:
        return await _page(visit, 409, job.id, str(error))
    return redirect_to("/ui/team/approvals")


@routes.get("/ui/team/approvals/{job_id}/refuse", scope="manage")
async def ask_refuse(visit: Visit, job_id: str) -> web.Response:
    """Ask before a job is refused."""
    job = await job_of_team(visit, job_id)
    if job.state is not JobState.AWAITING_APPROVAL:
        raise Conflict(f"job {job.id} is {job.state} and awaits no approval; see /ui/jobs/{job.id}")
    spent = f"{money(job.spent_usd)} was spent and stays charged" if job.spent_usd else "nothing was spent"
    lines = (f"The job of {job.owner} is cancelled; {spent}. Its owner can submit it again.",)
    return removal_page(
        visit, title=f"Refuse {job.spec.name}?", lines=lines, button="Refuse and cancel", back="/ui/team/approvals"
    )


@routes.post("/ui/team/approvals/{job_id}/refuse", scope="manage")
async def refuse(visit: Visit, job_id: str) -> web.Response:
    """Refuse a job that awaits approval; the job is cancelled."""
    job = await job_of_team(visit, job_id)
    try:
        await visit.service.policies.refuse(visit.caller, job.id)
    except Conflict as error:
        return await _page(visit, 409, job.id, str(error))
    return redirect_to("/ui/team/approvals")
