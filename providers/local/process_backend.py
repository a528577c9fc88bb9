"""Backend whose machines are processes of this host; Linux only.

Each machine is a folder below `root` and a hypervisor process (`providers.local.hypervisor`) that holds its lock.
A machine exists while the flock on `<root>/<name>/lock` is held, or while a process with the machine's mark runs.
The creator takes the lock before it gives the folder its final name, and passes the lock to the hypervisor. The state
of a machine is therefore defined even if its creator dies.
"""

import asyncio
import fcntl
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import ParamSpec, TypeVar

from broker.domain.errors import Gone, NoCapacity, OutcomeUnknown, Rejected
from broker.domain.ids import Installation, InstanceName, attempt_of
from broker.domain.instance import BootSpec, InstanceState, Observed
from broker.domain.job import Handle
from broker.runtime.private_files import is_locked, private_folder
from providers.local.isolation import PLAN, HostSandbox, require_sandbox
from providers.local.machine import Machine
from providers.local.process_marks import (
    INSTANCE,
    INSTANCE_DIR,
    instances_with_processes,
    kill_instance,
    namespace_init,
)

AGENT = (sys.executable, "-P", "-m", "trainer")
HYPERVISOR = (sys.executable, "-P", "-m", "providers.local.hypervisor")
"""Command of the hypervisor. In both commands `-P` keeps files of the working folder from replacing modules."""
_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")
"""Lists of folders. Relative ones would name other folders in the machine's working folder."""
_INHERITED = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", *_PATHS,
    "HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "XDG_CACHE_HOME", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
"""Variables that a machine inherits from the daemon's environment; cloud credentials are not among them."""
P = ParamSpec("P")
T = TypeVar("T")


def _inherited() -> dict[str, str]:
    """Return the variables that a machine inherits, with absolute folders."""
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    for name in env.keys() & set(_PATHS):
        env[name] = os.pathsep.join(os.path.abspath(path) for path in env[name].split(os.pathsep) if path)
    return env


