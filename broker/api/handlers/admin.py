"""Handlers: secrets, health, metrics and schemas."""

from aiohttp import web

from broker.api.core.metrics import CONTENT_TYPE
from broker.api.core.problems import NotFound, problem
from broker.api.core.readiness import unready, without_reasons
from broker.api.http.context import AUTH, METRICS, READINESS, SERVICE
from broker.api.http.openapi import Api, Call
from broker.api.schemas import tenancy
from broker.api.schemas.base import Health
from broker.api.schemas.tenancy import SecretList, SecretValue
from broker.domain.errors import Problem
from broker.domain.spec import EnvName, JobSpec

api = Api()

TOKEN_S = 1.0
"""Seconds for which `/readyz` waits for the database to name the caller."""


@api.op("GET", "/v1/me", scope="read")
async def who_am_i(call: Call) -> tenancy.Identity:
    """Show the team, owner and scopes of this token."""
    caller = call.caller
    return tenancy.Identity.model_validate(
        {"team": caller.team, "owner": caller.owner, "scopes": sorted(caller.scopes)}
    )


@api.op("GET", "/v1/secrets", scope="read")
async def list_secrets(call: Call) -> SecretList:
    """List the names of your secrets; values are never shown."""
    secrets = await call.request.app[SERVICE].rows(call.caller).secrets(call.caller.owner)
    return SecretList(names=tuple(sorted(secrets)))


@api.op("PUT", "/v1/secrets/{name}", scope="submit", status=204)
async def set_secret(call: Call, name: EnvName, body: SecretValue) -> None:
    """Store a secret, encrypted. Jobs name it under `secrets` and get it as an environment variable."""
    service = call.request.app[SERVICE]
    await service.rows(call.caller).put_secret(call.caller.owner, name, service.box.seal(body.value))


@api.op("DELETE", "/v1/secrets/{name}", scope="submit", status=204, errors=(404,))
async def delete_secret(call: Call, name: EnvName) -> None:
    """Delete a secret; jobs that wait for it will fail to start."""
    if not await call.request.app[SERVICE].rows(call.caller).delete_secret(call.caller.owner, name):
        raise NotFound(f"no secret {name}; `gpubroker secret ls` lists yours")


@api.op("GET", "/healthz", scope=None)
async def healthz(call: Call) -> Health:
    """Answer that this process is alive."""
    return Health(status="ok")


@api.op("GET", "/readyz", scope=None)
async def readyz(call: Call) -> Health | web.Response:
    """Check database, blob store and broker: 200 if all work, otherwise 503 with the failing parts.

    A wrong clock of this host is reported in `clock` and does not make the daemon unready. The scope `metrics` shows
    the reasons.
    """
    checks = await call.request.app[READINESS].check()
    shown_checks = checks if await _may_know_why(call) else without_reasons(checks)
    wrong = [Problem(field=part, message=text) for part, text in unready(shown_checks).items()]
    if wrong:
        return problem(503, "not ready", wrong)
    return Health(status="ok", checks=shown_checks)


async def _may_know_why(call: Call) -> bool:
    """Return True if the token has the scope `metrics`. Readiness itself needs no token."""
    return await call.request.app[AUTH].has_scope(call.authorization, "metrics", within_s=TOKEN_S)


@api.op("GET", "/metrics", scope="metrics", media=("text/plain",))
async def metrics(call: Call) -> web.Response:
    """Return Prometheus metrics: totals of the whole installation, no ids and no owners."""
    body = await call.request.app[METRICS].render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


@api.op("GET", "/v1/schema/job", scope=None, media=("application/schema+json",))
async def job_schema(call: Call) -> web.Response:
    """Return the JSON Schema of a job's spec, for editors and checks."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **JobSpec.model_json_schema()}
    return web.json_response(schema, content_type="application/schema+json")
