"""Slack's buttons and slash command, carried out with the rights of the linked owner."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import get_args

from broker.api.core.auth import Caller, Forbidden
from broker.api.core.problems import Conflict, NotFound
from broker.api.service.jobs import Service
from broker.api.service.spending import SpendQuery
from broker.domain.errors import InvalidInput, Problem
from broker.domain.formatting import duration
from broker.domain.ids import JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Job, JobState, jobs_meant
from broker.domain.money import format_usd
from broker.domain.spending import SpendBy
from broker.domain.tenancy import Scope
from broker.ports import JobFilter

JOB_ID = re.compile(r"[a-z2-7]{13}")
SEARCHED_JOBS = 200
"""Number of newest jobs among which a name or the start of an id is looked up."""
LIVE_STATES = tuple(state for state in JobState if state not in RESTING_JOB_STATES)
MAX_LINES = 15
"""Maximum number of jobs, attempts or rows of spending in one answer."""
HELP = (
    "/gpubroker status [JOB]: running and waiting jobs, or one job",
    "/gpubroker spend [user|job|team|cloud|gpu|day|month]: dollars of the last 30 days",
    "/gpubroker cancel JOB: save a checkpoint and stop",
    "JOB is an id, the start of one, or a name.",
)


class SlackActions:
    """Actions of Slack users. Each calls the same use cases as HTTP, with the same rights and the same audit."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # --------------------------------------------------------------------------------------------------------- buttons

    async def press(self, caller: Caller, action: str, value: str) -> tuple[JobId, str]:
        """Return (the job, the result in one line).

        Raises Conflict if the job has changed, and errors of the use cases.
        """
        if action not in BUTTONS:
            raise NotFound("this button is of another version of gpubroker; look at the job again")
        scope, act = BUTTONS[action]
        require(caller, scope)
        job_id, _, rest = value.partition(":")
        if not JOB_ID.fullmatch(job_id):
            raise InvalidInput(Problem(field="value", message="names no job; look at the job again"))
        job = await self._service.job(caller, JobId(job_id))
        return job.id, await act(self, caller, job, rest)

    async def _approve(self, caller: Caller, job: Job, rest: str) -> str:
        _still_waits(job)
        _still_capped(job, *_caps(rest, 1))
        await self._service.policies.approve(caller, job.id, None, job.cap_usd)
        return f"{job.spec.name} is approved up to {format_usd(job.cap_usd)}"

    async def _refuse(self, caller: Caller, job: Job, rest: str) -> str:
        _still_waits(job)
        await self._service.policies.refuse(caller, job.id)
        return f"{job.spec.name} is refused"

    async def _extend(self, caller: Caller, job: Job, rest: str) -> str:
        shown_cap_usd, new_cap_usd = _caps(rest, 2)
        _still_capped(job, shown_cap_usd)
        await self._service.raise_cap(caller, job.id, new_cap_usd)
        return f"the cap of {job.spec.name} is {format_usd(new_cap_usd)} now"

    async def _cancel(self, caller: Caller, job: Job, rest: str) -> str:
        stopped = await self._service.cancel(caller, job.id)
        return f"{job.spec.name} is {'cancelled' if stopped.state is JobState.CANCELLED else 'stopping'}"

    async def _retry(self, caller: Caller, job: Job, rest: str) -> str:
        """Retry a job. Repeated clicks on one button create one job."""
        retry, new_job = await self._service.retry(caller, job.id, resume=True, key=f"slack-retry-{job.id}")
        verb = "continues" if new_job else "already continues"
        return f"{job.spec.name} {verb} as job {retry.id}, cap {format_usd(retry.cap_usd)}"

    # --------------------------------------------------------------------------------------------------------- command

    async def command(self, caller: Caller, text: str) -> Sequence[str]:
        """Return the lines of the answer. Raises errors of the use cases."""
        words = text.split()
        if not words or words[0].lower() not in COMMANDS:
            return HELP
        scope, act = COMMANDS[words[0].lower()]
        require(caller, scope)
        return await act(self, caller, words[1:])

    async def _status(self, caller: Caller, words: list[str]) -> Sequence[str]:
        if words:
            job = await self._find_job(caller, words[0])
            return _detail(job, await self._service.attempts(caller, job))
        page = await self._service.jobs(caller, JobFilter(states=LIVE_STATES, limit=SEARCHED_JOBS), None)
        if not page.jobs:
            return ("nothing runs or waits",)
        hidden = len(page.jobs) - MAX_LINES
        return [*map(_line, page.jobs[:MAX_LINES]), *([f"and {hidden} more"] if hidden > 0 else [])]

    async def _spend(self, caller: Caller, words: list[str]) -> Sequence[str]:
        by = words[0].lower() if words else "user"
        if by not in get_args(SpendBy):
            raise InvalidInput(Problem(field="spend", message=f"by {', '.join(get_args(SpendBy))}, not {by}"))
        window, report = await self._service.spending.spend(caller, SpendQuery(by=by))  # type: ignore[arg-type] # checked
        rows = [f"{row.key}: {format_usd(row.usd)}" for row in report.rows[:MAX_LINES]]
        total = f"{format_usd(report.total.usd)} since {window.since:%Y-%m-%d}"
        lost_cost = [f"{format_usd(report.total.lost_usd)} of it was lost work"] if report.total.lost_usd else []
        return [total, *rows, *lost_cost]

    async def _cancel_command(self, caller: Caller, words: list[str]) -> Sequence[str]:
        if not words:
            return HELP
        return [await self._cancel(caller, await self._find_job(caller, words[0], writes=True), "")]

    async def _find_job(self, caller: Caller, text: str, *, writes: bool = False) -> Job:
        """Return the job with this id. With the scope `read`, `text` may also be a prefix of an id, or a name.

        Prefixes and names are searched among the newest `SEARCHED_JOBS` jobs, live jobs and own jobs. A name means the
        caller's live job, otherwise the caller's newest; see `jobs_meant` for other owners' jobs.

        Raises NotFound, Forbidden; InvalidInput for an ambiguous text.
        """
        if JOB_ID.fullmatch(text):
            try:
                return await self._service.job(caller, JobId(text))
            except NotFound:
                if not may(caller, "read") or not (named := await self._jobs_meant(caller, text, writes=writes)):
                    raise
                matches = named
        else:
            require(caller, "read")
            matches = await self._jobs_meant(caller, text, writes=writes)
        if not matches:
            raise NotFound(f"no job {text} among the newest {SEARCHED_JOBS}; /gpubroker status lists what runs")
        if len(matches) > 1:
            ids = ", ".join(job.id for job in matches[:5])
            raise InvalidInput(Problem(field=text, message=f"means {len(matches)} jobs ({ids}); give the id"))
        return matches[0]

    async def _jobs_meant(self, caller: Caller, text: str, *, writes: bool) -> Sequence[Job]:
        filters = (
            JobFilter(limit=SEARCHED_JOBS),
            JobFilter(team=caller.team, owner=caller.owner, limit=SEARCHED_JOBS),
            JobFilter(states=LIVE_STATES, limit=SEARCHED_JOBS),
        )
        pages = [await self._service.jobs(caller, where, None) for where in filters]
        by_id = {job.id: job for page in pages for job in page.jobs}
        jobs = sorted(by_id.values(), key=lambda job: (job.created_at, job.id), reverse=True)
        by_prefix = [job for job in jobs if job.id.startswith(text)]
        named = [job for job in jobs if job.spec.name == text]
        return by_prefix or jobs_meant(named, caller.team, caller.owner, writes=writes)


