"""A preemption notice of the machine: requested with a token, reported to the broker, obeyed without the broker."""

import asyncio
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.trainer.agent.test_agent import HOLD, SAVER, script
from tests.trainer.conftest import rows
from tests.trainer.support.harness import Bench, until
from tests.trainer.support.imds import Service, serving
from trainer.agent import preemption_notice as notices
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import FINAL_REPORT_S, AgentState
from trainer.agent.preemption_notice import (
    ACTION,
    ADVICE,
    GIVE_UP,
    METADATA,
    NoAnswer,
    Notices,
    WrittenNotice,
    endpoint,
)
from trainer.agent.process.container_init import NOTICE
from trainer.contract.data_config import DataConfig
from trainer.contract.documents import Limits, Outcome
from trainer.contract.train import TrainConfig
from trainer.core.ipc import RunFolder

NOW = datetime(2026, 1, 2, 3, 0, 0, tzinfo=UTC)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(notices, "ANSWER_S", 60.0)  # how busy this machine is says nothing of the service
    with serving() as made:
        yield made


class Watch:
    """Watcher of notices with a state, and the lines that it logged."""

    def __init__(self, url: str, folder: Path) -> None:
        env = Environment(blobs="", installation="", attempt="a", workdir=folder)
        self.state = AgentState(env=env, run=RunFolder(root=folder))
        self.said: list[str] = []
        self.hurried = asyncio.Event()
        self.notices = Notices(
            url, self.state, log=self.said.append, hurry=self.hurried.set, look_s=0.001, now=lambda: NOW
        )


@pytest.fixture
def watch(service: Service, tmp_path: Path) -> Watch:
    return Watch(service.url, tmp_path)


async def test_without_a_notice_nothing_happens(watch: Watch, service: Service) -> None:
    await watch.notices.once()
    await watch.notices.once()
    assert watch.state.ending is None
    assert watch.state.beat(1, None).notice_s is None
    assert service.asked.count(("PUT", "/latest/api/token")) == 1, "one token serves many questions"


async def test_a_notice_enters_the_heartbeat_and_drains_in_time(watch: Watch, service: Service) -> None:
    service.pages[ACTION] = '{"action": "terminate", "time": "2026-01-02T03:16:40Z"}'
    await watch.notices.once()
    ending, notice_s = watch.state.ending, watch.state.beat(1, None).notice_s
    assert ending is not None
    assert (ending.outcome, ending.save) == (Outcome.DRAINED, True)
    assert "takes this machine away in 1000 s" in ending.reason
    assert notice_s is not None
    assert 900 < notice_s <= 1000
    assert watch.hurried.is_set(), "the broker receives it at once"
    watch.state.limits = Limits(drain_s=5000)
    assert watch.state.drain_left_s <= 1000 - FINAL_REPORT_S, "the checkpoint has to be safe before"


async def test_a_notice_that_cannot_be_read_is_one_of_two_minutes(watch: Watch, service: Service) -> None:
    service.pages[ACTION] = "soon"
    await watch.notices.once()
    assert watch.state.ending is not None
    assert watch.state.notice_s is not None
    assert 60 < watch.state.notice_s <= 120


async def test_advice_to_move_is_written_down_once_and_not_obeyed(watch: Watch, service: Service) -> None:
    service.pages[ADVICE] = '{"noticeTime": "2026-01-02T03:00:00Z"}'
    await watch.notices.once()
    await watch.notices.once()
    assert watch.state.ending is None
    assert len(watch.said) == 1
    assert service.asked.count(("GET", ADVICE)) == 1


async def test_a_token_that_ran_out_is_asked_for_again(watch: Watch, service: Service) -> None:
    await watch.notices.once()
    service.token = "token-2"
    service.pages[ACTION] = "{}"
    await watch.notices.once()
    assert watch.state.ending is not None


async def test_polling_stops_when_the_metadata_service_never_answers(service: Service, watch: Watch) -> None:
    service.broken = 403
    with pytest.raises(NoAnswer, match="403"):
        await watch.notices.once()
    async with asyncio.timeout(300):
        await watch.notices.run()
    assert len(service.asked) == 1 + GIVE_UP


async def test_a_service_that_has_answered_is_polled_through_failures(watch: Watch, service: Service) -> None:
    task = asyncio.ensure_future(watch.notices.run())
    await asyncio.to_thread(until, lambda: ("GET", ADVICE) in service.asked, "a whole look")
    service.broken, asked = 500, len(service.asked)
    await asyncio.to_thread(until, lambda: len(service.asked) > asked + 2 * GIVE_UP, "failures")
    service.broken = None
    service.pages[ACTION] = "{}"
    async with asyncio.timeout(300):
        await watch.hurried.wait()
    task.cancel()


@pytest.fixture
def state(tmp_path: Path) -> AgentState:
    env = Environment(blobs="", installation="", attempt="a", workdir=tmp_path)
    return AgentState(env=env, run=RunFolder(root=tmp_path), limits=Limits(drain_s=500))


