"""`Launcher` that sends one pinned launch per instance name to a SkyPilot API server.

The server keeps launching after the daemon has ended.
"""

import asyncio
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
import yaml

from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected
from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import Liveness
from broker.runtime.private_files import private_folder, write_private
from providers.common.cloud import Purchase
from providers.common.machine_task import MachineTask
from providers.skypilot import task_status
from providers.skypilot.api_client import Failure, SkyApi
from providers.skypilot.catalog import SkyCatalog
from providers.skypilot.config import SkyConfig
from providers.skypilot.errors import error_for_failure
from providers.skypilot.key_copies import KeyCopies, ReadKeys, possible_secrets
from providers.skypilot.plugin import ssh as sky_ssh
from providers.skypilot.server import SkyServer, user_of

log = logging.getLogger(__name__)
LAUNCH_BYTES = 400 * 1024**2
"""Measured memory of one launch in SkyPilot's worker, in bytes."""
TOOLS = ("rsync", "ssh")
"""Programs that SkyPilot needs to reach machines."""
SETTLE_S = 10.0
"""Seconds within which a server lists a request whose caller died or was cancelled before the answer."""
CANCEL_S = 20.0
"""Timeout of a cancel, or of a check for running launches, in seconds."""
PURGE_INTERVAL_S = 60.0
"""Seconds between two purges of one name.

The broker repeats a destroy every second until the machine is absent, and each purge starts a process of SkyPilot.
"""


def _own_server(config: SkyConfig, installation: Installation, state: Path, env: Mapping[str, str]) -> SkyServer:
    """Return the daemon's own SkyPilot server, which is not started yet."""
    return SkyServer(
        state, python=config.interpreter(state.parent), installation=installation, port=config.port,
        env={**env, **config.env}, config=config.config, launch_s=config.launch_deadline_s,
    )  # fmt: skip


