"""Quotes, offers, uploads and results through either transport."""

import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import aiohttp
import pytest

from broker.api.schemas.quotes import QuoteView
from broker.domain.market.offer_history import BucketFigures, MarketGroup, OfferSample, bucket_of
from tests.api.harness import CSV, SEEN, SETTINGS, spec
from tests.api.test_files import admitted, put_checkpoint
from tests.parity.servers import KINDS, ApiServers
from tests.parity.test_jobs import good
from tests.parity.transport import Refused
from trainer.contract import object_keys as keys


def _without_times(quote: QuoteView) -> dict[str, Any]:
    """Return the fields that hold times of a quote, which differ between two quotes."""
    assert quote.chosen is not None
    assert quote.on_demand is not None
    assert quote.latest_on_demand_start is not None
    changes = {"finish_p50": None, "finish_p90": None, "deadline_chance": None}
    sides = {"chosen": quote.chosen, "on_demand": quote.on_demand}
    assert all(side.deadline_chance is not None and side.finish_p50 is not None for side in sides.values())
    times = dict.fromkeys(("made_at", "expires_at", "latest_on_demand_start"))
    return {**times, **{name: side.model_copy(update=changes) for name, side in sides.items()}}


async def test_a_quote_is_equal_over_both_apis(both: ApiServers) -> None:
    ada = await both.transport()
    given = await good(ada)
    del given["cap_usd"]
    given["deadline"] = (datetime.now(UTC) + timedelta(days=2)).isoformat()
    quoted = [await (await both.transport(kind=kind)).quote(given, limit=7) for kind in KINDS]
    by_http, by_grpc = (q.model_copy(update={"check": None, **_without_times(q)}) for q in quoted)
    assert by_http == by_grpc
    assert len(by_grpc.lines) == 7
    assert by_grpc.kept > 0
    assert quoted[0].check == quoted[1].check
    assert any(line.drop is None and line.usd_p50 is not None for line in by_grpc.lines)
    assert (await ada.jobs()).items == ()
    with pytest.raises(Refused) as refused:
        await ada.quote(given, limit=0)
    assert set(refused.value.fields) == {"limit"}


async def test_a_job_that_no_provider_ever_serves_is_refused(servers: ApiServers) -> None:
    ada, market = await servers.transport(), servers.api.market
    never = {**await good(ada), "resources": {"accelerators": ["b200"], "gpus": 2}}
    market.lists_all, market.seen_at = True, None
    job, _ = await ada.submit(never)
    assert (await ada.job(job.id)).state == "queued", "a provider that has not answered may sell anything"
    market.seen_at, market.items = SEEN, tuple(market.items)
    for call in (ada.quote, ada.submit):
        with pytest.raises(Refused) as refused:
            await call(never)
        assert refused.value.kind == "invalid"
        message = refused.value.fields["resources.accelerators"]
        assert message.startswith("no provider that the job may use ever sells b200; the nearest that would do is ")
        assert message.endswith(" at simulated")
    assert [listed.id for listed in (await ada.jobs()).items] == [job.id]
    market.items = [replace(offer, available=False) for offer in market.items]
    await ada.submit({**never, "resources": {"accelerators": ["h100"]}})


async def test_offers_are_filtered_and_cheapest_first(servers: ApiServers) -> None:
    ada = await servers.transport()
    everything = await ada.offers()
    assert everything.total == len(everything.items) == len(servers.api.market.items)
    prices = [o.usd_per_hour for o in everything.items]
    assert prices == sorted(prices)
    some = await ada.offers(accelerator=["rtx4090", "l40s"], limit=2)
    assert len(some.items) == 2 < some.total
    assert {o.accelerator for o in (await ada.offers(accelerator=["rtx4090"])).items} == {"rtx4090"}
    assert (await ada.offers(provider="nobody")).items == ()
    assert everything.providers[0].dropped == {"price 0 or less": 2}
    assert everything == await (await servers.transport(kind="http")).offers()
    with pytest.raises(Refused) as refused:
        await ada.offers(limit=100_000)
    assert refused.value.kind == "invalid"


async def test_offer_history_is_down_sampled_and_filtered(servers: ApiServers) -> None:
    ada, store = await servers.transport(), servers.api.service.store
    last = bucket_of(datetime.now(UTC)) - 1
    spot = MarketGroup("vast", "vast", "SE", "a100-80gb", 1, True)
    figures = {spot: BucketFigures(15000, 16000, 100), spot._replace(spot=False): BucketFigures(30000, 30000, None)}
    for bucket in range(last - 11, last + 1):
        await store.record_offers([OfferSample(provider="vast", bucket=bucket, figures=figures)])
    await store.record_refusal(spot, last)
    shown = await ada.offer_history(gpu=["a100"], days=1)
    assert (shown.total, shown.step_s) == (2, 600), "168 points of a day: two buckets each"
    assert [(item.spot, item.region) for item in shown.items] == [(True, "SE"), (False, "SE")]
    assert {point.available for point in shown.items[1].points} == {None}
    assert min(point.available for point in shown.items[0].points if point.available is not None) < 1, "the refusal"
    assert (await ada.offer_history(gpu=["a100"], market="on-demand")).total == 1
    few = await ada.offer_history(gpu=["a100"], days=1, points=1, limit=1)
    assert (len(few.items), few.items[0].points[-1].lowest_usd) == (1, Decimal("1.5"))
    assert (few.total, (await ada.offer_history(gpu=["h100"])).items) == (2, ())
    assert shown == await (await servers.transport(kind="http")).offer_history(gpu=["a100"], days=1, until=shown.until)
    for wrong, field in (
        ({}, "gpu"),
        ({"gpu": ["a100"], "days": 91}, "days"),
        ({"gpu": ["a100"], "limit": 0}, "limit"),
    ):
        with pytest.raises(Refused) as refused:
            await ada.offer_history(**wrong)
        assert (refused.value.kind, set(refused.value.fields)) == ("invalid", {field})
    large = await ada.offer_history(gpu=["a100"], points=27_000, limit=2)
    assert (large.total, len(large.items)) == (2, 1), "an answer has at most 27,000 points"
    early = await ada.offer_history(gpu=["a100"], days=90, until=datetime(1, 1, 3, tzinfo=UTC))
    assert (early.total, early.since) == (0, early.until)


