"""Uploads and artifacts."""

import asyncio
import errno
import hashlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.api.core.problems import StorageFull
from broker.api.core.upload_spool import KEPT_FREE_BYTES, spooled, sweep, sweep_unfinished
from broker.api.http.context import CONTENT
from broker.api.service import content
from broker.api.service.content import MANIFEST_BYTES, UPLOADS_AT_ONCE, UPLOADS_OF_TEAM
from broker.domain.ids import AttemptId, JobId, attempt_id, instance_name
from broker.domain.job import Attempt, Job, JobState
from broker.domain.money import usd
from broker.domain.offer import OfferVerdict, QuoteLine
from broker.ports import Change
from tests.api.harness import CSV, SEEN, Running, spec
from tests.trainer.support.pack import tar
from trainer.contract import object_keys as keys
from trainer.contract.documents import CheckpointRef, Final, Manifest, ManifestFile, Outcome


async def admitted(api: Running, job_id: str, number: int = 1) -> AttemptId:
    """Return a live attempt of a queued job, written as a controller does."""
    store = api.service.store
    claimed = [j for j in await store.claim_jobs([JobState.QUEUED], owner="t", lease_s=60, limit=9) if j.id == job_id]
    job: Job = claimed[0]
    attempt = Attempt(
        id=attempt_id(job.id, number),
        job_id=job.id,
        number=number,
        name=instance_name(await store.installation("test"), attempt_id(job.id, number)),  # type: ignore[arg-type]
        line=QuoteLine(offer=api.market.items[0], verdict=OfferVerdict.KEPT, reason="fits"),
        created_at=SEEN,
        reserved_usd=usd(5),
    )
    after = Job(**{**vars(job), "state": JobState.ACTIVE, "attempts": number})
    assert all(await store.apply([Change(job=(job, after), admit=attempt)]))
    return attempt.id


async def put_checkpoint(
    api: Running,
    job: str,
    attempt: str,
    step: int,
    files: dict[str, bytes],
    *,
    complete: bool = False,
    nonce: str = "n0",
) -> str:
    folder = keys.checkpoint(job, attempt, step, nonce)
    for path, data in files.items():
        await api.service.blobs.put(folder + keys.FILES + path, data)
    listed = tuple(ManifestFile(path=p, bytes=len(d), sha256=hashlib.sha256(d).hexdigest()) for p, d in files.items())
    manifest = Manifest(job=job, attempt=attempt, step=step, kind="train", files=listed, complete=complete)
    await api.service.blobs.put(folder + keys.MANIFEST, manifest.model_dump_json().encode())
    return folder


async def test_an_upload_is_named_by_its_content_and_summarised(api: Running) -> None:
    me = await api.token("ada")
    first, again = await api.upload(me), await api.upload(me)
    assert first["ref"] == again["ref"] == "upload:" + hashlib.sha256(CSV.encode()).hexdigest()
    assert first["bytes"] == len(CSV)
    assert first["summary"]["rows"] == 40
    assert first["summary"]["format"] == "csv"


async def dripping(api: Running, me: dict[str, str], until: asyncio.Event) -> tuple[int, str]:
    """Yield an upload whose end waits."""

    async def body() -> AsyncIterator[bytes]:
        yield CSV.encode()
        await until.wait()

    headers = me | {"Content-Type": "application/octet-stream"}
    async with api.http.post(f"{api.url}/v1/uploads?name=a.csv", data=body(), headers=headers) as answer:
        return answer.status, await answer.text()


async def test_uploads_of_one_team_do_not_delay_those_of_another(api: Running) -> None:
    red, blue = await api.token("ada", team="red"), await api.token("bob", team="blue")
    until = asyncio.Event()
    slow = [asyncio.create_task(dripping(api, red, until)) for _ in range(2 * UPLOADS_AT_ONCE)]
    busy = api.app[CONTENT]._uploading
    async with asyncio.timeout(300):
        while busy._value > UPLOADS_AT_ONCE - UPLOADS_OF_TEAM:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await api.upload(blue))["summary"]["rows"] == 40
    until.set()
    assert {status for status, _ in await asyncio.gather(*slow)} == {201}


async def test_uploads_of_a_team_over_its_queue_are_refused_at_once(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "WAITING_OF_TEAM", 1)
    me, release = await api.token("ada"), asyncio.Event()
    first = asyncio.create_task(dripping(api, me, release))
    await until(lambda: bool(spool(api)))
    async with api.http.post(f"{api.url}/v1/uploads?name=b.csv", headers=me | OCTETS, data=CSV) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) > 0
    release.set()
    assert (await first)[0] == 201


