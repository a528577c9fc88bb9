"""Quotes and jobs over HTTP, as a client sees them."""

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import Any

from broker.domain.ids import JobId
from broker.domain.job import Event, JobState
from broker.quote.decision_record import packed
from tests.api.harness import Running, spec
from tests.conformance.samples import admission
from tests.support.machines import offer, quoted
from trainer.contract import object_keys as keys


async def submitted(api: Running, me: dict[str, str], **changes: Any) -> dict[str, Any]:
    ref = (await api.upload(me))["ref"]
    return await api.call("POST", "/v1/jobs", me, 202, json=spec(ref, **changes))


async def test_quote_ranks_offers_explains_and_proposes_a_cap(api: Running) -> None:
    """The spec has no cap."""
    me = await api.token("ada")
    body = spec((await api.upload(me))["ref"])
    del body["cap_usd"]
    quote = await api.call("POST", "/v1/quotes?limit=1000", me, 200, json=body)
    kept = [line for line in quote["lines"] if line["verdict"] == "kept"]
    assert len(kept) == quote["kept"] > 0
    prices = [Decimal(line["usd_p50"]) for line in kept]
    assert prices == sorted(prices)
    assert Decimal(quote["proposed_cap_usd"]) >= Decimal(kept[0]["usd_p90"])
    assert all(line["reason"] for line in quote["lines"])
    assert all(line["offer"]["simulated"] for line in quote["lines"])
    assert quote["check"]["data"]["rows"] == 40
    assert (await api.call("GET", "/v1/jobs", me, 200))["items"] == []


async def test_a_quote_is_cut_at_its_limit_and_still_counts_everything(api: Running) -> None:
    me = await api.token("ada")
    body = spec((await api.upload(me))["ref"])
    quote = await api.call("POST", "/v1/quotes?limit=2", me, 200, json=body)
    assert len(quote["lines"]) == 2
    assert quote["kept"] + sum(quote["drops"].values()) == len(api.market.items)


async def test_an_accepted_job_is_stored_with_its_own_copy_of_the_data(api: Running) -> None:
    me = await api.token("ada")
    upload = await api.upload(me)
    job = await api.call("POST", "/v1/jobs", me, 202, json=spec(upload["ref"], labels={"team": "nlp"}))
    assert (job["state"], job["owner"], job["cap_usd"]) == ("queued", "ada", "5.00")
    await api.service.blobs.delete(keys.upload(upload["sha256"]))
    data = await api.service.blobs.get(keys.job_data(job["id"], upload["sha256"]))
    assert data is not None
    assert data.startswith(b"word,definition")
    detail = await api.call("GET", f"/v1/jobs/{job['id']}", me, 200)
    assert detail["spec"]["train"]["data"]["format"] == "csv"
    assert detail["runs"] == []
    assert detail["reserved_usd"] == "0"
    events = await api.call("GET", f"/v1/jobs/{job['id']}/events?follow=0", me, 200)
    assert [(e["seq"], e["kind"]) for e in events["items"]] == [(1, "job.submitted")]


async def test_concurrent_submits_with_one_key_create_one_job(api: Running) -> None:
    me = await api.token("ada")
    ref = (await api.upload(me))["ref"]
    headers = me | {"Idempotency-Key": "one"}
    answers = await asyncio.gather(*(api.call("POST", "/v1/jobs", headers, 202, json=spec(ref)) for _ in range(12)))
    assert len({a["id"] for a in answers}) == 1
    assert len((await api.call("GET", "/v1/jobs", me, 200))["items"]) == 1
    copies = [b.key for b in await api.service.blobs.list(keys.JOB_DATA)]
    assert copies == [keys.job_data(answers[0]["id"], ref.removeprefix("upload:"))]
    refused = await api.call("POST", "/v1/jobs", headers, 409, json=spec(ref, name="another"))
    assert refused["status"] == 409
    other = await api.token("bob")
    await api.upload(other)
    theirs = await api.call("POST", "/v1/jobs", other | {"Idempotency-Key": "one"}, 202, json=spec(ref))
    assert theirs["id"] != answers[0]["id"]


