"""Isolated machines of the process backend: what they see, how they end, and what stays on the host."""

import asyncio
import json
import os
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from broker.domain.errors import Gone, Rejected
from broker.domain.ids import JobId
from broker.domain.instance import BootSpec, HostIsolation, InstanceState
from providers.local import kernel_calls
from providers.local.isolation import HostSandbox
from providers.local.process_backend import ProcessBackend
from providers.local.process_marks import instances_with_processes, namespace_init
from tests.unit.providers.local.test_process_backend import FAMILY, NAME, OURS, machine
from tests.unit.providers.waiting import until

SEE = """
import json, os
from pathlib import Path
def write(path):
    try:
        Path(path).write_text("")
        return True
    except OSError:
        return False
store = Path(os.environ["GPUBROKER_BLOBS"].removeprefix("file://"))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
files = sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())
links = []
for folder in (store / "i" / "attempts" / "a", Path("/tmp")):
    try:
        (folder / "link").symlink_to("/etc/passwd")
        links.append(str(folder))
    except OSError:
        pass
seen = {
    "home": os.listdir(os.environ["HIDDEN"]), "files": files, "links": links, "pids": len([p for p in os.listdir("/proc") if p.isdigit()]),
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16), "cwd": os.getcwd(), "home_of_job": os.environ["HOME"],
    "wrote": [path for path in (f"{store}/i/attempts/a/final.json", f"{store}/i/heartbeats/a/0", f"{store}/i/checkpoints/j/a/x",
              f"{store}/i/checkpoints/j/b/x", f"{store}/i/data/j.1", f"{store}/i/broker/lease", f"{store}/x", "/usr/x", "/x") if write(path)],
}
print(json.dumps(seen), flush=True)
open("ready", "w")
"""  # noqa: E501
ISOLATED = HostIsolation(job=JobId("j"), origin=JobId("o"))


@pytest.fixture(params=["uid", "namespace"])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> HostSandbox:
    """Return a builder that hides the test's folder, by an own uid or by a user namespace."""
    if request.param == "uid" and os.geteuid():
        pytest.skip("a separate uid needs root")
    sandbox = HostSandbox(hidden=[tmp_path], own_uid=request.param == "uid")
    if problem := await sandbox.problem():
        pytest.skip(problem)
    return sandbox


@pytest.fixture
async def start(sandbox: HostSandbox, tmp_path: Path) -> AsyncIterator[ProcessBackend]:
    root = tmp_path / "instances"
    backend = ProcessBackend(root, provider="simulated", installation=OURS, argv=("true",), sandbox=sandbox)
    yield backend
    for observed in await backend.machines():
        await backend.destroy(observed.handle.name)
    assert instances_with_processes(root.resolve()) == set()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def program(backend: ProcessBackend, text: str) -> None:
    backend._argv = (sys.executable, "-c", textwrap.dedent(text))


def boot(tmp_path: Path) -> BootSpec:
    """Write a store with objects of two jobs, and return the boot spec of an attempt of the first."""
    for key in ("attempts/a/spec.json", "attempts/b/spec.json", "data/j.1", "data/k.2", "uploads/3", "broker/lease",
                "checkpoints/j/b/x", "checkpoints/k/c/x", "checkpoints/o/d/x"):  # fmt: skip
        path = tmp_path / "blobs" / "i" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(key)
    (tmp_path / "master.key").write_text("key")
    env = {"GPUBROKER_BLOBS": (tmp_path / "blobs").as_uri(), "GPUBROKER_INSTALLATION": "i", "GPUBROKER_ATTEMPT": "a"}
    return BootSpec(env=env | {"HIDDEN": str(tmp_path)}, isolation=ISOLATED)


async def started(backend: ProcessBackend, tmp_path: Path) -> Path:
    folder = tmp_path / "instances" / NAME
    await backend.start(machine(), boot(tmp_path))
    try:
        await until("the program", lambda: asyncio.to_thread((folder / "work" / "ready").exists))
    except AssertionError:
        print((folder / "agent.log").read_text())
        raise
    return folder


