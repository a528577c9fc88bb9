"""SkyPilot's API server as a process of the daemon's: started, adopted, watched, and proven dead.

Every server has an id and a file named after it. Its keeper and each of its processes hold a shared flock on that file,
so an exclusive one proves that all of them are gone, in any PID namespace; what is then written into the file keeps
late-comers from beginning. Launches go on in a server when the daemon ends, so the next daemon adopts it.
"""

import asyncio
import fcntl
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

import psutil
import yaml

from broker.domain.errors import OutcomeUnknown
from broker.domain.ids import Installation
from providers.sky_api import SkyApi
from providers.sky_facts import DEAD, LAUNCHING, LOCK, PLUGIN, PLUGIN_VERSION, SERVERS, SKY_VERSION, STATE, TOKEN

START_S = 120.0
"""A server that does not answer for so long after its start, or later, is taken away."""
KILL_S = 15.0
TRIES = 3
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_CONFIG: Mapping[str, Mapping[str, object]] = {"aws": {"remote_identity": "NO_UPLOAD"}}
"""SkyPilot's own configuration; the plugin keeps keys off machines, this says so as well."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """What the next daemon needs to know of a server."""

    id: str
    port: int
    keeper: int
    token: str = field(repr=False)
    made_of: str
    """Digest of versions, credentials and environment: a server made of others is not adopted."""


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
        files: Mapping[str, bytes],
        env: Mapping[str, str],
        config: Mapping[str, Mapping[str, object]],
    ) -> None:
        """`files`: credentials by path relative to the server's home; `env`, `config` (SkyPilot's): beside them."""
        self._state, self._port = state, port
        self._user = user_of(installation)
        self._files, self._env = dict(files), dict(env)
        self._config = {name: {**_CONFIG.get(name, {}), **config.get(name, {})} for name in {*_CONFIG, *config}}
        self._starting = asyncio.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._running: Running | None = None
        self._api: SkyApi | None = None
        for folder in (state, state / SERVERS, state / LAUNCHING, self.home):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.adopted_at: float | None = None
        """Monotonic time at which a server of an earlier daemon was taken over."""
        self._adopt()
        self._plan: tuple[str, int] | None = None if self._running else self._new_id()

    @property
    def home(self) -> Path:
        return self._state / "home"

    @property
    def id(self) -> str:
        """Of the server that runs, else of the one that would be started now."""
        if self._running is not None:
            return self._running.id
        if self._plan is None:
            self._plan = self._new_id()
        return self._plan[0]

    @property
    def user(self) -> str:
        return self._user

    @property
    def started(self) -> bool:
        return self._running is not None

    # ------------------------------------------------------------------------------------------------------- running

    async def ready(self) -> SkyApi:
        """The server's API, started or restarted as needed. Raises OutcomeUnknown when it does not come up."""
        async with self._starting:
            if self._running is not None and not await self._answers(START_S):
                await asyncio.to_thread(self._take_away, self._running)
                await self._forget()
            for _ in range(TRIES):
                if self._running is not None:
                    return self.api()
                await asyncio.to_thread(self._reap_others)
                await asyncio.to_thread(self._start)
                if not await self._answers(START_S):  # somebody may have taken a port that was free
                    await asyncio.to_thread(self._take_away, self._running)
                    await self._forget()
            raise OutcomeUnknown(f"SkyPilot's API server does not start: see {self._state / 'server.log'}")

    def api(self) -> SkyApi:
        """Of the server that runs, without a look at its health."""
        if self._running is None:
            raise OutcomeUnknown("SkyPilot's API server is not running")
        if self._api is None:
            self._api = SkyApi(f"http://127.0.0.1:{self._running.port}", token=self._running.token, user=self._user)
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
        self._running, self._api, self.adopted_at = None, None, None

    def _start(self) -> None:
        server, lock = self._plan or self._new_id()
        self._plan = None
        running = Running(
            id=server, port=self._port or _free_port(), keeper=0, token=secrets.token_urlsafe(24), made_of=""
        )
        self._write_home()
        env = self._environment(running)
        with (self._state / "server.log").open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "providers.sky_host", str(lock), str(running.port)],
                env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=(lock,),
            )  # fmt: skip
        os.close(lock)
        known = Running(**asdict(running) | {"keeper": self._child.pid, "made_of": self._made_of(running.id)})
        _write(self._state / "server.json", json.dumps(asdict(known)).encode())
        self._running = known

    def _write_home(self) -> None:
        config, plugins = self.home / ".sky" / "config.yaml", self._state / "plugins.yaml"
        _write(config, yaml.safe_dump(self._config).encode())
        _write(plugins, yaml.safe_dump({"plugins": [{"class": PLUGIN}]}).encode())
        for name, content in self._files.items():
            _write(self.home / name, content)

    def _environment(self, running: Running) -> dict[str, str]:
        kept = {name: os.environ[name] for name in (*_KEPT, *_PROXIES) if name in os.environ}
        packages = str(Path(__file__).parents[1])
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
        """Takes over the server of an earlier daemon if it lives and is made of the same; else it is for `ready`."""
        with suppress(FileNotFoundError, ValueError, TypeError):
            known = Running(**json.loads((self._state / "server.json").read_bytes()))
            if not self._free(known.id) and hmac.compare_digest(known.made_of, self._made_of(known.id)):
                self._running, self.adopted_at = known, time.monotonic()

    def _made_of(self, server: str) -> str:
        """Keyed by the id, so that equal credentials do not look equal on disk."""
        parts = [SKY_VERSION, PLUGIN_VERSION, sys.version, json.dumps([self._env, self._config], sort_keys=True)]
        parts += [f"{name}={content.hex()}" for name, content in sorted(self._files.items())]
        return hmac.new(server.encode(), "\0".join(parts).encode(), "sha256").hexdigest()

    # ----------------------------------------------------------------------------------------------------------- death

    def dead(self, server: str) -> bool:
        """Whether it is proven that no process of `server` lives or will; for servers of this state folder only."""
        if not server or "/" in server:
            return False
        try:
            lock = os.open(self._state / SERVERS / server, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            os.pwrite(lock, DEAD, 0)
            os.fsync(lock)
        finally:
            os.close(lock)
        return not _marked(server)

    def _free(self, server: str) -> bool:
        """Whether nobody holds the server's file any more."""
        try:
            with (self._state / SERVERS / server).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        return True

    def _take_away(self, running: Running | None) -> None:
        """Ends a server and everything that it started. Raises OutcomeUnknown when something does not go."""
        if running is None:
            return
        if self._kept(running):
            with suppress(ProcessLookupError):
                os.kill(running.keeper, signal.SIGTERM)
            deadline = time.monotonic() + KILL_S
            while self._kept(running) and time.monotonic() < deadline:
                time.sleep(0.05)
        _kill_all(running.id)
        if self._child is not None:
            self._child.wait(KILL_S)
            self._child = None

    def _kept(self, running: Running) -> bool:
        """Whether the server's keeper lives; without one it is ending, or has ended."""
        if self._child is not None and self._child.pid == running.keeper:
            return self._child.poll() is None
        return _mark_of(running.keeper) == running.id

    def _reap_others(self) -> None:
        """What other servers left behind finishes launches and holds ports: it ends before a new one starts."""
        for path in (self._state / SERVERS).iterdir():
            if path.name != self.id and path.read_bytes() != DEAD:
                _kill_all(path.name)
                self.dead(path.name)

    def _new_id(self) -> tuple[str, int]:
        """An id and its file under a shared lock of ours, until a keeper has taken that over."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        server = f"{socket.gethostname()}.{boot}.{os.urandom(4).hex()}"
        lock = os.open(self._state / SERVERS / server, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        return server, lock

    async def close(self) -> None:
        """Lets go of the connection; the server goes on with its launches."""
        if self._api is not None:
            await self._api.close()
            self._api = None
        if self._plan is not None:
            os.close(self._plan[1])
            self._plan = None

    async def stop(self) -> None:
        """Ends the server too."""
        async with self._starting:
            if self._running is not None:
                await asyncio.to_thread(self._take_away, self._running)
                await self._forget()
        await self.close()


def _mark_of(pid: int) -> str | None:
    """The server that a process belongs to; None for one that is gone, or is nobody's we may look at."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    mark = f"{LOCK}=".encode()
    return next((line[len(mark) :].decode() for line in raw.split(b"\0") if line.startswith(mark)), None)


def _marked(server: str) -> list[int]:
    return [pid for pid in psutil.pids() if _mark_of(pid) == server]


def _kill_all(server: str) -> None:
    """SIGKILLs every process that carries the server's mark, until none is left. Raises OutcomeUnknown."""
    deadline = time.monotonic() + KILL_S
    while victims := [pid for pid in _marked(server) if _lives(pid)]:
        if time.monotonic() > deadline:
            raise OutcomeUnknown(f"processes of SkyPilot's API server do not end: {victims}; kill them")
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _free_port() -> int:
    """One that is free together with the second that follows from it."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with socket.create_server(("127.0.0.1", _queue_port(port))):
                return port


def _queue_port(port: int) -> int:
    """`get_queue_manager_port` of `sky/server/requests/queues/mp_queue.py`."""
    return 50000 + (11 + port - 46580) % 10000


def _write(path: Path, content: bytes) -> None:
    """Readable by the owner alone, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    with os.fdopen(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    os.replace(fresh, path)
