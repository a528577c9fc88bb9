"""SkyPilot's launch without the broker: the same API server, purchase and task."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from broker.domain.errors import Gone
from broker.domain.ids import Installation, InstanceName, attempt_id, instance_name, job_id
from broker.domain.instance import BootSpec, TrainerImage
from broker.domain.offer import GpuAsk, Offer
from broker.runtime.clock import SystemClock
from providers.common.cloud import Cloud
from providers.common.machine_task import task_of
from providers.common.market_rules import OfferFilter
from providers.registry import CLOUD_CLASSES, ProvidersConfig
from providers.skypilot.api_client import SkyApi
from providers.skypilot.config import SkyConfig
from providers.skypilot.launcher import SkyLauncher
from providers.skypilot.server import user_of
from tests.clouds.scenarios.scene import IMAGE, Scene

BARE = Installation("bare")
"""Installation in the names of bare launches; the daemon sweeps only its own."""
QUIET_S = 3.0
"""Seconds without a running `sky.down` after which the server counts as idle."""
FIELDS = ("request_id", "name", "status", "cluster_name", "created_at", "finished_at")
UNFINISHED = frozenset({"PENDING", "WAITING", "RUNNING"})


class Server:
    """The API server that the scene's daemon has started."""

    def __init__(self, scene: Scene) -> None:
        address = json.loads((scene.home / "providers" / "sky" / "server.json").read_text())
        self.installation = Installation((scene.home / "installation").read_text().strip())
        self.config = SkyConfig(url=f"http://127.0.0.1:{address['port']}", token=address["token"])

    @asynccontextmanager
    async def api(self) -> AsyncIterator[SkyApi]:
        api = SkyApi(str(self.config.url), token=self.config.token, user=user_of(self.installation))
        try:
            yield api
        finally:
            await api.close()

    async def requests(self) -> list[dict[str, Any]]:
        """Return all requests that the server ever received."""
        query = [("all_status", "true"), *(("fields", name) for name in FIELDS)]
        async with self.api() as api:
            return list(await api._call("GET", "/api/status", query=query))


async def request_s(scene: Scene, name: InstanceName) -> float:
    """Return the seconds of the launch of `name`, by the server's own record."""
    requests = await Server(scene).requests()
    [launch] = [row for row in requests if row["name"] == "sky.launch" and row["cluster_name"] == name]
    return float(launch["finished_at"]) - float(launch["created_at"])


async def wait_until_idle(scene: Scene) -> None:
    """Wait until SkyPilot has dropped its records of ended machines, which keeps a worker busy for seconds."""
    server, since = Server(scene), time.monotonic()
    while time.monotonic() - since < QUIET_S:
        if any(row["name"] == "sky.down" and row["status"] in UNFINISHED for row in await server.requests()):
            since = time.monotonic()
        await asyncio.sleep(0.5)


async def launch(scene: Scene, name: str, bought: str) -> float:
    """Launch once without the broker; return the seconds. `bought`: id of the offer that the daemon bought."""
    await wait_until_idle(scene)
    server, boot = Server(scene), _boot(scene)
    sky = SkyLauncher(server.config, installation=server.installation, state=scene.home / "bare")
    section = ProvidersConfig.model_validate({name: scene.configuration()["providers"][name]}).rented()[name]
    env, home = scene.environment(), scene.home / "user"
    cloud = CLOUD_CLASSES[name][0](section, installation=BARE, clock=SystemClock(), env=env, home=home)
    instance = instance_name(BARE, attempt_id(job_id(os.urandom(9)), 1))
    try:
        purchase = cloud.purchase(await _offer(cloud, bought), boot)
        task, begun = task_of(boot, docker_run=cloud.docker_run), time.monotonic()
        await sky.launch(instance, purchase, task)
        return time.monotonic() - begun
    finally:
        await _destroy_all(cloud)
        async with server.api() as api:
            await api.purge(instance)
        await cloud.close()
        await sky.close()


def _boot(scene: Scene) -> BootSpec:
    """Return a boot spec like the daemon's. Its attempt does not exist, so the trainer ends after the launch."""
    env = {"GPUBROKER_BLOBS": scene.configuration()["blobs"], "GPUBROKER_INSTALLATION": BARE}
    env |= {"GPUBROKER_ATTEMPT": "a" * 13, "GPUBROKER_SELF_STOP": "none", "GPUBROKER_NOTICES": "off"}
    secret = {"GPUBROKER_ATTEMPT_KEY": "0" * 44, "GPUBROKER_STORE_OPTIONS": "{}"}
    return BootSpec(env=env, secret_env=secret, trainer=TrainerImage(reference=IMAGE))


async def _offer(cloud: Cloud, bought: str) -> Offer:
    """Return the same offer again, or the cheapest offer if it is sold."""
    offer_filter = OfferFilter(GpuAsk())
    await cloud.rows(offer_filter)
    same = [offer for offer in offer_filter.offers if offer.id == bought]
    return min(same or offer_filter.offers, key=lambda offer: offer.usd_per_hour)


async def _destroy_all(cloud: Cloud) -> None:
    for machine in await cloud.list():
        with suppress(Gone):
            await cloud.destroy(machine.handle)
