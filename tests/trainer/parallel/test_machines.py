"""Two machines of one job, as processes of the launcher on loopback with separate run folders."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.trainer.agent.test_agent import script
from tests.trainer.conftest import rows
from tests.trainer.support.harness import FAST, Agent, Bench, until
from trainer.agent.base.environment import Environment
from trainer.agent.process.child import free_port, worker_argv, worker_defaults
from trainer.contract import object_keys as keys
from trainer.contract.checkpoint_format import verify
from trainer.contract.data_config import DataConfig
from trainer.contract.documents import ExitCode, Final, Lease, Limits, Outcome, Parallelism, World
from trainer.contract.train import TrainConfig
from trainer.core.ipc import Ended, RunFolder, Status, WorkerJob
from trainer.parallel import launch

WAITS = """
import os, pathlib, sys, time
tree = pathlib.Path(os.environ["GPUBROKER_CHECKPOINT_DIR"])
(tree / "running").touch()
while not (tree / "go").exists():
    time.sleep(0.01)
sys.exit(3)
"""


class Node:
    """One machine's worker, as its agent starts it, on the CPU."""

    def __init__(self, folder: Path, rank: int, port: int, job: WorkerJob) -> None:
        self.run = RunFolder(root=folder / str(rank))
        self.run.make()
        self.run.job.write_text(job.model_dump_json())
        env = Environment(blobs="", installation="", attempt="a", node=rank, workdir=folder, master=f"127.0.0.1:{port}")
        argv = worker_argv(World(nodes=2, gpus_per_node=1), env, self.run)
        quiet = worker_defaults(dict(os.environ)) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(argv, env=quiet, start_new_session=True)

    @property
    def step(self) -> int:
        return Status.model_validate_json(self.run.status.read_bytes()).step if self.run.status.exists() else 0

    def end(self) -> Ended:
        self.process.wait(600)
        return Ended.model_validate_json(self.run.ended.read_bytes())


@pytest.fixture
def nodes(tmp_path: Path, tiny_models: dict[str, Path]) -> Iterator[tuple[Node, Node]]:
    data = tmp_path / "data.csv"
    data.write_text("q,a\n" + "".join(f"w{i} w{i + 1},w{i + 2} w{i + 3}\n" for i in range(40)))
    train = TrainConfig(
        model=str(tiny_models["lora"]),
        data=DataConfig(path="data.csv", prompt="{q}", completion="{a}"),
        max_steps=10_000,
        global_batch=4,
        micro_batch=2,
        precision="fp32",
    )
    job = WorkerJob(train=train, data=str(data), data_format="csv", number=1, save_every_s=3600)
    port = free_port()
    made = Node(tmp_path, 0, port, job), Node(tmp_path, 1, port, job)
    yield made
    for node in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.process.pid, signal.SIGKILL)
        node.process.wait(600)


def test_a_machine_that_fails_says_so_for_all(bench: Bench) -> None:
    bench.env = {"GPUBROKER_NODE": "1"}
    assert script(bench, "import sys; sys.exit(3)").wait().outcome is Outcome.USER_ERROR


def beats_done(agent: Agent, seq: int = 0) -> int | None:
    """Return the number of the second machine's latest beat, if that comes after `seq` and says that it is done."""
    beat = agent.beat_of(1)
    return beat.seq if beat is not None and beat.phase == "done" and beat.seq > seq else None


@pytest.mark.parametrize("code", [0, 70])
def test_a_finished_machine_waits_for_the_firsts_final_report(bench: Bench, code: int) -> None:
    bench.env = {"GPUBROKER_NODE": "1"}
    agent = script(bench, f"import sys; sys.exit({code})")
    seq = until(lambda: beats_done(agent), "it is done")
    until(lambda: beats_done(agent, seq + 10), "it continues to send heartbeats")
    assert not bench.path(keys.final(agent.attempt)).exists()
    first = Final(attempt=agent.attempt, outcome=Outcome.COMPLETED)
    bench.put(keys.final(agent.attempt), first)
    assert agent.process.wait(600) == code
    assert agent.final == first


@pytest.mark.parametrize("told", ["order", "lease", "signal"])
def test_a_finished_machine_ends_on_request(bench: Bench, told: str) -> None:
    bench.env = {"GPUBROKER_NODE": "1"}
    renewed = itertools.count()

    def beats_on(seq: int = 0) -> int | None:
        bench.put(keys.BROKER_LEASE, Lease(broker="b", seq=next(renewed), every_s=20))
        return beats_done(agent, seq)

    deadman_s = 12.0 if told == "lease" else 0.0
    agent = script(bench, "", limits=FAST.model_copy(update={"deadman_s": deadman_s, "drain_s": 0.5}))
    seq = until(beats_on, "it is done")
    until(lambda: beats_on(seq + 3), "it continues to send heartbeats")
    if told == "order":
        agent.desire("stop")
    elif told == "signal":
        os.kill(agent.process.pid, signal.SIGTERM)
    assert agent.process.wait(600) == ExitCode.COMPLETED
    assert not bench.path(keys.final(agent.attempt)).exists()