async def test_machine_sees_its_jobs_objects_and_nothing_of_the_daemon(start: ProcessBackend, tmp_path: Path) -> None:
    program(start, SEE)
    folder = await started(start, tmp_path)
    document = json.loads((folder / "agent.log").read_text())
    assert document["home"] == ["instances"]
    assert document["files"] == [
        "i/attempts/a/spec.json", "i/broker/lease", "i/checkpoints/j/b/x", "i/checkpoints/o/d/x", "i/data/j.1",
    ]  # fmt: skip
    store = "/run/gpubroker/blobs/i"
    assert document["wrote"] == [
        f"{store}/attempts/a/final.json",
        f"{store}/heartbeats/a/0",
        f"{store}/checkpoints/j/a/x",
    ]
    assert (tmp_path / "blobs" / "i" / "checkpoints" / "j" / "a" / "x").exists()
    assert document["links"] == ["/tmp"]
    assert (document["pids"], document["capabilities"]) == (2, 0)
    assert document["cwd"] == document["home_of_job"] == str(folder.resolve() / "work")


async def test_end_of_the_first_process_ends_all_that_left_the_session(start: ProcessBackend, tmp_path: Path) -> None:
    """A program that cleared its environment and left its session would escape without isolation."""
    program(start, FAMILY)
    folder = await started(start, tmp_path)
    init = namespace_init(folder.resolve())
    assert init is not None
    family = [psutil.Process(init), *psutil.Process(init).children(recursive=True)]
    assert len(family) == 4
    psutil.Process(init).kill()

    async def gone() -> bool:
        return [o.state for o in await start.machines()] == [InstanceState.GONE]

    await until("the end of the machine", gone)
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


async def test_orphans_of_a_killed_hypervisor_die(start: ProcessBackend, tmp_path: Path) -> None:
    program(start, FAMILY)
    folder = await started(start, tmp_path)
    init = namespace_init(folder.resolve())
    assert init is not None
    family = [psutil.Process(init), *psutil.Process(init).children(recursive=True)]
    host = psutil.Process(init).parent().parent()  # type: ignore[union-attr]  # above unshare
    assert host is not None
    host.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=30)
    assert alive == []


async def test_shell_runs_inside_and_without_rights(start: ProcessBackend, tmp_path: Path) -> None:
    program(start, "import time; open('ready', 'w'); time.sleep(1000)")
    folder = await started(start, tmp_path)
    words = ["sh", "-c", f"ls {tmp_path}; pwd; grep CapEff /proc/self/status; cat ready && echo x > /usr/x"]
    process = await asyncio.create_subprocess_exec(
        *start.reach(NAME, words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert output.decode().split() == ["instances", f"{folder.resolve()}/work", "CapEff:", "0" * 16], errors
    assert b"/usr/x" in errors
    await start.destroy(NAME)
    with pytest.raises(Gone):
        start.reach(NAME, words)


async def test_exit_code_of_the_agent_is_that_of_the_machine(start: ProcessBackend, tmp_path: Path) -> None:
    program(start, "open('ready', 'w'); raise SystemExit(3)")
    folder = await started(start, tmp_path)
    await until("the end", lambda: asyncio.to_thread((folder / "exited").exists))
    assert json.loads((folder / "exited").read_text())["reason"] == "exit code 3"


async def test_isolation_that_is_impossible_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is one line, and no machine runs as the daemon's user instead."""
    monkeypatch.setattr(kernel_calls, "landlock_version", lambda: 0)
    sandbox = HostSandbox(hidden=[tmp_path])
    assert "Landlock" in await sandbox.problem()
    for backend in (
        ProcessBackend(tmp_path / "1", provider="local", installation=OURS, sandbox=sandbox),
        ProcessBackend(tmp_path / "2", provider="local", installation=OURS),
    ):
        with pytest.raises(Rejected, match="isolate"):
            await backend.start(machine(), boot(tmp_path))
        assert await backend.machines() == []


async def test_absent_store_is_not_created(start: ProcessBackend, tmp_path: Path) -> None:
    spec = boot(tmp_path)
    os.rename(tmp_path / "blobs", tmp_path / "away")
    with pytest.raises(Rejected, match="absent"):
        await start.start(machine(), spec)
    assert not (tmp_path / "blobs").exists()
    assert await start.machines() == []
