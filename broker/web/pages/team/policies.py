"""Policies of the team: list, edit as YAML, dry run on the recorded past, history, delete."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from broker.api.schemas.queries import DryRunQuery
from broker.domain.errors import InvalidInput, StaleVersion
from broker.domain.policy import Policy
from broker.domain.spec import Name
from broker.web.browser import Visit, not_found, redirect_to
from broker.web.formats import money
from broker.web.job_form import as_yaml, yaml_settings
from broker.web.pages.team.layout import by_field, checked, may, removal_page, team_page
from broker.web.routes import Routes

routes = Routes()
NAME = TypeAdapter[str](Name)
TEXT = "yaml"
INSTALLATION = "installation"
"""Query parameter of a policy that has no team."""
DELETE = "/delete"
VERSION_DIGITS = 10
"""Number of digits that no version reaches."""
EDITED = ("edited_name", "edited_team", "edited_version")
"""Hidden fields of the editor: name, team (empty: the installation) and version of the policy that it shows."""
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
"""Maximum number of lines of each effect of a dry run."""


def _named(visit: Visit) -> tuple[str, str | None]:
    """Return (name, team) of the policy that the URL names; team None: the installation. Raises NotFound.

    A URL without a scope means the caller's team, and never the installation.
    """
    query = visit.request.query
    try:
        name = NAME.validate_python(query.get("name", ""))
        team = NAME.validate_python(query.get("team") or visit.caller.team)
    except ValidationError:
        raise not_found("such policy; the list of policies shows yours") from None
    return name, None if query.get(INSTALLATION) == "1" else team


@routes.get("/ui/team/policies")
async def policies(visit: Visit) -> web.Response:
    """Show the policies; with a name in the URL the editor holds that policy, with its history."""
    if "name" not in visit.request.query:
        return await _page(visit)
    name, team = _named(visit)
    versions = await visit.service.policies.exact_history(visit.caller, name, team)
    current = versions[0].policy
    text = "" if current is None else as_yaml(current.model_dump(mode="json", exclude_unset=True))
    opened = dict(zip(EDITED, (name, team or "", str(versions[0].version)), strict=True))
    return await _page(visit, text=text, versions=versions, edited=(name, team), opened=opened)


async def _page(visit: Visit, status: int = 200, **values: Any) -> web.Response:
    rows = await visit.service.policies.policies(visit.caller)
    own = None if visit.caller.admin else visit.caller.team
    editable = {row.id for row in rows if may(visit.caller, "manage") and own in (None, row.policy.team)}
    limits = {row.id: _limits(row.policy) for row in rows}
    addresses = {row.id: [_address(row.policy.name, row.policy.team, page) for page in ("", DELETE)] for row in rows}
    values = {
        "text": EXAMPLE.format(team=visit.caller.team), "versions": (), "edited": None, "run": None, "days": DAYS,
        "shown": SHOWN_EFFECTS, "opened": dict.fromkeys(EDITED, ""),
    } | values  # fmt: skip
    return team_page(
        visit, "policies", status, policies=rows, editable=editable, limits=limits, addresses=addresses, **values
    )


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
    fields: dict[str, Any] = {"text": form.get(TEXT, ""), "days": form.get("days", DAYS)}
    fields["opened"] = {name: form.get(name, "") for name in EDITED}
    try:
        policy = await _policy(visit, form)
        if form.get("do") == "apply":
            stored = await visit.service.policies.apply(visit.caller, policy.name, policy, _replaced(form, policy))
            return redirect_to(_address(stored.policy.name, stored.policy.team))
        days = checked(DryRunQuery, {"days": fields["days"]}).days
        run = await visit.service.policies.dry_run(visit.caller, policy, days)
    except InvalidInput as error:
        return await _page(visit, 422, faults=_lines(error), **fields)
    except StaleVersion as error:
        return await _page(visit, 409, faults={TEXT: str(error)}, **fields)
    return await _page(visit, run=run, **fields)


def _replaced(form: Mapping[str, str], policy: Policy) -> int:
    """Return the version that the editor showed of this policy; 0: it showed none of this name and team."""
    name, team, version = (form.get(field, "") for field in EDITED)
    return _version(version) if (name, team) == (policy.name, policy.team or "") else 0


def _version(text: str) -> int:
    """Return the version that a form's field names; 0: it names none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < VERSION_DIGITS else 0


async def _policy(visit: Visit, form: Mapping[str, str]) -> Policy:
    """Return the policy of the form. Raises InvalidInput."""
    threads = visit.service.quotes.threads.of_team(visit.caller.team)
    return await threads(lambda: checked(Policy, yaml_settings(form.get(TEXT, ""), TEXT)))


def _lines(error: InvalidInput) -> dict[str, str]:
    """Return the faults of the days, and all others as lines of the YAML."""
    faults = by_field(InvalidInput(*(p for p in error.problems if p.field == "days")))
    lines = [f"{p.field}: {p.message}" if p.field not in (TEXT, "body") else p.message for p in error.problems]
    return faults or {TEXT: "\n".join(lines)}


def _address(name: str, team: str | None, page: str = "") -> str:
    """Return the address of a policy. It names the team, or that the policy is the installation's."""
    return f"/ui/team/policies{page}?{urlencode({'name': name} | ({'team': team} if team else {INSTALLATION: '1'}))}"


@routes.get("/ui/team/policies/delete", scope="manage")
async def ask_delete(visit: Visit) -> web.Response:
    """Ask before a policy is deleted."""
    name, team = _named(visit)
    current = (await visit.service.policies.exact_history(visit.caller, name, team))[0]
    if current.policy is None:
        raise not_found("such policy; it was deleted already")
    scope = f"team {team}" if team else "the installation, which limits all teams"
    lines = (
        f"It is the policy of {scope}, version {current.version}.",
        "Its limits end at once: jobs that wait for it may start. Its history stays.",
    )
    title = f"Delete the policy {name} of {f'team {team}' if team else 'the installation'}?"
    fields = {"version": str(current.version)}
    return removal_page(
        visit, title=title, lines=lines, button=f"Delete {name}", back=_address(name, team), fields=fields
    )


@routes.post("/ui/team/policies/delete", scope="manage")
async def delete(visit: Visit) -> web.Response:
    """Delete the version of a policy that the page showed; its history stays."""
    version = _version((await visit.form()).get("version", ""))
    await visit.service.policies.delete_version(visit.caller, *_named(visit), version)
    return redirect_to("/ui/team/policies")
