"""Real machines: what they are given, how they end, and that nothing of them stays."""

import asyncio
import json
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from broker.domain.errors import Gone, Rejected
from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import BootSpec, InstanceState, Observed
from providers.local.machine import Machine
from providers.local.process_backend import ProcessBackend
from providers.local.process_marks import INSTANCE_DIR, instances_with_processes
from tests.unit.providers.waiting import until

OURS = Installation("aaaa")
NAME = InstanceName("gb-aaaa-aaaaaaaaaaaaa")

FAMILY = """
import os, subprocess, sys, time
# A grandchild that left the group and the session, and one that also cleared its environment.
for env in (None, {}):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True, env=env)
open("ready", "w").close()
time.sleep(1000)
"""


def machine(**more: object) -> Machine:
    return Machine(
        name=NAME,
        provider="simulated",
        region="r",
        accelerator="l40s",
        gpus=1,
        spot=True,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[[str], ProcessBackend]]:
    """Yield a body whose instances run a Python program; nothing may be left of them."""

    def body(program: str) -> ProcessBackend:
        argv = [sys.executable, "-c", textwrap.dedent(program)]
        return ProcessBackend(tmp_path, provider="simulated", installation=OURS, argv=argv)

    yield body
    last = body("")
    for observed in await last.machines():
        await last.destroy(observed.handle.name)
    assert instances_with_processes(tmp_path.resolve()) == set()


async def the_one(body: ProcessBackend) -> Observed:
    (machine,) = await body.machines()
    return machine


async def started(body: ProcessBackend, tmp_path: Path, *, boot: BootSpec | None = None, **more: object) -> None:
    await body.start(machine(**more), boot or BootSpec())
    await until("the program", lambda: asyncio.to_thread((tmp_path / NAME / "work" / "ready").exists))


async def ended(body: ProcessBackend) -> None:
    async def gone() -> bool:
        return (await the_one(body)).state is InstanceState.GONE

    await until("the end of the machine", gone)


