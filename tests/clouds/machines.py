"""Real machines behind the emulated clouds: sshd in its own namespaces over the baked root file system.

`NamespaceMachines.open` first proves that a machine cannot see this host, and boots no machine otherwise.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clouds.bake import BASE, CHECKOUT, ENCLOSE, bake, cache_folder
from tests.clouds.forward import Link, Switchboard, splice
from tests.clouds.imds import Imds
from tests.clouds.isolation import NotIsolated, prove
from tests.clouds.lan import Lan
from tests.clouds.machine import MachineSpec

FILES = Path(__file__).with_name("root")
INIT = "/usr/local/lib/emulated/init.py"
EVERYWHERE = {
    INIT: "init.py",
    "/usr/local/bin/apt": "apt_get.py", "/usr/local/bin/apt-get": "apt_get.py",
    "/usr/local/sbin/halt": "power.sh", "/usr/local/sbin/poweroff": "power.sh", "/usr/local/sbin/shutdown": "power.sh",
}  # fmt: skip
WITH_DOCKER = {"/usr/bin/docker": "docker_shim.py"}
TRAINER = "/srv/venv/lib/python3.11/site-packages/trainer"
UBUNTU = 1000
"""User id of `ubuntu`, who may install another trainer into /srv/venv."""
IMDS = ("169.254.169.254", 80)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_S = 120.0
SSH = 22


class NoNamespaces(RuntimeError):
    """Raised if this host cannot create namespaces, with the reason. Suites then skip."""


class NamespaceMachine:
    """One machine. `died` is called once on the switchboard's loop, with True if it shut itself down."""

    def __init__(
        self, spec: MachineSpec, folder: Path, forwards: Mapping[int, tuple[str, int]], switchboard: Switchboard,
        lan: Lan | None,
    ) -> None:  # fmt: skip
        self.spec, self._lan = spec, lan
        self.root: Path | None = folder / "disk" / "up"
        self.died: Callable[[bool], None] | None = None
        self.halted = False
        self._folder, self._forwards, self._switchboard = folder, forwards, switchboard
        self._imds = Imds(spec.imds) if spec.imds is not None else None
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._listening: asyncio.Task[None] | None = None
        self._life = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._up = asyncio.Event()
        self._startup: int | None = None
        self._failure = ""
        self._dead = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._dead.is_set()

    async def ready(self) -> None:
        await self._switchboard.call(self._ready())

    async def run(self, *argv: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run a command as root; return exit status and output. Raises ConnectionError if the machine is dead."""
        assert self._link is not None
        return await self._switchboard.call(self._link.execute(argv, env or {}))

    async def kill(self) -> None:
        await self._switchboard.call(self._kill())

    # What follows runs on the switchboard's loop.

    async def start(self, layers: Sequence[Path]) -> None:
        self._link = Link(self._enclose(layers), self._arrived)
        await self._link.send({"settings": self._settings()})
        assert self._process is not None
        self._keep(asyncio.create_task(self._watch(self._process)))
        listener = socket.create_server((self.spec.ip, self.spec.ssh_port), backlog=128)
        listener.setblocking(False)
        self._listening = asyncio.create_task(self._listen(listener))

    def _enclose(self, layers: Sequence[Path]) -> socket.socket:
        """Start process 1; return the host's end of its control socket."""
        disk = self._folder / "disk"
        for path in (disk, disk / "up", disk / "work"):
            path.mkdir(parents=True)
            os.chown(path, BASE, BASE)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life_r, self._life = os.pipe()
        config = {
            "lower": [str(layer) for layer in layers], "upper": str(disk), "base": BASE, "network": "own",
            "argv": ["/usr/bin/python3", "-I", INIT, str(theirs.fileno())],
            "env": {**self.spec.env, "PATH": PATH, "LANG": "C.UTF-8"},
            "life": life_r, "keep": [theirs.fileno()],
        }  # fmt: skip
        with theirs, open(self._folder / "enclose.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", ENCLOSE, json.dumps(config)], pass_fds=[life_r, theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env={},
            )  # fmt: skip
        os.close(life_r)
        return ours

    def _settings(self) -> Mapping[str, Any]:
        listen = [("127.0.0.1", port) for port in self._forwards]
        listen += [IMDS] if self._imds else []
        return {
            "hostname": f"machine-{self.spec.id[:12]}", "user": self.spec.user, "keys": self.spec.public_keys,
            "address": self.spec.inner_ip, "imds": IMDS[0], "listen": listen,
            "startup": self.spec.startup, "env": dict(self.spec.env), "host_key": self.spec.host_key,
        }  # fmt: skip

    def _arrived(self, message: Mapping[str, Any], sock: socket.socket | None) -> None:
        if "up" in message:
            self._attach()
            self._up.set()
        elif "startup" in message:
            self._startup = message["startup"]
        elif "failed" in message:
            self._failure = message["failed"]
        elif "halt" in message:
            self.halted = True
        elif sock is not None:
            self._keep(asyncio.create_task(self._relay(message.get("address"), message.get("port"), sock)))

    def _attach(self) -> None:
        assert self._process is not None
        try:
            if self._lan is not None:
                self._lan.attach(self._process.pid, self.spec.inner_ip)
        except OSError as e:
            self._failure = str(e)
            self._end_life()

    async def _relay(self, address: str | None, port: int | None, sock: socket.socket) -> None:
        """Relay a connection from inside the machine. The machine names the port, so the port is looked up, never
        trusted.
        """
        if self._imds is not None and (address, port) == IMDS:
            return await self._imds.serve(sock)
        target = self._forwards.get(port or 0)
        with sock, contextlib.suppress(OSError):
            if target is None:
                return
            outward = socket.socket()
            outward.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(outward, target)
            except OSError:
                outward.close()
                return
            await splice(sock.dup(), outward)

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                client, _ = await loop.sock_accept(listener)
                self._keep(asyncio.create_task(self._serve_ssh(client)))

    async def _serve_ssh(self, client: socket.socket) -> None:
        assert self._link is not None
        try:
            inward = await self._link.connect(SSH)
        except OSError:
            return client.close()
        await splice(client, inward)

    async def _ready(self) -> None:
        async with asyncio.timeout(BOOT_S):
            while not (self._up.is_set() and self._startup is not None and await self._answers()):
                if self._dead.is_set():
                    raise RuntimeError(f"machine {self.spec.id} died before it was ready: {self.reason()}")
                await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        assert self._link is not None
        try:
            sock = await self._link.connect(SSH)
        except OSError:
            return False
        with sock:
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                return (await asyncio.get_running_loop().sock_recv(sock, 4)) == b"SSH-"
        return False

    def reason(self) -> str:
        log = (self._folder / "enclose.log").read_text(errors="replace").strip()
        return self._failure or log or "killed"

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        pidfd = os.pidfd_open(process.pid)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        process.wait()
        self._end_life()
        assert self._link is not None
        await self._link.drain()
        for task in (self._listening, *self._tasks):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self._dead.set()
        if self.died is not None:
            self.died(self.halted)

    def _end_life(self) -> None:
        """Close the pipe. enclose.py then kills process 1, and the kernel everything in its namespace."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    async def _kill(self) -> None:
        self._end_life()
        if self._process is not None:
            await self._dead.wait()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _put(layer: Path, files: Mapping[str, str]) -> None:
    for inside, name in files.items():
        target = layer / inside.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FILES / name, target)


def _own(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, BASE, BASE)
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o111 else 0o644)


def _lock(path: Path, mode: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def _drop_leftovers(runs: Path) -> None:
    """Delete the folders of processes that died without closing; no process holds their lock."""
    for folder in runs.glob("*/"):
        with contextlib.suppress(BlockingIOError):
            fd = _lock(folder / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


class NamespaceMachines:
    """`tests.clouds.machine.Machines` in namespaces; created by `open` only."""

    def __init__(self, root_fs: Path, forwards: Mapping[int, int | tuple[str, int]]) -> None:
        """Prepare. `forwards`: target of ports on 127.0.0.1 inside: a port of this host's loopback, or an address."""
        self.forwards = {port: ("127.0.0.1", to) if isinstance(to, int) else to for port, to in forwards.items()}
        self.booted: list[NamespaceMachine] = []
        self._root_fs = root_fs
        runs = cache_folder() / "run"
        runs.mkdir(parents=True, exist_ok=True)
        _drop_leftovers(runs)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=runs))
        self._folder.chmod(0o755)
        self._locks = [_lock(self._folder / "lock", fcntl.LOCK_EX)]
        self._locks.append(_lock(root_fs.parent.with_suffix(".lock"), fcntl.LOCK_SH))
        self._switchboard = Switchboard()
        self._proven = False
        self._lan: Lan | None = None
        self.no_lan = ""
        """Reason why machines cannot reach each other; empty: they can."""
        try:
            self._lan = Lan()
        except OSError as e:
            self.no_lan = str(e)
        self._layer, self._docker = self._folder / "layer", self._folder / "docker"
        _put(self._layer, EVERYWHERE)
        package = self._layer / TRAINER.lstrip("/")
        shutil.copytree(CHECKOUT / "trainer", package, ignore=shutil.ignore_patterns("__pycache__"))
        _put(self._docker, WITH_DOCKER)
        _own(self._layer)
        _own(self._docker)
        for path in (package.parent, package, *package.rglob("*")):
            os.chown(path, BASE + UBUNTU, BASE + UBUNTU)

    @classmethod
    async def open(
        cls, root_fs: Path | None = None, *, forwards: Mapping[int, int | tuple[str, int]] | None = None
    ) -> "NamespaceMachines":
        """Bake if needed, then prove that machines are isolated.

        Raises NoBake, NoNamespaces and NotIsolated; the first two say why this host cannot do it.
        """
        if os.geteuid() != 0:
            raise NoNamespaces("machines need root: their user ids are mapped by this process")
        if root_fs is None:
            root_fs = await asyncio.to_thread(bake)
        machines = cls(root_fs, forwards or {})
        try:
            await machines._prove()
        except BaseException:
            await machines.close()
            raise
        return machines

    async def _prove(self) -> None:
        spec = MachineSpec(id="proof", user="root", public_keys=(), ip="127.0.0.1", ssh_port=0)
        machine = await self._start(spec)
        try:
            await machine.ready()
        except (RuntimeError, TimeoutError) as e:
            raise NoNamespaces(f"no machine boots here: {e}") from None
        await prove(machine)
        await machine.kill()
        self._proven = True

    async def boot(self, spec: MachineSpec) -> NamespaceMachine:
        if not self._proven:
            raise NotIsolated("no machine boots before isolation is proven: use NamespaceMachines.open")
        return await self._start(spec)

    async def _start(self, spec: MachineSpec) -> NamespaceMachine:
        folder = Path(tempfile.mkdtemp(prefix=f"{spec.id[:16]}-", dir=self._folder))
        machine = NamespaceMachine(spec, folder, self.forwards, self._switchboard, self._lan)
        self.booted.append(machine)
        layers = [self._docker, self._layer, self._root_fs] if spec.user == "ubuntu" else [self._layer, self._root_fs]
        await self._switchboard.call(machine.start(layers))
        return machine

    async def close(self) -> None:
        for machine in self.booted:
            await machine.kill()
        await self._switchboard.close()
        if self._lan is not None:
            self._lan.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        for fd in self._locks:
            os.close(fd)
