"""A team's SkyPilot server with its own home, credentials and catalogs, of which the daemon has only the address."""

import asyncio
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import yaml

from broker.domain.errors import OutcomeUnknown, Rejected
from broker.domain.instance import Liveness
from providers.skypilot.config import SkyConfig
from providers.skypilot.launcher import SkyLauncher
from providers.skypilot.plugin.shared import LOCK, PLUGIN, STATE, SUPERVISOR, TOKEN
from providers.skypilot.server import free_port
from tests.clouds.emulator import Clouds
from tests.clouds.required import cannot
from tests.clouds.sky_rig import FILES, INSTALLATION, TASK, NoRsync, name, of_runpod, rsync
from tests.clouds.test_sky_launch import created
from tests.clouds.wait import GUARD_S, until
from tests.support.skypilot import sky_python

CATALOG = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,AvailabilityZone
1x_L40S_SECURE,L40S,1,16,94,0.79,0.11,US,US-GA-1
1x_L40S_SECURE,L40S,1,16,94,0.79,0.11,CA,CA-MTL-1
"""
"""RunPod's catalog on the team's server: another price, and no entry of our purchase."""


class Team:
    """Server of a team, with its home and address."""

    def __init__(self, home: Path, clouds: Clouds, *, plugin: bool) -> None:
        catalogs, plugins = home / ".sky/catalogs/v8", home / "plugins.yaml"
        self.catalog = catalogs / "runpod/vms.csv"
        written = {home / path: content for path, content in FILES.items()}
        written |= {self.catalog: CATALOG.encode(), catalogs / "common/accelerators.csv": b"AcceleratorName,Clouds\n"}
        written |= {plugins: yaml.safe_dump({"plugins": [{"class": PLUGIN}] if plugin else []}).encode()}
        for path, content in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self.token, self.port = secrets.token_hex(8), free_port()
        env = {k: v for k, v in os.environ.items() if k not in (LOCK, STATE)} | dict(clouds.environment)
        env |= {
            "PATH": rsync(home), "HOME": str(home), "SKY_RUNTIME_DIR": str(home), TOKEN: self.token,
            "SKYPILOT_SERVER_PLUGINS_CONFIG": str(plugins),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.port),
        }  # fmt: skip
        with (home / "server.log").open("wb") as log, open(os.devnull) as nothing:
            self.keeper = subprocess.Popen(
                [
                    *(sky_python(), "-m", SUPERVISOR),
                    *(str(nothing.fileno()), str(self.port), log.name),
                ],
                env=env, cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(nothing.fileno(),),
                start_new_session=True,
            )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def up(self) -> None:
        async with aiohttp.ClientSession() as http, asyncio.timeout(GUARD_S):
            while True:
                with suppress(aiohttp.ClientError):
                    async with http.get(f"{self.url}/api/health", headers={"X-Gpubroker-Token": self.token}) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.2)

    def end(self) -> None:
        self.keeper.send_signal(signal.SIGTERM)
        self.keeper.wait(GUARD_S)

    def guest(self, state: Path) -> SkyLauncher:
        return SkyLauncher(SkyConfig(url=self.url, token=self.token), installation=INSTALLATION, state=state)


@pytest.fixture
async def clouds() -> AsyncIterator[Clouds]:
    async with Clouds() as clouds:
        clouds.control.hold_boots()
        yield clouds
        assert clouds.violations == []


def started(home: Path, clouds: Clouds, *, plugin: bool = True) -> Team:
    home.mkdir()
    try:
        return Team(home, clouds, plugin=plugin)
    except NoRsync as e:
        cannot(e)


async def test_a_remote_server_buys_an_offer_that_its_catalog_lacks(tmp_path: Path, clouds: Clouds) -> None:
    team = started(tmp_path / "team", clouds)
    guest = team.guest(tmp_path / "mine")
    try:
        await team.up()
        mine = name("a")
        [row] = of_runpod("0.43").catalog["runpod/vms.csv"]
        kind = "1x_L40S_SECURE_US-GA-1_0.43"
        rows = {"runpod/vms.csv": [{**row, "InstanceType": kind}]}
        bought = replace(of_runpod(), instance_type=kind, catalog=rows)
        launch = asyncio.create_task(guest.launch(mine, bought, TASK))
        await until(partial(created, clouds, mine, launch))
        assert not launch.done(), launch.exception()
        [pod] = clouds.world.named(mine)
        assert (str(pod.usd_per_hour), pod.spot, pod.request["dataCenterId"]) == ("0.43", True, "US-GA-1")
        assert await guest.liveness(guest.id, mine) is Liveness.ALIVE
        assert team.catalog.read_text() == CATALOG, "what is the team's stays so"
        assert not (tmp_path / "mine").exists()
        await guest.cancel(mine)
        with suppress(OutcomeUnknown):
            await launch
    finally:
        await guest.close()
        team.end()


async def test_a_server_without_the_plugin_launches_nothing(tmp_path: Path, clouds: Clouds) -> None:
    team = started(tmp_path / "team", clouds, plugin=False)
    guest = team.guest(tmp_path / "mine")
    try:
        await team.up()
        with pytest.raises(
            Rejected, match=r"lacks the plugin of this gpubroker \(\w+\): install the same gpubroker there"
        ):
            await guest.launch(name("b"), of_runpod(), TASK)
        assert clouds.world.named(name("b")) == []
    finally:
        await guest.close()
        team.end()