def family(tmp_path: Path) -> list[psutil.Process]:
    """Return the hypervisor, the agent, and the agent's descendants."""
    at = str(tmp_path.resolve() / NAME)
    host = next(
        p
        for p in psutil.process_iter(["cmdline", "environ"])
        if "providers.local.hypervisor" in (p.info["cmdline"] or ())
        and (p.info["environ"] or {}).get(INSTANCE_DIR) == at
    )
    return [host, *host.children(recursive=True)]


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def test_the_environment_is_the_boot_spec_and_no_credential_of_the_daemon(
    make: Callable[[str], ProcessBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "account-key")
    monkeypatch.setenv("GPUBROKER_DATABASE_URL", "postgres://user:word@host/db")
    body = make("import json, os; print(json.dumps(dict(os.environ)), flush=True); open('ready', 'w')")
    boot = BootSpec(env={"GPUBROKER_ATTEMPT": "a"}, secret_env={"GPUBROKER_ATTEMPT_KEY": "k"})
    await started(body, tmp_path, boot=boot)
    document = json.loads((tmp_path / NAME / "agent.log").read_text())
    folder = tmp_path.resolve() / NAME
    assert {k: v for k, v in document.items() if k.startswith("GPUBROKER_")} == {
        "GPUBROKER_ATTEMPT": "a", "GPUBROKER_ATTEMPT_KEY": "k", "GPUBROKER_INSTANCE": NAME,
        "GPUBROKER_INSTANCE_DIR": str(folder), "GPUBROKER_WORKDIR": str(folder / "work"),
    }  # fmt: skip
    assert "AWS_SECRET_ACCESS_KEY" not in document
    assert document["PATH"] == os.environ["PATH"]


async def test_relative_module_folders_are_those_of_the_daemon(
    make: Callable[[str], ProcessBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon started by `PYTHONPATH=. gpubroker serve` ran jobs that could not import the trainer."""
    checkout = os.getcwd()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("src", "", checkout)))
    body = make("import json, os; print(json.dumps(dict(os.environ)), flush=True); open('ready', 'w')")
    await started(body, tmp_path)
    document = json.loads((tmp_path / NAME / "agent.log").read_text())
    assert document["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "src"), checkout]


async def test_a_secret_is_in_the_agents_environment_only(
    make: Callable[[str], ProcessBackend], tmp_path: Path
) -> None:
    body = make("import time; open('ready', 'w'); time.sleep(1000)")
    await started(body, tmp_path, boot=BootSpec(secret_env={"KEY": "hunter2-" + "x" * 100_000}))
    host, agent = family(tmp_path)
    assert agent.environ()["KEY"].startswith("hunter2")
    assert "KEY" not in host.environ()
    assert not any("hunter2" in part for process in (host, agent) for part in process.cmdline())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / NAME / "record.json" in files
    assert not any(b"hunter2" in path.read_bytes() for path in files)
    assert (tmp_path / NAME / "record.json").stat().st_mode & 0o777 == 0o600
    assert not any("memfd" in os.readlink(link) for link in Path(f"/proc/{host.pid}/fd").iterdir())


async def test_preemption_takes_every_process_at_once(make: Callable[[str], ProcessBackend], tmp_path: Path) -> None:
    body = make(FAMILY)
    await started(body, tmp_path, lifetime_s=15.0)  # of which a busy machine needs some until all of them run
    before = family(tmp_path)
    assert len(before) == 4
    await ended(body)
    assert living(before[1:]) == []
    assert json.loads((tmp_path / NAME / "exited").read_text())["reason"] == "preempted"
    await body.destroy(NAME)
    assert await body.machines() == []


async def test_notice_is_listed_before_the_preemption(make: Callable[[str], ProcessBackend], tmp_path: Path) -> None:
    body = make("import time; open('ready', 'w'); time.sleep(1000)")
    await started(body, tmp_path, lifetime_s=600.0, notice_s=599.9)

    async def noticed() -> bool:
        return (await the_one(body)).notice_s is not None

    await until("the notice", noticed)
    assert 500 < ((await the_one(body)).notice_s or 0) <= 599.9


async def test_processes_that_a_program_left_end_with_its_machine(
    make: Callable[[str], ProcessBackend], tmp_path: Path
) -> None:
    body = make(
        FAMILY.removesuffix("time.sleep(1000)\n") + "while not os.path.exists('go'): time.sleep(0.01)\nsys.exit(3)\n"
    )
    await started(body, tmp_path)
    before = family(tmp_path)
    (tmp_path / NAME / "work" / "go").touch()
    await ended(body)
    assert living(before[1:]) == []
    assert json.loads((tmp_path / NAME / "exited").read_text())["reason"] == "exit code 3"


async def test_without_its_hypervisor_the_agent_dies_and_orphans_are_found(
    make: Callable[[str], ProcessBackend], tmp_path: Path
) -> None:
    body = make(FAMILY)
    await started(body, tmp_path)
    host, agent, *orphans = family(tmp_path)
    host.kill()

    async def agent_died() -> bool:
        return not living([agent])

    await until("the agent's death", agent_died)
    assert (await the_one(body)).state is InstanceState.RUNNING
    await body.destroy(NAME)
    marked = [p for p in orphans if living([p])]
    for process in marked:  # without a mark, a session or a parent that is ours: beyond reach once its parent is dead
        process.kill()
    assert len(marked) <= 1
    assert await body.machines() == []


async def test_destroy_kills_processes_that_cleared_their_environment(
    make: Callable[[str], ProcessBackend], tmp_path: Path
) -> None:
    body = make(FAMILY)
    await started(body, tmp_path)
    before = family(tmp_path)
    await body.destroy(NAME)
    assert living(before) == []
    with pytest.raises(Gone):
        await body.destroy(NAME)


async def test_a_machine_without_a_folder_is_listed_and_destroyed(
    make: Callable[[str], ProcessBackend], tmp_path: Path
) -> None:
    body = make("import time; open('ready', 'w'); time.sleep(1000)")
    await started(body, tmp_path)
    os.rename(tmp_path / NAME, tmp_path / "lost")
    seen = await the_one(body)
    assert (seen.handle.name, seen.state) == (NAME, InstanceState.RUNNING)
    await body.destroy(NAME)
    assert await body.machines() == []


async def test_sigterm_switches_the_machine_off(make: Callable[[str], ProcessBackend], tmp_path: Path) -> None:
    body = make(FAMILY)
    await started(body, tmp_path)
    before = family(tmp_path)
    before[0].send_signal(signal.SIGTERM)
    await ended(body)
    assert living(before[1:]) == []


async def test_a_program_that_cannot_start_leaves_a_machine_that_is_gone(tmp_path: Path) -> None:
    body = ProcessBackend(tmp_path, provider="simulated", installation=OURS, argv=["/no/such/program"])
    await body.start(machine(), BootSpec())
    await ended(body)
    await body.destroy(NAME)


async def test_memory_cannot_be_given_to_a_process(make: Callable[[str], ProcessBackend]) -> None:
    body = make("")
    with pytest.raises(Rejected, match="file:///"):
        await body.start(machine(), BootSpec(env={"GPUBROKER_BLOBS": "memory://"}))
    assert await body.machines() == []


async def test_a_cancelled_start_is_over_when_the_caller_returns(
    make: Callable[[str], ProcessBackend], tmp_path: Path
) -> None:
    body = make("import time; time.sleep(1000)")
    task = asyncio.create_task(body.start(machine(), BootSpec()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await the_one(body)).state is InstanceState.RUNNING


@pytest.mark.parametrize("file", ["record.json", "notice"])
async def test_a_job_that_writes_over_its_machines_papers_hides_nothing(
    make: Callable[[str], ProcessBackend], tmp_path: Path, file: str
) -> None:
    """The job runs as the same user. With any content of these files the listing works and has the machine."""
    body = make("import time; time.sleep(1000)")
    await body.start(machine(), BootSpec())
    for nonsense in ("", "[1]", '{"dies_at": "x"}'):
        (tmp_path / NAME / file).write_text(nonsense)
        (seen,) = await body.machines()
        assert (seen.handle.id, seen.state) == (NAME, InstanceState.RUNNING)
    await body.destroy(NAME)
    assert await body.machines() == []
