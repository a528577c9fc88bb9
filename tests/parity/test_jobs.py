"""Jobs over either transport have the same answers and refusals."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from broker.api.schemas.jobs import EventView
from broker.domain.job import JobState
from tests.api.harness import CSV, spec
from tests.api.test_feeds import happens
from tests.parity.servers import KINDS, ApiServers
from tests.parity.transport import End, Refused, Transport

NOBODY = "a" * 13


async def good(transport: Transport, **changes: Any) -> dict[str, Any]:
    return spec((await transport.upload(CSV.encode(), name="words.csv")).ref, **changes)


async def test_a_submitted_job_is_there_with_its_spec_and_its_cap(servers: ApiServers) -> None:
    ada = await servers.transport()
    given = await good(ada, labels={"run": "1"}, retry={"max": 2, "on": []}, resources={"gpus": 2, "spot": "never"})
    given["train"]["method"] = {"kind": "lora", "r": 4, "targets": "all-linear"}
    job, replayed = await ada.submit(given)
    assert not replayed
    seen = await ada.job(job.id)
    assert (seen.name, seen.owner, seen.state, seen.cap_usd) == ("cynic", "ada", JobState.QUEUED, Decimal("5.00"))
    assert (seen.spec.retry.on, seen.spec.resources.gpus, seen.spec.resources.spot) == ((), 2, "never")
    assert seen.spec.train is not None
    assert seen.spec.train.method.kind == "lora"
    assert seen.labels == {"run": "1"}
    assert (seen.finished_at, seen.retry_of, seen.runs) == (None, None, ())


async def test_a_default_is_the_same_over_both_apis(both: ApiServers) -> None:
    by_http, by_grpc = [await both.transport(kind=kind) for kind in KINDS]
    for writer in (by_http, by_grpc):
        job, _ = await writer.submit(await good(writer))
        assert await by_http.job(job.id) == await by_grpc.job(job.id)


async def test_a_key_makes_one_job_through_both_apis(servers: ApiServers) -> None:
    ada, other_door = (
        await servers.transport(),
        await servers.transport(kind="http" if servers.kind == "grpc" else "grpc"),
    )
    given = await good(ada)
    job, _ = await ada.submit(given, key="k-1")
    assert await ada.submit(given, key="k-1") == (job, True)
    again, replayed = await other_door.submit(given, key="k-1")
    assert (again.id, replayed) == (job.id, True)
    with pytest.raises(Refused) as refused:
        await ada.submit(given | {"name": "other"}, key="k-1")
    assert refused.value.kind == "conflict"
    with pytest.raises(Refused) as refused:
        await ada.submit(given, key="not ascii: ä")
    assert refused.value.kind == "invalid"
    assert len((await ada.jobs()).items) == 1


async def test_a_batch_that_was_left_open_is_a_number_of_the_job_for_good(servers: ApiServers) -> None:
    ada = await servers.transport()
    given = await good(ada)
    given["train"] |= {"global_batch": "auto", "micro_batch": 4, "max_steps": 3}
    told = "global_batch auto: 8 (Dettmers et al. 2023, QLoRA, table 9, of OASST1; fewer in proportion to the rows"
    assert (await ada.quote(given)).check["settled"].startswith(told)
    job, _ = await ada.submit(given, key="k-1")
    assert (await ada.submit(given, key="k-1"))[1], "the same as was asked for"
    seen = await ada.job(job.id)
    assert seen.spec.train is not None
    assert seen.spec.train.global_batch == 8
    (event,) = [e async for e in ada.events(job.id, follow=False)]
    assert told in getattr(event, "message", "")


BAD: list[tuple[dict[str, Any], set[str]]] = [
    ({"name": "Not A Name"}, {"name"}),
    ({"name": None}, {"name"}),
    ({"cap_usd": "NaN"}, {"cap_usd"}),
    ({"cap_usd": "1e-9"}, {"cap_usd"}),
    ({"cap_usd": "-1"}, {"cap_usd"}),
    ({"resources": {"spot": "sometimes", "nodes": 99}}, {"resources.spot", "resources.nodes"}),
    ({"retry": {"on": ["preempted", "boredom"]}}, {"retry.on.1"}),
    ({"labels": {"Bad Key": "x"}}, {"labels.Bad Key"}),
    ({"secrets": ["HF_TOKEN"]}, {"secrets.0"}),
    ({"env": {"GPUBROKER_X": "1"}}, {""}),
    ({"script": {"code": "x", "command": ["a"]}}, {""}),
    ({"resources": {"nodes": 3}}, {"train.global_batch"}),
    ({"init_from": "job/none"}, {"init_from"}),
    ({"idle": {"action": "sulk", "gpu_below": 2.0}}, {"idle.action", "idle.gpu_below"}),
    ({"checkpoint": {"every_s": float("inf")}}, {"checkpoint.every_s"}),
]


@pytest.mark.parametrize(("changes", "fields"), BAD, ids=[",".join(c) for c, _ in BAD])
async def test_bad_input_is_refused_by_the_same_fields_in_the_same_words(
    both: ApiServers, changes: dict[str, Any], fields: set[str]
) -> None:
    by_http, by_grpc = [await _told(await both.transport(kind=kind), changes) for kind in KINDS]
    if fields == {""}:  # of the whole, which HTTP calls body
        assert list(by_http.values()) == list(by_grpc.values())
    else:
        assert set(by_grpc) == fields
        assert {f: _neutral(t) for f, t in by_http.items()} == {f: _neutral(t) for f, t in by_grpc.items()}


async def _told(ada: Transport, changes: dict[str, Any]) -> Mapping[str, str]:
    given = {k: v for k, v in ((await good(ada)) | changes).items() if v is not None}
    with pytest.raises(Refused) as refused:
        await ada.submit(given)
    assert refused.value.kind == "invalid"
    return refused.value.fields


def _neutral(text: str) -> str:
    """Return a message without the offending value: an enum has numbers, JSON has words and nulls."""
    return text.partition(", not ")[0]


async def test_every_fault_of_a_spec_is_reported_at_once(servers: ApiServers) -> None:
    ada = await servers.transport()
    given = await good(ada, name="No", cap_usd="0")
    given["train"] |= {"epochs": -1.0, "method": {"kind": "lora", "r": 0}, "optim": {"lr": 2.0}}
    with pytest.raises(Refused) as refused:
        await ada.submit(given)
    assert set(refused.value.fields) == {"name", "cap_usd", "train.epochs", "train.method.r", "train.optim.lr"}
    assert (await ada.jobs()).items == ()


async def test_jobs_are_listed_newest_first_filtered_and_by_pages(servers: ApiServers) -> None:
    ada = await servers.transport()
    given = await good(ada)
    ids = []
    for i in range(5):
        job, _ = await ada.submit(given | {"name": f"job-{i}", "labels": {"parity": str(i % 2)}})
        ids.append(job.id)
    page = await ada.jobs(limit=2)
    seen = [job.id for job in page.items]
    while page.next is not None:
        page = await ada.jobs(limit=2, cursor=page.next)
        seen += [job.id for job in page.items]
    assert seen == ids[::-1]
    assert [j.id for j in (await ada.jobs(label=["parity:1"])).items] == [ids[3], ids[1]]
    assert (await ada.jobs(state=["succeeded"])).items == ()
    assert len((await ada.jobs(state=["queued", "failed"])).items) == 5
    assert (await ada.jobs(since=datetime.now(UTC) + timedelta(hours=1))).items == ()
    assert len((await ada.jobs(until=datetime.now(UTC) + timedelta(hours=1))).items) == 5
    for where, field in (({"limit": 0}, "limit"), ({"cursor": "x"}, "cursor"), ({"label": ["a"]}, "label.0")):
        with pytest.raises(Refused) as refused:
            await ada.jobs(**where)
        assert (refused.value.kind, set(refused.value.fields)) == ("invalid", {field})


async def test_a_job_is_cancelled_once(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    assert (await ada.cancel(job.id)).stop_requested
    assert (await ada.cancel(job.id)).stop_requested
    events = [e async for e in ada.events(job.id, follow=False) if not isinstance(e, End)]
    assert [e.kind for e in events] == ["job.submitted", "job.stop_requested"]


async def test_a_job_at_rest_is_retried_and_only_then(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    with pytest.raises(Refused) as refused:
        await ada.retry(job.id)
    assert refused.value.kind == "conflict"
    await happens(servers.api, job.id, "job.failed", end=JobState.FAILED)
    again, replayed = await ada.retry(job.id, resume=False, key="r")
    assert (again.retry_of, again.state, replayed) == (job.id, JobState.QUEUED, False)
    assert await ada.retry(job.id, resume=False, key="r") == (again, True)
    with pytest.raises(Refused) as refused:
        await ada.retry(job.id, resume=True, key="r")
    assert refused.value.kind == "conflict"
    with pytest.raises(Refused) as refused:
        await ada.cancel(job.id)
    assert refused.value.kind == "conflict"


async def test_a_cap_is_raised_and_never_lowered(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    assert (await ada.raise_cap(job.id, "7.50")).cap_usd == Decimal("7.50")
    assert (await ada.raise_cap(job.id, "7.5")).cap_usd == Decimal("7.50"), "asked again for want of an answer"
    told = [event.kind async for event in ada.events(job.id, follow=False) if isinstance(event, EventView)]
    assert told.count("job.cap_raised") == 1
    for lower in ("5", "7.49", "Infinity", "x", ""):
        with pytest.raises(Refused) as refused:
            await ada.raise_cap(job.id, lower)
        assert (refused.value.kind, set(refused.value.fields)) == ("invalid", {"cap_usd"})
    assert (await ada.ledger(job.id)).items == ()


async def test_a_missing_job_and_a_malformed_id_are_distinguished(servers: ApiServers) -> None:
    ada = await servers.transport()
    for call in (ada.job, ada.cancel, ada.retry, ada.ledger, ada.artifacts):
        with pytest.raises(Refused) as refused:
            await call(NOBODY)
        assert refused.value.kind == "not_found"
        with pytest.raises(Refused) as refused:
            await call("NOT-AN-ID")
        assert (refused.value.kind, set(refused.value.fields)) == ("invalid", {"job_id"})


async def test_a_token_is_needed_and_its_scope(servers: ApiServers) -> None:
    ada, reader = await servers.transport(), await servers.transport("ada", "read")
    job, _ = await ada.submit(await good(ada))
    assert (await reader.job(job.id)).id == job.id
    for denied in (reader.cancel(job.id), reader.submit(spec("upload:x")), reader.check_providers()):
        with pytest.raises(Refused) as refused:
            await denied
        assert refused.value.kind == "forbidden"
    for wrong in ("", "Bearer x", "Bearer gb_aaaaaaaa_" + "a" * 32, "Basic x"):
        stranger = servers.transport_with(wrong)
        with pytest.raises(Refused) as refused:
            await stranger.jobs()
        assert refused.value.kind == "unauthenticated"
        with pytest.raises(Refused) as refused:
            [e async for e in stranger.events(job.id)]
        assert refused.value.kind == "unauthenticated"
