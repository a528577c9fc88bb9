"""The daemon's own SkyPilot API server: starts, adopts, watches and ends it, and proves that it is dead.

A server keeps launching after the daemon has ended. The next daemon adopts the server, or replaces it after its
launches have ended.
"""

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from broker.domain.errors import OutcomeUnknown, ProviderError
from broker.domain.ids import Installation
from broker.runtime.private_files import private_folder, write_private
from providers.skypilot.api_client import Failure, SkyApi
from providers.skypilot.environment import identity, require_plugin
from providers.skypilot.plugin.shared import LOCK, PLUGIN, PLUGIN_VERSION, SKY_VERSION, STATE, SUPERVISOR, TOKEN
from providers.skypilot.server_locks import KILL_S, ServerLocks, kill_all, server_of

START_S = 120.0
"""Seconds after which a server that does not answer is killed, at its start and later."""
TRIES = 3
"""Number of starts before an error."""
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_CONFIG: Mapping[str, Mapping[str, object]] = {"aws": {"remote_identity": "NO_UPLOAD"}}
"""SkyPilot's default configuration. The plugin keeps keys off machines; this setting forbids the upload as well."""


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """Record of a server, from which the next daemon adopts it."""

    id: str
    port: int
    keeper: int
    """Process id of the server's supervisor; 0 before the supervisor has started."""
    token: str = field(repr=False)
    fingerprint: str
    """Digest of versions, settings and environment. A server with another fingerprint is not adopted."""


def user_of(installation: Installation) -> str:
    """Return SkyPilot's user id. It must never change, because machine names and the SSH key depend on it."""
    return hashlib.sha256(installation.encode()).hexdigest()[:8]


