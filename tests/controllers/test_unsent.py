"""A create that was prepared but never sent: the cloud has no machine, so no absence must be proven before the next
create.
"""

from dataclasses import replace
from typing import Any

import pytest

from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import InstanceName
from broker.domain.instance import Liveness
from broker.domain.job import JobState, Reason
from broker.domain.money import ZERO
from tests.support.rig.broker_rig import RigBuilder
from trainer.contract import object_keys as keys


async def test_an_unsent_create_is_sent_though_its_launcher_lives(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig()
    put = rig.blobs.put
    refused: list[str] = []

    async def flaky(key: str, data: bytes, **how: Any) -> str:
        if key.endswith("spec.json") and not refused:
            refused.append(key)
            raise BlobsUnavailable("the blob store does not answer")
        return await put(key, data, **how)

    create, liveness = rig.provider.create, rig.provider.launcher
    sent: list[Any] = []

    async def creates(*asked: Any) -> Any:
        sent.append(asked)
        return await create(*asked)

    async def alive(launched_by: str, name: InstanceName) -> Liveness:
        return await liveness(launched_by, name) if sent else Liveness.ALIVE

    monkeypatch.setattr(rig.blobs, "put", flaky)
    monkeypatch.setattr(rig.provider, "create", creates)
    monkeypatch.setattr(rig.provider, "launcher", alive)
    async with rig.running():
        job = await rig.submit()
        await rig.state_of(job, JobState.SUCCEEDED)
        assert [attempt.reason for attempt in await rig.attempts(job)] == [Reason.COMPLETED]
        assert refused
        assert len(sent) == 1


async def test_an_unsent_create_costs_neither_money_nor_a_retry(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blob store takes no writes for longer than a boot may take, and than a quote holds."""
    rig = build_rig()
    put, shut = rig.blobs.put, [True]

    async def refusing(key: str, data: bytes, **how: Any) -> str:
        if shut[0]:
            raise BlobsUnavailable("s3: 403 InvalidAccessKeyId")
        return await put(key, data, **how)

    monkeypatch.setattr(rig.blobs, "put", refusing)
    async with rig.running():
        job = await rig.submit(retry={"max": 0})

        async def reported(so_many: int) -> bool:
            attempts = await rig.attempts(job)
            return len(attempts) >= so_many and attempts[-1].detail.startswith("create was not sent")

        for number in (1, 2):
            await rig.eventually(lambda so_many=number: reported(so_many), within_s=120)  # type: ignore[misc]
            rig.clock.forward(rig.provider.caps.boot_deadline_s + rig.intervals.quote_ttl_s)
        shut[0] = False
        job_now = await rig.state_of(job, JobState.SUCCEEDED, JobState.FAILED, within_s=120)
        assert (job_now.state, job_now.retries_used) == (JobState.SUCCEEDED, 0), job_now.reason
        *unsent, last = await rig.attempts(job)
        assert {one.reason for one in unsent} == {Reason.QUOTE_EXPIRED}
        assert {(one.charged_usd, one.create_sent_at) for one in unsent} == {(ZERO, None)}
        assert "create was not sent: s3: 403" in unsent[0].detail
        assert last.reason is Reason.COMPLETED


async def test_an_attempt_without_a_storage_grant_costs_no_money(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec is written last. A spec in the store therefore shows that the cloud may have received the create."""
    rig = build_rig()
    rig.intervals = replace(rig.intervals, quote_ttl_s=60.0)  # shorter than a boot, so that only the quote expires

    async def refused(*_: Any, **__: Any) -> Any:
        raise BlobsUnavailable("STS: AccessDenied")

    monkeypatch.setattr(rig.blobs, "grant", refused)
    async with rig.running():
        job = await rig.submit(retry={"max": 0})

        async def reported() -> bool:
            return any("AccessDenied" in attempt.detail for attempt in await rig.attempts(job))

        await rig.eventually(reported)
        (first,) = await rig.attempts(job)
        assert await rig.blobs.get(keys.spec(first.id)) is None, "another process takes it for a create that was sent"
        rig.clock.forward(rig.intervals.quote_ttl_s)
        await rig.until(job, lambda found: found.attempts == 2)
        first, *_ = await rig.attempts(job)
    assert (first.reason, first.charged_usd, first.create_sent_at) == (Reason.QUOTE_EXPIRED, ZERO, None)
