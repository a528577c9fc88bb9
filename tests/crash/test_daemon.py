"""Jobs of a daemon that is killed repeatedly end as those of an undisturbed daemon."""

import asyncio
import json
import random
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from broker.api.core.upload_spool import WRITE_BYTES
from broker.api.schemas.jobs import JobDetail
from broker.daemon.home_dir import SPOOL
from tests.crash.daemon import Daemon, submit
from tests.crash.waits import Within

RESTING = {"succeeded", "failed", "capped", "cancelled"}
FROM = re.compile(r"^from (\d+)$", re.MULTILINE)
DaemonStarter = Callable[..., Awaitable[Daemon]]
LIVE = {"planned", "launching", "booting", "training", "draining", "terminating"}


@pytest.fixture
async def start_daemon() -> AsyncIterator[DaemonStarter]:
    daemons: list[Daemon] = []

    async def start(**simulated: Any) -> Daemon:
        daemons.append(Daemon(**simulated))
        await daemons[-1].start()
        return daemons[-1]

    yield start
    for daemon in daemons:
        await daemon.remove()


async def watch(daemon: Daemon, job: str, until: Callable[[JobDetail], bool], within_s: float = 300) -> JobDetail:
    """Poll the job, and check at each poll that it has at most one live attempt."""
    detail = None
    async with Within(within_s, f"job {job}", lambda: f"{detail}\n{daemon.log()}"), daemon.client() as client:
        while True:
            detail = await client.job(job)
            assert sum(a.state in LIVE for a in detail.runs) <= 1
            if until(detail):
                return detail
            await asyncio.sleep(0.1)


def rests(detail: JobDetail) -> bool:
    return detail.state in RESTING


async def test_upload_left_by_a_killed_daemon_is_removed_by_the_next_one(
    start_daemon: DaemonStarter,
) -> None:
    """The next daemon on the same home removes the upload; a daemon on another home does not."""
    daemon = await start_daemon()
    at = json.loads((daemon.home / "client.json").read_text())
    headers = {"Authorization": f"Bearer {at['token']}", "Content-Type": "application/octet-stream"}

    async def endless() -> AsyncIterator[bytes]:
        yield b"q,a\n" + bytes(WRITE_BYTES)
        await asyncio.Event().wait()

    def spooled() -> list[int]:
        return [path.stat().st_size for path in (daemon.home / SPOOL).glob("*")]

    async with aiohttp.ClientSession() as http:
        sending = asyncio.ensure_future(
            http.post(f"{at['url']}/v1/uploads?name=a.csv", data=endless(), headers=headers)
        )
        async with Within(300, "half an upload lies there", daemon.log):
            while spooled() != [WRITE_BYTES + 4]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        argv = [sys.executable, "-m", "broker.cli", "serve", "--home", str(daemon.home)]
        second = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        async with Within(300, "the end of a second daemon", daemon.log):
            _, stderr = await second.communicate()
        assert second.returncode, stderr
        assert spooled() == [WRITE_BYTES + 4], stderr
        await daemon.kill()
        await asyncio.gather(sending, return_exceptions=True)
    assert spooled() == [WRITE_BYTES + 4]
    await daemon.start()
    assert not (daemon.home / SPOOL).exists()


async def test_jobs_outlive_a_daemon_that_is_killed_at_random_moments(
    start_daemon: DaemonStarter,
) -> None:
    """The daemon gets SIGKILL from the submit to the end, and one machine is preempted. All jobs succeed."""
    daemon = await start_daemon(lifetimes_s=(4, 100_000, 6))
    moments = random.Random(20)
    async with daemon.client() as client:
        jobs = [await submit(client, 60), await submit(client, 60, resources={"spot": "never"})]
    for _ in range(6):
        await asyncio.sleep(moments.uniform(0.05, 2.5))
        await daemon.kill()
        await daemon.start()
    for job in jobs:
        detail = await watch(daemon, job, rests)
        assert detail.state == "succeeded", daemon.log()
        assert detail.spent_usd <= detail.cap_usd
        async with daemon.client() as client:
            text = await client.log_now(job)
        assert "count 60" in text
    await daemon.stop()
    assert daemon.processes() == []


