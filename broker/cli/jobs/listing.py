"""`gpubroker ls`: the table of jobs."""

from typing import Annotated

import typer

from broker.cli.core.command import Form, Json, client, command
from broker.cli.core.durations import TIME_HELP, past
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.views import job_table
from broker.domain.job import RESTING_JOB_STATES, JobState

LIVE = [state for state in JobState if state not in RESTING_JOB_STATES]


@command
async def ls(
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", "-l", metavar="KEY=VALUE", help="Only jobs with this label. Repeatable: all must match."
        ),
    ] = None,
    state: Annotated[
        list[JobState] | None, typer.Option("--state", "-s", help="Only jobs in this state. Repeatable: any may match.")
    ] = None,
    active: Annotated[
        bool, typer.Option("--active", "-a", help="Only jobs that wait, run or recover: all that have not ended.")
    ] = False,
    owner: Annotated[str | None, typer.Option(help="Only jobs of this user. Default: the whole team.")] = None,
    team: Annotated[str | None, typer.Option(help="Only this team (admins only). Default: all teams.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help=f"Submitted since: {TIME_HELP}.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Number of jobs.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="`next` of the previous page.")] = None,
    form: Form = None,
    as_json: Json = False,
) -> None:
    """List your team's jobs, newest first."""
    out = Output(as_json=as_json, form=form)
    labels, states = [_label(text) for text in label or []], _states(state or [], active=active)
    async with client() as c:
        page = await c.jobs(
            labels=labels,
            states=[s.value for s in states],
            team=team,
            owner=owner,
            since=past("--since", since),
            limit=limit,
            cursor=cursor,
        )
    out.document(page)
    filtered = bool(label or states or owner or team or since or cursor)
    out.print(job_table.table(page.items) if page.items else _no_jobs_message(filtered=filtered))
    if page.next:
        out.print(f"older jobs: --cursor {page.next}")


def _states(states: list[JobState], *, active: bool) -> list[JobState]:
    if active and states:
        raise BadInput("--active and --state: choose one")
    return LIVE if active else states


def _no_jobs_message(*, filtered: bool) -> str:
    if filtered:
        return "no job matches; `gpubroker ls` alone lists the newest jobs"
    return "no jobs; `gpubroker submit SPEC.yaml` submits one"


def _label(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f"--label {text}: write KEY=VALUE")
    return f"{key}:{value}"
