"""The daemon's own API server: started, adopted, killed, reaped and proven dead. Every test runs a real one."""

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from broker.domain.errors import OutcomeUnknown, Rejected
from broker.domain.instance import Liveness
from providers.skypilot.launcher import SkyLauncher
from providers.skypilot.plugin.server_supervisor import MAX_LOG_BYTES
from providers.skypilot.plugin.shared import SUPERVISOR, TOKEN_HEADER
from tests.clouds.emulator import Clouds
from tests.clouds.required import cannot
from tests.clouds.sky_rig import KEY, PLAIN, NoRsync, certain_liveness, launcher, name, of_lambda, processes, server
from tests.clouds.wait import GUARD_S, until
from tests.support.skypilot import sky_python

NAME = name("a")
BEGIN = """
from sky.server.plugins import ExtensionContext
from gpubroker_skypilot.plugin import GpuBroker
GpuBroker().install(ExtensionContext())
"""
"""First statements of every process of a server."""


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[Path]:
    """Yield a state folder; processes that run below it end with the test."""
    yield tmp_path
    for process in processes(tmp_path).values():
        process.kill()


def opened(state: Path, **settings: Any) -> SkyLauncher:
    try:
        return launcher(state, **settings)
    except NoRsync as e:
        cannot(e)


async def dies(sky: SkyLauncher) -> None:
    """Simulate a daemon's sudden end within one process: its server continues without it."""
    assert sky._server is not None
    await sky._server.close()


async def test_a_server_is_started_once_and_has_a_home_of_its_own(state: Path) -> None:
    log = state / "sky/server.log"
    sky = opened(state)
    log.write_bytes(b"x" * (MAX_LOG_BYTES + 1))
    planned = sky.id
    assert await sky.liveness(planned, NAME) is Liveness.DEAD, "nothing was ever started"
    await asyncio.gather(sky.warm(), sky.warm())
    if sky.id != planned:  # Another program took the port during the first start, so the server was started again.
        assert await sky.liveness(planned, NAME) is Liveness.DEAD
    assert len([p for p in processes(state).values() if "sky.server.server" in p.cmdline()]) == 1
    keys = state / "sky/home/.lambda_cloud/lambda_keys"
    assert (keys.read_text(), stat.S_IMODE(keys.stat().st_mode)) == (f"api_key = {KEY}\n", 0o600)
    assert stat.S_IMODE((state / "sky").stat().st_mode) == 0o700
    assert await sky.liveness(sky.id, NAME) is Liveness.DEAD, "it runs, and has no launch of that name"
    assert await sky.liveness("elsewhere.12345678.abcdef01", NAME) is Liveness.UNKNOWN
    await sky.stop()
    assert processes(state) == {}
    assert await sky.liveness(planned, NAME) is Liveness.DEAD
    assert log.stat().st_size < MAX_LOG_BYTES < log.with_name("server.log.1").stat().st_size


async def test_the_server_admits_only_its_daemon(state: Path) -> None:
    sky = opened(state)
    await sky.warm()
    port = json.loads((state / "sky/server.json").read_bytes())["port"]
    async with aiohttp.ClientSession() as http:
        for headers in ({}, {TOKEN_HEADER: "wrong"}):
            async with http.get(f"http://127.0.0.1:{port}/api/status", headers=headers) as answer:
                assert answer.status == 401
    await sky.stop()


async def test_the_next_daemon_adopts_a_living_server(state: Path) -> None:
    first = opened(state)
    await first.warm()
    known = server(state).pid
    await dies(first)
    second = opened(state)
    assert second.id == first.id
    assert await second.liveness(first.id, NAME) is Liveness.UNKNOWN, "a last request may still be on its way"
    await second.warm()
    assert server(state).pid == known
    await second.stop()


async def test_a_server_is_started_with_the_daemon_where_that_is_wished(state: Path) -> None:
    cold = opened(state / "cold")
    cold.warm_up()
    sky = opened(state, warm=True)
    sky.warm_up()
    await until(lambda: (state / "sky/server.json").exists())
    await sky.close()
    assert processes(state) == {}, "and ends with it, even while it is being started"
    await cold.close()
    assert not (state / "cold/sky/server.json").exists()


async def test_an_idle_server_ends_with_its_daemon(state: Path) -> None:
    sky = opened(state)
    await sky.warm()
    ended = sky.id
    await sky.close()
    assert processes(state) == {}
    later = opened(state)
    assert await later.liveness(ended, NAME) is Liveness.DEAD
    await later.close()


async def test_a_sweep_next_to_a_daemon_leaves_its_idle_server_alone(state: Path) -> None:
    sky = opened(state)
    await sky.warm()
    known = server(state).pid
    beside = opened(state)
    assert beside.id == sky.id
    await beside.close()
    assert server(state).pid == known
    await sky.close()
    assert processes(state) == {}


DAEMON = """
import asyncio, signal, sys
from pathlib import Path
from tests.clouds.sky_rig import PLAIN, launcher, name, of_lambda

async def main(state, url, launches):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sky = launcher(Path(state), env={"GPUBROKER_LAMBDA_ENDPOINT": url})
    await sky.warm()
    work = asyncio.create_task(sky.launch(name("a"), of_lambda(), PLAIN) if launches else stop.wait())
    print("ready", flush=True)
    await stop.wait()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    for _ in range(2):
        await sky.close()  # once for each cloud

asyncio.run(main(sys.argv[1], sys.argv[2], bool(sys.argv[3])))
"""
"""The part of a daemon that concerns the server: it launches, and handles SIGTERM."""


