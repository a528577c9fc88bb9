"""Input for SkyPilot, and facts that are known without it."""

import asyncio
import stat
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import Liveness
from providers.common.cloud import Purchase
from providers.common.machine_task import MachineTask
from providers.skypilot.config import SkyConfig
from providers.skypilot.launcher import SkyLauncher, _task_yaml
from providers.skypilot.plugin.shared import PLUGIN_VERSION, SKY_VERSION
from providers.skypilot.plugin.ssh import argv
from providers.skypilot.server import user_of

NAME = InstanceName("gb-abcd-aaaaaaaaaaaaa")
BOUGHT = Purchase(
    cloud="aws", region="us-east-1", zone="us-east-1a", instance_type="g6e.xlarge", use_spot=True, disk_gb=64,
    network_tier="best",
)  # fmt: skip
TASK = MachineTask(
    setup="echo 1", run="echo 2", env={"A": "b"}, secrets={"S": "t"}, image="docker:x@sha256:0", nodes=2,
    registry_login=("registry.example", "me", "word"),
)  # fmt: skip


def opened(state: Path) -> SkyLauncher:
    return SkyLauncher(SkyConfig(), installation=Installation("abcd"), state=state)


def test_a_task_is_pinned_to_one_thing_in_one_place() -> None:
    assert yaml.safe_load(_task_yaml(NAME, BOUGHT, TASK)) == {
        "name": NAME,
        "num_nodes": 2,
        "resources": {
            "infra": "aws/us-east-1/us-east-1a",
            "instance_type": "g6e.xlarge",
            "use_spot": True,
            "disk_size": 64,
            "image_id": "docker:x@sha256:0",
            "network_tier": "best",
        },
        "envs": {"A": "b"},
        "secrets": {
            "S": "t",
            "SKYPILOT_DOCKER_SERVER": "registry.example",
            "SKYPILOT_DOCKER_USERNAME": "me",
            "SKYPILOT_DOCKER_PASSWORD": "word",
        },
        "setup": "echo 1",
        "run": "echo 2",
    }


def test_the_ssh_command_ignores_the_users_configuration() -> None:
    way = {"host": "10.0.0.1", "port": 2222, "user": "ubuntu", "proxy": "nc jump %h"}
    ssh = argv(way, Path("/key"), Path("/a 100%/known"), tty=False)
    assert ssh[:3] == ["ssh", "-F", "none"]
    assert ssh[-1] == "ubuntu@10.0.0.1"
    assert "ProxyCommand=nc jump %h" in ssh
    assert {"StrictHostKeyChecking=accept-new", 'UserKnownHostsFile="/a 100%%/known"'} <= set(ssh)
    assert ssh[ssh.index("-p") : ssh.index("-p") + 2] == ["-p", "2222"]
    assert ("-T" in ssh, "-tt" in argv(way, Path("/key"), Path("/known"), tty=True)) == (True, True)


def test_skypilots_user_follows_from_the_installation() -> None:
    assert user_of(Installation("abcd")) == "88d4266f"


async def test_a_planned_server_of_a_daemon_that_died_is_dead(tmp_path: Path) -> None:
    """`create_sent_at` names a server before it is started; the next daemon must not wait for it for ever."""
    first, second = opened(tmp_path), opened(tmp_path)
    planned = first.id
    assert await second.liveness(planned, NAME) is Liveness.UNKNOWN, "its daemon lives, and may start it yet"
    await first.close()
    assert await second.liveness(planned, NAME) is Liveness.DEAD
    assert await second.liveness("../../etc/passwd", NAME) is Liveness.UNKNOWN
    assert await second.liveness("", NAME) is Liveness.UNKNOWN
    await second.close()


async def test_calls_that_need_no_server_start_none(tmp_path: Path) -> None:
    sky = opened(tmp_path)
    async with asyncio.timeout(300):
        await sky.cancel(NAME)
        await sky.forget(NAME)
    await sky.close()
    assert not (tmp_path / "server.json").exists()
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


async def test_another_installations_server_is_asked_and_not_judged(tmp_path: Path) -> None:
    config = SkyConfig(url="http://127.0.0.1:9", token="word-of-the-server")
    sky = SkyLauncher(config, installation=Installation("abcd"), state=tmp_path)
    assert sky.id == "url.http://127.0.0.1:9"
    assert await sky.liveness(sky.id, NAME) is Liveness.UNKNOWN, "it does not answer"
    assert await sky.liveness("vm.12345678.abcdef01", NAME) is Liveness.UNKNOWN
    assert "word-of-the-server" not in repr(config)
    await sky.close()


def test_a_folder_of_servers_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    state = tmp_path / "sky"
    opened(state)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


async def test_a_launch_that_was_sent_and_not_answered_is_not_dead_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server lists a request only when it has taken it in, which may be after its sender has gone."""
    sent = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        match request.path:
            case "/api/health":
                return web.json_response({"version": SKY_VERSION, "status": "healthy"})
            case "/api/plugins":
                return web.json_response({"plugins": [{"name": "gpubroker", "version": PLUGIN_VERSION}]})
            case "/launch":
                sent.set()
                await asyncio.Event().wait()
        return web.json_response({"launching": False} if request.path.startswith("/gpubroker/") else [])

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app, host="127.0.0.1") as server:
        config = SkyConfig(url=str(server.make_url("")))
        sky = SkyLauncher(config, installation=Installation("abcd"), state=tmp_path)
        launch = asyncio.create_task(sky.launch(NAME, BOUGHT, TASK))
        async with asyncio.timeout(300):
            await sent.wait()
        monkeypatch.setattr("providers.skypilot.launcher.SETTLE_S", 600.0)
        launch.cancel()
        await asyncio.gather(launch, return_exceptions=True)
        assert await sky.liveness(sky.id, NAME) is Liveness.UNKNOWN
        monkeypatch.setattr("providers.skypilot.launcher.SETTLE_S", 0.0)
        assert await sky.liveness(sky.id, NAME) is Liveness.DEAD
        await sky.close()


async def test_skypilot_is_asked_once_to_forget_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downs = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal downs
        if request.path == "/down":
            downs += 1
            return web.json_response(None, headers={"X-Skypilot-Request-ID": "r"})
        return web.json_response({"status": "SUCCEEDED"} if request.path == "/api/get" else [])

    async def forget(times: int) -> int:
        for _ in range(times):
            await sky.forget(NAME)
            async with asyncio.timeout(300):
                await asyncio.gather(*sky._forgetting.values())
        return downs

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app, host="127.0.0.1") as server:
        sky = SkyLauncher(SkyConfig(url=str(server.make_url(""))), installation=Installation("abcd"), state=tmp_path)
        assert await forget(5) == 1
        monkeypatch.setattr("providers.skypilot.launcher.PURGE_INTERVAL_S", 0.0)
        assert await forget(1) == 2, "its launch may have gone on meanwhile"
        await sky.close()