async def test_lists_filter_by_label_state_and_time_and_turn_pages(api: Running) -> None:
    me = await api.token("ada")
    ids = []
    for i in range(5):
        labels = {"team": "nlp", "run": str(i)}
        ids.append((await submitted(api, me, name=f"n{i}", labels=labels))["id"])
    first = await api.call("GET", "/v1/jobs?limit=2", me, 200)
    second = await api.call("GET", f"/v1/jobs?limit=2&cursor={first['next']}", me, 200)
    third = await api.call("GET", f"/v1/jobs?limit=2&cursor={second['next']}", me, 200)
    assert [j["id"] for page in (first, second, third) for j in page["items"]] == ids[::-1]
    assert third["next"] is None
    page = await api.call("GET", "/v1/jobs?label=team:nlp&label=run:3", me, 200)
    assert [j["name"] for j in page["items"]] == ["n3"]
    assert (await api.call("GET", "/v1/jobs?state=failed&state=active", me, 200))["items"] == []
    assert len((await api.call("GET", "/v1/jobs?state=queued", me, 200))["items"]) == 5
    assert (await api.call("GET", "/v1/jobs?until=2020-01-01T00:00:00Z", me, 200))["items"] == []
    for past in ("2020-01-01T00:00:00Z", "2020-01-01", "2h", "7d", "1h30m"):  # as the command line takes them
        assert len((await api.call("GET", f"/v1/jobs?since={past}", me, 200))["items"]) == 5
        assert (await api.call("GET", f"/v1/jobs?until={past}", me, 200))["items"] == []


