"""Events and logs over either transport: complete, without repeats, with an end and the caller's deadline."""

import json
from contextlib import suppress

import pytest

from broker.api.http.context import AUTH
from broker.domain.job import JobState
from tests.api.test_feeds import happens
from tests.api.test_files import admitted, put_checkpoint
from tests.parity.servers import KINDS, ApiServers
from tests.parity.test_jobs import good
from tests.parity.transport import End, Piece, Refused
from trainer.contract import object_keys as keys


async def test_events_continue_where_a_follower_left_and_end_with_the_job(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    for i in range(4):
        await happens(servers.api, job.id, f"test.{i}")
    first = []
    async for event in ada.events(job.id):
        assert not isinstance(event, End)
        first.append(event.seq)
        if len(first) == 2:
            break
    await happens(servers.api, job.id, "job.failed", end=JobState.FAILED)
    rest = [e async for e in ada.events(job.id, after=first[-1])]
    assert first + [e.seq for e in rest if not isinstance(e, End)] == [1, 2, 3, 4, 5, 6]
    assert rest[-1] == End("failed")
    kinds = [e.kind for e in rest if not isinstance(e, End)]
    assert kinds == ["test.1", "test.2", "test.3", "job.failed"]


async def test_a_live_follower_receives_events_at_once(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    stream = ada.events(job.id)
    assert getattr(await anext(stream), "kind", None) == "job.submitted"
    await happens(servers.api, job.id, "job.failed", end=JobState.FAILED)
    assert [getattr(e, "kind", "end") async for e in stream] == ["job.failed", "end"]


async def test_a_stream_ends_when_its_token_is_revoked(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    stream = (await servers.transport("eve", "read")).events(job.id)
    assert getattr(await anext(stream), "kind", None) == "job.submitted"
    (eve,) = [token for token in await servers.api.service.store.tokens() if token.owner == "eve"]
    await servers.api.service.store.delete_token(eve.id)
    servers.api.app[AUTH].forget()
    await happens(servers.api, job.id, "job.failed", end=JobState.FAILED)
    told = []
    with suppress(Refused):
        async for event in stream:
            told.append(event)
    assert told == []


async def test_logs_continue_where_a_reader_left(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    attempt = await admitted(servers.api, job.id)
    for node, number, text in ((0, 0, b"zero\n"), (0, 1, "größe\n".encode()), (1, 0, b"node one\n")):
        await servers.api.service.blobs.put(keys.log_chunk(attempt, node, "boot", number), text)
    seen: list[Piece] = []
    for _ in range(3):
        async for piece in ada.logs(job.id, position=seen[-1].position if seen else ""):
            assert isinstance(piece, Piece)
            seen.append(piece)
            break
    assert [(p.attempt, p.node, p.text) for p in seen] == [(1, 0, "zero\n"), (1, 0, "größe\n"), (1, 1, "node one\n")]
    with pytest.raises(Refused) as refused:
        [p async for p in ada.logs(job.id, attempt=9)]
    assert refused.value.kind == "not_found"
    with pytest.raises(Refused) as refused:
        [p async for p in ada.logs(job.id, position="a;b-c")]
    assert refused.value.kind == "invalid"


async def test_the_log_of_a_job_that_never_started_ends_with_it(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    await happens(servers.api, job.id, "job.failed", end=JobState.FAILED)
    assert [p async for p in ada.logs(job.id)] == [End("failed")]


async def test_a_deadline_ends_an_idle_stream(servers: ApiServers) -> None:
    ada = await servers.transport()
    job, _ = await ada.submit(await good(ada))
    with pytest.raises(Refused) as refused:
        [e async for e in ada.events(job.id, timeout_s=0.2)]
    assert refused.value.kind == "deadline"


async def test_metrics_are_equal_over_both_apis(both: ApiServers) -> None:
    ada = await both.transport()
    job, _ = await ada.submit(await good(ada))
    attempt = await admitted(both.api, job.id)
    rows = [{"step": n, "loss": 5.0 - n, "tokens": 50, "seconds": 0.5, "attempt": 1} for n in (1, 2, 3)]
    rows += [{"step": 4, "loss": float("inf"), "time": 1.5, "lr": 1e-4, "attempt": 2**40}, {"step": 2**70}]
    journal = b"\n".join(json.dumps(row).encode() for row in rows)
    await put_checkpoint(both.api, job.id, attempt, 4, {"metrics.jsonl": journal})
    callers = [await both.transport(kind=kind) for kind in KINDS]
    for given in ({}, {"after": 2}, {"points": 2}):
        by_http, by_grpc = [await caller.metrics(job.id, **given) for caller in callers]
        assert by_http == by_grpc
    whole = await ada.metrics(job.id)
    assert (whole.step, whole.attempt, whole.total) == ((1, 2, 3, 4), (1, 1, 1, 0), 4)
    assert (whole.loss, whole.time) == ((4.0, 3.0, 2.0, None), (None, None, None, 1.5))
    assert (whole.lr, whole.tokens_per_s) == ((None, None, None, 1e-4), (100.0, 100.0, 100.0, None))
    for caller in callers:
        with pytest.raises(Refused) as refused:
            await caller.metrics(job.id, points=1)
        assert set(refused.value.fields) == {"points"}
        with pytest.raises(Refused) as refused:
            await caller.metrics("a" * 13)
        assert refused.value.kind == "not_found"
