"""The steps of a run over API, client and page."""

import hashlib
import json
import threading
from typing import Any

import pytest

from broker.api.http.context import JOB_METRICS
from broker.api.service import job_feed
from broker.client.async_client import AsyncClient
from broker.domain.ids import JobId
from broker.runtime.cpu_threads import CpuThreads
from tests.api.harness import Running
from tests.web.test_pages import trained
from tests.web.test_security import submitted
from tests.web.visitor import Visitor
from trainer.contract import object_keys as keys
from trainer.contract.documents import Manifest, ManifestFile

TIMEOUT_S = 30.0


async def saved(api: Running, job: str, steps: int, *, fall: float = 0.07) -> None:
    """Store a checkpoint of the job's attempt with the journal of so many steps."""
    attempt = (await api.service.store.attempts(JobId(job)))[0]
    rows = (
        {"step": n, "loss": 4.9 / n**fall, "lr": 1e-4, "tokens": 50, "seconds": 0.5, "attempt": 1}
        for n in range(1, steps + 1)
    )
    raw = "\n".join(json.dumps(row) for row in rows).encode()
    file = ManifestFile(path="metrics.jsonl", bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    key = f"{keys.checkpoints(job)}{attempt.id}/{steps:08d}-0a/manifest.json"
    await api.service.blobs.put(keys.files_prefix(key) + file.path, raw)
    manifest = Manifest(job=job, attempt=attempt.id, step=steps, kind="train", files=(file,))
    await api.service.blobs.put(key, manifest.model_dump_json().encode())


async def test_the_journal_and_the_latest_heartbeat_are_one_series(api: Running, ada: Visitor) -> None:
    job = await trained(api)
    await saved(api, job, 10)
    token = (await api.token("ada"))["Authorization"].removeprefix("Bearer ")
    async with AsyncClient(api.url, token) as client:
        series = await client.metrics(job)
        assert series.step == (*range(1, 11), 17)  # the heartbeat is at step 17
        assert (series.loss[0], series.loss[-1]) == (4.9, 2.5)
        assert series.tokens_per_s[0] == 100
        assert (await client.metrics(job, after=10)).step == (17,)
        assert len((await client.metrics(job, points=3)).step) == 3
    page = (await ada.get(f"/ui/jobs/{job}")).text
    assert f'data-plot="/ui/jobs/{job}/metrics.json"' in page
    assert json.loads((await ada.get(f"/ui/jobs/{job}/metrics.json")).text)["total"] == 11


async def test_of_a_long_journal_the_end_is_read(api: Running, ada: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await trained(api)
    await saved(api, job, 100)
    monkeypatch.setattr(job_feed, "JOURNAL_BYTES", 1000)
    series = json.loads((await ada.get(f"/ui/jobs/{job}/metrics.json")).text)
    assert series["step"] == list(range(101 - len(series["step"]), 101))
    assert 5 < len(series["step"]) < 20
    assert series["skipped_bytes"] > 5000


@pytest.mark.parametrize("place", ["metric_points", "downsampled"])
async def test_metrics_are_computed_in_a_thread_with_a_deadline(
    api: Running, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    job, me = await submitted(api), await api.token("ada")
    entered, release = threading.Event(), threading.Event()

    def compute(*_: Any) -> Any:
        entered.set()
        release.wait(TIMEOUT_S)
        return []

    monkeypatch.setattr(job_feed, place, compute)
    monkeypatch.setattr(api.app[JOB_METRICS], "threads", CpuThreads(deadline_s=0.2))
    try:
        await api.call("GET", f"/v1/jobs/{job}/metrics", me, 503)
        assert entered.wait(TIMEOUT_S)
        await api.call("GET", "/v1/me", me, 200)
    finally:
        release.set()


async def test_a_job_without_a_checkpoint_has_no_steps_and_another_teams_none(api: Running, ada: Visitor) -> None:
    job = await submitted(api)
    assert json.loads((await ada.get(f"/ui/jobs/{job}/metrics.json")).text)["step"] == []
    theirs = await submitted(api, "bob", "other")
    assert (await ada.get(f"/ui/jobs/{theirs}/metrics.json")).status == 404
    await api.call("GET", f"/v1/jobs/{theirs}/metrics", await api.token("ada"), 404)