def test_a_written_notice_counts_from_when_it_was_written(state: AgentState, tmp_path: Path) -> None:
    path, hurried = tmp_path / "notice", asyncio.Event()
    look = WrittenNotice(path, state, hurry=hurried.set)
    assert not look.once()
    path.write_text("")
    assert not look.once(), "it is not whole yet"
    assert not state.ending_asked.is_set()
    path.write_text("1000.0")
    written_at = path.stat().st_mtime - 400
    os.utime(path, (written_at, written_at))
    assert look.once()
    assert state.notice_s is not None
    assert state.notice_s <= 600
    assert hurried.is_set(), "the broker receives it at once"
    assert state.ending is not None
    assert (state.ending.outcome, state.ending.save) == (Outcome.DRAINED, True)


@pytest.mark.parametrize(("left_s", "words_s"), [(5.0, 1.0), (120.0, FINAL_REPORT_S)])
def test_a_short_notice_shortens_the_time_for_the_final_report(
    state: AgentState, left_s: float, words_s: float
) -> None:
    state.notice(left_s)
    state.end(Outcome.DRAINED, "taken away")
    assert state.final_report_s == words_s
    assert state.drain_left_s <= left_s - words_s


def test_the_environment_chooses_the_notice_endpoint() -> None:
    assert endpoint({}) is None
    assert endpoint({"GPUBROKER_NOTICES": "off"}) is None
    assert endpoint({"GPUBROKER_NOTICES": "imds"}) == METADATA
    assert endpoint({"GPUBROKER_NOTICES": "first_process"}) == NOTICE.as_uri()
    assert endpoint({"GPUBROKER_NOTICES": "http://127.0.0.1:1"}) == "http://127.0.0.1:1"


def test_a_real_agent_saves_and_leaves_by_itself(bench: Bench, service: Service) -> None:
    bench.env = {"GPUBROKER_NOTICES": service.url, "http_proxy": "http://127.0.0.1:9"}
    agent = script(bench, SAVER)
    until(lambda: "saved" in agent.log, "the program runs")
    service.notice(600)
    until(lambda: agent.beat and agent.beat.notice_s, "the beat carries the notice")
    final = agent.wait()
    assert final.outcome is Outcome.DRAINED
    assert "takes this machine away" in final.message
    assert final.checkpoint is not None


@pytest.mark.parametrize("left_s", [0, 600])
def test_a_notice_older_than_the_agent_ends_the_attempt_as_drained(
    left_s: float, bench: Bench, service: Service
) -> None:
    service.notice(left_s)
    bench.env = {"GPUBROKER_NOTICES": service.url}
    agent = script(bench, HOLD)
    final = agent.wait()
    assert final.outcome is Outcome.DRAINED, agent.log
    assert "takes this machine away" in final.message


def test_a_notice_before_the_first_step_costs_no_micro_batch(
    bench: Bench, service: Service, tiny_models: dict[str, Path]
) -> None:
    service.notice(600)
    bench.env = {"GPUBROKER_NOTICES": service.url}
    data = DataConfig(path="upload:x", prompt="{word} ", completion="{meaning}", eval_share=0)
    train = TrainConfig(model=str(tiny_models["lora"]), data=data, max_steps=2, global_batch=8, micro_batch=2)
    agent = bench.start(train=train, data=bench.data(rows(), "csv"))
    final = agent.wait()
    assert final.outcome is Outcome.DRAINED, agent.log
    assert final.checkpoint is not None
    state = json.loads((bench.files(final.checkpoint.manifest) / "state.json").read_text())
    assert (state["step"], state["micro_batch_index"]) == (0, 1)


async def test_a_timed_out_task_may_clean_up(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is checked again meanwhile, because it may move forward."""
    monkeypatch.setattr("trainer.agent.base.state.POLL_S", 0.0)
    watch.state.limits = Limits(drain_s=0)
    watch.state.end(Outcome.DRAINED, "the broker asked to drain")

    async def slow_to_end() -> None:
        async with watch.state.in_time(3600):
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(10):
                    await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        await slow_to_end()


async def test_a_notice_during_the_last_drain_leaves_less_for_it(watch: Watch, service: Service) -> None:
    """The broker grants more drain time than the cloud does; the cloud's notice shortens the drain."""
    watch.state.limits = Limits(drain_s=3600)
    watch.state.end(Outcome.DRAINED, "the broker asked to drain")
    service.pages[ACTION] = '{"action": "terminate", "time": "2026-01-02T03:00:01Z"}'

    async def noticed_while_it_saves() -> None:
        async with watch.state.in_time(3600):
            await watch.notices.once()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await noticed_while_it_saves()
    assert watch.state.drain_left_s < 0
    assert watch.state.ending is not None
    assert watch.state.ending.reason == "the broker asked to drain", "the first reason stays"
