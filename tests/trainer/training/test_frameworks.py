"""Example programs on training libraries resume from the last commit after a kill, and save when asked to stop."""

import io
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.support.harness import Agent, Bench, until
from trainer.contract.documents import DataFile, Outcome
from trainer.contract.script import ScriptConfig
from trainer.contract.train import CheckpointConfig

FOLDER = Path(__file__).parents[3] / "examples" / "frameworks"
ENDLESS = "100000"


@pytest.fixture
def code(bench: Bench) -> DataFile:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(FOLDER, ".", filter=lambda member: None if "__pycache__" in member.name else member)
    return bench.data(buffer.getvalue(), "tar")


@pytest.fixture
def start(bench: Bench, code: DataFile) -> Callable[..., Agent]:
    def begin(*command: str) -> Agent:
        config = ScriptConfig(code="upload:x", command=command)
        return bench.start(
            script=config, code=code, checkpoint=CheckpointConfig(every_s=1), env={"OMP_NUM_THREADS": "1"}
        )

    return begin


def saved(agent: Agent) -> list[int]:
    """Return the steps that the program logged as saved."""
    return [int(step) for step in re.findall(r"saved step (\d+)", agent.log)]


def went_on(agent: Agent) -> int:
    """Return the step from which the program resumed."""
    found = re.search(r"starting from step (\d+)", agent.log)
    assert found, agent.log
    return int(found[1])


def command(program: str, model: Path) -> tuple[str, ...]:
    if program == "ddp":
        return (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "ddp.py")
    return (sys.executable, f"{program}.py", *([str(model)] if program == "hf_trainer" else []))


@pytest.mark.parametrize("program", ["hf_trainer", "lightning_trainer", "ddp"])
def test_continues_after_a_kill_and_saves_when_asked_to_stop(
    program: str, bench: Bench, start: Callable[..., Agent], tiny_models: dict[str, Path]
) -> None:
    argv = command(program, tiny_models["lora"])
    first = start(*argv, ENDLESS)
    until(bench.committed, "a commit while it trains")
    first.kill_group()
    second = start(*argv, ENDLESS)
    until(lambda: saved(second), "a save of the second start")
    second.desire("drain")
    assert second.wait().outcome is Outcome.DRAINED
    assert went_on(second) > 0
    last = saved(second)[-1]
    third = start(*argv, str(last + 1))
    assert third.wait().outcome is Outcome.COMPLETED
    assert went_on(third) == last, "the save that was asked for was committed"
