"""Isolation of jobs on the daemon's host: separate namespaces, and a separate uid if the daemon is root.

The tool is unshare(1) of util-linux. Used by the process backend, the admission rule and `doctor`; the rule is
`broker.policy.host_access`. See docs/design/providers.md.
"""

import asyncio
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.domain.errors import Rejected
from broker.domain.instance import HostIsolation
from providers.local import kernel_calls, sandbox_layout
from providers.local.confinement import Confinement
from providers.local.sandbox import SandboxMount, SandboxPlan

JOB_UID = 65533
"""User and group id of jobs of a daemon that runs as root; distributions assign it to no account."""
PLAN = "sandbox.json"
"""File in the folder of an isolated machine."""
_PROBE_S = 60.0
"""Timeout of the test sandbox in seconds."""
_TOOLS = ("unshare", "nsenter")
_HOST_ONLY = ("HOME", "USER", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME")
"""Variables of the daemon's environment that name its user or folders that a sandbox lacks."""
_PROBE = "import trainer.contract.documents"


class HostSandbox:
    """Builder of isolated machines on this host."""

    def __init__(self, *, hidden: Sequence[Path], readable: Sequence[Path] = (), own_uid: bool | None = None) -> None:
        """Keep the settings.

        `hidden`: folders of the daemon; `readable`: folders of models that jobs may read. `own_uid`: True runs jobs
        under JOB_UID, which needs root; False in a user namespace; None: True if this process is root.
        """
        self._hidden = tuple(hidden)
        self._readable = tuple(readable)
        self._is_root = os.geteuid() == 0 if own_uid is None else own_uid
        self._problem: str | None = None

    @property
    def description(self) -> str:
        """Return the isolation that `problem` tests."""
        user = f"user id {JOB_UID}" if self._is_root else "a user namespace without rights"
        return f"{user}, and mount, PID and IPC namespaces by unshare"

    async def problem(self) -> str:
        """Return why this host cannot isolate jobs, in one line; empty: it can. The first call starts a sandbox."""
        if self._problem is None:
            self._problem = await asyncio.to_thread(self._probe)
        return self._problem

    def unreadable(self) -> Path | None:
        """Return a model file that isolated jobs cannot read; None: no such file or user."""
        return sandbox_layout.unreadable(self._readable) if self._is_root else None

    def enclose(
        self, folder: Path, isolation: HostIsolation, env: Mapping[str, str], argv: Sequence[str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return command and environment that run the agent `argv` of the machine `folder` in a sandbox.

        Raises Rejected if the blob store is absent.
        """
        mounts = sandbox_layout.store_mounts(isolation, env)
        enclosed = {**self.environment(env, folder)}
        if mounts:
            enclosed["GPUBROKER_BLOBS"] = Path(sandbox_layout.STORE).as_uri()
        plan = self._plan(folder, argv)
        plan["mounts"] = sandbox_layout.in_order([*mounts, *plan["mounts"]])
        return self._start(folder, plan), enclosed

    def environment(self, env: Mapping[str, str], folder: Path) -> dict[str, str]:
        """Return the environment of a program in the sandbox of the machine `folder`."""
        plain = {name: value for name, value in env.items() if name not in _HOST_ONLY}
        packages = ":".join(sandbox_layout.package_parents())
        return plain | {"HOME": str(folder / "work"), "USER": "job", "PYTHONPATH": packages}

    def enter(self, folder: Path, init: int, command: Sequence[str]) -> list[str]:
        """Return argv that runs `command` in the sandbox of a machine. `init`: PID of its first process."""
        plan: SandboxPlan = json.loads((folder / PLAN).read_text())
        user = ["--user", "--preserve-credentials"] if plan["has_user_namespace"] else []
        return [
            "nsenter", "--target", str(init), *user, "--mount", "--pid", "--ipc", "--",
            sys.executable, "-P", "-m", "providers.local.confinement", json.dumps(plan["confinement"]), *command,
        ]  # fmt: skip

    def _plan(self, folder: Path, argv: Sequence[str]) -> SandboxPlan:
        """Create the folders of a sandbox, and return its plan without a blob store."""
        work, scratch = folder / "work", folder / "tmp"
        (folder / "root").mkdir()
        for path in (work, scratch):
            path.mkdir(exist_ok=True)
            if self._is_root:
                os.chown(path, JOB_UID, JOB_UID)
        mounts = [*self._common(), sandbox_layout.writable(work)]
        mounts.append({"target": "/tmp", "source": str(scratch), "kind": "write"})
        confinement = Confinement(
            uid=JOB_UID if self._is_root else None,
            groups=sandbox_layout.gpu_groups() if self._is_root else [],
            folder=str(work),
            link_folders=[str(work), "/tmp", "/dev/shm"],
        )
        return SandboxPlan(
            root=str(folder / "root"),
            mounts=sandbox_layout.in_order(mounts),
            links=sandbox_layout.root_links(),
            confinement=confinement,
            has_user_namespace=not self._is_root,
            argv=list(argv),
        )

    def _common(self) -> list[SandboxMount]:
        return sandbox_layout.common_mounts(self._hidden, self._readable)

    def _start(self, folder: Path, plan: SandboxPlan) -> list[str]:
        """Write the plan and return the command that starts the sandbox."""
        (folder / PLAN).touch(mode=0o600)
        (folder / PLAN).write_text(json.dumps(plan))
        user = [] if self._is_root else ["--user", "--map-root-user"]
        return [
            "unshare", *user, "--mount", "--pid", "--ipc", "--fork", "--kill-child=KILL", "--",
            sys.executable, "-P", "-m", "providers.local.sandbox", str(folder / PLAN),
        ]  # fmt: skip

    def _probe(self) -> str:
        """Start a sandbox that imports the trainer's contract, and return why it fails."""
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            return f"{missing[0]} is not installed; install util-linux"
        if kernel_calls.landlock_version() < kernel_calls.LANDLOCK_NEEDED:
            return "the kernel's Landlock is too old or off; use Linux 5.19 or newer with lsm=landlock"
        if self._is_root and _umask() & 0o055:
            return f"the daemon's umask {_umask():04o} hides its files from jobs; start it with umask 022"
        with tempfile.TemporaryDirectory(prefix="gpubroker-probe-") as name:
            folder = Path(os.path.realpath(name))
            command = self._start(folder, self._plan(folder, [sys.executable, "-P", "-c", _PROBE]))
            env = self.environment({"PATH": os.environ.get("PATH", os.defpath)}, folder)
            try:
                outcome = subprocess.run(
                    command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as e:
                return f"a sandbox cannot start: {e}"
        if outcome.returncode == 0:
            return ""
        lines = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"a sandbox cannot start: {lines[-1] if lines else outcome.returncode}; {_FIX}"


_FIX = (
    "run the daemon as root, or allow unprivileged user namespaces and an unmasked /proc, which containers and "
    "ProtectKernelTunables and ProtectKernelLogs of systemd forbid"
)


@functools.cache
def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0


def require_sandbox(sandbox: HostSandbox | None, provider: str) -> HostSandbox:
    """Return the sandbox. Raises Rejected if this process was set up without one."""
    if sandbox is None:
        raise Rejected(f"{provider}: this process cannot isolate jobs; create the machine by the daemon")
    return sandbox