Button = Callable[[SlackActions, Caller, Job, str], Awaitable[str]]
Command = Callable[[SlackActions, Caller, list[str]], Awaitable[Sequence[str]]]
# The scope of each button is that of HTTP. It is checked before the job is looked up.
BUTTONS: Mapping[str, tuple[Scope, Button]] = {
    "gpubroker.approve": ("manage", SlackActions._approve),
    "gpubroker.refuse": ("manage", SlackActions._refuse),
    "gpubroker.extend": ("submit", SlackActions._extend),
    "gpubroker.cancel": ("submit", SlackActions._cancel),
    "gpubroker.retry": ("submit", SlackActions._retry),
}
COMMANDS: Mapping[str, tuple[Scope, Command]] = {
    "status": ("read", SlackActions._status),
    "spend": ("read", SlackActions._spend),
    "cancel": ("submit", SlackActions._cancel_command),
}


def may(caller: Caller, scope: Scope) -> bool:
    return scope in caller.scopes or caller.admin


def require(caller: Caller, scope: Scope) -> None:
    """Raise Forbidden if the caller lacks a scope."""
    if not may(caller, scope):
        raise Forbidden(f"your link lacks the scope {scope!r}; ask a user with the scope 'manage' to link you with it")


def _still_waits(job: Job) -> None:
    if job.state is not JobState.AWAITING_APPROVAL:
        raise Conflict(f"{job.spec.name} awaits no approval; it is {job.state.value}")


def _still_capped(job: Job, shown_cap_usd: Decimal) -> None:
    if job.cap_usd != shown_cap_usd:
        raise Conflict(f"the cap of {job.spec.name} is {format_usd(job.cap_usd)} by now; nothing was changed")


def _caps(text: str, count: int) -> list[Decimal]:
    """Return `count` caps: the cap when the button was created, and for 2 also the offered cap. Raises InvalidInput."""
    try:
        caps = [Decimal(part) for part in text.split(":")]
    except InvalidOperation:
        caps = []
    if len(caps) != count or not all(cap.is_finite() for cap in caps):
        raise InvalidInput(Problem(field="value", message="names no caps; look at the job again"))
    return caps


def _line(job: Job) -> str:
    reason = f" ({job.reason})" if job.reason else ""
    money = f"{format_usd(job.spent_usd)} of {format_usd(job.cap_usd)}"
    return f"{job.spec.name} {job.id}: {job.state.value.replace('_', ' ')}{reason}, {money}, {job.owner}"


def _detail(job: Job, attempts: Sequence[Attempt]) -> Sequence[str]:
    lines = [_line(job)]
    for run in attempts[-MAX_LINES:]:
        offer = run.line.offer
        where = f"{offer.cloud} {offer.region} {offer.gpus}x {offer.accelerator}"
        beat = f", step {run.beat.step}/{run.beat.total_steps}" if run.beat and run.beat.total_steps else ""
        why = run.reason.value if run.reason else run.state.value
        took = f", {duration((run.ended_at - run.created_at).total_seconds())}" if run.ended_at else ""
        lines.append(f"{run.number}. {where}: {why}{beat}{took}, {format_usd(run.charged_usd)}")
    return lines
