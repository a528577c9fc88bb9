"""schemathesis: generated requests to every operation, whose answers must match the published description."""

import asyncio
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.api.http.context import METRICS
from tests.api.fuzz.world import World

CONFIG = """
warnings = false
headers = {{ Authorization = "{authorization}" }}
{parameters}
# A spec can fit its schema and name an upload that does not exist; uploads need a readable data set; a cap must rise.
# The grammar of an integer in a query is ours, so "1.0" or "+1" is taken.
[[operations]]
include-name-regex = "POST /v1/(quotes|jobs|uploads|channels|slack(/users)?)|PATCH .*|GET /v1/jobs(/.*/(events|logs))?$"
checks.positive_data_acceptance.enabled = false
# A source can fit its schema and name a host that is not allowed.
[[operations]]
include-name-regex = "POST /v1/imports"
checks.positive_data_acceptance.enabled = false
# An estimate can fit its schema and name a model or a GPU that is not known.
[[operations]]
include-name-regex = "POST /v1/what-if"
checks.positive_data_acceptance.enabled = false
# A cursor is of a page, a token ends in time to come, and a window begins before its end and is a year at most.
[[operations]]
include-name-regex = "GET /v1/(audit|charges|spend|calibration)|POST /v1/tokens"
checks.positive_data_acceptance.enabled = false
# A policy needs a rule, a timezone that there is, and the name of its address.
[[operations]]
include-name-regex = "PUT /v1/policies/.*|POST /v1/policy-dry-run"
checks.positive_data_acceptance.enabled = false
# What follows a job that runs is open until the job rests.
[[operations]]
include-name-regex = "GET /v1/jobs/.*/(events|logs)"
parameters = {{ "path.job_id" = "{ended}" }}
"""
SERVER_ERROR = "Server error"
PHASES, AT_RANDOM = "coverage,fuzzing,stateful", "fuzzing,stateful"
"""Phases with and without `coverage`, which follows a plan and finds little new in a later run with the same caller."""


@dataclass(frozen=True, kw_only=True)
class SchemathesisResult:
    """Result of one schemathesis run."""

    cases: int
    http_5xx: int
    schema_violations: int
    report: str
    """Report of schemathesis for the user."""

    @property
    def good(self) -> bool:
        return not (self.http_5xx or self.schema_violations)


async def fuzz(world: World, seed: int, examples: int, *, only: str = "", phases: str = PHASES) -> SchemathesisResult:
    """Run once with a caller and known ids that follow from the seed. `only`: a pattern of paths."""
    authorization = await world.authorization(seed)
    before = answers(world)
    with tempfile.TemporaryDirectory(prefix="gb-fuzz-") as folder:
        config, report = Path(folder) / "schemathesis.toml", Path(folder) / "report.json"
        config.write_text(_config(world, seed, authorization))
        chosen = ("--include-path-regex", only) if only else ()
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            "--config-file", str(config), "run", f"{world.servers.api.url}/openapi.json", *chosen,
            "--seed", str(seed), "--max-examples", str(examples), "--phases", phases,
            "--request-timeout", "60", "--workers", "1", "--continue-on-failure", "--generation-database", "none",
            "--report", "json", "--report-json-path", str(report), "--no-color",
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        missing = {"errors": [{"title": "no report", "count": 1}]}
        summary = json.loads(report.read_text()) if report.exists() else missing
    after = answers(world)
    return SchemathesisResult(
        cases=sum(after.values()) - sum(before.values()),
        http_5xx=sum(count - before.get(status, 0) for status, count in after.items() if status >= 500),
        schema_violations=violations(summary),
        report=output.decode(),
    )


def _config(world: World, seed: int, authorization: str) -> str:
    """Return the configuration of a run; every second run knows the existing ids, the others guess."""
    known = {
        "path.job_id": (world.ended, world.running, world.queued)[seed % 3],
        "path.channel_id": world.channel,
        "path.path": "adapter.safetensors",
    }
    lines = "\n".join(f'"{name}" = "{value}"' for name, value in known.items()) if seed % 2 else ""
    return CONFIG.format(authorization=authorization, ended=world.ended, parameters=f"[parameters]\n{lines}")


def answers(world: World) -> dict[int, int]:
    """Return the number of answered requests by status, as the server itself counts them."""
    counts: dict[int, int] = {}
    for metric in world.servers.api.app[METRICS].registry.collect():
        for sample in metric.samples:
            if sample.name == "gpubroker_http_requests_total":
                status = int(sample.labels["status"])
                counts[status] = counts.get(status, 0) + int(sample.value)
    return counts


def violations(report: dict[str, Any]) -> int:
    """Return failures of any check but that for server errors, which the server counts, and what could not be tried."""
    problems = [*report.get("failures", ()), *report.get("errors", ())]
    return sum(problem["count"] for problem in problems if not re.match(SERVER_ERROR, problem["title"]))