async def test_a_preempted_program_continues_where_its_checkpoint_ends(start_daemon: DaemonStarter) -> None:
    daemon = await start_daemon()
    async with daemon.client() as client:
        job = await submit(client, 0, resources={"spot": "only"})
    await watch(daemon, job, lambda d: any(a.beat is not None and a.beat.checkpoint is not None for a in d.runs))
    daemon.preempt()
    detail = await watch(daemon, job, rests)
    assert (detail.state, [a.reason for a in detail.runs]) == ("succeeded", ["preempted", "completed"])
    async with daemon.client() as client:
        second = await client.log_now(job, attempt=2)
    assert int(FROM.findall(second)[0]) > 0
    await daemon.stop()
    assert daemon.processes() == []


async def test_a_script_is_set_up_on_each_machine_or_fails(start_daemon: DaemonStarter) -> None:
    daemon, setup = await start_daemon(), ["test -f count.py", "echo ready >> ready; cat ready"]
    async with daemon.client() as client:
        job = await submit(client, 0, script={"setup": setup}, resources={"spot": "only"})
        broken = await submit(client, 0, script={"setup": [*setup, "echo no compiler; exit 3"]})
    await watch(daemon, job, lambda d: any(a.beat is not None and a.beat.checkpoint is not None for a in d.runs))
    daemon.preempt()
    detail, failed = await watch(daemon, job, rests), await watch(daemon, broken, rests)
    assert (detail.state, [a.reason for a in detail.runs]) == ("succeeded", ["preempted", "completed"])
    async with daemon.client() as client:
        logs = [await client.log_now(job, attempt=number) for number in (1, 2)]
    assert [log.splitlines().count("ready") for log in logs] == [1, 1], "each machine begins with the code alone"
    assert (failed.state, len(failed.runs), failed.retries_used) == ("failed", 1, 0)
    assert "setup: command 3 exited with 3; its last line: no compiler" in failed.reason


async def test_a_cancelled_job_leaves_no_process(start_daemon: DaemonStarter) -> None:
    daemon = await start_daemon()
    async with daemon.client() as client:
        job = await submit(client, 10_000)
        await watch(daemon, job, lambda d: any(a.state == "training" for a in d.runs))
        await client.cancel(job)
    detail = await watch(daemon, job, rests)
    assert detail.state == "cancelled"
    await daemon.stop()
    assert daemon.processes() == []


async def test_a_job_outlives_a_broker_that_stays_away_at_no_retry(
    postgres_dsn: str, start_daemon: DaemonStarter
) -> None:
    """The dead-man's switch saves and ends the program, which resumes with the next broker."""
    daemon = await start_daemon(limits={"deadman_s": 15}, database_url=postgres_dsn, boot_s=0.1)
    async with daemon.client() as client:
        job = await submit(client, 0)
    await watch(daemon, job, lambda d: any(a.beat is not None and a.beat.checkpoint is not None for a in d.runs))
    await daemon.kill()
    async with Within(300, "nothing runs any more", daemon.log):
        while daemon.processes():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    (final,) = (daemon.home / "blobs").rglob("final.json")
    assert json.loads(final.read_text())["outcome"] == "deadman"
    await daemon.start()
    detail = await watch(daemon, job, rests)
    assert (detail.state, detail.retries_used) == ("succeeded", 0)
    assert [a.reason for a in detail.runs] == ["deadman", "completed"]
    async with daemon.client() as client:
        assert int(FROM.findall(await client.log_now(job, attempt=2))[0]) > 0


async def test_a_second_daemon_on_one_home_is_refused_in_one_line(start_daemon: DaemonStarter) -> None:
    daemon = await start_daemon()
    twin = Daemon()
    twin.home = daemon.home
    with pytest.raises(AssertionError):
        await twin.start()
    assert twin.process is not None
    assert await twin.process.wait() != 0
    last = daemon.log().strip().splitlines()[-1]
    assert str(daemon.home) in last
    assert "Traceback" not in daemon.log()


async def test_on_a_new_database_under_an_old_home_orphans_are_only_reported(
    start_daemon: DaemonStarter,
) -> None:
    """Machines of the lost database stay, also after a restart, until an operator acts."""
    daemon = await start_daemon()
    async with daemon.client() as client:
        job = await submit(client, 10_000)
    await watch(daemon, job, lambda d: any(a.state == "training" for a in d.runs))
    await daemon.stop()
    shutil.rmtree(daemon.home / "postgres")
    for _ in range(2):
        await daemon.start()
        async with Within(300, "the log reports orphans", daemon.log):
            while "only reported: the database is new to this home" not in daemon.log():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await daemon.stop()
        (daemon.home / "daemon.log").write_text("")
        assert [p for p in daemon.processes() if "providers.local.hypervisor" in " ".join(p.cmdline())]
