"""The image's first process, run as a process: the programs it starts and the signals it receives and forwards."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.trainer.agent.test_agent import SAVER, script
from tests.trainer.support.harness import Bench, until
from trainer.contract.documents import Outcome

RUN = """
import pathlib, sys
from trainer.core.parent_death import adopt_orphans
from trainer.agent.process.container_init import FirstProcess
adopt_orphans()
sys.exit(FirstProcess(pathlib.Path(sys.argv[1]), float(sys.argv[2])).run(sys.argv[3:]))
"""
AS_A_USER = """
import os
from trainer.agent.process.container_init import main
if os.getuid() == 0:
    os.setuid(65534)
print(os.getpid(), flush=True)
main(["sh", "-c", "echo $$"])
"""
OBEYS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("ready", flush=True)
signal.pause()
"""
HOUR_S = 3600.0

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def notice(tmp_path: Path) -> Path:
    return tmp_path / "notice"


@pytest.fixture
def start(notice: Path) -> Iterator[Start]:
    begun: list[subprocess.Popen[str]] = []

    def start(*command: str, grace_s: float = 0.0) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", RUN, str(notice), str(grace_s), *command]
        begun.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return begun[-1]

    yield start
    for process in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=300)


def _children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _names(processes: list[psutil.Process]) -> list[str]:
    names = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            names.append(process.name())
    return names


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -KILL $$", 137), ("true", 0)])
def test_the_exit_code_is_that_of_the_command(start: Start, notice: Path, command: str, code: int) -> None:
    notice.write_text("5.0")
    assert start("sh", "-c", command).wait(600) == code
    assert not notice.exists(), "it was of an earlier start"


def test_a_missing_command_ends_the_container_with_127(start: Start) -> None:
    assert start("/no/such/program").wait(600) == 127


def test_a_sigterm_is_written_as_notice_and_forwarded(start: Start, notice: Path) -> None:
    first = start(sys.executable, "-c", OBEYS, grace_s=2.0)
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    told_at = time.monotonic()
    first.terminate()
    until(notice.exists, "the notice is written")
    assert first.wait(600) == 3
    assert float(notice.read_text()) == 2.0
    assert time.monotonic() - told_at >= 2.0, "an earlier end would end the container and its last save"


def test_orphans_are_collected(start: Start) -> None:
    first = start("sh", "-c", "for i in 1 2 3; do (true &); done; exec sleep 600")
    until(lambda: _names(_children(first)) == ["sleep"], "what is dead is gone")


def test_a_user_s_container_has_the_command_as_its_first_process() -> None:
    done = subprocess.run([sys.executable, "-c", AS_A_USER], capture_output=True, text=True, timeout=300)
    before, after = done.stdout.split()
    assert before == after


def test_a_container_stop_is_a_preemption_notice_to_the_agent(bench: Bench, start: Start, notice: Path) -> None:
    first = start("sleep", "600", grace_s=HOUR_S)
    bench.env = {"GPUBROKER_NOTICES": notice.as_uri()}
    agent = script(bench, SAVER)
    until(lambda: "saved" in agent.log, "the program runs")
    first.terminate()
    final = agent.wait()
    assert final.outcome is Outcome.DRAINED
    assert "takes this machine away in" in final.message
    assert final.checkpoint is not None
    assert agent.beat is not None
    assert HOUR_S > (agent.beat.notice_s or HOUR_S) > 0


def test_a_notice_too_short_for_a_save_starts_none(bench: Bench, notice: Path) -> None:
    bench.env = {"GPUBROKER_NOTICES": notice.as_uri()}
    agent = script(bench, SAVER, checkpoint={"every_s": 1})
    saved = until(lambda: agent.beat and agent.beat.checkpoint, "the first checkpoint")
    notice.write_text("0.0")
    final = agent.wait()
    assert final.outcome is Outcome.DRAINED
    assert final.checkpoint == saved, "the latest one counts"
    assert f"the checkpoint of step {saved.step} counts: a save takes " in final.message
    assert [manifest.step for _, manifest in bench.committed()] == [saved.step]
    assert "the program is killed" in agent.log
