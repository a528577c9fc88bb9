"""The caller's secrets by name: list, set and delete. No page shows a value."""

from typing import Any

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from broker.api.core.problems import NotFound
from broker.api.schemas.tenancy import SecretValue
from broker.domain.errors import InvalidInput
from broker.domain.spec import EnvName
from broker.web.browser import Visit, not_found, redirect_to
from broker.web.pages.team.layout import ECHOED_CHARACTERS, by_field, checked, removal_page, team_page
from broker.web.routes import Routes

routes = Routes()
NAME = TypeAdapter[str](EnvName)


class SecretForm(SecretValue):
    """Form of a secret."""

    name: EnvName


@routes.get("/ui/team/secrets")
async def secrets(visit: Visit) -> web.Response:
    """Show the names of the caller's secrets."""
    return await _page(visit)


async def _page(visit: Visit, status: int = 200, name: str = "", **values: Any) -> web.Response:
    names = sorted(await visit.service.rows(visit.caller).secrets(visit.caller.owner))
    return team_page(visit, "secrets", status, names=names, name=name, **values)


@routes.post("/ui/team/secrets")
async def store_secret(visit: Visit) -> web.Response:
    """Store a secret, encrypted; a stored one of that name is replaced."""
    form = await visit.form()
    name = form.get("name", "").strip()
    try:
        body = checked(SecretForm, {"name": name, "value": form.get("value", "")})
    except InvalidInput as error:
        return await _page(visit, 422, name[:ECHOED_CHARACTERS], faults=by_field(error))
    sealed = visit.service.box.seal(body.value)
    await visit.service.rows(visit.caller).put_secret(visit.caller.owner, body.name, sealed)
    return redirect_to("/ui/team/secrets")


def _no_secret() -> NotFound:
    return not_found("such secret; the list of secrets shows yours")


def _name(text: str) -> str:
    """Return the name of a secret. Raises NotFound for a text that is not a name."""
    try:
        return NAME.validate_python(text)
    except ValidationError:
        raise _no_secret() from None


@routes.get("/ui/team/secrets/{name}/delete", scope="submit")
async def ask_delete(visit: Visit, name: str) -> web.Response:
    """Ask before a secret is deleted."""
    name = _name(name)
    if name not in await visit.service.rows(visit.caller).secrets(visit.caller.owner):
        raise _no_secret()
    lines = ("Its value cannot be restored. Jobs that wait for it will fail to start; running jobs keep it.",)
    return removal_page(visit, title=f"Delete {name}?", lines=lines, button=f"Delete {name}", back="/ui/team/secrets")


@routes.post("/ui/team/secrets/{name}/delete")
async def delete(visit: Visit, name: str) -> web.Response:
    """Delete a secret."""
    if not await visit.service.rows(visit.caller).delete_secret(visit.caller.owner, _name(name)):
        raise _no_secret()
    return redirect_to("/ui/team/secrets")
