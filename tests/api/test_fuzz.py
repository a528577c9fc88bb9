"""Sample of `tests.api.fuzz`: any input gets an answer that the description allows, and never a server error."""

import re
from collections.abc import AsyncIterator

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker.api.app import APIS
from broker.api.http.openapi import document
from tests.api.fuzz import calls, http
from tests.api.fuzz.world import World, world

OPERATIONS = {
    "money-first": r"/v1/(quotes|what-if|offers.*|providers.*)$",
    "bytes": r"/v1/(uploads|imports|secrets.*)$",
    "jobs": r"/v1/jobs$",
    "a job": r"/v1/jobs/{job_id}(/(cancel|retry|ledger|approve|refuse|data))?$",
    "what a job leaves": r"/v1/jobs/{job_id}/(events|logs|metrics|artifacts.*|decisions.*)$",
    "policies": r"/v1/(policies.*|policy-dry-run|budgets)$",
    "channels": r"/v1/channels.*",
    "people": r"/v1/(me.*|tokens.*|teams.*|slack.*)$",
    "records": r"/v1/(audit|spend|charges|calibration)$|/v1/schema/.*|/healthz|/readyz|^/metrics",
}
EXAMPLES, GRPC_EXAMPLES = 10, 40
SERVICES = sorted({method.containing_service.full_name for method in calls.METHODS})
GROWTH_BYTES = 256 * 1024**2


@pytest.fixture
async def made(postgres_dsn: str) -> AsyncIterator[World]:
    """Yield an installation; afterwards its server still serves, and has not grown."""
    process = psutil.Process()
    before = process.memory_info().rss
    async with world(postgres_dsn) as running_world:
        yield running_world
        health = await health_pb2_grpc.HealthStub(running_world.servers.channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert process.memory_info().rss - before < GROWTH_BYTES


def test_every_operation_is_tried() -> None:
    paths = document(APIS, version="0")["paths"]
    tried = {path: [group for group, pattern in OPERATIONS.items() if re.search(pattern, path)] for path in paths}
    assert {path: groups for path, groups in tried.items() if len(groups) != 1} == {}


@pytest.mark.parametrize("seed", [0, 3], ids=["admin", "not admin"])
@pytest.mark.parametrize("group", OPERATIONS)
async def test_every_operation_keeps_its_description(made: World, group: str, seed: int) -> None:
    result = await http.fuzz(made, seed, EXAMPLES, only=OPERATIONS[group], phases="coverage,fuzzing")
    assert result.good, result.report
    assert result.cases


@pytest.mark.parametrize("service", SERVICES)
async def test_no_call_is_a_fault_of_the_server(made: World, service: str) -> None:
    for method in calls.METHODS:
        if method.containing_service.full_name == service:
            heard = await calls.fuzz(made, method, 0, GRPC_EXAMPLES)
            assert not heard.faults
            assert heard.cases >= GRPC_EXAMPLES / 2
