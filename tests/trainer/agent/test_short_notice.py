"""Time that a notice leaves for a save, judged by earlier saves; and which deadline counts when an order comes late."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.agent.test_agent import SAVER, script
from tests.trainer.agent.test_checkpoint_uploader import ORIGIN, committed, snapshot
from tests.trainer.support import held_agent as held
from tests.trainer.support import tiny_jobs
from tests.trainer.support.harness import FAST, Agent, Bench, until
from tests.trainer.support.imds import Service, serving
from tests.trainer.support.token_store import store_url
from trainer.agent import preemption_notice as notices
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.agent.conclusion import exit_outcome
from trainer.agent.upload import save_cost as effort
from trainer.agent.upload.checkpoint_uploader import Saver
from trainer.agent.upload.save_cost import SaveCost, Sending
from trainer.checkpoint import protocol as checkpoint
from trainer.contract import object_keys as keys
from trainer.contract.documents import CheckpointRef, Limits, Outcome
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import RunFolder, SnapshotInfo, info_of
from trainer.objectstore.objects import Objects, ObjectStoreError

WORKS = (
    "import pathlib, os, sys\n(pathlib.Path(os.environ['GPUBROKER_CHECKPOINT_DIR']) / 'result').write_text('done')\n"
)


class Clock(SimpleNamespace):
    """Clock that only moves when a test moves it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (checkpoint, effort):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def state(tmp_path: Path) -> AgentState:
    run = RunFolder(root=tmp_path / "run")
    run.make()
    env = Environment(blobs=store_url(tmp_path), installation="inst", attempt="a", workdir=tmp_path)
    return AgentState(env=env, run=run, limits=Limits(drain_s=500))


@pytest.fixture
def saver(state: AgentState) -> Saver:
    objects, config = Objects.open(state.env.blobs, {}, "inst"), CheckpointConfig(keep=5)
    return Saver(objects, state, ORIGIN, config=config, guard=None, log=lambda _: None, committed=lambda _: None)


# ----------------------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("left_s", "save_s", "finish_s", "save", "finish"),
    [
        pytest.param(100.0, 96.0, None, False, False, id="too short"),
        pytest.param(100.0, 96.0, 97.0, False, False, id="too short for the rest as well"),
        pytest.param(100.0, 96.0, 60.0, False, True, id="the rest of one under way"),
        pytest.param(1000.0, 1.0, 0.5, True, False, id="long enough"),
        pytest.param(0.0, 0.001, 0.0, False, True, id="all of one is there but the manifest"),
        pytest.param(0.0, 0.001, None, False, False, id="none left"),
        pytest.param(None, 1e6, 0.0, True, False, id="no notice"),
        pytest.param(0.0, None, None, True, False, id="nobody knows"),
    ],
)
def test_a_last_save_is_begun_where_one_would_fit(
    state: AgentState, left_s: float | None, save_s: float | None, finish_s: float | None, save: bool, finish: bool
) -> None:
    state.choose_final_save(save_s, finish_s)
    assert not state.ending_asked.is_set()
    if left_s is not None:
        state.notice(left_s)
    state.checkpoint = CheckpointRef(manifest="m", step=7)
    state.end(Outcome.DRAINED, "taken away")
    state.choose_final_save(save_s, finish_s)
    assert state.ending is not None
    assert (state.ending.save, state.ending.finish) == (save, finish)
    assert ("the checkpoint of step 7 counts" in state.ending.reason) is not (save or finish)
    assert ("the complete snapshot is sent" in state.ending.reason) is finish
    said = state.ending.reason
    state.choose_final_save(save_s, finish_s)
    assert state.ending.reason == said, "it is said once"


def test_without_a_checkpoint_to_trust_a_save_is_begun_in_any_case(state: AgentState) -> None:
    state.notice(1.0)
    state.end(Outcome.DRAINED, "taken away")
    state.choose_final_save(10.0, 9.0)
    assert state.ending is not None
    assert state.ending.save


def test_a_stop_withdraws_what_is_being_finished_too(state: AgentState) -> None:
    state.notice(400.0)
    state.end(Outcome.DRAINED, "taken away")
    state.choose_final_save(1000.0, 1.0)
    assert state.drain_left_s > 0
    state.end(Outcome.DRAINED, "stop", save=False)
    assert state.drain_left_s == 0.0


# --------------------------------------------------------------------------------------------------- what saves take


async def test_a_store_that_was_away_is_no_part_of_what_a_save_takes(
    saver: Saver, state: AgentState, clock: Clock, tmp_path: Path
) -> None:
    folder = snapshot(state.run, 7)
    info_of(folder).write_text(SnapshotInfo(step=7, taken_s=2.5, stall_s=0.0).model_dump_json())
    (tmp_path / "store" / "inst").touch()  # a file where the folder would be: every call fails
    for _ in range(3):
        with pytest.raises(ObjectStoreError):
            await saver.once()
        clock.now += 1000
    (tmp_path / "store" / "inst").unlink()
    await saver.once()
    assert [manifest.save_s for manifest in await committed(saver)] == [2.5]
    assert state.checkpoint is not None
    assert state.checkpoint.save_s == saver.save_s == 2.5


