"""An error in the form of an answer is not used: it proves no absence and ends no machine."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from broker.domain.errors import Gone, OutcomeUnknown, ProviderError, Rejected
from broker.domain.ids import AttemptId, Installation, instance_name
from broker.domain.job import Handle
from providers.lambda_cloud.provider import LambdaCloud, LambdaConfig
from providers.runpod.provider import RunpodCloud, RunpodConfig
from providers.vast.provider import VastCloud, VastConfig
from tests.unit.providers.answers import Api, serving
from tests.unit.providers.clocks import SteppedClock

OURS = Installation("aaaa")
MAKE: dict[str, tuple[Any, Any]] = {
    "vast": (VastCloud, VastConfig), "runpod": (RunpodCloud, RunpodConfig), "lambda": (LambdaCloud, LambdaConfig),
}  # fmt: skip
KEYS = {f"{cloud}_API_KEY": "a-key" for cloud in ("VAST", "RUNPOD", "LAMBDA")}
LIST = {"vast": "GET /api/v1/instances/", "runpod": "GET /v2/pods", "lambda": "GET /api/v1/instances"}
DESTROY = {
    "vast": "DELETE /api/v0/instances/7/", "runpod": "DELETE /v2/pods/7",
    "lambda": "POST /api/v1/instance-operations/terminate",
}  # fmt: skip


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with serving() as api:
        yield api


async def ask(api: Api, home: Path, name: str, *, destroy: bool = False) -> None:
    make, config = MAKE[name]
    cloud = make(config(endpoint=api.url), installation=OURS, clock=SteppedClock(), env=KEYS, home=home)
    try:
        if destroy:
            await cloud.destroy(Handle(provider=name, id="7", name=instance_name(OURS, AttemptId("b" * 13))))
        else:
            await cloud.list()
    finally:
        await cloud.close()


@pytest.mark.parametrize(
    ("name", "answer", "kind", "says"),
    [
        ("vast", {"success": False, "error": "auth_error", "msg": "no", "instances": []}, Rejected, "auth_error no"),
        ("vast", {"success": False, "instances": []}, OutcomeUnknown, "no reason"),
        ("vast", {"error": "try later", "instances": []}, OutcomeUnknown, "try later"),
        ("runpod", {"pods": [], "errors": ["later"]}, OutcomeUnknown, "later"),
        ("runpod", {"pods": [], "title": "x", "status": 500, "detail": "later"}, OutcomeUnknown, "later"),
        ("lambda", {"data": [], "error": {"code": "global/invalid-api-key"}}, Rejected, "invalid-api-key"),
        ("lambda", {"data": [], "error": {"code": "global/account-inactive"}}, OutcomeUnknown, "account-inactive"),
        ("lambda", {"data": [], "error": "odd"}, OutcomeUnknown, "odd"),
    ],
)
async def test_an_error_next_to_an_empty_listing_is_no_listing(
    api: Api, tmp_path: Path, name: str, answer: Any, kind: type[ProviderError], says: str
) -> None:
    api.routes[LIST[name]] = lambda body, query: answer
    with pytest.raises(kind, match=says):
        await ask(api, tmp_path, name)


@pytest.mark.parametrize("text", ["<html>404 instance page not found</html>", '{"detail": "Not Found"}', '"x"', ""])
@pytest.mark.parametrize("name", sorted(DESTROY))
async def test_a_404_that_is_not_about_the_machine_ends_none(api: Api, tmp_path: Path, name: str, text: str) -> None:
    api.routes[DESTROY[name]] = lambda body, query: web.Response(status=404, text=text)
    with pytest.raises(OutcomeUnknown, match=r"404") as e:
        await ask(api, tmp_path, name, destroy=True)
    assert text[:20] in str(e.value)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("vast", {"success": False, "error": "no_such_instance", "msg": "Instance not found."}),
        ("vast", {"success": False, "error": "404", "msg": "Instance 7 not found"}),
        ("lambda", {"error": {"code": "global/object-does-not-exist", "message": "It does not exist."}}),
    ],
)
async def test_the_clouds_own_word_for_an_absent_machine_counts(
    api: Api, tmp_path: Path, name: str, answer: Any
) -> None:
    api.routes[DESTROY[name]] = lambda body, query: web.Response(status=404, text=json.dumps(answer))
    with pytest.raises(Gone):
        await ask(api, tmp_path, name, destroy=True)
