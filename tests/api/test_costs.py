"""Stored data of a job: shown, deleted, and then reported as deleted."""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from broker.billing.drain import DrainBudget
from broker.daemon.preflight_adapter import Checks
from broker.domain.errors import Problem
from broker.domain.ids import JobId
from broker.domain.job import Event, JobState, StoredData
from broker.ports import AuditFilter, Change, StorageCharge
from tests.api.harness import MODEL, Running, spec
from tests.api.test_jobs import submitted
from tests.conformance.samples import ManualClock


async def rested(api: Running, me: dict[str, str], state: JobState, **changes: Any) -> str:
    """Return the ID of an idle job that never ran."""
    name = (await submitted(api, me, **changes))["id"]
    store = api.service.store
    (job,) = [j for j in await store.claim_jobs([JobState.QUEUED], owner="t", lease_s=60, limit=99) if j.id == name]
    if state is JobState.CANCELLED:
        await store.request_stop(job.id, Event(job_id=job.id, kind="job.stop_requested", message="stop"))
    to = replace(job, state=state, finished_at=api.service.clock.now())
    assert await store.apply([Change(job=(job, to))]) == [True]
    return str(name)


async def test_a_job_shows_its_stored_bytes_and_their_price(api: Running) -> None:
    api.service.settings = replace(api.service.settings, storage_usd_per_gib_month=Decimal("0.023"))
    me = await api.token("ada")
    name = await rested(api, me, JobState.FAILED)
    assert (await api.call("GET", f"/v1/jobs/{name}", me, 200))["storage"] is None
    stored = StoredData(
        bytes=10 * 2**30, accrued_usd=Decimal("0.5000001"), charged_usd=Decimal("0.500001"), to=api.service.clock.now()
    )
    charge = StorageCharge(job_id=JobId(name), read=None, to=stored, usd=stored.charged_usd, due_in_s=60)
    assert await api.service.store.charge_storage(charge)
    assert not await api.service.store.charge_storage(charge), "another broker was first"
    shown = (await api.call("GET", f"/v1/jobs/{name}", me, 200))["storage"]
    assert datetime.fromisoformat(shown.pop("measured_at")) == stored.to
    assert shown == {"bytes": 10 * 2**30, "usd": "0.500001", "usd_per_month": "0.230000", "deleted": []}
    (line,) = (await api.call("GET", f"/v1/jobs/{name}/ledger", me, 200))["items"]
    assert (line["category"], line["attempt_id"], line["usd"]) == ("storage", None, "0.500001")


async def test_deleted_data_is_gone_with_its_date(api: Running) -> None:
    me = await api.token("ada")
    name = await rested(api, me, JobState.FAILED)
    marked = await api.call("DELETE", f"/v1/jobs/{name}/data?kind=logs&kind=checkpoints", me, 202)
    assert marked["state"] == "failed"
    for path in ("artifacts", "artifacts/adapter.safetensors", "logs?follow=0"):
        gone = await api.call("GET", f"/v1/jobs/{name}/{path}", me, 410)
        assert " were deleted on 20" in gone["detail"]
    again = await api.call("POST", f"/v1/jobs/{name}/retry", me, 202)
    assert again["retry_of"] == name, "its data is there; it begins from zero"
    detail = await api.call("GET", f"/v1/jobs/{again['id']}", me, 200)
    assert detail["spec"]["init_from"] is None
    await api.call("DELETE", f"/v1/jobs/{name}/data", me, 202)
    gone = await api.call("POST", f"/v1/jobs/{name}/retry", me, 410)
    assert "submit its spec again" in gone["detail"]
    kinds = [e["kind"] for e in (await api.call("GET", f"/v1/jobs/{name}/events?follow=0", me, 200))["items"]]
    assert kinds == ["job.submitted", "job.data_deleted", "job.data_deleted"]
    audit = await api.service.store.audit(AuditFilter(action="job.delete_data"))
    assert [(entry.actor, entry.target) for entry in audit] == [("ada", name)] * 2


