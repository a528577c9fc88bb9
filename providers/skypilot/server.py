"""SkyPilot's API server as a process of the daemon's: started, adopted, watched, and proven dead.

Launches go on in a server when the daemon ends, so the next daemon adopts it, or lets it finish them and replaces it.
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
import sys
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
from providers.skypilot.server_locks import KILL_S, ServerLocks, kill_all, mark_of
from providers.skypilot.shared import LOCK, PLUGIN, PLUGIN_VERSION, SKY_VERSION, STATE, TOKEN

START_S = 120.0
"""A server that does not answer for so long after its start, or later, is taken away."""
TRIES = 3
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_CONFIG: Mapping[str, Mapping[str, object]] = {"aws": {"remote_identity": "NO_UPLOAD"}}
"""SkyPilot's own configuration; the plugin keeps keys off machines, this says so as well."""


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """What the next daemon needs to know of a server."""

    id: str
    port: int
    keeper: int
    token: str = field(repr=False)
    made_of: str
    """Digest of versions, settings and environment: a server made of others is not adopted."""


def user_of(installation: Installation) -> str:
    """SkyPilot's user id: names of machines and the SSH key depend on it, so it must never change."""
    return hashlib.sha256(installation.encode()).hexdigest()[:8]


class SkyServer:
    """The one private server of a state folder."""

    def __init__(
        self,
        state: Path,
        *,
        installation: Installation,
        port: int,
        env: Mapping[str, str],
        config: Mapping[str, Mapping[str, object]],
        launch_s: float,
    ) -> None:
        """`env`, `config` (SkyPilot's): what it is made of, beside the keys in its home, which may change.
        `launch_s`: what a server that is to be replaced is given to finish its launches.
        """
        self._state, self._port, self._launch_s = state, port, launch_s
        self._user = user_of(installation)
        self._env = dict(env)
        self._config = {name: {**_CONFIG.get(name, {}), **config.get(name, {})} for name in {*_CONFIG, *config}}
        self._starting = asyncio.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._running: RunningServer | None = None
        self._former: RunningServer | None = None
        """An earlier daemon's that lives and is not made of the same."""
        self._api: SkyApi | None = None
        for folder in (state, self.home):
            private_folder(folder)
        self._lives = ServerLocks(state)
        self.adopted_at: float | None = None
        """Monotonic time at which the server of an earlier daemon was found."""
        self._adopt()
        self._plan: tuple[str, int] | None = None if self._running else self._lives.new()

    @property
    def home(self) -> Path:
        return self._state / "home"

    @property
    def id(self) -> str:
        """Of the server that runs, else of the one that would be started now."""
        if self._running is not None:
            return self._running.id
        if self._plan is None:
            self._plan = self._lives.new()
        return self._plan[0]

    @property
    def user(self) -> str:
        return self._user

    @property
    def former(self) -> str | None:
        """Id of an earlier daemon's server that lives and is to be replaced."""
        return self._former.id if self._former is not None else None

    @property
    def started(self) -> bool:
        return self._running is not None

    # ------------------------------------------------------------------------------------------------------- running

    async def ready(self) -> SkyApi:
        """The server's API, started or restarted as needed. Raises OutcomeUnknown when it does not come up."""
        async with self._starting:
            await self._replace()
            if self._running is not None and not await self._answers(START_S):
                await asyncio.to_thread(self._take_away, self._running)
                await self._forget()
            for _ in range(TRIES):
                if self._running is not None:
                    return self.api()
                await asyncio.to_thread(self._lives.reap, self.id)
                await asyncio.to_thread(self._start)
                if not await self._answers(START_S):  # somebody may have taken a port that was free
                    await asyncio.to_thread(self._take_away, self._running)
                    await self._forget()
            raise OutcomeUnknown(f"SkyPilot's API server does not start: see {self._state / 'server.log'}")

    def api(self) -> SkyApi:
        """Of the server that runs, or is to be replaced, without a look at its health."""
        known = self._running or self._former
        if known is None:
            raise OutcomeUnknown("SkyPilot's API server is not running")
        if self._api is None:
            self._api = SkyApi(f"http://127.0.0.1:{known.port}", token=known.token, user=self._user)
        return self._api

    async def _answers(self, patience_s: float) -> bool:
        """Waits for health as long as the keeper lives; False as well for a version that is not ours."""
        deadline = time.monotonic() + patience_s
        while self._running is not None and self._kept(self._running):
            if await self.api().healthy():
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
        """Ends a server that is not made of the same once its launches are through, or have had their time."""
        while (former := self._former) is not None:
            late = self.adopted_at is None or time.monotonic() > self.adopted_at + self._launch_s
            if late or not self._kept(former) or not await self._launches():
                await asyncio.to_thread(self._take_away, former)
                await self._forget()
            else:
                await asyncio.sleep(1.0)

    async def _launches(self) -> bool:
        try:
            return not await self.api().idle()
        except (Failure, ProviderError):
            return False

    def _start(self) -> None:
        server, lock = self._plan or self._lives.new()
        self._plan = None
        running = RunningServer(
            id=server, port=self._port or free_port(), keeper=0, token=secrets.token_urlsafe(24), made_of=""
        )
        self._write_home()
        env = self._environment(running)
        path = self._state / "server.log"
        with path.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "providers.skypilot.server_keeper", str(lock), str(running.port), str(path)],
                env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=(lock,),
            )  # fmt: skip
        os.close(lock)
        known = RunningServer(**asdict(running) | {"keeper": self._child.pid, "made_of": self._made_of(running.id)})
        write_private(self._state / "server.json", json.dumps(asdict(known)).encode())
        self._running = known

    def _write_home(self) -> None:
        config, plugins = self.home / ".sky" / "config.yaml", self._state / "plugins.yaml"
        write_private(config, yaml.safe_dump(self._config).encode())
        write_private(plugins, yaml.safe_dump({"plugins": [{"class": PLUGIN}]}).encode())

    def _environment(self, running: RunningServer) -> dict[str, str]:
        kept = {name: os.environ[name] for name in (*_KEPT, *_PROXIES) if name in os.environ}
        packages = str(Path(__file__).parents[2])
        return kept | {
            "HOME": str(self.home),
            "SKY_RUNTIME_DIR": str(self.home),
            "PYTHONPATH": packages,
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(running.port),
            "SKYPILOT_SERVER_PLUGINS_CONFIG": str(self._state / "plugins.yaml"),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_USER_ID": self._user,
            "SKYPILOT_USER": "gpubroker",
            "AWS_DEFAULT_REGION": "us-east-1",  # without any, boto3 does not even say who the account is
            "SPT_NOENV": "1",  # setproctitle would write over the environment, and so over the mark
            LOCK: running.id,
            STATE: str(self._state),
            TOKEN: running.token,
            **self._env,
        }

    # -------------------------------------------------------------------------------------------------------- adopting

    def _adopt(self) -> None:
        """Takes over the server of an earlier daemon if it lives and is made of the same; else `ready` replaces it."""
        with suppress(FileNotFoundError, ValueError, TypeError):
            known = RunningServer(**json.loads((self._state / "server.json").read_bytes()))
            if self._lives.free(known.id):
                return
            self.adopted_at = time.monotonic()
            if hmac.compare_digest(known.made_of, self._made_of(known.id)):
                self._running = known
            else:
                self._former = known

    def _made_of(self, server: str) -> str:
        """Keyed by the id, so that equal environments, which hold AWS's keys, do not look equal on disk."""
        parts = [SKY_VERSION, PLUGIN_VERSION, sys.version, json.dumps([self._env, self._config], sort_keys=True)]
        return hmac.new(server.encode(), "\0".join(parts).encode(), "sha256").hexdigest()

    # ----------------------------------------------------------------------------------------------------------- death

    def dead(self, server: str) -> bool:
        """Whether it is proven that no process of `server` lives or will; for servers of this state folder only."""
        return self._lives.is_proven_dead(server)

    def _take_away(self, running: RunningServer | None) -> None:
        """Ends a server and everything that it started. Raises OutcomeUnknown when something does not go."""
        if running is None:
            return
        if self._kept(running):
            with suppress(ProcessLookupError):
                os.kill(running.keeper, signal.SIGTERM)
            deadline = time.monotonic() + KILL_S
            while self._kept(running) and time.monotonic() < deadline:
                time.sleep(0.05)
        kill_all(running.id)
        if self._child is not None:
            self._child.wait(KILL_S)
            self._child = None

    def _kept(self, running: RunningServer) -> bool:
        """Whether the server's keeper lives; without one it is ending, or has ended."""
        if self._child is not None and self._child.pid == running.keeper:
            return self._child.poll() is None
        return mark_of(running.keeper) == running.id

    async def close(self) -> None:
        """Lets go of the connection; the server goes on with its launches."""
        if self._api is not None:
            await self._api.close()
            self._api = None
        if self._plan is not None:
            self._lives.drop(*self._plan)
            self._plan = None

    async def stop(self) -> None:
        """Ends the server too."""
        async with self._starting:
            if (known := self._running or self._former) is not None:
                await asyncio.to_thread(self._take_away, known)
                await self._forget()
        await self.close()


def free_port() -> int:
    """One that is free together with the second that follows from it."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with socket.create_server(("127.0.0.1", _queue_port(port))):
                return port


def _queue_port(port: int) -> int:
    """`get_queue_manager_port` of `sky/server/requests/queues/mp_queue.py`."""
    return 50000 + (11 + port - 46580) % 10000
