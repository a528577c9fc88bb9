"""Operations declared once: routing, authentication, validation and the OpenAPI 3.1 document.

A handler is `async def name(call: Call, [path parameters], [query], [body]) -> Model | StreamResponse`. Its type hints
are both checked and published.
"""

import asyncio
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDict
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema

from broker.api.core import problems
from broker.api.core.auth import Authenticator, Caller
from broker.api.core.body_limits import check_json_values
from broker.api.http.context import SERVICE, STREAMS
from broker.api.schemas.base import ProblemView
from broker.api.schemas.queries import HEADERS
from broker.domain.errors import InvalidInput
from broker.domain.errors import Problem as Fault
from broker.domain.tenancy import Scope
from trainer.contract.validation_messages import value_error_message

JSON = "application/json"
BODY_S = 30.0
"""Seconds that a body of a few MB may take to arrive; uploads have their own limit."""
ANONYMOUS = Caller(team="", owner="", scopes=frozenset(), token_id="")
TEXT: dict[int, str] = {
    400: "The request cannot be read: its head is too long or malformed, or its body is not JSON.",
    401: "No valid bearer token.",
    403: "The token lacks the scope.",
    404: "It does not exist, or is another team's.",
    409: "The state does not allow this, or the idempotency key was used with another body.",
    410: "It was deleted; the answer names the date.",
    413: "Too many bytes.",
    415: "Another content type is needed.",
    422: "Something in the input is wrong; `errors` names each place and the fix.",
    429: "Too many calls, or too much at once; `Retry-After` says when to ask again.",
    502: "The blob store holds other bytes than the manifest says.",
    503: "The database or the blob store cannot be reached, or too many requests run; see `Retry-After`.",
    507: "The daemon's disk has no space for the upload.",
}


STREAMED: dict[str, dict[str, Any]] = {
    "text/event-stream": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
        "required": ["event", "data"],
    },
    "application/schema+json": {"type": "object"},
    "text/plain": {"type": "string"},
    "application/octet-stream": {"type": "string"},
}
"""Schema of an answer that is not a model, by content type; of a stream, the schema of each event."""


BYTES = {"type": "string"}
SENT: dict[str, dict[str, Any]] = {
    "application/x-www-form-urlencoded": {"type": "object", "additionalProperties": {"type": "string"}}
}
"""Schema of a body that a handler reads itself, by content type; otherwise BYTES."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One authenticated request."""

    request: web.Request
    caller: Caller
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    """Headers added to a JSON answer."""

    @property
    def authorization(self) -> str | None:
        """The caller's Authorization header, for later checks of an open stream."""
        return self.request.headers.get("Authorization")


Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    method: str
    path: str
    handler: Handler
    scope: Scope | None
    """Scope that the token needs; None: no token is needed."""
    status: int
    errors: tuple[int, ...]
    media: tuple[str, ...]
    """Content types of an answer that is not a model."""
    upload: str | None
    """Content type of a streamed body, which the handler reads itself; None: no such body."""
    headers: tuple[str, ...]
    """Request headers that the handler reads."""
    params: dict[str, TypeAdapter[Any]]
    query: type[BaseModel] | None
    body: type[BaseModel] | None
    out: type[BaseModel] | None


class Api:
    """Operations of one resource. `mount` adds them to an application."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def op(
        self,
        method: str,
        path: str,
        *,
        scope: Scope | None,
        status: int = 200,
        errors: tuple[int, ...] = (),
        media: tuple[str, ...] = (),
        upload: str | None = None,
        headers: tuple[str, ...] = (),
    ) -> Callable[[Handler], Handler]:
        """Declare the decorated handler as an operation; see `Operation`."""

        def declare(handler: Handler) -> Handler:
            hints = typing.get_type_hints(handler, include_extras=True)
            answers = typing.get_args(hints["return"]) or (hints["return"],)
            operation = Operation(
                method=method,
                path=path,
                handler=handler,
                scope=scope,
                status=status,
                errors=errors,
                media=media,
                upload=upload,
                headers=headers,
                params={name: TypeAdapter(hints[name]) for name in re.findall(r"{(\w+)", path)},
                query=hints.get("query"),
                body=hints.get("body"),
                out=next((a for a in answers if isinstance(a, type) and issubclass(a, BaseModel)), None),
            )
            self.operations.append(operation)
            return handler

        return declare


def mount(app: web.Application, apis: Sequence[Api], auth: Authenticator) -> None:
    for api in apis:
        for operation in api.operations:
            app.router.add_route(operation.method, operation.path, _serve(operation, auth))


def _serve(op: Operation, auth: Authenticator) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def serve(request: web.Request) -> web.StreamResponse:
        authorization = request.headers.get("Authorization")
        caller = ANONYMOUS if op.scope is None else await auth.caller(authorization, op.scope)
        with _slot(op, request, caller):
            return await _answer(op, request, caller)

    return serve


def _slot(op: Operation, request: web.Request, caller: Caller) -> AbstractContextManager[None]:
    """Return the count of a request of a team. Streams have limits of their own."""
    is_stream = bool(op.media or op.upload) and request.query.get("follow") != "0"
    if op.scope is None or is_stream:
        return nullcontext()
    return request.app[STREAMS].requests.request(caller.team, body_size(request))


def body_size(request: web.Request) -> int | None:
    """Return the number of bytes of a body; None: the sender does not say."""
    return request.content_length if request.body_exists else 0


async def _answer(op: Operation, request: web.Request, caller: Caller) -> web.StreamResponse:
    for name in op.headers:
        _check_header(name, request)
    arguments: dict[str, Any] = {name: _param(name, kind, request) for name, kind in op.params.items()}
    if op.query is not None:
        arguments["query"] = _query(op.query, request)
    if op.body is not None:
        if request.content_type != JSON:
            return problems.problem(415, f"send {JSON}, not {request.content_type}")
        raw = await whole_body(request)
        check_json_values(raw)
        try:
            arguments["body"] = op.body.model_validate_json(raw, strict=True)
        except ValidationError as error:
            return _not_json(error, op.body, raw)
    call = Call(request=request, caller=caller)
    answer = await op.handler(call, **arguments)
    if isinstance(answer, web.StreamResponse):
        return answer
    if answer is None:
        return web.Response(status=op.status, headers=call.headers)
    body = answer.model_dump_json().encode()
    return web.Response(status=op.status, body=body, content_type=JSON, headers=call.headers)


async def whole_body(request: web.Request) -> bytes:
    """Return the whole body. Raises InvalidInput if it does not arrive in time."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise InvalidInput(Fault(field="body", message=f"did not come within {BODY_S:g} s; send it again")) from None


