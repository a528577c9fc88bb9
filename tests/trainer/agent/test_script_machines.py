"""A script on two machines, each with its agent: the first one's folder is the checkpoint."""

import os
import signal

import pytest

from tests.trainer.agent.test_agent import script
from tests.trainer.support.harness import Agent, Bench, until
from trainer.contract.documents import ExitCode, Outcome, World
from trainer.contract.train import CheckpointConfig

EACH = """
import os, pathlib, sys, time
tree = pathlib.Path(os.environ["GPUBROKER_CHECKPOINT_DIR"])
node = os.environ.get("GPUBROKER_NODE", "0")
print("found", sorted(p.name for p in tree.iterdir()), flush=True)
count = 0
while not (tree / "go").exists():
    count += 1
    aside = pathlib.Path("aside")
    aside.write_text(str(count))
    aside.rename(tree / f"of-{node}")
    time.sleep(0.3)
sys.exit(int(sys.argv[1]) if node == "1" else 0)
"""


def both(bench: Bench, code: int = 0) -> tuple[Agent, Agent]:
    """Return the agents of two machines. `code`: exit code of the second's program. Both save as often as possible."""
    saving = CheckpointConfig(every_s=1, keep=2)
    first = script(bench, EACH, str(code), world=World(nodes=2), checkpoint=saving)
    return first, bench.beside(first)


def go(bench: Bench, agent: Agent, *, second: bool) -> None:
    workdir = f"{agent.attempt}-second" if second else agent.attempt
    (bench.folder / "work" / workdir / "checkpoint" / "go").touch()


def saved(bench: Bench) -> set[str]:
    return {f.path for _, manifest in bench.committed() for f in manifest.files} - {"go"}


def done(agent: Agent) -> bool:
    """Return True if the second machine has reported the phase `done`."""
    beat = agent.beat_of(1)
    return beat is not None and beat.phase == "done"


def furthest(bench: Bench) -> int:
    return max((manifest.step for _, manifest in bench.committed()), default=0)


def test_the_first_machine_alone_saves(bench: Bench) -> None:
    first, second = both(bench)
    until(lambda: furthest(bench) >= 3, "some saves")
    go(bench, first, second=True)
    until(lambda: done(second), "the second machine is through")
    assert saved(bench) == {"of-0"}
    step = furthest(bench)
    until(lambda: furthest(bench) > step, "another save")
    go(bench, first, second=False)
    final = first.wait()
    assert (final.outcome, final.message) == (Outcome.COMPLETED, "")
    assert second.process.wait(600) == ExitCode.COMPLETED
    assert saved(bench) == {"of-0"}
    assert final.checkpoint is not None
    assert final.checkpoint.manifest == bench.committed()[0][0]
    assert second.log_of(1).count("checkpoint folder is not saved") == 1
    assert "not saved" not in first.log


def test_a_failed_machine_saves_nothing(bench: Bench) -> None:
    first, second = both(bench, code=3)
    until(lambda: furthest(bench), "a save")
    go(bench, first, second=True)
    assert second.process.wait(600) == ExitCode.USER_ERROR
    assert first.final.checkpoint is None
    assert saved(bench) == {"of-0"}


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_drain_saves_the_files_of_the_first_machine(bench: Bench, by_signal: bool) -> None:
    first, second = both(bench)
    until(lambda: furthest(bench) and "found" in second.log_of(1), "a save")
    if by_signal:
        os.kill(second.process.pid, signal.SIGTERM)
        until(lambda: done(second), "the second machine is through")
    first.desire("drain")
    assert first.wait().outcome is Outcome.DRAINED
    assert second.process.wait(600) == ExitCode.DRAINED
    assert saved(bench) == {"of-0"}


def test_both_machines_continue_from_what_the_first_has_saved(bench: Bench) -> None:
    first, second = both(bench)
    until(lambda: furthest(bench) >= 2 and "found" in second.log_of(1), "saves")
    first.kill_group()
    second.kill_group()
    third, fourth = both(bench)
    until(lambda: "found" in third.log and "found" in fourth.log_of(1), "both have begun")
    assert "found ['of-0']" in third.log
    assert "found ['of-0']" in fourth.log_of(1)
