"""`Launcher` through SkyPilot: one pinned launch a name, carried out by an API server that the daemon may outlive."""

import asyncio
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import yaml
from pydantic import Field

from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected
from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import Liveness
from broker.runtime.private_files import private_folder
from providers.common.cloud import Purchase
from providers.common.machine_task import MachineTask
from providers.skypilot import ssh as sky_ssh
from providers.skypilot import task_status as sky_job
from providers.skypilot.api_client import Failure, SkyApi
from providers.skypilot.catalog import SkyCatalog
from providers.skypilot.errors import meaning
from providers.skypilot.key_copies import KeyCopies, ReadKeys, words_of
from providers.skypilot.server import SkyServer, user_of
from trainer.contract.base import Config

log = logging.getLogger(__name__)
LAUNCH_BYTES = 400 * 1024**2
"""Memory of one launch in SkyPilot's worker, measured."""
TOOLS = ("rsync", "ssh")
"""Programs that SkyPilot reaches machines with."""
SETTLE_S = 10.0
"""A request that was sent and not answered, by a daemon that died or gave up, is in a server's list by then."""
CANCEL_S = 20.0
FORGET_AGAIN_S = 60.0
"""A machine is told to go every second until it has gone; SkyPilot needs a process each time it is told to forget."""


class SkyConfig(Config):
    """SkyPilot, through which rented machines are launched."""

    url: str | None = None
    """A SkyPilot API server of a team (0.14.1, with gpubroker's plugin); without it the daemon runs one of its own."""
    token: Annotated[str, Field(repr=False)] = ""
    """What the plugin of the server at `url` asks for (its `GPUBROKER_SKY_TOKEN`)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of the daemon's own server, on loopback; 0 takes a free one."""
    warm: bool = False
    """Start that server with the daemon: 0.5 GB more, and a first launch that is about 10 s sooner."""
    launches: Annotated[int, Field(ge=1)] = 4
    """At once; fewer while memory is short, since each takes about 0.4 GB."""
    launch_deadline_s: Annotated[float, Field(gt=0)] = 900.0
    """A launch that takes longer, counted from its start, is cancelled; what it left is looked up and destroyed."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """More environment for the daemon's own server, e.g. another endpoint of a cloud."""
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """More of SkyPilot's own configuration for that server, e.g. `{"aws": {"use_internal_ips": true}}`."""


