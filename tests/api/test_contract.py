"""schemathesis: generated requests against every operation, answers held against the published description."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from broker.clock import SystemClock
from broker.domain.ids import JobId
from broker.domain.job import AttemptState, Event, Job, JobState, Reason
from broker.ports import Change
from broker.store.memory import MemoryStore
from tests.api.harness import SEEN, Running, memory_blobs, serving, spec
from tests.api.test_files import admitted, put_checkpoint
from trainer.contract import keys

EXAMPLES = 25
CONFIG = """
generation.deterministic = true
generation.max-examples = {examples}
headers = {{ Authorization = "{authorization}" }}
[parameters]
"path.job_id" = "{job}"
[phases.stateful]
enabled = false
# A spec can fit its schema and name an upload that does not exist; uploads need a readable data set; a cap must rise.
# The grammar of an integer in a query is ours, so "1.0" or "+1" is taken.
[[operations]]
include-name-regex = "POST /v1/(quotes|jobs|uploads|channels|slack(/users)?)|PATCH .*|GET /v1/jobs(/.*/(events|logs))?$"
checks.positive_data_acceptance.enabled = false
# A window ends after its start and within a year, a token ends in the future, and a cursor is one of ours.
[[operations]]
include-name-regex = "GET /v1/(audit|charges|spend)|POST /v1/tokens"
checks.positive_data_acceptance.enabled = false
# A policy needs a rule, a timezone that there is, and the name of its address.
[[operations]]
include-name-regex = "PUT /v1/policies/.*|POST /v1/policy-dry-run"
checks.positive_data_acceptance.enabled = false
# A cursor is of a page, a token ends in time to come, and a window begins before its end.
[[operations]]
include-name-regex = "GET /v1/(audit|spend|charges)|POST /v1/tokens"
checks.positive_data_acceptance.enabled = false
"""


async def ended_job(api: Running, me: Mapping[str, str]) -> str:
    """A job at rest with an attempt, events, a log and artifacts."""
    me = dict(me)
    job = str((await api.call("POST", "/v1/jobs", me, 202, json=spec((await api.upload(me))["ref"])))["id"])
    attempt = await admitted(api, job)
    await put_checkpoint(api, job, attempt, 5, {"adapter.safetensors": b"good"}, complete=True)
    await api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 0), b"hello\n")
    row = await api.service.store.job(JobId(job))
    assert row is not None
    await finish(api, row)
    return job


async def finish(api: Running, job: Job) -> None:
    """As the controllers do at the end of an attempt."""
    store = api.service.store
    live = (await store.live_attempts())[0].attempt
    ended = replace(live, state=AttemptState.ENDED, reason=Reason.COMPLETED, ended_at=SEEN)
    after = replace(job, state=JobState.SUCCEEDED, finished_at=SEEN)
    event = Event(job_id=job.id, kind="job.succeeded", message="done", data={"steps": 5})
    assert all(await store.apply([Change(attempt=(live, ended), job=(job, after), events=(event,))]))


async def test_every_operation_keeps_its_description(tmp_path: Path) -> None:
    async with serving(MemoryStore(SystemClock()), memory_blobs()) as api:
        me = await api.token("ada", "admin")
        config = tmp_path / "schemathesis.toml"
        job = await ended_job(api, me)
        config.write_text(CONFIG.format(examples=EXAMPLES, authorization=me["Authorization"], job=job))
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            "--config-file", str(config), "run", f"{api.url}/openapi.json",
            "--seed", "17", "--request-timeout", "10", "--workers", "1", "--continue-on-failure",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