async def test_a_stalled_upload_is_aborted(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.api.service.content.STALLED_S", 0.05)
    async with asyncio.timeout(300):
        status, text = await dripping(api, await api.token("ada"), asyncio.Event())
    assert status == 422
    assert "no data arrived for 0.05 s" in text


OCTETS = {"Content-Type": "application/octet-stream"}


def spool(api: Running) -> list[Path]:
    folder = api.service.settings.spool
    return list(folder.iterdir()) if folder.exists() else []


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_upload_is_spooled_to_disk_and_stored_completely(api: Running, tmp_path: Path) -> None:
    api.service.settings = replace(api.service.settings, spool=tmp_path / "spool", upload_bytes=8 << 20)
    me, rest = await api.token("ada"), asyncio.Event()
    whole = CSV.encode() + b"word,x\n" * 400_000

    async def body() -> AsyncIterator[bytes]:
        yield whole
        await rest.wait()

    async def send() -> tuple[int, dict[str, Any]]:
        async with api.http.post(f"{api.url}/v1/uploads?name=a.csv", data=body(), headers=me | OCTETS) as answer:
            return answer.status, await answer.json()

    def lies() -> bool:
        return sum(p.stat().st_size for p in spool(api)) >= (2 << 20)

    broken = asyncio.create_task(send())
    await until(lies)
    assert {p.stat().st_mode & 0o777 for p in spool(api)} == {0o600}
    broken.cancel()
    await until(lambda: not spool(api))
    assert not await api.service.blobs.list("uploads/")
    sent = asyncio.create_task(send())
    await until(lies)
    rest.set()
    status, upload = await sent
    assert (status, upload["bytes"], upload["sha256"]) == (201, len(whole), hashlib.sha256(whole).hexdigest())
    assert await api.service.blobs.get(keys.upload(upload["sha256"]), max_bytes=len(whole)) == whole
    assert not spool(api)


async def test_without_disk_space_an_upload_is_refused_in_one_line(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = await api.token("ada")
    monkeypatch.setattr("broker.api.core.upload_spool.KEPT_FREE_BYTES", 1 << 62)
    url = f"{api.url}/v1/uploads?name=a.csv"
    async with api.http.post(url, data=CSV.encode(), headers=me | OCTETS) as answer:
        assert answer.status == 507
        detail = (await answer.json())["detail"]
    assert detail.startswith("the daemon's disk has ")
    assert "\n" not in detail
    assert (spool(api), await api.service.blobs.list("uploads/")) == ([], [])


async def test_upload_larger_than_free_disk_is_refused_before_writing(
    api: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spool, store and database often share a disk, on which a second copy must leave the reserved space free."""
    api.service.settings = replace(api.service.settings, blobs=tmp_path / "not" / "yet")
    usage = shutil.disk_usage

    def nearly_full(path: Path) -> Any:
        return usage(path)._replace(free=KEPT_FREE_BYTES + 10 if tmp_path.is_relative_to(path) else 1 << 40)

    monkeypatch.setattr("broker.api.core.upload_spool.shutil.disk_usage", nearly_full)
    async with api.http.post(
        f"{api.url}/v1/uploads?name=a.csv", data=CSV.encode(), headers=await api.token("ada") | OCTETS
    ) as answer:
        assert answer.status == 507
    assert (spool(api), await api.service.blobs.list("uploads/")) == ([], [])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
async def test_a_disk_that_cannot_hold_the_spool_folder_counts_as_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def mkdir(path: Path, *more: Any, **settings: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    async def body() -> AsyncIterator[bytes]:
        yield b"a"

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(StorageFull):
        async with spooled(tmp_path / "spool", body(), max_bytes=1):
            pass


def test_start_removes_partial_writes_of_a_killed_daemon(tmp_path: Path) -> None:
    """obstore leaves partial files when it is killed within a write, and none of its listings shows them."""
    for name, age_s in (("whole", 9e4), ("half#1", 9e4), ("under-way#1", 60)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    sweep_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "under-way#1"}


def test_a_start_removes_only_spooled_uploads(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ("0123456789abcdef" * 2)).touch()
    (tmp_path / "import-x1").mkdir()
    (tmp_path / "import-x1" / "data.tar").touch()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


FILLS = """
import asyncio, sys
from pathlib import Path
from broker.api.core import upload_spool as spool
spool.KEPT_FREE_BYTES = 0
spool.shutil.disk_usage = lambda path, usage=spool.shutil.disk_usage: usage(path)._replace(free=1 << 40)
async def body():
    for _ in range(8):
        yield bytes(1 << 20)
async def main(folder):
    try:
        async with spool.spooled(folder / "in", body(), max_bytes=1 << 30):
            print("it was taken")
    except Exception as e:
        print(type(e).__name__, "left", list((folder / "in").iterdir()))
asyncio.run(main(Path(sys.argv[1])))
"""
"""Program that uploads to a disk of 4 MiB. The disk reports free space, like a disk that others fill meanwhile."""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_disk_that_fills_during_an_upload_keeps_no_part_of_it(tmp_path: Path) -> None:
    script = f"mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -c {shlex.quote(FILLS)} {tmp_path}"
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    process = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if "permitted" in process.stderr or "denied" in process.stderr:
        pytest.skip("no file system may be mounted here")
    assert process.stdout == "StorageFull left []\n", process.stderr


async def test_a_script_runs_from_an_uploaded_archive(api: Running) -> None:
    me = await api.token("ada")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("train.py"))
    upload = await api.upload(me, packed.getvalue(), "code.tar")
    assert upload["summary"] is None
    script = {"name": "s", "cap_usd": 1, "script": {"code": upload["ref"], "command": ["python", "train.py"]}}
    job = await api.call("POST", "/v1/jobs", me, 202, json=script)
    assert await api.service.blobs.get(keys.job_data(job["id"], upload["sha256"])) == packed.getvalue()


async def test_an_image_that_no_provider_runs_is_refused_after_the_same_script(api: Running) -> None:
    """The job without an image fills the cache of outlooks, and the job with one must not read that entry."""
    me = await api.token("ada")
    code = (await api.upload(me, tar({"train.py": b""}), "code.tar"))["ref"]
    script: dict[str, Any] = {"code": code, "command": ["python", "train.py"]}
    await api.call("POST", "/v1/jobs", me, 202, json={"name": "s", "cap_usd": 1, "script": script})
    script["image"] = "pytorch/pytorch:2.9.0"
    refused = await api.call("POST", "/v1/jobs", me, 422, json={"name": "s", "cap_usd": 1, "script": script})
    assert "image" in refused["errors"][0]["message"]


async def test_an_archive_of_pictures_is_checked_at_upload(api: Running) -> None:
    me = await api.token("ada")
    png = b"\x89PNG\r\n\x1a\n"
    upload = await api.upload(me, tar({"cat/1.png": png, "dog/1.png": png + b"2"}), "pets.tar")
    assert (upload["summary"]["format"], upload["summary"]["rows"]) == ("tar", 2)
    assert list(upload["summary"]["columns"]["label"]["values"]) == ["cat", "dog"]
    script = {"name": "s", "cap_usd": 1, "script": {"code": upload["ref"], "command": ["python", "x.py"]}}
    await api.call("POST", "/v1/jobs", me, 202, json=script)


async def test_artifacts_are_those_of_the_last_committed_checkpoint(api: Running) -> None:
    me = await api.token("ada")
    job = (await api.call("POST", "/v1/jobs", me, 202, json=spec((await api.upload(me))["ref"])))["id"]
    path = f"/v1/jobs/{job}/artifacts"
    assert await api.call("GET", path, me, 200) == {"step": None, "complete": False, "items": []}
    attempt = await admitted(api, job)
    await put_checkpoint(api, job, attempt, 5, {"adapter.safetensors": b"old"})
    await put_checkpoint(
        api, job, attempt, 10, {"adapter.safetensors": b"new" * 1000, "a/b.json": b"{}"}, complete=True
    )
    await api.service.blobs.put(keys.checkpoint(job, attempt, 15, "torn") + "adapter.safetensors", b"torn")
    await put_checkpoint(api, job, "a" * 13, 99, {"adapter.safetensors": b"foreign"})
    listed = await api.call("GET", path, me, 200)
    assert (listed["step"], listed["complete"]) == (10, True)
    assert {i["path"]: i["bytes"] for i in listed["items"]} == {"adapter.safetensors": 3000, "a/b.json": 2}
    async with api.http.get(f"{api.url}{path}/a/b.json", headers=me) as response:
        assert (response.status, await response.read()) == (200, b"{}")
    async with api.http.get(f"{api.url}{path}/adapter.safetensors", headers=me) as response:
        assert await response.read() == b"new" * 1000
        assert response.headers["ETag"].strip('"') == hashlib.sha256(b"new" * 1000).hexdigest()
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Content-Disposition"].startswith('attachment; filename="adapter.safetensors"; ')
    await api.call("GET", f"{path}/manifest.json", me, 404)
    large = keys.checkpoint(job, attempt, 20, "n0") + keys.MANIFEST  # a host wrote it, so it is passed over unread
    await api.service.blobs.put(large, b" " * (MANIFEST_BYTES + 1))
    assert (await api.call("GET", path, me, 200))["step"] == 10


async def test_artifacts_follow_the_final_report_not_a_save_of_the_same_step(api: Running) -> None:
    """The trainer saved right before its results, at the same step."""
    me = await api.token("ada")
    job = (await api.call("POST", "/v1/jobs", me, 202, json=spec((await api.upload(me))["ref"])))["id"]
    attempt = await admitted(api, job)
    results = keys.checkpoint(job, attempt, 5, "middle") + keys.MANIFEST
    final = Final(attempt=attempt, outcome=Outcome.COMPLETED, checkpoint=CheckpointRef(manifest=results, step=5))
    (before,) = await api.service.store.attempts(JobId(job))
    assert all(await api.service.store.apply([Change(attempt=(before, replace(before, final=final)))]))
    for nonce, complete in (("before", False), ("middle", True), ("other", False)):
        await put_checkpoint(api, job, attempt, 5, {"a.json": nonce.encode()}, complete=complete, nonce=nonce)
    assert (await api.call("GET", f"/v1/jobs/{job}/artifacts", me, 200))["complete"] is True
    await put_checkpoint(api, job, attempt, 6, {"a.json": b"later"})
    assert (await api.call("GET", f"/v1/jobs/{job}/artifacts", me, 200))["step"] == 6


async def test_changed_or_escaping_artifacts_are_not_served(api: Running) -> None:
    me = await api.token("ada")
    job = (await api.call("POST", "/v1/jobs", me, 202, json=spec((await api.upload(me))["ref"])))["id"]
    attempt = await admitted(api, job)
    folder = await put_checkpoint(api, job, attempt, 5, {"adapter.safetensors": b"good"})
    await api.service.blobs.put(folder + keys.FILES + "adapter.safetensors", b"evil")
    await api.call("GET", f"/v1/jobs/{job}/artifacts/adapter.safetensors", me, 502)
    escaping = Manifest(
        job=job,
        attempt=attempt,
        step=6,
        kind="train",
        files=(ManifestFile(path="../../../../uploads/x", bytes=1, sha256="0" * 64),),
    )
    await api.service.blobs.put(
        keys.checkpoint(job, attempt, 6, "n0") + keys.MANIFEST, escaping.model_dump_json().encode()
    )
    assert (await api.call("GET", f"/v1/jobs/{job}/artifacts", me, 200))["step"] == 5


async def test_a_retry_is_a_linked_job_that_resumes(api: Running) -> None:
    me = await api.token("ada")
    job = (await api.call("POST", "/v1/jobs", me, 202, json=spec((await api.upload(me))["ref"])))["id"]
    await put_checkpoint(api, job, attempt_id(JobId(job), 1), 5, {"adapter.safetensors": b"good"})
    claimed = (await api.service.store.claim_jobs([JobState.QUEUED], owner="t", lease_s=60, limit=9))[0]
    failed = Job(**{**vars(claimed), "state": JobState.FAILED, "finished_at": SEEN})
    assert all(await api.service.store.apply([Change(job=(claimed, failed))]))
    key = me | {"Idempotency-Key": "again"}
    again = await api.call("POST", f"/v1/jobs/{job}/retry", key, 202)
    assert (again["retry_of"], again["state"]) == (job, "queued")
    assert (await api.call("POST", f"/v1/jobs/{job}/retry", key, 202))["id"] == again["id"]
    detail = await api.call("GET", f"/v1/jobs/{again['id']}", me, 200)
    assert detail["spec"]["init_from"] == f"job/{job}"
    assert len([b for b in await api.service.blobs.list(keys.JOB_DATA) if again["id"] in b.key]) == 1
    fresh = await api.call("POST", f"/v1/jobs/{job}/retry?resume=0", me, 202)
    assert (await api.call("GET", f"/v1/jobs/{fresh['id']}", me, 200))["spec"]["init_from"] is None
    await api.call("POST", f"/v1/jobs/{job}/cancel", me, 409)
    await api.call("PATCH", f"/v1/jobs/{job}", me, 409, json={"cap_usd": 99})