@functools.cache
def has_trainer() -> bool:
    """Return True if the packages of the built-in trainer are installed here. Imports none of them."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers", "accelerate", "peft"))


class ProcessBackend:
    """`MachineBackend` of host processes, with one folder per machine below `root`."""

    def __init__(
        self,
        root: Path,
        *,
        provider: str,
        installation: Installation,
        argv: Sequence[str] = AGENT,
        capacity: int | None = None,
        sandbox: HostSandbox | None = None,
    ) -> None:
        """Create the folder `root`, but no machine.

        `argv`: program of each machine, which tests replace. `capacity`: largest number of machines; None: no limit.
        `sandbox`: builder of isolated machines; None: they are rejected.
        """
        private_folder(root)
        self._root = root.resolve()
        self._provider = provider
        self._installation = installation
        self._argv = tuple(argv)
        self._capacity = capacity
        self._sandbox = sandbox
        self._hosts: list[subprocess.Popen[bytes]] = []

    async def start(self, machine: Machine, boot: BootSpec) -> Handle:
        if boot.env.get("GPUBROKER_BLOBS", "").startswith("memory:"):
            raise Rejected("memory:// cannot be given to another process; use a folder: file:///path")
        if boot.isolation is not None and (reason := await require_sandbox(self._sandbox, self._provider).problem()):
            raise Rejected(f"{self._provider}: jobs cannot be isolated: {reason}")
        return await _to_its_end(self._start, machine, boot)

    async def machines(self) -> Sequence[Observed]:
        return await asyncio.to_thread(self._list)

    async def job(self, name: InstanceName) -> str:
        """Return the job of a machine; empty: it is not known."""
        recorded = await asyncio.to_thread(self._recorded, self._root / name)
        return recorded.job if recorded else ""

    def reach(self, name: InstanceName, command: Sequence[str]) -> Sequence[str]:
        """Return argv that runs `command` next to the agent, in the agent's working folder; empty: a shell.

        The process carries the machine's mark, so it ends with the machine.
        """
        folder = self._root / name
        if not folder.exists():
            raise Gone(f"{name} is absent")
        plain = _inherited()
        env = plain | {INSTANCE: name, INSTANCE_DIR: str(folder), "TERM": os.environ.get("TERM", "xterm")}
        argv = list(command or ("bash", "-i"))
        if not (folder / PLAN).exists():
            return ["env", "-i", "-C", str(folder / "work"), *_settings(env), *argv]
        sandbox = require_sandbox(self._sandbox, self._provider)
        if (init := namespace_init(folder)) is None:
            raise Gone(f"{name} has ended")
        return ["env", "-i", *_settings(sandbox.environment(env, folder)), *sandbox.enter(folder, init, argv)]

    async def destroy(self, name: InstanceName) -> None:
        await _to_its_end(self._destroy, name)

    async def close(self) -> None:
        """Reap ended hypervisors. The machines keep running."""
        self._reap()

    def _start(self, machine: Machine, boot: BootSpec) -> Handle:
        folder = self._root / machine.name
        with self._create_lock():
            if folder.exists():
                return self._machine(folder).handle
            if self._capacity is not None and self._living() >= self._capacity:
                raise NoCapacity(f"{self._provider}: all of its {self._capacity} machines are taken")
            fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=self._root))
            lock = os.open(fresh / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (fresh / "work").mkdir()
            (fresh / "record.json").touch(mode=0o600)
            (fresh / "record.json").write_text(json.dumps(asdict(machine)))
            os.rename(fresh, folder)
        try:
            self._spawn(folder, lock, machine, boot)
        except Rejected:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except OSError as e:
            shutil.rmtree(folder, ignore_errors=True)
            raise NoCapacity(f"{self._provider}: cannot start a process for {machine.name}: {e}") from e
        finally:
            os.close(lock)
        return machine.handle

    def _spawn(self, folder: Path, lock: int, machine: Machine, boot: BootSpec) -> None:
        marks = {INSTANCE: machine.name, INSTANCE_DIR: str(folder)}
        plain = _inherited()
        agent_env = plain | boot.env | boot.secret_env | marks | {"GPUBROKER_WORKDIR": str(folder / "work")}
        argv: Sequence[str] = self._argv
        if boot.isolation is not None:
            sandbox = require_sandbox(self._sandbox, self._provider)
            argv, agent_env = sandbox.enclose(folder, boot.isolation, agent_env, argv)
        plan = {
            "argv": argv, "env": agent_env,
            "lifetime_s": machine.lifetime_s, "notice_s": machine.notice_s,
        }  # fmt: skip
        plan_fd = os.memfd_create("plan")
        try:
            os.write(plan_fd, json.dumps(plan).encode())
            with open(folder / "host.log", "ab") as log:
                self._hosts.append(
                    subprocess.Popen(
                        [*HYPERVISOR, str(folder), str(lock), str(plan_fd)],
                        env=plain | marks, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True, pass_fds=(lock, plan_fd),
                    )
                )  # fmt: skip
        finally:
            os.close(plan_fd)

    def _list(self) -> list[Observed]:
        self._reap()
        states: dict[str, tuple[Machine | None, bool]] = {}
        for folder in self._folders():
            with suppress(FileNotFoundError):  # destroyed during this listing
                states[folder.name] = (self._recorded(folder), is_locked(folder / "lock"))
        # Check processes after locks: in the other order a machine could be listed as GONE before its processes end.
        started = {
            name for name in instances_with_processes(self._root) if attempt_of(self._installation, name) is not None
        }
        observed = []
        for name, (machine, locked) in states.items():
            is_running = locked or name in started
            state = InstanceState.RUNNING if is_running else InstanceState.GONE
            notice_s = _notice_s(self._root / name) if is_running else None
            observed.append(machine.observed(state, notice_s) if machine else self._by_name(name, state))
        return observed + [self._by_name(name, InstanceState.RUNNING) for name in started - states.keys()]

    def _by_name(self, name: str, state: InstanceState) -> Observed:
        """Return the listing of a machine whose record is absent or damaged, so only its name is available."""
        return Observed(handle=Handle(provider=self._provider, id=name, name=InstanceName(name)), state=state)

    def _recorded(self, folder: Path) -> Machine | None:
        """Return the machine's record, or None if a full disk or the job, which has the same user, damaged it."""
        try:
            return self._machine(folder)
        except (ValueError, TypeError):
            return None

    def _destroy(self, name: InstanceName) -> None:
        folder, doomed = self._root / name, self._root / f".gone-{name}-{os.urandom(4).hex()}"
        # Move the folder before killing processes, so that a starting hypervisor finds no folder and exits.
        existed = False
        with suppress(FileNotFoundError):
            os.rename(folder, doomed)
            existed = True
        killed, clean = kill_instance(folder, lambda: is_locked(doomed / "lock"))
        self._reap()
        if not clean:
            raise OutcomeUnknown(f"{name}: its processes do not die; look for them with `ps eww | grep {name}`")
        shutil.rmtree(doomed, ignore_errors=True)
        if not existed and not killed:
            raise Gone(f"{name} is absent")

    @contextmanager
    def _create_lock(self) -> Iterator[None]:
        """Hold the lock for creates, so that brokers with the same state folder create machines one at a time.

        The kernel releases the lock of a broker that dies.
        """
        with open(self._root / ".creating", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._clean_up()
            yield

    def _clean_up(self) -> None:
        """Remove folders of interrupted creates and destroys.

        The lock for creates excludes other creators. Folders whose hypervisor still holds the machine's lock stay.
        """
        for folder in self._root.glob(".new-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self._root.glob(".gone-*"):
            if not is_locked(folder / "lock"):
                shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return [f for f in sorted(self._root.iterdir()) if attempt_of(self._installation, f.name) is not None]

    def _living(self) -> int:
        return sum(observed.state is not InstanceState.GONE for observed in self._list())

    def _machine(self, folder: Path) -> Machine:
        return Machine(**json.loads((folder / "record.json").read_text()))

    def _reap(self) -> None:
        """Reap ended hypervisors of this daemon; init reaps those of earlier daemons."""
        self._hosts = [host for host in self._hosts if host.poll() is None]


async def _to_its_end(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `call` in a thread. A cancelled caller still waits for the end, so that no change happens later."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        work.exception()  # marks the exception as retrieved; the caller receives only the cancellation
        raise


def _settings(env: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in env.items()]


def _notice_s(folder: Path) -> float | None:
    try:
        notice: Mapping[str, float] = json.loads((folder / "notice").read_text())
        return max(0.0, notice["dies_at"] - time.monotonic())
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
