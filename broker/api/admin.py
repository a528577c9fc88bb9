"""Handlers: secrets, tokens, health, metrics and descriptions."""

from typing import Annotated

from aiohttp import web
from pydantic import Field

from broker.api import models
from broker.api.auth import hashed, mint
from broker.api.context import AUTH, METRICS, READINESS, SERVICE
from broker.api.metrics import CONTENT_TYPE
from broker.api.openapi import Api, Call
from broker.api.problems import NotFound, problem
from broker.domain.errors import Problem
from broker.domain.spec import EnvName, JobSpec
from broker.ports import Token

api = Api()
TokenId = Annotated[str, Field(pattern=r"^[a-z2-7]{8}$")]


@api.op("GET", "/v1/me", scope="read")
async def who_am_i(call: Call) -> models.Identity:
    """Whom this token belongs to and what it may do."""
    caller = call.caller
    return models.Identity.model_validate({"owner": caller.owner, "scopes": sorted(caller.scopes)})


@api.op("GET", "/v1/secrets", scope="read")
async def list_secrets(call: Call) -> models.SecretList:
    """Names of your secrets; values are never shown."""
    found = await call.request.app[SERVICE].rows(call.caller).secrets(call.caller.owner)
    return models.SecretList(names=tuple(sorted(found)))


@api.op("PUT", "/v1/secrets/{name}", scope="submit", status=204)
async def set_secret(call: Call, name: EnvName, body: models.SecretValue) -> None:
    """Store a secret, encrypted; jobs name it under `secrets` and see it as an environment variable."""
    service = call.request.app[SERVICE]
    await service.rows(call.caller).put_secret(call.caller.owner, name, service.box.seal(body.value))


@api.op("DELETE", "/v1/secrets/{name}", scope="submit", status=204, errors=(404,))
async def delete_secret(call: Call, name: EnvName) -> None:
    """Forget a secret; jobs that wait for it will fail to start."""
    if not await call.request.app[SERVICE].rows(call.caller).delete_secret(call.caller.owner, name):
        raise NotFound(f"no secret {name}; GET /v1/secrets lists yours")


@api.op("GET", "/v1/tokens", scope="admin")
async def list_tokens(call: Call) -> models.TokenList:
    """All tokens, without their secrets."""
    tokens = await call.request.app[SERVICE].rows(call.caller).tokens()
    return models.TokenList(items=tuple(models.TokenView.model_validate(t) for t in tokens))


@api.op("POST", "/v1/tokens", scope="admin", status=201)
async def create_token(call: Call, body: models.TokenRequest) -> models.TokenCreated:
    """Make a token; it is shown in this answer only."""
    service = call.request.app[SERVICE]
    token_id, text = mint(service.entropy)
    scopes = tuple(dict.fromkeys(body.scopes))
    token = Token(id=token_id, owner=body.owner, scopes=scopes, created_at=service.clock.now(), note=body.note)
    await service.rows(call.caller).put_token(token, hashed(text))
    view = models.TokenView.model_validate(token)
    return models.TokenCreated(**view.model_dump(), token=text)


@api.op("DELETE", "/v1/tokens/{token_id}", scope="admin", status=204, errors=(404,))
async def delete_token(call: Call, token_id: TokenId) -> None:
    """Revoke a token: at once here, within seconds at other brokers."""
    if not await call.request.app[SERVICE].rows(call.caller).delete_token(token_id):
        raise NotFound(f"no token {token_id}; GET /v1/tokens lists them")
    call.request.app[AUTH].forget()


@api.op("GET", "/healthz", scope=None)
async def healthz(call: Call) -> models.Health:
    """This process answers."""
    return models.Health(status="ok")


@api.op("GET", "/readyz", scope=None)
async def readyz(call: Call) -> models.Health | web.Response:
    """Database, blob store and a broker at work: 200 when all are there, else 503 with what is wrong."""
    checks = await call.request.app[READINESS].check()
    wrong = [Problem(field=part, message=text) for part, text in checks.items() if text != "ok"]
    if wrong:
        return problem(503, "not ready", wrong)
    return models.Health(status="ok", checks=checks)


@api.op("GET", "/metrics", scope=None, media=("text/plain",))
async def metrics(call: Call) -> web.Response:
    """Prometheus metrics: totals only, no ids and no owners."""
    body = await call.request.app[METRICS].render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


@api.op("GET", "/v1/schema/job", scope=None, media=("application/schema+json",))
async def job_schema(call: Call) -> web.Response:
    """The JSON Schema of a job's spec, for editors and checks."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **JobSpec.model_json_schema()}
    return web.json_response(schema, content_type="application/schema+json")
