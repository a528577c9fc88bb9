"""Policies of the team: list, edit as YAML, dry run on the recorded past, history, delete."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from broker.api.schemas.queries import DryRunQuery
from broker.domain.errors import InvalidInput
from broker.domain.policy import Policy
from broker.domain.spec import Name
from broker.web.browser import Visit, not_found, see
from broker.web.formats import money
from broker.web.job_form import as_yaml, yaml_settings
from broker.web.pages.team.layout import ask, by_field, checked, may, team_page
from broker.web.routes import Routes

routes = Routes()
NAME = TypeAdapter[str](Name)
TEXT = "yaml"
EXAMPLE = """name: monthly
team: {team}
budgets:
  - limit_usd: 500
    per: month
    thresholds:
      - at: 0.8
        action: notify
approval_above_usd: 100
"""
"""Policy that the empty editor shows."""
DAYS = "30"
SHOWN_EFFECTS = 100
"""Most lines of each effect of a dry run."""


def _named(visit: Visit) -> tuple[str, str | None]:
    """Return (name, team or None) of the policy that the URL names. Raises NotFound for texts that are no names."""
    query = visit.request.query
    try:
        name = NAME.validate_python(query.get("name", ""))
        team = NAME.validate_python(query["team"]) if query.get("team") else None
    except ValidationError:
        raise not_found("such policy; the list of policies shows yours") from None
    return name, team


@routes.get("/ui/team/policies")
async def policies(visit: Visit) -> web.Response:
    """Show the policies; with a name in the URL the editor holds that policy, with its history."""
    if "name" not in visit.request.query:
        return await _page(visit)
    name, team = _named(visit)
    versions = await visit.service.policies.history(visit.caller, name, team)
    current = versions[0].policy
    text = "" if current is None else as_yaml(current.model_dump(mode="json", exclude_unset=True))
    return await _page(visit, text=text, versions=versions, edited=(name, team))


async def _page(visit: Visit, status: int = 200, **values: Any) -> web.Response:
    rows = await visit.service.policies.policies(visit.caller)
    own = None if visit.caller.admin else visit.caller.team
    editable = {row.id for row in rows if may(visit.caller, "manage") and own in (None, row.policy.team)}
    limits = {row.id: _limits(row.policy) for row in rows}
    values = {
        "text": EXAMPLE.format(team=visit.caller.team), "versions": (), "edited": None, "run": None, "days": DAYS,
        "shown": SHOWN_EFFECTS,
    } | values  # fmt: skip
    return team_page(visit, "policies", status, policies=rows, editable=editable, limits=limits, **values)


def _limits(policy: Policy) -> list[str]:
    """Return each limit of a policy in a few words."""
    texts = [f"{money(budget.limit_usd)} per {budget.per}" for budget in policy.budgets]
    texts += [
        f"{count} {what}" for count, what in ((policy.max_gpus, "GPUs"), (policy.max_jobs, "jobs")) if count is not None
    ]
    if policy.approval_above_usd is not None:
        texts.append(f"approval above {money(policy.approval_above_usd)}")
    return [*texts, *(["idle machines"] if policy.idle is not None else [])]


@routes.post("/ui/team/policies", scope="manage")
async def send(visit: Visit) -> web.Response:
    """Apply the policy of the form, or only show what it would have done."""
    form = await visit.form()
    shown: dict[str, Any] = {"text": form.get(TEXT, ""), "days": form.get("days", DAYS)}
    try:
        policy = await _policy(visit, form)
        if form.get("do") == "apply":
            stored = await visit.service.policies.apply(visit.caller, policy.name, policy)
            return see(_address(stored.policy.name, stored.policy.team))
        days = checked(DryRunQuery, {"days": shown["days"]}).days
        run = await visit.service.policies.dry_run(visit.caller, policy, days)
    except InvalidInput as error:
        return await _page(visit, 422, faults=_lines(error), **shown)
    return await _page(visit, run=run, **shown)


async def _policy(visit: Visit, form: Mapping[str, str]) -> Policy:
    """Return the policy of the form. Raises InvalidInput."""
    threads = visit.service.quotes.threads.of_team(visit.caller.team)
    given = await threads(lambda: yaml_settings(form.get(TEXT, ""), TEXT))
    return checked(Policy, given)


def _lines(error: InvalidInput) -> dict[str, str]:
    """Return the faults of the days, and all others as lines of the YAML."""
    faults = by_field(InvalidInput(*(p for p in error.problems if p.field == "days")))
    lines = [f"{p.field}: {p.message}" if p.field not in (TEXT, "body") else p.message for p in error.problems]
    return faults or {TEXT: "\n".join(lines)}


def _address(name: str, team: str | None, page: str = "") -> str:
    return f"/ui/team/policies{page}?{urlencode({'name': name} | ({'team': team} if team else {}))}"


@routes.get("/ui/team/policies/delete", scope="manage")
async def ask_delete(visit: Visit) -> web.Response:
    """Ask before a policy is deleted."""
    name, team = _named(visit)
    await visit.service.policies.history(visit.caller, name, team)
    lines = ("Its limits end at once: jobs that wait for it may start. Its history stays.",)
    return ask(
        visit, title=f"Delete the policy {name}?", lines=lines, button=f"Delete {name}", back=_address(name, team)
    )


@routes.post("/ui/team/policies/delete", scope="manage")
async def delete(visit: Visit) -> web.Response:
    """Delete a policy; its history stays."""
    await visit.service.policies.delete(visit.caller, *_named(visit))
    return see("/ui/team/policies")
