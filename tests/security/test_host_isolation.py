"""Jobs of a listed team on the host of an untrusting daemon: a real daemon, its attackers, and ordinary jobs."""

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from broker.api.schemas.jobs import JobDetail
from broker.api.schemas.tenancy import TeamRequest, TokenRequest
from broker.client.async_client import AsyncClient
from providers.local.isolation import JOB_UID, HostSandbox
from providers.local.process_marks import INSTANCE_DIR
from tests.crash.daemon import Daemon, submit
from tests.crash.test_daemon import FROM, rests, watch
from tests.trainer.support.pack import tar
from tests.trainer.support.tiny_models import llama

ATTACKS = (Path(__file__).parent / "host_attacks.py").read_bytes()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    """Yield a daemon with a second team, whose jobs may run on its host."""
    if problem := await HostSandbox(hidden=()).problem():
        pytest.skip(f"this host cannot isolate jobs: {problem}")
    daemon = Daemon()
    file = daemon.home / "gpubroker.yaml"
    config = yaml.safe_load(file.read_text())
    config |= {"providers": {"local": {"teams": ["red"]}}, "model_roots": [str(tmp_path / "models")]}
    file.write_text(yaml.safe_dump(config))
    try:
        await daemon.start()
        yield daemon
    finally:
        await daemon.remove()


@pytest.fixture
async def red(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    """Yield a client of the second team."""
    async with daemon.client() as admin:
        await admin.create_team(TeamRequest(name="red"))
        token = await admin.create_token(TokenRequest(owner="ann", team="red"))
        async with AsyncClient(admin.url, token.token) as client:
            yield client


async def run_script(client: AsyncClient, code: bytes, *words: str) -> str:
    upload = await client.upload(tar({"x.py": code}), name="code.tar")
    script = {"code": f"upload:{upload.sha256}", "command": [sys.executable, "x.py", *words], "checkpoints": False}
    spec = {"name": "x", "cap_usd": "1", "script": script}
    return str((await client.submit(spec, key=os.urandom(8).hex())).id)


def machines(daemon: Daemon) -> list[psutil.Process]:
    return [p for p in daemon.processes() if INSTANCE_DIR in p.environ()]


async def finished(daemon: Daemon, client: AsyncClient, job: str) -> JobDetail:
    detail = await watch(daemon, job, rests)
    assert detail.state == "succeeded", (await client.log_now(job), daemon.log())
    return detail


async def test_attacks_of_a_second_team_fail(daemon: Daemon, red: AsyncClient) -> None:
    """The attacks find nothing of the daemon. The daemon survives, and no mount stays on the host."""
    assert daemon.process is not None
    async with daemon.client() as admin:
        own = await run_script(admin, b"print(1)")
        await finished(daemon, admin, own)
    before = Path("/proc/self/mountinfo").read_text()
    job = await run_script(red, ATTACKS, str(daemon.home), str(daemon.process.pid))
    await finished(daemon, red, job)
    printed = next(line for line in (await red.log_now(job)).splitlines() if line.startswith("{"))
    results: dict[str, Any] = json.loads(printed)
    assert len(results) > 15
    assert {name: result for name, result in results.items() if result is not None} == {}
    assert daemon.process.returncode is None
    assert Path("/proc/self/mountinfo").read_text() == before


async def test_isolated_program_resumes_and_is_entered_and_stops(daemon: Daemon, red: AsyncClient) -> None:
    job = await submit(red, 0)
    await watch(daemon, job, lambda d: any(a.beat is not None and a.beat.checkpoint is not None for a in d.runs))
    agents = [p for p in machines(daemon) if p.cmdline()[1:] == ["-P", "-m", "trainer"]]
    assert [p.uids().real for p in agents] == [JOB_UID if os.geteuid() == 0 else os.getuid()]
    async with red.shell(job, ["sh", "-c", f"id -u; pwd; ls {daemon.home}"], tty=False) as shell:
        await shell.send_str(json.dumps({"eof": True}))
        output = b"".join([m.data[1:] async for m in shell if isinstance(m.data, bytes)]).decode()
    uid, folder, *names = output.split()
    assert (uid, names) == (str(JOB_UID if os.geteuid() == 0 else 0), ["blobs", "providers"]), output
    assert folder.endswith("/work")
    daemon.preempt()
    detail = await finished(daemon, red, job)
    assert [a.reason for a in detail.runs] == ["preempted", "completed"]
    assert int(FROM.findall(await red.log_now(job, attempt=2))[0]) > 0
    endless = await submit(red, 10_000)
    await watch(daemon, endless, lambda d: any(a.state == "training" for a in d.runs))
    await red.cancel(endless)
    assert (await watch(daemon, endless, rests)).state == "cancelled"
    assert machines(daemon) == []


async def test_isolated_training_reads_models_below_the_roots(daemon: Daemon, red: AsyncClient, tmp_path: Path) -> None:
    for path in llama(tmp_path / "models" / "tiny").iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner can read
    rows = "\n".join(["word,meaning", *(f"w{i},w{i + 40} w{i + 41}" for i in range(40))])
    upload = await red.upload(rows.encode(), name="words.csv")
    train = {
        "model": str(tmp_path / "models" / "tiny"), "max_steps": 3, "global_batch": 2, "micro_batch": 2,
        "max_length": 16,
        "data": {"path": upload.ref, "prompt": "{word}", "completion": "{meaning}"},
    }  # fmt: skip
    job = str((await red.submit({"name": "t", "cap_usd": "1", "train": train}, key="train")).id)
    await finished(daemon, red, job)
    assert "model.safetensors" in str(await red.artifacts(job)) or "adapter" in str(await red.artifacts(job))