def test_the_quickest_of_the_latest_saves_counts(clock: Clock) -> None:
    save_cost, quick = SaveCost(), Sending(folder=Path(), bytes=1000, whole=True, began=0.0)
    assert save_cost.save_s(None) is None
    assert save_cost.upload_s(10, None) is None
    clock.now = 10.0
    quick.more(1000)
    for save_s in (12.0, 900.0, 20.0):
        save_cost.saved(save_s, quick)
    assert save_cost.save_s(None) == 12.0
    assert save_cost.upload_s(500, None) == 5.0
    save_cost.saved(30.0, quick)
    assert save_cost.save_s(None) == 20.0, "of the three latest"


def test_before_the_first_commit_the_save_in_progress_gives_the_duration(clock: Clock) -> None:
    save_cost, first = SaveCost(), Sending(folder=Path(), bytes=1000, whole=True, began=0.0)
    assert save_cost.save_s(first) is None
    clock.now = 10.0
    first.more(100)
    assert save_cost.save_s(first) == 100.0
    assert save_cost.upload_s(first.bytes - first.sent, first) == 90.0


# ------------------------------------------------------------------------------------------------- what is under way


class Halfway:
    """Uploads that stop halfway until they may continue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        upload = Objects.upload

        async def halfway(objects: Objects, key: str, path: Path, sent: object) -> None:
            self.begun.set()
            await self.go_on.wait()
            await upload(objects, key, path, sent)  # type: ignore[arg-type]

        monkeypatch.setattr(Objects, "upload", halfway)


@pytest.fixture
def halfway(monkeypatch: pytest.MonkeyPatch) -> Halfway:
    return Halfway(monkeypatch)


async def test_a_save_that_no_later_one_overtakes_is_waited_for(
    saver: Saver, state: AgentState, halfway: Halfway
) -> None:
    snapshot(state.run, 1)
    going = asyncio.create_task(saver.run())
    await halfway.begun.wait()
    state.end(Outcome.DRAINED, "asked")
    settling = asyncio.create_task(saver.settle())
    await asyncio.sleep(0)
    assert not settling.done()
    halfway.go_on.set()
    await settling
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    assert [manifest.step for manifest in await committed(saver)] == [1]


async def test_a_save_that_a_later_snapshot_can_overtake_is_aborted(
    saver: Saver, state: AgentState, halfway: Halfway
) -> None:
    snapshot(state.run, 1)
    going = asyncio.create_task(saver.run())
    await halfway.begun.wait()
    state.end(Outcome.DRAINED, "asked")
    snapshot(state.run, 2)
    await saver.settle()
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    halfway.go_on.set()
    assert await saver.flush()
    assert [manifest.step for manifest in await committed(saver)] == [2]


async def test_a_save_is_not_aborted_for_a_later_one_that_would_not_fit(
    saver: Saver, state: AgentState, halfway: Halfway
) -> None:
    slow = Sending(folder=Path(), bytes=1, whole=True, began=-1e9, sent=1)
    saver._effort.saved(1e9, slow)
    snapshot(state.run, 1)
    going = asyncio.create_task(saver.run())
    await halfway.begun.wait()
    state.end(Outcome.DRAINED, "asked")
    snapshot(state.run, 2)
    settling = asyncio.create_task(saver.settle())
    await asyncio.sleep(0)
    assert not settling.done()
    halfway.go_on.set()
    await settling
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    assert 1 in {manifest.step for manifest in await committed(saver)}


async def test_a_save_is_waited_for_until_the_attempts_limit(saver: Saver, state: AgentState, halfway: Halfway) -> None:
    snapshot(state.run, 1)
    going = asyncio.create_task(saver.run())
    await halfway.begun.wait()
    state.notice(0.0)
    state.end(Outcome.DRAINED, "asked")
    await saver.settle()
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    assert await committed(saver) == []


# ------------------------------------------------------------------------------------------------------ a real agent


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(notices, "ANSWER_S", 60.0)
    with serving() as made:
        yield made


class Hold:
    """Agents that wait at a step while it is held."""

    def __init__(self, bench: Bench, service: Service, folder: Path) -> None:
        folder.mkdir()
        bench.module = held.__name__
        bench.env = {held.FOLDER: str(folder), "GPUBROKER_NOTICES": service.url}
        self._folder = folder

    def at(self, step: str) -> None:
        (self._folder / step).touch()

    def waits(self, step: str) -> bool:
        return (self._folder / (step + held.WAITS)).exists()

    def let_go(self, step: str) -> None:
        (self._folder / step).unlink()

    def begun(self) -> set[str]:
        """Return folders of the store that something was sent to."""
        return {"/".join(key.split("/")[:4]) for key in (self._folder / held.BEGUN).read_text().split()}


@pytest.fixture
def hold(bench: Bench, service: Service, tmp_path: Path) -> Hold:
    return Hold(bench, service, tmp_path / "held")


def saving(bench: Bench, hold: Hold) -> Agent:
    """Return an agent with a committed checkpoint, and another one halfway to the store."""
    agent = script(bench, SAVER, checkpoint=CheckpointConfig(every_s=1))
    until(lambda: agent.beat and agent.beat.checkpoint, "a checkpoint")
    hold.at(held.UPLOAD)
    (bench.folder / "work" / agent.attempt / "checkpoint" / "more").touch()
    until(lambda: hold.waits(held.UPLOAD), "another one under way")
    return agent


def test_a_notice_too_short_for_a_save_lets_the_one_under_way_end(bench: Bench, hold: Hold, service: Service) -> None:
    agent = saving(bench, hold)
    service.notice(600)
    until(lambda: "is killed" in agent.log, "the end of the program")
    hold.let_go(held.UPLOAD)
    final = agent.wait()
    assert final.outcome is Outcome.DRAINED
    assert "the complete snapshot is sent, and no other checkpoint is taken: a save takes 1000000.0 s" in final.message
    assert final.checkpoint is not None
    assert final.checkpoint.step == 2
    assert bench.committed()[0][0] == final.checkpoint.manifest
    assert len(hold.begun()) == 2, "it continued, and did not begin from zero"


def test_a_notice_without_time_aborts_the_upload(bench: Bench, hold: Hold, service: Service) -> None:
    agent = saving(bench, hold)
    service.notice(0)
    final = agent.wait()
    assert final.outcome is Outcome.DRAINED
    assert "the checkpoint of step 1 counts" in final.message
    assert final.checkpoint is not None
    assert final.checkpoint.step == 1


@pytest.mark.parametrize(("code", "outcome"), [(0, Outcome.COMPLETED), (3, Outcome.USER_ERROR)])
def test_a_program_that_ended_before_the_notice_keeps_its_outcome(
    bench: Bench, hold: Hold, service: Service, code: int, outcome: Outcome
) -> None:
    hold.at(held.SNAPSHOT)
    agent = script(bench, WORKS + f"print('over', flush=True)\nsys.exit({code})")
    until(lambda: "over" in agent.log, "the program's last line")
    until(lambda: not children(agent.process.pid), "its end")
    service.notice(600)
    until(lambda: agent.beat and agent.beat.notice_s, "the notice")
    hold.let_go(held.SNAPSHOT)
    final = agent.wait()
    assert final.outcome is outcome, final
    assert bench.committed()[0][1].complete is (code == 0)


def test_checkpoint_upload_cut_by_a_crash_is_not_sent_twice(bench: Bench, hold: Hold, tmp_path: Path) -> None:
    """The training dies during the upload of a checkpoint."""
    kind = tiny_jobs.KINDS["causal_lm lora"]
    train = tiny_jobs.train(kind, tmp_path / "model").model_copy(update={"max_steps": 100_000})
    hold.at(held.UPLOAD)
    data = bench.data(tiny_jobs.data(kind), kind.format)
    agent = bench.start(train=train, data=data, checkpoint=CheckpointConfig(every_s=10))
    until(lambda: hold.waits(held.UPLOAD), "a checkpoint under way")
    os.kill(int(children(agent.process.pid)[0]), signal.SIGKILL)
    until(lambda: not children(agent.process.pid), "the end of the training")
    seen = agent.beat.seq if agent.beat else 0
    until(lambda: agent.beat and agent.beat.seq > seen + 1, "beats of an agent that knows it")
    hold.let_go(held.UPLOAD)
    assert agent.wait().checkpoint is not None
    assert len(hold.begun()) == 1


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("want", ["stop", "drain"])
def test_an_order_that_leaves_no_time_for_the_results_wins(bench: Bench, hold: Hold, want: str) -> None:
    hold.at(held.UPLOAD)
    agent = script(bench, WORKS, limits=FAST.model_copy(update={"drain_s": 1.0, "outage_s": 3600}))
    until(lambda: agent.beat and agent.beat.phase == "saving", "the upload of the results")
    agent.desire(want)
    final = agent.wait()
    assert final.outcome is Outcome.DRAINED
    assert final.message == f"test wants {want}, before the results were in the blob store"
    assert bench.committed() == []


def test_results_that_are_safe_in_time_are_completed(bench: Bench, hold: Hold, service: Service) -> None:
    hold.at(held.UPLOAD)
    agent = script(bench, WORKS)
    until(lambda: agent.beat and agent.beat.phase == "saving", "the upload of the results")
    service.notice(600)
    until(lambda: agent.beat and agent.beat.notice_s, "the notice")
    hold.let_go(held.UPLOAD)
    final = agent.wait()
    assert final.outcome is Outcome.COMPLETED
    assert bench.path(keys.final(agent.attempt)).exists()
    assert bench.committed()[0][1].complete


@pytest.mark.parametrize(("asked", "outcome"), [(False, Outcome.USER_ERROR), (True, Outcome.DRAINED)])
def test_only_a_program_that_was_asked_counts_as_drained(asked: bool, outcome: Outcome) -> None:
    assert exit_outcome(1, script=True, end_requested=asked, killed_for_memory=False) is outcome
