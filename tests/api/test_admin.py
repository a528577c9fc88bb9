"""Tokens, secrets, health and metrics."""

import asyncio
import errno
import json
import logging
from contextlib import suppress

import pytest

from broker.api.http.context import READINESS
from broker.domain.errors import StoreUnavailable
from broker.domain.ids import JobId
from broker.domain.job import Event
from broker.domain.tenancy import Tenant
from tests.api.harness import Running, spec
from trainer.contract import object_keys as keys


async def test_calls_without_a_token_or_its_scope_are_refused(api: Running) -> None:
    reader = await api.token("ada", "read")
    for header in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Bearer gb_{'a' * 8}_{'a' * 32}"}):
        refused = await api.call("GET", "/v1/jobs", header, 401)
        assert refused["detail"] == "give a valid token: Authorization: Bearer gb_..."
    await api.call("GET", "/v1/jobs", reader, 200)
    for method, path, body in (
        ("POST", "/v1/jobs", {}),
        ("PUT", "/v1/secrets/A", {"value": "x"}),
        ("GET", "/v1/tokens", None),
        ("POST", "/v1/tokens", {"owner": "eve", "scopes": ["admin"]}),
        ("POST", "/v1/teams", {"name": "red"}),
        ("GET", "/v1/audit", None),
        ("GET", "/metrics", None),
    ):
        assert "lacks the scope" in (await api.call(method, path, reader, 403, json=body))["detail"]


