"""The agent reports the end of an attempt, even if the store is unreachable at that moment."""

import asyncio
from pathlib import Path

import pytest

from trainer.agent import deliver_results as deliver
from trainer.agent.base.background import background
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.agent.final_report import FinalReport
from trainer.agent.upload.heartbeat import HeartbeatSender
from trainer.agent.upload.log_buffer import LogBuffer, Redactor
from trainer.agent.upload.log_shipper import Shipper
from trainer.contract import object_keys as keys
from trainer.contract.documents import Final, Heartbeat, Limits, Outcome
from trainer.core.ipc import RunFolder
from trainer.objectstore.objects import Objects, ObjectStoreError


class Away(Objects):
    """Store that fails some writes of heartbeats, and some reads of the final report."""

    tries = 0
    hidden = 0
    looks = 0

    async def read(self, key: str) -> bytes | None:
        if key.startswith(keys.final("a")):
            self.looks += 1
            if self.looks <= self.hidden:
                raise ObjectStoreError("away")
        return await super().read(key)

    async def write(self, key: str, data: bytes) -> None:
        if key.startswith(keys.HEARTBEATS) and self.tries:
            self.tries -= 1
            raise ObjectStoreError("away")
        await super().write(key, data)


class Mate:
    """The parts of the agent on the second of two machines that wait for the first machine."""

    def __init__(self, folder: Path, node: int = 1) -> None:
        env = Environment(blobs="", installation="inst", attempt="a", node=node, workdir=folder)
        self.state = AgentState(env=env, run=RunFolder(root=folder))
        self.state.limits = Limits(heartbeat_s=0.01, drain_s=0)
        self.objects = Away.open(f"file://{folder}", {}, "inst")
        self.heartbeats, log = HeartbeatSender(self.objects, self.state), LogBuffer(Redactor({}))
        shipper = Shipper(self.objects, log, env, self.state)
        self.word = FinalReport(self.objects, env, self.state, heartbeats=self.heartbeats, shipper=shipper)
        self.heard: list[str] = []

    async def waits(self, outcome: Outcome = Outcome.COMPLETED) -> None:
        async with background(self.heartbeats.run()):
            await self.word.await_first_machine(outcome, "", self.heard.append)

    async def beat(self) -> Heartbeat | None:
        data = await self.objects.read(keys.heartbeat("a", 1))
        return Heartbeat.model_validate_json(data) if data else None

    async def has_beaten(self, times: int) -> bool:
        """Wait for `times` heartbeats; return True if the last one has the phase `done`."""
        while (beat := await self.beat()) is None or beat.seq < times:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return beat.phase == "done"

    async def write_final_report(self) -> None:
        await self.objects.create(
            keys.final("a"), Final(attempt="a", outcome=Outcome.COMPLETED).model_dump_json().encode()
        )


@pytest.fixture
def mate(tmp_path: Path) -> Mate:
    return Mate(tmp_path)


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.DRAINED, Outcome.DEADMAN])
async def test_a_finished_machine_sends_heartbeats_until_the_first_one_reports(mate: Mate, outcome: Outcome) -> None:
    """The second machine sends heartbeats until the first one reports, although the store fails meanwhile."""
    mate.objects.hidden, mate.state.limits = 3, Limits(heartbeat_s=0.01)
    waiting = asyncio.create_task(mate.waits(outcome))
    assert await mate.has_beaten(10)
    assert not waiting.done()
    mate.objects.hidden = mate.objects.looks + 3
    await mate.write_final_report()
    await waiting
    assert mate.objects.looks == mate.objects.hidden + 1
    assert mate.heard == [f"{outcome} here; the first machine reports how the attempt ended"]


async def test_no_machine_waits_after_the_first_ones_final_report(mate: Mate) -> None:
    await mate.write_final_report()
    await mate.waits()
    assert mate.objects.looks == 1


@pytest.mark.parametrize("save", [True, False])
async def test_a_requested_end_limits_the_wait_for_the_first_machine(mate: Mate, save: bool) -> None:
    waiting = asyncio.create_task(mate.waits())
    assert await mate.has_beaten(2)
    mate.state.end(Outcome.DRAINED, "told", save=save)
    await waiting


async def test_a_finished_machine_waits_for_a_drain_in_progress(mate: Mate) -> None:
    """The second machine waits because the first one still saves during its drain."""
    mate.state.limits = Limits(heartbeat_s=0.01, drain_s=600)
    mate.state.end(Outcome.DRAINED, "told")
    waiting = asyncio.create_task(mate.waits(Outcome.DRAINED))
    assert await mate.has_beaten(5)
    mate.state.notice(0)
    await waiting


async def test_a_finished_machine_waits_no_longer_than_a_delivery_may_take(
    mate: Mate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "LIMIT_S", 0.1)
    await mate.waits()
    assert mate.heard


@pytest.mark.parametrize(("node", "outcome"), [(0, Outcome.COMPLETED), (1, Outcome.USER_ERROR)])
async def test_the_reporting_machine_does_not_wait(node: int, outcome: Outcome, tmp_path: Path) -> None:
    mate = Mate(tmp_path, node)
    await mate.waits(outcome)
    assert (mate.objects.looks, mate.state.phase) == (0, "starting")


@pytest.mark.parametrize("tries", [0, 3])
async def test_the_last_heartbeat_is_retried_during_a_short_store_outage(
    tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: at_once(0))
    env = Environment(blobs="", installation="inst", attempt="a", workdir=tmp_path)
    state, objects = AgentState(env=env, run=RunFolder(root=tmp_path)), Away.open(f"file://{tmp_path}", {}, "inst")
    objects.tries = tries
    shipper = Shipper(objects, LogBuffer(Redactor({})), env, state)
    word = FinalReport(objects, env, state, heartbeats=HeartbeatSender(objects, state), shipper=shipper)
    assert await word.write(Outcome.COMPLETED, "", 0, failed_by_peer=False) is Outcome.COMPLETED
    beat, final = await objects.read(keys.heartbeat("a", 0)), await objects.read(keys.final("a"))
    assert beat is not None
    assert final is not None
    assert Heartbeat.model_validate_json(beat).phase == "done"
    assert Final.model_validate_json(final).outcome is Outcome.COMPLETED