def _not_json(error: ValidationError, model: type[BaseModel], raw: bytes) -> web.Response:
    """Return the problem of a body that is not JSON. Raises InvalidInput if the body is JSON that breaks a rule."""
    wrong = problems.of_json(error, model, raw)
    if wrong is not None:
        raise wrong from None
    return problems.problem(400, f"the body is not JSON: {error.errors(include_url=False)[0]['ctx']['error']}")


def _check_header(name: str, request: web.Request) -> None:
    text, rule = request.headers.get(name), HEADERS[name]
    if text is not None and not (len(text) <= rule["maxLength"] and re.fullmatch(rule["pattern"], text)):
        message = f"must be at most {rule['maxLength']} visible ASCII characters; correct it, or leave it out"
        raise InvalidInput(Fault(field=name, message=message))


def _param(name: str, kind: TypeAdapter[Any], request: web.Request) -> Any:
    try:
        return kind.validate_python(request.match_info[name])
    except ValidationError as error:
        raise InvalidInput(Fault(field=name, message=value_error_message(error))) from None


def _query(model: type[BaseModel], request: web.Request) -> BaseModel:
    """Return the validated query. Raises InvalidInput also for unknown parameters and for repeated single values."""
    content: dict[str, Any] = {}
    for name in dict.fromkeys(request.query):
        values = request.query.getall(name)
        model_field = model.model_fields.get(name)
        if model_field is not None and typing.get_origin(model_field.annotation) is tuple:
            content[name] = values
        elif len(values) > 1:
            raise InvalidInput(Fault(field=name, message="is given more than once; give it once"))
        else:
            content[name] = values[0]
    try:
        return model.model_validate(content, context={"now": request.app[SERVICE].clock.now()})
    except ValidationError as error:
        raise problems.invalid_input_of(error, model, content, root="query") from None


# ----------------------------------------------------------------------------------------------------------- document


def document(apis: Sequence[Api], *, version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1.0 description of all operations."""
    operations = [o for api in apis for o in api.operations]
    documented: dict[tuple[type[BaseModel], typing.Literal["validation", "serialization"]], None] = {
        (ProblemView, "serialization"): None
    }
    for o in operations:
        if o.body is not None:
            documented[o.body, "validation"] = None
        if o.out is not None:
            documented[o.out, "serialization"] = None
    refs, definitions = models_json_schema(list(documented), ref_template="#/components/schemas/{model}")
    schemas = definitions["$defs"]
    paths: dict[str, dict[str, Any]] = {}
    for o in operations:
        path = re.sub(r"{(\w+):[^}]*}", r"{\1}", o.path)
        paths.setdefault(path, {})[o.method.lower()] = _operation(o, refs, schemas)
    licence = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "gpubroker", "version": version, "license": licence},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(o: Operation, refs: dict[Any, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    doc = inspect.getdoc(o.handler) or ""
    described: dict[str, Any] = {
        "operationId": o.handler.__name__,
        "summary": doc.split("\n", 1)[0],
        "description": doc,
        "security": [{"bearer": []}] if o.scope is not None else [],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": kind.json_schema()}
            for name, kind in o.params.items()
        ],
        "responses": _responses(o, refs),
    }
    if o.query is not None:
        schema = o.query.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.get("$defs", {}))
        described["parameters"] += [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": part,
             "description": part.get("description", "")}
            for name, part in schema["properties"].items()
        ]  # fmt: skip
    described["parameters"] += [
        {"name": name, "in": "header", "required": False, "schema": HEADERS[name]} for name in o.headers
    ]
    if o.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": refs[o.body, "validation"]}}}
    elif o.upload is not None:
        described["requestBody"] = {"required": True, "content": {o.upload: {"schema": SENT.get(o.upload, BYTES)}}}
    return described


def _responses(o: Operation, refs: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": STREAMED[kind]} for kind in o.media}
    if o.out is not None:
        content[JSON] = {"schema": refs[o.out, "serialization"]}
    good: dict[str, Any] = {"description": "Done."}
    if content:
        good["content"] = content
    refusal = {"schema": refs[ProblemView, "serialization"]}
    return {str(o.status): good} | {
        str(status): {"description": TEXT[status], "content": {problems.MEDIA_TYPE: refusal}}
        for status in sorted(_errors(o))
        if status != o.status
    }


def _errors(o: Operation) -> set[int]:
    statuses = {400, 503, *o.errors}
    if o.scope is not None:
        statuses |= {401, 403, 429}
    if o.body is not None or o.upload is not None:
        statuses |= {413, 415, 422}
    if o.upload is not None:
        statuses.add(507)
    if o.params or o.query is not None or o.headers:
        statuses.add(422)
    return statuses