async def test_cancel_twice_is_one_stop(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    for _ in range(2):
        stopped = await api.call("POST", f"/v1/jobs/{job['id']}/cancel", me, 202)
        assert stopped["stop_requested"]
    events = await api.call("GET", f"/v1/jobs/{job['id']}/events?follow=0", me, 200)
    assert [e["kind"] for e in events["items"]] == ["job.submitted", "job.stop_requested"]


async def test_a_cap_only_rises(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    path = f"/v1/jobs/{job['id']}"
    raised = await api.call("PATCH", path, me, 200, json={"cap_usd": "7.5"})
    assert Decimal(raised["cap_usd"]) == Decimal("7.5")
    refused = await api.call("PATCH", path, me, 422, json={"cap_usd": "7.49"})
    assert refused["errors"][0]["field"] == "cap_usd"
    assert "$7.5" in refused["errors"][0]["message"]


async def test_a_job_that_runs_is_not_retried(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    refused = await api.call("POST", f"/v1/jobs/{job['id']}/retry", me, 409)
    assert "cancel it first" in refused["detail"]


async def test_teams_see_only_their_own_and_admins_everything(api: Running) -> None:
    ada, bob, root = await api.token("ada"), await api.token("bob", team="blue"), await api.token("root", "admin")
    job = await submitted(api, ada)
    path = f"/v1/jobs/{job['id']}"
    reads = ["", "/events?follow=0", "/logs?follow=0", "/ledger", "/artifacts", "/artifacts/x"]
    for read in reads:
        await api.call("GET", path + read, bob, 404)
    for action in ("/cancel", "/retry"):
        await api.call("POST", path + action, bob, 404)
    await api.call("PATCH", path, bob, 404, json={"cap_usd": 9})
    assert (await api.call("GET", "/v1/jobs", bob, 200))["items"] == []
    assert (await api.call("GET", "/v1/jobs?owner=ada", bob, 200))["items"] == []
    refused = await api.call("POST", "/v1/jobs", bob, 422, json=spec(job_ref(await api.upload(ada))))
    assert refused["errors"][0]["field"] == "train.data.path"
    await api.upload(bob)
    foreign = spec(job_ref(await api.upload(bob)), init_from=f"job/{job['id']}")
    refused = await api.call("POST", "/v1/jobs", bob, 422, json=foreign)
    assert refused["errors"][0]["field"] == "init_from"
    assert (await api.call("GET", path, root, 200))["owner"] == "ada"
    assert len((await api.call("GET", "/v1/jobs", root, 200))["items"]) == 1
    assert (await api.call("GET", "/v1/jobs?owner=bob", root, 200))["items"] == []


async def test_members_of_a_team_see_and_stop_each_other_s_jobs(api: Running) -> None:
    ada, cyd = await api.token("ada"), await api.token("cyd")
    job = await submitted(api, ada)
    assert [one["id"] for one in (await api.call("GET", "/v1/jobs", cyd, 200))["items"]] == [job["id"]]
    assert (await api.call("GET", "/v1/jobs?owner=cyd", cyd, 200))["items"] == []
    refused = await api.call("POST", "/v1/jobs", cyd, 422, json=spec(job_ref(await api.upload(ada))))
    assert refused["errors"][0]["field"] == "train.data.path"  # uploads and secrets stay their owner's
    stopped = await api.call("POST", f"/v1/jobs/{job['id']}/cancel", cyd, 202)
    assert (stopped["owner"], stopped["stop_requested"]) == ("ada", True)


def job_ref(upload: dict[str, Any]) -> str:
    return str(upload["ref"])


async def test_a_missing_job_and_a_foreign_one_look_alike(api: Running) -> None:
    ada, bob = await api.token("ada"), await api.token("bob", team="blue")
    job = await submitted(api, ada)
    foreign = await api.call("GET", f"/v1/jobs/{job['id']}", bob, 404)
    missing = await api.call("GET", f"/v1/jobs/{'a' * 13}", bob, 404)
    assert foreign["detail"].replace(job["id"], "a" * 13) == missing["detail"]


async def test_the_ledger_and_offers_are_shown(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    assert await api.call("GET", f"/v1/jobs/{job['id']}/ledger", me, 200) == {"items": []}
    offers = await api.call("GET", "/v1/offers?limit=3", me, 200)
    assert len(offers["items"]) == 3
    assert offers["total"] == len(api.market.items)
    prices = [Decimal(o["usd_per_hour"]) for o in offers["items"]]
    assert prices == sorted(prices)


async def test_why_an_attempt_was_bought_is_shown_to_its_team_alone(api: Running) -> None:
    ada, bob = await api.token("ada"), await api.token("bob", team="blue")
    job = await submitted(api, ada)
    path = f"/v1/jobs/{job['id']}/decisions/1"
    assert (await api.call("GET", path, ada, 404))["detail"].endswith("has no attempt 1")
    market = [offer(id="cheap"), offer(id="dear", usd_per_hour=Decimal(20))]
    made = quoted(market, resources={"max_usd_per_hour": "10"})
    (claimed,) = await api.service.store.claim_jobs([JobState.QUEUED], owner="p", lease_s=60, limit=1)
    assert await api.service.store.apply([replace(admission(claimed), decision=packed(made))]) == [True]
    cheap, dear = (await api.call("GET", path, ada, 200))["items"]
    assert (cheap["offer"], cheap["drop"], Decimal(cheap["usd_p50"])) == ("cheap", None, made.lines[0].usd_p50)
    assert (dear["drop"], dear["usd_p50"]) == ("hourly_limit", None)
    assert dear["reason"] == "$20.00/h is above max_usd_per_hour 10"
    await api.call("GET", path, bob, 404)


async def test_an_event_written_by_another_part_is_seen(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    await api.service.store.request_stop(JobId(job["id"]), Event(job_id=JobId(job["id"]), kind="job.x", message="m"))
    events = await api.call("GET", f"/v1/jobs/{job['id']}/events?follow=0&after=1", me, 200)
    assert [e["kind"] for e in events["items"]] == ["job.x"]
