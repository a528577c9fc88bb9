"""The agent as a process that runs a user's program: heartbeats, orders, outages and ends."""

import io
import itertools
import os
import signal
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support.harness import FAST, Agent, Bench, alive, group_members, until
from trainer.contract import object_keys as keys
from trainer.contract.documents import Desired, Lease, Limits, Outcome
from trainer.contract.script import ScriptConfig
from trainer.contract.train import CheckpointConfig

HOLD = "import time\nprint('holding', flush=True)\ntime.sleep(600)\n"
SAVER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["GPUBROKER_CHECKPOINT_DIR"])
file = folder / "deep" / "count.txt"
file.parent.mkdir(exist_ok=True)
count = int(file.read_text()) if file.exists() else 0
print("starting from", count, flush=True)
def leave(*_):
    file.write_text(str(count + 100))
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
file.write_text(str(count + 1))
print("saved", flush=True)
while not (folder / "enough").exists() and "--once" not in sys.argv:
    time.sleep(0.01)
"""


def script(bench: Bench, source: str, *arguments: str, **spec: Any) -> Agent:
    config = ScriptConfig(code="upload:x", command=(sys.executable, "main.py", *arguments))
    return bench.start(script=config, code=bench.code(main=source), **spec)


def test_program_that_ends_well(bench: Bench) -> None:
    source = "import os, sys\nprint(sys.argv[1:], os.environ['MODE'], os.environ['TOKEN'], len(os.environ['TOKEN']))\n"
    source += "print([n for n in os.environ if n in ('GPUBROKER_ATTEMPT_KEY', 'GPUBROKER_BLOBS')])\n"
    agent = script(bench, source, "$(touch /tmp/x); echo", env={"MODE": "quick"}, secrets={"TOKEN": "s3cr3t-value"})
    final = agent.wait()
    assert (final.outcome, final.exit_code, agent.code) == (Outcome.COMPLETED, 0, 0)
    assert "['$(touch /tmp/x); echo'] quick [redacted TOKEN] 12" in agent.log
    assert "\n[]\n" in agent.log, "the agent's own keys stay with it"
    assert not any(b"s3cr3t-value" in p.read_bytes() for p in bench.root.rglob("*") if p.is_file())
    assert agent.beat is not None
    assert agent.beat.phase == "done"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (3, Outcome.USER_ERROR),
        (64, Outcome.USER_ERROR),
        (65, Outcome.DATA),
        (71, Outcome.OOM),
        (75, Outcome.INFRASTRUCTURE),
    ],
)
def test_exit_codes_map_to_outcomes(bench: Bench, code: int, outcome: Outcome) -> None:
    final = script(bench, f"raise SystemExit({code})").wait()
    assert (final.outcome, final.exit_code) == (outcome, code)
    assert f"exit code {code}" in final.message


def test_program_that_does_not_exist(bench: Bench) -> None:
    config = ScriptConfig(code="upload:x", command=("no-such-program", "x"))
    agent = bench.start(script=config, code=bench.code(main=""))
    assert agent.wait().outcome is Outcome.USER_ERROR
    assert "cannot start 'no-such-program'" in agent.log
    assert "cannot start 'no-such-program'" in agent.wait().message


def test_archive_that_leaves_its_folder_is_refused(bench: Bench) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../escaped"), io.BytesIO())
    config = ScriptConfig(code="upload:x", command=(sys.executable, "-c", ""))
    final = bench.start(script=config, code=bench.data(buffer.getvalue(), "tar")).wait()
    assert final.outcome is Outcome.USER_ERROR
    assert final.message.startswith("script.code:")
    assert not list(bench.folder.rglob("escaped"))


def test_altered_input_is_refused(bench: Bench) -> None:
    code = bench.code(main="print('ran')")
    bench.path(code.key).write_bytes(b"\0" * code.bytes)
    config = ScriptConfig(code="upload:x", command=(sys.executable, "main.py"))
    assert bench.start(script=config, code=code).wait().outcome is Outcome.DATA


def test_checkpoint_folder_comes_back(bench: Bench) -> None:
    saving = {"checkpoint": CheckpointConfig(every_s=1)}
    first = script(bench, SAVER, **saving)
    until(bench.committed, "a checkpoint at the interval, while the program runs")
    first.kill_group()
    second = script(bench, SAVER, **saving)
    until(lambda: "saved" in second.log, "the second start")
    second.desire("drain")
    final = second.wait()
    assert (final.outcome, final.message, second.code) == (Outcome.DRAINED, "test wants drain", 70)
    third = script(bench, SAVER, "--once", **saving)
    final = third.wait()
    assert "starting from 1\n" in second.log
    assert "starting from 101\n" in third.log, "what was saved on the way out is there"
    assert final.outcome is Outcome.COMPLETED
    assert final.checkpoint is not None
    key, manifest = bench.committed()[0]
    assert (key, manifest.complete) == (final.checkpoint.manifest, True)
    assert (bench.files(key) / "deep" / "count.txt").read_text() == "102"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_drains(bench: Bench, number: int) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves run under nohup
    try:
        agent = script(bench, SAVER)
    finally:
        signal.signal(signal.SIGHUP, before)
    until(lambda: "saved" in agent.log, "the start")
    os.kill(agent.process.pid, number)
    assert agent.wait().outcome is Outcome.DRAINED
    key, _ = bench.committed()[0]
    assert (bench.files(key) / "deep" / "count.txt").read_text() == "100"


def test_an_agent_under_nohup_survives_its_terminal(bench: Bench) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        agent = script(bench, SAVER)
    finally:
        signal.signal(signal.SIGHUP, before)
    until(lambda: "saved" in agent.log, "the start")
    os.kill(agent.process.pid, signal.SIGHUP)
    agent.desire("drain")
    assert agent.wait().message == "test wants drain"


@pytest.mark.parametrize(("code", "outcome"), [(1, Outcome.DRAINED), (65, Outcome.DATA)])
def test_a_launcher_may_fail_when_it_is_asked_to_end(bench: Bench, code: int, outcome: Outcome) -> None:
    source = f"import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit({code}))\n" + HOLD
    agent = script(bench, source)
    until(lambda: "holding" in agent.log, "the start")
    agent.desire("drain")
    assert agent.wait().outcome is outcome


def test_program_that_will_not_drain_is_killed(bench: Bench) -> None:
    source = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HOLD
    agent = script(bench, source, limits=FAST.model_copy(update={"drain_s": 1.0}))
    until(lambda: "holding" in agent.log, "the start")
    agent.desire("drain")
    assert agent.wait().outcome is Outcome.DRAINED
    assert "did not end in time" in agent.log


def test_stop_does_not_wait_for_a_checkpoint(bench: Bench) -> None:
    agent = script(bench, SAVER)
    until(lambda: "saved" in agent.log, "the start")
    agent.desire("stop")
    assert agent.wait().outcome is Outcome.DRAINED
    assert bench.committed() == []


@pytest.mark.parametrize("want", ["stop", "drain"])
def test_a_fetch_is_aborted_when_the_attempt_must_end(bench: Bench, want: Any) -> None:
    code = bench.code(main=SAVER)
    path = bench.path(code.key)
    path.unlink()
    os.mkfifo(path)  # no process writes to the FIFO, so the read blocks for ever
    config = ScriptConfig(code="upload:x", command=(sys.executable, "main.py"))
    drain_s = 600.0 if want == "stop" else 1.0
    agent = bench.start(script=config, code=code, limits=FAST.model_copy(update={"drain_s": drain_s}))
    until(lambda: agent.beat and agent.beat.phase == "loading", "the fetch")
    agent.desire(want)
    final = agent.wait()
    assert final.outcome is Outcome.DRAINED
    assert final.message == f"test wants {want}; the attempt was still being prepared"
    assert "saved" not in agent.log


def test_older_orders_are_ignored(bench: Bench) -> None:
    bench.put(keys.desired("a001"), Desired(want="run", epoch=2, seq=5))
    agent = script(bench, SAVER)
    until(lambda: "saved" in agent.log, "the start, which comes after the first look at the orders")
    bench.put(keys.desired(agent.attempt), Desired(want="stop", epoch=1, seq=9, reason="an old broker"))
    seen = agent.beat.seq if agent.beat else 0
    until(lambda: agent.beat and agent.beat.seq > seen + 10, "beats after the old order")
    bench.put(keys.desired(agent.attempt), Desired(want="drain", epoch=2, seq=6, reason="the right broker"))
    assert agent.wait().message == "the right broker"


def test_deadman_saves_and_stops(bench: Bench) -> None:
    renewed = itertools.count()

    def renew() -> None:
        bench.put(keys.BROKER_LEASE, Lease(broker="b", seq=next(renewed), every_s=20))

    renew()
    agent = script(bench, SAVER, limits=FAST.model_copy(update={"deadman_s": 12.0}))
    until(lambda: (renew(), "saved" in agent.log)[1], "the start")
    final = agent.wait()
    assert final.outcome is Outcome.DEADMAN
    assert "lease did not change" in final.message
    assert final.checkpoint is not None


def test_store_outage_is_survived(bench: Bench) -> None:
    limits = FAST.model_copy(update={"deadman_s": 0.0, "outage_s": 120.0})
    agent = script(bench, SAVER, limits=limits, checkpoint=CheckpointConfig(every_s=1))
    until(lambda: "saved" in agent.log, "the start")
    away = take_away(bench)
    tree = bench.folder / "work" / agent.attempt
    (tree / "checkpoint" / "more").touch()  # what was there may be committed already
    until(lambda: list((tree / "run" / "snapshots").iterdir()), "a snapshot that waits on disk")
    (tree / "checkpoint" / "enough").touch()
    assert agent.process.poll() is None
    bench.root.unlink()
    away.rename(bench.root)
    final = agent.wait()
    assert final.outcome is Outcome.COMPLETED
    assert final.checkpoint is not None
    assert bench.committed()[0][0] == final.checkpoint.manifest


def take_away(bench: Bench) -> Path:
    """Replace the store's folder with a file, so that every call fails; return the folder's new path.

    A running agent may create the folder again at any moment, so the rename is repeated.
    """
    for number in itertools.count():
        away = bench.root.with_name(f"away-{number}")
        bench.root.rename(away)
        try:
            bench.root.touch(exist_ok=False)
        except FileExistsError:
            continue
        return bench.root.with_name("away-0")
    raise AssertionError


def test_outage_that_lasts_ends_the_attempt(bench: Bench) -> None:
    agent = script(bench, SAVER, limits=Limits(heartbeat_s=0.1, poll_s=0.1, deadman_s=0, outage_s=1, drain_s=2))
    until(lambda: agent.beat and agent.beat.phase == "training", "the start")
    take_away(bench)
    assert agent.process.wait(600) == 75


def test_one_kill_of_the_group_ends_everything(bench: Bench) -> None:
    source = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n" + HOLD
    agent = script(bench, source)
    until(lambda: "holding" in agent.log, "the start")
    assert len(list(group_members(agent.process.pid))) == 3
    agent.kill_group()
    until(lambda: not list(group_members(agent.process.pid)), "an empty group")


def test_program_dies_with_an_agent_that_is_killed_alone(bench: Bench) -> None:
    agent = script(bench, "import os\nprint('pid', os.getpid(), flush=True)\n" + HOLD)
    until(lambda: "holding" in agent.log, "the start")
    pid = int(agent.log.split("pid ")[1].split()[0])
    agent.process.kill()
    agent.process.wait()
    until(lambda: not alive(pid), "the program's end")


def test_processes_left_behind_are_ended(bench: Bench) -> None:
    source = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("left", left.pid)
"""
    agent = script(bench, source)
    assert agent.wait().outcome is Outcome.COMPLETED
    assert not alive(int(agent.log.split("left ")[1].split()[0]))


def test_final_is_written_once(bench: Bench) -> None:
    agent = script(bench, "")
    agent.wait()
    before = bench.path(keys.final(agent.attempt)).read_bytes()
    again = bench.restart(agent)
    again.process.wait(600)
    assert bench.path(keys.final(agent.attempt)).read_bytes() == before


def test_a_missing_environment_variable_is_named(tmp_path: Path) -> None:
    import subprocess

    env = {k: v for k, v in os.environ.items() if not k.startswith("GPUBROKER_")}
    done = subprocess.run([sys.executable, "-m", "trainer"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert done.stderr.startswith("trainer: GPUBROKER_BLOBS is not set")


def test_secret_without_a_value(bench: Bench) -> None:
    config = ScriptConfig(code="upload:x", command=(sys.executable, "-c", ""))
    final = bench.start(script=config, secrets={"A": "aaaa"}, names=("A", "B")).wait()
    assert final.outcome is Outcome.USER_ERROR
    assert final.message.startswith("secret 'B' has no value")