async def test_a_start_from_checkpoints_deleted_meanwhile_is_refused(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry starts from zero, as a later retry does. A start that names the checkpoints is refused, and leaves
    nothing.
    """
    me = await api.token("ada")
    origin = await rested(api, me, JobState.FAILED)
    await api.service.blobs.put(f"checkpoints/{origin}/a1/10-x/manifest.json", b"{}")
    heir = await rested(api, me, JobState.FAILED, init_from=f"job/{origin}")
    await api.call("DELETE", f"/v1/jobs/{origin}/data?kind=checkpoints", me, 202)

    async def looked(*_: object) -> bool:
        return True

    monkeypatch.setattr(api.service.quotes, "has_checkpoint", looked)
    again = await api.call("POST", f"/v1/jobs/{origin}/retry", me, 202)
    assert (await api.call("GET", f"/v1/jobs/{again['id']}", me, 200))["spec"]["init_from"] is None
    kept = await api.service.blobs.list("data/")
    body = spec((await api.upload(me))["ref"], init_from=f"job/{heir}")
    body["train"]["method"] = {"kind": "full"}
    refused = await api.call("POST", "/v1/jobs", me, 422, json=body)
    assert refused["errors"][0]["field"] == "train.method.kind"
    monkeypatch.setattr(api.service.quotes, "_origin_faults", lambda *_: _nothing())
    body = spec((await api.upload(me))["ref"], init_from=f"job/{origin}")
    refused = await api.call("POST", "/v1/jobs", me, 422, json=body)
    assert refused["errors"][0]["field"] == "init_from"
    assert f"job {origin} had its checkpoints deleted on 20" in refused["detail"]
    gone = await api.call("POST", f"/v1/jobs/{heir}/retry?resume=0", me, 410)
    assert "submit its spec again without init_from" in gone["detail"]
    assert await api.service.blobs.list("data/") == kept


async def _nothing() -> list[Problem]:
    return []


async def test_a_capped_job_without_its_data_cannot_continue(api: Running) -> None:
    me = await api.token("ada")
    name = await rested(api, me, JobState.CAPPED)
    await api.call("DELETE", f"/v1/jobs/{name}/data?kind=data", me, 202)
    await api.call("PATCH", f"/v1/jobs/{name}", me, 410, json={"cap_usd": "50"})


async def test_data_of_a_queued_job_cannot_be_deleted(api: Running) -> None:
    me, other = await api.token("ada"), await api.token("bob", team="others")
    name = (await submitted(api, me))["id"]
    refused = await api.call("DELETE", f"/v1/jobs/{name}/data", me, 409)
    assert refused["detail"] == f"job {name} is queued; cancel it first, or wait for its end"
    await api.call("DELETE", f"/v1/jobs/{name}/data", other, 404)
    await api.call("DELETE", f"/v1/jobs/{name}/data?kind=everything", me, 422)


async def test_a_job_without_time_is_refused_with_the_number(api: Running) -> None:
    api.service.quotes.settings = replace(
        api.service.quotes.settings, drain_budget=DrainBudget(detect_s=10.0, drain_s=120.0, teardown_proof_s=5.0)
    )
    me = await api.token("ada")
    ref, now = (await api.upload(me))["ref"], api.service.clock.now()
    for changes, words in (
        ({"deadline": (now + timedelta(seconds=100)).isoformat()}, "and 135 s are needed to checkpoint and stop"),
        ({"deadline": (now - timedelta(seconds=100)).isoformat()}, "is past"),
        ({"deadline": "2026-01-31T12:00:00"}, "is not a time with its zone"),
        ({"deadline": 1_800_000_000}, "is not a time with its zone; write it as 2026-01-31"),
        ({"max_duration": 100}, "100 s, and 135 s are needed"),
        ({"idle": {"action": "explode"}}, "notify"),
        ({"retention": {"logs_days": -1}}, "logs_days"),
    ):
        refused = await api.call("POST", "/v1/jobs", me, 422, json=spec(ref, **changes))
        assert words in str(refused), refused


async def test_a_retry_drops_a_deadline_that_has_passed(api: Running) -> None:
    me = await api.token("ada")
    clock = ManualClock()
    clock.time = api.service.clock.now()
    api.service.clock = clock
    name = await rested(api, me, JobState.FAILED, deadline=(clock.time + timedelta(hours=1)).isoformat())
    clock.time += timedelta(hours=2)
    again = await api.call("POST", f"/v1/jobs/{name}/retry", me, 202)
    assert (await api.call("GET", f"/v1/jobs/{again['id']}", me, 200))["spec"]["deadline"] is None


async def test_a_retry_is_refused_when_its_model_s_code_is_allowed_no_more(api: Running) -> None:
    me = await api.token("ada")
    api.service.quotes.preflight = Checks(None, api.service.clock, [MODEL])
    ref = (await api.upload(me))["ref"]
    train = spec(ref)["train"] | {"trust_remote_code": True, "revision": "0123456789abcdef0123456789abcdef01234567"}
    name = await rested(api, me, JobState.FAILED, train=train)
    api.service.quotes.preflight = Checks(None, api.service.clock)
    refused = await api.call("POST", f"/v1/jobs/{name}/retry", me, 422)
    assert [e["field"] for e in refused["errors"]] == ["train.trust_remote_code"]
    assert len((await api.call("GET", "/v1/jobs", me, 200))["items"]) == 1


async def test_an_upload_that_was_deleted_is_asked_for_again(api: Running) -> None:
    me = await api.token("ada")
    upload = await api.upload(me)
    await api.service.blobs.delete(f"uploads/{upload['sha256']}")
    refused = await api.call("POST", "/v1/jobs", me, 422, json=spec(upload["ref"]))
    assert "upload it again" in refused["detail"]
    await api.service.store.forget_uploads(older_than_s=-1, limit=9)
    fresh = await api.token("bob")
    await api.call("POST", "/v1/jobs", fresh, 422, json=spec(upload["ref"]))
    await api.upload(me)
    await api.call("POST", "/v1/jobs", me, 202, json=spec(upload["ref"]))


async def test_a_start_from_another_job_is_compared_as_that_one_was_stored(api: Running, tmp_path: Path) -> None:
    """The stored spec has the folder in place of a link to it, if the model's own code may run."""
    (tmp_path / "real").mkdir()
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "real" / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "real" / name).touch()
    (tmp_path / "link").symlink_to("real")
    api.service.quotes.preflight = Checks(None, api.service.clock, [f"{tmp_path}/*"])
    me = await api.token("ada")
    body = spec((await api.upload(me))["ref"])
    body["train"] |= {"model": str(tmp_path / "link"), "trust_remote_code": True}
    origin = (await api.call("POST", "/v1/jobs", me, 202, json=body))["id"]
    await api.service.blobs.put(f"checkpoints/{origin}/a1/10-x/manifest.json", b"{}")
    await api.call("POST", "/v1/jobs", me, 202, json={**body, "init_from": f"job/{origin}"})