def test_the_first_machines_final_report_counts(bench: Bench) -> None:
    bench.env = {"GPUBROKER_NODE": "1"}
    agent = script(bench, WAITS)
    tree = bench.folder / "work" / agent.attempt / "checkpoint"
    until((tree / "running").exists, "it runs")
    first = Final(attempt=agent.attempt, outcome=Outcome.OOM)
    bench.put(keys.final(agent.attempt), first)
    (tree / "go").touch()
    agent.process.wait(600)
    assert agent.final == first


def test_both_machines_obey_a_drain_of_the_second(nodes: tuple[Node, Node]) -> None:
    until(lambda: all(node.step >= 2 for node in nodes), "both train")
    nodes[1].run.drain.touch()
    assert [node.end().code for node in nodes] == [ExitCode.DRAINED, ExitCode.DRAINED]
    assert [len(node.run.waiting()) for node in nodes] == [1, 0], "the first machine alone saves"


def two_agents(bench: Bench, model: Path, *, steps: int, limits: Limits = FAST) -> tuple[Agent, Agent]:
    """Start the agents of one job whose model is divided between two machines."""
    data = DataConfig(path="upload:x", prompt="{word} ", completion="{meaning}", eval_share=0)
    train = TrainConfig(model=str(model), data=data, max_steps=steps, global_batch=4, micro_batch=2)
    world = World(nodes=2, parallelism=Parallelism(kind="fsdp"))
    bench.env = {"GPUBROKER_MASTER": f"127.0.0.1:{free_port()}"}
    first = bench.start(train=train, data=bench.data(rows(), "csv"), world=world, limits=limits)
    bench.env |= {"GPUBROKER_NODE": "1", "GPUBROKER_WORKDIR": str(bench.folder / "work" / "second")}
    return first, bench.restart(first)


def test_two_agents_make_one_checkpoint_of_what_each_has(bench: Bench, tiny_models: dict[str, Path]) -> None:
    first, second = two_agents(bench, tiny_models["lora"], steps=2)
    assert first.wait().outcome is Outcome.COMPLETED, first.log
    assert second.process.wait(600) == ExitCode.COMPLETED
    key, manifest = bench.committed()[0]
    assert (manifest.step, manifest.complete) == (2, True)
    parts = {"model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"}
    assert parts < {f.path for f in manifest.files}
    verify(bench.files(key))


def test_the_machine_that_knows_the_cause_reports_it(bench: Bench, tiny_models: dict[str, Path]) -> None:
    """The first machine only observes that the second is gone, and delays its own report."""
    slow = FAST.model_copy(update={"heartbeat_s": 4.0})
    first, second = two_agents(bench, tiny_models["lora"], steps=10_000, limits=slow)
    status = RunFolder(root=bench.folder / "work" / "second" / "run").status
    until(lambda: status.exists() and Status.model_validate_json(status.read_bytes()).step, "both train")
    workers = [p for p in psutil.Process(second.process.pid).children(recursive=True) if not p.children()]
    workers[0].kill()
    until(bench.path(keys.final(first.attempt)).exists, "a word")
    assert first.final.outcome is Outcome.INFRASTRUCTURE
    assert first.final.message.startswith("the worker ended with exit code 137")


def sleeper(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)


@pytest.mark.parametrize(
    ("ends", "grace_s", "code"),
    [
        (["pass", "pass"], 60, 0),
        (["pass", "raise SystemExit(71)"], 60, 71),
        (["raise SystemExit(75)", "import os; os.kill(os.getpid(), 9)"], 60, -9),
        (["raise SystemExit(65)", "input()"], 0, 65),
    ],
)
def test_the_launcher_ends_with_the_most_specific_exit_code(
    ends: list[str], grace_s: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", grace_s)
    processes = [sleeper(end) for end in ends]
    assert launch.wait(processes) == code
    assert all(p.returncode is not None for p in processes)


def test_every_process_gets_its_rank_and_size() -> None:
    told = [launch.variables(n, processes_per_node=2, nodes=2, node=1, master="10.0.0.1:29400") for n in range(2)]
    assert [(t["RANK"], t["LOCAL_RANK"], t["GROUP_RANK"], t["WORLD_SIZE"]) for t in told] == [
        ("2", "0", "1", "4"),
        ("3", "1", "1", "4"),
    ]
    assert (told[0]["MASTER_ADDR"], told[0]["MASTER_PORT"]) == ("10.0.0.1", "29400")


def test_gloo_takes_the_way_to_the_first_machine() -> None:
    assert launch.interface("127.0.0.1:29400") == {"GLOO_SOCKET_IFNAME": "lo"}


def test_the_rendezvous_port_is_below_the_ephemeral_ports() -> None:
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports = {free_port() for _ in range(50)}
    assert max(ports) < int(outgoing[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.pop()))  # It is free indeed.
