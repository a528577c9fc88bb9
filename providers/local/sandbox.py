"""First process of an isolated machine: `python -m providers.local.sandbox PLAN`, started by unshare(1).

It runs in new mount, PID and IPC namespaces. It builds a root folder that has only the listed paths, starts the agent
without rights, and reaps orphans. When it ends, the kernel kills all processes of the machine.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn, TypedDict

from providers.local import kernel_calls as kernel
from providers.local.confinement import Confinement, run_confined

_DEV_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
              "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"}  # fmt: skip


class SandboxMount(TypedDict):
    """One path of the sandbox."""

    target: str
    source: str | None
    """Path on the host; None: an empty folder, which hides a folder of the host."""
    kind: Literal["read", "write", "device"]


class SandboxPlan(TypedDict):
    """Content of PLAN, a file in the machine's folder, which the sandbox itself does not show."""

    root: str
    """Empty folder of the host, on which the sandbox mounts its root."""
    mounts: list[SandboxMount]
    links: dict[str, str]
    """Symbolic links of the root folder, such as /bin."""
    confinement: Confinement
    has_user_namespace: bool
    argv: list[str]


def main() -> NoReturn:
    plan: SandboxPlan = json.loads(Path(sys.argv[1]).read_text())
    _build(plan)
    if plan["has_user_namespace"]:
        # A further user namespace would give the job capabilities, which are attacks on the kernel's interfaces.
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = os.fork()
    if not agent:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _exec(plan["confinement"], plan["argv"])
    while True:
        pid, status = os.wait()
        if pid == agent:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _exec(confinement: Confinement, argv: Sequence[str]) -> NoReturn:
    try:
        run_confined(confinement, argv)
    except OSError as e:
        print(f"sandbox: {argv[0]}: {e}", file=sys.stderr, flush=True)
        os._exit(127)


def _build(plan: SandboxPlan) -> None:
    """Mount the sandbox's root and enter it. Raises OSError."""
    root = plan["root"]
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    empty = [root]
    _mount_empty(root)
    for mount in plan["mounts"]:
        target = root + mount["target"]
        if mount["source"] is None:
            os.makedirs(target, exist_ok=True)
            _mount_empty(target)
            empty.append(target)
        else:
            _bind(mount["source"], target, mount["kind"])
    for name, link in plan["links"].items():
        os.symlink(link, root + name)
    _mount_system(root)
    for target in reversed(empty):
        kernel.restrict_mount(target, kernel.RDONLY, recursive=False)
    kernel.pivot_root(root)


def _mount_empty(target: str) -> None:
    kernel.mount("tmpfs", target, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")


def _bind(source: str, target: str, kind: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
    if kind != "device":
        kernel.restrict_mount(target, kernel.NOSUID | kernel.NODEV | (kernel.RDONLY if kind == "read" else 0))


def _mount_system(root: str) -> None:
    """Mount /proc of the new PID namespace, and the private parts of /dev."""
    plain = kernel.MS_NOSUID | kernel.MS_NODEV
    for name in ("proc", "dev/shm", "dev/pts", "run", "var"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    kernel.mount("tmpfs", f"{root}/dev/shm", "tmpfs", plain, "mode=1777")
    kernel.mount("devpts", f"{root}/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC,
                 "newinstance,ptmxmode=0666,mode=620")  # fmt: skip
    for name, link in _DEV_LINKS.items():
        os.symlink(link, f"{root}/dev/{name}")
    kernel.mount("proc", f"{root}/proc", "proc", plain | kernel.MS_NOEXEC)


if __name__ == "__main__":
    try:
        main()
    except OSError as e:
        sys.exit(f"sandbox: {e.strerror or e}")
