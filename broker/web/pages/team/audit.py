"""The audit: every write in the team with its actor, with filters in the URL."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from broker.api.schemas.queries import AuditQuery
from broker.domain.errors import InvalidInput
from broker.ports import AuditFilter
from broker.web.browser import Visit, redirect_to
from broker.web.pages.team.layout import by_field, checked, may, team_page
from broker.web.routes import Routes

routes = Routes()
FILTERS = ("actor", "action", "target", "since", "until")


@routes.get("/ui/team")
async def team(visit: Visit) -> web.Response:
    """Lead to the first tab that the caller may see."""
    return redirect_to("/ui/team/tokens" if may(visit.caller, "manage") else "/ui/team/secrets")


@routes.get("/ui/team/audit", scope="manage")
async def audit(visit: Visit) -> web.Response:
    """Show the writes in the team, newest first; for operators those of all teams."""
    given = visit.request.query
    names = (*FILTERS, "team", "cursor")
    filters = {name: given[name].strip() for name in names if given.get(name, "").strip()}
    values: dict[str, Any] = {"chosen": filters, "filters": FILTERS, "entries": (), "next": None}
    try:
        query = checked(AuditQuery, filters)
        where = AuditFilter(**query.model_dump(exclude={"cursor"}))
        page = await visit.service.tenancy.audit(visit.caller, where, query.cursor)
    except InvalidInput as error:
        return team_page(visit, "audit", 422, **values, faults=by_field(error))
    following = None if page.next is None else urlencode({**filters, "cursor": page.next})
    changes = {entry.id: _change(entry.before, entry.after) for entry in page.entries}
    return team_page(visit, "audit", **(values | {"entries": page.entries, "next": following, "changes": changes}))


def _change(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """Return the fields that differ, one a line; a created or deleted row has all its fields."""
    old_values, new_values = before or {}, after or {}
    lines = []
    for name in sorted({*old_values, *new_values}):
        if old_values.get(name) != new_values.get(name):
            left = f"{_value_text(old_values[name])} → " if name in old_values else ""
            lines.append(f"{name}: {left}{_value_text(new_values[name]) if name in new_values else 'removed'}")
    return "\n".join(lines)


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
