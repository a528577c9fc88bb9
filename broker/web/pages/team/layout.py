"""Parts that the team's pages share: tabs, checked forms, and the page that asks before something is removed."""

from collections.abc import Mapping
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from broker.api.core import problems
from broker.api.core.auth import Caller
from broker.domain.errors import InvalidInput
from broker.domain.tenancy import Scope
from broker.web.browser import Visit

ECHOED_CHARACTERS = 1000
NO_FIELDS: Mapping[str, str] = {}
Model = TypeVar("Model", bound=BaseModel)
TABS: tuple[tuple[str, str, Scope], ...] = (
    ("tokens", "Tokens", "manage"),
    ("secrets", "Secrets", "read"),
    ("channels", "Channels", "manage"),
    ("policies", "Policies", "read"),
    ("approvals", "Approvals", "read"),
    ("audit", "Audit", "manage"),
)
"""Path, label and needed scope of each tab."""


def may(caller: Caller, scope: Scope) -> bool:
    return caller.admin or scope in caller.scopes


def team_page(visit: Visit, tab: str, status: int = 200, **values: Any) -> web.Response:
    """Return a tab of the team's pages. `faults`: the API's line for each field of a form that was refused."""
    values.setdefault("faults", {})
    tabs = [(path, label) for path, label, scope in TABS if may(visit.caller, scope)]
    return visit.page(
        f"team_{tab}.html", status, tab=tab, tabs=tabs, can_manage=may(visit.caller, "manage"),
        can_submit=may(visit.caller, "submit"), **values,
    )  # fmt: skip


def removal_page(
    visit: Visit,
    *,
    title: str,
    lines: tuple[str, ...],
    button: str,
    back: str,
    fields: Mapping[str, str] = NO_FIELDS,
) -> web.Response:
    """Return the page that says what a removal does. Its button sends `fields` as a POST to this page's address."""
    return visit.page("team_ask.html", title=title, lines=lines, button=button, back=back, fields=fields)


def checked(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """Return the validated form. Raises InvalidInput."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise problems.invalid_input_of(error, model, fields) from None


def echoed(form: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a refused form as its page shows them again, without the rest of long ones."""
    return {name: text[:ECHOED_CHARACTERS] for name, text in form.items()}


def by_field(error: InvalidInput) -> dict[str, str]:
    """Return the API's first line for each field; the field of a nested setting is its last word."""
    lines: dict[str, str] = {}
    for fault in error.problems:
        parts = [part for part in fault.field.split(".") if not part.isdigit()]
        name = parts[-1] if parts and parts[0] in ("config", "secrets") else parts[0] if parts else "body"
        lines.setdefault(name, fault.message)
    return lines