async def test_a_secret_is_stored_sealed_and_never_shown(api: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ada, bob = await api.token("ada"), await api.token("bob")
    await api.call("PUT", "/v1/secrets/HF_TOKEN", ada, 204, json={"value": "hf_verysecret"})
    shown = [await api.call("GET", "/v1/secrets", who, 200) for who in (ada, bob)]
    assert shown == [{"names": ["HF_TOKEN"]}, {"names": []}]
    body = spec((await api.upload(ada))["ref"], secrets=["HF_TOKEN"])
    job = await api.call("POST", "/v1/jobs", ada, 202, json=body)
    detail = await api.call("GET", f"/v1/jobs/{job['id']}", ada, 200)
    sealed = (await api.service.store.as_tenant(Tenant(team="default", owner="ada")).secrets("ada"))["HF_TOKEN"]
    assert api.service.box.open(sealed) == "hf_verysecret"
    token = ada["Authorization"].removeprefix("Bearer ")
    for text in (json.dumps([shown, job, detail]), repr(sealed), caplog.text):
        assert "hf_verysecret" not in text
        assert token not in text
    assert "PUT /v1/secrets/HF_TOKEN 204" in caplog.text
    await api.call("DELETE", "/v1/secrets/HF_TOKEN", bob, 404)
    await api.call("DELETE", "/v1/secrets/HF_TOKEN", ada, 204)
    refused = await api.call("POST", "/v1/jobs", ada, 422, json=body)
    assert refused["errors"][0]["field"] == "secrets.0"


async def test_readyz_names_the_failing_part_and_its_cause_to_operators(
    api: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ready names the part that fails and says why to operators and the log."""
    why = "postgresql://gpubroker@db.internal:5432 does not answer"

    async def away() -> None:
        raise StoreUnavailable(why)

    assert (await api.call("GET", "/healthz", {}, 200))["status"] == "ok"
    well = {"database": "ok", "blobs": "ok", "broker": "ok", "disk": "ok", "clock": "ok"}
    assert (await api.call("GET", "/readyz", {}, 200))["checks"] == well
    monitor, operator, member = [await api.token(scope, scope) for scope in ("metrics", "admin", "read")]
    monkeypatch.setattr(api.service.store, "ping", away)
    await api.service.blobs.delete(keys.BROKER_LEASE)
    for who in ({}, {"Authorization": "Bearer x"}, member):
        readiness = await api.call("GET", "/readyz", who, 503)
        assert readiness["detail"] == "not ready"
        assert readiness["errors"] == [{"field": part, "message": "failing"} for part in ("database", "broker")]
    for who in (monitor, operator):
        readiness = await api.call("GET", "/readyz", who, 503)
        assert [problem["message"] for problem in readiness["errors"]] == [
            why,
            "no broker has ever held the lease; start gpubroker serve",
        ]
    assert caplog.text.count(why) == 1, "reported once, not at every probe"


async def why_unready(api: Running) -> dict[str, str]:
    readiness = await api.call("GET", "/readyz", await api.token("prometheus", "metrics"), 503)
    return {problem["field"]: problem["message"] for problem in readiness["errors"]}


HANG_S = 1.0
"""Seconds after which a part hangs. The others answer at once, but not within milliseconds on a busy host."""


async def test_a_database_that_hangs_makes_the_daemon_unready(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.api.core.readiness.ANSWER_S", HANG_S)
    monkeypatch.setattr("broker.api.handlers.admin.TOKEN_S", HANG_S)
    monkeypatch.setattr("broker.api.core.auth.CACHE_S", 0.0)
    monitor, unknown = [await api.token(owner, "metrics") for owner in ("monitor", "unknown")]
    await api.call("GET", "/readyz", monitor, 200)

    async def hang(*_: object) -> None:
        """Wait for ever, as a query of a stopped server, whose cancellation it does not confirm."""
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    for query in ("ping", "token"):
        monkeypatch.setattr(api.service.store, query, hang)
    (fault,) = (await api.call("GET", "/readyz", monitor, 503))["errors"]
    assert fault["field"] == "database"
    assert "does not answer within" in fault["message"]
    (fault,) = (await api.call("GET", "/readyz", unknown, 503))["errors"]
    assert fault == {"field": "database", "message": "failing"}


async def test_a_blob_store_replaced_before_the_first_check_is_noticed(api: Running) -> None:
    await api.service.blobs.put(keys.BLOB_STORE, b"one")
    await api.app[READINESS].read_mark()
    await api.service.blobs.delete(keys.BLOB_STORE)
    assert "is missing" in (await why_unready(api))["blobs"]


async def test_a_blob_store_that_hangs_makes_the_daemon_unready(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(key: str) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError(key)

    monkeypatch.setattr("broker.api.core.readiness.ANSWER_S", HANG_S)
    monkeypatch.setattr(api.service.blobs, "get", hang)
    faults = await why_unready(api)
    assert set(faults) == {"blobs", "broker"}
    assert "does not answer within" in faults["blobs"]


@pytest.mark.parametrize(("mark", "word"), [(None, "is missing"), (b"another", "is another store's")])
async def test_a_removed_or_replaced_blob_store_makes_the_daemon_unready(
    api: Running, mark: bytes | None, word: str
) -> None:
    """An empty folder in its place holds no heartbeat, so the broker would destroy machines that run."""
    await api.service.blobs.put(keys.BLOB_STORE, b"ours")
    await api.call("GET", "/readyz", {}, 200)
    if mark is None:
        await api.service.blobs.delete(keys.BLOB_STORE)
    else:
        await api.service.blobs.put(keys.BLOB_STORE, mark)
    faults = await why_unready(api)
    assert word in faults["blobs"]
    await api.service.blobs.put(keys.BLOB_STORE, b"ours")
    await api.call("GET", "/readyz", {}, 200)


async def test_a_full_disk_makes_the_daemon_unready(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    faults = await why_unready(api)
    assert set(faults) == {"disk"}
    assert "No space left on device; free space" in faults["disk"]


async def test_probes_that_come_together_hold_one_connection_of_the_database(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answer = asyncio.Event(), asyncio.Event()
    inside = most = 0

    async def slow() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        begun.set()
        await answer.wait()
        inside -= 1

    monkeypatch.setattr(api.service.store, "ping", slow)
    probes = [asyncio.create_task(api.call("GET", "/readyz", {}, 200)) for _ in range(20)]
    await begun.wait()
    probes[0].cancel()
    for _ in range(20):
        await api.call("GET", "/healthz", {}, 200)
    answer.set()
    await asyncio.gather(*probes[1:])
    assert most == 1


async def test_a_wrong_host_clock_is_reported_and_stops_nothing(api: Running) -> None:
    api.service.skew = lambda: -3600.0
    monitor = await api.token("prometheus", "metrics")
    assert (await api.call("GET", "/readyz", {}, 200))["checks"]["clock"] == "failing"
    ready = await api.call("GET", "/readyz", monitor, 200)
    assert ready["checks"]["clock"].startswith("this host's clock is 3600 s behind the database's")
    async with api.http.get(f"{api.url}/metrics", headers=monitor) as response:
        assert "gpubroker_clock_skew_seconds -3600.0" in await response.text()


async def test_a_wrong_clock_of_the_database_makes_the_daemon_unready(api: Running) -> None:
    api.service.clock_step = lambda: 86_400.0
    monitor = await api.token("prometheus", "metrics")
    readiness = await api.call("GET", "/readyz", monitor, 503)
    assert [problem["field"] for problem in readiness["errors"]] == ["database"]
    assert readiness["errors"][0]["message"].startswith("the database's clock was set 1 d 0 h ahead; charges")
    api.service.clock_step = lambda: 0.0
    await api.call("GET", "/readyz", {}, 200)


async def test_metrics_count_jobs_and_requests_without_ids(api: Running) -> None:
    me = await api.token("ada")
    job = await api.call("POST", "/v1/jobs", me, 202, json=spec((await api.upload(me))["ref"]))
    await api.call("GET", f"/v1/jobs/{job['id']}", me, 200)
    await api.service.store.request_stop(JobId(job["id"]), Event(job_id=JobId(job["id"]), kind="x", message="m"))
    async with api.http.get(f"{api.url}/metrics", headers=await api.token("prometheus", "metrics")) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text = await response.text()
    assert 'gpubroker_jobs{state="queued"} 1.0' in text
    assert 'gpubroker_attempts{state="training"} 0.0' in text
    assert "gpubroker_open_streams 0.0" in text
    assert 'gpubroker_http_requests_total{method="POST",route="/v1/jobs",status="202"} 1.0' in text
    assert 'gpubroker_http_request_seconds_count{method="GET",route="/v1/jobs/{job_id}"} 1.0' in text
    assert job["id"] not in text


async def test_unknown_addresses_cannot_fill_the_metrics(api: Running) -> None:
    for i in range(3):
        async with api.http.request(f"VERB{i}", f"{api.url}/nowhere/{i}") as response:
            assert response.status in (400, 404)
    async with api.http.get(f"{api.url}/metrics", headers=await api.token("prometheus", "metrics")) as response:
        assert "nowhere" not in await response.text()


async def test_the_published_schema_is_the_spec(api: Running) -> None:
    schema = await api.call("GET", "/v1/schema/job", {}, 200)
    assert {"name", "cap_usd", "train", "script"} <= set(schema["properties"])
    described = await api.call("GET", "/openapi.json", {}, 200)
    assert described["openapi"] == "3.1.0"
