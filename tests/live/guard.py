"""Guard that lets only the listed read calls leave this process, so that nothing can be bought, changed or destroyed.

The guard patches aiohttp's sessions (RunPod, Vast, Lambda) and botocore's endpoints (AWS), which all requests use. It
passes each answer to `Tap` before the provider gets it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from unittest import mock

import aiohttp
from graphql import GraphQLError, OperationDefinitionNode, OperationType, parse
from yarl import URL

from providers.common.http_json import Rest
from tests.live.calls import CALLS

GRAPHQL = ("POST", "/graphql")
"""RunPod: queries only."""
READS = frozenset((call.verb, call.target) for cloud in ("runpod", "vast", "lambda") for call in CALLS[cloud]) - {
    GRAPHQL
}
AWS_READS = frozenset((call.verb, call.target) for call in CALLS["aws"])
AWS_LOGINS = frozenset(
    {
        ("sts", "AssumeRole"), ("sts", "AssumeRoleWithWebIdentity"), ("sso", "GetRoleCredentials"),
        ("sso-oidc", "CreateToken"), ("signin", "CreateOAuth2Token"),
    }
)  # fmt: skip
"""Calls with which botocore obtains and renews short-lived credentials."""


class Forbidden(BaseException):
    """Raised for a call that is not a read. As a BaseException it passes all handlers of the providers."""


class Tap(Protocol):
    def asked(self, path: str, body: Any) -> None: ...
    def rest(self, path: str, body: Any, answer: Any) -> Any:
        """Return the answer that the provider gets in place of `answer`."""
        ...

    def aws(self, operation: str, answer: Any) -> None: ...


def allowed(method: str, path: str, body: Any) -> bool:
    """Return True if a request to RunPod, Vast or Lambda only reads."""
    if (method, path) in READS:
        return True
    if (method, path) != GRAPHQL or not isinstance(body, Mapping):
        return False
    try:
        definitions = parse(str(body.get("query"))).definitions
    except GraphQLError:
        return False
    kinds = {d.operation for d in definitions if isinstance(d, OperationDefinitionNode)}
    return kinds == {OperationType.QUERY}


@contextmanager
def reading(tap: Tap) -> Iterator[None]:
    """Limit this process to reads while inside; every other request raises Forbidden before it is sent."""
    guarded, tapped = _guarded(aiohttp.ClientSession._request), _tapped(Rest.call, tap)
    with (
        mock.patch.object(aiohttp.ClientSession, "_request", guarded),
        mock.patch.object(Rest, "call", tapped),
        _aws(tap),
    ):
        yield


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    async def request(self: aiohttp.ClientSession, method: str, url: Any, **more: Any) -> Any:
        path = URL(str(url)).path
        if more.get("data") is not None or not allowed(method, path, more.get("json")):
            raise Forbidden(f"{method} {path} is not one of the reads that are allowed; nothing was sent")
        return await original(self, method, url, **more)

    return request


def _tapped(original: Callable[..., Any], tap: Tap) -> Callable[..., Any]:
    async def call(self: Rest, method: str, path: str, body: Any = None, **more: Any) -> Any:
        tap.asked(path, body)
        return tap.rest(path, body, await original(self, method, path, body, **more))

    return call


@contextmanager
def _aws(tap: Tap) -> Iterator[None]:
    try:
        from botocore.endpoint import Endpoint
    except ImportError:
        yield  # without botocore nothing goes to AWS
        return
    original = Endpoint.make_request

    def make_request(self: Any, operation_model: Any, request_dict: Any) -> Any:
        service, operation = operation_model.service_model.service_name, operation_model.name
        if (service, operation) not in AWS_READS | AWS_LOGINS:
            raise Forbidden(f"AWS: {service} {operation} is not one of the reads that are allowed; nothing was sent")
        reply, answer = original(self, operation_model, request_dict)
        if reply.status_code < 300 and (service, operation) in AWS_READS:
            tap.aws(operation, answer)
        return reply, answer

    with mock.patch.object(Endpoint, "make_request", make_request):
        yield