class SkyLauncher:
    """See `providers.common.cloud.Launcher`."""

    def __init__(
        self,
        config: SkyConfig,
        *,
        installation: Installation,
        state: Path,
        keys: ReadKeys = dict,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`keys`, `env`: the clouds' credentials for the daemon's own server, see `providers.common.credentials`.
        `keys` is
        read before each launch.
        """
        self._config, self._state = config, state
        self._user = user_of(installation)
        self._secrets = [config.token, *(word for value in (env or {}).values() for word in words_of(value.encode()))]
        self._remote = None if config.url is None else SkyApi(config.url, token=config.token, user=self._user)
        self._server = None if self._remote is not None else SkyServer(
            state, installation=installation, port=config.port, env={**(env or {}), **config.env},
            config=config.config, launch_s=config.launch_deadline_s,
        )  # fmt: skip
        self._catalog = SkyCatalog(self._server.home) if self._server else None
        self._keys = KeyCopies(self._server.home, keys) if self._server else None
        self._slots = asyncio.Semaphore(config.launches)
        self._under_way: Counter[str] = Counter()
        self._unanswered: dict[str, float] = {}
        """When a request for a name was left without an answer: the server may be about to take it in."""
        self._running = 0
        self._warming: asyncio.Task[None] | None = None
        self._used = False
        """By launches, or by looking at those of a former daemon; a sweep does neither."""
        self._secrets_of: dict[str, Sequence[str]] = {}
        """Of the account and of a task, by name, for those that were launched by this process."""
        self._forgetting: dict[str, asyncio.Task[None]] = {}
        self._forgotten: dict[str, float] = {}
        self._one_forgotten = asyncio.Lock()

    @property
    def id(self) -> str:
        return self._server.id if self._server is not None else f"url.{self._config.url}"

    async def warm(self) -> None:
        """Starts the server, which takes about 10 s, before the first launch needs it. Raises as `launch`."""
        await self._api()

    def warm_up(self) -> None:
        """In the background, where the configuration wants it; the first launch tries again what fails."""
        if self._config.warm:
            self._warming = asyncio.create_task(self._warmed())

    async def _warmed(self) -> None:
        try:
            await self.warm()
        except (Failure, ProviderError) as e:
            log.warning("SkyPilot's API server was not started before its first launch: %s", e)

    # ------------------------------------------------------------------------------------------------------ launching

    async def launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        """Whoever is cancelled here leaves the launch to the server, where `liveness` finds it and `cancel` ends it:
        a daemon that is restarted picks up the machine.
        """
        self._under_way[name] += 1
        try:
            rows = self._catalog.holding(purchase.catalog) if self._catalog else nullcontext()
            async with rows, self._slot():
                deadline = time.monotonic() + self._config.launch_deadline_s
                await self._carry_out(name, purchase, task, deadline)
        finally:
            self._under_way -= Counter({name: 1})

    async def _carry_out(self, name: InstanceName, purchase: Purchase, task: MachineTask, deadline: float) -> None:
        secrets: list[str] = []
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                api = await self._api()
                secrets += self._secrets_with(task)
                self._secrets_of[name] = secrets
                rows = purchase.catalog if self._server is None else {}
                with self._sending(name):
                    request = await api.launch(_yaml(name, purchase, task), name, purchase.config, purchase.pin, rows)
                await api.result(request)
        except Failure as e:
            raise meaning(e, purchase.cloud, secrets) from None
        except TimeoutError:
            await self.cancel(name)
            after = f"{self._config.launch_deadline_s:g} s"
            raise OutcomeUnknown(
                f"{purchase.cloud}: {name} was not up after {after}; the launch was cancelled"
            ) from None

    def _secrets_with(self, task: MachineTask) -> list[str]:
        known = [*self._secrets, *(self._keys.words if self._keys else ())]
        return [*known, *task.secrets.values(), *(task.registry_login or ())[2:]]

    @contextmanager
    def _sending(self, name: InstanceName) -> Iterator[None]:
        try:
            yield
        except Failure:
            raise
        except BaseException:
            now = time.monotonic()
            self._unanswered = {n: at for n, at in self._unanswered.items() if now < at + SETTLE_S} | {name: now}
            raise

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """One of the launches at once; a second one also waits for memory."""
        async with self._slots:
            while self._running and psutil.virtual_memory().available < 2 * LAUNCH_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1

    async def _api(self) -> SkyApi:
        """A server that answers, is of our version and strips keys. Raises Rejected, OutcomeUnknown."""
        self._used = True
        if self._server is not None:
            missing = [tool for tool in TOOLS if shutil.which(tool, path=self._config.env.get("PATH")) is None]
            if missing:
                raise Rejected(f"SkyPilot needs {' and '.join(missing)} on this machine: install it, e.g. by apt-get")
            assert self._keys is not None
            api = await self._server.ready()
            await asyncio.to_thread(self._keys.refresh)
        else:
            assert self._remote is not None
            api = self._remote
            if not await api.healthy():
                raise OutcomeUnknown(f"SkyPilot's API server at {self._config.url} does not answer")
        await api.require_plugin()
        return api

    # ---------------------------------------------------------------------------------------------------------- proof

    async def liveness(self, launched_by: str, name: InstanceName) -> Liveness:
        self._used = True
        if self._under_way[name]:
            return Liveness.ALIVE
        former = self._server is not None and launched_by == self._server.former
        if launched_by != self.id and not former:
            return await self._of_another(launched_by)
        if time.monotonic() < self._unanswered.get(name, float("-inf")) + SETTLE_S:
            return Liveness.UNKNOWN
        if self._server is None:
            assert self._remote is not None
            return await self._listed(self._remote, name)
        if not former and not self._server.started:
            return Liveness.DEAD  # it has never begun anything, and only this process can start it
        found = await self._listed(self._server.api(), name)
        if found is Liveness.UNKNOWN and await asyncio.to_thread(self._server.dead, launched_by):
            return Liveness.DEAD
        taken_over = self._server.adopted_at
        if found is Liveness.DEAD and taken_over is not None and time.monotonic() < taken_over + SETTLE_S:
            return Liveness.UNKNOWN
        return found

    async def _of_another(self, launched_by: str) -> Liveness:
        if self._server is not None and await asyncio.to_thread(self._server.dead, launched_by):
            return Liveness.DEAD
        return Liveness.UNKNOWN

    async def _listed(self, api: SkyApi, name: InstanceName) -> Liveness:
        """What the server says: a launch is over when no request is unfinished and no worker acts on the name."""
        try:
            if await api.unfinished(name) or await api.launching(name):
                return Liveness.ALIVE
        except (Failure, ProviderError):
            return Liveness.UNKNOWN
        return Liveness.DEAD

    async def started(self, name: InstanceName) -> bool | str:
        jobs = await asyncio.gather(*(sky_job.look(ssh) for ssh in await self._ways(name, tty=False)))
        said = [job is not None and sky_job.verdict(job, self._secrets_of.get(name)) for job in jobs]
        return next((one for one in said if isinstance(one, str)), all(said))

    # -------------------------------------------------------------------------------------------------- housekeeping

    async def cancel(self, name: InstanceName) -> None:
        with suppress(Failure, ProviderError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                api = self._live()
                if api is not None and (requests := await api.unfinished(name)):
                    await api.cancel(requests)

    async def forget(self, name: InstanceName) -> None:
        """In the background, one at a time; SkyPilot's `down` acts on machines of this very name only."""
        self._secrets_of.pop(name, None)
        now = time.monotonic()
        self._forgotten = {n: at for n, at in self._forgotten.items() if now < at + FORGET_AGAIN_S}
        if name not in self._forgetting and name not in self._forgotten and self._live() is not None:
            task = self._forgetting[name] = asyncio.create_task(self._purge(name))
            task.add_done_callback(lambda _: self._forgetting.pop(name, None))

    async def _purge(self, name: InstanceName) -> None:
        async with self._one_forgotten:
            with suppress(Failure, ProviderError, TimeoutError):
                async with asyncio.timeout(self._config.launch_deadline_s):
                    api = self._live()
                    if api is not None and not self._under_way[name] and not await api.unfinished(name):
                        await self._down(api, name)

    async def _down(self, api: SkyApi, name: InstanceName) -> None:
        try:
            await api.purge(name)
        except Failure as e:
            if e.kind != "ClusterDoesNotExist":
                raise
        self._forgotten[name] = time.monotonic()

    def _live(self) -> SkyApi | None:
        if self._server is None:
            return self._remote
        return self._server.api() if self._server.started or self._server.former is not None else None

    async def ssh(self, name: InstanceName, *, tty: bool) -> Sequence[str]:
        """To the first machine; raises as `_ways`."""
        return (await self._ways(name, tty=tty))[0]

    async def _ways(self, name: InstanceName, *, tty: bool) -> list[list[str]]:
        """Ssh to each machine. Raises Rejected when none of that name was launched here, OutcomeUnknown when it cannot
        be learned.
        """
        api = self._live()
        try:
            way = await api.way_in(name) if api is not None else {}
        except Failure as e:
            raise OutcomeUnknown(f"{name}: {e}") from None
        if not way:
            raise Rejected(f"{name}: SkyPilot has no address of this machine; it is gone, or not up yet")
        key = self._key_file(str(way["key"]))
        return [sky_ssh.argv({**way, **node}, key, tty=tty) for node in way["nodes"]]

    def _key_file(self, key: str) -> Path:
        """The key that opens all machines of this installation, for ssh to read."""
        path = self._state / "ssh-key"
        if not path.exists() or path.read_text() != key:
            private_folder(path.parent)
            fresh = path.with_suffix(f".{os.getpid()}")
            with os.fdopen(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                file.write(key)
            os.replace(fresh, path)
        return path

    async def close(self) -> None:
        """A server with launches under way goes on, for the next daemon to adopt; an idle one ends with this one.

        One that was not used here is left alone: it may be a living daemon's, beside which a sweep runs.
        """
        if self._warming is not None:
            await self._warming  # a server that is just being started would stay
        idle = await self._idle()
        for task in [*self._forgetting.values()]:
            task.cancel()
        await asyncio.gather(*self._forgetting.values(), return_exceptions=True)
        if self._remote is not None:
            await self._remote.close()
        if self._server is not None:
            await (self._server.stop() if idle else self._server.close())

    async def _idle(self) -> bool:
        api = self._live()
        if self._server is None or not self._used or api is None or any(self._under_way.values()):
            return False
        try:
            async with asyncio.timeout(CANCEL_S):
                return await api.idle()
        except (Failure, ProviderError, TimeoutError):
            return False

    async def stop(self) -> None:
        """Ends the daemon's own server as well, with whatever it launches."""
        await self.close()
        if self._server is not None:
            await self._server.stop()


def _yaml(name: InstanceName, purchase: Purchase, task: MachineTask) -> str:
    """The task as SkyPilot reads it: pinned to one thing in one place, without autostop, storage or files."""
    place = "/".join(part for part in (purchase.cloud, purchase.region, purchase.zone) if part)
    resources: dict[str, object] = {
        "infra": place,
        "instance_type": purchase.instance_type,
        "use_spot": purchase.use_spot,
        "disk_size": purchase.disk_gb,
    }
    if task.image:
        resources["image_id"] = task.image
    if purchase.network_tier:
        resources["network_tier"] = purchase.network_tier
    secrets = dict(task.secrets)
    if task.registry_login:
        names = ("SKYPILOT_DOCKER_SERVER", "SKYPILOT_DOCKER_USERNAME", "SKYPILOT_DOCKER_PASSWORD")
        secrets |= dict(zip(names, task.registry_login, strict=True))
    document = {
        "name": name,
        "num_nodes": task.nodes,
        "resources": resources,
        "envs": dict(task.env),
        "secrets": secrets,
        "setup": task.setup,
        "run": task.run,
    }
    return yaml.safe_dump(document, sort_keys=False)