class SkyLauncher:
    """Launcher on SkyPilot; see `providers.common.cloud.Launcher`."""

    def __init__(
        self,
        config: SkyConfig,
        *,
        installation: Installation,
        state: Path,
        keys: ReadKeys = dict,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the launcher without a connection.

        `state`: `<home>/providers/sky`, next to which SkyPilot's environment is looked for.
        `keys`, `env`: the clouds' credentials for the daemon's own server, see `providers.common.credentials`.
        The launcher calls `keys` before each launch.
        """
        self._config, self._state = config, state
        self._user = user_of(installation)
        words = (word for value in (env or {}).values() for word in possible_secrets(value.encode()))
        self._secrets = [config.token, *words]
        self._remote = None if config.url is None else SkyApi(config.url, token=config.token, user=self._user)
        self._server = None if self._remote is not None else _own_server(config, installation, state, env or {})
        self._catalog = SkyCatalog(self._server.home) if self._server else None
        self._keys = KeyCopies(self._server.home, keys) if self._server else None
        self._slots = asyncio.Semaphore(config.launches)
        self._under_way: Counter[str] = Counter()
        """Number of running `launch` calls by name."""
        self._unanswered: dict[str, float] = {}
        """Monotonic time of the last request per name that got no answer; the server may still accept it."""
        self._running = 0
        """Number of launches that hold a slot."""
        self._warming: asyncio.Task[None] | None = None
        self._is_used = False
        """True after a launch, or after a check of a former daemon's launch; always False in a sweep."""
        self._secrets_of: dict[str, Sequence[str]] = {}
        """Secrets of account and task, by the name of each machine that this process launched."""
        self._forgetting: dict[str, asyncio.Task[None]] = {}
        """Running purge by name."""
        self._forgotten: dict[str, float] = {}
        """Monotonic time of the latest purge by name."""
        self._purge_lock = asyncio.Lock()

    @property
    def id(self) -> str:
        return self._server.id if self._server is not None else f"url.{self._config.url}"

    async def warm(self) -> None:
        """Start the server before the first launch needs it; this takes about 10 s. Raises the errors of `launch`."""
        await self._api()

    def warm_up(self) -> None:
        """Start the server in the background if `warm` is set. After a failure the first launch tries again."""
        if self._config.warm:
            self._warming = asyncio.create_task(self._try_warm())

    async def _try_warm(self) -> None:
        try:
            await self.warm()
        except (Failure, ProviderError) as e:
            log.warning("SkyPilot's API server was not started before its first launch: %s", e)

    # ------------------------------------------------------------------------------------------------------ launching

    async def launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        """Launch the machine and wait for the result.

        A cancelled call leaves the launch to the server: `liveness` reports it and `cancel` ends it.
        A restarted daemon therefore takes over the machine.
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
                secrets += self._known_secrets(task)
                self._secrets_of[name] = secrets
                rows = purchase.catalog if self._server is None else {}
                with self._sending(name):
                    request = await api.launch(
                        _task_yaml(name, purchase, task), name, purchase.config, purchase.pin, rows
                    )
                await api.result(request)
        except Failure as e:
            raise error_for_failure(e, purchase.cloud, secrets) from None
        except TimeoutError:
            await self.cancel(name)
            after = f"{self._config.launch_deadline_s:g} s"
            raise OutcomeUnknown(
                f"{purchase.cloud}: {name} was not up after {after}; the launch was cancelled"
            ) from None

    def _known_secrets(self, task: MachineTask) -> list[str]:
        secrets = [*self._secrets, *(self._keys.secrets if self._keys else ())]
        return [*secrets, *task.secrets.values(), *(task.registry_login or ())[2:]]

    @contextmanager
    def _sending(self, name: InstanceName) -> Iterator[None]:
        """Record the time of a request for the name that ends without an answer of the server."""
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
        """Hold one of the launch slots. While another launch holds a slot, first wait for free memory."""
        async with self._slots:
            while self._running and psutil.virtual_memory().available < 2 * LAUNCH_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1

    async def _api(self) -> SkyApi:
        """Return a server that answers, has the pinned version and runs the plugin. Raises Rejected, OutcomeUnknown."""
        self._is_used = True
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
            if not await api.is_healthy():
                raise OutcomeUnknown(f"SkyPilot's API server at {self._config.url} does not answer")
        await api.require_plugin()
        return api

    # ---------------------------------------------------------------------------------------------------------- proof

    async def liveness(self, launched_by: str, name: InstanceName) -> Liveness:
        self._is_used = True
        if self._under_way[name]:
            return Liveness.ALIVE
        former = self._server is not None and launched_by == self._server.former
        if launched_by != self.id and not former:
            return await self._liveness_on_other_server(launched_by)
        if time.monotonic() < self._unanswered.get(name, float("-inf")) + SETTLE_S:
            return Liveness.UNKNOWN
        if self._server is None:
            assert self._remote is not None
            return await self._liveness_by_server(self._remote, name)
        if not former and not self._server.is_running:
            return Liveness.DEAD  # The server has launched nothing yet, and only this process can start it.
        liveness = await self._liveness_by_server(self._server.api(), name)
        if liveness is Liveness.UNKNOWN and await asyncio.to_thread(self._server.is_proven_dead, launched_by):
            return Liveness.DEAD
        adopted_at = self._server.adopted_at
        if liveness is Liveness.DEAD and adopted_at is not None and time.monotonic() < adopted_at + SETTLE_S:
            return Liveness.UNKNOWN
        return liveness

    async def _liveness_on_other_server(self, launched_by: str) -> Liveness:
        if self._server is not None and await asyncio.to_thread(self._server.is_proven_dead, launched_by):
            return Liveness.DEAD
        return Liveness.UNKNOWN

    async def _liveness_by_server(self, api: SkyApi, name: InstanceName) -> Liveness:
        """Return ALIVE while the server has an unfinished request for the name or a worker acts on it."""
        try:
            if await api.unfinished(name) or await api.is_launching(name):
                return Liveness.ALIVE
        except (Failure, ProviderError):
            return Liveness.UNKNOWN
        return Liveness.DEAD

    async def started(self, name: InstanceName) -> bool | str:
        commands = await self._ssh_commands(name, tty=False)
        try:
            jobs = await asyncio.gather(*map(task_status.read_job, commands))
        except task_status.HostKeyChanged as e:
            return str(e)
        results = [job is not None and task_status.start_result(job, self._secrets_of.get(name)) for job in jobs]
        return next((result for result in results if isinstance(result, str)), all(results))

    # -------------------------------------------------------------------------------------------------- housekeeping

    async def cancel(self, name: InstanceName) -> None:
        with suppress(Failure, ProviderError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                api = self._live_api()
                if api is not None and (requests := await api.unfinished(name)):
                    await api.cancel(requests)

    async def forget(self, name: InstanceName) -> None:
        """Purge the name at SkyPilot in the background, one name at a time.

        SkyPilot's `down` acts only on machines with exactly this name.
        """
        self._secrets_of.pop(name, None)
        sky_ssh.known_hosts_file(self._state, name).unlink(missing_ok=True)
        now = time.monotonic()
        self._forgotten = {n: at for n, at in self._forgotten.items() if now < at + PURGE_INTERVAL_S}
        if name not in self._forgetting and name not in self._forgotten and self._live_api() is not None:
            task = self._forgetting[name] = asyncio.create_task(self._purge(name))
            task.add_done_callback(lambda _: self._forgetting.pop(name, None))

    async def _purge(self, name: InstanceName) -> None:
        async with self._purge_lock:
            with suppress(Failure, ProviderError, TimeoutError):
                async with asyncio.timeout(self._config.launch_deadline_s):
                    api = self._live_api()
                    if api is not None and not self._under_way[name] and not await api.unfinished(name):
                        await self._down(api, name)

    async def _down(self, api: SkyApi, name: InstanceName) -> None:
        try:
            await api.purge(name)
        except Failure as e:
            if e.kind != "ClusterDoesNotExist":
                raise
        self._forgotten[name] = time.monotonic()

    def _live_api(self) -> SkyApi | None:
        if self._server is None:
            return self._remote
        return self._server.api() if self._server.is_running or self._server.former is not None else None

    async def ssh(self, name: InstanceName, *, tty: bool) -> Sequence[str]:
        """Return the ssh command for the first machine. Raises the errors of `_ssh_commands`."""
        return (await self._ssh_commands(name, tty=tty))[0]

    async def _ssh_commands(self, name: InstanceName, *, tty: bool) -> list[list[str]]:
        """Return the ssh command for each machine.

        Raises Rejected if SkyPilot has no machine of that name, and OutcomeUnknown if SkyPilot cannot be asked.
        """
        api = self._live_api()
        try:
            login = await api.ssh_login(name) if api is not None else {}
        except Failure as e:
            raise OutcomeUnknown(f"{name}: {e}") from None
        if not login:
            raise Rejected(f"{name}: SkyPilot has no address of this machine; it is gone, or not up yet")
        key, known_hosts = self._key_file(str(login["key"])), self._known_hosts(name, str(login.get("known_hosts", "")))
        return [sky_ssh.argv({**login, **node}, key, known_hosts, tty=tty) for node in login["nodes"]]

    def _known_hosts(self, name: InstanceName, pinned: str) -> Path:
        """Return the file with the host keys of an attempt's machines.

        `pinned`: the keys that SkyPilot's server saw when it delivered the task; the server may run on another host.
        """
        path = sky_ssh.known_hosts_file(self._state, name)
        if pinned and not path.exists():
            write_private(path, pinned.encode())
        return path

    def _key_file(self, key: str) -> Path:
        """Write the SSH key of this installation's machines to a file, unless the file has it, and return the path."""
        path = self._state / "ssh-key"
        if not path.exists() or path.read_text() != key:
            private_folder(path.parent)
            fresh = path.with_suffix(f".{os.getpid()}")
            with os.fdopen(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                file.write(key)
            os.replace(fresh, path)
        return path

    async def close(self) -> None:
        """Close the connection and stop the daemon's own server if it is idle.

        A server with unfinished launches keeps running, and the next daemon adopts it. A server that this process did
        not use keeps running too: a sweep may run next to a living daemon.
        """
        if self._warming is not None:
            await self._warming  # Wait for a starting server, which would otherwise keep running.
        may_stop = await self._may_stop_server()
        for task in [*self._forgetting.values()]:
            task.cancel()
        await asyncio.gather(*self._forgetting.values(), return_exceptions=True)
        if self._remote is not None:
            await self._remote.close()
        if self._server is not None:
            await (self._server.stop() if may_stop else self._server.close())

    async def _may_stop_server(self) -> bool:
        api = self._live_api()
        if self._server is None or not self._is_used or api is None or any(self._under_way.values()):
            return False
        try:
            async with asyncio.timeout(CANCEL_S):
                return await api.is_idle()
        except (Failure, ProviderError, TimeoutError):
            return False

    async def stop(self) -> None:
        """Close the launcher and stop the daemon's own server with all its launches."""
        await self.close()
        if self._server is not None:
            await self._server.stop()


def _task_yaml(name: InstanceName, purchase: Purchase, task: MachineTask) -> str:
    """Return the task as YAML for SkyPilot: one instance type in one zone, without autostop, storage or files."""
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