async def test_providers_are_listed_and_checked(servers: ApiServers) -> None:
    ada, admin = await servers.transport(), await servers.transport("root", "admin")
    assert [(p.name, p.problem) for p in (await ada.providers()).items] == [("simulated", None)]
    assert [p.name for p in (await admin.check_providers()).items] == ["simulated"]


async def test_an_upload_is_known_by_its_hash(servers: ApiServers) -> None:
    ada = await servers.transport()
    digest = hashlib.sha256(CSV.encode()).hexdigest()
    upload = await ada.upload(CSV.encode(), name="words.csv", sha256=digest)
    assert (upload.ref, upload.sha256, upload.bytes) == (f"upload:{digest}", digest, len(CSV))
    assert upload.summary is not None
    assert (upload.summary["rows"], upload.summary["format"]) == (40, "csv")
    assert upload == await (await servers.transport(kind="http")).upload(CSV.encode(), name="words.csv")


async def test_a_bad_upload_is_refused_and_nothing_is_kept(servers: ApiServers) -> None:
    ada = await servers.transport()
    refusals: tuple[tuple[bytes, str, str | None, str, set[str]], ...] = (
        (CSV.encode(), "words.csv", "0" * 64, "invalid", {"sha256"}),
        (CSV.encode(), "words.csv", "short", "invalid", {"sha256"}),
        (CSV.encode(), "words", None, "invalid", {"name"}),
        (CSV.encode(), "a/b.csv", None, "invalid", {"name"}),
        (b"x" * (SETTINGS.upload_bytes + 1), "words.csv", None, "too_large", set()),
        (b"no tar", "code.tar", None, "invalid", {"body"}),
    )
    for data, name, sha256, kind, fields in refusals:
        with pytest.raises(Refused) as refused:
            await ada.upload(data, name=name, sha256=sha256)
        assert (refused.value.kind, set(refused.value.fields)) == (kind, fields)
    with pytest.raises(Refused) as refused:
        await ada.submit(spec(f"upload:{hashlib.sha256(CSV.encode()).hexdigest()}"))
    assert "train.data.path" in refused.value.fields


async def test_results_are_those_of_the_manifest_and_damage_is_reported(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    none = await ada.artifacts(job.id)
    assert (none.step, none.complete, none.items) == (None, False, ())
    attempt = await admitted(servers.api, job.id)
    big = bytes(range(256)) * 10_000
    folder = await put_checkpoint(servers.api, job.id, attempt, 10, {"a/b c.bin": big, "e": b""}, complete=True)
    listed = await ada.artifacts(job.id)
    assert (listed.step, listed.complete) == (10, True)
    assert await ada.artifact(job.id, "a/b c.bin") == (big, hashlib.sha256(big).hexdigest())
    assert await ada.artifact(job.id, "e") == (b"", hashlib.sha256(b"").hexdigest())
    with pytest.raises(Refused) as refused:
        await ada.artifact(job.id, "other")
    assert refused.value.kind == "not_found"
    for damaged in (b"damaged", big[:-1] + b"x", big[:-1], big + b"x"):
        await servers.api.service.blobs.put(folder + keys.FILES + "a/b c.bin", damaged)
        with pytest.raises(Refused) as refused:
            await ada.artifact(job.id, "a/b c.bin")
        assert refused.value.kind == "damaged"


async def test_a_damaged_large_file_is_never_sent_in_full(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    attempt = await admitted(servers.api, job.id)
    large = bytes(range(256)) * (9 << 12)
    folder = await put_checkpoint(servers.api, job.id, attempt, 10, {"shard": large, "even": large[: 8 << 20]})
    assert (await ada.artifact(job.id, "shard"))[0] == large
    assert (await ada.artifact(job.id, "even"))[0] == large[: 8 << 20]
    for damaged in (large[:-1] + b"x", b"x" + large[1:], large[: 5 << 20], large + b"x"):
        await servers.api.service.blobs.put(folder + keys.FILES + "shard", damaged)
        with pytest.raises((Refused, aiohttp.ClientPayloadError)) as refused:  # HTTP has sent its status by then
            await ada.artifact(job.id, "shard")
        assert getattr(refused.value, "kind", "damaged") == "damaged"
    assert (await ada.artifact(job.id, "even"))[0] == large[: 8 << 20], "the transport continues"
