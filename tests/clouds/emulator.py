"""Lambda, RunPod and Vast on one loopback port; their paths are disjoint."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType

from aiohttp import web

from tests.clouds.bill import Bill
from tests.clouds.control import Control
from tests.clouds.faults import Faults
from tests.clouds.lambda_api import LambdaApi
from tests.clouds.machine import Machines, PaperMachines
from tests.clouds.runpod_api import RunPodApi
from tests.clouds.runpod_rest import RunPodRest
from tests.clouds.state import World
from tests.clouds.vast_api import VastApi

MAX_BODY = 2**24


class Clouds:
    """`async with Clouds() as clouds:` emulates Lambda, RunPod and Vast at `clouds.url` until the end of the block."""

    def __init__(
        self, machines: Machines | None = None, *, api_key: str = "test-key", port: int = 0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:  # fmt: skip
        self.world = World(machines or PaperMachines(), api_key=api_key, now=now)
        self.faults = Faults(self.world)
        self.lambdas = LambdaApi(self.world, self.faults)
        self.runpod = RunPodApi(self.world, self.faults)
        self.runpod_rest = RunPodRest(self.world, self.faults, self.runpod)
        self.vast = VastApi(self.world, self.faults)
        self.control = Control(self.world, self.faults, self.lambdas, self.runpod, self.runpod_rest, self.vast)
        self.url = ""
        self._port = port
        self._runner: web.AppRunner | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """Return variables that send the clouds' own SDKs, SkyPilot's plugin and our providers here."""
        return {
            "RUNPOD_API_BASE_URL": self.url, "VAST_URL": self.url, "GPUBROKER_LAMBDA_ENDPOINT": self.url,
        }  # fmt: skip

    @property
    def violations(self) -> list[str]:
        """Return calls, arguments and fields that the real APIs lack; a passing test has none."""
        return self.world.violations

    def bill(self) -> Bill:
        """Return the clouds' charges up to now."""
        return Bill(self.world.events, self.world.now())

    async def __aenter__(self) -> "Clouds":
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self.runpod_rest.retirement])
        for part in (self.lambdas, self.runpod, self.runpod_rest, self.vast, self.control):
            app.add_routes(part.routes())
        app.router.add_route("*", "/api/v0/{rest:.*}", self.vast.unknown)
        app.router.add_route("*", "/v2/{rest:.*}", self.runpod_rest.unknown)
        app.router.add_route("*", "/{rest:.*}", self.lambdas.unknown)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.faults.disarm()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.world.close()