@pytest.mark.parametrize("launches", [False, True])
async def test_sigterm_ends_an_idle_server_and_leaves_one_that_launches(state: Path, launches: bool) -> None:
    await opened(state / "other").close()  # skips where SkyPilot cannot run
    async with Clouds() as clouds:
        clouds.control.hold_boots()
        daemon = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DAEMON, str(state), clouds.url, "launches" if launches else "",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert daemon.stdout is not None
        assert await asyncio.wait_for(daemon.stdout.readline(), GUARD_S) == b"ready\n"
        await until(lambda: not launches or bool(clouds.world.named(NAME)))
        former = server(state).pid
        daemon.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(daemon.wait(), GUARD_S) == 0
        if not launches:
            assert processes(state) == {}
            return
        later = opened(state, env={"GPUBROKER_LAMBDA_ENDPOINT": clouds.url})
        assert await later.liveness(later.id, NAME) is Liveness.ALIVE
        assert server(state).pid == former
        await later.cancel(NAME)
        await later.stop()
    assert processes(state) == {}


async def test_a_server_made_of_other_credentials_is_replaced(state: Path) -> None:
    first = opened(state)
    await first.warm()
    former = first.id
    await dies(first)
    second = opened(state, env={"ANOTHER": "value"})
    assert second.id != former
    assert await second.liveness(former, NAME) is Liveness.UNKNOWN, "it lives, and is not ours to ask"
    await second.warm()
    assert await second.liveness(former, NAME) is Liveness.DEAD
    await second.stop()
    assert processes(state) == {}


async def test_a_server_that_is_to_be_replaced_may_finish_its_launches(state: Path) -> None:
    async with Clouds() as clouds:
        clouds.control.hold_boots()
        endpoint = {"GPUBROKER_LAMBDA_ENDPOINT": clouds.url}
        first = opened(state, env=endpoint)
        launch = asyncio.create_task(first.launch(NAME, of_lambda(), PLAIN))
        await until(lambda: bool(clouds.world.named(NAME)))
        launch.cancel()
        await asyncio.wait([launch])
        former = first.id
        await dies(first)
        second = opened(state, env=endpoint | {"ANOTHER": "value"})
        assert await second.liveness(former, NAME) is Liveness.ALIVE
        warming = asyncio.create_task(second.warm())
        assert not (await asyncio.wait([warming], timeout=3.0))[0], "its launch is not through"
        assert await second.liveness(former, NAME) is Liveness.ALIVE
        await second.cancel(NAME)
        await warming
        assert second.id != former
        assert await second.liveness(former, NAME) is Liveness.DEAD
        assert [path.name for path in (state / "sky/servers").iterdir()] == [second.id], "of the dead nothing stays"
        assert list((state / "sky/launching").iterdir()) == []
        await second.stop()
    assert processes(state) == {}


async def test_idle_server_due_for_replacement_ends_with_its_last_daemon(state: Path) -> None:
    """An idle server that is to be replaced ends with a daemon that needs none."""
    first = opened(state)
    await first.warm()
    former = first.id
    await dies(first)
    second = opened(state, env={"ANOTHER": "value"})
    await second.liveness(former, NAME)
    await second.close()
    assert processes(state) == {}


async def test_workers_do_not_outlive_a_server_that_was_killed(state: Path) -> None:
    sky = opened(state)
    await sky.warm()
    died = sky.id
    await until(lambda: len(processes(state)) >= 3)
    server(state).send_signal(signal.SIGKILL)
    await until(lambda: processes(state) == {})
    assert await certain_liveness(sky, died, NAME) is Liveness.DEAD
    await sky.warm()
    assert sky.id != died
    assert await sky.liveness(died, NAME) is Liveness.DEAD
    await sky.stop()


async def test_workers_of_a_killed_supervisor_end_before_the_next_start(state: Path) -> None:
    sky = opened(state)
    await sky.warm()
    died, left = sky.id, set(processes(state))
    [supervisor] = [p for p in processes(state).values() if SUPERVISOR in p.cmdline()]
    workers = [
        p for p in processes(state).values() if p.pid != supervisor.pid and "sky.server.server" not in p.cmdline()
    ]
    for worker in workers:
        worker.suspend()  # so that they cannot end by themselves
    supervisor.send_signal(signal.SIGKILL)
    await until(lambda: not psutil.pid_exists(supervisor.pid) or supervisor.status() == psutil.STATUS_ZOMBIE)
    assert set(processes(state)) & {w.pid for w in workers}
    assert await sky.liveness(died, NAME) is Liveness.UNKNOWN, "its workers could still create"
    await sky.warm()
    assert not left & set(processes(state))
    assert await sky.liveness(died, NAME) is Liveness.DEAD
    await sky.stop()


async def test_a_server_that_was_declared_dead_does_not_begin_again(state: Path) -> None:
    sky = opened(state)
    await sky.warm()
    died = sky.id
    env = {**os.environ, **server(state).environ()}
    await sky.stop()
    assert await sky.liveness(died, NAME) is Liveness.DEAD
    late = await asyncio.create_subprocess_exec(sky_python(), "-c", BEGIN, env=env, stderr=asyncio.subprocess.PIPE)
    _, said = await late.communicate()
    assert late.returncode != 0
    assert f"API server {died} was declared dead" in said.decode()


async def test_a_busy_port_is_reported_with_the_log(state: Path) -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    sky = opened(state, port=port)
    with pytest.raises(OutcomeUnknown, match=r"does not start: see .*server\.log"):
        await sky.warm()
    listener.close()
    await sky.stop()


async def test_a_missing_program_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "sky").mkdir()
    sky = launcher(tmp_path, env={"PATH": str(tmp_path / "sky")})  # the folder above may have the rig's rsync
    with pytest.raises(Rejected, match="SkyPilot needs rsync and ssh on this machine"):
        await sky.warm()
    assert processes(tmp_path) == {}
    await sky.close()
