"""Set-up commands of a script job: order, place and variables, failures, the time limit, and ends meanwhile."""

import sys
from typing import Any

import pytest

from tests.trainer.support.harness import Agent, Bench, until
from trainer.contract.documents import Outcome
from trainer.contract.script import ScriptConfig

PROGRAM = "import pathlib\nprint('program has', pathlib.Path('made').read_text())\n"


def start(bench: Bench, *setup: str, source: str = PROGRAM, **spec: Any) -> Agent:
    limit = {"setup_timeout_s": spec.pop("setup_timeout_s")} if "setup_timeout_s" in spec else {}
    config = ScriptConfig(code="upload:x", command=(sys.executable, "main.py"), setup=setup, **limit)
    return bench.start(script=config, code=bench.code(main=source), **spec)


def test_commands_run_in_order_in_the_code_folder(bench: Bench) -> None:
    setup = ("test -f main.py\nprintf $MODE > made", "printf -- -$TOKEN >> made; echo done >&2")
    agent = start(bench, *setup, env={"MODE": "quick"}, secrets={"TOKEN": "s3cr3t-value"})
    assert agent.wait().outcome is Outcome.COMPLETED
    lines = agent.log.splitlines()
    first = lines.index("[agent] setup: command 1 of 2: test -f main.py …")
    assert lines[first + 1 : first + 3] == [
        "[agent] setup: command 2 of 2: printf -- -$TOKEN >> made; echo done >&2", "done",
    ]  # fmt: skip
    assert "program has quick-[redacted TOKEN]" in lines


@pytest.mark.parametrize(
    ("line", "outcome", "why"),
    [
        ("echo almost; false; echo never", Outcome.USER_ERROR, "exited with 1; its last line: almost"),
        ("false | true", Outcome.USER_ERROR, "exited with 1"),
        ("no-such-program", Outcome.USER_ERROR, "exited with 127; its last line: bash: line 1: no-such-program: "),
        ("kill -9 $$", Outcome.USER_ERROR, "was ended by signal SIGKILL"),
        ("exit 75", Outcome.INFRASTRUCTURE, "exited with 75"),
    ],
)
def test_a_command_that_fails_ends_the_job(bench: Bench, line: str, outcome: Outcome, why: str) -> None:
    agent = start(bench, "echo earlier line", line, "echo later")
    final = agent.wait()
    assert final.outcome is outcome
    assert final.message.startswith(f"setup: command 2 {why}")
    assert "earlier line" not in final.message
    assert "program has" not in agent.log
    assert "later" not in agent.log


def test_the_whole_set_up_has_one_limit(bench: Bench) -> None:
    final = start(bench, "echo compiling", "sleep 600 & sleep 600", setup_timeout_s=2).wait(60)
    assert final.outcome is Outcome.USER_ERROR
    assert final.message == ("setup: command 2 was ended after 2 s for the whole set-up; raise script.setup_timeout_s")


def test_processes_that_a_command_leaves_are_ended(bench: Bench) -> None:
    source = "import pathlib\nleft = pathlib.Path('/proc', pathlib.Path('made').read_text().strip(), 'stat')\n"
    source += "print('left:', left.read_text().split()[2] if left.exists() else 'none')\n"
    agent = start(bench, "sleep 600 & echo $! > made", source=source)
    assert agent.wait(60).outcome is Outcome.COMPLETED
    assert "left: Z\n" in agent.log or "left: none\n" in agent.log


@pytest.mark.parametrize("want", ["drain", "stop"])
def test_an_end_does_not_wait_for_the_set_up(bench: Bench, want: str) -> None:
    agent = start(bench, "echo holding; sleep 600")
    until(lambda: agent.beat and agent.beat.phase == "setup" and "holding" in agent.log, "the set-up")
    assert agent.beat is not None
    assert agent.beat.message == "setup: command 1"
    agent.desire(want)
    final = agent.wait(60)
    assert (final.outcome, final.message) == (Outcome.DRAINED, f"test wants {want}; it was still in its set-up")


def test_the_set_up_runs_again_at_the_next_start(bench: Bench) -> None:
    """The next machine has none of the files, and a set-up may use the restored checkpoint."""
    source = "import os, pathlib\npathlib.Path(os.environ['GPUBROKER_CHECKPOINT_DIR'], 'step').write_text('1')\n"
    for saved in ("none", "step"):
        agent = start(bench, "ls made || echo none > made; echo saved: $(ls $GPUBROKER_CHECKPOINT_DIR)", source=source)
        assert agent.wait().outcome is Outcome.COMPLETED
        assert ("saved: step" in agent.log) is (saved == "step")
        assert "cannot access 'made'" in agent.log