class SkyServer:
    """The only private server of a state folder."""

    def __init__(
        self,
        state: Path,
        *,
        python: Path,
        installation: Installation,
        port: int,
        env: Mapping[str, str],
        config: Mapping[str, Mapping[str, object]],
        launch_s: float,
    ) -> None:
        """Adopt the server of an earlier daemon if it runs. Does not start a server.

        `python`: interpreter of SkyPilot's environment.
        `env`, `config` (SkyPilot's): parts of the fingerprint. The keys in the server's home are not part of it.
        `launch_s`: seconds in which a server that must be replaced may finish its launches.
        """
        self._state, self._python, self._port, self._launch_s = state, python, port, launch_s
        self._user = user_of(installation)
        self._env = dict(env)
        self._config = {name: {**_CONFIG.get(name, {}), **config.get(name, {})} for name in {*_CONFIG, *config}}
        self._starting = asyncio.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._running: RunningServer | None = None
        self._former: RunningServer | None = None
        """Running server of an earlier daemon with another fingerprint; None: there is none."""
        self._api: SkyApi | None = None
        for folder in (state, self.home):
            private_folder(folder)
        self._locks = ServerLocks(state)
        self.adopted_at: float | None = None
        """Monotonic time at which the server of an earlier daemon was adopted; None: this daemon started it."""
        self._adopt()
        self._reserved: tuple[str, int] | None = None if self._running else self._locks.new()

    @property
    def home(self) -> Path:
        return self._state / "home"

    @property
    def id(self) -> str:
        """Id of the running server, or of the next one to be started."""
        if self._running is not None:
            return self._running.id
        if self._reserved is None:
            self._reserved = self._locks.new()
        return self._reserved[0]

    @property
    def user(self) -> str:
        return self._user

    @property
    def former(self) -> str | None:
        """Id of an earlier daemon's running server that must be replaced; None: there is none."""
        return self._former.id if self._former is not None else None

    @property
    def is_running(self) -> bool:
        return self._running is not None

    # ------------------------------------------------------------------------------------------------------- running

    async def ready(self) -> SkyApi:
        """Start or restart the server if needed and return its API. Raises OutcomeUnknown if it does not start."""
        async with self._starting:
            await self._replace()
            if self._running is not None and not await self._wait_until_healthy(START_S):
                await asyncio.to_thread(self._terminate, self._running)
                await self._forget()
            for _ in range(TRIES):
                if self._running is not None:
                    return self.api()
                await asyncio.to_thread(self._locks.reap, self.id)
                await asyncio.to_thread(self._start)
                if not await self._wait_until_healthy(
                    START_S
                ):  # Another program may have taken the port during the start.
                    await asyncio.to_thread(self._terminate, self._running)
                    await self._forget()
            raise OutcomeUnknown(f"SkyPilot's API server does not start: see {self._state / 'server.log'}")

    def api(self) -> SkyApi:
        """Return the client of the running server, or of the one to be replaced, without a health check."""
        server_record = self._running or self._former
        if server_record is None:
            raise OutcomeUnknown("SkyPilot's API server is not running")
        if self._api is None:
            self._api = SkyApi(f"http://127.0.0.1:{server_record.port}", token=server_record.token, user=self._user)
        return self._api

    async def _wait_until_healthy(self, timeout_s: float) -> bool:
        """Wait until the server is healthy and return True; return False after `timeout_s` or if its supervisor ended.

        Raises Rejected for another version of SkyPilot.
        """
        deadline = time.monotonic() + timeout_s
        while self._running is not None and self._supervisor_runs(self._running):
            if await self.api().is_healthy():
                return True
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
        return False

    async def _forget(self) -> None:
        if self._api is not None:
            await self._api.close()
        self._running, self._former, self._api, self.adopted_at = None, None, None, None

    async def _replace(self) -> None:
        """End a server with another fingerprint after its launches have ended, or after `launch_s`."""
        while (former := self._former) is not None:
            is_late = self.adopted_at is None or time.monotonic() > self.adopted_at + self._launch_s
            if is_late or not self._supervisor_runs(former) or not await self._is_launching():
                await asyncio.to_thread(self._terminate, former)
                await self._forget()
            else:
                await asyncio.sleep(1.0)

    async def _is_launching(self) -> bool:
        try:
            return not await self.api().is_idle()
        except (Failure, ProviderError):
            return False

    def _start(self) -> None:
        require_plugin(self._python)
        server, lock = self._reserved or self._locks.new()
        self._reserved = None
        running = RunningServer(
            id=server, port=self._port or free_port(), keeper=0, token=secrets.token_urlsafe(24), fingerprint=""
        )
        self._write_home()
        env = self._environment(running)
        path = self._state / "server.log"
        with path.open("ab") as log:
            self._child = subprocess.Popen(
                [str(self._python), "-m", SUPERVISOR, str(lock), str(running.port), str(path)],
                env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=(lock,),
            )  # fmt: skip
        os.close(lock)
        server_record = RunningServer(
            **asdict(running) | {"keeper": self._child.pid, "fingerprint": self._fingerprint(running.id)}
        )
        write_private(self._state / "server.json", json.dumps(asdict(server_record)).encode())
        self._running = server_record

    def _write_home(self) -> None:
        config, plugins = self.home / ".sky" / "config.yaml", self._state / "plugins.yaml"
        write_private(config, yaml.safe_dump(self._config).encode())
        write_private(plugins, yaml.safe_dump({"plugins": [{"class": PLUGIN}]}).encode())

    def _environment(self, running: RunningServer) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in (*_INHERITED, *_PROXIES) if name in os.environ}
        env = inherited | {
            "HOME": str(self.home),
            "SKY_RUNTIME_DIR": str(self.home),
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(running.port),
            "SKYPILOT_SERVER_PLUGINS_CONFIG": str(self._state / "plugins.yaml"),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_USER_ID": self._user,
            "SKYPILOT_USER": "gpubroker",
            "AWS_DEFAULT_REGION": "us-east-1",  # Without a region boto3 cannot even identify the account.
            "SPT_NOENV": "1",  # Keep setproctitle from overwriting the environment, which contains the server's id.
            LOCK: running.id,
            STATE: str(self._state),
            TOKEN: running.token,
            **self._env,
        }
        return env | {"PATH": f"{self._python.parent}:{env.get('PATH', os.defpath)}"}

    # -------------------------------------------------------------------------------------------------------- adopting

    def _adopt(self) -> None:
        """Adopt the server of an earlier daemon if it runs and has the same fingerprint.

        `ready` replaces a running server with another fingerprint.
        """
        with suppress(FileNotFoundError, ValueError, TypeError):
            server_record = RunningServer(**json.loads((self._state / "server.json").read_bytes()))
            if self._locks.is_unlocked(server_record.id):
                return
            self.adopted_at = time.monotonic()
            if hmac.compare_digest(server_record.fingerprint, self._fingerprint(server_record.id)):
                self._running = server_record
            else:
                self._former = server_record

    def _fingerprint(self, server: str) -> str:
        """Return the fingerprint for a server.

        The server's id is the key of the digest. Without the key the file on disk would show that two environments,
        which contain AWS's keys, are equal.
        """
        settings = json.dumps([self._env, self._config], sort_keys=True)
        parts = [SKY_VERSION, PLUGIN_VERSION, identity(self._python), settings]
        return hmac.new(server.encode(), "\0".join(parts).encode(), "sha256").hexdigest()

    # ----------------------------------------------------------------------------------------------------------- death

    def is_proven_dead(self, server: str) -> bool:
        """Return True if no process of `server` runs or will ever run; see `ServerLocks.is_proven_dead`."""
        return self._locks.is_proven_dead(server)

    def _terminate(self, running: RunningServer | None) -> None:
        """End a server and all processes that it started. Raises OutcomeUnknown if a process does not end."""
        if running is None:
            return
        if self._supervisor_runs(running):
            with suppress(ProcessLookupError):
                os.kill(running.keeper, signal.SIGTERM)
            deadline = time.monotonic() + KILL_S
            while self._supervisor_runs(running) and time.monotonic() < deadline:
                time.sleep(0.05)
        kill_all(running.id)
        if self._child is not None:
            self._child.wait(KILL_S)
            self._child = None

    def _supervisor_runs(self, running: RunningServer) -> bool:
        """Return True if the server's supervisor runs. Without a supervisor the server is ending or has ended."""
        if self._child is not None and self._child.pid == running.keeper:
            return self._child.poll() is None
        return server_of(running.keeper) == running.id

    async def close(self) -> None:
        """Close the connection; the server continues its launches."""
        if self._api is not None:
            await self._api.close()
            self._api = None
        if self._reserved is not None:
            self._locks.drop(*self._reserved)
            self._reserved = None

    async def stop(self) -> None:
        """End the server and close the connection."""
        async with self._starting:
            if (server_record := self._running or self._former) is not None:
                await asyncio.to_thread(self._terminate, server_record)
                await self._forget()
        await self.close()


def free_port() -> int:
    """Return a free port whose queue port (`_queue_port`) is free too."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with socket.create_server(("127.0.0.1", _queue_port(port))):
                return port


def _queue_port(port: int) -> int:
    """Return SkyPilot's second port, as `get_queue_manager_port` of `sky/server/requests/queues/mp_queue.py`."""
    return 50000 + (11 + port - 46580) % 10000
