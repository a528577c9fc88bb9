"""The daemon is killed, again and again; its jobs end as if nothing had happened."""

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
LIVE = {"planned", "launching", "booting", "training", "draining", "terminating"}


@pytest.fixture
async def daemon() -> AsyncIterator[Callable[..., Awaitable[Daemon]]]:
    made: list[Daemon] = []

    async def start(**simulated: Any) -> Daemon:
        made.append(Daemon(**simulated))
        await made[-1].start()
        return made[-1]

    yield start
    for one in made:
        await one.remove()


async def watch(daemon: Daemon, job: str, until: Callable[[JobDetail], bool], within_s: float = 300) -> JobDetail:
    """Polls the job; at every look there is at most one live attempt."""
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
    daemon: Callable[..., Awaitable[Daemon]],
) -> None:
    """An upload that a killed daemon left is removed by the next and by no other."""
    house = await daemon()
    at = json.loads((house.home / "client.json").read_text())
    headers = {"Authorization": f"Bearer {at['token']}", "Content-Type": "application/octet-stream"}

    async def endless() -> AsyncIterator[bytes]:
        yield b"q,a\n" + bytes(WRITE_BYTES)
        await asyncio.Event().wait()

    def spooled() -> list[int]:
        return [path.stat().st_size for path in (house.home / SPOOL).glob("*")]

    async with aiohttp.ClientSession() as http:
        sending = asyncio.ensure_future(
            http.post(f"{at['url']}/v1/uploads?name=a.csv", data=endless(), headers=headers)
        )
        async with Within(300, "half an upload lies there", house.log):
            while spooled() != [WRITE_BYTES + 4]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        argv = [sys.executable, "-m", "broker.cli", "serve", "--home", str(house.home)]
        second = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        async with Within(300, "the end of a second daemon", house.log):
            _, said = await second.communicate()
        assert second.returncode, said
        assert spooled() == [WRITE_BYTES + 4], said
        await house.kill()
        await asyncio.gather(sending, return_exceptions=True)
    assert spooled() == [WRITE_BYTES + 4]
    await house.start()
    assert not (house.home / SPOOL).exists()


async def test_jobs_outlive_a_daemon_that_is_killed_at_random_moments(
    daemon: Callable[..., Awaitable[Daemon]],
) -> None:
    """kill -9 from submit to end, with a preemption among it: one attempt after the other, and all succeed."""
    house = await daemon(lifetimes_s=(4, 100_000, 6))
    moments = random.Random(20)
    async with house.client() as client:
        jobs = [await submit(client, 60), await submit(client, 60, resources={"spot": "never"})]
    for _ in range(6):
        await asyncio.sleep(moments.uniform(0.05, 2.5))
        await house.kill()
        await house.start()
    for job in jobs:
        detail = await watch(house, job, rests)
        assert detail.state == "succeeded", house.log()
        assert detail.spent_usd <= detail.cap_usd
        async with house.client() as client:
            text = await client.log_now(job)
        assert "count 60" in text
    await house.stop()
    assert house.processes() == []


async def test_a_preempted_program_goes_on_where_its_checkpoint_ends(daemon: Callable[..., Awaitable[Daemon]]) -> None:
    house = await daemon()
    async with house.client() as client:
        job = await submit(client, 0, resources={"spot": "only"})
    await watch(house, job, lambda d: any(a.beat is not None and a.beat.checkpoint is not None for a in d.runs))
    house.preempt()
    detail = await watch(house, job, rests)
    assert (detail.state, [a.reason for a in detail.runs]) == ("succeeded", ["preempted", "completed"])
    async with house.client() as client:
        second = await client.log_now(job, attempt=2)
    assert int(FROM.findall(second)[0]) > 0
    await house.stop()
    assert house.processes() == []


async def test_a_cancelled_job_leaves_no_process(daemon: Callable[..., Awaitable[Daemon]]) -> None:
    house = await daemon()
    async with house.client() as client:
        job = await submit(client, 10_000)
        await watch(house, job, lambda d: any(a.state == "training" for a in d.runs))
        await client.cancel(job)
    detail = await watch(house, job, rests)
    assert detail.state == "cancelled"
    await house.stop()
    assert house.processes() == []


async def test_a_job_outlives_a_broker_that_stays_away_at_no_retry(
    postgres_dsn: str, daemon: Callable[..., Awaitable[Daemon]]
) -> None:
    """Its program is saved and ended once nobody has touched the lease for long, and goes on with the broker."""
    house = await daemon(limits={"deadman_s": 15}, database_url=postgres_dsn, boot_s=0.1)
    async with house.client() as client:
        job = await submit(client, 0)
    await watch(house, job, lambda d: any(a.beat is not None and a.beat.checkpoint is not None for a in d.runs))
    await house.kill()
    async with Within(300, "nothing runs any more", house.log):
        while house.processes():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    (final,) = (house.home / "blobs").rglob("final.json")
    assert json.loads(final.read_text())["outcome"] == "deadman"
    await house.start()
    detail = await watch(house, job, rests)
    assert (detail.state, detail.retries_used) == ("succeeded", 0)
    assert [a.reason for a in detail.runs] == ["deadman", "completed"]
    async with house.client() as client:
        assert int(FROM.findall(await client.log_now(job, attempt=2))[0]) > 0


async def test_a_second_daemon_on_one_home_is_refused_in_one_line(daemon: Callable[..., Awaitable[Daemon]]) -> None:
    house = await daemon()
    twin = Daemon()
    twin.home = house.home
    with pytest.raises(AssertionError):
        await twin.start()
    assert twin.process is not None
    assert await twin.process.wait() != 0
    last = house.log().strip().splitlines()[-1]
    assert str(house.home) in last
    assert "Traceback" not in house.log()


async def test_on_a_new_database_under_an_old_home_orphans_are_only_reported(
    daemon: Callable[..., Awaitable[Daemon]],
) -> None:
    """The machines of the lost database stay, also after a restart, until a person has looked."""
    house = await daemon()
    async with house.client() as client:
        job = await submit(client, 10_000)
    await watch(house, job, lambda d: any(a.state == "training" for a in d.runs))
    await house.stop()
    shutil.rmtree(house.home / "postgres")
    for _ in range(2):
        await house.start()
        async with Within(300, "the log tells of orphans", house.log):
            while "only reported: the database is new to this home" not in house.log():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await house.stop()
        (house.home / "daemon.log").write_text("")
        assert [p for p in house.processes() if "providers.local.hypervisor" in " ".join(p.cmdline())]
