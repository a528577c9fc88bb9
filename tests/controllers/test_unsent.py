"""A create that was prepared in vain: no cloud was asked, so nobody's death has to be proven before it is sent."""

from collections.abc import Callable
from typing import Any

import pytest

from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import InstanceName
from broker.domain.instance import Liveness
from broker.domain.job import JobState, Reason
from tests.controllers.house import House


async def test_what_was_never_sent_is_created_although_its_launcher_lives(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.controllers.launch.CREATE_LOOK_S", 0.02)
    broker = house()
    put = broker.blobs.put
    refused: list[str] = []

    async def flaky(key: str, data: bytes, **how: Any) -> str:
        if key.endswith("spec.json") and not refused:
            refused.append(key)
            raise BlobsUnavailable("the blob store does not answer")
        return await put(key, data, **how)

    create, told = broker.provider.create, broker.provider.launcher
    sent: list[Any] = []

    async def creates(*asked: Any) -> Any:
        sent.append(asked)
        return await create(*asked)

    async def alive(launched_by: str, name: InstanceName) -> Liveness:
        return await told(launched_by, name) if sent else Liveness.ALIVE

    monkeypatch.setattr(broker.blobs, "put", flaky)
    monkeypatch.setattr(broker.provider, "create", creates)
    monkeypatch.setattr(broker.provider, "launcher", alive)
    async with broker.running():
        job = await broker.submit()
        await broker.state_of(job, JobState.SUCCEEDED)
        assert [attempt.reason for attempt in await broker.attempts(job)] == [Reason.COMPLETED]
        assert refused
        assert len(sent) == 1
